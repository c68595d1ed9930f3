"""Rows, admission counters and figures as values, and what changed in a shard since a cursor."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from torch import Tensor

from shoal.errors import InputError


@dataclass(frozen=True, slots=True)
class Entry:
    """One row in full, for debugging and tests: weights [D], state [S] (float32/64)."""

    id: int
    weights: Tensor
    state: Tensor
    version: int
    last_seen_s: int
    count: int


@dataclass(frozen=True, slots=True)
class RowChunk:
    """Rows of one table, ordered by their hash: the canonical unit of export and load.

    ids [R] int64, weights [R, D] in the row dtype, state [R, S] float32/64, versions [R] int64,
    last_seen_s [R] int64, counts [R] int64.
    """

    table: str
    ids: Tensor
    weights: Tensor
    state: Tensor
    versions: Tensor
    last_seen_s: Tensor
    counts: Tensor

    def __reduce__(self) -> tuple[type[RowChunk], tuple[str | Tensor, ...]]:
        # Columns may share one block of memory, which torch.save refuses and pickle repeats.
        columns = (self.ids, self.weights, self.state, self.versions, self.last_seen_s, self.counts)
        return RowChunk, (self.table, *(column.clone() for column in columns))


@dataclass(frozen=True, slots=True)
class AdmissionState:
    """Sights of ids that have no row: exact pairs, or the cells of a sketch.

    ids [P] int64 and counts [P] int64 (empty for a sketch); cells: uint32, little-endian,
    row after row (empty when exact).
    """

    ids: Tensor
    counts: Tensor
    cells: bytes


@dataclass(frozen=True, slots=True)
class TableStats:
    """Counters of one table. Bytes are resident bytes the shard allocated for it.

    on_host: its weights and state are in host memory though the shard is on a GPU.
    """

    name: str
    rows: int
    bytes_total: int
    bytes_weights: int
    bytes_state: int
    bytes_metadata: int
    bytes_index: int
    index_load: float
    inserted: int
    refused: int
    evicted: int
    nonfinite_skipped: int
    on_host: bool = False


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
                    f"{name} of a cursor",
                    got=value,
                    allowed=f"an int in [0, {limit})",
                    remedy="Use a cursor that `changes` returned, or Cursor().",
                )
        if self.from_epoch > self.to_epoch:
            raise InputError(
                "epochs of a cursor",
                got=f"from_epoch={self.from_epoch}, to_epoch={self.to_epoch}",
                allowed="from_epoch <= to_epoch",
                remedy="Use a cursor that `changes` returned, or Cursor().",
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
        "JSON of a cursor",
        got=text[:200],
        allowed=f"an object of {', '.join(_INT_LIMITS)}",
        remedy="Hand in what `Cursor.to_json` returned.",
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
            "limit of a page of changes",
            got=limit,
            allowed="an int in [1, 2^31)",
            remedy="Ask for as many rows as fit the buffer they go to.",
        )
    return limit


def not_closed(cursor: Cursor) -> InputError:
    """Why a cursor cannot be served whose `to_epoch` no cut has closed."""
    return InputError(
        "to_epoch of a cursor",
        got=cursor.to_epoch,
        allowed="an epoch that a cut has closed",
        remedy="Call cut() first.",
    )


def released(epoch: int) -> int:
    """The epoch to release, checked.

    Raises:
        InputError: not an int in [0, 2^32).
    """
    if type(epoch) is not int or not 0 <= epoch < 1 << 32:
        raise InputError(
            "epoch to release",
            got=epoch,
            allowed="an int in [0, 2^32), or None",
            remedy="Pass the smallest from_epoch of all consumers' cursors.",
        )
    return epoch
