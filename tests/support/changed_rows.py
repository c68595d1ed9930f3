"""Tables, rows in them, and every way to change rows: what a snapshot must not show."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from shoal import Expiry, Segment, TableSpec, initializers, optimizers
from shoal.table.shard import GradRecord, Shard, StepContext
from shoal.table.values import Cursor, RowChunk

from .cut_rows import COLUMNS, assert_same, in_pieces
from .id_groups import groups_of

__all__ = [
    "CHANGES",
    "check_several",
    "exported",
    "filled",
    "put",
    "reload",
    "specs",
    "train",
]

S = TypeVar("S", bound=Shard)

CLOCK = itertools.count(1)


def specs() -> tuple[TableSpec, ...]:
    segment = Segment(dim=3, initializer=initializers.Zeros(), optimizer=optimizers.Adagrad(lr=1.0))
    plain = Segment(dim=2, initializer=initializers.Zeros(), optimizer=optimizers.SGD(lr=1.0))
    return (
        TableSpec(name="grows", segments=(segment,), expiry=Expiry(ttl_s=100)),
        TableSpec(name="full", segments=(plain,), capacity_rows=64, on_full="lru"),
        TableSpec(name="narrow", segments=(plain,), dtype="bfloat16"),
    )


def put(shard: Shard, table: int, ids: Sequence[int], at_s: int = 0) -> None:
    """Assign values never used before."""
    dim = shard.specs[table].dim
    weights_ND = torch.full((len(ids), dim), float(next(CLOCK)))
    shard.assign(groups_of((table, ids)), [weights_ND], ctx=StepContext(event_time_s=at_s))


def train(shard: Shard, table: int, ids: Sequence[int], at_s: int = 0) -> None:
    ctx = StepContext(event_time_s=at_s, global_step=3)
    ticket = shard.find_or_init(groups_of((table, ids)), ctx=ctx)
    grads = torch.ones(len(ids), shard.specs[table].dim)
    shard.apply([GradRecord(ticket, (grads,))], ctx=ctx)


def filled(shard: S, rows: int = 3000) -> S:
    """So many rows in the table that grows, 64 and at most 200 in the others."""
    put(shard, 0, range(rows), at_s=50)
    train(shard, 0, range(0, rows, 7), at_s=60)
    put(shard, 1, range(64), at_s=50)
    some = min(rows // 2, 100)
    train(shard, 2, range(-some, some))
    return shard


def exported(shard: Shard) -> list[RowChunk]:
    return [shard.export(table) for table in range(3)]


def reload(shard: Shard, ids: Sequence[int], version: int) -> None:
    """Load whole rows with their own version."""
    count = len(ids)
    shard.load(
        0,
        RowChunk(
            "grows",
            torch.tensor(ids, dtype=torch.int64),
            torch.full((count, 3), float(next(CLOCK))),
            torch.ones(count, 3),
            torch.full((count,), version),
            torch.full((count,), 70),
            torch.ones(count, dtype=torch.int64),
        ),
    )


def apply_ids(shard: Shard, table: int, ids: Sequence[int]) -> None:
    grads = [torch.ones(len(ids), shard.specs[table].dim)]
    shard.apply_ids(groups_of((table, ids)), grads, ctx=StepContext(event_time_s=80))


def apply_twice_named(shard: Shard) -> None:
    ids = [5, 9, 5, 5, 4000, 9]
    apply_ids(shard, 0, ids)
    train(shard, 0, ids)


def skip_bad(shard: Shard) -> None:
    ctx = StepContext(nan_policy="skip")
    grads = torch.ones(4, 3)
    grads[1] = float("nan")
    shard.apply_ids(groups_of((0, [1, 2, 3, 4])), [grads], ctx=ctx)


def add(shard: Shard) -> None:
    for table in range(3):
        deltas = torch.ones(4, shard.specs[table].dim)
        shard.assign_add(groups_of((table, [1, 2, 2, 7000])), [deltas], ctx=StepContext())


def swap(shard: Shard) -> None:
    """The two oldest rows of the full table go; those that come take their numbers."""
    put(shard, 1, range(2, 64), at_s=90)
    put(shard, 1, [1000], at_s=91)
    put(shard, 1, [1001], at_s=91)
    put(shard, 1, [1, 0], at_s=95)


def reuse(shard: Shard) -> None:
    shard.evict(155)  # those not trained since
    put(shard, 0, range(5000, 5100), at_s=155)
    put(shard, 0, range(50), at_s=155)


def emptied(shard: Shard) -> None:
    for table in range(3):
        shard.clear(table)
    put(shard, 0, range(2500, 2600))


CHANGES: dict[str, Callable[[Shard], object]] = {
    "nothing": lambda shard: None,
    "apply": lambda shard: [train(shard, t, range(-20, 30)) for t in range(3)],
    "apply_ids": lambda shard: [apply_ids(shard, t, range(40)) for t in range(3)],
    "duplicates": apply_twice_named,
    "skipped": skip_bad,
    "assign": lambda shard: [put(shard, t, [0, 1, 2, 9999]) for t in range(3)],
    "assign_add": add,
    "reinitialize": lambda shard: shard.reinitialize(
        groups_of((0, [3, 4, 90_000]), (2, [5])), ctx=StepContext()
    ),
    "load": lambda shard: reload(shard, [1, 2, 77_777], 9),
    "load of old versions": lambda shard: reload(shard, [1, 2, 77_777, 77_778], 1),
    "evict": lambda shard: shard.evict(155),
    "clear": emptied,
    "capacity": lambda shard: put(shard, 1, range(500, 540), at_s=99),
    "swapped rows": swap,
    "reused rows": reuse,
    "all": lambda shard: [CHANGES[name](shard) for name in list(CHANGES) if name != "all"],
}


def check_several(shard: Any, order: Sequence[int], buffer_bytes: int) -> None:
    """Open as many snapshots, the second one of what changed, with changes in between; read each
    before every closing, and close them in this order."""
    held: list[Any] = []
    wanted: list[list[RowChunk]] = []
    for k in range(len(order)):
        since = Cursor(shard.incarnation, held[0].version) if k == 1 else None
        wanted.append([_later(rows, since.version if since else 0) for rows in exported(shard)])
        held.append(shard.snapshot(since, buffer_bytes=buffer_bytes))
        CHANGES[("apply", "reused rows", "swapped rows")[k]](shard)
        if k == 1:  # whatever has the row numbers of the first point has versions of its span
            reload(shard, shard.export(0).ids.tolist(), 1)
    for turn, closed in enumerate(order):
        for k in order[turn:]:
            for table, rows in enumerate(wanted[k]):
                assert int(held[k].histogram(table, 2).sum()) == len(rows.ids)
                assert_same(in_pieces(held[k], table, 1 + turn), rows)
        held[closed].close()
        CHANGES[("load of old versions", "clear", "apply")[turn]](shard)


def _later(rows: RowChunk, version: int) -> RowChunk:
    later_R = rows.versions > version
    return RowChunk(rows.table, *(getattr(rows, name)[later_R] for name in COLUMNS))
