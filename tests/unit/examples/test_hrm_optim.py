"""AdamATan2, the rate's run_state and averaged parameters, against plain arithmetic."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from hrm.adam_atan2 import AdamATan2
from hrm.schedule import WarmupCosine, total_steps
from shoal.errors import CheckpointError, ConfigError
from shoal.optim import ParameterAverage


def plain(w: float, grads: list[float], lr: float, decay: float, b1: float, b2: float) -> float:
    """The formula, one number at a time."""
    m = v = 0.0
    for t, g in enumerate(grads, 1):
        w *= 1 - lr * decay
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * g * g
        w -= lr / (1 - b1**t) * math.atan2(m, math.sqrt(v) / math.sqrt(1 - b2**t))
    return w


def train(optimizer: AdamATan2, weights: list[Tensor], grads: Tensor) -> None:
    for row in grads:
        for k, weight in enumerate(weights):
            weight.grad = row[k].clone()
        optimizer.step()


def test_steps_are_the_formulas() -> None:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(2, 3, dtype=torch.float64, generator=generator)
    grads = torch.randn(7, 2, 3, dtype=torch.float64, generator=generator)
    grads[:, 1, 2] = 0  # never a gradient: decays only
    weights = [nn.Parameter(row.clone()) for row in start]
    train(AdamATan2(weights, lr=0.1, weight_decay=0.2, betas=(0.8, 0.9)), weights, grads)
    for k in range(2):
        for j in range(3):
            want = plain(float(start[k, j]), grads[:, k, j].tolist(), 0.1, 0.2, 0.8, 0.9)
            assert float(weights[k].detach()[j]) == pytest.approx(want, rel=1e-12)
    assert float(weights[1].detach()[2]) == pytest.approx(float(start[1, 2]) * 0.98**7)


def test_scale_of_gradients_changes_nothing_and_a_steady_one_moves_by_a_quarter_pi() -> None:
    moved = []
    for scale in (1.0, 2.0**-40):
        weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        steady = torch.full((5, 1, 1), scale, dtype=torch.float64)
        train(AdamATan2([weight], lr=0.01, weight_decay=0), [weight], steady)
        moved.append(float(weight.detach()))
    assert moved[0] == pytest.approx(moved[1], rel=1e-9)
    one = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = AdamATan2([one], lr=0.01, weight_decay=0)
    train(optimizer, [one], torch.ones(400, 1, 1, dtype=torch.float64))
    before = float(one.detach())
    train(optimizer, [one], torch.ones(1, 1, 1, dtype=torch.float64))
    assert before - float(one.detach()) == pytest.approx(0.01 * math.pi / 4, rel=1e-6)


def test_late_and_missing_gradients_age_apart() -> None:
    weights = [nn.Parameter(torch.ones(1, dtype=torch.float64)) for _ in range(2)]
    optimizer = AdamATan2(weights, lr=0.1, weight_decay=0.5)
    weights[0].grad = torch.ones(1, dtype=torch.float64)
    optimizer.step()
    assert float(weights[1].detach()) == 1
    weights[1].grad = torch.ones(1, dtype=torch.float64)
    optimizer.step()
    assert float(weights[0].detach()) == pytest.approx(plain(1, [1, 1], 0.1, 0.5, 0.9, 0.95))
    assert float(weights[1].detach()) == pytest.approx(plain(1, [1], 0.1, 0.5, 0.9, 0.95))


def test_state_goes_on_bit_for_bit() -> None:
    grads = torch.randn(6, 1, 4, generator=torch.Generator().manual_seed(1))
    whole = [nn.Parameter(torch.ones(4))]
    train(AdamATan2(whole, lr=0.1), whole, grads)
    first = [nn.Parameter(torch.ones(4))]
    optimizer = AdamATan2(first, lr=0.1)
    train(optimizer, first, grads[:3])
    second = [nn.Parameter(first[0].detach().clone())]
    resumed = AdamATan2(second, lr=0.7)
    resumed.load_state_dict(optimizer.state_dict())
    train(resumed, second, grads[3:])
    assert torch.equal(whole[0], second[0])


@pytest.mark.parametrize("bad", [{"lr": -1.0}, {"betas": (1.0, 0.9)}, {"weight_decay": -0.1}])
def test_values_out_of_range_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="AdamATan2"):
        AdamATan2([nn.Parameter(torch.ones(1))], **{"lr": 0.1, **bad})  # type: ignore[arg-type]


def test_rate_climbs_then_falls_by_half_a_cosine() -> None:
    rate = WarmupCosine(base=2.0, warmup_steps=4, total_steps=12, min_ratio=0.25)
    got = [rate(step) for step in range(13)]
    assert got[:4] == [0.5, 1.0, 1.5, 2.0]
    assert got[7] == pytest.approx(2 * (0.25 + 0.75 / 2))
    assert got[11] == pytest.approx(0.5)
    constant = WarmupCosine(base=2.0, warmup_steps=0, total_steps=3)
    assert [constant(step) for step in (0, 2, 9)] == [2.0, 2.0, 2.0]
    with pytest.raises(ConfigError, match="learning rate"):
        WarmupCosine(base=-1.0, warmup_steps=0, total_steps=3)


def test_steps_of_the_sudoku_recipe() -> None:
    assert total_steps(20000, 1000, 1.0, 768) == 26041


def test_average_is_lent_to_the_module_and_taken_back() -> None:
    module = nn.Linear(2, 1, bias=False)
    start = module.weight.detach().clone()
    average = ParameterAverage(module, decay=0.9)
    with torch.no_grad():
        module.weight += 1
    average.update()
    with average.applied():
        torch.testing.assert_close(module.weight.detach(), start + 0.1)
    torch.testing.assert_close(module.weight.detach(), start + 1)
    again = ParameterAverage(nn.Linear(2, 1, bias=False))
    again.load_state_dict(average.state_dict())
    torch.testing.assert_close(again.state_dict()["weight"], start + 0.1)
    with pytest.raises(CheckpointError, match="bias"):
        again.load_state_dict({"weight": start, "bias": start})
