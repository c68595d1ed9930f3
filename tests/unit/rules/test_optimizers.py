"""Optimizer rules against published numbers, torch's own optimizers and hand calculations."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

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

DTYPES = [torch.float32, torch.float64]


def run(
    rule: Optimizer,
    w_UD: Tensor,
    grads: list[Tensor],
    *,
    ctx: RuleContext | None = None,
    state_US: Tensor | None = None,
) -> tuple[list[Tensor], Tensor]:
    """Weights after each gradient, and the last state."""
    if state_US is None:
        state_US = rule.init_state(w_UD.shape[1], w_UD.dtype).expand(w_UD.shape[0], -1)
    seen = []
    for step, grad_UD in enumerate(grads):
        w_UD, state_US = rule.step(
            w_UD, state_US, grad_UD, rule.rate(step), ctx or RuleContext(global_step=step)
        )
        seen.append(w_UD)
    return seen, state_US


def last_unit(text: str) -> float:
    """A unit of a published number's last digit (some are cut off), plus float32's own error."""
    decimals = max(len(text.partition(".")[2]), 6)
    return 10.0**-decimals + 2e-7 * abs(float(text))


# rule, gradients per step, published weights per step, starting from w = 0
PUBLISHED = {
    "sgd": (SGD(), [["10"]], [["-.1"]]),
    "adadelta": (
        Adadelta(lr=0.01),
        [["10", "1"]] * 2,
        [["-.0031607", "-.0030151"], ["-.0064035", "-.0061047"]],
    ),
    "adagrad": (
        Adagrad(lr=0.1, initial_accumulator=1),
        [["1", "2"]],
        [["-.07071067", "-.08944272"]],
    ),
    "adagrad, decay": (
        Adagrad(lr=0.1, initial_accumulator=1, weight_decay=0.1),
        [["1", "2"]] * 2,
        [None, ["-.128173", "-.155943"]],
    ),
    "adam": (
        Adam(),
        [["10", "1"]] * 2,
        [["-.00990099", "-.00909091"], ["-.0198306", "-.01842895"]],
    ),
    "amsgrad": (
        Amsgrad(),
        [["10", "1"]] * 2,
        [["-.00990099", "-.00909091"], ["-.0198306", "-.01842895"]],
    ),
    "ftrl": (
        FTRL(lr=0.01, initial_accumulator=0.1),
        [["10", "1"]] * 2,
        [["-.009995", "-.00953463"], ["-.0170643", "-.0164353"]],
    ),
    "group adagrad, l2 1": (
        GroupAdagrad(beta=1, initial_accumulator=0, l2=1),
        [["10"]] * 2,
        [["-.0081818"], ["-.0141255"]],
    ),
    "group adagrad, l2 .5": (
        GroupAdagrad(beta=1, initial_accumulator=0, l2=0.5),
        [["10", "1"], ["1", "5"]],
        [["-.0086386", "-.00086386"], ["-.0090962", "-.00477795"]],
    ),
    "group adagrad, l2 0": (
        GroupAdagrad(beta=1, initial_accumulator=0, l2=0),
        [["10", "1"]],
        [["-.0090909", "-.00090909"]],
    ),
    "group adagrad, l2 1000": (
        GroupAdagrad(beta=1, initial_accumulator=0, l2=1000),
        [["10", "1"]],
        [["0", "0"]],
    ),
    "momentum": (
        Momentum(lr=0.01),
        [["10", "1"]] * 2,
        [["-.1", "-.01"], ["-.29", "-.029"]],
    ),
    "moving average": (MovingAverage(), [["10"]] * 2, [["1.0"], ["1.9"]]),
    "rmsprop": (RMSprop(), [["10"]] * 2, [["-.0240253"], ["-.0426859"]]),
    "rmsprop, sum": (
        RMSprop(accumulate="sum"),
        [["10", "1"]] * 2,
        [["-.0090909", "-.005"], ["-.0158549", "-.0092045"]],
    ),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", PUBLISHED)
def test_published_weights(case: str, dtype: torch.dtype) -> None:
    rule, grads, expected = PUBLISHED[case]
    rows = [torch.tensor([[float(g) for g in grad]], dtype=dtype) for grad in grads]
    weights, _ = run(rule, torch.zeros_like(rows[0]), rows)
    for w_UD, texts in zip(weights, expected, strict=True):
        for value, text in zip(w_UD[0].tolist(), texts or [], strict=False):
            assert value == pytest.approx(float(text), abs=last_unit(text), rel=0)


@pytest.mark.parametrize(
    ("rule", "expected"), [(RMSprop(), [10.0]), (RMSprop(accumulate="sum"), [100.0])]
)
def test_rmsprop_accumulator_after_one_step(rule: RMSprop, expected: list[float]) -> None:
    _, state_US = run(rule, torch.zeros(1, 1), [torch.tensor([[10.0]])])
    torch.testing.assert_close(state_US[0], torch.tensor(expected))


@pytest.mark.parametrize("dtype", DTYPES)
def test_two_segments_with_their_own_rule_and_rate(dtype: torch.dtype) -> None:
    grad_UD = torch.tensor([[1.0, 2.0, 3.0]], dtype=dtype)
    parts = [
        (Adagrad(lr=1, initial_accumulator=1), grad_UD[:, :1]),
        (Adagrad(lr=2, initial_accumulator=2), grad_UD[:, 1:]),
    ]
    first, second = [], []
    for rule, part_UD in parts:
        weights, state_US = run(rule, torch.zeros_like(part_UD), [part_UD])
        again, _ = run(rule, torch.zeros_like(part_UD), [part_UD], state_US=state_US)
        first += weights[0][0].tolist()
        second += again[0][0].tolist()
    assert first == pytest.approx([-0.70710677, -1.6329931, -1.8090681], abs=2e-7)
    assert second == pytest.approx([-0.57735026, -1.264911, -1.3416407], abs=2e-7)


@pytest.mark.parametrize("dtype", DTYPES)
def test_delay_compensation_over_adadelta(dtype: torch.dtype) -> None:
    # Published for seen weights of .1 in step 1 and 0 in step 2.
    rule = DelayCompensated(inner=Adadelta(lr=0.01), strength=0.1)
    grad_UD = torch.tensor([[10.0, 1.0]], dtype=dtype)
    w_UD, state_US = torch.zeros_like(grad_UD), rule.init_state(2, dtype).unsqueeze(0)
    expected = [(0.1, [-0.0031603, -0.00301233]), (0.0, [-0.0065548, -0.00611400])]
    for seen, weights in expected:
        ctx = RuleContext(seen_UD=torch.full_like(w_UD, seen))
        w_UD, state_US = rule.step(w_UD, state_US, grad_UD, rule.rate(0), ctx)
        assert w_UD[0].tolist() == pytest.approx(weights, abs=5e-8, rel=2e-7)


def test_delay_compensation_of_a_fresh_gradient_is_the_inner_rule() -> None:
    grad_UD = torch.tensor([[3.0, -1.0]])
    plain, _ = run(Adam(), torch.ones(1, 2), [grad_UD])
    wrapped, _ = run(DelayCompensated(inner=Adam()), torch.ones(1, 2), [grad_UD])
    assert torch.equal(plain[0], wrapped[0])


@pytest.mark.parametrize("width", [1, 7, 8, 9, 16, 33])
def test_adagrad_decay_enters_accumulator_and_step_at_every_width(width: int) -> None:
    rule = Adagrad(lr=0.1, initial_accumulator=1, weight_decay=0.1)
    grad_UD = torch.ones(1, width)
    weights, _ = run(rule, torch.zeros(1, width), [grad_UD] * 2)
    assert weights[-1][0].tolist() == pytest.approx([-0.128173] * width, abs=1e-6)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_ftrl_l1_shrinks_towards_zero_on_both_sides(sign: float) -> None:
    grad_UD = torch.tensor([[10.0 * sign]])
    free, _ = run(FTRL(), torch.zeros(1, 1), [grad_UD])
    shrunk, _ = run(FTRL(l1=4), torch.zeros(1, 1), [grad_UD])
    assert shrunk[0].item() == pytest.approx(free[0].item() * 0.6, rel=1e-6)
    gone, _ = run(FTRL(l1=10), torch.zeros(1, 1), [grad_UD])
    assert gone[0].item() == 0


def test_ftrl_l2_widens_the_denominator() -> None:
    rule = FTRL(lr=0.5, beta=1, initial_accumulator=0, l2=4)
    weights, _ = run(rule, torch.zeros(1, 1), [torch.tensor([[3.0]])])
    # n = 9, z = 3: -0.5 * 3 / (3 + 1 + 4 * 0.5)
    assert weights[0].item() == pytest.approx(-0.25)


@pytest.mark.parametrize(
    ("l1", "expected"), [(1.0, [-0.06, -0.064]), (5.0, [0.0, 0.0]), (0.0, [-0.075, -0.08])]
)
def test_group_ftrl_by_hand(l1: float, expected: list[float]) -> None:
    # n = (9, 16), z = (3, 4), |z| = 5: -z * (1 - l1 / 5) / ((sqrt(n) + 1) / 0.1)
    rule = GroupFTRL(lr=0.1, l1=l1)
    weights, state_US = run(rule, torch.zeros(1, 2), [torch.tensor([[3.0, 4.0]])])
    torch.testing.assert_close(weights[0], torch.tensor([expected]))
    torch.testing.assert_close(state_US, torch.tensor([[9.0, 16.0, 3.0, 4.0]]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_group_ftrl_of_one_column_is_ftrl(dtype: torch.dtype) -> None:
    grads = [torch.full((1, 1), g, dtype=dtype) for g in (2.0, -3.0, 0.5)]
    group, _ = run(GroupFTRL(l1=0.3, l2=0.2), torch.ones(1, 1, dtype=dtype), grads)
    plain, _ = run(
        FTRL(beta=1, initial_accumulator=0, l1=0.3, l2=0.2), torch.ones(1, 1, dtype=dtype), grads
    )
    torch.testing.assert_close(torch.cat(group), torch.cat(plain))


@pytest.mark.parametrize("rule", [FTRL(l1=0.1), GroupFTRL(l1=0.1), GroupAdagrad(l2=0.1)])
def test_rules_that_divide_by_the_rate_rest_at_rate_zero(rule: Optimizer) -> None:
    w_UD, state_US = torch.ones(2, 3), rule.init_state(3).expand(2, -1)
    moved_UD, moved_US = rule.step(w_UD, state_US, torch.ones(2, 3), 0.0, RuleContext())
    assert torch.equal(moved_UD, w_UD)
    assert torch.equal(moved_US, state_US)


def test_group_adagrad_without_gradient_or_weight_stays_zero() -> None:
    weights, _ = run(GroupAdagrad(), torch.zeros(1, 2), [torch.zeros(1, 2)])
    assert weights[0].tolist() == [[0.0, 0.0]]


def test_rowwise_adagrad_by_hand() -> None:
    rule = RowWiseAdagrad(lr=1, initial_accumulator=0, eps=0.5)
    grad_UD = torch.tensor([[1.0, 7.0]])
    weights, state_US = run(rule, torch.zeros(1, 2), [grad_UD])
    # mean of 1 and 49 is 25
    torch.testing.assert_close(state_US, torch.tensor([[25.0]]))
    torch.testing.assert_close(weights[0], -grad_UD / 5.5)


@pytest.mark.parametrize("flip", [False, True])
def test_dynamic_decay_by_hand(flip: bool) -> None:
    rule = DynamicWdAdagrad(
        lr=1, initial_accumulator=0.75, weight_decay=0.5, flip=flip, temperature=2
    )
    w_UD, grad_UD = torch.tensor([[3.0, 4.0]]), torch.tensor([[0.5, 0.0]])
    share = 1 / (1 + math.exp(-(0.5 - 5) / 2))
    decay = 0.5 * (1 - share if flip else share)
    weights, state_US = run(rule, w_UD, [grad_UD])
    expected = torch.tensor([[3 - 0.5 - 3 * decay, 4 - 4 * decay]])
    torch.testing.assert_close(weights[0], expected)
    torch.testing.assert_close(state_US, torch.tensor([[1.0, 0.75]]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_static_coupled_decay_is_adagrad(dtype: torch.dtype) -> None:
    grads = list(torch.tensor([[[1.0, -2.0]], [[0.5, 3.0]]], dtype=dtype))
    w_UD = torch.tensor([[1.0, 2.0]], dtype=dtype)
    still, _ = run(DynamicWdAdagrad(weight_decay=0.1, decouple=False, dynamic=False), w_UD, grads)
    plain, _ = run(Adagrad(weight_decay=0.1), w_UD, grads)
    torch.testing.assert_close(still[-1], plain[-1])


def test_static_decoupled_decay_by_hand() -> None:
    rule = DynamicWdAdagrad(lr=0.1, initial_accumulator=3, weight_decay=0.5, dynamic=False)
    weights, _ = run(rule, torch.tensor([[2.0]]), [torch.tensor([[1.0]])])
    # n = 4: 2 - 0.1 * 1 / 2 - 0.1 * 0.5 * 2
    assert weights[0].item() == pytest.approx(1.85)


def test_sign_sgd_by_hand() -> None:
    rule = SignSGD(lr=0.1, weight_decay=0.5)
    weights, _ = run(rule, torch.tensor([[1.0, 1.0, 1.0]]), [torch.tensor([[1e-9, -5.0, 0.0]])])
    torch.testing.assert_close(weights[0], torch.tensor([[0.85, 1.05, 0.95]]))


def test_sign_sgd_is_bounded_by_the_inverse_decay() -> None:
    rule = SignSGD(lr=0.5, weight_decay=0.1)
    weights, _ = run(rule, torch.zeros(1, 1), [torch.tensor([[-1.0]])] * 300)
    assert weights[-1].item() == pytest.approx(10, abs=1e-3)


def test_lamb_trust_ratio_by_hand() -> None:
    # The first direction is sign(g): |u| = sqrt(2), |w| = 5.
    rule = LAMB(lr=0.01, weight_decay=0)
    weights, _ = run(rule, torch.tensor([[3.0, 4.0]]), [torch.tensor([[2.0, -7.0]])])
    move = 0.01 * 5 / math.sqrt(2)
    torch.testing.assert_close(weights[0], torch.tensor([[3 - move, 4 + move]]))


@pytest.mark.parametrize(("w", "g", "expected"), [(0.0, 3.0, -0.01), (2.0, 0.0, 2.0)])
def test_lamb_trusts_fully_when_a_norm_is_zero(w: float, g: float, expected: float) -> None:
    rule = LAMB(lr=0.01, weight_decay=0)
    weights, _ = run(rule, torch.tensor([[w]]), [torch.tensor([[g]])])
    assert weights[0].item() == pytest.approx(expected, abs=1e-6)


def test_nesterov_momentum_by_hand() -> None:
    weights, _ = run(Momentum(nesterov=True), torch.zeros(1, 1), [torch.tensor([[10.0]])] * 2)
    # n = -0.1, then -0.19; w += 1.9 n' - 0.9 n
    assert [w.item() for w in weights] == pytest.approx([-0.19, -0.461])


@pytest.mark.parametrize("rule", [Adam(nesterov=True), Amsgrad(nesterov=True)])
def test_nesterov_adam_by_hand(rule: Optimizer) -> None:
    weights, _ = run(rule, torch.zeros(1, 1), [torch.tensor([[10.0]])])
    # m = 1, v = 1, lr' = 0.01 * 0.1 / 0.1: the step takes 0.1 * 10 + 0.9 * 1
    assert weights[0].item() == pytest.approx(-0.01 * 1.9 / 1.01)


def test_amsgrad_keeps_its_largest_denominator() -> None:
    grads = [torch.tensor([[10.0]]), torch.tensor([[0.0]])]
    _, state_US = run(Amsgrad(), torch.zeros(1, 1), grads)
    _, v, vhat, _, _ = state_US[0].tolist()
    assert v == pytest.approx(0.99)
    assert vhat == pytest.approx(1.0)


def test_beta_powers_multiply_after_the_update() -> None:
    _, state_US = run(Adam(), torch.zeros(1, 1), [torch.ones(1, 1)] * 2)
    assert state_US[0, -2:].tolist() == pytest.approx([0.9**3, 0.99**3])


PEERS = [
    (SGD(lr=0.1, weight_decay=0.2), lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.2)),
    (
        AdamW(lr=0.01, weight_decay=0.1),
        lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    ),
    (
        Adagrad(lr=0.1, initial_accumulator=0.5, weight_decay=0.1, eps=1e-3),
        lambda p: torch.optim.Adagrad(
            p, lr=0.1, initial_accumulator_value=0.5, weight_decay=0.1, eps=1e-3
        ),
    ),
    (
        Adadelta(lr=0.5, rho=0.8, eps=1e-3, weight_decay=0.1),
        lambda p: torch.optim.Adadelta(p, lr=0.5, rho=0.8, eps=1e-3, weight_decay=0.1),
    ),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rule", "peer"), PEERS, ids=[rule.kind for rule, _ in PEERS])
def test_equal_to_torch(rule: Optimizer, peer: object, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    w_UD, *grads = torch.randn(21, 3, 5, generator=generator, dtype=dtype)
    parameter = torch.nn.Parameter(w_UD.clone())
    optimizer = peer([parameter])  # type: ignore[operator]
    for grad_UD in grads:
        parameter.grad = grad_UD.clone()
        optimizer.step()
    weights, _ = run(rule, w_UD, grads)
    torch.testing.assert_close(weights[-1], parameter.detach(), atol=1e-6, rtol=1e-6)


def test_batch_softmax_counts_from_step_zero() -> None:
    weights, _ = run(
        BatchSoftmax(lr=0.1), torch.zeros(1, 1), [torch.ones(1, 1)], ctx=RuleContext(global_step=1)
    )
    assert weights[0].item() == pytest.approx(0.1)


def test_batch_softmax_learns_how_often_an_id_is_seen() -> None:
    rule = BatchSoftmax(lr=0.1)
    frequency = []
    for period in (5, 10):
        w_UD, state_US = torch.zeros(1, 1), rule.init_state(1).expand(1, -1)
        for step in range(0, 1000, period):
            ctx = RuleContext(global_step=step)
            w_UD, state_US = rule.step(w_UD, state_US, torch.ones(1, 1), rule.rate(step), ctx)
        frequency.append(1 / max(w_UD.item(), 1))
    assert frequency == pytest.approx([0.2, 0.1], abs=0.01)
