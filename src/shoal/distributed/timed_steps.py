"""Whole steps of tables over ranks, timed: what a plan predicts, measured."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from shoal import planner
from shoal.comm.mesh import Mesh
from shoal.distributed.model import DistributedModelParallel
from shoal.embedding.collection import EmbeddingCollection
from shoal.embedding.layouts import Feature
from shoal.exchange.all_to_all import AllToAllExchange
from shoal.optim import SparseOptimizer
from shoal.placement import Placement, Sharding, data_parallel, grid
from shoal.planner import Topology
from shoal.planner.options import Option
from shoal.planner.topology import Rates
from shoal.ragged import KeyedRagged
from shoal.rules.optimizers import Adagrad
from shoal.table.factory import make_shard
from shoal.table.hosting import hosted_specs
from shoal.table.spec import Segment, TableSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class TableLoad:
    """A table of a timed step: ids of each example are drawn by a Zipf law."""

    name: str
    rows: int
    dim: int
    ids_per_sample: int = 1
    exponent: float = 1.0

    @property
    def spec(self) -> TableSpec:
        """With Adagrad."""
        segments = (Segment(dim=self.dim, optimizer=Adagrad(lr=0.01)),)
        return TableSpec(name=self.name, segments=segments, expected_rows=self.rows)


@lru_cache(maxsize=64)
def _input(load: TableLoad) -> planner.TableInput:
    """What is planned for a table."""
    statistics = planner.zipf(load.rows, load.exponent, ids_per_sample=load.ids_per_sample)
    return planner.table_input(load.spec, statistics, rows=float(load.rows))


class _Sums(nn.Module):
    """The sum of all pooled rows: a step without a dense part."""

    def __init__(self, loads: Sequence[TableLoad], device: torch.device) -> None:
        super().__init__()
        self.tables = EmbeddingCollection(
            [one.spec for one in loads],
            [Feature(one.name, one.name) for one in loads],
            device=str(device),
        )

    def forward(self, batch: KeyedRagged) -> Tensor:
        return torch.stack([one.sum() for one in self.tables(batch).values()]).sum()


def timed_steps(
    mesh: Mesh,
    loads: Sequence[TableLoad],
    placing: Placement,
    batch_size: int,
    *,
    steps: int = 30,
    seed: int = 0,
) -> float:
    """Seconds of a step of the slowest rank, of the fastest fifth of steps; a collective call.

    A step is lookup, backward and update, one after the other, without a dense part.
    """
    model = _Sums(loads, mesh.device)
    wrapped: nn.Module = model
    if mesh.world_size > 1:
        wrapped = DistributedModelParallel(model, placing, mesh=mesh)
    else:
        model.tables.distribute(_alone(mesh, loads, placing))
    optimizer = SparseOptimizer(wrapped)
    generator = torch.Generator().manual_seed(seed * 1000 + mesh.rank)
    batches = [_batch(loads, batch_size, generator, mesh.device) for _ in range(8)]
    seconds = []
    for index in range(steps + 8):
        mesh.control.gather_objects(None, what="begin of a timed step")
        begun = time.perf_counter()
        wrapped(batches[index % 8]).backward()
        optimizer.step()
        optimizer.zero_grad()
        if mesh.device.type == "cuda":
            torch.cuda.synchronize(mesh.device)
        seconds.append(time.perf_counter() - begun)
    own = torch.tensor(seconds[8:], dtype=torch.float64, device="cpu")
    (worst,) = mesh.control.all_reduce(own, "max", what="seconds of steps").wait()
    return float(worst.quantile(0.2))


def _alone(mesh: Mesh, loads: Sequence[TableLoad], placement: Placement) -> AllToAllExchange:
    """What several ranks do, on one: a job of one rank has a shorter way."""
    specs = [one.spec for one in loads]
    shard = make_shard(hosted_specs(specs, placement, 0), device=str(mesh.device))
    return AllToAllExchange(shard, placement, specs, mesh.collectives("timed steps"))


def _batch(
    loads: Sequence[TableLoad], batch_size: int, generator: torch.Generator, device: torch.device
) -> KeyedRagged:
    values, lengths = [], []
    for one in loads:
        count = batch_size * one.ids_per_sample
        total = _cumulated(one.rows, one.exponent, device)
        share = torch.rand(count, generator=generator, dtype=torch.float64, device="cpu").to(device)
        values.append(torch.searchsorted(total, share * total[-1]).clamp_max(one.rows - 1))
        lengths.append(
            torch.full((batch_size,), one.ids_per_sample, dtype=torch.int64, device="cpu")
        )
    # Splits are known to the host where ids come from it.
    ids_N = torch.cat(values).cpu()
    return KeyedRagged.from_lengths(tuple(one.name for one in loads), ids_N, torch.cat(lengths)).to(
        device
    )


@lru_cache(maxsize=4)
def _cumulated(rows: int, exponent: float, device: torch.device) -> Tensor:
    """Weights of rows, most frequent first, added up: tables of a bench are alike."""
    weights = torch.arange(1, rows + 1, dtype=torch.float64, device=device) ** -exponent
    return weights.cumsum(0)


def predicted(
    topology: Topology, loads: Sequence[TableLoad], placement: Placement, batch_size: int
) -> float:
    """Seconds that the cost model has for a step of `timed_steps`."""
    work = planner.Workload(batch_size=batch_size, pipelined=False)
    model = planner.CostModel(topology, work)
    every = [model.fixed_s()] * topology.world_size
    for one in loads:
        table = _input(one)
        slices = placement.of(one.name)
        shared = model.shared_phases(table)
        for hosted in slices:
            split = len(hosted.ranks) > 1 and not hosted.replicated
            kind: Sharding = "row_wise" if split else "table_wise"
            option = Option(
                sharding="data_parallel" if hosted.replicated else kind,
                slices=len(slices),
                tier="device",
                cache=1.0,
                dtype="float32",
                ranks=hosted.ranks if split else (),
            )
            price = model.price(table, option)
            for rank in hosted.ranks:
                every[rank] += price.seconds
        every = [seconds + shared + price.every_s for seconds in every]
    return max(every)


_TURNS = 2
_FITTED = ("step_s", "table_s", "slice_s", "occurrence_s", "replica_s")


def fitted(mesh: Mesh, topology: Topology, *, quick: bool = False) -> Topology:
    """A measured topology, with what whole steps cost besides: fixed, by table, slice, id, replica.

    A collective call of all ranks of a job; steps of some tables are timed that differ in the
    number of tables, column slices, ids and columns. One rank times the path of several.

    quick: small tables and few steps, which show that it runs.
    """
    # Rows and examples: more than caches hold; and so few that calls take most of the time.
    large, few = (100_000, 2048), (100, 8)
    if mesh.device.type == "cuda":
        # Behind enough to do a GPU hides what the host does.
        large = few = (1_000_000, 131_072)
    if quick:
        large, few = (1000, 32), (100, 8)
    timed = _timed_plans(topology.world_size, large, few)
    steps = 3 if quick else 30
    turns = [
        [timed_steps(mesh, *plan, steps=steps, seed=seed) for plan in timed]
        for seed in range(1 if quick else _TURNS)
    ]
    zeros: dict[str, Any] = dict.fromkeys(_FITTED, 0.0)
    none = replace(topology.rates, **zeros)

    def seconds(rates: Rates) -> Tensor:
        every = [predicted(replace(topology, rates=rates), *plan) for plan in timed]
        return torch.tensor(every, dtype=torch.float64, device="cpu")

    # Plans are alike on all ranks, so that a step's seconds are linear in what is fitted.
    base_P = seconds(none)
    ones: list[dict[str, Any]] = [{name: 1.0} for name in _FITTED]
    units = [seconds(replace(none, **one)) - base_P for one in ones]
    measured_P = torch.tensor(turns, dtype=torch.float64, device="cpu").amin(dim=0)
    solved = least_squares(
        torch.stack(units, dim=1) / measured_P[:, None], (measured_P - base_P) / measured_P
    )
    fit: dict[str, Any] = dict(zip(_FITTED, solved, strict=True))
    return replace(topology, rates=replace(topology.rates, **fit))


TimedPlan = tuple[list[TableLoad], Placement, int]


def _timed_plans(ranks: int, large: tuple[int, int], few: tuple[int, int]) -> list[TimedPlan]:
    """Narrow tables of `few` rows and examples of a rank, others of `large`; their placements."""
    every, (rows, batch) = tuple(range(ranks)), large

    def plan(loads: list[TableLoad], slices: int, batch: int) -> TimedPlan:
        hosted = itertools.chain.from_iterable(
            grid(one.name, one.dim, (every,) * slices)
            if slices
            else data_parallel(one.name, one.dim, ranks)
            for one in loads
        )
        return loads, Placement(ranks, tuple(hosted)), batch

    def tables(count: int, **settings: Any) -> list[TableLoad]:
        return [TableLoad(name=f"t{k:02}", exponent=0.8, **settings) for k in range(count)]

    narrow = tables(16, rows=few[0], dim=16)
    medium = tables(6, rows=rows, dim=48, ids_per_sample=4)
    wide = tables(6, rows=rows, dim=128, ids_per_sample=2)
    found = [plan(narrow[:1], 1, few[1]), *(plan(narrow, slices, few[1]) for slices in (1, 2, 4))]
    found += [plan(loads, slices, batch) for loads in (medium, wide) for slices in (1, 2, 4)]
    return found + ([plan(loads, 0, batch) for loads in (medium, wide)] if ranks > 1 else [])


def least_squares(matrix_PX: Tensor, values_P: Tensor) -> list[float]:
    """The X of no negative values that comes closest: the best of all subsets of X, for few X."""
    count = matrix_PX.shape[1]
    best, found = math.inf, [0.0] * count
    for chosen in itertools.product((False, True), repeat=count):
        part_PY = matrix_PX[:, list(chosen)]
        solved_Y = torch.linalg.lstsq(part_PY, values_P[:, None]).solution[:, 0]
        off = float((part_PY @ solved_Y - values_P).norm())
        if off < best and (solved_Y >= 0).all():
            rest = iter(solved_Y.tolist())
            best, found = off, [next(rest) if one else 0.0 for one in chosen]
    return found
