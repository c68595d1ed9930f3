"""A small collection of two tables and four features, and one batch for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shoal.embedding.collection import EmbeddingCollection
from shoal.embedding.combiners import FirstN, ReduceMean
from shoal.embedding.layouts import Feature, Layout, LayoutSlice
from shoal.ragged import KeyedRagged
from shoal.rules.admission import Admission
from shoal.rules.initializers import Uniform
from shoal.rules.optimizers import SGD
from shoal.table.spec import Segment, TableSpec

from .shards import ShardFactory

__all__ = [
    "BATCH",
    "FEATURES",
    "IDS",
    "ITEMS",
    "USERS",
    "batch",
    "collection",
    "columns",
    "moved",
    "one_table",
    "rows",
    "slices",
    "table",
]

IDS = [1, 2, 3]


def table(name: str, *dims: int, admission: Admission | None = None) -> TableSpec:
    """Segments s0, s1, ... of the given widths, stepped by SGD with rate 1."""
    segments = tuple(
        Segment(name=f"s{i}", dim=dim, optimizer=SGD(lr=1.0), initializer=Uniform(-1.0, 1.0))
        for i, dim in enumerate(dims)
    )
    return TableSpec(name=name, segments=segments, dtype="float64", admission=admission)


def slices(*names: str) -> tuple[LayoutSlice, ...]:
    return tuple(LayoutSlice(*name.split("/")) for name in names)


USERS, ITEMS = table("users", 1, 4), table("items", 1, 4, 2)
FEATURES = (
    Feature("user", "users"),
    Feature("item", "items", ReduceMean()),
    Feature("history", "items", FirstN(2)),
    Feature("clicks", "items", FirstN(2)),
)
BATCH = KeyedRagged.from_lists(
    {
        "user": [[1, 2], [], [3]],
        "item": [[7, 7, 8], [9], []],
        "history": [[7], [], [8, 9, 10]],
        "clicks": [[], [11, 12], [7]],
    }
)


def collection(
    make_shard: ShardFactory,
    layouts: Sequence[Layout] | None = None,
    features: Sequence[Feature] = FEATURES,
    tables: Sequence[TableSpec] = (USERS, ITEMS),
    *,
    init_on_lookup: bool = True,
) -> EmbeddingCollection:
    shard = make_shard(tables)
    return EmbeddingCollection(
        tables, features, layouts, shard=shard, init_on_lookup=init_on_lookup
    )


def rows(owner: EmbeddingCollection, name: str, ids: list[int]) -> Tensor:
    return owner.table(name).lookup(ids)


def one_table(make_shard: ShardFactory, width: int = 2) -> EmbeddingCollection:
    spec = table("t", width)
    return EmbeddingCollection([spec], [Feature("a", "t")], shard=make_shard([spec]))


def batch(*lists: list[int]) -> KeyedRagged:
    return KeyedRagged.from_lists({"a": list(lists)})


def moved(owner: EmbeddingCollection, act: Callable[[], object], ids: list[int] = IDS) -> Tensor:
    """How far some ids of table t fall while `act` runs; they are inserted first."""
    owner(batch(ids))
    before = owner.table("t").lookup(ids)
    act()
    return before - owner.table("t").lookup(ids)


def columns(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)[:, None].expand(-1, 2)
