"""Which buffer each hosted table's rows travel in: the part of a request that is known beforehand.

A lane is a run of hosted tables whose ids travel together and whose rows share one flat buffer:
one dtype, and either split over ranks or kept on every rank. Most requests have one lane.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby

import torch
from torch import Tensor

from shoal.hashing import salt, to_signed
from shoal.placement import Hosted, Placement
from shoal.table.hosting import hosted_spec
from shoal.table.rows import real_dtype
from shoal.table.spec import TableSpec

__all__ = ["HostedTable", "Lane", "Lanes", "compile_lanes"]

_ABSENT = -1


@dataclass(frozen=True)
class HostedTable:
    """Columns of a table that a request reads.

    Args:
        table: index of the whole table among the job's specs.
        hosted: where its rows are.
        hash_name: what its ids are hashed as.
        local: its index in this rank's shard, -1 where the shard has none of it.
        features: the request's features that read it, rising.
    """

    table: int
    hosted: Hosted
    hash_name: str
    local: int
    features: tuple[int, ...]

    @property
    def dim(self) -> int:
        """Floats of a row."""
        return self.hosted.stop - self.hosted.start


@dataclass(frozen=True)
class Lane:
    """Hosted tables of one dtype, all split over ranks or all kept on every rank.

    Args:
        real: dtype of the rows that travel.
        replicated: every rank has all rows.
        tables: the hosted tables, in the order of their ids and rows.
        first_column: of the lane's sizes among all sizes that ranks exchange.
    """

    real: torch.dtype
    replicated: bool
    tables: tuple[HostedTable, ...]
    first_column: int

    @cached_property
    def columns(self) -> slice:
        """The lane's columns among the sizes."""
        return slice(self.first_column, self.first_column + len(self.tables))

    @cached_property
    def dims(self) -> tuple[int, ...]:
        """Floats of a row of each table."""
        return tuple(table.dim for table in self.tables)

    @cached_property
    def dims_K(self) -> Tensor:
        """The same as int64 on the CPU."""
        return torch.tensor(self.dims, device="cpu")

    def ranges(self, world_size: int) -> Tensor:
        """int64 [K, 2 + W] on the CPU: each table's salt, shares, and the rank of each share."""
        lines_KX = torch.zeros(len(self.tables), 2 + world_size, dtype=torch.int64, device="cpu")
        for line, table in zip(lines_KX, self.tables, strict=True):
            ranks = table.hosted.ranks
            line[0], line[1] = to_signed(salt(table.hash_name)), len(ranks)
            line[2 : 2 + len(ranks)] = torch.tensor(ranks, device="cpu")
        return lines_KX

    @cached_property
    def edges(self) -> tuple[int, ...] | None:
        """First feature of each table, and the end; None unless the tables' features are
        neighbours in this order.
        """
        features = [feature for table in self.tables for feature in table.features]
        first, last = features[0], features[-1]
        if features != list(range(first, last + 1)):
            return None
        return (*(table.features[0] for table in self.tables), last + 1)

    @cached_property
    def here(self) -> tuple[int, ...]:
        """Which of its tables this rank's shard has."""
        return tuple(k for k, table in enumerate(self.tables) if table.local != _ABSENT)

    @cached_property
    def here_columns(self) -> Tensor:
        """Columns of those tables among the sizes."""
        return torch.tensor(self.here, dtype=torch.int64, device="cpu") + self.first_column


@dataclass(frozen=True)
class Lanes:
    """All lanes of a request, for one rank of `world_size`."""

    lanes: tuple[Lane, ...]
    rank: int
    world_size: int
    _ranges: dict[tuple[int, torch.device], Tensor] = field(
        default_factory=dict, repr=False, compare=False
    )

    @cached_property
    def tables(self) -> tuple[HostedTable, ...]:
        """Hosted tables of all lanes, in order."""
        return tuple(table for lane in self.lanes for table in lane.tables)

    @cached_property
    def columns(self) -> int:
        """Sizes that each rank tells each other."""
        return len(self.tables)

    def ranges_on(self, lane: Lane, device: torch.device) -> Tensor:
        """A lane's `ranges`, on a device; sent there once."""
        key = lane.first_column, device
        if key not in self._ranges:
            self._ranges[key] = lane.ranges(self.world_size).to(device)
        return self._ranges[key]

    @cached_property
    def here_G(self) -> Tensor:
        """int32: tables, in this rank's shard, of what comes from all ranks: lane by lane."""
        return self._local(self.world_size)

    @cached_property
    def sender_G(self) -> Tensor:
        """int32: tables, in this rank's shard, of what comes from one rank."""
        return self._local(1)

    def _local(self, senders: int) -> Tensor:
        numbers = [
            number
            for lane in self.lanes
            for number in [lane.tables[k].local for k in lane.here] * senders
        ]
        return torch.tensor(numbers, dtype=torch.int32, device="cpu")


def compile_lanes(
    specs: Sequence[TableSpec],
    placement: Placement,
    local: Mapping[str, int],
    rank: int,
    tables_G: Sequence[int],
) -> Lanes:
    """Lanes of requests whose features read the tables `tables_G` of `specs`.

    local: index in this rank's shard of each hosted table's name.
    """
    found = []
    for table in sorted(set(tables_G)):
        spec = specs[table]
        features = tuple(g for g, k in enumerate(tables_G) if k == table)
        for hosted in placement.of(spec.name):
            here = local[hosted_spec(spec, hosted).name] if rank in hosted.ranks else _ABSENT
            entry = HostedTable(table, hosted, spec.hash_name, here, features)
            found.append((hosted.replicated, real_dtype(spec) is torch.float64, entry))
    # Sorting keeps the order of tables inside a lane.
    found.sort(key=lambda item: item[:2])
    lanes: list[Lane] = []
    column = 0
    for (replicated, double), entries in groupby(found, key=lambda item: item[:2]):
        members = tuple(entry for _, _, entry in entries)
        real = torch.float64 if double else torch.float32
        lanes.append(Lane(real, replicated, members, column))
        column += len(members)
    return Lanes(tuple(lanes), rank, placement.world_size)
