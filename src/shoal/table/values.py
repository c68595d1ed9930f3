"""Rows, admission counters, figures and cursors as values."""

from __future__ import annotations

from dataclasses import dataclass

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

    ids [R] int64, weights [R, D] in the row dtype (int8: `TableSpec.stored_width` columns), state
    [R, S] float32/64, versions [R] int64, last_seen_s [R] int64, counts [R] int64.
    """

    table: str
    ids: Tensor
    weights: Tensor
    state: Tensor
    versions: Tensor
    last_seen_s: Tensor
    counts: Tensor

    @property
    def columns(self) -> tuple[Tensor, ...]:
        """Ids, versions, times, counts, weights and state: the order of files and of the core."""
        whole = (self.ids, self.versions, self.last_seen_s, self.counts)
        return (*whole, self.weights, self.state)

    def __reduce__(self) -> tuple[type[RowChunk], tuple[str | Tensor, ...]]:
        # Columns may share one block of memory, which torch.save refuses and pickle repeats.
        columns = (self.ids, self.weights, self.state, self.versions, self.last_seen_s, self.counts)
        return RowChunk, (self.table, *(column.clone() for column in columns))


@dataclass(frozen=True, slots=True)
class AdmissionState:
    """Admission counts of ids that have no row: exact pairs, or the cells of a sketch.

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


@dataclass(frozen=True, slots=True)
class Cursor:
    """What one consumer of a shard holds: all rows and deletions up to a version.

    Args:
        incarnation: the shard's when that version was closed; in another one all rows are due.
        version: the last one the consumer has.

    Raises:
        InputError: a value is not an int of its range.
    """

    incarnation: int = 0
    version: int = 0

    def __post_init__(self) -> None:
        remedy = "Use the shard's incarnation and the version of a snapshot."
        _check_whole("incarnation of a cursor", self.incarnation, 1 << 63, remedy)
        _check_whole("version of a cursor", self.version, 1 << 32, remedy)


def released(version: int) -> int:
    """The version to release, checked.

    Raises:
        InputError: not an int in [0, 2^32).
    """
    remedy = "Pass the smallest version of all consumers' cursors, or None."
    _check_whole("version to release", version, 1 << 32, remedy)
    return version


def _check_whole(what: str, value: object, limit: int, remedy: str) -> None:
    if type(value) is not int or not 0 <= value < limit:
        raise InputError(what, got=value, allowed=f"an int in [0, {limit})", remedy=remedy)
