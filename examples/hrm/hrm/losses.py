"""Losses and figures of one step: tokens, and the values that decide on halting."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from hrm.carry import IGNORE, Carry, Outputs

__all__ = ["LossKind", "act_loss", "softmax_cross_entropy", "stablemax_cross_entropy"]

LossKind = Literal["stablemax_cross_entropy", "softmax_cross_entropy"]


def stablemax_cross_entropy(logits_BSV: Tensor, labels_BS: Tensor) -> Tensor:
    """-log(s(x_label) / sum s(x)), s(x) = x + 1 for x >= 0, else 1 / (1 - x); 0 where ignored.

    Worked out in float64, and float64 [B, S] comes back.
    """
    x = logits_BSV.double()
    # Both sides of `where` are finite, or their gradients would be NaN.
    low = x.clamp(max=0)
    scores = torch.where(x >= 0, x + 1, 1 / (1 - low))
    log_probabilities = (scores / scores.sum(-1, keepdim=True)).log()
    return _picked(log_probabilities, labels_BS)


def softmax_cross_entropy(logits_BSV: Tensor, labels_BS: Tensor) -> Tensor:
    """The usual cross entropy, in float32; float32 [B, S], 0 where ignored."""
    return _picked(logits_BSV.float().log_softmax(-1), labels_BS)


def _picked(log_probabilities_BSV: Tensor, labels_BS: Tensor) -> Tensor:
    asked = labels_BS != IGNORE
    index = labels_BS.masked_fill(~asked, 0).long().unsqueeze(-1)
    loss = -log_probabilities_BSV.gather(-1, index).squeeze(-1)
    return loss.masked_fill(~asked, 0)


_LOSSES = {
    "stablemax_cross_entropy": stablemax_cross_entropy,
    "softmax_cross_entropy": softmax_cross_entropy,
}


def act_loss(
    carry: Carry, outputs: Outputs, kind: LossKind = "stablemax_cross_entropy"
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of a step, summed over the batch, and sums of its figures.

    loss = tokens' mean cross entropy + half of both values' binary cross entropies. Figures are
    sums over examples that have labels; but for the losses, of those that have just halted.
    Divide them by "count": "accuracy" of cells, "exact_accuracy" of whole answers,
    "q_halt_accuracy" of the halting value, "steps" taken, and "blank_accuracy" of the cells whose
    answer is not what the input shows (in Sudoku, the blanks; an example without such cells is
    right).
    """
    labels, asked = carry.labels_BS, carry.labels_BS != IGNORE
    with torch.no_grad():
        right = (outputs.logits_BSV.argmax(-1) == labels) & asked
        cells_B = asked.sum(-1)
        exact_B = right.sum(-1) == cells_B
    divisor_B = cells_B.clamp(min=1)
    lm_B = (_LOSSES[kind](outputs.logits_BSV, labels) / divisor_B.unsqueeze(-1)).sum(-1)
    q_halt_B = _value_loss(outputs.q_halt_B, exact_B.to(outputs.q_halt_B.dtype))
    losses_B = {"lm_loss": lm_B, "q_halt_loss": q_halt_B}
    total = lm_B.sum() + q_halt_B.sum() / 2
    if outputs.target_continue_B is not None:
        go_on_B = _value_loss(outputs.q_continue_B, outputs.target_continue_B)
        losses_B["q_continue_loss"] = go_on_B
        total = total + go_on_B.sum() / 2
    with torch.no_grad():
        asked_B = cells_B > 0  # the others only fill a batch
        counted_B = carry.halted_B & asked_B
        blank = asked & (carry.inputs_BS != labels)
        blanks_B = blank.sum(-1)
        of_blanks_B = ((right & blank).sum(-1) / blanks_B.clamp(min=1)).masked_fill(
            blanks_B == 0, 1
        )
        figures_B = {
            "count": torch.ones_like(cells_B),
            "accuracy": right.sum(-1) / divisor_B,
            "exact_accuracy": exact_B,
            "blank_accuracy": of_blanks_B,
            "q_halt_accuracy": (outputs.q_halt_B >= 0) == exact_B,
            "steps": carry.steps_B,
        }
        sums = {name: _sum_where(counted_B, value_B) for name, value_B in figures_B.items()}
        sums |= {name: loss_B.masked_fill(~asked_B, 0).sum() for name, loss_B in losses_B.items()}
    return total, sums


def _value_loss(logits_B: Tensor, target_B: Tensor) -> Tensor:
    return functional.binary_cross_entropy_with_logits(logits_B, target_B, reduction="none")


def _sum_where(counted_B: Tensor, value_B: Tensor) -> Tensor:
    return value_B.float().masked_fill(~counted_B, 0).sum()
