"""Whole training runs on growing tables equal runs of a dense model, in float64."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from shoal.embedding.collection import EmbeddingCollection
from shoal.embedding.combiners import Combiner, FirstN, ReduceMean, ReduceSum
from shoal.embedding.layouts import Feature
from shoal.optim import JointOptimizer, SparseOptimizer, clip_grad_norm_
from shoal.ragged import KeyedRagged
from shoal.rules.initializers import Uniform
from shoal.rules.optimizers import (
    FTRL,
    LAMB,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    AdamW,
    Amsgrad,
    BatchSoftmax,
    DelayCompensated,
    DynamicWdAdagrad,
    GroupAdagrad,
    GroupFTRL,
    Momentum,
    MovingAverage,
    Optimizer,
    RMSprop,
    RowWiseAdagrad,
    SignSGD,
)
from shoal.rules.schedules import Polynomial
from shoal.table.facade import Table
from shoal.table.spec import Segment, TableSpec
from support.dense_twin import DenseTwin
from support.shards import (
    SHARD_KINDS,
    ShardFactory,
    interpreted_once,
    interpreted_too,
    shard_factory,
)

RULES: list[Optimizer] = [
    SGD(lr=0.1),
    SGD(lr=Polynomial(0.2, 6, end=0.01)),
    Momentum(lr=0.05, weight_decay=0.01),
    Momentum(lr=0.05, nesterov=True),
    Adagrad(lr=0.1),
    Adagrad(lr=0.1, weight_decay=0.02, eps=1e-3),
    RowWiseAdagrad(lr=0.1),
    Adadelta(lr=0.5),
    Adam(lr=0.02, eps=1e-6),
    Adam(lr=0.02, nesterov=True, weight_decay=0.01),
    AdamW(lr=0.02),
    Amsgrad(lr=0.02),
    FTRL(lr=0.1, beta=1.0, l1=0.01, l2=0.1),
    GroupFTRL(lr=0.1, l1=0.01, l2=0.1),
    GroupAdagrad(lr=0.1, l2=0.01),
    DynamicWdAdagrad(lr=0.05, weight_decay=0.1),
    RMSprop(lr=0.05),
    RMSprop(lr=0.05, accumulate="sum"),
    MovingAverage(momentum=0.9),
    BatchSoftmax(lr=0.1),
    SignSGD(lr=0.01, weight_decay=0.1),
    LAMB(lr=0.02),
    DelayCompensated(inner=Adagrad(lr=0.1)),
]

VOCABULARY = [(v * 0x9E3779B97F4A7C15 + 1) % (1 << 64) - (1 << 63) for v in range(12)]
COMBINERS: tuple[Combiner, ...] = (ReduceSum(), ReduceMean(), FirstN(3))


@pytest.fixture(params=SHARD_KINDS)
def make_shard(request: pytest.FixtureRequest) -> ShardFactory:
    return shard_factory(request.param)


def table(name: str, *rules: Optimizer) -> TableSpec:
    segments = tuple(
        Segment(
            name=f"s{i}",
            dim=1 if isinstance(rule, BatchSoftmax) else 3 - i,
            optimizer=rule,
            initializer=Uniform(-0.5, 0.5),
        )
        for i, rule in enumerate(rules)
    )
    return TableSpec(name=name, segments=segments, dtype="float64")


class Run:
    """The same model twice: over growing tables, and over dense matrices."""

    def __init__(
        self, make_shard: ShardFactory, specs: Sequence[TableSpec], features: Sequence[Feature]
    ) -> None:
        torch.manual_seed(1)
        self.random = random.Random(7)
        self.features = features
        start = {}
        for spec in specs:
            probe = Table(spec, shard=make_shard([spec]))
            start[spec.name] = probe.gather(probe.find_or_init(VOCABULARY)).double()
        self.owner = EmbeddingCollection(specs, features, shard=make_shard(specs))
        self.twin = DenseTwin(specs, features, VOCABULARY, start)
        width = sum(out[0].numel() for out in self.twin(self.batch()).values())
        self.twin.forget()
        self.heads = [nn.Linear(width, 2).double() for _ in range(2)]
        self.heads[1].load_state_dict(self.heads[0].state_dict())
        self.sparse = SparseOptimizer(self.owner)
        self.dense = [torch.optim.SGD(head.parameters(), lr=0.05) for head in self.heads]

    def batch(self, *, weights: bool = False, size: int = 4, whole: bool = False) -> KeyedRagged:
        """Lists of 0 to 3 ids, some of them twice; `whole` puts every id in each feature."""

        def ids() -> list[list[int]]:
            if whole:
                return [[id_] for id_ in self.random.sample(VOCABULARY, len(VOCABULARY))]
            choose = self.random.choices
            return [choose(VOCABULARY, k=self.random.randrange(4)) for _ in range(size)]

        lists = {feature.name: ids() for feature in self.features}
        eighths = {
            name: [[self.random.randrange(-8, 9) / 8 for _ in row] for row in rows]
            for name, rows in lists.items()
        }
        return KeyedRagged.from_lists(lists, eighths if weights else None)

    def losses(self, batch: KeyedRagged) -> list[Tensor]:
        """The loss of the sparse and of the dense model, of two outputs each."""
        both = []
        for model, head in zip((self.owner, self.twin), self.heads, strict=True):
            parts = [model(batch)[feature.name].flatten(1) for feature in self.features]
            both.append((head(torch.cat(parts, dim=1)).tanh() - 0.3).square())
        return both

    def backward(self, batch: KeyedRagged, factor: float = 1.0) -> None:
        for loss in self.losses(batch):
            (factor * loss.mean()).backward()

    def step(self) -> None:
        self.sparse.step()
        self.twin.step(self.sparse.global_step - 1)
        for optimizer in self.dense:
            optimizer.step()
        self.zero()

    def zero(self) -> None:
        self.sparse.zero_grad()
        self.twin.forget()
        for optimizer in self.dense:
            optimizer.zero_grad()

    def check(self) -> None:
        for name, matrix in self.twin.weights.items():
            weights, found = self.owner.table(name).find(VOCABULARY)
            expected = matrix.detach()[found]
            torch.testing.assert_close(weights[found].double(), expected, rtol=1e-9, atol=1e-11)
            assert len(self.owner.table(name)) == int(found.sum()) > 0
        for ours, theirs in zip(*[head.parameters() for head in self.heads], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


def pooled(name: str, *combiners: Combiner) -> list[Feature]:
    return [Feature(f"{name}{i}", name, combiner) for i, combiner in enumerate(combiners)]


@pytest.mark.slow
@interpreted_once("rule", RULES, RULES[-1])
def test_every_rule(make_shard: ShardFactory, rule: Optimizer) -> None:
    """A table that two features share, each step two batches, clipped by the common norm."""
    run = Run(make_shard, [table("t", rule)], pooled("t", ReduceSum(), ReduceMean()))
    for _ in range(6):
        run.backward(run.batch())
        run.backward(run.batch(), 0.5)
        norm = clip_grad_norm_(run.heads[0].parameters(), run.sparse, 0.2)
        dense = [*run.heads[1].parameters(), *run.twin.weights.values()]
        torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(dense, 0.2))
        run.step()
    run.check()


@pytest.mark.slow
@pytest.mark.parametrize("weights", [False, True])
@interpreted_once("combiner", COMBINERS, COMBINERS[2])
def test_every_combiner(make_shard: ShardFactory, combiner: Combiner, weights: bool) -> None:
    run = Run(make_shard, [table("t", Adam(lr=0.05), SGD(lr=0.1))], pooled("t", combiner))
    for _ in range(8):
        run.backward(run.batch(weights=weights))
        run.step()
    run.check()


def test_shared_tables_and_several_losses(make_shard: ShardFactory) -> None:
    specs = [table("t", Adagrad(lr=0.1), FTRL(lr=0.1, beta=1.0)), table("u", AdamW(lr=0.05))]
    run = Run(make_shard, specs, pooled("t", *COMBINERS) + pooled("u", ReduceSum()))
    for _ in range(6):
        first, second = run.batch(), run.batch()
        for loss in run.losses(first):
            loss[:, 0].mean().backward(retain_graph=True)
            loss[:, 1].sum().backward()
        for one, two in zip(run.losses(first), run.losses(second), strict=True):
            (one.mean() * two.mean()).backward()
        run.step()
    run.check()


@pytest.mark.parametrize("clip", [False, True])
def test_loss_scaling_with_skipped_steps(make_shard: ShardFactory, clip: bool) -> None:
    specs = [table("t", Adam(lr=0.05), Adagrad(lr=0.1)), table("u", FTRL(lr=0.1, beta=1.0))]
    run = Run(make_shard, specs, pooled("t", ReduceMean()) + pooled("u", ReduceSum()))
    joint = JointOptimizer([run.sparse, run.dense[0]])
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)
    for lap in range(10):
        overflows = lap in (2, 3, 7)
        for _ in range(2):
            ours, theirs = run.losses(run.batch())
            scaler.scale(ours.mean() * (float("inf") if overflows else 1.0)).backward()
            theirs.mean().backward()
        if clip:
            scaler.unscale_(joint)
            clip_grad_norm_(run.heads[0].parameters(), run.sparse, 0.1)
            dense = [*run.heads[1].parameters(), *run.twin.weights.values()]
            nn.utils.clip_grad_norm_(dense, 0.1)
        scaler.step(joint)
        scaler.update()
        if not overflows:
            run.twin.step(run.sparse.global_step - 1)
            run.dense[1].step()
        run.zero()
    assert run.sparse.global_step == 7
    run.check()


@pytest.mark.slow
@interpreted_once("rule", RULES, Adagrad(lr=0.1))
def test_skipped_steps_leave_every_rule_alone(make_shard: ShardFactory, rule: Optimizer) -> None:
    """Steps 1 and 3 overflow under loss scaling; rows and state stay as if they never ran."""
    run = Run(make_shard, [table("t", rule)], pooled("t", ReduceSum(), ReduceMean()))
    joint = JointOptimizer([run.sparse, run.dense[0]])
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    for lap in range(6):
        overflows = lap in (1, 3)
        ours, theirs = run.losses(run.batch())
        scaler.scale(ours.mean() * (float("inf") if overflows else 1.0)).backward()
        theirs.mean().backward()
        scaler.step(joint)
        scaler.update()
        if not overflows:
            run.twin.step(run.sparse.global_step - 1)
            run.dense[1].step()
        run.zero()
    assert run.sparse.global_step == 4
    run.check()


TORCH: list[tuple[Optimizer, Callable[[list[nn.Parameter]], torch.optim.Optimizer]]] = [
    (SGD(lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
    (
        Momentum(lr=0.05, weight_decay=0.1),
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.1),
    ),
    (
        Momentum(lr=0.05, nesterov=True),
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    ),
    (
        Adagrad(lr=0.1, initial_accumulator=0.2, eps=1e-4, weight_decay=0.1),
        lambda p: torch.optim.Adagrad(
            p, lr=0.1, initial_accumulator_value=0.2, eps=1e-4, weight_decay=0.1
        ),
    ),
    (
        Adadelta(lr=0.5, eps=1e-3, weight_decay=0.1),
        lambda p: torch.optim.Adadelta(p, lr=0.5, rho=0.9, eps=1e-3, weight_decay=0.1),
    ),
    (AdamW(lr=0.05), lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.01)),
    # Monolith's eps is outside the bias correction; where it vanishes the formulas agree.
    (
        Adam(lr=0.05, eps=1e-30, weight_decay=0.1),
        lambda p: torch.optim.Adam(p, lr=0.05, betas=(0.9, 0.99), eps=1e-30, weight_decay=0.1),
    ),
    (
        Amsgrad(lr=0.05, eps=1e-30),
        lambda p: torch.optim.Adam(p, lr=0.05, betas=(0.9, 0.99), eps=1e-30, amsgrad=True),
    ),
]


@pytest.mark.parametrize(("rule", "make"), TORCH, ids=lambda value: getattr(value, "kind", ""))
def test_torch_optimizers_on_dense_matrices(
    make_shard: ShardFactory,
    rule: Optimizer,
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
) -> None:
    """Every row is touched in each step, so an ordinary dense optimizer is the same model."""
    run = Run(make_shard, [table("t", rule)], pooled("t", ReduceSum(), FirstN(2)))
    oracle = make(list(run.twin.weights.values()))
    for _ in range(8):
        run.backward(run.batch(whole=True))
        run.sparse.step()
        oracle.step()
        for optimizer in run.dense:
            optimizer.step()
        run.zero()
    run.check()


@interpreted_too
def test_untouched_rows_are_not_there(make_shard: ShardFactory) -> None:
    run = Run(make_shard, [table("t", Adam(lr=0.1))], pooled("t", ReduceSum()))
    batch = KeyedRagged.from_lists({"t0": [[VOCABULARY[3]], []]})
    for _ in range(3):
        run.backward(batch)
        run.step()
    found = run.owner.table("t").find(VOCABULARY)[1]
    assert found.nonzero().flatten().tolist() == [3]
    run.check()
