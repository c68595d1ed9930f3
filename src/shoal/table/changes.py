"""What changed in a shard since a cursor: the rows stamped in a span of epochs, and deleted ids.

A consumer (publisher, checkpoint) keeps a cursor of its own and asks for pages:

    shard.cut()
    page = shard.changes(cursor, limit)     # Cursor() at first
    ... page.restarted: drop what is held; then delete page.deleted; then upsert page.rows ...
    cursor = page.cursor                    # until page.done

A scan covers the epochs `(from_epoch, to_epoch]`, all of them closed by cuts. A row that changes
while the scan is under way gets a later stamp, and that consumer's next scan finds it; so after
`done` the consumer lacks nothing but what happened after `to_epoch`.

Deletions are kept from the first call of `changes` on, until `release(epoch)` says that no
consumer's `from_epoch` is below `epoch`: whoever knows all consumers calls it with the smallest.
A cursor that is below it all the same, or of another incarnation, takes a full pass.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from torch import Tensor

from shoal.errors import InputError, describe
from shoal.table.row_values import RowChunk

__all__ = [
    "ChangeFeed",
    "Changes",
    "Cursor",
    "DeletedIds",
    "checked_limit",
    "not_closed",
    "released",
]

_INT_LIMITS = {
    "incarnation": 1 << 63,
    "from_epoch": 1 << 32,
    "to_epoch": 1 << 32,
    "position": 1 << 63,
}


@dataclass(frozen=True, slots=True)
class Cursor:
    """How far one consumer is; `Cursor()` has seen nothing. Keep it only once its page is safe.

    Args:
        incarnation: the shard's when the cursor was made; another one means a full pass.
        from_epoch: rows and deletions up to this epoch are with the consumer; 0: none are.
        to_epoch: last epoch of the scan under way. Equal to `from_epoch` at position 0, the next
            call starts a scan up to the last closed epoch; a consumer that wants less sets it.
        position: where the scan goes on; 0 is its start. Means something to its shard only.

    Raises:
        InputError: a value is not an int of its range, or from_epoch is above to_epoch.
    """

    incarnation: int = 0
    from_epoch: int = 0
    to_epoch: int = 0
    position: int = 0

    def __post_init__(self) -> None:
        for name, limit in _INT_LIMITS.items():
            value = getattr(self, name)
            if type(value) is not int or not 0 <= value < limit:
                raise InputError(
                    describe(
                        f"{name} of a cursor",
                        got=value,
                        allowed=f"an int in [0, {limit})",
                        remedy="Use a cursor that `changes` returned, or Cursor().",
                    )
                )
        if self.from_epoch > self.to_epoch:
            raise InputError(
                describe(
                    "epochs of a cursor",
                    got=f"from_epoch={self.from_epoch}, to_epoch={self.to_epoch}",
                    allowed="from_epoch <= to_epoch",
                    remedy="Use a cursor that `changes` returned, or Cursor().",
                )
            )

    def to_json(self) -> str:
        """The cursor as a JSON object of its four fields."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Cursor:
        """Back from `to_json`.

        Raises:
            InputError: not a JSON object of exactly the four fields, or a bad value.
        """
        try:
            fields: Any = json.loads(text)
        except ValueError as error:
            raise _bad_json(text) from error
        if not isinstance(fields, dict) or fields.keys() != _INT_LIMITS.keys():
            raise _bad_json(text)
        return cls(**fields)


def _bad_json(text: str) -> InputError:
    return InputError(
        describe(
            "JSON of a cursor",
            got=text[:200],
            allowed=f"an object of {', '.join(_INT_LIMITS)}",
            remedy="Hand in what `Cursor.to_json` returned.",
        )
    )


@dataclass(frozen=True, slots=True)
class DeletedIds:
    """Ids of one table that have no row any more: int64 [U]. One may come again in a later page."""

    table: str
    ids: Tensor


@dataclass(frozen=True, slots=True)
class Changes:
    """One page of a scan: delete, then upsert. No id of a scan is in both.

    Args:
        rows: a chunk per table that has any, in table order; rows lie in the shard's order.
        deleted: per table that has any. An id that had a row again when it was read is left out:
            its row is in this consumer's next scan.
        cursor: for the next page, or after `done` for the next scan.
        done: the consumer now has everything up to `cursor.from_epoch`. A page may be short, even
            empty, before that.
        restarted: the first page of a full pass: drop everything held of this shard.
    """

    rows: tuple[RowChunk, ...]
    deleted: tuple[DeletedIds, ...]
    cursor: Cursor
    done: bool
    restarted: bool


class ChangeFeed(Protocol):
    """The verbs of a shard that tells what changed."""

    @property
    def incarnation(self) -> int:
        """Random, in [1, 2^63). New for a shard, at a load, and when deletions start to be kept.

        Cursors of another incarnation take a full pass.
        """
        ...

    def cut(self) -> int:
        """Close the current epoch and open the next; returns the closed one. Waits for writers."""
        ...

    def changes(self, cursor: Cursor, limit: int) -> Changes:
        """The next page: at most `limit` rows and deleted ids together.

        Raises:
            InputError: limit is below 1, or `to_epoch` is not closed yet.
        """
        ...

    def release(self, epoch: int | None) -> None:
        """Forget deletions up to `epoch`; None forgets all and keeps none until the next `changes`.

        An epoch not closed yet stands for the last closed one.
        """
        ...


def checked_limit(limit: int) -> int:
    """The size of a page, checked.

    Raises:
        InputError: not an int in [1, 2^31).
    """
    if type(limit) is not int or not 1 <= limit < 1 << 31:
        raise InputError(
            describe(
                "limit of a page of changes",
                got=limit,
                allowed="an int in [1, 2^31)",
                remedy="Ask for as many rows as fit the buffer they go to.",
            )
        )
    return limit


def not_closed(cursor: Cursor) -> InputError:
    """Why a cursor cannot be served whose `to_epoch` no cut has closed."""
    return InputError(
        describe(
            "to_epoch of a cursor",
            got=cursor.to_epoch,
            allowed="an epoch that a cut has closed",
            remedy="Call cut() first.",
        )
    )


def released(epoch: int) -> int:
    """The epoch to release, checked.

    Raises:
        InputError: not an int in [0, 2^32).
    """
    if type(epoch) is not int or not 0 <= epoch < 1 << 32:
        raise InputError(
            describe(
                "epoch to release",
                got=epoch,
                allowed="an int in [0, 2^32), or None",
                remedy="Pass the smallest from_epoch of all consumers' cursors.",
            )
        )
    return epoch
