"""JSON as frozen dataclasses: every field there, none besides, each of just its type."""

from __future__ import annotations

import re
import types
import typing
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin

__all__ = ["NotThat", "decoded"]

_SURROGATE = re.compile("[\ud800-\udfff]")


class NotThat(ValueError):
    """A value that is not what its place asks for."""

    def __init__(self, where: str, got: object, allowed: str) -> None:
        super().__init__(f"{where} is {str(got)[:200]!r}, not {allowed}")


def decoded(kind: Any, raw: Any, where: str) -> Any:
    """`raw`, as `json.loads` gave it, as a value of that type.

    kind: a dataclass, str, int, bool, float, None, a Literal, a union, tuple[T, ...] or
        dict[str, T]. An int is no bool, and a float may be written as an int.

    Raises:
        NotThat: a field is missing or unknown, or a value of another type.
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if is_dataclass(kind):
        return _object(kind, raw, where)
    if origin is Literal:
        if not any(raw == one and type(raw) is type(one) for one in arguments):
            raise NotThat(where, raw, " or ".join(repr(one) for one in arguments))
        return raw
    if origin in (Union, types.UnionType):
        if raw is None and type(None) in arguments:
            return None
        rest = [one for one in arguments if one is not type(None)]
        return decoded(rest[0], raw, where)
    if origin is tuple:
        if type(raw) is not list:
            raise NotThat(where, raw, "a list")
        return tuple(decoded(arguments[0], one, f"{where}[{k}]") for k, one in enumerate(raw))
    if origin is dict:
        if type(raw) is not dict:
            raise NotThat(where, raw, "an object")
        return {key: decoded(arguments[1], one, f"{where}.{key}") for key, one in raw.items()}
    if kind is float and type(raw) is int:
        return float(raw)
    if type(raw) is not kind:
        raise NotThat(where, raw, f"a value of type {kind.__name__}")
    if kind is int and not -(1 << 63) <= raw <= 1 << 65:
        raise NotThat(where, "a huge number", "one of 64 bits")
    if kind is str and ("\0" in raw or (not raw.isascii() and _SURROGATE.search(raw))):
        raise NotThat(where, ascii(raw), "text that a file name may have")
    return raw


def _object(kind: Any, raw: Any, where: str) -> Any:
    if type(raw) is not dict:
        raise NotThat(where, raw, "an object")
    wanted = _types(kind)
    if missing := wanted.keys() - raw.keys():
        raise NotThat(where, f"without {', '.join(sorted(missing))}", "all its fields")
    if unknown := raw.keys() - wanted.keys():
        raise NotThat(where, f"with {', '.join(sorted(unknown))}", "only its fields")
    return kind(
        **{name: decoded(one, raw[name], f"{where}.{name}") for name, one in wanted.items()}
    )


@cache
def _types(kind: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}
