"""Short trainings through an exchange, on one rank or several, and their results."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from shoal.comm.backends.torch import TorchCollectives
from shoal.comm.collectives import Collectives
from shoal.embedding.combiners import FirstN, ReduceMean
from shoal.embedding.gradients import sum_by_id
from shoal.embedding.layouts import Feature, Layout, LayoutSlice, compile_layouts
from shoal.exchange.all_to_all import AllToAllExchange
from shoal.exchange.local import Exchange, LocalExchange, Request, Route
from shoal.exchange.wire import Wire
from shoal.placement import Placement
from shoal.ragged import KeyedRagged
from shoal.rules.admission import Admission
from shoal.rules.expiry import Expiry
from shoal.rules.initializers import Uniform
from shoal.rules.optimizers import SGD, Adagrad, Adam, Optimizer, SignSGD
from shoal.table.cpu.shard import CpuShard
from shoal.table.factory import make_shard
from shoal.table.hosting import hosted_specs, plan_placement
from shoal.table.shard import GradRecord, IdGroups, Shard, StepContext
from shoal.table.spec import Segment, TableSpec

__all__ = ["OPTIMIZERS", "SHARDINGS", "Case", "Outcome", "local_run", "rank_runs", "whole_rows"]

OPTIMIZERS: dict[str, Optimizer] = {
    "sgd": SGD(lr=0.5),
    "adagrad": Adagrad(lr=0.5),
    "adam": Adam(lr=0.5),
    "sign_sgd": SignSGD(lr=0.5),
}
SHARDINGS = ("row_wise", "table_wise", "column_wise", "table_row_wise", "grid", "data_parallel")
START_S = 1_000
IDS = np.array([-(2**63), 2**63 - 1, -1, 0, *(k * 2**59 + j for k in range(-3, 9) for j in (0, 1))])
"""What features hold: the ends of int64 too, which an index may use as marks."""
FEATURES = (
    Feature("user", "users"),
    Feature("item", "items", ReduceMean()),
    Feature("tag", "tags"),
    Feature("history", "items", FirstN(2)),
)
LAYOUTS = (
    Layout("wide", "addn", (LayoutSlice("user", "a"), LayoutSlice("item", "a"))),
    Layout("deep", "concat", (LayoutSlice("item"), LayoutSlice("user", "b"))),
    Layout("rest", "none", (LayoutSlice("history"), LayoutSlice("tag"))),
)


@dataclass(frozen=True)
class Case:
    """One training, the same on every rank.

    sizes: examples of each rank in each step; ranks beyond it take it from the start.
    local_world_size: ranks of a node; with as many as there are, grids would have one slice.
    """

    sharding: str = "row_wise"
    kinds: dict[str, str] = field(default_factory=dict)
    optimizer: str = "sgd"
    sizes: tuple[int, ...] = (4,)
    steps: int = 3
    weights: bool = False
    threshold: int | None = None
    ttl_s: int | None = None
    capacity: int | None = None
    tags_dtype: str = "float64"
    insert: bool = True
    per_sender: bool = False
    early: bool = False
    wire: Wire | None = None
    local_world_size: int | None = 2

    def size(self, rank: int) -> int:
        return self.sizes[rank % len(self.sizes)]


@dataclass(frozen=True)
class Outcome:
    """Outputs by step; what inference reads afterwards; rows by hosted table; ids evicted."""

    outputs: list[list[np.ndarray]]
    read: list[np.ndarray]
    rows: dict[str, dict[str, Any]]
    evicted: int


def specs_of(case: Case) -> tuple[TableSpec, ...]:
    rule = OPTIMIZERS[case.optimizer]
    admission = None if case.threshold is None else Admission(threshold=case.threshold)
    expiry = None if case.ttl_s is None else Expiry(ttl_s=case.ttl_s)

    def spec(name: str, dtype: str, **dims: int) -> TableSpec:
        segments = tuple(
            Segment(name=key, dim=dim, optimizer=rule, initializer=Uniform(-1.0, 1.0))
            for key, dim in dims.items()
        )
        return TableSpec(
            name=name,
            segments=segments,
            dtype=dtype,
            capacity_rows=case.capacity if name == "users" else None,
            on_full="lru",
            admission=admission,
            expiry=expiry,
        )

    return (
        spec("users", "float32", a=1, b=4),
        spec("items", "float32", a=1, b=7),
        spec("tags", case.tags_dtype, vec=3),
    )


def placement_of(case: Case, world_size: int) -> Placement:
    return plan_placement(
        specs_of(case),
        world_size,
        default=case.sharding,
        kinds=case.kinds,
        local_world_size=case.local_world_size,
    )


def batch_of(case: Case, step: int, rank: int) -> KeyedRagged:
    """Ids that ranks share in part; means are over 1, 2 or 4 ids, so that they stay exact."""
    rng = np.random.default_rng([step, rank])
    lists: dict[str, list[list[int]]] = {"user": [], "item": [], "tag": [], "history": []}
    for _ in range(case.size(rank)):
        for key, rows in lists.items():
            length = int(rng.choice([0, 1, 2, 4] if key != "user" else [1]))
            rows.append(rng.choice(IDS, length).tolist())
    if not case.weights:
        return KeyedRagged.from_lists(lists)
    weights = {
        key: [[float(rng.choice([0.5, 1.0, 2.0])) for _ in row] for row in rows]
        for key, rows in lists.items()
    }
    return KeyedRagged.from_lists(lists, weights)


def grads_of(outputs: Sequence[Tensor], case: Case, step: int, rank: int) -> tuple[Tensor, ...]:
    """Multiples of 1/64, none of them 0, so that sums are exact in every order."""
    rng = np.random.default_rng([7, step, rank])
    parts = []
    for output in outputs:
        values = (rng.integers(0, 8, tuple(output.shape)) * 2 + 1) / 64
        parts.append(torch.from_numpy(values).to(output))
    return tuple(parts)


class Training:
    """Steps of one case through one exchange."""

    def __init__(self, case: Case, exchange: Exchange) -> None:
        self.case, self.exchange = case, exchange
        self.evicted = 0
        tables = {spec.name: spec for spec in exchange.specs}
        self.plan = compile_layouts(tables, FEATURES, LAYOUTS).plan
        names = [spec.name for spec in exchange.specs]
        self.tables_G = torch.tensor(
            [names.index(feature.table) for feature in FEATURES], dtype=torch.int32
        )

    def request(self, batch: KeyedRagged) -> Request:
        batch = batch.to(self.exchange.shard.device)
        return Request(batch, batch, self.tables_G, self.plan)

    def context(self, step: int, late_s: int) -> StepContext:
        return StepContext(global_step=step, event_time_s=START_S + 10 * step + late_s)

    def forward(self, batch: KeyedRagged, ctx: StepContext) -> tuple[Route, tuple[Tensor, ...]]:
        exchange, case = self.exchange, self.case
        sending = exchange.send(self.request(batch), insert=case.insert, ctx=ctx)
        route = exchange.probe(sending)
        if case.early:
            exchange.fetch(route, ctx=ctx)
        outputs = exchange.combine(route, ctx=ctx)
        if case.early:
            again = exchange.combine(route, ctx=ctx)
            assert all(torch.equal(a, b) for a, b in zip(outputs, again, strict=True))
        return route, outputs

    def apply(self, records: Iterable[GradRecord], route: Route, ctx: StepContext) -> None:
        shard, kept = self.exchange.shard, list(records)
        ctx = replace(ctx, event_time_s=route.event_time_s)
        turns = [[record] for record in kept] if self.case.per_sender else [kept]
        for turn in turns:
            if self.case.insert:
                shard.apply(turn, ctx=ctx)
            else:
                _apply_ids(shard, turn, ctx)
        if self.case.ttl_s is not None:
            self.evicted += shard.evict(ctx.event_time_s)

    def outcome(self, outputs: list[list[np.ndarray]], batch: KeyedRagged) -> Outcome:
        shard = self.exchange.shard
        read = self.exchange.read(self.request(batch))
        rows = {}
        for k, spec in enumerate(shard.specs):
            chunk = shard.export(k)
            rows[spec.name] = {
                "ids": chunk.ids.tolist(),
                "weights": chunk.weights.tolist(),
                "last_seen_s": chunk.last_seen_s.tolist(),
                "counts": chunk.counts.tolist(),
                "state": _state_by_column(spec, chunk.state).tolist(),
                "occurrences": _occurrences(shard, k),
            }
        return Outcome(outputs, _arrays(read), rows, self.evicted)


def _state_by_column(spec: TableSpec, state_RS: Tensor) -> Tensor:
    """[R, D, ...]: each column's numbers, with those that its segment has one of."""
    parts, at = [], 0
    for segment in spec.segments:
        own_RS = state_RS[:, at : at + segment.state_width]
        at += segment.state_width
        runs = segment.optimizer.state_width(2) - segment.optimizer.state_width(1)
        size = runs * segment.dim
        runs_RDX = own_RS[:, :size].reshape(len(own_RS), runs, segment.dim).transpose(1, 2)
        single_RDX = own_RS[:, None, size:].expand(-1, segment.dim, -1)
        parts.append(torch.cat([runs_RDX, single_RDX], dim=2))
    return torch.cat(parts, dim=1)


def _occurrences(shard: Shard, table: int) -> dict[int, int]:
    """Admission counts of ids that have no row yet."""
    occurrences = shard.admission_state(table)
    return dict(zip(occurrences.ids.tolist(), occurrences.counts.tolist(), strict=True))


def _apply_ids(shard: Shard, records: Sequence[GradRecord], ctx: StepContext) -> None:
    summed = sum_by_id(records, [spec.dim for spec in shard.specs])
    if not summed.tables:
        return
    sizes = torch.tensor([0, *(ids.numel() for ids in summed.ids)])
    groups = IdGroups(
        torch.cat(summed.ids), sizes.cumsum(0), torch.tensor(summed.tables, dtype=torch.int32)
    )
    shard.apply_ids(groups, summed.sums, torch.cat(summed.counts), ctx=ctx)


def rank_run(
    case: Case, collectives: Collectives, make: Callable[..., Shard] = CpuShard
) -> Outcome:
    """The case on this rank; gradients of ranks add up."""
    rank, placement = collectives.rank, placement_of(case, collectives.world_size)
    specs = specs_of(case)
    shard = make(hosted_specs(specs, placement, rank))
    exchange = AllToAllExchange(
        shard,
        placement,
        specs,
        collectives,
        grad_reduce="sum",
        per_sender_steps=case.per_sender,
        wire=case.wire,
    )
    training, seen, device = Training(case, exchange), [], collectives.device
    for step in range(case.steps):
        ctx = training.context(step, late_s=rank)
        route, outputs = training.forward(batch_of(case, step, rank).to(device), ctx)
        grads = [grad.to(device) for grad in grads_of(outputs, case, step, rank)]
        pending = exchange.back(route, tuple(grads))
        training.apply(pending.wait(), route, ctx)
        seen.append(_arrays(outputs))
    return training.outcome(seen, batch_of(case, case.steps, rank).to(device))


def local_run(case: Case, world_size: int) -> Outcome:
    """The same in one process: the batches of all ranks are one."""
    exchange = LocalExchange(CpuShard(specs_of(case)))
    training, seen = Training(case, exchange), []
    ranks = range(world_size)
    for step in range(case.steps):
        ctx = training.context(step, late_s=world_size - 1)
        batches = [batch_of(case, step, rank) for rank in ranks]
        if case.per_sender:
            passes = [training.forward(batch, ctx) for batch in batches]
            for rank, (route, outputs) in enumerate(passes):
                grads = grads_of(outputs, case, step, rank)
                training.apply(exchange.back(route, grads).wait(), route, ctx)
            columns = zip(*(outputs for _, outputs in passes), strict=True)
            seen.append(_arrays(torch.cat(parts) for parts in columns))
            continue
        route, outputs = training.forward(KeyedRagged.cat(batches), ctx)
        pieces = [output.split([case.size(rank) for rank in ranks]) for output in outputs]
        by_rank = [grads_of([p[rank] for p in pieces], case, step, rank) for rank in ranks]
        joined = tuple(torch.cat(parts) for parts in zip(*by_rank, strict=True))
        training.apply(exchange.back(route, joined).wait(), route, ctx)
        seen.append(_arrays(outputs))
    last = KeyedRagged.cat([batch_of(case, case.steps, rank) for rank in ranks])
    return training.outcome(seen, last)


def rank_runs(cases: Sequence[Case], device: str = "cpu") -> list[Outcome]:
    """Every case on this rank of the job that the environment describes."""
    on_gpu = device == "cuda"
    place = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(place)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    collectives = TorchCollectives(_world(), place, 120.0)
    try:
        return [
            rank_run(case, collectives, partial(make_shard, device=str(place))) for case in cases
        ]
    finally:
        collectives.close()
        dist.destroy_process_group()


def _world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None and os.environ["WORLD_SIZE"]
    return group


def whole_rows(outcomes: Sequence[Outcome], table: str) -> dict[int, tuple[Any, ...]]:
    """Each id's (weights, state, last seen, count) of a table, (occurrences,) of ids without row:
    columns and shares of all ranks joined.
    """
    slices: dict[int, dict[int, tuple[Any, ...]]] = {}
    for outcome in outcomes:
        for name, rows in outcome.rows.items():
            base, _, columns = name.partition("[")
            if base != table:
                continue
            start = int(columns.partition(":")[0]) if columns else 0
            found = slices.setdefault(start, {})
            fields = ("weights", "state", "last_seen_s", "counts")
            own = dict(
                zip(rows["ids"], zip(*(rows[key] for key in fields), strict=True), strict=True)
            )
            assert own.keys().isdisjoint(rows["occurrences"])
            for id_, row in [*own.items(), *((k, (n,)) for k, n in rows["occurrences"].items())]:
                assert found.setdefault(id_, row) == row, "replicas differ"
    joined = slices.pop(0)
    for _, found in sorted(slices.items()):
        assert found.keys() == joined.keys()
        for id_, row in found.items():
            before = joined[id_]
            assert before[-2:] == row[-2:] if len(row) > 1 else before == row
            if len(row) > 1:
                joined[id_] = (before[0] + row[0], before[1] + row[1], *row[2:])
    return joined


def _arrays(tensors: Iterable[Tensor]) -> list[np.ndarray]:
    return [tensor.cpu().numpy().copy() for tensor in tensors]
