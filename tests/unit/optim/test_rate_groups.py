"""torch's learning-rate schedulers on tables, and rates written into `param_groups`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim import lr_scheduler as schedulers

from shoal.embedding.collection import EmbeddingCollection
from shoal.embedding.layouts import Feature
from shoal.errors import CheckpointError, ConfigError, DTypeError, InputError
from shoal.optim import JointOptimizer, SparseOptimizer
from shoal.ragged import KeyedRagged
from shoal.rules.optimizers import SGD, Adagrad
from shoal.rules.schedules import ConstantRate, Polynomial, Schedule
from shoal.table.spec import Segment, TableSpec

LAST = 6


def tables(lr: float | Schedule = 0.5) -> EmbeddingCollection:
    """Table t of one segment, table wide of two."""
    specs = [
        TableSpec(name="t", segments=(Segment(dim=2, optimizer=SGD(lr=lr)),)),
        TableSpec(
            name="wide",
            segments=(
                Segment(name="bias", dim=1, optimizer=SGD(lr=0.1)),
                Segment(name="vec", dim=2, optimizer=Adagrad(lr=0.2)),
            ),
        ),
    ]
    return EmbeddingCollection(specs, [Feature("a", "t"), Feature("b", "wide")], seed=1)


def fall(owner: EmbeddingCollection, optimizer: Optimizer) -> float:
    """How far row 1 of table t falls by a step of gradient 1: its rate."""
    owner.table("t").find_or_init([1]).end()
    before = owner.table("t").lookup([1])
    sum(
        part.sum() for part in owner(KeyedRagged.from_lists({"a": [[1]], "b": [[1]]})).values()
    ).backward()
    optimizer.step()
    optimizer.zero_grad()
    return float((before - owner.table("t").lookup([1]))[0, 0])


SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "step": lambda o: schedulers.StepLR(o, 2, 0.5),
    "cosine": lambda o: schedulers.CosineAnnealingLR(o, LAST),
    "lambda": lambda o: schedulers.LambdaLR(o, lambda step: 1 / (step + 1)),
    "one cycle": lambda o: schedulers.OneCycleLR(o, 0.5, LAST + 1, cycle_momentum=False),
    "cyclic": lambda o: schedulers.CyclicLR(o, 0.1, 1.0, 2, cycle_momentum=False),
    "restarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 3),
    "plateau": lambda o: schedulers.ReduceLROnPlateau(o, patience=1),
    "sequence": lambda o: schedulers.SequentialLR(
        o, [schedulers.ConstantLR(o, 0.1, 2), schedulers.ExponentialLR(o, 0.9)], [2]
    ),
}


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_does_to_a_table_what_it_does_to_a_tensor(name: str, joint: bool) -> None:
    owner, head = tables(), nn.Linear(2, 1)
    sparse = SparseOptimizer(owner)
    chosen = (
        JointOptimizer([torch.optim.SGD(head.parameters(), lr=0.5), sparse]) if joint else sparse
    )
    model = torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.5)
    ours, theirs = SCHEDULERS[name](chosen), SCHEDULERS[name](model)
    measured = (1.0,) if name == "plateau" else ()
    for _ in range(LAST):
        rate = model.param_groups[0]["lr"]
        assert fall(owner, chosen) == pytest.approx(rate, abs=1e-6)
        model.step()
        ours.step(*measured)
        theirs.step(*measured)
    assert sparse.rates()["t"] == (model.param_groups[0]["lr"],)
    assert all(
        group["lr"] == model.param_groups[0]["lr"] for group in chosen.param_groups[: 1 + joint]
    )


def test_a_group_per_table_and_segment() -> None:
    owner = tables()
    sparse = SparseOptimizer(owner, rates={("wide", "vec"): 0.3})
    groups = {group["name"]: group for group in sparse.param_groups}
    assert {name: group["lr"] for name, group in groups.items()} == {
        "t": 0.5, "wide/bias": 0.1, "wide/vec": 0.3,
    }  # fmt: skip
    params = [param for group in sparse.param_groups for param in group["params"]]
    assert set(map(id, params)) == set(map(id, sparse.proxies))
    groups["wide/bias"]["lr"] = torch.tensor(0.25)
    assert sparse.rates() == {"wide": (0.25, 0.3)}
    head = torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=1.0)
    joint = JointOptimizer([sparse, head])
    head.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    assert [id(group) for group in joint.param_groups] == [
        id(group) for member in (sparse, head) for group in member.param_groups
    ]
    with pytest.raises(ConfigError, match="Add it to the member"):
        joint.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})


def test_tables_of_one_name_have_groups_of_their_own() -> None:
    first, second = tables(), tables()
    sparse = SparseOptimizer([first, second])
    names = [group["name"] for group in sparse.param_groups]
    assert names == ["t", "wide/bias", "wide/vec", "t#2", "wide#2/bias", "wide#2/vec"]
    sparse.param_groups[3]["lr"] = 0.0
    for owner, want in ((first, 0.5), (second, 0.0)):
        assert fall(owner, sparse) == pytest.approx(want)


@pytest.mark.parametrize(
    ("lr", "error"), [(math.nan, InputError), (-math.inf, InputError), ("x", DTypeError)]
)
def test_a_rate_that_is_none_changes_nothing(lr: Any, error: type[Exception]) -> None:
    owner = tables()
    sparse = SparseOptimizer(owner)
    sparse.param_groups[0]["lr"] = lr
    owner.table("t").find_or_init([1]).end()
    before = owner.table("t").lookup([1])
    with pytest.raises(error, match="learning rate of table 't'"):
        fall(owner, sparse)
    assert torch.equal(owner.table("t").lookup([1]), before) and sparse.global_step == 0


class TestSchedules:
    """A table whose rate is a schedule shows it, and refuses another's."""

    def test_the_group_shows_the_rate_of_the_coming_step(self) -> None:
        owner = tables(Polynomial(1.0, decay_steps=4, end=0.0))
        sparse = SparseOptimizer(owner)
        shown = []
        for _ in range(3):
            shown.append(sparse.param_groups[0]["lr"])
            assert fall(owner, sparse) == pytest.approx(shown[-1], abs=1e-6)
        assert shown == [1.0, 0.75, 0.5]

    def test_writing_is_refused_at_the_next_step(self) -> None:
        owner = tables(Polynomial(1.0, decay_steps=4, end=0.0))
        sparse = SparseOptimizer(owner)
        scheduler = schedulers.ExponentialLR(sparse, 0.5)
        fall(owner, sparse)
        scheduler.step()
        for act in (sparse.rates, lambda: fall(owner, sparse)):
            with pytest.raises(ConfigError, match=r"'t'.*Polynomial"):
                act()
        assert sparse.global_step == 1

    def test_a_constant_may_be_written(self) -> None:
        owner = tables(ConstantRate(0.5))
        sparse = SparseOptimizer(owner, rates={"t": ConstantRate(0.25)})
        assert sparse.param_groups[0]["lr"] == 0.25
        sparse.param_groups[0]["lr"] = 1.0
        assert fall(owner, sparse) == pytest.approx(1.0)


class TestState:
    def test_rates_and_what_schedulers_keep_come_back(self) -> None:
        owner = tables()
        sparse = SparseOptimizer(owner)
        scheduler = schedulers.StepLR(sparse, 1, 0.5)
        for _ in range(2):
            fall(owner, sparse)
            scheduler.step()
        state = sparse.state_dict()
        other = SparseOptimizer(tables())
        other.load_state_dict(state)
        assert other.global_step == 2 and other.rates() == sparse.rates()
        again = schedulers.StepLR(other, 1, 0.5, last_epoch=1)
        assert again.base_lrs == [0.5, 0.1, 0.2]

    def test_a_state_without_rates_brings_back_the_own_ones(self) -> None:
        sparse = SparseOptimizer(tables(), rates={"wide": 0.3})
        state = sparse.state_dict()
        assert state == {"global_step": 0}
        sparse.param_groups[1]["lr"] = 9.0
        sparse.load_state_dict(state)
        assert sparse.rates() == {"wide": (0.3, 0.3)}

    @pytest.mark.parametrize("groups", [[{"name": "other", "lr": 1.0}], [{"lr": 1.0}], 3])
    def test_a_state_of_other_tables(self, groups: Any) -> None:
        sparse = SparseOptimizer(tables())
        with pytest.raises(CheckpointError, match="param groups"):
            sparse.load_state_dict({"global_step": 4, "param_groups": groups})
        assert sparse.global_step == 0


def test_a_group_is_not_added_in_silence() -> None:
    stepper = SparseOptimizer(tables())
    with pytest.raises(ConfigError, match="JointOptimizer"):
        stepper.add_param_group({"params": [nn.Parameter(torch.ones(1))]})


@pytest.mark.parametrize(
    "state",
    [
        {"global_step": True},
        {"global_step": 2**70},
        {"global_step": 1, "param_groups": [{"name": "t", "lr": "fast"}]},
        {"global_step": 1, "param_groups": [{"name": "t", "lr": math.nan}]},
    ],
    ids=["bool", "large", "text", "nan"],
)
def test_a_state_that_no_step_could_use_is_refused(state: dict[str, Any]) -> None:
    stepper = SparseOptimizer(tables())
    with pytest.raises(CheckpointError):
        stepper.load_state_dict(state)
    assert stepper.global_step == 0
