"""What ranks do when one of them fails, and the numbers of Monolith's distributed table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest
import torch
import torch.distributed as dist

from shoal.comm.backends.torch import TorchCollectives
from shoal.comm.collectives import Collectives
from shoal.embedding.layouts import Feature, compile_layouts, default_layouts
from shoal.errors import CollectiveFailed, ShoalError
from shoal.exchange.all_to_all import AllToAllExchange
from shoal.exchange.local import Request
from shoal.exchange.rows_by_id import RowsOverRanks
from shoal.exchange.wire import Wire, WireKind
from shoal.placement import Placement, data_parallel, table_wise
from shoal.ragged import KeyedRagged
from shoal.rules.initializers import Zeros
from shoal.rules.optimizers import SGD
from shoal.rules.schedules import Polynomial
from shoal.table.cpu.shard import CpuShard
from shoal.table.hosting import hosted_specs, plan_placement
from shoal.table.shard import StepContext
from shoal.table.spec import Segment, TableSpec
from support.exchange_runs import Case, local_run, rank_run

__all__ = ["full_everywhere", "full_owner", "monolith_numbers", "rounded_on_the_way", "wrong_time"]


Values = list[list[list[float]]]


@contextmanager
def joined(timeout_s: float) -> Iterator[Collectives]:
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    assert group is not None
    collectives = TorchCollectives(group, torch.device("cpu"), timeout_s)
    try:
        yield collectives
    finally:
        collectives.close()
        dist.destroy_process_group()


def one_table(
    collectives: Collectives, placement: Placement, spec: TableSpec
) -> tuple[AllToAllExchange, Request]:
    """An exchange of one table, and a request for ids 0..5 of it."""
    shard = CpuShard(hosted_specs([spec], placement, collectives.rank))
    exchange = AllToAllExchange(shard, placement, [spec], collectives)
    features = (Feature("a", spec.name),)
    plan = compile_layouts({spec.name: spec}, features, default_layouts(features)).plan
    batch = KeyedRagged.from_lists({"a": [[0, 1, 2], [3, 4, 5]]})
    return exchange, Request(batch, batch, torch.zeros(1, dtype=torch.int32), plan)


def full_owner(timeout_s: float) -> tuple[str, str]:
    """Rank 0 owns a table that is too small: what each rank raises; none goes before the other."""
    spec = TableSpec(name="t", segments=(Segment(dim=2),), capacity_rows=3)
    with joined(timeout_s) as collectives:
        end = dist.new_group()
        placement = Placement(collectives.world_size, table_wise("t", 2, 0))
        exchange, request = one_table(collectives, placement, spec)
        ctx = StepContext(global_step=7)
        try:
            exchange.combine(exchange.probe(exchange.send(request, insert=True, ctx=ctx)), ctx=ctx)
        except ShoalError as error:
            text = str(error)
            if collectives.rank == 0:
                # It must not send a next batch to ranks that wait for the rows of this one.
                text = went_on(exchange, request)
            dist.barrier(end)  # a rank that lingers keeps no other waiting
            return type(error).__name__, text
    return "nothing", ""


def full_everywhere() -> tuple[str, list[float]]:
    """A replicated table that is too small: every rank raises, and all can continue."""
    spec = TableSpec(name="t", segments=(Segment(dim=2),), capacity_rows=3)
    with joined(60.0) as collectives:
        placement = Placement(collectives.world_size, data_parallel("t", 2, collectives.world_size))
        exchange, request = one_table(collectives, placement, spec)
        name = "nothing"
        try:
            exchange.probe(exchange.send(request, insert=True, ctx=StepContext()))
        except ShoalError as error:
            name = type(error).__name__
        return name, exchange.read(request)[0].flatten().tolist()


def went_on(exchange: AllToAllExchange, request: Request) -> str:
    """The error of each method on a rank that has left a lookup."""
    ctx = StepContext(global_step=8)
    said = []
    for act in (
        lambda: exchange.probe(exchange.send(request, insert=True, ctx=ctx)),
        lambda: exchange.read(request),
        lambda: RowsOverRanks(exchange),
    ):
        with pytest.raises(CollectiveFailed) as caught:
            act()
        said.append(str(caught.value))
    return "\n".join(said)


def wrong_time() -> tuple[str, int]:
    """A bad argument on every rank: raised before anything is sent, so all can continue."""
    spec = TableSpec(name="t", segments=(Segment(dim=2),))
    with joined(60.0) as collectives:
        placement = plan_placement([spec], collectives.world_size)
        exchange, request = one_table(collectives, placement, spec)
        name = "nothing"
        try:
            exchange.send(request, insert=True, ctx=StepContext(event_time_s=-1))
        except ShoalError as error:
            name = type(error).__name__
        exchange.probe(exchange.send(request, insert=True, ctx=StepContext()))
        sizes = collectives.gather_objects(exchange.shard.size(0), what="sizes")
    return name, sum(sizes)


def monolith_numbers() -> tuple[Values, Values]:
    """DistributedMultiTypeHashTableMpi's contract: outputs before and after one step."""
    specs = tuple(
        TableSpec(
            name=name,
            segments=(Segment(dim=dim, initializer=Zeros(), optimizer=SGD(lr=rate)),),
        )
        for name, dim, rate in (("1", 1, 1.0), ("2", 2, Polynomial(1.0, 10, end=2.0)))
    )
    features = (Feature("1", "1"), Feature("2", "2"))
    plan = compile_layouts(
        {spec.name: spec for spec in specs}, features, default_layouts(features)
    ).plan
    with joined(60.0) as collectives:
        placement = plan_placement(specs, collectives.world_size)
        shard = CpuShard(hosted_specs(specs, placement, collectives.rank))
        exchange = AllToAllExchange(shard, placement, specs, collectives, grad_reduce="sum")
        batch = KeyedRagged.from_lists({"1": [[1], [1]], "2": [[2], []]})
        request = Request(batch, batch, torch.tensor([0, 1], dtype=torch.int32), plan)
        ctx = StepContext()
        route = exchange.probe(exchange.send(request, insert=True, ctx=ctx))
        before = exchange.combine(route, ctx=ctx)
        grads = (torch.tensor([[0.5], [0.5]]), torch.tensor([[0.5, 1.0], [0.0, 0.0]]))
        shard.apply(exchange.back(route, grads).wait(), ctx=ctx)
        after = exchange.read(request)
    return [part.tolist() for part in before], [part.tolist() for part in after]


def rounded_on_the_way(kinds: Sequence[WireKind]) -> list[float]:
    """Largest error of the last step's outputs for each precision, against one process."""
    errors = []
    with joined(60.0) as collectives:
        for kind in kinds:
            case = Case(steps=2, wire=Wire(rows=kind, grads=kind), sizes=(3, 2))
            outcome = rank_run(case, collectives)
            whole = local_run(case, collectives.world_size)
            start = sum(case.size(rank) for rank in range(collectives.rank))
            mine = slice(start, start + case.size(collectives.rank))
            pairs = zip(outcome.outputs[-1], whole.outputs[-1], strict=True)
            errors.append(max(float(np.abs(a - b[mine]).max(initial=0)) for a, b in pairs))
    return errors
