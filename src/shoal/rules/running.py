"""Rules that keep a running statistic in the weights instead of descending a gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from shoal.errors import ConfigError, InputError
from shoal.rules import checks
from shoal.rules.rule import Coupling, Optimizer, RuleContext, rest_of
from shoal.rules.schedules import Schedule, check_rate

_LOW_BITS = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class MovingAverage(Optimizer):
    """w = momentum * w + (1 - momentum) * g, where g is an observed value. No state, no rate."""

    kind: ClassVar[str] = "moving_average"
    coupling: ClassVar[Coupling] = "element"

    momentum: float = 0.9

    def __post_init__(self) -> None:
        checks.fraction(self, "momentum", self.momentum)

    def state_width(self, dim: int) -> int:
        return 0

    def init_state(self, dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(0, dtype=dtype, device="cpu")

    def step(
        self, w_UD: Tensor, state_US: Tensor, grad_UD: Tensor, lr: float, ctx: RuleContext
    ) -> tuple[Tensor, Tensor]:
        rest = rest_of(self.momentum, w_UD)
        return self.momentum * w_UD + rest * grad_UD, state_US.clone()


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSoftmax(Optimizer):
    """Mean gap between the steps that touch an id, so that 1 / w is how often it is sampled.

    w = (1 - lr) * w + lr * (global_step - last); last = global_step. The gradient's value is
    ignored; the segment has one column (Yi et al. 2019, "Sampling-Bias-Corrected Neural
    Modeling"). State: hi, lo with last = hi * 2^20 + lo, which float32 holds exactly below 2^44.
    """

    kind: ClassVar[str] = "batch_softmax"
    coupling: ClassVar[Coupling] = "element"

    lr: float | Schedule = 0.1

    def __post_init__(self) -> None:
        check_rate(self, "lr", self.lr)

    def check_dim(self, dim: int) -> None:
        """Check that the segment has one column.

        Raises:
            ConfigError: it has not.
        """
        if dim != 1:
            raise ConfigError(
                "dim of a segment with BatchSoftmax",
                got=dim,
                allowed="1",
                remedy="Give the frequency estimate a segment of its own.",
            )

    def state_width(self, dim: int) -> int:
        return 2

    def init_state(self, dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(2, dtype=dtype, device="cpu")

    def step(
        self, w_UD: Tensor, state_US: Tensor, grad_UD: Tensor, lr: float, ctx: RuleContext
    ) -> tuple[Tensor, Tensor]:
        if ctx.global_step < 0:
            raise InputError(
                "global_step of BatchSoftmax",
                got=ctx.global_step,
                allowed="0 or more",
                remedy="Pass the number of optimizer steps done.",
            )
        words_U2 = state_US.to(torch.int64)
        last_U1 = (words_U2[:, :1] << _LOW_BITS) + words_U2[:, 1:]
        gap_U1 = (ctx.global_step - last_U1).to(w_UD.dtype)
        high, low = divmod(ctx.global_step, 1 << _LOW_BITS)
        state_US = state_US.new_tensor([high, low]).expand(w_UD.shape[0], 2).clone()
        return (1 - lr) * w_UD + lr * gap_U1, state_US
