"""The learning rate of a step: linear warm-up, then half a cosine to a fraction of it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shoal import schedules
from shoal.errors import ConfigError

__all__ = ["WarmupCosine", "total_steps"]


@dataclass(frozen=True, slots=True)
class WarmupCosine(schedules.Schedule):
    """HRM's rate, which counts steps from 1: the first step of a run trains at base / warmup.

    Args:
        base: the rate after warm-up.
        warmup_steps: steps of the linear climb.
        total_steps: step at which the cosine ends.
        min_ratio: fraction of `base` at the end; 1 keeps it constant.
    """

    base: float
    warmup_steps: int
    total_steps: int
    min_ratio: float = 1.0

    def __post_init__(self) -> None:
        if self.base < 0 or self.warmup_steps < 0 or not 0 <= self.min_ratio <= 1:
            raise ConfigError(
                "learning rate",
                got=f"base {self.base}, warm-up {self.warmup_steps}, ratio {self.min_ratio}",
                allowed="base and warm-up of at least 0, a ratio in 0..1",
                remedy="See lr, lr_warmup_steps and lr_min_ratio.",
            )

    def __call__(self, step: int) -> float:
        """The rate after `step` steps are done."""
        at = step + 1
        if at < self.warmup_steps:
            return self.base * at / self.warmup_steps
        done = (at - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps)
        left = (1 - self.min_ratio) * (1 + math.cos(math.pi * done)) / 2
        return self.base * (self.min_ratio + left)


def total_steps(epochs: int, groups: int, mean_puzzle_examples: float, global_batch: int) -> int:
    """Steps of a run: an epoch uses each group once, with one puzzle's examples."""
    return int(epochs * groups * mean_puzzle_examples / global_batch)
