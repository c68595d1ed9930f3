"""Rows of a shard as they were at a cut, read by hash range while training goes on or waits."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

from torch import Tensor

from shoal.table import scalars
from shoal.table.row_values import RowChunk

__all__ = [
    "BUFFER_BYTES",
    "HASHES",
    "MOST_BITS",
    "Snapshot",
    "SnapshotStats",
    "check_bits",
    "check_buffer",
    "check_range",
]

HASHES = 1 << 64  # hashes are in [0, HASHES)
MOST_BITS = 20  # of a histogram
BUFFER_BYTES = 64 << 20  # memory for rows that verbs change, before they go to a file


@dataclass(frozen=True, slots=True)
class SnapshotStats:
    """What keeping the rows of a cut has cost so far.

    Args:
        copied_rows: rows copied before a verb changed them.
        spilled_bytes: bytes of such rows that went to the temporary file.
        waited_s: seconds that verbs waited for that file.
    """

    copied_rows: int
    spilled_bytes: int
    waited_s: float


def check_buffer(buffer_bytes: int) -> None:
    """Check the memory for copied rows.

    Raises:
        DTypeError: not an int.
        InputError: outside 0..2^40.
    """
    remedy = "Leave it out for 64 MiB."
    scalars.whole("buffer_bytes of a snapshot", buffer_bytes, 0, 1 << 40, remedy=remedy)


def check_range(start: int, stop: int) -> None:
    """Check a range of hashes, 0 <= start <= stop <= HASHES.

    Raises:
        DTypeError: not ints.
        InputError: outside, or out of order.
    """
    remedy = "Cut [0, 2^64) into ranges as Python ints."
    scalars.whole("stop of a range of hashes", stop, 0, HASHES, remedy=remedy)
    scalars.whole("start of a range of hashes", start, 0, stop, remedy=remedy)


def check_bits(bits: int) -> None:
    """Check the bits of a histogram, 0..MOST_BITS.

    Raises:
        DTypeError: not an int.
        InputError: outside.
    """
    remedy = f"A histogram has at most 2^{MOST_BITS} bins."
    scalars.whole("bits of a histogram", bits, 0, MOST_BITS, remedy=remedy)


class Snapshot(Protocol):
    """The rows that a shard had when `Shard.snapshot` closed an epoch.

    Between its making and `close` each row is kept as it was at the cut, whatever later verbs do
    to it: it is read here, or copied away by the first verb that changes it. Copies that do not
    fit the memory set aside for them go to an unlinked file. One thread reads; others train.

    Attributes:
        epoch: the closed epoch it shows.
        since: rows stamped in `(since, epoch]` are in it; 0: all rows.
        concurrent: whether verbs that change rows may be called before `close`. Where not, they
            raise `InputError`; reading verbs never do.
    """

    @property
    def epoch(self) -> int: ...
    @property
    def since(self) -> int: ...
    @property
    def concurrent(self) -> bool: ...

    def histogram(self, table: int, bits: int) -> Tensor:
        """Rows by the top `bits` of their hash: int64 [2^bits], bits in [0, 20]."""
        ...

    def read(self, table: int, start: int, stop: int) -> RowChunk:
        """Rows with `start <= h < stop`, ordered by h; 0 <= start <= stop <= HASHES.

        Ranges may be asked for in any order, each as often as wanted; ascending order is quick.
        """
        ...

    def deleted(self, table: int) -> Tensor:
        """Ids int64 [U], ordered by h, deleted in `(since, epoch]` and without a row at `epoch`."""
        ...

    def give_way(self) -> None:
        """Leave cores to training: later reads use the calling thread only, where they had more."""
        ...

    def close(self) -> None:
        """Forget it; nothing is copied from now on. May be called twice."""
        ...

    def __enter__(self) -> Snapshot: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...
