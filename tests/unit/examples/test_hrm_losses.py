"""Losses and figures of examples/hrm against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hrm.carry import IGNORE, Carry, Outputs
from hrm.losses import act_loss, softmax_cross_entropy, stablemax_cross_entropy


def plain_stablemax(logits: list[float], label: int) -> float:
    scores = [x + 1 if x >= 0 else 1 / (1 - x) for x in logits]
    return -math.log(scores[label] / sum(scores))


def test_stablemax_is_the_formula_in_double() -> None:
    rows = [[0.0, 1.0, -1.0], [30.0, -30.0, 0.5], [-2.0, -3.0, -4.0]]
    logits = torch.tensor([rows], dtype=torch.bfloat16)
    labels = torch.tensor([[2, 1, 0]])
    loss = stablemax_cross_entropy(logits, labels)
    want = [plain_stablemax(row, label) for row, label in zip(rows, [2, 1, 0], strict=True)]
    assert loss.dtype == torch.float64
    torch.testing.assert_close(loss, torch.tensor([want], dtype=torch.float64), rtol=1e-12, atol=0)


def test_stablemax_has_a_gradient_everywhere() -> None:
    logits = torch.tensor([[[1.0, 0.0, -1.0, -1e6, 1e6]]], dtype=torch.float64, requires_grad=True)
    stablemax_cross_entropy(logits, torch.tensor([[1]])).sum().backward()
    assert logits.grad is not None and bool(logits.grad.isfinite().all())
    few = torch.tensor([[[0.3, -0.7, 1.2]]], dtype=torch.float64, requires_grad=True)
    label = torch.tensor([[1]])
    assert torch.autograd.gradcheck(lambda x: stablemax_cross_entropy(x, label), few)


@pytest.mark.parametrize("loss", [stablemax_cross_entropy, softmax_cross_entropy])
def test_ignored_labels_lose_nothing(loss: object) -> None:
    logits = torch.randn(2, 3, 4, requires_grad=True)
    labels = torch.tensor([[1, IGNORE, 3], [IGNORE] * 3])
    found: Tensor = loss(logits, labels)  # type: ignore[operator]
    assert (found != 0).tolist() == [[True, False, True], [False] * 3]
    found.sum().backward()
    assert logits.grad is not None
    assert logits.grad.abs().sum(-1).bool().tolist() == [[True, False, True], [False] * 3]


def test_softmax_is_torchs() -> None:
    logits = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([[1, IGNORE, 3], [0, 2, 2]])
    want = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    torch.testing.assert_close(softmax_cross_entropy(logits, labels), want)


def worked_example() -> tuple[Carry, Outputs]:
    """Four examples of three cells: exact, half right, not halted, without labels."""
    inputs = torch.tensor([[1, 2, 1], [1, 2, 3], [1, 1, 1], [0, 0, 0]])
    labels = torch.tensor([[3, 2, 2], [3, 2, IGNORE], [2, 2, 2], [IGNORE] * 3])
    answers = torch.tensor([[3, 2, 2], [2, 2, 3], [2, 2, 2], [0, 0, 0]])
    logits = torch.nn.functional.one_hot(answers, 4).float() * 3
    none = torch.zeros(4, 3, 2)
    carry = Carry(
        none,
        none,
        torch.tensor([3, 5, 1, 2]),
        torch.tensor([True, True, False, True]),
        inputs,
        labels,
        torch.zeros(4, dtype=torch.int64),
    )
    outputs = Outputs(
        logits,
        torch.tensor([2.0, 1.0, -1.0, 0.0]),
        torch.tensor([0.0, 1.0, 0.0, 0.0]),
        torch.tensor([0.5, 0.25, 0.5, 0.5]),
    )
    return carry, outputs


def bce(logit: float, target: float) -> float:
    p = 1 / (1 + math.exp(-logit))
    return -(target * math.log(p) + (1 - target) * math.log(1 - p))


def test_figures_count_examples_that_halted_and_have_labels() -> None:
    carry, outputs = worked_example()
    total, figures = act_loss(carry, outputs)
    got = {name: float(value) for name, value in figures.items()}
    right, wrong = plain_stablemax([3.0, 0, 0, 0], 0), plain_stablemax([3.0, 0, 0, 0], 1)
    want = {
        "count": 2,
        "accuracy": 1.5,
        "exact_accuracy": 1,
        "blank_accuracy": 1,  # both blanks of the first, not the one of the second
        "q_halt_accuracy": 1,
        "steps": 8,
        "lm_loss": right + (right + wrong) / 2 + right,
        "q_halt_loss": bce(2, 1) + bce(1, 0) + bce(-1, 1),
        "q_continue_loss": 2 * bce(0, 0.5) + bce(1, 0.25),
    }
    assert got == pytest.approx(want)
    # The loss has one without labels, too, as the original's: nothing is wrong there, so exact.
    halves = want["q_halt_loss"] + want["q_continue_loss"] + bce(0, 1) + bce(0, 0.5)
    assert float(total) == pytest.approx(want["lm_loss"] + halves / 2)


def test_without_a_bootstrap_nothing_is_asked_of_going_on() -> None:
    carry, outputs = worked_example()
    bare = Outputs(outputs.logits_BSV, outputs.q_halt_B, outputs.q_continue_B, None)
    total, figures = act_loss(carry, bare, "softmax_cross_entropy")
    assert "q_continue_loss" not in figures
    halves = float(figures["q_halt_loss"]) + bce(0, 1)
    assert float(total) == pytest.approx(float(figures["lm_loss"]) + halves / 2)
