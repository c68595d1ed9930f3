"""Rules with a first and a second moment. Each row counts its own steps by its beta powers.

The powers start at beta1 and beta2 and multiply after the update, so a row first touched late in
a run is corrected like one touched in the first step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from shoal.rules import checks
from shoal.rules.rule import Coupling, Optimizer, RuleContext, rest_of
from shoal.rules.schedules import Schedule, check_rate


@dataclass(frozen=True, kw_only=True, slots=True)
class Adam(Optimizer):
    """Adam with Monolith's defaults. State: m[D], v[D], p1, p2.

    g' = g + weight_decay * w; lr' = lr * sqrt(1 - p2) / (1 - p1); m += (g' - m)(1 - beta1);
    v += (g'^2 - v)(1 - beta2); w -= lr' * m / (sqrt(v) + eps). With `nesterov` the step takes
    (1 - beta1) * g' + beta1 * m for m. Then p1 *= beta1, p2 *= beta2.
    """

    kind: ClassVar[str] = "adam"
    coupling: ClassVar[Coupling] = "element"

    lr: float | Schedule = 0.01
    beta1: float = 0.9
    beta2: float = 0.99
    eps: float = 0.01
    weight_decay: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        _check_moments(self)

    def state_width(self, dim: int) -> int:
        return 2 * dim + 2

    def init_state(self, dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return _fresh(2 * dim, self.beta1, self.beta2, dtype)

    def step(
        self, w_UD: Tensor, state_US: Tensor, grad_UD: Tensor, lr: float, ctx: RuleContext
    ) -> tuple[Tensor, Tensor]:
        m_UD, v_UD, p1_U1, p2_U1 = _split(state_US, w_UD.shape[1], 2)
        grad_UD = grad_UD + self.weight_decay * w_UD
        m_UD, v_UD = _moments(self, m_UD, v_UD, grad_UD)
        lead_UD = _lead(self, m_UD, grad_UD)
        rate_U1 = lr * (1 - p2_U1).sqrt() / (1 - p1_U1)
        w_UD = w_UD - rate_U1 * lead_UD / (v_UD.sqrt() + self.eps)
        return w_UD, torch.cat([m_UD, v_UD, p1_U1 * self.beta1, p2_U1 * self.beta2], dim=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Amsgrad(Optimizer):
    """Adam whose denominator never shrinks. State: m[D], v[D], vhat[D], p1, p2.

    As Adam, with vhat = max(vhat, v) and w -= lr' * m / (sqrt(vhat) + eps).
    """

    kind: ClassVar[str] = "amsgrad"
    coupling: ClassVar[Coupling] = "element"

    lr: float | Schedule = 0.01
    beta1: float = 0.9
    beta2: float = 0.99
    eps: float = 0.01
    weight_decay: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        _check_moments(self)

    def state_width(self, dim: int) -> int:
        return 3 * dim + 2

    def init_state(self, dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return _fresh(3 * dim, self.beta1, self.beta2, dtype)

    def step(
        self, w_UD: Tensor, state_US: Tensor, grad_UD: Tensor, lr: float, ctx: RuleContext
    ) -> tuple[Tensor, Tensor]:
        m_UD, v_UD, vhat_UD, p1_U1, p2_U1 = _split(state_US, w_UD.shape[1], 3)
        grad_UD = grad_UD + self.weight_decay * w_UD
        m_UD, v_UD = _moments(self, m_UD, v_UD, grad_UD)
        vhat_UD = torch.maximum(vhat_UD, v_UD)
        lead_UD = _lead(self, m_UD, grad_UD)
        rate_U1 = lr * (1 - p2_U1).sqrt() / (1 - p1_U1)
        w_UD = w_UD - rate_U1 * lead_UD / (vhat_UD.sqrt() + self.eps)
        powers = [p1_U1 * self.beta1, p2_U1 * self.beta2]
        return w_UD, torch.cat([m_UD, v_UD, vhat_UD, *powers], dim=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamW(Optimizer):
    """Adam with decoupled weight decay, the formula of torch.optim.AdamW. State as Adam's.

    w *= 1 - lr * weight_decay; m and v as Adam's with the plain gradient;
    w -= lr / (1 - p1) * m / (sqrt(v) / sqrt(1 - p2) + eps). Untouched rows do not decay.
    """

    kind: ClassVar[str] = "adamw"
    coupling: ClassVar[Coupling] = "element"

    lr: float | Schedule = 0.001
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.01

    def __post_init__(self) -> None:
        _check_moments(self)

    def state_width(self, dim: int) -> int:
        return 2 * dim + 2

    def init_state(self, dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return _fresh(2 * dim, self.beta1, self.beta2, dtype)

    def step(
        self, w_UD: Tensor, state_US: Tensor, grad_UD: Tensor, lr: float, ctx: RuleContext
    ) -> tuple[Tensor, Tensor]:
        m_UD, v_UD, p1_U1, p2_U1 = _split(state_US, w_UD.shape[1], 2)
        w_UD = w_UD * (1 - lr * self.weight_decay)
        m_UD, v_UD = _moments(self, m_UD, v_UD, grad_UD)
        root_UD = v_UD.sqrt() / (1 - p2_U1).sqrt() + self.eps
        w_UD = w_UD - lr / (1 - p1_U1) * m_UD / root_UD
        return w_UD, torch.cat([m_UD, v_UD, p1_U1 * self.beta1, p2_U1 * self.beta2], dim=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class LAMB(Optimizer):
    """AdamW's direction with a trust ratio per segment (You et al. 2020). State as Adam's.

    mhat = m / (1 - p1), vhat = v / (1 - p2); u = mhat / (sqrt(vhat) + eps) + weight_decay * w;
    trust = |w| / |u|, or 1 if either norm is 0; w -= lr * trust * u.
    """

    kind: ClassVar[str] = "lamb"
    coupling: ClassVar[Coupling] = "segment"

    lr: float | Schedule = 0.001
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-6
    weight_decay: float = 0.01

    def __post_init__(self) -> None:
        _check_moments(self)

    def state_width(self, dim: int) -> int:
        return 2 * dim + 2

    def init_state(self, dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return _fresh(2 * dim, self.beta1, self.beta2, dtype)

    def step(
        self, w_UD: Tensor, state_US: Tensor, grad_UD: Tensor, lr: float, ctx: RuleContext
    ) -> tuple[Tensor, Tensor]:
        m_UD, v_UD, p1_U1, p2_U1 = _split(state_US, w_UD.shape[1], 2)
        m_UD, v_UD = _moments(self, m_UD, v_UD, grad_UD)
        root_UD = (v_UD / (1 - p2_U1)).sqrt() + self.eps
        u_UD = m_UD / (1 - p1_U1) / root_UD + self.weight_decay * w_UD
        w_norm_U1 = (w_UD * w_UD).sum(dim=1, keepdim=True).sqrt()
        u_norm_U1 = (u_UD * u_UD).sum(dim=1, keepdim=True).sqrt()
        usable_U1 = (w_norm_U1 > 0) & (u_norm_U1 > 0)
        trust_U1 = torch.where(usable_U1, w_norm_U1 / u_norm_U1, torch.ones_like(w_norm_U1))
        w_UD = w_UD - lr * trust_U1 * u_UD
        return w_UD, torch.cat([m_UD, v_UD, p1_U1 * self.beta1, p2_U1 * self.beta2], dim=1)


def _check_moments(rule: Adam | AdamW | Amsgrad | LAMB) -> None:
    check_rate(rule, "lr", rule.lr)
    checks.fraction(rule, "beta1", rule.beta1)
    checks.fraction(rule, "beta2", rule.beta2)
    checks.positive(rule, "eps", rule.eps)
    checks.at_least(rule, "weight_decay", rule.weight_decay, 0)


def _fresh(zeros: int, beta1: float, beta2: float, dtype: torch.dtype) -> Tensor:
    return torch.tensor([0.0] * zeros + [beta1, beta2], dtype=dtype, device="cpu")


def _split(state_US: Tensor, dim: int, moments: int) -> tuple[Tensor, ...]:
    return torch.split(state_US, [dim] * moments + [1, 1], dim=1)


def _moments(
    rule: Adam | AdamW | Amsgrad | LAMB, m_UD: Tensor, v_UD: Tensor, grad_UD: Tensor
) -> tuple[Tensor, Tensor]:
    m_UD = m_UD + (grad_UD - m_UD) * rest_of(rule.beta1, m_UD)
    v_UD = v_UD + (grad_UD * grad_UD - v_UD) * rest_of(rule.beta2, v_UD)
    return m_UD, v_UD


def _lead(rule: Adam | Amsgrad, m_UD: Tensor, grad_UD: Tensor) -> Tensor:
    if not rule.nesterov:
        return m_UD
    return rest_of(rule.beta1, m_UD) * grad_UD + rule.beta1 * m_UD
