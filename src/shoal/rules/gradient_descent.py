"""Rules that follow the gradient or its sign: SGD, Momentum, SignSGD, and delay compensation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from shoal.errors import ConfigError
from shoal.rules import checks
from shoal.rules.rule import Coupling, Optimizer, RuleContext
from shoal.rules.schedules import Schedule, check_rate


@dataclass(frozen=True, kw_only=True, slots=True)
class SGD(Optimizer):
    """w -= lr * g', g' = g + weight_decay * w. No state."""

    kind: ClassVar[str] = "sgd"
    coupling: ClassVar[Coupling] = "element"

    lr: float | Schedule = 0.01
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        check_rate(self, "lr", self.lr)
        checks.at_least(self, "weight_decay", self.weight_decay, 0)

    def state_width(self, dim: int) -> int:
        return 0

    def init_state(self, dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(0, dtype=dtype, device="cpu")

    def step(
        self, w_UD: Tensor, state_US: Tensor, grad_UD: Tensor, lr: float, ctx: RuleContext
    ) -> tuple[Tensor, Tensor]:
        return w_UD - lr * (grad_UD + self.weight_decay * w_UD), state_US.clone()


@dataclass(frozen=True, kw_only=True, slots=True)
class Momentum(Optimizer):
    """Momentum with the rate inside the velocity. State: n[D].

    g' = g + weight_decay * w; n' = momentum * n - lr * g'; w += n', or with `nesterov`
    w += (1 + momentum) * n' - momentum * n.
    """

    kind: ClassVar[str] = "momentum"
    coupling: ClassVar[Coupling] = "element"

    lr: float | Schedule = 0.01
    momentum: float = 0.9
    weight_decay: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        check_rate(self, "lr", self.lr)
        checks.fraction(self, "momentum", self.momentum)
        checks.at_least(self, "weight_decay", self.weight_decay, 0)

    def state_width(self, dim: int) -> int:
        return dim

    def init_state(self, dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(dim, dtype=dtype, device="cpu")

    def step(
        self, w_UD: Tensor, state_US: Tensor, grad_UD: Tensor, lr: float, ctx: RuleContext
    ) -> tuple[Tensor, Tensor]:
        grad_UD = grad_UD + self.weight_decay * w_UD
        velocity_UD = self.momentum * state_US - lr * grad_UD
        if self.nesterov:
            ahead_UD = (1 + self.momentum) * velocity_UD - self.momentum * state_US
            return w_UD + ahead_UD, velocity_UD
        return w_UD + velocity_UD, velocity_UD


@dataclass(frozen=True, kw_only=True, slots=True)
class SignSGD(Optimizer):
    """w = w * (1 - lr * weight_decay) - lr * sign(g), sign(0) = 0. No state.

    The sparse rule of HRM's per-puzzle table; decay is decoupled and only touched rows decay.
    """

    kind: ClassVar[str] = "sign_sgd"
    coupling: ClassVar[Coupling] = "element"

    lr: float | Schedule = 0.01
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        check_rate(self, "lr", self.lr)
        checks.at_least(self, "weight_decay", self.weight_decay, 0)

    def state_width(self, dim: int) -> int:
        return 0

    def init_state(self, dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(0, dtype=dtype, device="cpu")

    def step(
        self, w_UD: Tensor, state_US: Tensor, grad_UD: Tensor, lr: float, ctx: RuleContext
    ) -> tuple[Tensor, Tensor]:
        return w_UD * (1 - lr * self.weight_decay) - lr * torch.sign(grad_UD), state_US.clone()


@dataclass(frozen=True, kw_only=True, slots=True)
class DelayCompensated(Optimizer):
    """Another rule, fed a gradient corrected for staleness. State, rate and coupling: inner's.

    g' = g + strength * g^2 * (w - seen), where w is the row as it is now and `seen` what the
    gradient was computed at (Zheng et al. 2017, "Asynchronous SGD with Delay Compensation").
    Without `ctx.seen_UD` the gradient counts as fresh and inner gets it as it is.
    `core_params()` gives `strength` alone; inner's numbers are `inner.core_params()`.
    """

    kind: ClassVar[str] = "delay_compensated"

    inner: Optimizer
    strength: float = 0.1

    def __post_init__(self) -> None:
        if not isinstance(self.inner, Optimizer) or isinstance(self.inner, DelayCompensated):
            raise ConfigError(
                "inner of DelayCompensated",
                got=type(self.inner).__name__,
                allowed="any rule but DelayCompensated",
                remedy="Wrap a plain rule once.",
            )
        checks.at_least(self, "strength", self.strength, 0)

    @property
    def coupling(self) -> Coupling:
        return self.inner.coupling

    @property
    def lr(self) -> float | Schedule:
        """The inner rule's rate."""
        rate: float | Schedule = getattr(self.inner, "lr", 1.0)
        return rate

    def state_width(self, dim: int) -> int:
        return self.inner.state_width(dim)

    def check_dim(self, dim: int) -> None:
        self.inner.check_dim(dim)

    def init_state(self, dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.inner.init_state(dim, dtype)

    def step(
        self, w_UD: Tensor, state_US: Tensor, grad_UD: Tensor, lr: float, ctx: RuleContext
    ) -> tuple[Tensor, Tensor]:
        if ctx.seen_UD is not None:
            grad_UD = grad_UD + self.strength * grad_UD * grad_UD * (w_UD - ctx.seen_UD)
        return self.inner.step(w_UD, state_US, grad_UD, lr, ctx)
