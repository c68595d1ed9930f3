"""Rules that scale each step by the gradient's past size, without a first moment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from shoal.errors import ConfigError
from shoal.rules import checks
from shoal.rules.rule import Coupling, Optimizer, RuleContext, rest_of
from shoal.rules.schedules import Schedule, check_rate


@dataclass(frozen=True, kw_only=True, slots=True)
class Adagrad(Optimizer):
    """Adagrad. State: n[D], from `initial_accumulator`.

    g' = g + weight_decay * w; n += g'^2; w -= lr * g' / (sqrt(n) + eps).
    """

    kind: ClassVar[str] = "adagrad"
    coupling: ClassVar[Coupling] = "element"

    lr: float | Schedule = 0.001
    initial_accumulator: float = 0.1
    weight_decay: float = 0.0
    eps: float = 0.0

    def __post_init__(self) -> None:
        _check_adagrad(self, self.lr, self.initial_accumulator, self.weight_decay, self.eps)

    def state_width(self, dim: int) -> int:
        return dim

    def init_state(self, dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full((dim,), self.initial_accumulator, dtype=dtype, device="cpu")

    def step(
        self, w_UD: Tensor, state_US: Tensor, grad_UD: Tensor, lr: float, ctx: RuleContext
    ) -> tuple[Tensor, Tensor]:
        grad_UD = grad_UD + self.weight_decay * w_UD
        squares_UD = state_US + grad_UD * grad_UD
        return w_UD - lr * grad_UD / (squares_UD.sqrt() + self.eps), squares_UD


@dataclass(frozen=True, kw_only=True, slots=True)
class RowWiseAdagrad(Optimizer):
    """Adagrad with one accumulator per segment. State: n[1], from `initial_accumulator`.

    g' = g + weight_decay * w; n += mean(g'^2) over the segment; w -= lr * g' / (sqrt(n) + eps).
    """

    kind: ClassVar[str] = "rowwise_adagrad"
    coupling: ClassVar[Coupling] = "segment"

    lr: float | Schedule = 0.01
    initial_accumulator: float = 0.1
    weight_decay: float = 0.0
    eps: float = 0.0

    def __post_init__(self) -> None:
        _check_adagrad(self, self.lr, self.initial_accumulator, self.weight_decay, self.eps)

    def state_width(self, dim: int) -> int:
        return 1

    def init_state(self, dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full((1,), self.initial_accumulator, dtype=dtype, device="cpu")

    def step(
        self, w_UD: Tensor, state_US: Tensor, grad_UD: Tensor, lr: float, ctx: RuleContext
    ) -> tuple[Tensor, Tensor]:
        grad_UD = grad_UD + self.weight_decay * w_UD
        squares_U1 = state_US + (grad_UD * grad_UD).mean(dim=1, keepdim=True)
        return w_UD - lr * grad_UD / (squares_U1.sqrt() + self.eps), squares_U1


@dataclass(frozen=True, kw_only=True, slots=True)
class DynamicWdAdagrad(Optimizer):
    """Adagrad with a weight decay that may follow the row. State: n[D].

    decay = weight_decay; with `dynamic`, times sigmoid((|g| - |w|) / temperature), norms over the
    segment, or with `flip` times one minus that. Coupled: g += decay * w, then Adagrad.
    With `decouple`: n += g^2; w -= lr * g / sqrt(n) + lr * decay * w.
    """

    kind: ClassVar[str] = "dynamic_wd_adagrad"
    coupling: ClassVar[Coupling] = "segment"

    lr: float | Schedule = 0.001
    initial_accumulator: float = 0.1
    weight_decay: float = 0.0
    decouple: bool = True
    dynamic: bool = True
    flip: bool = True
    temperature: float = 1.0

    def __post_init__(self) -> None:
        _check_adagrad(self, self.lr, self.initial_accumulator, self.weight_decay, 0.0)
        checks.positive(self, "temperature", self.temperature)

    def state_width(self, dim: int) -> int:
        return dim

    def init_state(self, dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full((dim,), self.initial_accumulator, dtype=dtype, device="cpu")

    def step(
        self, w_UD: Tensor, state_US: Tensor, grad_UD: Tensor, lr: float, ctx: RuleContext
    ) -> tuple[Tensor, Tensor]:
        pull_UD = self._decay_U1(w_UD, grad_UD) * w_UD
        if not self.decouple:
            grad_UD = grad_UD + pull_UD
        squares_UD = state_US + grad_UD * grad_UD
        move_UD = lr * grad_UD / squares_UD.sqrt()
        if self.decouple:
            move_UD = move_UD + lr * pull_UD
        return w_UD - move_UD, squares_UD

    def _decay_U1(self, w_UD: Tensor, grad_UD: Tensor) -> Tensor:
        decay_U1 = w_UD.new_full((w_UD.shape[0], 1), self.weight_decay)
        if not self.dynamic:
            return decay_U1
        lead_U1 = _norm_U1(grad_UD) - _norm_U1(w_UD)
        share_U1 = torch.sigmoid((-lead_U1 if self.flip else lead_U1) / self.temperature)
        return decay_U1 * share_U1


@dataclass(frozen=True, kw_only=True, slots=True)
class Adadelta(Optimizer):
    """Adadelta. State: acc[D], au[D], from 0.

    g' = g + weight_decay * w; acc = rho * acc + (1 - rho) * g'^2;
    u = g' * sqrt(au + eps) / sqrt(acc + eps); w -= lr * u; au = rho * au + (1 - rho) * u^2.
    """

    kind: ClassVar[str] = "adadelta"
    coupling: ClassVar[Coupling] = "element"

    lr: float | Schedule = 0.01
    rho: float = 0.9
    eps: float = 0.01
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        check_rate(self, "lr", self.lr)
        checks.fraction(self, "rho", self.rho)
        checks.positive(self, "eps", self.eps)
        checks.at_least(self, "weight_decay", self.weight_decay, 0)

    def state_width(self, dim: int) -> int:
        return 2 * dim

    def init_state(self, dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(2 * dim, dtype=dtype, device="cpu")

    def step(
        self, w_UD: Tensor, state_US: Tensor, grad_UD: Tensor, lr: float, ctx: RuleContext
    ) -> tuple[Tensor, Tensor]:
        squares_UD, updates_UD = state_US.chunk(2, dim=1)
        grad_UD = grad_UD + self.weight_decay * w_UD
        rest = rest_of(self.rho, w_UD)
        squares_UD = self.rho * squares_UD + rest * grad_UD * grad_UD
        update_UD = grad_UD * (updates_UD + self.eps).sqrt() / (squares_UD + self.eps).sqrt()
        updates_UD = self.rho * updates_UD + rest * update_UD * update_UD
        return w_UD - lr * update_UD, torch.cat([squares_UD, updates_UD], dim=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class RMSprop(Optimizer):
    """RMSprop with 1 for epsilon, as Monolith has it. State: n[D], from 0.

    g' = g + weight_decay * w; n = momentum * n + (1 - momentum) * g'^2, or with
    `accumulate="sum"` (Monolith's RMSpropV2) n = momentum * n + g'^2;
    w -= lr * g' / (sqrt(n) + 1).
    """

    kind: ClassVar[str] = "rmsprop"
    coupling: ClassVar[Coupling] = "element"

    lr: float | Schedule = 0.01
    momentum: float = 0.9
    weight_decay: float = 0.0
    accumulate: Literal["mean", "sum"] = "mean"

    def __post_init__(self) -> None:
        check_rate(self, "lr", self.lr)
        checks.fraction(self, "momentum", self.momentum)
        checks.at_least(self, "weight_decay", self.weight_decay, 0)
        checks.choice(self, "accumulate", self.accumulate, ("mean", "sum"))

    def core_params(self) -> dict[str, float]:
        """`momentum`, `weight_decay`, and `sum`: 1 for accumulate="sum", else 0."""
        return {
            "momentum": float(self.momentum),
            "weight_decay": float(self.weight_decay),
            "sum": float(self.accumulate == "sum"),
        }

    def state_width(self, dim: int) -> int:
        return dim

    def init_state(self, dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(dim, dtype=dtype, device="cpu")

    def step(
        self, w_UD: Tensor, state_US: Tensor, grad_UD: Tensor, lr: float, ctx: RuleContext
    ) -> tuple[Tensor, Tensor]:
        grad_UD = grad_UD + self.weight_decay * w_UD
        fresh = 1.0 if self.accumulate == "sum" else rest_of(self.momentum, w_UD)
        squares_UD = self.momentum * state_US + fresh * grad_UD * grad_UD
        return w_UD - lr * grad_UD / (squares_UD.sqrt() + 1), squares_UD


def _norm_U1(values_UD: Tensor) -> Tensor:
    return (values_UD * values_UD).sum(dim=1, keepdim=True).sqrt()


def _check_adagrad(
    owner: object, lr: float | Schedule, initial: float, weight_decay: float, eps: float
) -> None:
    check_rate(owner, "lr", lr)
    checks.at_least(owner, "initial_accumulator", initial, 0)
    checks.at_least(owner, "weight_decay", weight_decay, 0)
    checks.at_least(owner, "eps", eps, 0)
    if initial == 0 and eps == 0:
        raise ConfigError(
            f"initial_accumulator of {type(owner).__name__}",
            got="0 with nothing added to the root (eps 0)",
            allowed="one of them above 0",
            remedy="A first gradient of 0 would divide 0 by 0; raise initial_accumulator.",
        )
