"""What every optimizer rule promises: state layout, shapes, independence, checked settings."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from shoal.errors import ConfigError, InputError
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
    RuleContext,
    SignSGD,
)
from shoal.rules.schedules import Polynomial

DTYPES = [torch.float32, torch.float64]
D = 5

# rule, state width of D columns, initial state of one row of two columns
LAYOUTS = [
    (SGD(), 0, []),
    (Momentum(), D, [0, 0]),
    (SignSGD(), 0, []),
    (Adagrad(), D, [0.1, 0.1]),
    (RowWiseAdagrad(), 1, [0.1]),
    (DynamicWdAdagrad(), D, [0.1, 0.1]),
    (Adadelta(), 2 * D, [0, 0, 0, 0]),
    (RMSprop(), D, [0, 0]),
    (Adam(), 2 * D + 2, [0, 0, 0, 0, 0.9, 0.99]),
    (AdamW(), 2 * D + 2, [0, 0, 0, 0, 0.9, 0.999]),
    (Amsgrad(), 3 * D + 2, [0, 0, 0, 0, 0, 0, 0.9, 0.99]),
    (LAMB(), 2 * D + 2, [0, 0, 0, 0, 0.9, 0.999]),
    (FTRL(), 2 * D, [0.1, 0.1, 0, 0]),
    (GroupFTRL(), 2 * D, [0, 0, 0, 0]),
    (GroupAdagrad(), 1, [0.1]),
    (MovingAverage(), 0, []),
    (DelayCompensated(inner=Adadelta()), 2 * D, [0, 0, 0, 0]),
]
RULES = [layout[0] for layout in LAYOUTS]


def last_weights(rule: Optimizer, w_UD: Tensor, grads: list[Tensor]) -> Tensor:
    state_US = rule.init_state(w_UD.shape[1], w_UD.dtype).expand(w_UD.shape[0], -1)
    for step, grad_UD in enumerate(grads):
        w_UD, state_US = rule.step(w_UD, state_US, grad_UD, rule.rate(step), RuleContext(step))
    return w_UD


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 31, 33])
@pytest.mark.parametrize(
    "rule", [r for r in RULES if r.coupling == "element"], ids=lambda r: r.kind
)
def test_every_column_steps_alike_at_every_width(
    rule: Optimizer, width: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(width)
    w_UD, *grads = torch.randn(4, 3, width, generator=generator, dtype=dtype)
    wide_UD = last_weights(rule, w_UD, grads)
    for column in range(width):
        alone_UD = last_weights(
            rule, w_UD[:, column : column + 1], [g[:, column : column + 1] for g in grads]
        )
        torch.testing.assert_close(wide_UD[:, column : column + 1], alone_UD)


@pytest.mark.parametrize(
    ("rule", "width", "initial"), LAYOUTS, ids=lambda v: getattr(v, "kind", "")
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_state_layout(
    rule: Optimizer, width: int, initial: list[float], dtype: torch.dtype
) -> None:
    assert rule.state_width(D) == width
    state_S = rule.init_state(2, dtype)
    torch.testing.assert_close(state_S, torch.tensor(initial, dtype=dtype))
    rule.check_dim(D)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 3])
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.kind)
def test_shapes_dtypes_and_inputs_are_kept(rule: Optimizer, rows: int, dtype: torch.dtype) -> None:
    w_UD, grad_UD = torch.ones(rows, D, dtype=dtype), torch.full((rows, D), 0.5, dtype=dtype)
    state_US = rule.init_state(D, dtype).repeat(rows, 1)
    before = [tensor.clone() for tensor in (w_UD, state_US, grad_UD)]
    moved_UD, moved_US = rule.step(w_UD, state_US, grad_UD, rule.rate(0), RuleContext())
    assert moved_UD.shape == (rows, D)
    assert moved_US.shape == (rows, rule.state_width(D))
    assert moved_UD.dtype == moved_US.dtype == dtype
    assert moved_UD.isfinite().all()
    for tensor, copy in zip((w_UD, state_US, grad_UD), before, strict=True):
        assert torch.equal(tensor, copy)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.kind)
def test_rows_do_not_see_each_other(rule: Optimizer) -> None:
    w_UD, grad_UD = torch.randn(2, 3, D, generator=torch.Generator().manual_seed(0))
    together_UD = last_weights(rule, w_UD, [grad_UD] * 2)
    for row in range(3):
        alone_UD = last_weights(rule, w_UD[row : row + 1], [grad_UD[row : row + 1]] * 2)
        torch.testing.assert_close(together_UD[row], alone_UD[0])


@pytest.mark.parametrize(
    ("rule", "coupling"),
    [
        (Adam(), "element"),
        (RowWiseAdagrad(), "segment"),
        (GroupAdagrad(), "segment"),
        (GroupFTRL(), "segment"),
        (LAMB(), "segment"),
        (DynamicWdAdagrad(), "segment"),
        (DelayCompensated(inner=SGD()), "element"),
        (DelayCompensated(inner=LAMB()), "segment"),
    ],
)
def test_coupling(rule: Optimizer, coupling: str) -> None:
    assert rule.coupling == coupling


def test_param_values_are_numbers_in_the_declared_order() -> None:
    assert Adam.params == ("beta1", "beta2", "eps", "weight_decay", "nesterov")
    assert Adam(nesterov=True).param_values() == (0.9, 0.99, 0.01, 0.0, 1.0)
    assert RMSprop(accumulate="sum").param_values() == (0.9, 0.0, 1.0)
    assert DelayCompensated(inner=SGD()).param_values() == (0.1,)


def test_rates() -> None:
    assert SGD(lr=Polynomial(0.01, 10, end=0.11)).rate(1) == pytest.approx(0.02)
    assert MovingAverage().rate(5) == 1.0
    assert DelayCompensated(inner=SGD(lr=0.3)).rate(0) == 0.3


@pytest.mark.parametrize(
    ("rule", "settings", "names"),
    [
        (SGD, {"lr": -0.1}, "lr"),
        (SGD, {"lr": math.nan}, "lr"),
        (SGD, {"lr": "0.1"}, "lr"),
        (SignSGD, {"weight_decay": -1}, "weight_decay"),
        (Momentum, {"momentum": 1.0}, "momentum"),
        (Momentum, {"momentum": -0.1}, "momentum"),
        (MovingAverage, {"momentum": 1.5}, "momentum"),
        (Adagrad, {"initial_accumulator": 0}, "initial_accumulator"),
        (Adagrad, {"eps": -1e-8}, "eps"),
        (RowWiseAdagrad, {"initial_accumulator": 0}, "initial_accumulator"),
        (DynamicWdAdagrad, {"initial_accumulator": 0}, "initial_accumulator"),
        (DynamicWdAdagrad, {"temperature": 0}, "temperature"),
        (Adadelta, {"rho": 1}, "rho"),
        (Adadelta, {"eps": 0}, "eps"),
        (RMSprop, {"accumulate": "max"}, "accumulate"),
        (Adam, {"beta1": 1}, "beta1"),
        (Amsgrad, {"beta2": -0.5}, "beta2"),
        (AdamW, {"eps": -1}, "eps"),
        (LAMB, {"weight_decay": math.inf}, "weight_decay"),
        (FTRL, {"l1": -1}, "l1"),
        (FTRL, {"initial_accumulator": 0}, "initial_accumulator"),
        (GroupFTRL, {"beta": 0}, "beta"),
        (GroupAdagrad, {"l2": -1}, "l2"),
        (BatchSoftmax, {"lr": -1}, "lr"),
        (DelayCompensated, {"inner": SGD(), "strength": -1}, "strength"),
        (DelayCompensated, {"inner": DelayCompensated(inner=SGD())}, "inner"),
        (DelayCompensated, {"inner": 3}, "inner"),
    ],
)
def test_wrong_numbers_are_refused(
    rule: type[Optimizer], settings: dict[str, object], names: str
) -> None:
    with pytest.raises(ConfigError, match=names):
        rule(**settings)


@pytest.mark.parametrize("rule", [BatchSoftmax(), DelayCompensated(inner=BatchSoftmax())])
def test_batch_softmax_takes_one_column(rule: Optimizer) -> None:
    rule.check_dim(1)
    with pytest.raises(ConfigError, match="BatchSoftmax"):
        rule.check_dim(2)


@pytest.mark.parametrize("step", [(1 << 24) + 1, (1 << 40) + 12345])
def test_batch_softmax_remembers_large_steps_exactly(step: int) -> None:
    rule = BatchSoftmax(lr=1)
    state_US = rule.init_state(1).expand(1, -1)
    _, state_US = rule.step(torch.zeros(1, 1), state_US, torch.ones(1, 1), 1, RuleContext(step))
    assert state_US[0, 0].item() * (1 << 20) + state_US[0, 1].item() == step
    gap, _ = rule.step(torch.zeros(1, 1), state_US, torch.ones(1, 1), 1, RuleContext(step + 3))
    assert gap.item() == 3


def test_batch_softmax_refuses_a_negative_step() -> None:
    rule = BatchSoftmax()
    with pytest.raises(InputError, match="global_step"):
        rule.step(torch.zeros(1, 1), torch.zeros(1, 2), torch.zeros(1, 1), 0.1, RuleContext(-1))


def test_a_wrapper_hands_the_global_step_on() -> None:
    rule = DelayCompensated(inner=BatchSoftmax(lr=0.1))
    ctx = RuleContext(global_step=7, seen_UD=torch.ones(1, 1))
    w_UD, state_US = rule.step(torch.zeros(1, 1), torch.zeros(1, 2), torch.ones(1, 1), 0.1, ctx)
    assert w_UD.item() == pytest.approx(0.7)
    assert state_US[0].tolist() == [0, 7]
