"""Numbers of Monolith's optimizer tests (spec/monolith-training.md 2.4), through `Table`."""

from __future__ import annotations

import pytest
import torch

from shoal.rules.initializers import Zeros
from shoal.rules.optimizers import (
    FTRL,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Amsgrad,
    BatchSoftmax,
    DelayCompensated,
    GroupAdagrad,
    Momentum,
    MovingAverage,
    Optimizer,
    RMSprop,
)
from shoal.table.facade import Table
from shoal.table.shard import IdGroups, StepContext
from shoal.table.spec import Segment, TableSpec
from support.shards import SHARD_KINDS, ShardFactory, interpreted_too, shard_factory

# rule, gradients of each step, weights after each step; all start at 0
CASES: list[tuple[Optimizer, list[list[float]], list[list[float]]]] = [
    (
        Adadelta(lr=0.01),
        [[10, 1]] * 2,
        [[-0.0031607, -0.0030151], [-0.0064035, -0.0061047]],
    ),
    (
        Adagrad(lr=0.1, initial_accumulator=1.0),
        [[1, 2]],
        [[-0.07071067, -0.08944272]],
    ),
    (
        Adagrad(lr=0.1, initial_accumulator=1.0, weight_decay=0.1),
        [[1, 2]] * 2,
        [[-0.07071067, -0.08944272], [-0.128173, -0.155943]],
    ),
    (
        Adam(lr=0.01),
        [[10, 1]] * 2,
        [[-0.00990099, -0.00909091], [-0.0198306, -0.01842895]],
    ),
    (
        Amsgrad(lr=0.01),
        [[10, 1]] * 2,
        [[-0.00990099, -0.00909091], [-0.0198306, -0.01842895]],
    ),
    (FTRL(lr=0.01), [[10, 1]] * 2, [[-0.009995, -0.00953463], [-0.0170643, -0.0164353]]),
    (
        GroupAdagrad(lr=0.01, beta=1.0, initial_accumulator=0.0, l2=1.0),
        [[10]] * 2,
        [[-0.0081818], [-0.0141255]],
    ),
    (
        GroupAdagrad(lr=0.01, beta=1.0, initial_accumulator=0.0, l2=0.5),
        [[10, 1], [1, 5]],
        [[-0.0086386, -0.00086386], [-0.0090962, -0.00477795]],
    ),
    (
        GroupAdagrad(lr=0.01, beta=1.0, initial_accumulator=0.0, l2=0.0),
        [[10, 1]],
        [[-0.0090909, -0.00090909]],
    ),
    (
        GroupAdagrad(lr=0.01, beta=1.0, initial_accumulator=0.0, l2=1000.0),
        [[10, 1]],
        [[0, 0]],
    ),
    (Momentum(lr=0.01), [[10, 1]] * 2, [[-0.1, -0.01], [-0.29, -0.029]]),
    (MovingAverage(), [[10]] * 2, [[1.0], [1.9]]),
    (RMSprop(lr=0.01), [[10]] * 2, [[-0.0240253], [-0.0426859]]),
    (
        RMSprop(lr=0.01, accumulate="sum"),
        [[10, 1]] * 2,
        [[-0.0090909, -0.005], [-0.0158549, -0.0092045]],
    ),
    (SGD(lr=0.1), [[1]], [[-0.1]]),
]


@pytest.fixture(params=SHARD_KINDS)
def make_shard(request: pytest.FixtureRequest) -> ShardFactory:
    return shard_factory(request.param)


def make(make_shard: ShardFactory, *segments: tuple[int, Optimizer]) -> Table:
    spec = TableSpec(
        name="t",
        segments=tuple(
            Segment(name=f"s{i}", dim=dim, optimizer=rule, initializer=Zeros())
            for i, (dim, rule) in enumerate(segments)
        ),
    )
    return Table(spec, shard=make_shard([spec]))


def near(table: Table, expected: list[float]) -> None:
    weights = table.lookup([1]).double()
    torch.testing.assert_close(weights, torch.tensor([expected]).double(), rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize(("rule", "grads", "expected"), CASES, ids=lambda value: repr(value)[:60])
def test_steps(
    make_shard: ShardFactory,
    rule: Optimizer,
    grads: list[list[float]],
    expected: list[list[float]],
) -> None:
    table = make(make_shard, (len(grads[0]), rule))
    for step, (grad, after) in enumerate(zip(grads, expected, strict=True)):
        table.apply([1], torch.tensor([grad], dtype=torch.float32), global_step=step)
        near(table, after)


def test_batch_softmax_at_step_one(make_shard: ShardFactory) -> None:
    table = make(make_shard, (1, BatchSoftmax(lr=0.1)))
    table.apply([1], [[0.0]], global_step=1)
    near(table, [0.1])


@interpreted_too
def test_segments_with_rates_of_their_own(make_shard: ShardFactory) -> None:
    rules = [Adagrad(initial_accumulator=1.0), Adagrad(initial_accumulator=2.0)]
    table = make(make_shard, (1, rules[0]), (2, rules[1]))
    table.apply([1], [[1.0, 2.0, 3.0]], learning_rates=[1.0, 2.0])
    near(table, [-0.70710677, -1.6329931, -1.8090681])
    table.assign([1], [[0.0, 0.0, 0.0]])
    table.apply([1], [[1.0, 2.0, 3.0]], learning_rates=[1.0, 2.0])
    near(table, [-0.57735026, -1.264911, -1.3416407])


@interpreted_too
def test_delay_compensation(make_shard: ShardFactory) -> None:
    table = make(make_shard, (1, DelayCompensated(inner=Adadelta(lr=0.01), strength=0.1)))
    groups = IdGroups(torch.tensor([1]), torch.tensor([0, 1]), torch.zeros(1, dtype=torch.int32))
    grad = torch.tensor([[10.0]])
    for seen, after in ((0.1, -0.0031603), (0.0, -0.0065548)):
        weights = [torch.tensor([[seen]])]
        table.shard.apply_ids(groups, [grad], ctx=StepContext(), seen_weights=weights)
        near(table, [after])
