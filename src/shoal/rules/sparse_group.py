"""Rules that set weights to exactly 0: FTRL, and the lasso over groups.

All three divide by the rate. A step with lr = 0, as a warm-up begins, leaves row and state as
they are.
"""

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
class FTRL(Optimizer):
    """Follow the regularised leader (McMahan et al. 2013). State: n[D], z[D].

    n' = n + g^2; sigma = (sqrt(n') - sqrt(n)) / lr; z += g - sigma * w;
    w = 0 if |z| <= l1, else lr * (sign(z) * l1 - z) / (sqrt(n') + beta + l2 * lr).
    n starts at `initial_accumulator`, z at 0. lr = 0 changes nothing.
    """

    kind: ClassVar[str] = "ftrl"
    coupling: ClassVar[Coupling] = "element"

    lr: float | Schedule = 0.01
    beta: float = 0.0
    initial_accumulator: float = 0.1
    l1: float = 0.0
    l2: float = 0.0

    def __post_init__(self) -> None:
        _check_ftrl(self)

    def state_width(self, dim: int) -> int:
        return 2 * dim

    def init_state(self, dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor(
            [self.initial_accumulator] * dim + [0.0] * dim, dtype=dtype, device="cpu"
        )

    def step(
        self, w_UD: Tensor, state_US: Tensor, grad_UD: Tensor, lr: float, ctx: RuleContext
    ) -> tuple[Tensor, Tensor]:
        if lr == 0:
            return w_UD.clone(), state_US.clone()
        root_UD, z_UD, state_US = _advance_ftrl(w_UD, state_US, grad_UD, lr)
        shrunk_UD = torch.sign(z_UD) * self.l1 - z_UD
        moved_UD = lr * shrunk_UD / (root_UD + self.beta + self.l2 * lr)
        return torch.where(z_UD.abs() <= self.l1, torch.zeros_like(w_UD), moved_UD), state_US


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupFTRL(Optimizer):
    """FTRL whose l1 acts on the segment as a whole. State: n[D], z[D].

    n and z as FTRL's; w = 0 if |z|_2 <= l1, else
    -z * (1 - l1 / |z|_2) / ((sqrt(n') + beta) / lr + l2). lr = 0 changes nothing.
    """

    kind: ClassVar[str] = "group_ftrl"
    coupling: ClassVar[Coupling] = "segment"

    lr: float | Schedule = 0.01
    beta: float = 1.0
    initial_accumulator: float = 0.0
    l1: float = 0.0
    l2: float = 0.0

    def __post_init__(self) -> None:
        _check_ftrl(self)

    def state_width(self, dim: int) -> int:
        return 2 * dim

    def init_state(self, dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor(
            [self.initial_accumulator] * dim + [0.0] * dim, dtype=dtype, device="cpu"
        )

    def step(
        self, w_UD: Tensor, state_US: Tensor, grad_UD: Tensor, lr: float, ctx: RuleContext
    ) -> tuple[Tensor, Tensor]:
        if lr == 0:
            return w_UD.clone(), state_US.clone()
        root_UD, z_UD, state_US = _advance_ftrl(w_UD, state_US, grad_UD, lr)
        norm_U1 = (z_UD * z_UD).sum(dim=1, keepdim=True).sqrt()
        moved_UD = -z_UD * (1 - self.l1 / norm_U1) / ((root_UD + self.beta) / lr + self.l2)
        return torch.where(norm_U1 <= self.l1, torch.zeros_like(w_UD), moved_UD), state_US


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupAdagrad(Optimizer):
    """Adagrad with a lasso on the segment's norm. State: G[1], from `initial_accumulator`.

    g' = g + weight_decay * w; G += max(g'^2) over the segment; lr' = lr / (beta + sqrt(G));
    z = g' - w / lr'; w = 0 if |z|_2 <= l2, else -lr' * (|z|_2 - l2) / |z|_2 * z.
    lr = 0 changes nothing.
    """

    kind: ClassVar[str] = "group_adagrad"
    coupling: ClassVar[Coupling] = "segment"

    lr: float | Schedule = 0.01
    beta: float = 0.0
    initial_accumulator: float = 0.1
    l2: float = 0.0
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        check_rate(self, "lr", self.lr)
        checks.at_least(self, "l2", self.l2, 0)
        checks.at_least(self, "weight_decay", self.weight_decay, 0)
        _check_root(self, self.beta, self.initial_accumulator)

    def state_width(self, dim: int) -> int:
        return 1

    def init_state(self, dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full((1,), self.initial_accumulator, dtype=dtype, device="cpu")

    def step(
        self, w_UD: Tensor, state_US: Tensor, grad_UD: Tensor, lr: float, ctx: RuleContext
    ) -> tuple[Tensor, Tensor]:
        if lr == 0:
            return w_UD.clone(), state_US.clone()
        grad_UD = grad_UD + self.weight_decay * w_UD
        largest_U1 = state_US + (grad_UD * grad_UD).amax(dim=1, keepdim=True)
        rate_U1 = lr / (self.beta + largest_U1.sqrt())
        z_UD = grad_UD - w_UD / rate_U1
        norm_U1 = (z_UD * z_UD).sum(dim=1, keepdim=True).sqrt()
        moved_UD = -rate_U1 * (norm_U1 - self.l2) / norm_U1 * z_UD
        return torch.where(norm_U1 <= self.l2, torch.zeros_like(w_UD), moved_UD), largest_U1


def _advance_ftrl(
    w_UD: Tensor, state_US: Tensor, grad_UD: Tensor, lr: float
) -> tuple[Tensor, Tensor, Tensor]:
    """New sqrt(n), new z, and the state that holds both n and z."""
    n_UD, z_UD = state_US.chunk(2, dim=1)
    squares_UD = n_UD + grad_UD * grad_UD
    root_UD = squares_UD.sqrt()
    z_UD = z_UD + grad_UD - (root_UD - n_UD.sqrt()) / lr * w_UD
    return root_UD, z_UD, torch.cat([squares_UD, z_UD], dim=1)


def _check_ftrl(rule: FTRL | GroupFTRL) -> None:
    check_rate(rule, "lr", rule.lr)
    checks.at_least(rule, "l1", rule.l1, 0)
    checks.at_least(rule, "l2", rule.l2, 0)
    _check_root(rule, rule.beta, rule.initial_accumulator)


def _check_root(rule: Optimizer, beta: float, initial_accumulator: float) -> None:
    checks.at_least(rule, "beta", beta, 0)
    checks.at_least(rule, "initial_accumulator", initial_accumulator, 0)
    if beta == 0 and initial_accumulator == 0:
        raise ConfigError(
            f"beta and initial_accumulator of {type(rule).__name__}",
            got="both 0",
            allowed="one of them above 0",
            remedy="A tiny first gradient would divide by 0; set initial_accumulator.",
        )
