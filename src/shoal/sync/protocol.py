"""What replicas ask of publishers, how long they wait, and what publishers answer."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator
from typing_extensions import TypedDict

from shoal.errors import DataError
from shoal.placement import BUCKETS
from shoal.sync.pages import Share

TRIES = 5  # of a replica, for a page
LONGEST_PAUSE_S = 5.0  # of a replica, until it asks again after a question that failed
MOST_REPLY_S = 3600.0

_Whole = Annotated[int, Field(ge=0, lt=1 << 63)]
_Step = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]
_Seconds = Annotated[float, Field(allow_inf_nan=False)]


class Ask(BaseModel):
    """What a replica asks.

    Args:
        method: "hello": tables, rank and number of ranks; "after": segments after a version;
            "page": one of a segment; "pass": start a pass over all rows; "next": its next page;
            "newest": versions of rows and dense weights, of who wants no rows; "dense": tensors;
            "goodbye": it asks no more.
        incarnation, version: what the replica has.
        checkpoint: id of the one that it has loaded, in place of both.
        share, of: which rows it wants: part `share` of `of` of the hashes.
        number, page: of a segment or pass, and of its page; of "after" and "newest": of its dense
            weights.
        replica: who asks. It has one pass at a time.
        reply_s: how long it waits for a reply.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    method: Literal["hello", "after", "newest", "page", "pass", "next", "dense", "goodbye"]
    incarnation: _Whole = 0
    version: _Whole = 0
    number: _Whole = 0
    page: _Whole = 0
    replica: Annotated[str, Field(max_length=100)] = ""
    checkpoint: Annotated[str, Field(max_length=100)] = ""
    share: Annotated[int, Field(ge=0, lt=BUCKETS)] = 0
    of: Annotated[int, Field(ge=1, le=BUCKETS)] = 1
    reply_s: Annotated[float, Field(ge=0, le=MOST_REPLY_S)] = 10.0

    @model_validator(mode="after")
    def _in_range(self) -> Ask:
        if self.share >= self.of:
            raise ValueError(f"share {self.share} of {self.of}")
        return self

    @property
    def rows(self) -> Share:
        """Which rows are wanted."""
        return Share(self.share, self.of)

    def has(self, incarnation: int, version: int, dense: int) -> bool:
        """Whether who asks "after" has these."""
        current = self.incarnation == incarnation and self.version >= version
        return current and self.number >= dense


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
