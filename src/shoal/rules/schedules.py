"""Learning rates as pure functions of the global step.

The global step counts optimizer steps done before the one the rate is for: the first step of a
run asks for step 0.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

from shoal.errors import of_kind
from shoal.rules.rule import Allowed, Checked, NotNegative, Positive, Steps, at_least, check, whole

__all__ = [
    "ByEpoch",
    "ConstantRate",
    "Cosine",
    "Exponential",
    "Piecewise",
    "Polynomial",
    "Scaled",
    "Schedule",
    "Warmup",
    "as_rate",
    "settled",
]


class Schedule(Checked, ABC):
    """A learning rate that depends on the global step."""

    __slots__ = ()

    kind: ClassVar[str]

    @abstractmethod
    def __call__(self, step: int) -> float:
        """The rate at a global step >= 0."""


_RATE = at_least(0)
_RISING = Allowed(
    "steps in strictly rising order",
    lambda steps: list(steps) == sorted(set(steps)),
    "Sort them and drop repeats.",
)
Rate = Annotated[
    float | Schedule,
    Allowed(_RATE.words, lambda value: isinstance(value, Schedule) or _RATE.fits(value)),
]


@dataclass(frozen=True, slots=True)
class ConstantRate(Schedule):
    """The same rate at every step."""

    kind = "constant"

    value: NotNegative

    def __call__(self, step: int) -> float:
        return float(self.value)


@dataclass(frozen=True, slots=True)
class Polynomial(Schedule):
    """From `initial` to `end` over `decay_steps` steps, then `end`; `end` may be the larger.

    rate = (initial - end) * (1 - min(step, T) / T)^power + end, as TensorFlow's
    polynomial_decay. With `cycle`, T is the next multiple of decay_steps at or above the step.
    """

    kind = "polynomial"

    initial: NotNegative
    decay_steps: Steps
    end: NotNegative = 0.0001
    power: Positive = 1.0
    cycle: bool = False

    def __call__(self, step: int) -> float:
        span = self.decay_steps
        if self.cycle:
            span *= max(1, -(-step // self.decay_steps))
        left = 1 - min(step, span) / span
        return float((self.initial - self.end) * left**self.power + self.end)


@dataclass(frozen=True, slots=True)
class Exponential(Schedule):
    """rate = initial * gamma^step, as torch's ExponentialLR."""

    kind = "exponential"

    initial: NotNegative
    gamma: Positive

    def __call__(self, step: int) -> float:
        try:
            return float(self.initial * self.gamma**step)
        except OverflowError:  # refused by whoever takes the rate
            return math.inf


@dataclass(frozen=True, slots=True)
class Cosine(Schedule):
    """Half a cosine from `initial` to `end` over `decay_steps` steps, as torch's CosineAnnealingLR.

    rate = end + (initial - end) * (1 + cos(pi * step / decay_steps)) / 2. After decay_steps the
    rate stays at `end`; with `cycle` it climbs back and falls again, as torch's does.
    """

    kind = "cosine"

    initial: NotNegative
    decay_steps: Steps
    end: NotNegative = 0.0
    cycle: bool = False

    def __call__(self, step: int) -> float:
        done = (step if self.cycle else min(step, self.decay_steps)) / self.decay_steps
        return float(self.end + (self.initial - self.end) * (1 + math.cos(math.pi * done)) / 2)


@dataclass(frozen=True, slots=True)
class Piecewise(Schedule):
    """Constant between boundaries: `values[i]` from step `boundaries[i-1]` on.

    As torch's MultiStepLR, a boundary step already has the new rate.

    Raises:
        ConfigError: not one value more than boundaries, or boundaries that do not grow.
    """

    kind = "piecewise"

    boundaries: Annotated[tuple[int, ...], _RISING]
    values: tuple[float, ...]

    def __post_init__(self) -> None:
        for name in ("boundaries", "values"):
            given = of_kind(f"{name} of Piecewise", getattr(self, name), Iterable)
            object.__setattr__(self, name, tuple(given))
        for boundary in self.boundaries:
            check(self, "boundaries", boundary, whole(1))
        Schedule.__post_init__(self)
        wanted = len(self.boundaries) + 1
        remedy = "The first value holds before the first boundary."
        allowed = Allowed(f"{wanted}, one more than boundaries", lambda n: n == wanted, remedy)
        check(self, "number of values", len(self.values), allowed)
        for value in self.values:
            check(self, "values", value, at_least(0))

    def __call__(self, step: int) -> float:
        passed = sum(step >= boundary for boundary in self.boundaries)
        return float(self.values[passed])


@dataclass(frozen=True, slots=True)
class Warmup(Schedule):
    """Another rate times a factor that climbs from `start_factor` to 1 over `steps` steps.

    As torch's LinearLR chained with another schedule; the target sees the same, unshifted step.
    With a fixed target it is Polynomial(0, steps, end=target), Monolith's `warmup_steps`.
    """

    kind = "warmup"

    target: Rate
    steps: Steps
    start_factor: NotNegative = 0.0

    def __call__(self, step: int) -> float:
        done = min(step, self.steps) / self.steps
        return as_rate(self.target, step) * (self.start_factor * (1 - done) + done)


@dataclass(frozen=True, slots=True)
class ByEpoch(Schedule):
    """Another rate, of the epoch instead of the step: the same through each epoch.

    steps: of an epoch; None: the first epoch lasts until `settled` fills them in, as `shoal train`
        does.
    """

    kind = "by_epoch"

    rate: Rate
    steps: Steps | None = None

    def __call__(self, step: int) -> float:
        return as_rate(self.rate, 0 if self.steps is None else step // self.steps)


@dataclass(frozen=True, slots=True)
class Scaled(Schedule):
    """Another rate times a factor."""

    kind = "scaled"

    rate: Rate
    factor: NotNegative

    def __call__(self, step: int) -> float:
        return as_rate(self.rate, step) * self.factor


def settled(rate: float | Schedule, epoch_steps: int, factor: float = 1.0) -> float | Schedule:
    """A rate with the steps of an epoch filled in where they are open, times a factor."""
    if isinstance(rate, ByEpoch):
        rate = replace(rate, steps=rate.steps or epoch_steps)
    elif isinstance(rate, Warmup):
        rate = replace(rate, target=settled(rate.target, epoch_steps))
    elif isinstance(rate, Scaled):
        rate = replace(rate, rate=settled(rate.rate, epoch_steps))
    return rate if factor == 1 else Scaled(rate, factor)


def as_rate(lr: float | Schedule, step: int) -> float:
    """The learning rate at a global step, of a number or a schedule."""
    return lr(step) if isinstance(lr, Schedule) else float(lr)
