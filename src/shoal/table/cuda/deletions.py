"""Ids that lost their rows, in order: logged on the device, kept on the host or in files."""

from __future__ import annotations

import bisect
import os
import tempfile
import weakref
from collections import deque
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.kernels.history import LOG_WORDS, log_deleted
from shoal.kernels.launch import retire
from shoal.kernels.tables import ShardLayout
from shoal.table.cuda.counters import CounterReader

RECORD = np.dtype([("id", "<i8"), ("epoch", "<u4"), ("table", "<u4")])
"""As `shoal.kernels.history` writes one."""
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


_ROOM = 1 << 16  # records of the buffer at least
# Erases that the buffer holds whatever they drop: a host that is a few calls ahead knows of more
# only that they may have dropped as many as they may.
_ERASES = 8
_IN_FLIGHT = 4  # buffers on their way at most; a host further ahead waits for the oldest


@dataclass(slots=True)
class _Sent:
    host_L: Tensor
    room: int
    arrived: torch.cuda.Event | None


class DeviceDeletions:
    """Not thread-safe.

    Args:
        counters: of the shard; they tell how many rows were erased.
        device: the shard's.

    Attributes:
        log: what has arrived; complete after `drain`.
    """

    def __init__(self, counters: CounterReader, device: torch.device) -> None:
        self.log = DeletionLog()
        self._counters = counters
        self._device = device
        self._buffer_L: Tensor | None = None
        self._room = 0
        self._erased_before = 0  # rows erased, at least, when the buffer was last empty
        self._flying: deque[_Sent] = deque()

    @property
    def kept(self) -> bool:
        """Whether deletions are logged."""
        return self.log.open and not self.log.broken

    def start(self, floor: int) -> None:
        """Keep deletions from here on; `floor` is the last closed epoch."""
        self.stop()
        self.log.start(floor)

    def stop(self) -> None:
        """Forget all deletions and keep no more."""
        if self._buffer_L is not None:
            retire(self._buffer_L)
        self._buffer_L, self._room = None, 0
        # What is on its way still needs its memory, which torch keeps until it has arrived.
        self._flying.clear()
        self.log.stop()

    def record(self, layout: ShardLayout, handles_M: Tensor, size_1: Tensor, epoch: int) -> None:
        """Log rows that are about to be erased; they are no more than M."""
        most = handles_M.numel()
        if self.kept and most:
            try:
                self._make_room(most)
            except RuntimeError:  # no memory on the device, or none to lock
                # A deletion must not fail for want of a record of it.
                self.log.broken = True
            else:
                assert self._buffer_L is not None
                log_deleted(layout, handles_M, size_1, self._buffer_L, epoch)
        self._counters.erasing += most

    def _used(self) -> int:
        """No more records than this are in the buffer."""
        return min(self._counters.erased_bound - self._erased_before, self._room)

    def _make_room(self, most: int) -> None:
        if self._buffer_L is not None and self._used() + most <= self._room:
            return
        self._send()
        if most > self._room:
            # The buffer is empty, so that nothing is lost if this fails.
            room = max(_ROOM, _ERASES * most)
            longer_L = torch.empty(1 + LOG_WORDS * room, dtype=torch.int64, device=self._device)
            longer_L[:1].zero_()
            if self._buffer_L is not None:
                retire(self._buffer_L)
            self._buffer_L, self._room = longer_L, room
        self._hear(but=_IN_FLIGHT)

    def _send(self) -> None:
        """Send what the buffer may hold to the host, and have it be empty."""
        buffer_L, used = self._buffer_L, self._used()
        self._erased_before = self._counters.erased
        if buffer_L is None or used <= 0:
            return
        filled_L = buffer_L[: 1 + LOG_WORDS * used]
        if self._device.type == "cuda":
            host_L = torch.empty(filled_L.shape, dtype=torch.int64, pin_memory=True, device="cpu")
            host_L.copy_(filled_L, non_blocking=True)
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record(torch.cuda.current_stream(self._device))
            self._flying.append(_Sent(host_L, used, arrived))
        else:
            self._flying.append(_Sent(filled_L.clone(), used, None))
        buffer_L[:1].zero_()

    def drain(self) -> None:
        """Have every deletion so far in the log; waits for the device."""
        if self.kept:
            self._send()
            self._hear(but=0)

    def _hear(self, *, but: int) -> None:
        """Log what has arrived, and wait until no more than so many buffers are on their way."""
        while self._flying:
            sent = self._flying[0]
            if sent.arrived is not None:
                if len(self._flying) > but:
                    sent.arrived.synchronize()
                elif not sent.arrived.query():  # type: ignore[no-untyped-call]
                    return
            self._flying.popleft()
            self._take(sent)

    def _take(self, sent: _Sent) -> None:
        words_L = sent.host_L.numpy()
        count = int(words_L[0])
        if count > sent.room:
            self.log.broken = True
            return
        self.log.append(words_L[1 : 1 + LOG_WORDS * count].copy().view(RECORD))
