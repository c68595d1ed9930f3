"""Checks of the numbers that rules are made of; each raises ConfigError."""

from __future__ import annotations

import math

from shoal.errors import ConfigError


def finite(owner: object, name: str, value: float) -> None:
    """The value is a finite number."""
    if not _is_number(value):
        raise _wrong(owner, name, value, "a finite number")


def at_least(owner: object, name: str, value: float, low: float) -> None:
    """The value is a finite number, `low` or larger."""
    if not _is_number(value) or value < low:
        raise _wrong(owner, name, value, f"a finite number, at least {low:g}")


def positive(owner: object, name: str, value: float) -> None:
    """The value is a finite number above 0."""
    if not _is_number(value) or value <= 0:
        raise _wrong(owner, name, value, "a finite number above 0")


def fraction(owner: object, name: str, value: float) -> None:
    """The value lies in [0, 1)."""
    if not _is_number(value) or not 0 <= value < 1:
        raise _wrong(owner, name, value, "0 <= value < 1")


def whole(owner: object, name: str, value: int, low: int, high: int | None = None) -> None:
    """The value is an int, at least `low` and at most `high`."""
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if not is_int or value < low or (high is not None and value > high):
        limit = "" if high is None else f" and at most {high}"
        raise _wrong(owner, name, value, f"a whole number, at least {low}{limit}")


def power_of_two(owner: object, name: str, value: int) -> None:
    """The value is a power of two, at least 1."""
    whole(owner, name, value, 1)
    if value & (value - 1):
        raise _wrong(owner, name, value, "a power of two")


def choice(owner: object, name: str, value: str, known: tuple[str, ...]) -> None:
    """The value is one of the known words."""
    if value not in known:
        raise _wrong(owner, name, value, ", ".join(map(repr, known)))


def _is_number(value: float) -> bool:
    try:
        return isinstance(value, (int, float)) and math.isfinite(value)
    except OverflowError:  # an int beyond all floats
        return False


def _wrong(owner: object, name: str, value: object, allowed: str) -> ConfigError:
    return ConfigError(
        f"{name} of {type(owner).__name__}",
        got=repr(value),
        allowed=allowed,
        remedy=f"Set {name} to a value in that range.",
    )
