"""Steps of tables that a checkpoint brings: schedules and schedulers go on where they were."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import StepLR

from shoal import checkpoint
from shoal.checkpoint import Contents, LoadOptions
from shoal.embedding.collection import EmbeddingCollection
from shoal.embedding.layouts import Feature
from shoal.errors import CheckpointError
from shoal.optim import JointOptimizer, SparseOptimizer
from shoal.ragged import KeyedRagged
from shoal.rules.optimizers import Adam
from shoal.rules.schedules import Polynomial, Schedule
from shoal.table.spec import Segment, TableSpec

DECAY = Polynomial(1.0, decay_steps=10, end=0.0)


@dataclass
class Job:
    tables: EmbeddingCollection
    head: nn.Linear
    sparse: SparseOptimizer
    dense: Optimizer

    def train(self, steps: int) -> None:
        for _ in range(steps):
            found = self.tables(KeyedRagged.from_lists({"f": [[1, 2], [3]]}))["f"]
            self.head(found).square().sum().backward()
            self.sparse.step()
            self.dense.step()
            self.sparse.zero_grad()
            self.dense.zero_grad()

    def contents(self, **optimizers: Optimizer) -> Contents:
        return Contents(
            tables={"e": self.tables.hosted}, modules={"h": self.head}, optimizers=optimizers
        )

    def rows(self) -> torch.Tensor:
        return self.tables.table("t").lookup([1, 2, 3])


def job(seed: int = 0, lr: float | Schedule = DECAY) -> Job:
    torch.manual_seed(seed)
    spec = TableSpec(name="t", segments=(Segment(dim=2, optimizer=Adam(lr=lr)),))
    tables = EmbeddingCollection([spec], [Feature("f", "t")], seed=1)
    head = nn.Linear(2, 1)
    dense = torch.optim.Adam(head.parameters(), lr=0.1)
    return Job(tables, head, SparseOptimizer(tables), dense)


@pytest.mark.parametrize("before", [1, 5])
@pytest.mark.parametrize("late", [False, True])
def test_tables_alone_bring_their_steps(tmp_path: Path, before: int, late: bool) -> None:
    """Whether the optimizer is made before the load or after it."""
    whole, first, second = job(), job(), job(9)
    whole.train(before + 3)
    first.train(before)
    # The step of a checkpoint counts what its user likes.
    checkpoint.save(tmp_path, first.contents(h=first.dense), step=100 * before, position=1)
    if late:
        del second.sparse
    checkpoint.load(tmp_path, second.contents(h=second.dense))
    if late:
        second.sparse = SparseOptimizer(second.tables)
    assert second.sparse.global_step == before
    assert second.sparse.param_groups[0]["lr"] == first.sparse.param_groups[0]["lr"]
    second.train(3)
    assert second.sparse.global_step == before + 3
    assert torch.equal(second.rows(), whole.rows())
    assert torch.equal(second.head.weight, whole.head.weight)


def test_steps_without_a_gradient_count(tmp_path: Path) -> None:
    first, second = job(), job()
    first.train(1)
    for _ in range(3):
        first.sparse.step()
    checkpoint.save(tmp_path, first.contents(), step=4, position=1)
    checkpoint.load(tmp_path, second.contents())
    assert second.sparse.global_step == 4


def test_a_second_optimizer_begins_anew() -> None:
    one = job()
    one.train(2)
    assert SparseOptimizer(one.tables).global_step == 0


def test_tables_that_never_stepped_and_state_left_out(tmp_path: Path) -> None:
    fresh, trained = job(), job()
    fresh.tables.table("t").find_or_init([1]).end()
    checkpoint.save(tmp_path / "fresh", fresh.contents(), step=0, position=0)
    trained.train(3)
    checkpoint.save(tmp_path / "trained", trained.contents(), step=3, position=0)
    for name, options in (("fresh", LoadOptions()), ("trained", LoadOptions(state=False))):
        other = job()
        checkpoint.load(tmp_path / name, other.contents(), options=options)
        assert other.sparse.global_step == 0


Chosen = Callable[[Job], dict[str, Optimizer]]
JOINT: Chosen = lambda one: {"all": JointOptimizer([one.sparse, one.dense])}  # noqa: E731
APART: Chosen = lambda one: {"sparse": one.sparse, "h": one.dense}  # noqa: E731


@pytest.mark.parametrize("chosen", [JOINT, APART])
def test_optimizers_of_rows_are_saved_with_what_schedulers_wrote(
    tmp_path: Path, chosen: Chosen
) -> None:
    def scheduled(one: Job, steps: int, driven: list[StepLR]) -> None:
        for _ in range(steps):
            one.train(1)
            for scheduler in driven:
                scheduler.step()

    whole, first, second = job(lr=0.5), job(lr=0.5), job(9, lr=0.5)
    drive = {
        id(one): [StepLR(o, 2, 0.5) for o in (one.sparse, one.dense)] for one in (whole, first)
    }
    scheduled(whole, 8, drive[id(whole)])
    scheduled(first, 5, drive[id(first)])
    checkpoint.save(tmp_path, first.contents(**chosen(first)), step=5, position=5)
    checkpoint.load(tmp_path, second.contents(**chosen(second)))
    again = [StepLR(one, 2, 0.5, last_epoch=4) for one in (second.sparse, second.dense)]
    for scheduler, old in zip(again, drive[id(first)], strict=True):
        scheduler.load_state_dict(old.state_dict())
        for group, lr in zip(scheduler.optimizer.param_groups, old.get_last_lr(), strict=True):
            group["lr"] = lr
    scheduled(second, 3, again)
    assert second.sparse.global_step == 8 and torch.equal(second.rows(), whole.rows())
    assert torch.equal(second.head.weight, whole.head.weight)


def test_rows_alone_need_no_module(tmp_path: Path) -> None:
    first, second = job(lr=0.5), job(lr=0.5)
    first.train(2)
    first.sparse.param_groups[0]["lr"] = 0.125

    def contents(one: Job) -> Contents:
        return Contents(tables={"e": one.tables.hosted}, optimizers={"rows": one.sparse})

    checkpoint.save(tmp_path, contents(first), step=2, position=2)
    checkpoint.load(tmp_path, contents(second))
    assert second.sparse.rates() == {"t": (0.125,)} and second.sparse.global_step == 2


def test_another_kind_of_optimizer_is_refused_before_anything_changes(tmp_path: Path) -> None:
    first, second = job(), job(9)
    first.train(2)
    for name, saved, loaded in (("a", APART, JOINT), ("b", JOINT, APART)):
        checkpoint.save(tmp_path / name, first.contents(**saved(first)), step=2, position=2)
        with pytest.raises(CheckpointError, match="optimizer 'all/0'"):
            checkpoint.load(tmp_path / name, second.contents(**loaded(second)))
    swapped = first.contents(h=first.sparse)
    checkpoint.save(tmp_path / "c", swapped, step=2, position=2)
    with pytest.raises(CheckpointError, match="steps rows"):
        checkpoint.load(tmp_path / "c", second.contents(h=second.dense))
    checkpoint.save(tmp_path / "d", first.contents(h=first.dense), step=2, position=2)
    with pytest.raises(CheckpointError, match="state of a SparseOptimizer"):
        checkpoint.load(tmp_path / "d", second.contents(h=second.sparse))
    assert len(second.tables.table("t")) == 0 and second.sparse.global_step == 0
