"""Faults of a GPU shard in the middle of a method: rows, counts and bounds are right afterwards."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from shoal.embedding.collection import EmbeddingCollection
from shoal.embedding.layouts import Feature
from shoal.errors import OutOfDeviceMemory, ShapeError
from shoal.kernels import cache, lowest_rows, step
from shoal.lookup import Output, Pool, PoolPlan, Slice
from shoal.rules.admission import Admission
from shoal.rules.initializers import Constant
from shoal.rules.optimizers import SGD
from shoal.table.cuda import admission, index, memory
from shoal.table.cuda.shard import CudaShard
from shoal.table.shard import GradRecord, StepContext
from shoal.table.spec import HostRows, Segment, TableSpec
from support.id_groups import groups_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []

SEGMENTS = (Segment(dim=1, optimizer=SGD(lr=1.0), initializer=Constant(0.5)),)


def failing(inner: Callable[..., Any], *calls: int) -> Callable[..., Any]:
    """A function that runs out of memory at some of its calls, counted from 0."""
    count = iter(range(1 << 30))

    def call(*arguments: Any, **named: Any) -> Any:
        if next(count) in calls:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0")
        return inner(*arguments, **named)

    return call


@pytest.mark.slow
def test_a_trim_that_fails_leaves_room_for_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = TableSpec(name="full", segments=SEGMENTS, capacity_rows=240, on_full="lru")
    shard = CudaShard([spec], device=DEVICE)
    batches = [
        groups_of((0, range(turn * 200, turn * 200 + 200)), device=DEVICE) for turn in range(6)
    ]
    shard.find_or_init(batches[0], ctx=StepContext()).end()
    monkeypatch.setattr(index, "lowest_rows", failing(index.lowest_rows, 0, 1, 2))
    for turn in range(1, 4):
        with pytest.raises(OutOfDeviceMemory, match="row budget"):
            shard.find_or_init(batches[turn], ctx=StepContext(event_time_s=turn))
    shard.find_or_init(batches[4], ctx=StepContext(event_time_s=4)).end()
    room, rows = shard._memory.rows_room_K[0], shard.size(0)
    assert room >= 240 + 4 * 200
    assert rows <= 240
    ticket = shard.find_or_init(batches[5], ctx=StepContext(event_time_s=5))
    assert ticket.handles_N.unique().numel() == 200
    ids = shard.export(0).ids.tolist()
    assert set(range(1000, 1200)) <= set(ids) and len(set(ids)) == len(ids) <= 240


@pytest.mark.parametrize(("owner", "name"), [(admission, "sent"), (index, "count_refused")])
def test_occurrences_of_a_call_without_memory_do_not_count(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    monkeypatch.setattr(admission, "_FIRST_SLOTS", 16)
    spec = TableSpec(name="c", segments=SEGMENTS, admission=Admission(threshold=3))
    shard = CudaShard([spec], device=DEVICE)
    shard.find_or_init(groups_of((0, range(5)), device=DEVICE), ctx=StepContext())
    more = groups_of((0, range(20)), device=DEVICE)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, failing(getattr(owner, name), 0))
        with pytest.raises(OutOfDeviceMemory):
            shard.find_or_init(more, ctx=StepContext())
    state = shard.admission_state(0)
    assert (state.ids.tolist(), state.counts.tolist()) == ([0, 1, 2, 3, 4], [1] * 5)
    for _ in range(2):
        ticket = shard.find_or_init(more, ctx=StepContext())
    assert ticket.admitted_N.tolist() == [True] * 5 + [False] * 15


def _versions(shard: CudaShard) -> list[int]:
    return sorted(shard.export(0).versions.tolist())


@pytest.mark.parametrize("name", ["empty", "zeros"])
def test_rows_are_not_marked_as_free_without_their_erase(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(lowest_rows, "_SMALL", 4)
    monkeypatch.setattr(lowest_rows, "_SHRINKS", 4)
    if DEVICE == "cpu":
        monkeypatch.setattr(lowest_rows, "_SAMPLES", 64)
    spec = TableSpec(name="full", segments=SEGMENTS, capacity_rows=60, on_full="lru")
    shard = CudaShard([spec], device=DEVICE)
    shard.find_or_init(groups_of((0, range(60)), device=DEVICE), ctx=StepContext()).end()
    nth = 0
    while True:
        with monkeypatch.context() as patch:
            patch.setattr(torch, name, failing(getattr(torch, name), nth))
            try:
                shard._index.drop([0], [30], None)
            except torch.OutOfMemoryError:
                pass
            else:
                break
        assert _versions(shard) == [1] * 60
        nth += 1
    assert nth > 1
    assert _versions(shard) == [1] * 30


@pytest.mark.slow
def test_rows_leave_a_cache_that_cannot_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = TableSpec(name="full", segments=SEGMENTS, capacity_rows=240, on_full="lru")
    shard = CudaShard([spec], device=DEVICE, host_rows=HostRows(cache_bytes=1 << 12))
    first = shard.find_or_init(groups_of((0, range(200)), device=DEVICE), ctx=StepContext())
    shard.gather(first, ctx=StepContext())
    first.end()
    new = groups_of((0, range(1000, 1200)), device=DEVICE)
    with monkeypatch.context() as patch:
        patch.setattr(cache, "resized", failing(cache.resized, 0))
        with pytest.raises(OutOfDeviceMemory):
            shard.find_or_init(new, ctx=StepContext(event_time_s=1))
    assert _versions(shard) == [1] * shard.size(0)
    assert shard.find_or_init(new, ctx=StepContext(event_time_s=1)).admitted_N.all()
    assert shard.size(0) <= 240


def test_a_second_try_to_grow_has_the_memory_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    specs = [TableSpec(name=name, segments=SEGMENTS) for name in ("a", "b")]
    shard = CudaShard(specs, device=DEVICE)
    inner, first = memory.new_block, list[weakref.ref[Any]]()
    used = list[int]()

    def new_block(form: Any, sizes: Any, device: Any, own: Any, host: Any) -> Any:
        used.append(0 if own is None else own.used)
        if len(used) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0")
        if len(used) == 3:
            assert used[2] == used[0]
            assert all(part() is None for part in first)
        block = inner(form, sizes, device, own, host)
        if len(used) == 1:
            first.extend(weakref.ref(part) for part in block[1])
        return block

    monkeypatch.setattr(memory, "new_block", new_block)
    ids = range(300)
    shard.find_or_init(groups_of((0, ids), (1, ids), device=DEVICE), ctx=StepContext())
    assert len(used) == 4


@pytest.mark.gpu
def test_the_first_verb_waits_for_the_shard_on_whatever_stream() -> None:
    ids = groups_of((0, range(500)), device=DEVICE)
    spec = TableSpec(name="t", segments=SEGMENTS)
    CudaShard([spec], device=DEVICE).find_or_init(ids, ctx=StepContext())
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    shard = CudaShard([spec], device=DEVICE)
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        ticket = shard.find_or_init(ids, ctx=StepContext())
        rows = shard.gather(ticket, ctx=StepContext())[0]
        assert (rows == 0.5).all() and ticket.handles_N.unique().numel() == 500
    assert shard.size(0) == 500


@pytest.mark.gpu
def test_a_ticket_s_memory_is_not_reused_while_another_stream_reads_it() -> None:
    shard = CudaShard([TableSpec(name="t", segments=SEGMENTS)], device=DEVICE)
    ids = groups_of((0, range(50_000)), device=DEVICE)
    shard.assign(ids, (torch.arange(50_000.0, device=DEVICE)[:, None],), ctx=StepContext())
    torch.cuda.synchronize()
    lookups, reads = torch.cuda.Stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(lookups):
        ticket = shard.find_or_init(ids, ctx=StepContext())
    with torch.cuda.stream(reads):
        torch.cuda._sleep(200_000_000)
        rows = shard.gather(ticket, ctx=StepContext())[0]
    del ticket
    with torch.cuda.stream(lookups):
        others = [torch.zeros(50_000, dtype=torch.int32, device=DEVICE) for _ in range(8)]
    torch.cuda.synchronize()
    assert rows[:, 0].tolist() == list(range(50_000)) and len(others) == 8


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_verbs_leave_the_present_device_as_it_is() -> None:
    shard = CudaShard([TableSpec(name="t", segments=SEGMENTS)], device="cuda:1")
    with torch.cuda.device(0):
        ids = groups_of((0, range(50)), device="cuda:1")
        ticket = shard.find_or_init(ids, ctx=StepContext())
        assert (shard.gather(ticket, ctx=StepContext())[0] == 0.5).all()
        shard.apply([GradRecord(ticket, (torch.ones(50, 1, device="cuda:1"),))], ctx=StepContext())
        assert torch.cuda.current_device() == 0
        assert (shard.find(ids).weights[0] == -0.5).all()


PLAN = PoolPlan((Pool("sum", (Slice(0, 1, 0, 0),)),), (Output(1),))


def test_offsets_with_gaps_are_refused() -> None:
    shard = CudaShard([TableSpec(name="t", segments=SEGMENTS)], device=DEVICE)
    ids = groups_of((0, [1, 2, 3, 4]), device=DEVICE)
    ticket = shard.find_or_init(ids, ctx=StepContext())
    offsets = torch.tensor([0, 9, 2, 9, 4], device=DEVICE)[::2]
    for call in (
        lambda: shard.find_pooled(ids, PLAN, offsets, None),
        lambda: shard.gather_pooled(ticket, PLAN, offsets, None, ctx=StepContext()),
    ):
        with pytest.raises(ShapeError, match=r"offsets: got .*contiguous=False"):
            call()


@pytest.mark.parametrize("error", [OutOfDeviceMemory("no room"), torch.OutOfMemoryError("none")])
def test_a_staging_area_that_cannot_grow_is_done_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    spec = TableSpec(name="t", segments=SEGMENTS)
    shard = CudaShard([spec], device=DEVICE, host_rows=HostRows())

    def refuse(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(cache, "new_maps", refuse)
    ids = groups_of((0, range(20)), device=DEVICE)
    ticket = shard.find_or_init(ids, ctx=StepContext())
    shard.apply([GradRecord(ticket, (torch.ones(20, 1, device=DEVICE),))], ctx=StepContext())
    assert (shard.find(ids).weights[0] == -0.5).all()
    assert "partly staged" in caplog.text


def test_a_copy_of_a_collection_keeps_its_cache() -> None:
    spec = TableSpec(name="t", segments=SEGMENTS)
    rows = HostRows(cache_bytes=4096, policy="lfu")
    shard = CudaShard([spec], device=DEVICE, host_rows=rows)
    shard.last_step = 7
    twin = copy.deepcopy(EmbeddingCollection([spec], [Feature("f", "t")], shard=shard)).shard
    assert isinstance(twin, CudaShard)
    assert twin.settings == {"host_rows": rows}
    assert twin.cache_stats().slots == shard.cache_stats().slots
    assert twin.last_step == 7


def test_no_form_is_stepped_without_memory_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = Segment(dim=2, optimizer=SGD(lr=1.0), initializer=Constant(0.5))
    specs = [TableSpec(name="a", segments=SEGMENTS), TableSpec(name="b", segments=(wide,))]
    shard = CudaShard(specs, device=DEVICE)
    ids = groups_of((0, range(20)), (1, range(20)), device=DEVICE)
    for nth in range(2):
        ticket = shard.find_or_init(ids, ctx=StepContext())
        grads = tuple(torch.ones(20, dim, device=DEVICE) for dim in (1, 2))
        with monkeypatch.context() as patch:
            patch.setattr(step, "add_pieces", failing(step.add_pieces, nth))
            with pytest.raises(OutOfDeviceMemory):
                shard.apply([GradRecord(ticket, grads)], ctx=StepContext())
        assert all((rows == 0.5).all() for rows in shard.find(ids).weights)
    shard.apply([GradRecord(ticket, grads)], ctx=StepContext())
    assert all((rows == -0.5).all() for rows in shard.find(ids).weights)
