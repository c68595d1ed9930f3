"""Ids that lost their rows, in order: logged on the device, kept on the host or in a file."""

from __future__ import annotations

from collections import deque

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal import _core
from shoal.kernels.host_copies import HostCopy, copy_to_host, retire
from shoal.kernels.row_changes import LOG_WORDS, log_deleted
from shoal.kernels.tables import ShardLayout
from shoal.table import native
from shoal.table.cuda.counters import CounterReader

RECORD = np.dtype([("id", "<i8"), ("version", "<u4"), ("table", "<u4")])
"""As `shoal.kernels.row_changes` writes one."""
Records = NDArray[np.void]

_ROOM = 1 << 16  # records of the buffer at least
# Erases that the buffer holds whatever they drop: a host that is a few calls ahead knows of more
# only that they may have dropped as many as they may.
_ERASES = 8
_IN_FLIGHT = 4  # buffers on their way at most; a host further ahead waits for the oldest


class DeviceDeletions:
    """Not thread-safe.

    Args:
        counters: of the shard; they count erased rows.
        device: the shard's.

    The core's log takes what has arrived: in memory, then in unnamed files in $TMPDIR. It is
    complete after `drain`.
    """

    def __init__(self, counters: CounterReader, device: torch.device) -> None:
        self._log = _core.DeletionLog()
        self._lost = False
        self._counters = counters
        self._device = device
        self._buffer_L: Tensor | None = None
        self._room = 0
        self._erased_before = 0  # rows erased, at least, when the buffer was last empty
        self._flying: deque[tuple[HostCopy, int]] = deque()  # and the records that there may be

    @property
    def open(self) -> bool:
        """Whether somebody wants deletions."""
        return bool(self._log.open)

    @property
    def kept(self) -> bool:
        """Whether they are logged: somebody wants them, and none was lost."""
        return bool(self._log.kept) and not self._lost

    @property
    def floor(self) -> int:
        """Every deletion after this version is logged."""
        return int(self._log.floor)

    def start(self, floor: int) -> None:
        """Keep deletions from here on; `floor` is the last closed version."""
        self.stop()
        self._log.start(floor)

    def stop(self) -> None:
        """Forget all deletions and keep no more."""
        if self._buffer_L is not None:
            retire(self._buffer_L)
        self._buffer_L, self._room = None, 0
        # What is on its way still needs its memory, which torch keeps until it has arrived.
        self._flying.clear()
        self._log.stop()
        self._lost = False

    def append(self, records: Records) -> None:
        """Log records that the host has, whose versions do not fall."""
        self._log.append(records.ctypes.data, len(records))

    def release(self, version: int | None, consumer: str) -> None:
        """Forget those that no consumer wants, since this one passed a version, or wants no more
        (None). Waits for the device.
        """
        if version is None:
            passed = self._log.leave(consumer)
            if passed is None:
                self.stop()
                return
        else:
            passed = self._log.hold(consumer, version)
        self.drain()
        self._log.release(passed)

    def bound(self) -> None:
        """Forget the oldest of too many, whoever wants them."""
        passed = self._log.excess()
        if passed is not None:
            self._log.release(passed)

    def after(self, version: int) -> int:
        """Number of the first record above a version."""
        return int(self._log.after(version))

    def read(self, first: int, n: int) -> Records:
        """Records [first, first + n) that are there.

        Raises:
            CheckpointError: the file fails.
        """
        records = np.empty(n, dtype=RECORD)
        return records[: native.kept(lambda: self._log.read(first, n, records.ctypes.data))]

    def record(self, layout: ShardLayout, handles_M: Tensor, size_1: Tensor, version: int) -> None:
        """Log rows that are about to be erased; they are no more than M."""
        most = handles_M.numel()
        if self.kept and most:
            try:
                self._make_room(most)
            except RuntimeError:  # no memory on the device, or none to lock
                # A deletion must not fail for want of a record of it.
                self._lost = True
            else:
                assert self._buffer_L is not None
                log_deleted(layout, handles_M, size_1, self._buffer_L, version)
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
        self._flying.append((copy_to_host(filled_L), used))
        buffer_L[:1].zero_()

    def drain(self) -> None:
        """Have every deletion so far in the log; waits for the device."""
        if self.kept:
            self._send()
            self._hear(but=0)

    def _hear(self, *, but: int) -> None:
        """Log what has arrived, and wait until no more than so many buffers are on their way."""
        while self._flying:
            sent, room = self._flying[0]
            if not sent.arrived(wait=len(self._flying) > but):
                return
            self._flying.popleft()
            words_L = sent.host.numpy()
            count = int(words_L[0])
            if count > room:
                self._lost = True
            else:
                self.append(words_L[1 : 1 + LOG_WORDS * count].view(RECORD))
