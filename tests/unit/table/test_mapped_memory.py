"""Memory of rows that is mapped ahead: what is handed out, what the worker does, what it gives."""

from __future__ import annotations

import gc
import threading
from typing import Any

import numpy as np
import pytest
import torch

from shoal.errors import OutOfDeviceMemory
from shoal.rules.initializers import Uniform
from shoal.rules.optimizers import Adagrad
from shoal.table.cpu.shard import CpuShard
from shoal.table.cuda import mapped, memory
from shoal.table.cuda.calls import ShardTables, forms_of
from shoal.table.cuda.mapped import RowMemory
from shoal.table.cuda.memory import DeviceMemory
from shoal.table.cuda.shard import CudaShard
from shoal.table.shard import Shard, StepContext
from shoal.table.spec import Segment, TableSpec
from support.id_groups import groups_of

UNIT = 1 << 12
SPECS = tuple(
    TableSpec(
        name=name,
        segments=(Segment(dim=dim, optimizer=Adagrad(lr=0.5), initializer=Uniform(-1, 1)),),
    )
    for name, dim in (("a", 3), ("b", 8))
)


class Pretended:
    """A mapper over host memory. It refuses more than `room` bytes, and waits for `gate`."""

    granularity = UNIT

    def __init__(self, room: int = 1 << 40) -> None:
        self.room = room
        self.gate = threading.Event()
        self.gate.set()
        self.made: list[tuple[int, int]] = []
        self.threads: set[int] = set()
        self.freed: list[Any] = []

    def reserve(self, size: int) -> int:
        self.memory = torch.full((size,), 0x5A, dtype=torch.uint8)
        return self.memory.data_ptr()

    def map(self, address: int, size: int) -> None:
        assert address % UNIT == self.memory.data_ptr() % UNIT and size % UNIT == 0
        if threading.current_thread() is not threading.main_thread():
            self.gate.wait()
        if sum(length for _, length in self.made) + size > self.room:
            raise torch.OutOfMemoryError(f"Tried to allocate {size} bytes")
        self.threads.add(threading.get_ident())
        self.made.append((address, size))

    def free(self, address: int, size: int, pieces: list[tuple[int, int]]) -> None:
        self.freed.append((address, size, pieces))

    def backs(self, address: int, size: int) -> bool:
        """Whether there is memory behind all of these addresses."""
        ends = {start: start + length for start, length in self.made}
        at = self.memory.data_ptr()
        while at in ends:
            at = ends[at]
        return self.memory.data_ptr() <= address and address + size <= at


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped, "_PIECE_BYTES", 2 * UNIT)
    monkeypatch.setattr(mapped, "_LEAST_AHEAD", 8 * UNIT)


def test_parts_are_apart_and_backed() -> None:
    mapper = Pretended()
    rows, parts = RowMemory(mapper, 64 * UNIT), []
    for size in (1, 511, 512, 513, 3 * UNIT, 10 * UNIT, 7):
        parts.append((rows.take(size), size))
        assert mapper.backs(*parts[-1])
    ends = [start + size for start, size in parts]
    assert all(end <= start for end, (start, _) in zip(ends, parts[1:], strict=False))
    assert all((start - parts[0][0]) % 512 == 0 for start, _ in parts)
    assert rows.bytes_mapped < rows.used + UNIT
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        rows.take(60 * UNIT)
    assert mapper.backs(rows.take(UNIT), UNIT)


@pytest.mark.usefixtures("small")
def test_a_worker_maps_what_is_taken_next() -> None:
    mapper = Pretended()
    rows = RowMemory(mapper, 64 * UNIT)
    rows.take(UNIT)
    rows.look_ahead()
    assert rows.bytes_mapped == UNIT
    rows.take(UNIT)
    rows._settle()
    assert rows.bytes_mapped == 10 * UNIT  # what is in use and 8 more
    assert mapper.made[-1][1] == 2 * UNIT  # no more at a time
    mapper.threads.clear()
    before = len(mapper.made)
    rows.take(3 * UNIT)
    assert len(mapper.made) == before  # half of what was ahead is left
    mapper.gate.clear()
    rows.take(2 * UNIT)
    assert mapper.backs(rows.take(3 * UNIT), 3 * UNIT)  # without a wait: it was there already
    mapper.gate.set()
    rows.take(20 * UNIT)
    assert rows.bytes_mapped >= rows.used and mapper.backs(rows.take(1), 1)
    assert threading.get_ident() in mapper.threads and len(mapper.threads) == 2


@pytest.mark.usefixtures("small")
def test_no_memory_is_an_error_where_it_is_needed_only() -> None:
    mapper = Pretended(room=6 * UNIT)
    rows = RowMemory(mapper, 64 * UNIT)
    rows.look_ahead()
    rows.take(2 * UNIT)
    rows._settle()  # the worker got as far as there was room
    assert rows.bytes_mapped == 6 * UNIT
    rows.take(4 * UNIT)
    with pytest.raises(torch.OutOfMemoryError):
        rows.take(1)
    assert rows.used == 6 * UNIT
    mapper.room += UNIT
    assert mapper.backs(rows.take(1), 1)


def test_what_is_taken_back_is_handed_out_again_and_all_is_freed_in_the_end() -> None:
    mapper = Pretended()
    rows = RowMemory(mapper, 64 * UNIT)
    first, used = rows.take(UNIT), rows.used
    second = rows.take(UNIT)
    rows.take_back(used)
    assert rows.take(UNIT) == second != first
    rows.look_ahead()
    rows.take(UNIT)
    rows._settle()
    made = list(mapper.made)
    del rows
    gc.collect()
    assert mapper.freed == [(mapper.memory.data_ptr(), 64 * UNIT, made)]


def shard_over(mapper: Pretended, monkeypatch: pytest.MonkeyPatch, size: int) -> Shard:
    monkeypatch.setattr(memory, "row_memory", lambda _: RowMemory(mapper, size))
    return CudaShard(SPECS, seed=3, device="cpu")


def step(shard: Shard, ids: range) -> None:
    call = groups_of((0, ids), (1, ids))
    grads = torch.ones(len(ids), 3), torch.full((len(ids), 8), 2.0)
    shard.apply_ids(call, grads, ctx=StepContext(event_time_s=7))


def rows_of(shard: Shard) -> list[Any]:
    chunks = [shard.export(k) for k in range(2)]
    return [(c.ids.tolist(), c.weights.tolist(), c.state.tolist()) for c in chunks]


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels would read the host's memory")
@pytest.mark.usefixtures("small")
def test_tables_grow_by_many_chunks_in_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    mapper = Pretended()
    shard, twin = shard_over(mapper, monkeypatch, 1 << 24), CpuShard(SPECS, seed=3)
    for ids in (range(10), range(600), range(590, 640)):
        step(shard, ids)
        step(twin, ids)
    assert rows_of(shard) == rows_of(twin)
    stats = shard.stats()[0]
    room = 256 + 512
    assert (stats.bytes_weights, stats.bytes_state) == (16 * room, 16 * room)
    assert stats.bytes_metadata == 20 * room


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels would read the host's memory")
@pytest.mark.usefixtures("small")
def test_a_refused_growth_holds_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    mapper = Pretended(room=16 * UNIT)
    shard = shard_over(mapper, monkeypatch, 1 << 24)
    step(shard, range(10))
    held = shard._memory._own.used  # type: ignore[attr-defined]
    before = rows_of(shard)
    with pytest.raises(OutOfDeviceMemory, match="rows of a GPU shard"):
        step(shard, range(300))
    assert shard._memory._own.used == held  # type: ignore[attr-defined]
    assert rows_of(shard) == before
    mapper.room = 1 << 40
    step(shard, range(300))
    assert shard.size(1) == 300


@pytest.mark.gpu
def test_a_gpu_s_rows_lie_in_mapped_memory() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    tables = ShardTables(SPECS, *forms_of(SPECS), device)
    found = DeviceMemory(tables, seed=1)
    own = found._own
    assert own is not None
    before = torch.cuda.memory_allocated()
    for rows in (1_000, 50_000, 3_000_000):
        found.reserve(np.array([rows, rows]))
        assert own.used >= int(found.rows_room_K[0]) * (16 + 16 + 20)
    own._settle()
    assert own.bytes_mapped >= own.used + (16 << 20)
    assert mapped.mapped_bytes(device) >= own.bytes_mapped
    assert torch.cuda.memory_allocated() - before < own.used // 2
    free = torch.cuda.mem_get_info()[0]
    mapped_bytes = own.bytes_mapped
    del found, own, tables
    gc.collect()
    assert torch.cuda.mem_get_info()[0] >= free + mapped_bytes * 9 // 10
    wide = Segment(dim=64, optimizer=Adagrad(lr=0.5))
    with pytest.raises(OutOfDeviceMemory, match="bytes wanted"):
        CudaShard([TableSpec(name="t", segments=(wide,), expected_rows=1 << 30)], device=device)
    assert torch.cuda.mem_get_info()[0] >= free + mapped_bytes * 9 // 10
