"""Memory of rows: addresses that are handed out, and what is put behind them."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from shoal.errors import DeviceUnavailable, OutOfDeviceMemory
from shoal.kernels.tables import CHUNK_CAPACITY, CHUNK_WEIGHTS
from shoal.rules.initializers import Uniform
from shoal.rules.optimizers import Adagrad
from shoal.table.cpu.shard import CpuShard
from shoal.table.cuda import mapped, memory
from shoal.table.cuda.calls import ShardTables, forms_of
from shoal.table.cuda.mapped import CudaMapper, RowMemory
from shoal.table.cuda.memory import DeviceMemory
from shoal.table.cuda.shard import CudaShard
from shoal.table.shard import HASHES, Shard, StepContext
from shoal.table.spec import Segment, TableSpec
from support.id_groups import groups_of

UNIT = 1 << 12
ROW_BYTES = 52, 84
TABLES, NEW = 26, 5_000
SPECS = tuple(
    TableSpec(
        name=name,
        segments=(Segment(dim=dim, optimizer=Adagrad(lr=0.5), initializer=Uniform(-1, 1)),),
    )
    for name, dim in (("a", 3), ("b", 8))
)


class Pretended:
    """A mapper over host memory, as strict as a driver. It refuses more than `room` bytes."""

    granularity = UNIT

    def __init__(self, room: int = 1 << 40, addresses: int = 1 << 40) -> None:
        self.room = room
        self.addresses = addresses
        self.made: list[tuple[int, int]] = []
        self.freed: list[Any] = []

    def reserve(self, size: int) -> int:
        if size > self.addresses:
            raise OutOfDeviceMemory(f"{size} addresses")
        self.memory = torch.full((size,), 0x5A, dtype=torch.uint8)
        self.units: set[int] = set()
        return self.memory.data_ptr()

    def map(self, address: int, size: int) -> None:
        first = address - self.memory.data_ptr()
        if size <= 0 or first % UNIT or size % UNIT or first < 0 or first + size > len(self.memory):
            raise RuntimeError(f"invalid value: {first}, {size}")
        units = range(first // UNIT, (first + size) // UNIT)
        if self.units.intersection(units):
            raise RuntimeError(f"invalid value: mapped: {first}, {size}")
        if (len(self.units) + len(units)) * UNIT > self.room:
            raise torch.OutOfMemoryError(f"Tried to allocate {size} bytes")
        self.units.update(units)
        self.made.append((address, size))

    def free(self, address: int, size: int, pieces: list[tuple[int, int]]) -> None:
        self.freed.append((address, size, pieces))

    def backs(self, address: int, size: int) -> bool:
        """Whether there is memory behind all of these addresses."""
        first = address - self.memory.data_ptr()
        return self.units.issuperset(range(first // UNIT, -(-(first + size) // UNIT)))


def test_parts_are_apart_and_have_memory_only_when_told() -> None:
    mapper = Pretended()
    rows = RowMemory(mapper, 64 * UNIT)
    sizes = (1, 511, 0, 512, 513, 3 * UNIT, 10 * UNIT, UNIT, 7)
    parts = [(rows.take(size), size) for size in sizes]
    assert not mapper.made and rows.bytes_mapped == 0
    ends = [start + size for start, size in parts]
    assert all(end <= start for end, (start, _) in zip(ends, parts[1:], strict=False))
    assert all((start - parts[0][0]) % 512 == 0 for start, _ in parts)
    with pytest.raises(OutOfDeviceMemory, match="addresses for rows"):
        rows.take(60 * UNIT)
    for some in ([], parts[6:7], [parts[0], parts[5]], parts[2:3], parts[::-1], parts):
        rows.back(some)
        assert all(mapper.backs(*part) for part in some)
    assert rows.bytes_mapped == -(-rows.used // UNIT) * UNIT == len(mapper.units) * UNIT


def test_neighbours_are_mapped_by_one_call() -> None:
    mapper = Pretended()
    rows = RowMemory(mapper, 64 * UNIT)
    start = rows.take(64 * UNIT)
    rows.back([(start + 8 * UNIT, 512)])
    rows.back([(start + at * UNIT // 2, UNIT // 2) for at in range(40)])
    made = [((address - start) // UNIT, size // UNIT) for address, size in mapper.made]
    assert made == [(8, 1), (0, 8), (9, 11)]


def test_no_memory_is_an_error_and_is_asked_for_again() -> None:
    mapper = Pretended(room=6 * UNIT)
    rows = RowMemory(mapper, 64 * UNIT)
    start = rows.take(64 * UNIT)
    rows.back([(start, 6 * UNIT)])
    with pytest.raises(torch.OutOfMemoryError):
        rows.back([(start, 6 * UNIT + 1)])
    assert rows.bytes_mapped == 6 * UNIT
    mapper.room += UNIT
    rows.back([(start, 6 * UNIT + 1)])
    assert mapper.backs(start, 6 * UNIT + 1)


def test_what_is_taken_back_is_handed_out_again_and_all_is_freed_in_the_end() -> None:
    mapper = Pretended()
    rows = RowMemory(mapper, 64 * UNIT)
    first, used = rows.take(UNIT), rows.used
    second = rows.take(UNIT)
    rows.back([(second, UNIT)])
    rows.take_back(used)
    assert rows.take(UNIT) == second != first
    rows.back([(second, UNIT), (first, 1)])
    made = list(mapper.made)
    del rows
    gc.collect()
    assert mapper.freed == [(mapper.memory.data_ptr(), 64 * UNIT, made)]


@pytest.mark.parametrize(("addresses", "got"), [(64, 64), (63, 32), (16, 16)])
def test_fewer_addresses_do_where_the_process_has_no_more(addresses: int, got: int) -> None:
    rows = RowMemory(Pretended(addresses=addresses * UNIT), 64 * UNIT, 16 * UNIT)
    assert rows.take(got * UNIT)
    with pytest.raises(OutOfDeviceMemory, match="in all"):
        rows.take(1)


@pytest.mark.parametrize("least", [None, 16 * UNIT])
def test_too_few_addresses_are_an_error(least: int | None) -> None:
    with pytest.raises(OutOfDeviceMemory, match="addresses"):
        RowMemory(Pretended(addresses=16 * UNIT - 1), 64 * UNIT, least)


class Driver:
    """A CUDA driver whose functions succeed, but for those in `fails`."""

    def __init__(self, **fails: int) -> None:
        self.fails = fails
        self.called: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            self.called.append(name)
            if name == "cuMemGetAllocationGranularity":
                arguments[0]._obj.value = UNIT
            return self.fails.get(name, 0)

        return call


@pytest.fixture
def pretended_gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """A device of 100 units, of which torch holds 30; share: that the process may take."""
    said = {"share": 1.0}
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 30 * UNIT)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (70 * UNIT, 100 * UNIT))
    monkeypatch.setattr(
        torch.cuda, "get_per_process_memory_fraction", lambda _: said["share"], raising=False
    )
    monkeypatch.setattr(mapped, "mapped_bytes", lambda _: 20 * UNIT)
    return said


@pytest.mark.parametrize(
    ("function", "result", "error", "undone"),
    [
        ("cuMemAddressReserve", 2, OutOfDeviceMemory, []),
        ("cuMemAddressReserve", 1, DeviceUnavailable, []),
        ("cuMemCreate", 2, torch.OutOfMemoryError, []),
        ("cuMemMap", 1, DeviceUnavailable, ["cuMemRelease"]),
        ("cuMemSetAccess", 1, DeviceUnavailable, ["cuMemUnmap"]),
    ],
)
def test_what_the_driver_refuses_is_told_and_undone(
    pretended_gpu: dict[str, float],
    function: str,
    result: int,
    error: type[Exception],
    undone: list[str],
) -> None:
    driver = Driver(**{function: result})
    mapper = CudaMapper(0, driver)
    with pytest.raises(error, match=r"memory|addresses"):
        mapper.map(mapper.reserve(4 * UNIT), UNIT)
    assert driver.called[driver.called.index(function) + 1 :] == undone


def test_rows_keep_to_the_share_of_the_device(pretended_gpu: dict[str, float]) -> None:
    driver = Driver()
    mapper = CudaMapper(0, driver)
    mapper.map(0, 70 * UNIT)
    pretended_gpu["share"] = 0.6
    mapper.map(0, 10 * UNIT)
    with pytest.raises(torch.OutOfMemoryError, match="this process may take"):
        mapper.map(0, 11 * UNIT)
    assert driver.called.count("cuMemCreate") == 2


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
def test_tables_grow_by_many_chunks_in_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    mapper = Pretended()
    shard, twin = shard_over(mapper, monkeypatch, 1 << 24), CpuShard(SPECS, seed=3)
    for ids, room in ((range(10), 256), (range(600), 768), (range(590, 640), 768)):
        step(shard, ids)
        step(twin, ids)
        stats = shard.stats()[0]
        assert (stats.bytes_weights, stats.bytes_state) == (16 * room, 16 * room)
        assert stats.bytes_metadata == 20 * room
    assert rows_of(shard) == rows_of(twin)


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels would read the host's memory")
def test_chunks_reach_as_far_as_the_index_and_memory_follows_the_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mapper = Pretended()
    monkeypatch.setattr(memory, "row_memory", lambda _: RowMemory(mapper, 1 << 28))
    found = DeviceMemory(ShardTables(SPECS, *forms_of(SPECS), torch.device("cpu")), seed=1)
    own, grew = found._own, []
    assert own is not None
    for rows in range(1_000, 100_000, 1_000):
        before = found.chunks, found.layout.tables_KT.clone()
        found.reserve(np.array([1_000, 1_000]))
        assert (found.rows_room_K >= rows).all()
        assert own.bytes_mapped < found.rows_room_K @ ROW_BYTES + 12 * UNIT
        ready = [table.chunks[table.ready - 1] for table in found._tables]
        assert max(ready) < found.chunks_ready <= found.chunks
        same = torch.equal(found.layout.tables_KT, before[1])
        assert same == (found.chunks == before[0])
        grew.append(not same)
        for k, row_bytes in enumerate(ROW_BYTES):
            table, columns_WC = found._tables[k], found.columns_WC
            for number in table.chunks[: table.ready]:
                weights, rows_C = columns_WC[[CHUNK_WEIGHTS, CHUNK_CAPACITY], number].tolist()
                assert mapper.backs(weights, rows_C * row_bytes)
            assert columns_WC[CHUNK_CAPACITY, table.chunks[: table.ready]].sum() >= rows
    assert sum(grew) == 7  # the index doubled as often


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels would read the host's memory")
def test_snapshots_tell_of_chunks_with_memory_only(monkeypatch: pytest.MonkeyPatch) -> None:
    shard = shard_over(Pretended(), monkeypatch, 1 << 24)
    step(shard, range(600))
    wants, cuts, covered = [], [], []
    for more in (range(590, 1_100), range(5)):
        wants.append(rows_of(shard))
        cuts.append(shard.snapshot())
        covered.append(cuts[-1]._rows._images.stamps.chunks)  # type: ignore[attr-defined]
        step(shard, more)
    assert covered[0] < shard._memory.chunks_ready  # type: ignore[attr-defined]
    for cut, want in zip(cuts, wants, strict=True):
        chunks = [cut.read(k, 0, HASHES) for k in range(2)]
        assert [(c.ids.tolist(), c.weights.tolist(), c.state.tolist()) for c in chunks] == want
        cut.close()


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels would read the host's memory")
def test_a_refused_growth_holds_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    mapper = Pretended(room=16 * UNIT)
    shard = shard_over(mapper, monkeypatch, 1 << 24)
    step(shard, range(10))
    held = shard._memory._own.used  # type: ignore[attr-defined]
    chunks = shard._memory.chunks  # type: ignore[attr-defined]
    before = rows_of(shard)
    with pytest.raises(OutOfDeviceMemory, match="rows of a GPU shard"):
        step(shard, range(300))
    assert shard._memory._own.used == held  # type: ignore[attr-defined]
    assert rows_of(shard) == before
    assert shard._memory.chunks == chunks  # type: ignore[attr-defined]
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
        assert own.bytes_mapped >= found.rows_room_K @ ROW_BYTES
    assert own.bytes_mapped < found.rows_room_K @ ROW_BYTES + (16 << 20) < own.used
    assert mapped.mapped_bytes(device) >= own.bytes_mapped
    assert torch.cuda.memory_allocated() - before < own.bytes_mapped // 2
    free = torch.cuda.mem_get_info()[0]
    mapped_bytes = own.bytes_mapped
    del found, own, tables
    gc.collect()
    assert torch.cuda.mem_get_info()[0] >= free + mapped_bytes * 9 // 10
    wide = Segment(dim=64, optimizer=Adagrad(lr=0.5))
    with pytest.raises(OutOfDeviceMemory, match="bytes wanted"):
        CudaShard([TableSpec(name="t", segments=(wide,), expected_rows=1 << 30)], device=device)
    gc.collect()
    torch.cuda.empty_cache()  # torch keeps the memory of the index
    assert torch.cuda.mem_get_info()[0] >= free + mapped_bytes * 9 // 10


@pytest.mark.gpu
def test_many_tables_that_grow_step_by_step_have_the_rows_of_a_cpu() -> None:
    segments = SPECS[1].segments
    specs = [TableSpec(name=f"t{k}", segments=segments) for k in range(TABLES)]
    shard, twin = CudaShard(specs, seed=3), CpuShard(specs, seed=3)
    for number in range(12):
        ids = range(number * NEW, (number + 1) * NEW)
        for each in (shard, twin):
            call = groups_of(*((k, ids) for k in range(TABLES)), device=each.device)
            grads = tuple(torch.ones(NEW, 8, device=each.device) for _ in range(TABLES))
            each.apply_ids(call, grads, ctx=StepContext(event_time_s=7))
    asked = [(k, range(k, 12 * NEW, 7)) for k in range(TABLES)]
    found, same = (each.find(groups_of(*asked, device=each.device)) for each in (shard, twin))
    assert found.found_N.all()
    for ours, theirs in zip(found.weights, same.weights, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs)
    assert {stats.rows for stats in shard.stats()} == {12 * NEW}
