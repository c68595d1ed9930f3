"""Checks of the single numbers that cross into a table: whole numbers, rates, policies."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shoal.errors import DTypeError, InputError, describe

if TYPE_CHECKING:
    from shoal.table.shard import StepContext

__all__ = [
    "LAST_VERSION",
    "MAX_ID",
    "MAX_TIME_S",
    "MIN_ID",
    "event_time",
    "finite_rates",
    "step",
    "whole",
]

MIN_ID, MAX_ID = -(1 << 63), (1 << 63) - 1
MAX_TIME_S = (1 << 32) - 1
LAST_VERSION = (1 << 32) - 2  # one epoch must remain above that of any row

_POLICIES = ("raise", "skip", "clip")
_MAX_STEP = (1 << 63) - 1


def whole(what: str, value: object, low: int, high: int, *, remedy: str) -> None:
    """Check that a value is a Python int of low..high; bools and floats are none.

    Raises:
        DTypeError: not an int.
        InputError: out of range.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        got = f"{value!r} of type {type(value).__name__}"
        raise DTypeError(describe(what, got=got, allowed=f"an int, {low}..{high}", remedy=remedy))
    if not low <= value <= high:
        raise InputError(describe(what, got=value, allowed=f"{low}..{high}", remedy=remedy))


def event_time(value: object, what: str = "event_time_s") -> None:
    """Check whole seconds since 1970 that 32 bits hold.

    Raises:
        DTypeError: not an int.
        InputError: outside 0..2^32-1.
    """
    whole(what, value, 0, MAX_TIME_S, remedy="Pass seconds since 1970.")


def finite_rates(rates: Mapping[str, tuple[float, ...]]) -> None:
    """Check that learning rates are finite numbers.

    Raises:
        DTypeError: not a number.
        InputError: NaN or infinity.
    """
    for name, row in rates.items():
        for rate in row:
            _finite(f"learning rate of table {name!r}", rate, "finite numbers")


def step(ctx: StepContext) -> None:
    """Check the values of a step's context.

    Raises:
        DTypeError: a wrong type.
        InputError: a value out of range, or an unknown policy.
    """
    remedy = "Pass the number of optimizer steps done."
    whole("global_step", ctx.global_step, 0, _MAX_STEP, remedy=remedy)
    event_time(ctx.event_time_s)
    if ctx.nan_policy not in _POLICIES:
        allowed, remedy = ", ".join(_POLICIES), "Name one of them."
        got = repr(ctx.nan_policy)
        raise InputError(describe("nan_policy", got=got, allowed=allowed, remedy=remedy))
    _finite("nan_clip", ctx.nan_clip, "a finite number above 0")
    if ctx.nan_clip <= 0:
        remedy = "Pass what infinities become, say 1.0."
        allowed = "a finite number above 0"
        raise InputError(describe("nan_clip", got=ctx.nan_clip, allowed=allowed, remedy=remedy))
    finite_rates(ctx.learning_rates)


def _finite(what: str, value: Any, allowed: str) -> None:
    try:
        if math.isfinite(value):
            return
    except TypeError:
        got = f"{value!r} of type {type(value).__name__}"
        remedy = "Pass a Python float."
        raise DTypeError(describe(what, got=got, allowed=allowed, remedy=remedy)) from None
    except OverflowError:
        pass
    remedy = "Check the schedule or the setting it comes from."
    raise InputError(describe(what, got=value, allowed=allowed, remedy=remedy))
