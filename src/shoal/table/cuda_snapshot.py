"""Rows of a GPU shard as they were at a cut, read by hash range while training waits."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from types import TracebackType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.errors import InputError, describe
from shoal.kernels.transfer import retire, sent
from shoal.placement import hash_ids, sort_key
from shoal.table import checks, scalars
from shoal.table.changes import Cursor
from shoal.table.cuda_changes import CudaChanges, Span
from shoal.table.cuda_core import drawn_incarnation
from shoal.table.device_export import sorted_handles
from shoal.table.row_values import RowChunk
from shoal.table.snapshot import HASHES, check_bits, check_range

__all__ = ["CudaSnapshot", "CudaSnapshots"]

_RECORDS = 1 << 20  # of deletions, looked up at a time
_NO_IDS = torch.empty(0, dtype=torch.int64)
_FULL = "Take a full snapshot: since=None."
_ALL = (1 << 32) - 1  # no row is stamped later


class CudaSnapshots(CudaChanges):
    """Snapshots of a `CudaShard`, and the way back into a saved life."""

    def snapshot(self, since: Cursor | None = None) -> CudaSnapshot:
        """Make a cut and keep the rows as they are: verbs that change them raise until `close`.

        Raises:
            InputError: another snapshot is open, or `since` is of another incarnation or older
                than the deletions that are kept: take a full one.
        """
        with self._turn():
            if self._open_snapshot() is not None:
                allowed = "one snapshot of a shard at a time"
                raise _refused("another one is open", allowed, "Close the other one first.")
            self._settled()
            self._deletions.drain()
            span, deleted = (0, self._epoch), [_NO_IDS] * len(self._specs)
            if since is not None:
                self._check_since(since)
                span = (since.from_epoch, self._epoch)
                deleted = self._deleted_in(span)
            self.cut()
            if not self._deletions.kept:
                self._keep_deletions()
            made = CudaSnapshot(self, span, deleted)
            self._snapshot = weakref.ref(made)
            return made

    def _check_since(self, since: Cursor) -> None:
        if since.incarnation != self._incarnation:
            raise _refused(str(since), "a cursor of the shard's incarnation", _FULL)
        known = self._deletions.kept and since.from_epoch >= self._deletions.log.floor
        if not known or since.from_epoch >= self._epoch:
            raise _refused(str(since), "a closed epoch from which on deletions are kept", _FULL)

    def resume(self, epoch: int) -> Cursor:
        """After a load: close all epochs up to `epoch` and keep deletions from here on.

        Raises:
            InputError: an epoch below one that a row is stamped with, or outside [0, 2^32 - 2];
                or a snapshot is open.
        """
        remedy = "Pass the epoch that the loaded rows were saved at."
        scalars.whole("epoch to resume at", epoch, 0, scalars.LAST_VERSION, remedy=remedy)
        with self._turn(changing=True):
            self._settled()
            later = self._changed(self._whole(range(len(self._specs))), (epoch, _ALL), 1)[0]
            if any(len(handles_R) for handles_R in later):
                allowed = "at least the version of every row"
                raise InputError(
                    describe("epoch to resume at", got=epoch, allowed=allowed, remedy=remedy)
                )
            self._epoch = max(self._epoch, epoch + 1)
            self._incarnation = drawn_incarnation()
            # Whoever resumes holds what is here now: deletions of before are none of its concern.
            self._deletions.start(epoch)
            return Cursor(self._incarnation, epoch, epoch, 0)

    def _whole(self, tables: Sequence[int]) -> list[Span]:
        sizes = self._handed_out_K
        return [Span(k, 0, int(sizes[k])) for k in tables if sizes[k] > 0]

    def _order_of(self, table: int, epochs: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Keys and handles of the rows of a table stamped in a span of epochs, by hash."""
        parts = self._changed(self._whole([table]), epochs)[0]
        handles_R = parts[0] if parts else torch.empty(0, dtype=torch.int32, device=self._device)
        return sorted_handles(self._layout, handles_R, self._specs[table].hash_name)

    def _deleted_in(self, epochs: tuple[int, int]) -> list[Tensor]:
        """Ids of each table deleted in a span of epochs that have no row, by hash: int64 [U]."""
        log = self._deletions.log
        at, stop = (log.after(epoch) for epoch in epochs)
        parts: list[list[NDArray[np.int64]]] = [[] for _ in self._specs]
        while at < stop:
            records_R = log.read(at, min(stop - at, _RECORDS))
            at += len(records_R)
            records_R = records_R[self._lack_rows(records_R)]
            for k in np.unique(records_R["table"]).tolist():
                parts[k].append(records_R["id"][records_R["table"] == k])
        return [
            _by_hash(spec.hash_name, np.unique(np.concatenate(ids))) if ids else _NO_IDS
            for spec, ids in zip(self._specs, parts, strict=True)
        ]


class CudaSnapshot:
    """See `shoal.table.snapshot.Snapshot`; not concurrent.

    The device holds 12 bytes a row of the table read last; the host two pieces beside what is
    returned. Ends with this object at the latest.

    Args:
        shard: whose rows.
        epochs: since and epoch; rows stamped in `(since, epoch]` are in it.
        deleted: of each table, the ids that went in that span.
    """

    def __init__(
        self, shard: CudaSnapshots, epochs: tuple[int, int], deleted: Sequence[Tensor]
    ) -> None:
        self._shard = shard
        self._since, self._epoch = epochs
        self._deleted = tuple(deleted)
        self._table = -1
        self._order: tuple[Tensor, Tensor] | None = None
        self._open = True

    @property
    def epoch(self) -> int:
        """The closed epoch it shows."""
        return self._epoch

    @property
    def since(self) -> int:
        """Rows stamped in `(since, epoch]` are in it; 0: all rows."""
        return self._since

    @property
    def concurrent(self) -> bool:
        """False: verbs that change rows raise before `close`."""
        return False

    def histogram(self, table: int, bits: int) -> Tensor:
        """Rows by the top `bits` of their hash: int64 [2^bits] on the CPU, bits in [0, 20].

        Raises:
            InputError: bits outside that range, or the snapshot is closed.
        """
        check_bits(bits)
        shard = self._shard
        with shard._turn():
            keys_R, _ = self._sorted(table)
            firsts = np.arange(1 << bits, dtype=np.uint64)
            firsts = (firsts << np.uint64(64 - bits) if bits else firsts) ^ np.uint64(1 << 63)
            edges = sent(torch.from_numpy(firsts.view(np.int64)), keys_R.device)
            starts = torch.searchsorted(keys_R, edges)
            ends = torch.cat([starts[1:], starts.new_tensor([len(keys_R)])])
            return (ends - starts).cpu()

    def read(self, table: int, start: int, stop: int) -> RowChunk:
        """Rows with `start <= h < stop`, ordered by h, on the CPU.

        Raises:
            InputError: not 0 <= start <= stop <= HASHES, or the snapshot is closed.
        """
        check_range(start, stop)
        shard = self._shard
        with shard._rows_at_home():
            keys_R, handles_R = self._sorted(table)
            low, high = (_place(keys_R, bound) for bound in (start, stop))
            return shard._rows_of_table(table, handles_R[low:high])

    def deleted(self, table: int) -> Tensor:
        """Ids int64 [U] on the CPU, by h, deleted in `(since, epoch]` and without a row.

        Raises:
            InputError: the snapshot is closed.
        """
        self._check(table)
        return self._deleted[table]

    def give_way(self) -> None:
        """Nothing to leave: a read has one thread."""

    def close(self) -> None:
        """Let rows change again. May be called twice."""
        with self._shard._turn():
            if self._open:
                self._open = False
                self._forget()
                self._shard._snapshot = None

    def __enter__(self) -> CudaSnapshot:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _check(self, table: int) -> None:
        checks.table_index(table, len(self._shard.specs))
        if not self._open:
            raise _refused("a closed one", "an open one", "Read before close(), or take another.")

    def _sorted(self, table: int) -> tuple[Tensor, Tensor]:
        self._check(table)
        if self._order is None or self._table != table:
            self._forget()
            self._order = self._shard._order_of(table, (self._since, self._epoch))
            self._table = table
        return self._order

    def _forget(self) -> None:
        if self._order is not None:
            retire(*self._order)
        self._order = None


def _place(keys_R: Tensor, bound: int) -> int:
    """How many keys lie below the key of an unsigned hash; waits for the device."""
    if bound in (0, HASHES):
        return 0 if bound == 0 else len(keys_R)
    return int(torch.searchsorted(keys_R, keys_R.new_tensor([bound - (1 << 63)])))


def _by_hash(hashed_as: str, ids: NDArray[np.int64]) -> Tensor:
    ids_U = torch.from_numpy(ids)
    return ids_U[sort_key(hash_ids(hashed_as, ids_U)).argsort()]


def _refused(got: str, allowed: str, remedy: str) -> InputError:
    return InputError(describe("snapshot", got=got, allowed=allowed, remedy=remedy))
