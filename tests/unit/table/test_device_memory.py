"""Memory of a GPU shard: growth without moving rows, bounds that hold while counters are late."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shoal.kernels import index
from shoal.kernels.tables import CHUNK_ROWS, FIRST_ROWS, CallGroups
from shoal.rules.optimizers import SGD
from shoal.table.cuda.calls import ShardTables, forms_of
from shoal.table.cuda.memory import DeviceMemory, chunks_for
from shoal.table.spec import Segment, TableSpec

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def memory_of(**limits: int | None) -> DeviceMemory:
    specs = [
        TableSpec(name=name, segments=(Segment(dim=4, optimizer=SGD()),), capacity_rows=limit)
        for name, limit in limits.items()
    ]
    return DeviceMemory(ShardTables(tuple(specs), *forms_of(specs), DEVICE), seed=1)


def insert(memory: DeviceMemory, ids: torch.Tensor, table: int = 0) -> torch.Tensor:
    """Insert without waiting for any counter; returns handles."""
    new_K = np.zeros(len(memory.slots_K), dtype=np.int64)
    new_K[table] = ids.numel()
    memory.reserve(new_K)
    groups = CallGroups(
        ids.to(DEVICE),
        torch.tensor([0, ids.numel()], device=DEVICE),
        torch.tensor([table], dtype=torch.int32, device=DEVICE),
    )
    handles_N = torch.empty(ids.numel(), dtype=torch.int32, device=DEVICE)
    index.probe(memory.layout, groups, handles_N, None, None, insert=True)
    memory.counters.send(memory.layout)
    return handles_N


def test_chunks_double_until_they_are_full() -> None:
    sizes = chunks_for(0, 0, 40_000)
    assert sizes[0] == FIRST_ROWS
    assert sizes == [256, 512, 1024, 2048, 4096, 8192, CHUNK_ROWS, CHUNK_ROWS]
    assert chunks_for(len(sizes), sum(sizes), sum(sizes) + 1) == [CHUNK_ROWS]
    assert chunks_for(2, 768, 768) == []


@pytest.mark.slow
def test_rows_keep_their_handles_while_index_and_chunks_grow() -> None:
    memory = memory_of(a=None)
    first = torch.arange(200)
    before = insert(memory, first)
    slots, room = int(memory.slots_K[0]), int(memory.rows_room_K[0])
    for start in range(200, 600, 200):
        insert(memory, torch.arange(start, start + 200))
    assert memory.slots_K[0] > slots
    assert memory.rows_room_K[0] > room
    every = insert(memory, torch.arange(600))
    assert every[:200].tolist() == before.tolist()
    assert every.unique().numel() == 600
    memory.counters.wait()
    assert memory.counters.rows_K.tolist() == [600]


def test_the_bound_counts_ids_that_are_under_way() -> None:
    memory = memory_of(a=None, b=None)
    insert(memory, torch.arange(100), table=1)
    new_K = np.array([5, 7])
    memory.reserve(new_K)
    memory.counters.poll()
    assert memory.counters.flying_K[0] == 5
    assert memory.counters.rows_bound_K[1] >= 107
    memory.counters.send(memory.layout)
    memory.counters.wait()
    assert memory.counters.rows_bound_K.tolist() == [0, 100]


@pytest.mark.slow
def test_repeated_ids_do_not_grow_a_table_without_end() -> None:
    memory = memory_of(a=None)
    ids = torch.arange(64)
    for _ in range(30):
        insert(memory, ids)
    memory.counters.wait()
    assert memory.counters.rows_K.tolist() == [64]
    assert memory.rows_room_K[0] <= 1024


def test_a_limit_bounds_what_is_allocated() -> None:
    memory = memory_of(a=300)
    insert(memory, torch.arange(250))
    memory.reserve(np.array([100_000]))
    assert memory.rows_room_K[0] == 768


@pytest.mark.slow
def test_erased_slots_come_back_at_a_rebuild() -> None:
    memory = memory_of(a=None)
    memory.make_free_lists([0])
    slots = None
    for step in range(12):
        handles_N = insert(memory, torch.arange(step * 100, step * 100 + 100))
        memory.make_free_lists([0])
        index.erase(memory.layout, handles_N, None)
        memory.counters.send(memory.layout)
        memory.counters.wait()
        if step == 6:
            slots = int(memory.slots_K[0])
    assert memory.slots_K.tolist() == [slots]
    assert memory.counters.rows_K.tolist() == [0]
    kept = insert(memory, torch.arange(-50, 0))
    assert insert(memory, torch.arange(-50, 0)).tolist() == kept.tolist()


def test_counters_that_left_before_a_rebuild_do_not_bring_its_marks_back() -> None:
    memory = memory_of(a=None)
    handles_N = insert(memory, torch.arange(40))
    memory.make_free_lists([0])
    index.erase(memory.layout, handles_N, None)
    memory.counters.send(memory.layout)
    insert(memory, torch.arange(100, 400))
    memory.counters.wait()
    assert memory.counters.used_K.tolist() == [300]


@pytest.mark.gpu
def test_no_row_is_lost_on_a_gpu() -> None:
    memory = memory_of(a=None)
    ids = torch.randint(-(2**62), 2**62, (3_000_000,))
    for part in ids.split(100_000):
        insert(memory, part)
    again = insert(memory, ids)
    memory.counters.wait()
    assert int(memory.counters.rows_K[0]) == ids.unique().numel() == again.unique().numel()
