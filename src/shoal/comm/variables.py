"""Values of environment variables: one reading of switches and of whole numbers.

An empty variable counts as one that is not set.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shoal.errors import ConfigError, describe

__all__ = ["SWITCH", "choice", "whole"]

SWITCH = (0, 1)
_WORDS = (("false", "no", "off", "n", "f"), ("true", "yes", "on", "y", "t"))


def choice(
    environ: Mapping[str, str], name: str, default: int, allowed: Sequence[int] = SWITCH
) -> int:
    """One of a few numbers; where 0 and 1 are among them, also said as words in any case.

    Raises:
        ConfigError: another value.
    """
    text = environ.get(name, "").strip()
    known = {str(value): value for value in allowed}
    if set(SWITCH) <= set(allowed):
        known |= {word: value for value in SWITCH for word in _WORDS[value]}
    if text and text.lower() not in known:
        raise ConfigError(
            describe(
                name,
                got=repr(environ[name][:100]),
                allowed=", ".join(known),
                remedy=f"Unset it to get {default}.",
            )
        )
    return known[text.lower()] if text else default


def whole(
    environ: Mapping[str, str], name: str, default: int, *, least: int = 0, most: int = 2**63 - 1
) -> int:
    """A whole number in a range.

    Raises:
        ConfigError: no whole number, or one out of range.
    """
    text = environ.get(name, "").strip()
    if not text:
        return default
    # Not `isdigit`, which takes digits that `int` refuses; and no more digits than `int` reads.
    value = int(text) if text.isdecimal() and len(text) < 20 else -1
    if not least <= value <= most:
        raise ConfigError(
            describe(
                name,
                got=repr(environ[name][:100]),
                allowed=f"a whole number from {least} to {most}",
                remedy="Unset it, or set it to one.",
            )
        )
    return value
