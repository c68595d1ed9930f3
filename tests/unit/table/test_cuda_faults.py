"""A GPU shard that runs out of something: nothing has changed, and the same call succeeds later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from shoal.errors import OutOfDeviceMemory, TableFull
from shoal.kernels import index
from shoal.rules.admission import Admission
from shoal.rules.expiry import Expiry
from shoal.rules.initializers import Constant
from shoal.rules.optimizers import SGD, Adagrad
from shoal.table.cpu.shard import CpuShard
from shoal.table.cuda import admission
from shoal.table.cuda import memory as device_memory
from shoal.table.cuda.calls import ShardTables, forms_of
from shoal.table.cuda.memory import DeviceMemory
from shoal.table.cuda.shard import CudaShard
from shoal.table.shard import Shard, StepContext
from shoal.table.spec import Segment, TableSpec
from shoal.table.values import RowChunk
from support.id_groups import groups_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []

SPECS = (
    TableSpec(
        name="a",
        segments=(Segment(dim=3, optimizer=SGD(lr=1.0), initializer=Constant(0.5)),),
        expiry=Expiry(ttl_s=10),
    ),
    TableSpec(
        name="b",
        segments=(Segment(dim=2, optimizer=Adagrad(lr=1.0), initializer=Constant(0.25)),),
        expiry=Expiry(ttl_s=10),
    ),
)
MANY = range(100, 410)  # more than first chunks and first indexes take
BOTH = groups_of((0, MANY), (1, MANY), device=DEVICE)
OF_HELP = r"{}.*: got .*(bytes|more|wanted).*; allowed: .*free.*row budget"


def ones(width: int) -> torch.Tensor:
    return torch.ones(len(MANY), width, device=DEVICE)


def chunk_of(shard: Shard) -> RowChunk:
    count = torch.arange(len(MANY))
    return RowChunk(
        "a", torch.tensor(MANY), torch.ones(len(MANY), 3), torch.empty(len(MANY), 0), *[count] * 3
    )


VERBS: dict[str, Callable[[Shard], object]] = {
    "find_or_init": lambda shard: shard.find_or_init(BOTH, ctx=StepContext(event_time_s=3)).end(),
    "apply_ids": lambda shard: shard.apply_ids(BOTH, (ones(3), ones(2)), ctx=StepContext()),
    "assign": lambda shard: shard.assign(BOTH, (ones(3), ones(2)), ctx=StepContext()),
    "load": lambda shard: shard.load(0, chunk_of(shard)),
}


class Failing:
    """A function that fails on some of its calls, counted from 0."""

    def __init__(self, inner: Callable[..., Any], fails: Callable[[int], bool]) -> None:
        self.inner = inner
        self.fails = fails
        self.calls = 0

    def __call__(self, *arguments: Any) -> Any:
        self.calls += 1
        if self.fails(self.calls - 1):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0")
        return self.inner(*arguments)


def filled() -> Shard:
    shard = CudaShard(SPECS, device=DEVICE)
    some = groups_of((0, range(40)), (1, range(50)), device=DEVICE)
    shard.find_or_init(some, ctx=StepContext(event_time_s=1)).end()
    return shard


def state_of(shard: Shard) -> list[Any]:
    """All that users see of a shard."""
    found: list[Any] = [(s.rows, s.inserted, s.refused, s.evicted) for s in shard.stats()]
    for table in range(len(shard.specs)):
        chunk, admission = shard.export(table), shard.admission_state(table)
        found.append([getattr(chunk, name).tolist() for name in RowChunk.__slots__[1:]])
        found.append([admission.ids.tolist(), admission.counts.tolist(), admission.cells])
    return found


def assert_refused(shard: Shard, verb: Callable[[Shard], object], what: str) -> None:
    before = state_of(shard)
    with pytest.raises(OutOfDeviceMemory, match=OF_HELP.format(what)):
        verb(shard)
    assert state_of(shard) == before


NO_ROOM = [
    ("find_or_init", "new_block", 1),
    ("find_or_init", "new_entries", 1),
    ("apply_ids", "new_block", 1),
    ("assign", "new_block", 0),
    ("load", "new_entries", 0),
]
IN_THE_FIRST_TABLE = [("find_or_init", "new_block", 0), ("find_or_init", "new_entries", 0)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "where", "nth"), NO_ROOM + IN_THE_FIRST_TABLE * (DEVICE == "cuda")
)
def test_no_room_to_grow(monkeypatch: pytest.MonkeyPatch, name: str, where: str, nth: int) -> None:
    shard, verb = filled(), VERBS[name]
    owner = device_memory if where == "new_block" else index
    with monkeypatch.context() as patch:
        failing = Failing(getattr(owner, where), lambda call: call >= nth)
        patch.setattr(owner, where, failing)
        assert_refused(shard, verb, "rows of a GPU shard")
        assert failing.calls == nth + 2
    verb(shard)
    twin = CpuShard(SPECS)
    twin.find_or_init(groups_of((0, range(40)), (1, range(50))), ctx=StepContext(event_time_s=1))
    if DEVICE == "cpu":
        verb(twin)
        assert state_of(shard) == state_of(twin)
    assert shard.size(0) == 350


@pytest.mark.slow
def test_a_loose_bound_is_no_reason_to_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    shard = filled()
    failing = Failing(device_memory.new_block, lambda call: call == 0)
    monkeypatch.setattr(device_memory, "new_block", failing)
    VERBS["find_or_init"](shard)
    assert shard.size(1) == 360


@pytest.mark.slow
def test_out_of_handles(monkeypatch: pytest.MonkeyPatch) -> None:
    shard = filled()
    assert device_memory.MOST_CHUNKS == 1 << 17
    with monkeypatch.context() as patch:
        patch.setattr(device_memory, "MOST_CHUNKS", 3)
        before = state_of(shard)
        with pytest.raises(OutOfDeviceMemory, match="2 wanted on top of 2; allowed: 3 in all"):
            VERBS["find_or_init"](shard)
        assert state_of(shard) == before
    VERBS["find_or_init"](shard)


def test_no_room_for_the_expected_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        device_memory, "new_block", Failing(device_memory.new_block, lambda _: True)
    )
    with pytest.raises(OutOfDeviceMemory, match=OF_HELP.format("rows of a GPU shard")):
        CudaShard(SPECS, device=DEVICE)


def test_no_room_to_evict_or_clear(monkeypatch: pytest.MonkeyPatch) -> None:
    shard = filled()
    with monkeypatch.context() as patch:
        patch.setattr(DeviceMemory, "make_free_lists", Failing(lambda *_: None, lambda _: True))
        assert_refused(shard, lambda s: s.evict(100), "a method of a GPU shard")
        patch.setattr(index, "new_entries", Failing(index.new_entries, lambda _: True))
        assert_refused(shard, lambda s: s.clear(0), "a method of a GPU shard")
    shard.clear(0)
    assert shard.evict(100) == 50
    assert [stats.rows for stats in shard.stats()] == [0, 0]


@pytest.mark.slow
def test_free_lists_grow_all_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    shard = filled()
    with monkeypatch.context() as patch:
        failing = Failing(device_memory.longer_list, lambda call: call == 1)
        patch.setattr(device_memory, "longer_list", failing)
        assert_refused(shard, lambda s: s.evict(100), "a method of a GPU shard")
    assert shard.evict(100) == 90
    assert shard.find_or_init(BOTH, ctx=StepContext()).admitted_N.all()


def test_no_room_for_occurrences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "_FIRST_SLOTS", 16)
    spec = TableSpec(name="c", segments=SPECS[0].segments, admission=Admission(threshold=3))
    shard = CudaShard([spec], device=DEVICE)
    few = groups_of((0, range(5)), device=DEVICE)
    shard.find_or_init(few, ctx=StepContext())
    more = groups_of((0, range(20)), device=DEVICE)
    with monkeypatch.context() as patch:
        patch.setattr(admission, "_Exact", Failing(admission._Exact, lambda _: True))
        assert_refused(shard, lambda s: s.find_or_init(more, ctx=StepContext()), "a method")
    for _ in range(2):
        ticket = shard.find_or_init(more, ctx=StepContext())
    assert ticket.admitted_N.tolist() == [True] * 5 + [False] * 15


def test_pages_that_cannot_be_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty

    def refuse(*shape: Any, pin_memory: bool | None = None, **of: Any) -> torch.Tensor:
        if pin_memory is None:
            return empty(*shape, **of)
        raise RuntimeError("CUDA error: out of memory")

    tables = ShardTables(tuple(SPECS), *forms_of(SPECS), torch.device(DEVICE))
    memory = DeviceMemory(tables, seed=0, host_rows=True)
    room = memory.rows_room_K.tolist()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", refuse)
        with pytest.raises(OutOfDeviceMemory, match=r"pinned .* bytes wanted.*row budget"):
            memory.reserve(np.array([1 << 18, 0]))
        assert memory.rows_room_K.tolist() == room
    memory.reserve(np.array([1 << 18, 0]))
    assert memory.rows_room_K[0] >= 1 << 18


@pytest.mark.parametrize("on_full", ["raise", "lru"])
def test_a_full_table_refuses_and_keeps_all(on_full: Any) -> None:
    specs = [
        TableSpec(name="full", segments=SPECS[0].segments, capacity_rows=6, on_full=on_full),
        TableSpec(name="counted", segments=SPECS[1].segments, admission=Admission(threshold=2)),
    ]
    shard = CudaShard(specs, device=DEVICE)
    held = groups_of((0, range(4)), (1, [1, 2]), device=DEVICE)
    ticket = shard.find_or_init(held, ctx=StepContext(event_time_s=1))
    before = state_of(shard)
    call = groups_of((1, [1, 2, 3, 3]), (0, [8, 9, 9, 10, 0]), device=DEVICE)
    rows = "rows" if on_full == "raise" else "rows in use"
    with pytest.raises(
        TableFull, match=f"'full': got 3 on top of 4 {rows}; allowed: capacity_rows=6"
    ):
        shard.find_or_init(call, ctx=StepContext(event_time_s=2))
    assert state_of(shard) == before
    ticket.end()
    if on_full == "raise":
        return
    later = shard.find_or_init(call, ctx=StepContext(event_time_s=2))
    assert later.admitted_N.all()
    assert sorted(shard.export(0).ids.tolist())[:1] == [0] and shard.size(0) == 6
    assert shard.admission_state(1).ids.tolist() == []


@pytest.mark.slow
@pytest.mark.parametrize("capacity", [40, 48, 56, 57] if DEVICE == "cuda" else [40, 57])
def test_every_row_of_a_full_table_may_change_at_once(capacity: int) -> None:
    """Erased marks and new ids together must fit the index, whatever the budget."""
    spec = TableSpec(name="turn", segments=SPECS[0].segments, capacity_rows=capacity, on_full="lru")
    shard = CudaShard([spec], device=DEVICE)
    for turn in range(4):
        ids = range(turn * capacity, (turn + 1) * capacity)
        ticket = shard.find_or_init(
            groups_of((0, ids), device=DEVICE), ctx=StepContext(event_time_s=turn)
        )
        assert ticket.admitted_N.all()
        ticket.end()
        assert sorted(shard.export(0).ids.tolist()) == list(ids)


def test_loading_never_drops_rows() -> None:
    spec = TableSpec(name="a", segments=SPECS[0].segments, capacity_rows=300, on_full="lru")
    shard = CudaShard([spec], device=DEVICE)
    with pytest.raises(TableFull):
        shard.load(0, chunk_of(shard))
    assert shard.size(0) == 0
