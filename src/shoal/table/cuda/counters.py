"""The counters of a GPU shard on the host: read when they have arrived, not waited for."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.kernels import tables as words
from shoal.kernels.initial_values import settle
from shoal.kernels.tables import ShardLayout

Counts = NDArray[np.int64]

# Copies on their way at most; a host further ahead waits for the oldest. Few, for every call under
# way loosens what the host can prove, and a device with three calls to do has no gap to fill.
_IN_FLIGHT = 4


@dataclass(slots=True)
class _Copy:
    host_KC: Tensor
    values_KC: Counts
    event: torch.cuda.Event | None
    launched_K: Counts
    erasing: int = 0
    taken: int = 0


class CounterReader:
    """What the host knows of `counters_KC`, and what it may conclude from it.

    Attributes:
        rows_K: rows in use when the latest counters left the device.
        known_KC: the latest counters that have arrived, int64 [K, COUNT_WORDS].
        launched_K: ids handed to inserting launches so far.
        erasing: rows that erasing launches so far may have erased, all tables'.
    """

    def __init__(self, counters_KC: Tensor) -> None:
        tables, words = counters_KC.shape
        self._device = counters_KC.device
        self.known_KC: Counts = np.zeros((tables, words), dtype=np.int64)
        self.rows_K: Counts = np.zeros(tables, dtype=np.int64)
        self.launched_K: Counts = np.zeros(tables, dtype=np.int64)
        self.erasing = 0
        self._known_erasing = 0
        self._known_launched_K: Counts = np.zeros(tables, dtype=np.int64)
        self._rebuilt_K: Counts = np.zeros(tables, dtype=np.int64)
        self._sent = 0
        self._rebuilt = 0
        self._flying: deque[_Copy] = deque()
        self._spare = [self._buffer(tables, words) for _ in range(_IN_FLIGHT)]

    def _buffer(self, tables: int, words: int) -> _Copy:
        pinned = self._device.type == "cuda"
        host_KC = torch.zeros(tables, words, dtype=torch.int64, pin_memory=pinned, device="cpu")
        event = torch.cuda.Event() if pinned else None  # type: ignore[no-untyped-call]
        return _Copy(host_KC, host_KC.numpy(), event, np.zeros(tables, dtype=np.int64))

    @property
    def flying_K(self) -> Counts:
        """Ids launched since the latest counters left: inserts not known yet are among them."""
        return self.launched_K - self._known_launched_K

    @property
    def rows_bound_K(self) -> Counts:
        """No more rows than this are in use."""
        return self.rows_K + self.flying_K

    @property
    def used_K(self) -> Counts:
        """Index slots taken, by rows or by erased marks, when the latest counters left."""
        used: Counts = self.rows_K + self.known_KC[:, words.COUNT_ERASED]
        return used

    @property
    def erased(self) -> int:
        """Rows ever erased, all tables', when the latest counters left the device."""
        return int(self.known_KC[:, words.COUNT_EVICTED].sum())

    @property
    def erased_bound(self) -> int:
        """No more rows than this were ever erased."""
        return self.erased + self.erasing - self._known_erasing

    def send(self, layout: ShardLayout, stream: torch.cuda.Stream | None = None) -> None:
        """Mark all rows handed out as ready, and send the counters to the host.

        stream: the present one, if the caller has it at hand.
        """
        if not self._spare:
            self._arrive(wait=True)
        copy = self._spare.pop()
        settle(layout, copy.host_KC)
        self._sent += 1
        copy.taken = self._sent
        copy.launched_K[:] = self.launched_K
        copy.erasing = self.erasing
        if copy.event is not None:
            copy.event.record(stream)
        self._flying.append(copy)

    def poll(self) -> None:
        """Take in the counters that have arrived."""
        while self._flying and self._arrive(wait=False):
            pass

    def wait(self, *, but: int = 0) -> None:
        """Wait for all counters that were sent, or all but the last few."""
        while len(self._flying) > but:
            self._arrive(wait=True)

    def rebuilt(self, table: int) -> None:
        """A table's index holds no erased marks from here on; older counters still count them."""
        self._rebuilt_K[table] = self._rebuilt = self._sent
        self.known_KC[table, words.COUNT_ERASED] = 0

    def _arrive(self, *, wait: bool) -> bool:
        copy = self._flying[0]
        if copy.event is not None:
            if wait:
                copy.event.synchronize()
            elif not copy.event.query():  # type: ignore[no-untyped-call]
                return False
        self._flying.popleft()
        known = self.known_KC
        known[:] = copy.values_KC
        self.rows_K = known[:, words.COUNT_FRESH] + known[:, words.COUNT_ISSUED]
        self.rows_K -= known[:, words.COUNT_FREE]
        self._known_launched_K[:] = copy.launched_K
        self._known_erasing = copy.erasing
        if self._rebuilt >= copy.taken:
            known[self._rebuilt_K >= copy.taken, words.COUNT_ERASED] = 0
        self._spare.append(copy)
        return True
