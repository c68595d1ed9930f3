"""A batch, a local shard that has all rows, and the same rows as they would be received."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.embedding.layouts import Feature, Layout, compile_layouts
from shoal.exchange.pooling import HostedColumns, ReceivedRows
from shoal.lookup import PoolPlan
from shoal.ragged import KeyedRagged
from shoal.rules.initializers import Zeros
from shoal.rules.optimizers import SGD
from shoal.table.cpu.shard import CpuShard
from shoal.table.shard import GradRecord, IdGroups, StepContext
from shoal.table.spec import Segment, TableSpec

__all__ = ["CTX", "Received", "batch_of", "make_received", "table"]

CTX = StepContext()


def table(name: str, *dims: int, dtype: str = "float32") -> TableSpec:
    segments = tuple(
        Segment(name=f"s{i}", dim=dim, optimizer=SGD(lr=1.0), initializer=Zeros())
        for i, dim in enumerate(dims)
    )
    return TableSpec(name=name, segments=segments, dtype=dtype)


def batch_of(
    names: Sequence[str], lengths: Sequence[Sequence[int]], *, weights: bool = False, ids: int = 6
) -> KeyedRagged:
    draw = torch.Generator().manual_seed(sum(map(sum, lengths)))
    lengths_FB = torch.tensor([list(row) for row in lengths], dtype=torch.int64)
    count = int(lengths_FB.sum())
    values = torch.randint(-ids, ids, (count,), generator=draw)
    scales = torch.randint(-4, 5, (count,), generator=draw).float() / 2 if weights else None
    return KeyedRagged.from_lengths(list(names), values, lengths_FB, scales)


@dataclass(frozen=True, slots=True, eq=False)
class Received:
    """What `ReceivedRows` is given, and the local shard to compare with."""

    shard: CpuShard
    plan: PoolPlan
    batch: KeyedRagged
    groups: IdGroups
    hosted: tuple[HostedColumns, ...]
    reals: tuple[torch.dtype, ...]
    rows: tuple[Tensor, ...]
    offsets_N: Tensor
    places: tuple[dict[int, int], ...]
    dense: bool = False

    def compiled(self) -> ReceivedRows:
        return ReceivedRows(
            self.plan, self.groups.tables_G.tolist(), self.hosted, self.reals, dense=self.dense
        )

    def on(self, device: str) -> tuple[list[Tensor], Tensor, KeyedRagged]:
        """Rows, offsets and batch on a device."""
        rows = [part.to(device) for part in self.rows]
        return rows, self.offsets_N.to(device), self.batch.to(device)

    def expected(self) -> tuple[Tensor, ...]:
        """What the local shard pools."""
        ticket = self.shard.find_or_init(self.groups, ctx=CTX)
        offsets, weights = self.batch.offsets_FB1, self.batch.weights_N
        return self.shard.gather_pooled(ticket, self.plan, offsets, weights, ctx=CTX)

    def expected_grads(self, grads: Sequence[Tensor]) -> list[dict[int, Tensor]]:
        """For each hosted table, what the local shard would sum for each id."""
        ticket = self.shard.find_or_init(self.groups, ctx=CTX)
        offsets, weights = self.batch.offsets_FB1, self.batch.weights_N
        record = GradRecord(ticket, tuple(grads), self.plan, offsets, weights)
        found = self.shard.sum_grads([record])
        sums = {
            number: dict(zip(ids.tolist(), rows, strict=True))
            for number, ids, rows in zip(found.tables, found.ids, found.sums, strict=True)
        }
        return [
            {id_: row[c.start : c.stop] for id_, row in sums.get(c.table, {}).items()}
            for c in self.hosted
        ]

    def grads_of(self, spread: Sequence[Tensor]) -> list[dict[int, Tensor]]:
        """Of each hosted table, each id's part of the flat gradients."""
        return [
            {id_: spread[c.buffer][place : place + c.width] for id_, place in places.items()}
            for c, places in zip(self.hosted, self.places, strict=True)
        ]


def make_received(
    tables: Sequence[TableSpec],
    features: Sequence[Feature],
    layouts: Sequence[Layout],
    batch: KeyedRagged,
    cuts: Sequence[Sequence[int]],
    *,
    banks: Sequence[int] | None = None,
    seed: int = 0,
    exact: bool = True,
    dense: bool = False,
) -> Received:
    """Received rows of a batch.

    cuts: of each table, the columns at which it is split into hosted slices.
    banks: how many banks of each table's dtype its hosted slices take turns in.
    exact: rows whose sums need no rounding.
    dense: rows are contiguous.
    """
    specs = {spec.name: spec for spec in tables}
    plan = compile_layouts(specs, features, layouts).plan
    names = [spec.name for spec in tables]
    tables_G = torch.tensor([names.index(f.table) for f in features], dtype=torch.int32)
    ordered = batch.select([feature.name for feature in features])
    groups = IdGroups(ordered.values_N, ordered.host_splits, tables_G)
    draw = torch.Generator().manual_seed(seed)
    shard = CpuShard(tables, seed=1)
    for number, spec in enumerate(tables):
        mine = [ordered[f.name].values for f in features if f.table == spec.name]
        ids = torch.cat([*mine, torch.empty(0, dtype=torch.int64)]).unique()
        rows = torch.randn(ids.numel(), spec.dim, generator=draw, dtype=torch.float64)
        rows = (rows * 8).round() / 8 if exact else rows
        real = torch.float64 if spec.dtype == "float64" else torch.float32
        where = IdGroups(
            ids, torch.tensor([0, ids.numel()]), torch.tensor([number], dtype=torch.int32)
        )
        shard.assign(where, [rows.to(real)], ctx=CTX)
    hosted, reals = _hosted(tables, cuts, banks or [1] * len(tables))
    flat, places = _flat(shard, ordered, tables_G.tolist(), hosted, reals, draw, dense)
    offsets = [
        places[h][id_]
        for h, columns in enumerate(hosted)
        for g, feature in enumerate(features)
        if int(tables_G[g]) == columns.table
        for id_ in ordered[feature.name].values.tolist()
    ]
    offsets_N = torch.tensor(offsets, dtype=torch.int64)
    return Received(shard, plan, ordered, groups, hosted, reals, flat, offsets_N, places, dense)


def _hosted(
    tables: Sequence[TableSpec], cuts: Sequence[Sequence[int]], banks: Sequence[int]
) -> tuple[tuple[HostedColumns, ...], tuple[torch.dtype, ...]]:
    reals: list[torch.dtype] = []
    turns: dict[torch.dtype, list[int]] = {}
    hosted = []
    for number, (spec, inner, many) in enumerate(zip(tables, cuts, banks, strict=True)):
        real = torch.float64 if spec.dtype == "float64" else torch.float32
        own = turns.setdefault(real, [])
        while len(own) < many:
            own.append(len(reals))
            reals.append(real)
        edges = sorted({0, spec.dim, *(cut for cut in inner if 0 < cut < spec.dim)})
        for turn, (start, stop) in enumerate(itertools.pairwise(edges)):
            hosted.append(HostedColumns(number, start, stop, own[turn % many]))
    return tuple(hosted), tuple(reals)


def _flat(
    shard: CpuShard,
    ordered: KeyedRagged,
    tables: Sequence[int],
    hosted: Sequence[HostedColumns],
    reals: Sequence[torch.dtype],
    draw: torch.Generator,
    dense: bool,
) -> tuple[tuple[Tensor, ...], tuple[dict[int, int], ...]]:
    """Each bank's rows: of every hosted table the distinct ids, unordered, with spare floats unless
    they are dense.
    """
    parts: list[list[Tensor]] = [[] for _ in reals]
    places: list[dict[int, int]] = []
    for columns in hosted:
        mine = [ordered[k].values for k, t in zip(ordered.keys, tables, strict=True)
                if t == columns.table]  # fmt: skip
        ids = torch.cat([*mine, torch.empty(0, dtype=torch.int64)]).unique()
        ids = ids[torch.randperm(ids.numel(), generator=draw)]
        own: dict[int, int] = {}
        for id_ in ids.tolist():
            if not dense and int(torch.randint(4, (), generator=draw)) == 0:
                parts[columns.buffer].append(
                    torch.full((3,), torch.nan, dtype=reals[columns.buffer])
                )
            own[id_] = sum(part.numel() for part in parts[columns.buffer])
            entry = shard.entry(columns.table, id_)
            assert entry is not None
            row = entry.weights[columns.start : columns.stop].to(reals[columns.buffer])
            parts[columns.buffer].append(row)
        places.append(own)
    flat = tuple(
        torch.cat([*own, torch.empty(0, dtype=real)])
        for own, real in zip(parts, reals, strict=True)
    )
    return flat, tuple(places)
