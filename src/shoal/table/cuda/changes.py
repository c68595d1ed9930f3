"""Epochs of a GPU shard, and its log of deletions."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from shoal.kernels.launch import sent
from shoal.kernels.tables import COUNT_FREE, COUNT_FRESH, COUNT_ISSUED, CallGroups
from shoal.table import native, shard
from shoal.table.cuda.counters import Counts
from shoal.table.cuda.deletions import Records
from shoal.table.cuda.upkeep import CudaUpkeep
from shoal.table.values import released


class CudaChanges(CudaUpkeep):
    """Epochs of a `CudaShard`; all of it waits for the device, but for `cut`."""

    @property
    def incarnation(self) -> int:
        """Whose cursors are good; see `shoal.table.shard.Shard`."""
        with self._lock:
            return self._incarnation

    def cut(self) -> int:
        """Close the current epoch and open the next; returns the closed one.

        Raises:
            InputError: the last of 2^32 - 2 epochs is open.
        """
        with self._turn():
            if self._epoch > shard.LAST_VERSION:
                raise native.last_epoch()
            self._epoch += 1
            return self._epoch - 1

    def release(self, epoch: int | None) -> None:
        """Forget deletions up to `epoch`; None forgets all and keeps none until a snapshot.

        Raises:
            InputError: not an int in [0, 2^32).
        """
        closed = None if epoch is None else released(epoch)
        with self._turn():
            if closed is None:
                self._deletions.stop()
                return
            self._deletions.release(min(closed, self._epoch - 1))

    def _lack_rows(self, records_R: Records) -> NDArray[np.bool_]:
        """Which of these deletions' ids have no row now, bool [R]; waits for the device."""
        if not len(records_R):
            return np.zeros(0, dtype=np.bool_)
        order_R = np.argsort(records_R["table"], kind="stable")
        tables, sizes = np.unique(records_R["table"], return_counts=True)
        call = CallGroups(
            sent(torch.from_numpy(records_R["id"][order_R].copy()), self._device),
            sent(torch.from_numpy(np.concatenate([[0], np.cumsum(sizes)])), self._device),
            sent(torch.from_numpy(tables.astype(np.int32)), self._device),
        )
        lacking = np.empty(len(records_R), dtype=np.bool_)
        lacking[order_R] = ~self._probe(call)[1].cpu().numpy()
        return lacking

    @property
    def _handed_out_K(self) -> Counts:
        """Rows that each table has handed out since it was empty; counters have arrived."""
        known_KC = self._memory.counters.known_KC
        more_K = np.maximum(known_KC[:, COUNT_ISSUED] - known_KC[:, COUNT_FREE], 0)
        handed_K: Counts = known_KC[:, COUNT_FRESH] + more_K
        return handed_K
