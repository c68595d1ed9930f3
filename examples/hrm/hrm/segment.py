"""One reasoning step from carry to loss, of tensors alone: so it can be a CUDA graph."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hrm.carry import Batch, Carry
from hrm.losses import LossKind, act_loss
from hrm.model import ReasoningModel

__all__ = ["Found", "Segment"]

Found = tuple[Tensor, tuple[Tensor, ...], dict[str, Tensor], tuple[Tensor, ...]]
"""Loss; the carry's states, steps and halted slots; sums of figures; logits and both values."""


class Segment(nn.Module):
    """The model with its loss; the rows of the puzzles come from outside.

    Args:
        model: called with the carry.
        loss: of tokens.
        compiled: run both through `torch.compile`, as one piece.
    """

    def __init__(self, model: ReasoningModel, loss: LossKind, *, compiled: bool = False) -> None:
        super().__init__()
        self.model, self.loss = model, loss
        run: Callable[..., Found] = self._step
        self._run = torch.compile(run, dynamic=False) if compiled else run

    def forward(self, *given: Tensor | None) -> Found:
        """One step.

        Args:
            given: the tensors of a `Carry` from `admit`, in its order; `least_steps_B`, which may
                be None; and `rows_BR` if the model has rows.
        """
        return self._run(*given)

    def _step(self, *given: Any) -> Found:
        carry, (least_B, *rows) = Carry(*given[:7]), given[7:]
        carry, outputs = self.model(carry, rows[0] if rows else None, least_B)
        loss, sums = act_loss(carry, outputs, self.loss)
        states = (carry.z_H_BTD, carry.z_L_BTD, carry.steps_B, carry.halted_B)
        return loss, states, sums, (outputs.logits_BSV, outputs.q_halt_B, outputs.q_continue_B)

    def record(self, slots: int, *, row_grads: bool) -> None:
        """Let training steps replay CUDA graphs: one of forward, one of backward.

        Call it before other threads use the device, and before parameters get hooks. Parameters
        must keep their memory; results are overwritten by the next step.

        Args:
            slots: examples of every step, B.
            row_grads: gradients of rows are wanted.
        """
        config, device = self.model.config, self.model.H_init_D.device
        tokens_BS = torch.zeros((slots, config.seq_len), dtype=torch.int32, device=device)
        ids_B = torch.zeros(slots, dtype=torch.int64, device=device)
        batch = Batch(tokens_BS, tokens_BS.clone(), ids_B)
        carry = self.model.admit(Carry.empty(config, batch), batch)
        given = [*carry.state_dict().values(), torch.zeros_like(carry.steps_B)]
        if config.puzzle_dim:
            given.append(
                torch.zeros(slots, config.puzzle_dim, device=device, requires_grad=row_grads)
            )
        with warnings.catch_warnings():
            # torch still holds the graph of its warm-up, of another stream, while it records.
            # Nothing accumulates there: gradients are returned.
            warnings.filterwarnings("ignore", "The AccumulateGrad node's stream")
            torch.cuda.make_graphed_callables(self, tuple(given))
