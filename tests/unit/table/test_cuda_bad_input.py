"""Bad input to a GPU shard is refused before anything changed, with a message that helps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.errors import DTypeError, InputError, ShapeError, TicketError, UnknownName
from shoal.lookup import Output, Pool, PoolPlan, Slice
from shoal.rules.initializers import Constant
from shoal.rules.optimizers import SGD, Adam, Optimizer
from shoal.table.cpu.shard import CpuShard
from shoal.table.cuda.shard import CudaShard
from shoal.table.shard import GradRecord, IdGroups, StepContext
from shoal.table.spec import Segment, TableSpec
from support.id_groups import groups_of
from support.placed_shard import PlacedShard

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []

HELPFUL = r".+: got .+; allowed: .+\. .+"
CTX = StepContext()


def spec(name: str, rule: Optimizer | None = None, dim: int = 2) -> TableSpec:
    segment = Segment(dim=dim, optimizer=rule or SGD(lr=1.0), initializer=Constant(0.5))
    return TableSpec(name=name, segments=(segment,))


def placed(*specs: TableSpec) -> Any:
    return PlacedShard(CudaShard(specs, device=DEVICE))


def rows(*values: float, dim: int = 2) -> Tensor:
    return torch.tensor(values).reshape(-1, 1).expand(-1, dim).contiguous()


def step(ticket: Any, *grads: Tensor, ctx: StepContext = CTX) -> Callable[[Any], object]:
    return lambda shard: shard.apply([GradRecord(ticket, grads)], ctx=ctx)


def other_shard_s(shard: Any) -> Any:
    return placed(*shard.specs).find_or_init(groups_of((0, [1])), ctx=CTX)


def plan_of(pooling: Any = "sum", length: int = 1) -> PoolPlan:
    return PoolPlan((Pool(pooling, (Slice(0, 2, 0, 0),), length),), (Output(2 * length),))


ONE = groups_of((0, [1, 2]))
REFUSED: dict[str, tuple[Callable[[Any, Any], object], type[Exception]]] = {
    "int32 ids": (lambda s, t: s.find(ONE._replace(ids_N=ONE.ids_N.int())), DTypeError),
    "ids of two dims": (lambda s, t: s.find(ONE._replace(ids_N=ONE.ids_N[None])), ShapeError),
    "splits too short": (
        lambda s, t: s.find(ONE._replace(splits_G1=torch.tensor([0, 1]))),
        ShapeError,
    ),
    "splits that fall": (
        lambda s, t: s.find(
            IdGroups(ONE.ids_N, torch.tensor([0, 3, 2]), torch.tensor([0, 0]).int())
        ),
        ShapeError,
    ),
    "no splits": (lambda s, t: s.find(ONE._replace(splits_G1=torch.tensor([0]))), ShapeError),
    "int32 splits": (lambda s, t: s.find(ONE._replace(splits_G1=ONE.splits_G1.int())), DTypeError),
    "splits elsewhere": (
        lambda s, t: s.find(ONE._replace(splits_G1=ONE.splits_G1.to("meta"))),
        DTypeError,
    ),
    "no such table": (
        lambda s, t: s.find(ONE._replace(tables_G=torch.tensor([2]).int())),
        ShapeError,
    ),
    "counts too few": (lambda s, t: s.find_or_init(ONE, torch.tensor([1]), ctx=CTX), ShapeError),
    "float counts": (lambda s, t: s.find_or_init(ONE, torch.ones(2), ctx=CTX), DTypeError),
    "another shard's ticket": (lambda s, t: s.gather(other_shard_s(s), ctx=CTX), TicketError),
    "a core's ticket": (
        lambda s, t: s.inner.gather(CpuShard(s.specs).find_or_init(ONE, ctx=CTX), ctx=CTX),
        TicketError,
    ),
    "grads too many": (lambda s, t: step(t, rows(1.0), rows(1.0))(s), ShapeError),
    "grads too wide": (lambda s, t: step(t, rows(1.0, dim=3))(s), ShapeError),
    "double grads": (lambda s, t: step(t, rows(1.0).double())(s), DTypeError),
    "a second bad record": (
        lambda s, t: s.apply([GradRecord(t, (rows(1.0),)), GradRecord(t, ())], ctx=CTX),
        ShapeError,
    ),
    "a plan alone": (
        lambda s, t: s.apply([GradRecord(t, (rows(1.0),), plan_of())], ctx=CTX),
        ShapeError,
    ),
    "offsets of no batch": (
        lambda s, t: s.gather_pooled(t, plan_of(), torch.empty(0).long(), None, ctx=CTX),
        ShapeError,
    ),
    "float offsets": (
        lambda s, t: s.gather_pooled(t, plan_of(), torch.zeros(2), None, ctx=CTX),
        DTypeError,
    ),
    "weights too many": (
        lambda s, t: s.gather_pooled(t, plan_of(), torch.tensor([0, 1]), torch.ones(3), ctx=CTX),
        ShapeError,
    ),
    "a plan of two groups": (
        lambda s, t: s.gather_pooled(
            t, replace(plan_of(), pools=plan_of().pools * 2), torch.tensor([0, 1]), None, ctx=CTX
        ),
        ShapeError,
    ),
    "rates of no table": (
        lambda s, t: s.apply(
            [GradRecord(t, (rows(1.0),))], ctx=StepContext(learning_rates={"x": (1.0,)})
        ),
        UnknownName,
    ),
    "too many rates": (
        lambda s, t: s.apply_ids(
            ONE, (rows(1.0, 2.0),), ctx=StepContext(learning_rates={"a": (1.0, 2.0)})
        ),
        ShapeError,
    ),
    "seen too few": (
        lambda s, t: s.apply_ids(ONE, (rows(1.0, 2.0),), ctx=CTX, seen_weights=[rows(1.0)]),
        ShapeError,
    ),
    "table beyond the last": (lambda s, t: s.export(2), InputError),
    "sketch where none is": (
        lambda s, t: s.load_admission_state(0, replace(s.admission_state(0), cells=b"1234")),
        ShapeError,
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_anything_changed(case: str) -> None:
    verb, error = REFUSED[case]
    shard = placed(spec("a"), spec("b", Adam()))
    ticket = shard.find_or_init(groups_of((0, [9])), ctx=CTX)
    with pytest.raises(error, match=HELPFUL):
        verb(shard, ticket)
    assert shard.entry(0, 9).weights.tolist() == [0.5, 0.5] and shard.size(1) == 0
    assert shard.size(0) == 1
    shard.apply([GradRecord(ticket, (rows(1.0),))], ctx=CTX)
    assert shard.entry(0, 9).weights.tolist() == [-0.5, -0.5]


def test_ids_on_another_device_are_refused() -> None:
    shard = CudaShard([spec("a")], device=DEVICE)
    elsewhere = torch.zeros(2, dtype=torch.int64, device="meta" if DEVICE == "cpu" else "cpu")
    with pytest.raises(DTypeError, match=HELPFUL):
        shard.find(ONE._replace(ids_N=elsewhere))


@pytest.mark.parametrize("pooling", ["sum", "mean", "first_n"])
@pytest.mark.parametrize("edges", [[0, 7, 99], [0, -5, 4], [3, 3, -1], [1 << 40, 0, 2]])
def test_offsets_that_lie_reach_no_other_rows(pooling: str, edges: list[int]) -> None:
    """Nobody reads them on the host: results are wrong, but of the group's own rows."""
    shard = placed(spec("a"), spec("b", dim=64))
    groups = groups_of((0, [1, 2]), (1, [3, 4]))
    ticket = shard.find_or_init(groups, ctx=CTX)
    pool = Pool(pooling, (Slice(0, 2, 0, 0),), 2 if pooling == "first_n" else 1)  # type: ignore[arg-type]
    wide = replace(pool, slices=(Slice(0, 2, 1, 0),))
    plan = PoolPlan((pool, wide), (Output(2 * pool.length), Output(2 * pool.length)))
    inputs = plan, torch.tensor(edges), None
    for out in shard.gather_pooled(ticket, *inputs, ctx=CTX):
        assert (out >= 0).all() and (out <= 1.0).all()
    grads = tuple(torch.ones(1, 2 * pool.length) for _ in range(2))
    shard.apply([GradRecord(ticket, grads, *inputs)], ctx=StepContext(nan_policy="skip"))
    assert shard.size(0) == shard.size(1) == 2
