"""Parts of the exchange that one process shows."""

from __future__ import annotations

import pytest
import torch

from shoal.comm.collectives import LocalCollectives
from shoal.embedding.gradients import sum_by_id
from shoal.errors import ConfigError, UnknownName
from shoal.exchange.all_to_all import AllToAllExchange
from shoal.exchange.partition import compile_send_plan, flat
from shoal.placement import Placement, table_wise
from shoal.rules.initializers import Ones
from shoal.rules.optimizers import SGD
from shoal.table.cpu.shard import CpuShard
from shoal.table.hosting import hosted_specs, plan_placement
from shoal.table.shard import GradRecord, IdGroups, ReadTicket, StepContext
from shoal.table.spec import Segment, TableSpec
from support.shards import SHARD_KINDS, ShardFactory, interpreted_too, shard_factory

CPU = torch.device("cpu")


def spec(name: str, dim: int = 2, dtype: str = "float32") -> TableSpec:
    segment = Segment(dim=dim, initializer=Ones(), optimizer=SGD(lr=1.0))
    return TableSpec(name=name, segments=(segment,), dtype=dtype)  # type: ignore[arg-type]


def test_rows_that_lie_together_are_not_copied() -> None:
    specs = [spec("a", 2), spec("b", 3, "float64"), spec("c", 5)]
    groups = IdGroups(
        torch.arange(7),
        torch.tensor([0, 2, 3, 3, 5, 7]),
        torch.tensor([0, 2, 0, 1, 2], dtype=torch.int32),
    )
    rows = CpuShard(specs).find(groups).weights
    assert [tuple(part.shape) for part in rows] == [(2, 2), (1, 5), (0, 2), (2, 3), (2, 5)]
    singles = [part for part in rows if part.dtype is torch.float32]
    joined = flat(singles, torch.float32, CPU)
    assert joined.data_ptr() == rows[0].data_ptr()
    assert joined.numel() == 4 + 5 + 10


def test_rows_that_lie_apart_are_joined() -> None:
    one = torch.arange(6.0)
    parts = [one[2:4].view(1, 2), one[0:2].view(1, 2), torch.empty(0, 9), one[4:6].view(2, 1)]
    assert flat(parts, torch.float32, CPU).tolist() == [2, 3, 0, 1, 4, 5]
    assert flat([], torch.float64, CPU).dtype is torch.float64


def test_a_lane_knows_neighbours() -> None:
    specs = [spec("a"), spec("b")]
    placement = Placement(1, (*table_wise("a", 2, 0), *table_wise("b", 2, 0)))

    def edges(*tables_G: int) -> tuple[int, ...] | None:
        (lane,) = compile_send_plan(specs, placement, specs, 0, tables_G).buffers
        return lane.edges

    assert edges(0, 0, 1) == (0, 2, 3)
    assert edges(1) == (0, 1)
    assert edges(1, 0) is None
    assert edges(0, 1, 0) is None


@pytest.fixture(params=SHARD_KINDS)
def make_shard(request: pytest.FixtureRequest) -> ShardFactory:
    return shard_factory(request.param)


@interpreted_too
def test_a_rank_may_have_no_tables(make_shard: ShardFactory) -> None:
    shard = make_shard([])
    shard.apply([], ctx=StepContext())
    assert shard.stats() == ()
    assert shard.evict(5) == 0


def test_read_tickets_count_what_they_stand_for() -> None:
    groups = IdGroups(
        torch.tensor([4, 4, 7]), torch.tensor([0, 3]), torch.zeros(1, dtype=torch.int32)
    )
    ticket = ReadTicket(groups, torch.tensor([2, 3, 1]))
    record = GradRecord(ticket, (torch.ones(3, 2),))
    summed = sum_by_id([record, record], [2])
    assert summed.counts[0].tolist() == [5, 1]
    assert summed.sums[0].tolist() == [[4.0, 4.0], [2.0, 2.0]]


def test_parts_that_do_not_fit_are_refused() -> None:
    specs = [spec("a")]
    shard, collectives = CpuShard(specs), LocalCollectives()
    with pytest.raises(ConfigError, match="world_size"):
        AllToAllExchange(shard, plan_placement(specs, 2), specs, collectives)
    with pytest.raises(UnknownName, match="grad_reduce"):
        AllToAllExchange(
            shard,
            plan_placement(specs, 1),
            specs,
            collectives,
            grad_reduce="average",  # type: ignore[arg-type]
        )
    other = Placement(1, table_wise("a", 2, 0))
    wrong = CpuShard([spec("b")])
    assert hosted_specs(specs, other, 0) == tuple(specs)
    with pytest.raises(ConfigError, match="tables of the shard of rank 0"):
        AllToAllExchange(wrong, other, specs, collectives)
