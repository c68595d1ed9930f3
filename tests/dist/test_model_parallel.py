"""A wrapped model on W ranks is the model of one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.comm.mesh import Mesh
from shoal.distributed import DistributedModelParallel
from shoal.distributed.model import Placing
from shoal.embedding.collection import EmbeddingCollection
from shoal.optim import JointOptimizer, SparseOptimizer
from shoal.rules.optimizers import SGD, Adagrad, Adam, SignSGD
from shoal.table.hosting import plan_placement
from support.ranks import run_ranks
from support.spread_model import (
    Data,
    Outcome,
    SpreadModel,
    batches,
    check_equal,
    loss_of,
    on_mesh,
    outcome_of,
    part_of,
    specs,
)

pytestmark = [pytest.mark.multiproc, pytest.mark.slow]

PLACINGS: dict[str, Mapping[str, str] | None] = {
    "rows": None,
    "columns": {"users": "table_wise", "items": "column_wise"},
    "replicas": {"users": "data_parallel", "items": "grid"},
    "one rank": {"users": "table_wise", "items": "table_wise"},
    "nodes": {"users": "table_row_wise", "items": "grid"},
}


def placing_of(name: str, world_size: int) -> Placing:
    """As the wrapper takes it; "nodes" are two, however many hosts there are."""
    kinds = PLACINGS[name]
    if name != "nodes":
        return kinds
    return plan_placement(specs(), world_size, kinds=kinds, local_world_size=world_size // 2)


class Trainer:
    """A model, its optimizers, and this rank's part of every batch."""

    def __init__(self, model: nn.Module, rank: int, world_size: int) -> None:
        self.model, self.rank, self.world_size = model, rank, world_size
        self.sparse = SparseOptimizer(model)
        dense = torch.optim.Adagrad(model.parameters(), lr=0.05)
        self.joint = JointOptimizer([self.sparse, dense])
        self.losses: list[float] = []

    def loss(self, whole: Data) -> Tensor:
        part = part_of(whole, self.rank, self.world_size)
        return loss_of(self.model, part, len(whole.labels), self.world_size)

    def step(self, *losses: Tensor) -> None:
        self.joint.step()
        self.joint.zero_grad()
        self.losses.append(sum(float(loss.detach()) for loss in losses) / self.world_size)

    def outcome(self) -> Outcome:
        return outcome_of(self.model, self.losses)


Wrap = Callable[[nn.Module], nn.Module]


def plain(trainer: Trainer) -> None:
    for whole in batches(4):
        loss = trainer.loss(whole)
        loss.backward()
        trainer.step(loss)


def accumulated(trainer: Trainer) -> None:
    model = trainer.model
    for first, second in zip(batches(3, seed=1), batches(3, seed=2), strict=True):
        if isinstance(model, DistributedModelParallel):
            with model.no_sync():
                one = trainer.loss(first)
                one.backward()
        else:
            one = trainer.loss(first)
            one.backward()
        two = trainer.loss(second)
        two.backward()
        trainer.step(one, two)


def several_losses(trainer: Trainer) -> None:
    """Two lookups of one batch object, both alive; their losses go backward together."""
    for first, second in zip(batches(3, seed=1), batches(3, seed=2), strict=True):
        one, two = trainer.loss(first), trainer.loss(second)
        (one + 0.5 * two).backward()
        trainer.step(one, two)


def begun_ahead(trainer: Trainer) -> None:
    """Lookups that begin before the step before them, as a pipeline has them."""
    (tables,) = [p for p in trainer.model.modules() if isinstance(p, EmbeddingCollection)]
    data = batches(4)
    ready = [part_of(whole, trainer.rank, trainer.world_size) for whole in data]
    ids = [part.batch() for part in ready]
    tables.begin(ids[0])
    for i, part in enumerate(ready):
        dense, labels = part.tensors()
        logits = trainer.model(ids[i], dense)
        if i + 1 < len(ids):
            tables.begin(ids[i + 1])
            tables.probe(ids[i + 1])
        loss = nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="sum")
        loss = loss * trainer.world_size / len(data[i].labels)
        loss.backward()
        trainer.step(loss)
        if i + 1 < len(ids):
            tables.fetch(ids[i + 1])


RUNS: dict[str, Callable[[Trainer], None]] = {
    "plain": plain,
    "accumulated": accumulated,
    "several losses": several_losses,
    "begun ahead": begun_ahead,
}


def exact(model: nn.Module, rank: int, world_size: int) -> Outcome:
    """Gradients are small whole numbers: their sums are exact in any order."""
    sparse = SparseOptimizer(model)
    losses = []
    for whole in batches(4):
        out = model(part_of(whole, rank, world_size).batch())
        loss = sum((torch.arange(v.shape[1]) * v).sum() for k, v in out.items() if k != "item")
        assert isinstance(loss, Tensor)
        (loss * world_size).backward()  # type: ignore[no-untyped-call]
        sparse.step()
        sparse.zero_grad()
        losses.append(float(loss.detach()))
    return outcome_of(model, losses)


def collection(rule: Any) -> nn.Module:
    return SpreadModel(specs(rule)).tables


EXACT = [SGD(lr=0.25), SignSGD(lr=0.125), Adagrad(lr=0.25), Adam(lr=0.125)]


def on_rank(mesh: Mesh) -> dict[str, Outcome]:
    found = {}
    for name in PLACINGS:
        placing = placing_of(name, mesh.world_size)
        # Another seed on each rank: rank 0's parameters count.
        model = SpreadModel(specs(), seed=3 + mesh.rank)
        model = DistributedModelParallel(model, placing, mesh=mesh, exchange_path="torch")
        trainer = Trainer(model, mesh.rank, mesh.world_size)
        plain(trainer)
        found[f"placing {name}"] = trainer.outcome()
        for rule in EXACT:
            tables = DistributedModelParallel(
                collection(rule), placing, mesh=mesh, exchange_path="torch"
            )
            found[f"{type(rule).__name__} {name}"] = exact(tables, mesh.rank, mesh.world_size)
    for name, run in RUNS.items():
        model = DistributedModelParallel(SpreadModel(specs()), mesh=mesh, exchange_path="torch")
        trainer = Trainer(model, mesh.rank, mesh.world_size)
        run(trainer)
        found[f"run {name}"] = trainer.outcome()
    return found


@pytest.fixture(scope="module", params=[2, 4])
def outcomes(request: pytest.FixtureRequest) -> dict[str, list[Outcome]]:
    ranks = run_ranks(request.param, on_mesh, on_rank)
    return {name: [rank[name] for rank in ranks] for name in ranks[0]}


@pytest.mark.parametrize("name", PLACINGS)
def test_every_placement(outcomes: dict[str, list[Outcome]], name: str) -> None:
    trainer = Trainer(SpreadModel(specs()), 0, 1)
    plain(trainer)
    check_equal(outcomes[f"placing {name}"], trainer.outcome())


@pytest.mark.parametrize("name", PLACINGS)
@pytest.mark.parametrize("rule", EXACT)
def test_the_same_bits(outcomes: dict[str, list[Outcome]], rule: Any, name: str) -> None:
    expected = exact(collection(rule), 0, 1)
    check_equal(outcomes[f"{type(rule).__name__} {name}"], expected, exactly=True)


@pytest.mark.parametrize("name", RUNS)
def test_every_kind_of_step(outcomes: dict[str, list[Outcome]], name: str) -> None:
    trainer = Trainer(SpreadModel(specs()), 0, 1)
    RUNS[name](trainer)
    check_equal(outcomes[f"run {name}"], trainer.outcome())
