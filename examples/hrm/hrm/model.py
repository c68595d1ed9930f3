"""The reasoning model: two recurrent modules, and halting by learned values.

A slot of the batch works on one example for several optimizer steps. `admit` gives halted slots
their new examples. The trainer then looks up the rows of the current puzzles, and `forward` does
one step. Puzzle rows come from outside, so the model does not depend on tables.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from hrm.carry import Batch, Carry, Outputs
from hrm.layers import CastedEmbedding, CastedLinear, Reasoner, Rotary, truncated_normal
from hrm.model_config import ModelConfig

__all__ = ["ReasoningModel", "exploration"]

_Q_BIAS = -5.0


def exploration(
    config: ModelConfig, *, seed: int, step: int, global_batch: int, first: int, count: int
) -> Tensor:
    """Fewest steps of each slot this time, int32 [count], on the CPU.

    A function of seed and step for all slots of the global batch, of which a rank takes its own:
    so runs do not depend on the number of ranks, and resuming needs no saved generator. Mostly
    0; with `halt_exploration_prob` a whole number in 2..M.
    """
    # Not torch's generator: on the CPU it takes in no more than 32 bits of a seed.
    rng = np.random.default_rng([seed, step])
    explores = rng.random(global_batch) < config.halt_exploration_prob
    most = max(config.halt_max_steps, 2)
    least = rng.integers(2, most + 1, size=global_batch, dtype=np.int32)
    return torch.from_numpy(least * explores)[first : first + count]


class ReasoningModel(nn.Module):
    """HRM, or by its config TRM.

    Args:
        config: sizes and variants.
        seed: of the initial parameters; the same on any machine.
    """

    H_init_D: Tensor
    L_init_D: Tensor

    def __init__(self, config: ModelConfig, *, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        generator = torch.Generator().manual_seed(seed)
        d = config.hidden_size
        self.embed_tokens = CastedEmbedding(config.vocab_size, d, config.dtype, generator)
        self.embed_pos: CastedEmbedding | None = None
        self.rotary: Rotary | None = None
        if config.positions == "learned":
            self.embed_pos = CastedEmbedding(config.total_len, d, config.dtype, generator)
        elif config.mixer == "attention":
            wide = torch.promote_types(config.dtype, torch.float32)
            head_dim, theta = d // config.num_heads, config.rope_theta
            self.rotary = Rotary(head_dim, config.total_len, theta, wide)
        self.L_level = Reasoner(config, config.L_layers, generator)
        shared = config.shared_network
        self.H_level = self.L_level if shared else Reasoner(config, config.H_layers, generator)
        self.lm_head = CastedLinear(d, config.vocab_size, generator=generator)
        self.q_head = CastedLinear(d, 2, bias=True, generator=generator)
        with torch.no_grad():
            self.q_head.weight.zero_()
            assert self.q_head.bias is not None
            self.q_head.bias.fill_(_Q_BIAS)
        for name in ("H_init_D", "L_init_D"):
            self.register_buffer(name, truncated_normal((d,), 1.0, generator).to(config.dtype))

    @property
    def parameter_count(self) -> int:
        """Numbers that the dense optimizer learns."""
        return sum(parameter.numel() for parameter in self.parameters())

    def admit(self, carry: Carry, batch: Batch) -> Carry:
        """Halted slots start the batch's examples; the others continue, and theirs are dropped."""
        halted = carry.halted_B
        row, cell = halted.view(-1, 1), halted.view(-1, 1, 1)
        return Carry(
            torch.where(cell, self.H_init_D, carry.z_H_BTD),
            torch.where(cell, self.L_init_D, carry.z_L_BTD),
            carry.steps_B.masked_fill(halted, 0),
            torch.zeros_like(halted),
            torch.where(row, batch.inputs_BS, carry.inputs_BS),
            torch.where(row, batch.labels_BS, carry.labels_BS),
            torch.where(halted, batch.puzzle_ids_B, carry.puzzle_ids_B),
        )

    def forward(
        self, carry: Carry, rows_BR: Tensor | None, least_steps_B: Tensor | None = None
    ) -> tuple[Carry, Outputs]:
        """One step of all slots.

        Args:
            carry: from `admit`.
            rows_BR: puzzle rows of `carry.puzzle_ids_B`, any float dtype; None if the model
                has none.
            least_steps_B: from `exploration`; None explores nothing. In `eval()` every example
                takes M steps.
        """
        told = self._told(carry.inputs_BS, rows_BR)
        z_H, z_L = self._think(carry.z_H_BTD, carry.z_L_BTD, told)
        logits = self.lm_head(z_H)[:, self.config.prefix :]
        q_halt, q_continue = self._values(z_H)
        steps = carry.steps_B + 1
        z_H, z_L = z_H.detach(), z_L.detach()
        with torch.no_grad():
            last = steps >= self.config.halt_max_steps
            halted, target = last, None
            if self.training and self.config.halt_max_steps > 1:
                halted = last | self._would_halt(q_halt, q_continue)
                if least_steps_B is not None:
                    halted = halted & (steps >= least_steps_B)
                if self.config.bootstrap:
                    target = self._target(z_H, z_L, told, last)
        carry = dataclasses.replace(carry, z_H_BTD=z_H, z_L_BTD=z_L, steps_B=steps, halted_B=halted)
        return carry, Outputs(logits, q_halt, q_continue, target)

    def _would_halt(self, q_halt_B: Tensor, q_continue_B: Tensor) -> Tensor:
        return q_halt_B > (q_continue_B if self.config.bootstrap else 0)

    def _target(self, z_H: Tensor, z_L: Tensor, told: Tensor, last_B: Tensor) -> Tensor:
        """Value of continuing: of halting one step later, or of continuing there if better."""
        next_H, _ = self._think(z_H, z_L, told)
        halt, go_on = self._values(next_H)
        return torch.sigmoid(torch.where(last_B, halt, torch.maximum(halt, go_on)))

    def _values(self, z_H_BTD: Tensor) -> tuple[Tensor, Tensor]:
        q_B2 = self.q_head(z_H_BTD[:, 0]).float()
        return q_B2[:, 0], q_B2[:, 1]

    def _told(self, inputs_BS: Tensor, rows_BR: Tensor | None) -> Tensor:
        """Input of the fast module: the puzzle's row, then the tokens."""
        config = self.config
        x = self.embed_tokens(inputs_BS)
        if config.prefix:
            b, d = inputs_BS.shape[0], config.hidden_size
            if rows_BR is None:
                prefix = x.new_zeros(b, config.prefix, d)
            else:
                missing = config.prefix * d - rows_BR.shape[1]
                row = functional.pad(rows_BR.to(config.dtype), (0, missing))
                prefix = row.view(b, config.prefix, d)
            x = torch.cat([prefix, x], dim=1)
        if self.embed_pos is not None:
            x = (x + self.embed_pos.weight.to(x.dtype)) * math.sqrt(0.5)
        return x * math.sqrt(config.hidden_size)  # type: ignore[no-any-return]

    def _think(self, z_H: Tensor, z_L: Tensor, told: Tensor) -> tuple[Tensor, Tensor]:
        """All cycles; the gradient passes through the config's span of them only."""
        config = self.config
        angles = None if self.rotary is None else self.rotary()
        whole = config.gradient_span == "last_cycle"
        kept = config.L_cycles if whole else 1
        with torch.no_grad():
            for cycle in range(config.H_cycles):
                final = cycle == config.H_cycles - 1
                for _ in range(config.L_cycles - (kept if final else 0)):
                    z_L = self.L_level(z_L, z_H + told, angles)
                if not final:
                    z_H = self.H_level(z_H, z_L, angles)
        for _ in range(kept):
            z_L = self.L_level(z_L, z_H + told, angles)
        return self.H_level(z_H, z_L, angles), z_L
