"""What an example takes along from step to step, and what a step gives."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, TypeVar

import torch
from torch import Tensor

from hrm.model_config import ModelConfig

__all__ = ["IGNORE", "Batch", "Carry", "Outputs"]

IGNORE = -100
"""Label of a cell that counts for nothing."""

T = TypeVar("T", bound="_Tensors")


class _Tensors:
    """Frozen tensors that move and are saved together."""

    def to(self: T, device: torch.device | str, *, non_blocking: bool = False) -> T:
        """The same on a device."""
        moved: dict[str, Any] = {
            field.name: getattr(self, field.name).to(device, non_blocking=non_blocking)
            for field in fields(self)  # type: ignore[arg-type]
        }
        return type(self)(**moved)


@dataclass(frozen=True, eq=False)
class Batch(_Tensors):
    """Examples: tokens in, tokens out, and their puzzles.

    Args:
        inputs_BS: int32 tokens.
        labels_BS: int32 tokens, `IGNORE` for positions without a question.
        puzzle_ids_B: int64; 0 is no puzzle if puzzles have their own rows.
    """

    inputs_BS: Tensor
    labels_BS: Tensor
    puzzle_ids_B: Tensor

    @property
    def size(self) -> int:
        """Examples, B."""
        return int(self.inputs_BS.shape[0])


@dataclass(frozen=True, eq=False)
class Carry(_Tensors):
    """State of B slots, each at work on one example until it halts.

    Args:
        z_H_BTD, z_L_BTD: states of the two modules, over P + S tokens.
        steps_B: int32 steps done.
        halted_B: bool; the slot takes a new example at the next step.
        inputs_BS, labels_BS, puzzle_ids_B: the examples at work.
    """

    z_H_BTD: Tensor
    z_L_BTD: Tensor
    steps_B: Tensor
    halted_B: Tensor
    inputs_BS: Tensor
    labels_BS: Tensor
    puzzle_ids_B: Tensor

    @classmethod
    def empty(cls, config: ModelConfig, batch: Batch) -> Carry:
        """Slots that have all halted, as many as the batch has examples, on its device."""
        device = batch.inputs_BS.device
        shape = (batch.size, config.total_len, config.hidden_size)
        return cls(
            torch.zeros(shape, dtype=config.dtype, device=device),
            torch.zeros(shape, dtype=config.dtype, device=device),
            torch.zeros(batch.size, dtype=torch.int32, device=device),
            torch.ones(batch.size, dtype=torch.bool, device=device),
            torch.zeros_like(batch.inputs_BS),
            torch.zeros_like(batch.labels_BS),
            torch.zeros_like(batch.puzzle_ids_B),
        )

    def state_dict(self) -> dict[str, Tensor]:
        """Its tensors by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_state(cls, state: dict[str, Tensor]) -> Carry:
        """What `state_dict` was called on."""
        return cls(**state)


@dataclass(frozen=True, eq=False)
class Outputs:
    """The outputs of one step for the current examples.

    Args:
        logits_BSV: of tokens, in the forward dtype.
        q_halt_B, q_continue_B: float32 logits: that the answer is right, that continuing helps.
        target_continue_B: target of `q_continue_B`, in [0, 1]; None without a bootstrap.
    """

    logits_BSV: Tensor
    q_halt_B: Tensor
    q_continue_B: Tensor
    target_continue_B: Tensor | None
