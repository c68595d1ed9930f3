"""Plain values that are short for settings, and those settings: `dcn` and `{kind: dcn}`."""

from __future__ import annotations

import types
import typing
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from pydantic import BaseModel, GetCoreSchemaHandler
from pydantic_core import core_schema


@dataclass(frozen=True, slots=True)
class ShortFor:
    """Lets a text stand for settings with nothing but that key; `each`: those of each name.

    inside: settings within, and the texts that are short there.
    """

    key: str
    each: bool = False
    inside: Mapping[str, Collection[str]] = field(default_factory=dict, hash=False)

    def written_out(self, value: Any) -> Any:
        """The settings that a text is short for; other values pass."""
        if isinstance(value, str):
            return {self.key: value}
        if not isinstance(value, Mapping):
            return value
        return {name: self._written_out_inside(name, own) for name, own in value.items()}

    def _written_out_inside(self, name: str, own: Any) -> Any:
        short = self.inside.get(name, ())
        if (
            self.each
            or (isinstance(own, str) and own in short)
            or (short and not isinstance(own, str))
        ):
            return replace(self, each=False).written_out(own)
        return own

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        return core_schema.no_info_before_validator_function(self.written_out, handler(source))


_hints = cache(typing.get_type_hints)


def long_form(value: Any, hint: Any) -> Any:
    """Plain settings of a type with all that is short written out, but for interpolations.

    Merged settings must be long: a mapping would replace the text that it is merged into.
    """
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        for short in hint.__metadata__:
            if isinstance(short, ShortFor) and "${" not in str(value):
                value = short.written_out(value)
        return long_form(value, args[0])
    if origin in (typing.Union, types.UnionType):
        for member in args:
            value = long_form(value, member)
        return value
    if not isinstance(value, Mapping):
        return value
    if origin is dict:
        return {key: long_form(item, args[1]) for key, item in value.items()}
    if isinstance(hint, type) and issubclass(hint, BaseModel):
        known = _hints(hint, include_extras=True)
        return {key: long_form(item, known.get(key)) for key, item in value.items()}
    return value
