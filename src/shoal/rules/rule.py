"""What every rule is: a frozen value that declares once what its fields may hold and, for the core
and the kernels, which numbers they read in which order."""

from __future__ import annotations

import math
import typing
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, get_origin

import numpy as np

from shoal.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Allowed:
    """What a field may hold, in words and as a test; stands in the field's annotation.

    remedy: of another value; "": to set one of these.
    """

    words: str
    fits: Callable[[Any], bool]
    remedy: str = ""

    def or_none(self) -> Allowed:
        """The same, or None."""
        return Allowed(
            f"None or {self.words}", lambda value: value is None or self.fits(value), self.remedy
        )


def is_number(value: Any) -> bool:
    """Whether a value is a finite int or float."""
    try:
        return isinstance(value, (int, float)) and math.isfinite(value)
    except OverflowError:  # an int beyond all floats
        return False


def at_least(low: float) -> Allowed:
    """A finite number, `low` or larger."""
    return Allowed(
        f"a finite number, at least {low:g}", lambda value: is_number(value) and value >= low
    )


def whole(
    low: int, high: float = math.inf, power_of_two: bool = False, *, remedy: str = ""
) -> Allowed:
    """An int, also numpy's, from `low` to `high`."""
    words = f"a whole number, at least {low}" + ("" if high == math.inf else f" and at most {high}")
    return Allowed(
        "a power of two" if power_of_two else words,
        lambda value: (
            isinstance(value, int | np.integer)
            and not isinstance(value, bool)
            and low <= int(value) <= high
            and not (power_of_two and value & (value - 1))
        ),
        remedy,
    )


def named(remedy: str) -> Allowed:
    """A name."""
    return Allowed("a str, not empty", lambda name: isinstance(name, str) and name != "", remedy)


Finite = Annotated[float, Allowed("a finite number", is_number)]
NotNegative = Annotated[float, at_least(0)]
Positive = Annotated[float, Allowed("a finite number above 0", lambda v: is_number(v) and v > 0)]
Share = Annotated[float, Allowed("0 <= value < 1", lambda v: is_number(v) and 0 <= v < 1)]
Steps = Annotated[int, whole(1)]


def check(owner: Checked, name: str, value: object, allowed: Allowed) -> None:
    """Check a value of a field.

    Raises:
        ConfigError: it is not allowed.
    """
    if not allowed.fits(value):
        raise ConfigError(
            f"{name} of {owner.described()}",
            got=repr(value),
            allowed=allowed.words,
            remedy=allowed.remedy or f"Set {name} to a value in that range.",
        )


class Checked:
    """Base of frozen dataclasses whose fields hold what their annotations allow.

    Raises:
        ConfigError: a field does not.
    """

    __slots__ = ()

    def __post_init__(self) -> None:
        for name, allowed in _fields(type(self)):  # type: ignore[arg-type]
            check(self, name, value := getattr(self, name), allowed)
            if isinstance(value, np.integer):
                object.__setattr__(self, name, int(value))  # numpy's do not fit everywhere

    def described(self) -> str:
        """What errors call it."""
        return type(self).__name__


@cache
def _fields(cls: type) -> tuple[tuple[str, Allowed], ...]:
    found = []
    for name, hint in typing.get_type_hints(cls, include_extras=True).items():
        words = typing.get_args(hint)
        if get_origin(hint) is Literal:
            fits = words.__contains__
            found.append((name, Allowed(", ".join(map(repr, words)), fits, "Name one of them.")))
        found += [(name, one) for one in words if isinstance(one, Allowed)]
        # Under Python 3.10 tuple[int] is a type, too.
        kinds = [one for one in words or (hint,) if isinstance(one, type) and not get_origin(one)]
        if any(issubclass(one, Checked | str | bool) for one in kinds):
            found.append((name, _instances(tuple(kinds), get_origin(hint) is tuple)))
    return tuple(found)


def _instances(kinds: tuple[type, ...], several: bool) -> Allowed:
    """Objects of these classes, or a tuple of such."""
    words = " or ".join(kind.__name__ for kind in kinds).replace("NoneType", "None")

    def fits(value: Any) -> bool:
        if several:
            return isinstance(value, tuple | list) and all(isinstance(v, kinds) for v in value)
        return isinstance(value, kinds) or (kinds[0] is bool and isinstance(value, np.bool_))

    if kinds[0] in (str, bool):
        allowed = f"a tuple of {words}" if several else words
        return Allowed(allowed, fits, "Pass a value of that kind.")
    remedy = "Pass an object, not a class, a name or a number."
    return Allowed(f"a tuple of {words}" if several else f"an object of {words}", fits, remedy)


class Rule(Checked):
    """A rule that the core and the kernels carry out.

    kind: its name there and in configs. params: its attributes that they read, in the order in
    which `csrc/rules_impl.h` and `kernels/step_rules.py` name them.
    """

    __slots__ = ()

    kind: ClassVar[str]
    params: ClassVar[tuple[str, ...]] = ()

    def param_values(self) -> tuple[float, ...]:
        """The parameters in that order; true is 1, false 0."""
        return tuple(float(getattr(self, name)) for name in self.params)
