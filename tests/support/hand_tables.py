"""Small tables for checkpoints, and checks of loaded tables."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from shoal.checkpoint.loading_rows import LoadTally
from shoal.rules.admission import Admission
from shoal.rules.optimizers import Adagrad, Adam
from shoal.table.cpu.shard import CpuShard
from shoal.table.facade import Table
from shoal.table.hosting import HostedTables
from shoal.table.spec import Segment, TableSpec
from shoal.table.values import RowChunk

from .saved_by_hand import chunk_where

__all__ = [
    "BIAS",
    "HASHES",
    "ITEMS",
    "QUARTERS",
    "TAGS",
    "USERS",
    "VEC",
    "OneOf",
    "check_equal",
    "check_state",
    "hosted",
    "trained",
]

VEC = Segment(name="vec", dim=4, optimizer=Adagrad())
BIAS = Segment(name="bias", dim=1, optimizer=Adam())
USERS = TableSpec(name="users", segments=(BIAS, VEC))
ITEMS = TableSpec(name="items", segments=(VEC,), admission=Admission(threshold=3))
TAGS = TableSpec(name="tags", segments=(VEC,))
HASHES = 1 << 64
QUARTERS = tuple(k * (HASHES // 4) for k in (1, 2, 3))


def trained(spec: TableSpec, rows: int, seed: int = 0) -> Table:
    """A table whose rows all differ, state and metadata, too."""
    table = Table(dataclasses.replace(spec, admission=None), seed=seed)
    made = torch.Generator().manual_seed(rows)
    ids = torch.randint(-(1 << 62), 1 << 62, (rows,), generator=made)
    for step in range(2):
        part = ids[: rows // (step + 1)]
        grads = torch.randn(part.numel(), spec.dim, generator=made).to(table._dtype)
        table.apply(part, grads, global_step=step, event_time_s=10 + 5 * step)
        table.close_version()
    return table


def hosted(*specs: TableSpec, seed: int = 0) -> HostedTables:
    return HostedTables(specs=specs, shard=CpuShard(specs, seed=seed))


def check_equal(found: RowChunk, want: RowChunk) -> None:
    for one in dataclasses.fields(want):
        if one.name != "table":
            here, there = getattr(found, one.name), getattr(want, one.name)
            assert here.dtype == there.dtype and torch.equal(here, there), one.name


def check_state(found: RowChunk, state: dict[int, RowChunk]) -> None:
    assert sorted(found.ids.tolist()) == sorted(state)
    for k, id_ in enumerate(found.ids.tolist()):
        check_equal(chunk_where(found, torch.tensor([k])), state[id_])


class OneOf:
    """One rank's view of a job whose other ranks send the same values."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size

    def gather_objects(self, value: Any, *, what: str) -> list[Any]:
        told, own = value
        mine = (told, own)
        none: dict[str, int] = {}
        empty = (
            dataclasses.replace(own, rows=none, expired=none) if isinstance(own, LoadTally) else own
        )
        return [mine if rank == self.rank else (None, empty) for rank in range(self.world_size)]
