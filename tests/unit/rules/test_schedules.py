"""Learning-rate schedules against published numbers and torch's schedulers."""

from __future__ import annotations

import math

import pytest
import torch

from shoal.errors import ConfigError
from shoal.rules.optimizers import SGD, Adagrad, RuleContext
from shoal.rules.schedules import (
    ByEpoch,
    ConstantRate,
    Cosine,
    Exponential,
    Piecewise,
    Polynomial,
    Scaled,
    Schedule,
    Warmup,
    as_rate,
    settled,
)


def torch_rates(make: object, base: float, steps: int) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=base)
    scheduler = make(optimizer)  # type: ignore[operator]
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize(
    ("step", "rate"), [(0, 0.01), (1, 0.02), (2, 0.03), (10, 0.11), (99, 0.11)]
)
def test_polynomial_climbs(step: int, rate: float) -> None:
    assert Polynomial(initial=0.01, decay_steps=10, end=0.11)(step) == pytest.approx(rate)


def test_polynomial_power_and_defaults() -> None:
    assert Polynomial(1.0, 10, end=0.0, power=2.0)(5) == pytest.approx(0.25)
    assert Polynomial(1.0, 10)(10) == pytest.approx(0.0001)


@pytest.mark.parametrize(
    ("step", "rate"), [(0, 1.0), (10, 0.0), (11, 0.45), (20, 0.0), (25, 1 / 6)]
)
def test_polynomial_cycle_restarts_over_a_longer_span(step: int, rate: float) -> None:
    assert Polynomial(1.0, 10, end=0.0, cycle=True)(step) == pytest.approx(rate)


def test_dense_adagrad_with_a_climbing_rate() -> None:
    # The published run never advances its global step, so all three steps use the rate of step 0.
    rule = Adagrad(lr=Polynomial(initial=3, decay_steps=10, end=11), initial_accumulator=0.1)
    w_UD = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    grad_UD = torch.tensor([[0.1, 0.1], [0.01, 0.01]])
    state_US = rule.init_state(2).expand(2, -1)
    for _ in range(3):
        w_UD, state_US = rule.step(w_UD, state_US, grad_UD, rule.rate(0), RuleContext())
    assert w_UD.flatten().tolist() == pytest.approx(
        [-1.60260987, -0.60260987, 2.71567917, 3.71567917], abs=3e-7
    )


def test_climbing_rate_reaches_the_rows() -> None:
    # ids [0, 1, 0], loss -emb, one step at global step 1: id 0 has gradient -2, id 1 has -1.
    rule = SGD(lr=Polynomial(initial=0.01, decay_steps=10, end=0.11))
    grad_UD = torch.tensor([[-2.0], [-1.0]])
    w_UD, _ = rule.step(torch.zeros(2, 1), torch.zeros(2, 0), grad_UD, rule.rate(1), RuleContext(1))
    assert w_UD.flatten().tolist() == pytest.approx([0.04, 0.02])


def test_exponential_is_torchs() -> None:
    expected = torch_rates(lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9), 0.5, 8)
    assert [Exponential(0.5, 0.9)(step) for step in range(8)] == pytest.approx(expected)


@pytest.mark.parametrize(("cycle", "steps"), [(False, 6), (True, 13)])
def test_cosine_is_torchs(cycle: bool, steps: int) -> None:
    expected = torch_rates(
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=5, eta_min=0.1), 0.5, steps
    )
    ours = Cosine(0.5, 5, end=0.1, cycle=cycle)
    assert [ours(step) for step in range(steps)] == pytest.approx(expected)


def test_cosine_stays_at_its_end() -> None:
    assert Cosine(0.5, 5, end=0.1)(1000) == pytest.approx(0.1)


def test_piecewise_is_torchs_multi_step() -> None:
    expected = torch_rates(
        lambda o: torch.optim.lr_scheduler.MultiStepLR(o, milestones=[2, 5], gamma=0.1), 1.0, 8
    )
    ours = Piecewise((2, 5), (1.0, 0.1, 0.01))
    assert [ours(step) for step in range(8)] == pytest.approx(expected)


@pytest.mark.parametrize("step", [0, 1, 3, 4, 50])
def test_warmup_of_a_number_is_a_climb_from_zero(step: int) -> None:
    climb = Polynomial(initial=0.0, decay_steps=4, end=0.2)
    assert Warmup(0.2, 4)(step) == pytest.approx(climb(step))


def test_warmup_of_a_schedule_multiplies_it() -> None:
    inner = Exponential(1.0, 0.5)
    ours = Warmup(inner, 4, start_factor=0.2)
    assert [ours(step) for step in (0, 2, 4, 6)] == pytest.approx([0.2, 0.6 * 0.25, 0.5**4, 0.5**6])


@pytest.mark.parametrize(("lr", "rate"), [(0.3, 0.3), (1, 1.0), (ConstantRate(0.2), 0.2)])
def test_as_rate(lr: float | Schedule, rate: float) -> None:
    assert as_rate(lr, 7) == rate
    assert isinstance(as_rate(lr, 7), float)


@pytest.mark.parametrize(
    ("schedule", "settings", "names"),
    [
        (ConstantRate, {"value": -1}, "value"),
        (Polynomial, {"initial": 1, "decay_steps": 0}, "decay_steps"),
        (Polynomial, {"initial": 1, "decay_steps": 2.5}, "decay_steps"),
        (Polynomial, {"initial": 1, "decay_steps": 1, "power": 0}, "power"),
        (Polynomial, {"initial": 1, "decay_steps": 1, "end": -1}, "end"),
        (Exponential, {"initial": 1, "gamma": 0}, "gamma"),
        (Cosine, {"initial": math.inf, "decay_steps": 1}, "initial"),
        (Piecewise, {"boundaries": (1,), "values": (1.0,)}, "allowed: 2, one more"),
        (Piecewise, {"boundaries": (2, 2), "values": (1.0, 1.0, 1.0)}, "boundaries"),
        (Piecewise, {"boundaries": (0,), "values": (1.0, 1.0)}, "boundaries"),
        (Piecewise, {"boundaries": (), "values": (-1.0,)}, "values"),
        (Warmup, {"target": -1, "steps": 1}, "target"),
        (Warmup, {"target": 1, "steps": 0}, "steps"),
    ],
)
def test_wrong_numbers_are_refused(
    schedule: type[Schedule], settings: dict[str, object], names: str
) -> None:
    with pytest.raises(ConfigError, match=names):
        schedule(**settings)


def test_a_rate_by_epoch_is_the_same_through_each_epoch() -> None:
    rate = ByEpoch(Exponential(1.0, 0.5), steps=3)
    assert [rate(step) for step in range(7)] == [1, 1, 1, 0.5, 0.5, 0.5, 0.25]
    assert ByEpoch(rate.rate)(7) == 1


def test_open_epochs_are_filled_in_wherever_they_are_and_rates_scaled() -> None:
    halves = ByEpoch(Exponential(1.0, 0.5))
    assert settled(halves, 3) == ByEpoch(Exponential(1.0, 0.5), 3)
    assert settled(ByEpoch(0.1, steps=5), 3) == ByEpoch(0.1, steps=5)
    warm = settled(Warmup(target=halves, steps=4), 2, 0.1)
    assert [as_rate(warm, step) for step in range(5)] == pytest.approx(
        [0, 0.1 / 4, 0.05 * 2 / 4, 0.05 * 3 / 4, 0.025]
    )
    assert settled(Scaled(halves, 2.0), 2) == Scaled(ByEpoch(halves.rate, 2), 2.0)
    assert settled(0.5, 2) == 0.5
    assert as_rate(settled(0.5, 2, 3.0), 9) == 1.5
