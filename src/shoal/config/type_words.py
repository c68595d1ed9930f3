"""What a setting may be, in the words of this package's pages, and what it is if it is left out."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from shoal.errors import ConfigError

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
DEVICE = r"^(auto|cpu|cuda(:[0-9]+)?)$"

_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "finite": "a finite number",
    "bool": "true or false",
    "string": "text",
    "tuple": "a list: [A, B], or [] for none",
    "list": "a list: [A, B], or [] for none",
    "dict": "settings: {NAME: VALUE}",
    "model": "settings: {NAME: VALUE}",
    "datetime": "a time such as 2013-11-01T00:00:00Z",
    "missing": "a value",
}
_NAMED = "a name, or settings with kind: NAME among them"
_BOUNDS = {
    "greater_than": "a number greater than {gt}",
    "greater_than_equal": "a number of {ge} or more",
    "less_than": "a number less than {lt}",
    "less_than_equal": "a number of {le} or less",
    "too_long": "{max_length} values or fewer",
    "too_short": "{min_length} values or more",
    "union_tag_not_found": _NAMED,
    "is_instance_of": _NAMED,
}
_PATTERNS = {
    NAME: "letters, digits, '.', '_' and '-', a letter or a digit first",
    DEVICE: "auto, cpu, cuda, or one GPU: cuda:0",
}


def shown(value: object) -> str:
    """A setting's value as it stands in a file."""
    return "null" if value is None else repr(value)


def place_of(error: ErrorDetails, value: object) -> tuple[str, object]:
    """Which part of a list is wrong, "[1]", and that part; else "" and the whole value."""
    place = "".join(f"[{part}]" for part in error["loc"] if isinstance(part, int))
    return place, error["input"] if place else value


def names_of(error: ErrorDetails) -> list[str]:
    """The names that a setting of a few names may be; empty for other settings."""
    if error["type"] != "literal_error":
        return []
    return [one.strip("'") for one in error["ctx"]["expected"].replace(" or ", ", ").split(", ")]


def allowed_by(errors: Iterable[ErrorDetails]) -> str:
    """What any of the types of one setting allows, each of which has an error."""
    return " or ".join(dict.fromkeys(map(_allowed, errors)))


def _allowed(error: ErrorDetails) -> str:
    kind, context = error["type"], error.get("ctx", {})
    if kind == "literal_error":
        return ", ".join(names_of(error))
    if kind == "string_pattern_mismatch":
        return _PATTERNS.get(context["pattern"], f"text that fits {context['pattern']}")
    if kind in _BOUNDS:
        return _BOUNDS[kind].format(**context)
    found = _KINDS.get(kind.partition("_")[0])
    return found or error["msg"].removeprefix("Value error, ").removeprefix("Input should be ")


def is_bool_for_number(value: Any, hint: Any) -> bool:
    """Whether a true or false in `value` would pass for a 1 or 0, which pydantic lets it."""
    items = value if isinstance(value, list | tuple) else [value]
    types = set(re.findall(r"\w+", str(hint)))
    wants_number = "bool" not in types and not types.isdisjoint({"int", "float"})
    return wants_number and any(isinstance(item, bool) for item in items)


def with_patterns(value: Any, default_kind: str) -> Any:
    """Settings of a dense optimizer; those by pattern take over what they leave out.

    Arguments of another kind of optimizer do not carry over.
    """
    if not isinstance(value, Mapping) or not isinstance(value.get("parameters"), Mapping):
        return value
    kind, filled = value.get("kind", default_kind), {}
    for pattern, rule in value["parameters"].items():
        own = {"kind": rule} if isinstance(rule, str) else rule
        if isinstance(rule, BaseModel):
            own = {name: getattr(rule, name) for name in rule.model_fields_set}
        if isinstance(own, Mapping):
            same = own.get("kind", kind) == kind
            kept = ("kind", "lr", "weight_decay", "options") if same else ("lr", "weight_decay")
            own = {key: value[key] for key in kept if key in value} | dict(own)
        filled[pattern] = own
    return {**value, "parameters": filled}


def of_type(value: Any, hint: Any, what: str) -> Any:
    """A setting as the type that it has in Python.

    Raises:
        ConfigError: it has another.
    """
    if is_bool_for_number(value, hint):
        raise ConfigError(what, repr(value), "a number", "Change the setting.")
    try:
        adapter = TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True))
        return adapter.validate_python(value)
    except ValidationError as error:
        place, wrong = place_of(error.errors()[0], value)
        key, of, owner = what.partition(" of ")
        what, allowed = f"{key}{place}{of}{owner}", allowed_by(error.errors())
        raise ConfigError(what, shown(wrong), allowed, "Change the setting.") from error
