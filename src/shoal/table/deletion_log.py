"""Ids that lost their rows, in the order they did: in memory and, beyond a bound, in files.

The core keeps a log of the same kind (`csrc/deletion_log.h`). A record of an id that has a row
again is still here; who reads asks the index.
"""

from __future__ import annotations

import bisect
import os
import tempfile
import weakref
from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["RECORD", "DeletionLog", "Records"]

RECORD = np.dtype([("id", "<i8"), ("epoch", "<u4"), ("table", "<u4")])
"""As `shoal.kernels.row_changes` writes one."""
Records = NDArray[np.void]

_IN_MEMORY = 1 << 16
_IN_FILE = 1 << 22


class _UnnamedFile:
    """A file without a name in $TMPDIR, or /tmp; gone with this object. Fails with OSError."""

    def __init__(self) -> None:
        descriptor, path = tempfile.mkstemp("", "shoal-deletions-", os.environ.get("TMPDIR"))
        weakref.finalize(self, os.close, descriptor)
        os.unlink(path)
        self._descriptor = descriptor

    def write(self, records: Records, at: int) -> None:
        left, offset = memoryview(records.tobytes()), at * RECORD.itemsize
        while left:
            wrote = os.pwrite(self._descriptor, left, offset)
            left, offset = left[wrote:], offset + wrote

    def read(self, at: int, n: int) -> Records:
        offset, end = at * RECORD.itemsize, (at + n) * RECORD.itemsize
        parts = []
        while offset < end:
            part = os.pread(self._descriptor, end - offset, offset)
            if not part:
                raise OSError("the log of deletions is shorter than what was written to it")
            parts.append(part)
            offset += len(part)
        return np.frombuffer(b"".join(parts), dtype=RECORD)


@dataclass(slots=True)
class _Spilled:
    """Records `first` to `first + n` in a file, which goes when all of them are released."""

    file: _UnnamedFile
    first: int
    n: int


class DeletionLog:
    """Not thread-safe.

    Attributes:
        open: whether deletions are kept.
        broken: memory or a file refused a record: readers must take everything anew.
        floor: every deletion after this epoch is here.
    """

    def __init__(self) -> None:
        self.open = False
        self.floor = 0
        self._empty()

    def _empty(self) -> None:
        self.broken = False
        self._first = 0  # number of the oldest record kept
        self._tail_at = 0  # number of the first record in memory
        self._tail: list[Records] = []
        self._tail_n = 0
        self._epochs: list[int] = []  # rising, and the number of the first record of each
        self._starts: list[int] = []
        self._files: deque[_Spilled] = deque()

    @property
    def end(self) -> int:
        """Number of the record to come."""
        return self._tail_at + self._tail_n

    def start(self, floor: int) -> None:
        """Keep deletions from here on; those of before are forgotten."""
        self._empty()
        self.open, self.floor = True, floor

    def stop(self) -> None:
        """Forget all deletions and keep no more."""
        self._empty()
        self.open = False

    def append(self, records: Records) -> None:
        """Add records, whose epochs do not fall; nothing while closed or broken."""
        if not self.open or self.broken or not len(records):
            return
        epochs_R = records["epoch"]
        for place in [0, *(np.flatnonzero(epochs_R[1:] != epochs_R[:-1]) + 1).tolist()]:
            if not self._epochs or self._epochs[-1] < int(epochs_R[place]):
                self._epochs.append(int(epochs_R[place]))
                self._starts.append(self.end + place)
        self._tail.append(records)
        self._tail_n += len(records)
        if self._tail_n >= _IN_MEMORY:
            # A deletion must not fail for want of a record of it: the shard turns to a new
            # incarnation instead.
            try:
                self._spill()
            except OSError:
                self._empty()
                self.broken = True

    def _spill(self) -> None:
        if not self._files or self._files[-1].n >= _IN_FILE:
            self._files.append(_Spilled(_UnnamedFile(), self._tail_at, 0))
        spilled = self._files[-1]
        spilled.file.write(np.concatenate(self._tail), spilled.n)
        spilled.n += self._tail_n
        self._tail_at += self._tail_n
        self._tail, self._tail_n = [], 0

    def release(self, epoch: int) -> None:
        """Drop records up to an epoch."""
        if not self.open or epoch <= self.floor:
            return
        self.floor = epoch
        self._first = self.after(epoch)
        gone = bisect.bisect_right(self._epochs, epoch)
        del self._epochs[:gone], self._starts[:gone]
        while self._files and self._files[0].first + self._files[0].n <= self._first:
            self._files.popleft()
        if self._first > self._tail_at:
            kept = np.concatenate(self._tail)[self._first - self._tail_at :].copy()
            self._tail, self._tail_n, self._tail_at = [kept], len(kept), self._first

    def after(self, epoch: int) -> int:
        """Number of the first record above an epoch."""
        place = bisect.bisect_right(self._epochs, epoch)
        return self._starts[place] if place < len(self._starts) else self.end

    def read(self, first: int, n: int) -> Records:
        """Records [first, first + n) that exist.

        Raises:
            OSError: the file fails.
        """
        first = max(first, self._first)
        stop = min(first + n, self.end)
        parts = []
        for spilled in self._files:
            low, high = max(first, spilled.first), min(stop, spilled.first + spilled.n)
            if low < high:
                parts.append(spilled.file.read(low - spilled.first, high - low))
        at = self._tail_at
        for records in self._tail:
            low, high = max(first - at, 0), min(stop - at, len(records))
            if low < high:
                parts.append(records[low:high])
            at += len(records)
        return np.concatenate(parts) if parts else np.empty(0, dtype=RECORD)
