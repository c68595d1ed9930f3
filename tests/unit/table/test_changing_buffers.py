"""Ids, offsets and weights that another thread changes while a call reads them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest
import torch
from torch import Tensor

from shoal import (
    Admission,
    EmbeddingCollection,
    Feature,
    FirstN,
    KeyedRagged,
    ReduceMean,
    ReduceSum,
    Segment,
    SparseOptimizer,
    Table,
    TableSpec,
)
from shoal.errors import ShoalError
from shoal.table.values import RowChunk

ROUNDS = 60
IDS = 20_000


@contextmanager
def changed(tensor: Tensor, values: Callable[[], Tensor]) -> Iterator[None]:
    """Inside, another thread writes new values into the tensor, again and again."""
    stop = threading.Event()

    def write() -> None:
        target = tensor.detach().numpy()  # no version is counted
        while not stop.is_set():
            target[:] = values().numpy()

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def check_sound(table: Table) -> None:
    """Every id has one row, its index finds it, and the row carries its id."""
    chunk = table.export()
    assert chunk.ids.unique().numel() == chunk.ids.numel() == len(table)
    found = table.find(chunk.ids)
    assert bool(found[1].all())
    assert torch.equal(found[0], chunk.weights)
    for id_ in chunk.ids[:5].tolist():
        entry = table.entry(id_)
        assert entry is not None and entry.id == id_


@pytest.mark.parametrize("admission", [None, Admission(threshold=2)], ids=["all", "admitted"])
@pytest.mark.parametrize("verb", ["find_or_init", "apply", "assign", "reinitialize", "find"])
def test_a_table_stays_sound_when_ids_change(verb: str, admission: Admission | None) -> None:
    table = Table(TableSpec(name="t", segments=(Segment(dim=1),), admission=admission))
    ids, rows = torch.zeros(IDS, dtype=torch.int64), torch.ones(IDS, 1)
    calls: dict[str, Callable[[], object]] = {
        "find_or_init": lambda: table.gather(table.find_or_init(ids)),
        "apply": lambda: table.apply(ids, rows),
        "assign": lambda: table.assign(ids, rows),
        "reinitialize": lambda: table.reinitialize(ids),
        "find": lambda: table.find(ids),
    }
    with changed(ids, lambda: torch.randint(0, 4 * IDS, (IDS,))):
        for _ in range(ROUNDS // 4):
            calls[verb]()
    check_sound(table)


def test_a_full_table_stays_sound_when_ids_change() -> None:
    spec = TableSpec(name="t", segments=(Segment(dim=1),), capacity_rows=2 * IDS, on_full="lru")
    table = Table(spec)
    ids = torch.zeros(IDS, dtype=torch.int64)
    with changed(ids, lambda: torch.randint(0, 8 * IDS, (IDS,))):
        for _ in range(ROUNDS // 4):
            table.find_or_init(ids).end()
    check_sound(table)
    assert len(table) <= 2 * IDS


def test_a_table_stays_sound_when_loaded_ids_change() -> None:
    table = Table(TableSpec(name="t", segments=(Segment(dim=1),)))
    words = [torch.zeros(IDS, dtype=torch.int64) for _ in range(3)]
    chunk = RowChunk("t", torch.arange(IDS), torch.ones(IDS, 1), torch.empty(IDS, 0), *words)
    with changed(chunk.ids, lambda: torch.randperm(2 * IDS)[:IDS]):
        for _ in range(ROUNDS // 4):
            with suppress(ShoalError):  # the copy was made between two writes
                table.load(chunk)
    check_sound(table)


@pytest.mark.parametrize("combiner", [ReduceSum(), ReduceMean(), FirstN(3)], ids=repr)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_offsets_that_change_reach_no_other_memory(
    combiner: ReduceSum, weighted: bool, training: bool
) -> None:
    size = 500
    spec = TableSpec(name="t", segments=(Segment(dim=1),))
    owner = EmbeddingCollection([spec], [Feature("f", "t", combiner)]).train(training)
    sparse = SparseOptimizer(owner)
    ids, good = torch.arange(4 * size), torch.arange(0, 4 * size + 1, 4)
    weights = torch.ones(4 * size) if weighted else None
    table = owner.table("t")
    offsets = good.clone()
    batch = KeyedRagged(("f",), ids, offsets, weights)

    def wild() -> Tensor:
        if torch.rand(()) < 0.7:
            return good
        return torch.randint(-(1 << 62), 1 << 62, (size + 1,))

    with changed(offsets, wild):
        for _ in range(4 * ROUNDS):
            with suppress(ShoalError):
                out = owner(batch)["f"]
                if training:
                    out.sum().backward()
                    sparse.step()
            sparse.zero_grad()
    check_sound(table)
    offsets.copy_(good)
    assert torch.equal(
        owner(batch)["f"].flatten(1).isfinite(),
        torch.ones_like(owner(batch)["f"].flatten(1)).bool(),
    )
