"""Whole steps of tables over ranks, timed: what a plan predicts, measured."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from shoal.comm.mesh import Mesh
from shoal.distributed.model import DistributedModelParallel
from shoal.embedding.collection import EmbeddingCollection
from shoal.embedding.layouts import Feature
from shoal.optim import SparseOptimizer
from shoal.placement import Placement, row_wise, table_wise
from shoal.planner import (
    CostModel,
    TableInput,
    TableStatistics,
    Topology,
    Workload,
    table_input,
    zipf,
)
from shoal.planner.options import Option
from shoal.planner.plan import Plan
from shoal.ragged import KeyedRagged
from shoal.rules.optimizers import Adagrad
from shoal.table.hosting import Sharding
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

    @property
    def statistics(self) -> TableStatistics:
        """Of its ids."""
        return zipf(self.rows, self.exponent, ids_per_sample=self.ids_per_sample)

    def input(self) -> TableInput:
        """What is planned for it."""
        return table_input(self.spec, self.statistics, rows=float(self.rows))


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
    placing: Placement | Plan | Mapping[str, str],
    batch_size: int,
    *,
    steps: int = 30,
    seed: int = 0,
) -> float:
    """Seconds of a step of the slowest rank, of the fastest fifth of steps; a collective call.

    A step is lookup, backward and update, one after the other, without a dense part.
    """
    model = _Sums(loads, mesh.device)
    wrapped = DistributedModelParallel(model, placing, mesh=mesh)
    optimizer = SparseOptimizer(wrapped)
    generator = torch.Generator().manual_seed(seed * 1000 + mesh.rank)
    batches = [_batch(loads, batch_size, generator).to(mesh.device) for _ in range(8)]
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


def _batch(loads: Sequence[TableLoad], batch_size: int, generator: torch.Generator) -> KeyedRagged:
    values, lengths = [], []
    for one in loads:
        count = batch_size * one.ids_per_sample
        weights = torch.arange(1, one.rows + 1, dtype=torch.float64, device="cpu") ** -one.exponent
        total = weights.cumsum(0)
        drawn = (
            torch.rand(count, generator=generator, dtype=torch.float64, device="cpu") * total[-1]
        )
        values.append(torch.searchsorted(total, drawn).clamp_max(one.rows - 1))
        lengths.append(
            torch.full((batch_size,), one.ids_per_sample, dtype=torch.int64, device="cpu")
        )
    return KeyedRagged.from_lengths(
        tuple(one.name for one in loads), torch.cat(values), torch.cat(lengths)
    )


def predicted(
    topology: Topology, loads: Sequence[TableLoad], placement: Placement, batch_size: int
) -> float:
    """Seconds that the cost model has for a step of `timed_steps`."""
    work = Workload(batch_size=batch_size, pipelined=False)
    model = CostModel(topology, work)
    every = [model.fixed_s()] * topology.world_size
    for one in loads:
        table = one.input()
        slices = placement.of(one.name)
        shared = model.shared_phases(table)
        every = [seconds + shared for seconds in every]
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
            price = model.price(table, option).seconds
            for rank in hosted.ranks:
                every[rank] += price
    return max(every)


def fitted(mesh: Mesh, topology: Topology, *, steps: int = 30) -> Topology:
    """A measured topology, with what whole steps cost besides: fixed, by table, slice and id.

    A collective call of all ranks of a job; steps of a few tables are timed.
    """
    small = [TableLoad(name=f"t{k:02}", rows=100, dim=8) for k in range(16)]
    zeroed = replace(topology.rates, step_s=0.0, table_s=0.0, slice_s=0.0, occurrence_s=0.0)
    bare = replace(topology, rates=zeroed)
    turns = {one.name: (k % topology.world_size,) for k, one in enumerate(small)}

    def placed(loads: Sequence[TableLoad], split: bool) -> Placement:
        ranks = topology.world_size
        return Placement(ranks, tuple(
            hosted
            for one in loads
            for hosted in (
                row_wise(one.name, one.dim, ranks) if split
                else table_wise(one.name, one.dim, turns[one.name][0])
            )
        ))  # fmt: skip

    def residual(loads: Sequence[TableLoad], split: bool, batch: int, known: Topology) -> float:
        where = placed(loads, split)
        measured = timed_steps(mesh, loads, where, batch, steps=steps)
        return measured - predicted(known, loads, where, batch)

    ranks = topology.world_size
    one = residual(small[:1], False, 8, bare)
    whole, split = (residual(small, by_row, 8, bare) for by_row in (False, True))
    held = -(-16 // ranks)
    # With rows split each rank holds 16 slices, with whole tables the slowest rank `held` of them.
    slice_s = max((split - whole) / (16 - held), 1e-7) if ranks > 1 else 1e-7
    table_s = max((whole - one - (held - 1) * slice_s) / 15, 1e-7)
    step_s = max(one - slice_s - table_s, 0.0)
    rates = replace(zeroed, step_s=step_s, table_s=table_s, slice_s=slice_s)
    # Enough for a GPU to have more to do than to begin.
    rows, batch = (1_000_000, 32_768) if mesh.device.type == "cuda" else (50_000, 1024)
    heavy = [TableLoad(name=f"t{k:02}", rows=rows, dim=32, ids_per_sample=8) for k in range(4)]
    more = residual(heavy, True, batch, replace(topology, rates=rates))
    occurrences = 2.0 * batch * sum(load.ids_per_sample for load in heavy)
    return replace(topology, rates=replace(rates, occurrence_s=max(more / occurrences, 1e-10)))
