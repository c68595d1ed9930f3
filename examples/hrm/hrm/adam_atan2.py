"""Adam without an epsilon: the arc tangent of its two moments; any device, plain torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from shoal.errors import ConfigError

__all__ = ["AdamATan2"]


class AdamATan2(torch.optim.Optimizer):
    """t += 1; w *= 1 - lr wd; then w -= lr / (1 - b1^t) atan2(m, sqrt(v) / sqrt(1 - b2^t)).

    m and v are Adam's moments. Scaling all gradients changes nothing; a steady gradient moves a
    weight by lr pi / 4 a step, so rates are not AdamW's. Weight decay is decoupled and meets
    every parameter. Parameters without a gradient stay put.

    Args:
        params: as in torch.
        lr: at least 0; schedules set `group["lr"]`.
        betas: decay of the moments, each in [0, 1).
        weight_decay: at least 0.

    Raises:
        ConfigError: a value out of range.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.1,
    ) -> None:
        if not (lr >= 0 and weight_decay >= 0 and all(0 <= beta < 1 for beta in betas)):
            raise ConfigError(
                "AdamATan2",
                got=f"lr={lr}, betas={betas}, weight_decay={weight_decay}",
                allowed="lr and weight_decay of at least 0, betas in [0, 1)",
                remedy="Start from lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1.",
            )
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of all parameters that have a gradient; returns what the closure does."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            by_age: dict[float, list[Tensor]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    age = self._older(parameter)
                    by_age.setdefault(age, []).append(parameter)
            for age, parameters in by_age.items():
                self._move(group, age, parameters)
        return loss

    def _older(self, parameter: Tensor) -> float:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
        return float(state["step"])

    def _move(self, group: dict[str, Any], age: float, parameters: list[Tensor]) -> None:
        lr, (beta1, beta2) = group["lr"], group["betas"]
        grads = [p.grad for p in parameters if p.grad is not None]
        first = [self.state[p]["exp_avg"] for p in parameters]
        second = [self.state[p]["exp_avg_sq"] for p in parameters]
        torch._foreach_mul_(parameters, 1 - lr * group["weight_decay"])
        torch._foreach_lerp_(first, grads, 1 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, grads, grads, value=1 - beta2)
        scale = torch._foreach_sqrt(second)
        torch._foreach_div_(scale, math.sqrt(1 - beta2**age))
        # Foreach knows no atan2; atan of the quotient would divide zero by zero.
        for moment, width in zip(first, scale, strict=True):
            torch.atan2(moment, width, out=width)
        torch._foreach_add_(parameters, scale, alpha=-lr / (1 - beta1**age))
