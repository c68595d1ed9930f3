"""What a reasoning model is made of, as one frozen value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from shoal.errors import ConfigError

__all__ = ["GradientSpan", "Mixer", "ModelConfig", "Positions"]

Positions = Literal["rope", "learned"]
Mixer = Literal["attention", "mlp"]
GradientSpan = Literal["last_calls", "last_cycle"]

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}
_COUNTS = (
    "vocab_size",
    "seq_len",
    "hidden_size",
    "num_heads",
    "gated_multiple",
    "H_cycles",
    "L_cycles",
    "L_layers",
    "halt_max_steps",
)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes and variants; the defaults are HRM's.

    Args:
        vocab_size: tokens, pad included.
        seq_len: tokens of one example, S.
        hidden_size: width D of a token's state.
        num_heads: attention heads; `hidden_size` is a multiple.
        expansion: width of the gated layer over `hidden_size`, before two thirds of it are taken
            and rounded up to a multiple of `gated_multiple`.
        H_layers, L_layers: blocks of the slow and the fast module.
        H_cycles, L_cycles: calls of the slow module, and of the fast one for each of them.
        puzzle_dim: width of a puzzle's row; 0 for none.
        puzzle_tokens: prefix tokens the row fills, padded with zeros; None: as few as hold it.
        positions: rotary angles, or a learned vector per position.
        mixer: how positions see each other; "mlp" mixes a fixed number of them (TRM).
        halt_max_steps: most steps of an example, M.
        halt_exploration_prob: how often an example must take a random number of steps.
        bootstrap: learn the value of continuing from a second forward of the next state (HRM).
            False halts if q_halt is positive and omits that forward (TRM).
        shared_network: one module plays both roles, with `L_layers` blocks (TRM).
        gradient_span: what the gradient passes through: the last call of each module (HRM), or
            the whole last cycle (TRM).
        forward_dtype: "bfloat16", "float32" or "float64"; parameters stay float32.

    Raises:
        ConfigError: sizes that do not fit each other.
    """

    vocab_size: int
    seq_len: int
    hidden_size: int = 512
    num_heads: int = 8
    expansion: float = 4.0
    gated_multiple: int = 256
    H_layers: int = 4
    L_layers: int = 4
    H_cycles: int = 2
    L_cycles: int = 2
    puzzle_dim: int = 512
    puzzle_tokens: int | None = None
    positions: Positions = "rope"
    rope_theta: float = 10000.0
    mixer: Mixer = "attention"
    norm_eps: float = 1e-5
    halt_max_steps: int = 16
    halt_exploration_prob: float = 0.1
    bootstrap: bool = True
    shared_network: bool = False
    gradient_span: GradientSpan = "last_calls"
    forward_dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        counts = (
            "vocab_size seq_len hidden_size num_heads H_cycles L_cycles L_layers halt_max_steps"
        )
        for name in [*counts.split(), *(() if self.shared_network else ("H_layers",))]:
            if getattr(self, name) < 1:
                _refuse(name, getattr(self, name), "at least 1", "Give a whole number.")
        if self.hidden_size % (2 * self.num_heads):
            got = f"{self.hidden_size} for {self.num_heads} heads"
            _refuse("hidden_size", got, "a multiple of 2 x num_heads", "Change one of the two.")
        if self.puzzle_dim < 0 or self.prefix * self.hidden_size < self.puzzle_dim:
            got = f"{self.puzzle_dim} for {self.prefix} tokens of {self.hidden_size}"
            _refuse("puzzle_dim", got, "0 or what fits puzzle_tokens", "Leave out puzzle_tokens.")
        if not 0 <= self.halt_exploration_prob <= 1:
            chance = self.halt_exploration_prob
            _refuse("halt_exploration_prob", chance, "0 to 1", "It is a probability.")
        allowed: dict[str, tuple[str, ...]] = {
            "positions": get_args(Positions),
            "mixer": get_args(Mixer),
            "gradient_span": get_args(GradientSpan),
            "forward_dtype": tuple(_DTYPES),
        }
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                _refuse(name, getattr(self, name), ", ".join(values), "Name one of them.")

    @property
    def prefix(self) -> int:
        """Tokens in front of the sequence that hold the puzzle's row, P."""
        if self.puzzle_tokens is not None:
            return self.puzzle_tokens
        return -(-self.puzzle_dim // self.hidden_size)

    @property
    def total_len(self) -> int:
        """Tokens the blocks see, P + S."""
        return self.prefix + self.seq_len

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of activations."""
        return _DTYPES[self.forward_dtype]


def _refuse(name: str, got: Any, allowed: str, remedy: str) -> None:
    raise ConfigError(f"{name} of the model", got=got, allowed=allowed, remedy=remedy)
