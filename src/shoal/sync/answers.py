"""What publishers answer, as replicas read it; pages come next to it."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from shoal.errors import DataError

_Whole = Annotated[int, Field(ge=0, lt=1 << 63)]
_Step = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]
_Seconds = Annotated[float, Field(allow_inf_nan=False)]


class _HelloAnswer(TypedDict):
    tables: list[tuple[str, int, str]]
    rank: _Whole
    world_size: _Whole
    placement: str | None


class _NewestAnswer(TypedDict):
    incarnation: _Whole
    version: _Whole
    closed_s: _Seconds | None
    dense: _Whole


class _AfterAnswer(_NewestAnswer):
    known: bool
    segments: list[tuple[_Whole, _Whole, _Seconds, list[_Whole]]]
    last_step: _Step


class _PassAnswer(TypedDict):
    number: _Whole
    incarnation: _Whole
    version: _Whole
    closed_s: _Seconds
    last_step: _Step


class _NoPassAnswer(TypedDict):
    number: None


_KINDS: dict[str, TypeAdapter[Any]] = {
    "hello": TypeAdapter(_HelloAnswer),
    "after": TypeAdapter(_AfterAnswer),
    "newest": TypeAdapter(_NewestAnswer),
    "pass": TypeAdapter(_PassAnswer | _NoPassAnswer),
    "dense": TypeAdapter(_Whole),
    "page": TypeAdapter(None),
    "next": TypeAdapter(None),
    "goodbye": TypeAdapter(None),
}


def answer_of(method: str, text: bytes) -> Any:
    """The answer to a request of a method.

    Raises:
        DataError: it is none.
    """
    try:
        return _KINDS[method].validate_json(text, strict=True)
    except ValidationError as error:
        raise DataError(
            f"answer of a publisher to {method!r}",
            got=str(error.errors()[0]["msg"]),
            allowed="answers of this version",
            remedy="Run both with the same version.",
        ) from None
