"""Rows of a GPU shard as they were at a snapshot point, read by hash range during training."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.errors import InputError
from shoal.kernels.history import count_changed, still_stamped
from shoal.kernels.launch import retire, sent
from shoal.kernels.rows import read_ids, read_metadata, read_values
from shoal.placement import hash_ids, sort_key
from shoal.table import checks, native
from shoal.table import shard as scalars
from shoal.table.cuda.changes import CudaChanges
from shoal.table.cuda.core import drawn_incarnation
from shoal.table.cuda.export import Span, blocks_of_spans, gathered_rows
from shoal.table.cuda.images import DeviceImages, Mark, RowImages, Stamps, chosen, joined_by_hash
from shoal.table.shard import (
    BUFFER_BYTES,
    HASHES,
    SnapshotStats,
    check_bits,
    check_buffer,
    check_range,
    not_copied,
)
from shoal.table.values import Cursor, RowChunk

_RECORDS = 1 << 20  # of deletions, looked up at a time
_NO_IDS = torch.empty(0, dtype=torch.int64, device="cpu")
_ALL = (1 << 32) - 1  # no row is stamped later


class CudaSnapshots(CudaChanges):
    """Snapshots of a `CudaShard`, and the way back into a saved life."""

    def __reduce__(self) -> Any:
        raise not_copied("a snapshot")

    def snapshot(
        self, since: Cursor | None = None, *, buffer_bytes: int = BUFFER_BYTES
    ) -> CudaSnapshot:
        """Make a cut and keep the rows as they are at it, whatever verbs do to them later.

        buffer_bytes: host memory for rows that change meanwhile; the rest goes to a file.

        Raises:
            InputError: another snapshot is open, or `since` is of another incarnation or older
                than the deletions that are kept: take a full one.
        """
        check_buffer(buffer_bytes)
        with self._turn():
            if self._open_snapshot() is not None:
                raise native.second_snapshot()
            self._settled()
            self._deletions.drain()
            span, deleted = (0, self._epoch), [_NO_IDS] * len(self._specs)
            if since is not None:
                self._check_since(since)
                span = (since.epoch, self._epoch)
                deleted = self._deleted_in(span)
            every = range(len(self._specs))
            stamps = Stamps(self._layout, self._memory.columns_WC, self._whole(every), span)
            self.cut()
            if not self._deletions.kept:
                self._keep_deletions()
            forms = [self._forms[form] for form in self._form_of]
            kept = RowImages(self._specs, forms, span, buffer_bytes)
            made = CudaSnapshot(self, span, deleted, DeviceImages(stamps, kept, self._forms))
            self._snapshot = weakref.ref(made)
            return made

    def _check_since(self, since: Cursor) -> None:
        if since.incarnation != self._incarnation:
            raise native.snapshot_since(str(since), "a cursor of the shard's incarnation")
        known = self._deletions.kept and since.epoch >= self._deletions.floor
        if not known or since.epoch >= self._epoch:
            raise native.snapshot_since(str(since), native.KEPT_EPOCH)

    def resume(self, epoch: int) -> Cursor:
        """After a load: close all epochs up to `epoch` and keep deletions from here on.

        Raises:
            InputError: an epoch below one that a row is stamped with, or outside [0, 2^32 - 2].
        """
        remedy = "Pass the epoch that the loaded rows were saved at."
        scalars.whole("epoch to resume at", epoch, 0, scalars.LAST_VERSION, remedy=remedy)
        with self._turn():
            self._settled()
            spans = self._whole(range(len(self._specs)))
            spans_BW = blocks_of_spans(spans, self._device)
            if spans and int(count_changed(self._layout, spans_BW, epoch, _ALL)[-1]):
                allowed = "at least the version of every row"
                raise InputError("epoch to resume at", got=epoch, allowed=allowed, remedy=remedy)
            self._epoch = max(self._epoch, epoch + 1)
            self._incarnation = drawn_incarnation()
            # Whoever resumes holds what is here now: deletions of before are none of its concern.
            self._deletions.start(epoch)
            return Cursor(self._incarnation, epoch)

    def _whole(self, tables: Sequence[int]) -> list[Span]:
        sizes = self._handed_out_K
        return [Span(k, 0, int(sizes[k])) for k in tables if sizes[k] > 0]

    def _rows_still(self, table: int, handles_R: Tensor, images: DeviceImages) -> RowChunk:
        """Those of these rows that are as they were at the cut, in this order, on the CPU; the
        others are among the images.

        Other verbs wait for the launches of one piece at a time.
        """
        form, stamps = self._forms[self._form_of[table]], images.stamps
        marks: list[Mark] = []

        def gather(piece: slice) -> tuple[Tensor, Tensor, Tensor]:
            with self._aside():
                marks.append(images.mark())
                own_R = still_stamped(stamps.columns_WC, stamps.chunks, handles_R[piece])
                values = read_values(self._layout, form, self._where(own_R))
                metadata_4R = read_metadata(self._layout, own_R)
                stamps.retire()
            retire(*values, metadata_4R)
            return *values, metadata_4R

        chunk = gathered_rows(form, self._specs[table].name, len(handles_R), gather)
        for mark in marks[-1:]:
            mark.wait()
        # Version 0 says that a row has been kept, and changed maybe.
        still_R = chunk.versions != 0
        return chunk if bool(still_R.all()) else chosen(chunk, still_R)

    def _where(self, handles_R: Tensor) -> Tensor:
        """Where the rows of these handles are now: at home, but for a cache's rows."""
        return handles_R

    def _end(self, snapshot: CudaSnapshot) -> None:
        with self._lock:
            if self._open_snapshot() is snapshot:
                self._snapshot = None

    def _deleted_in(self, epochs: tuple[int, int]) -> list[Tensor]:
        """Ids of each table deleted in a span of epochs that have no row, by hash: int64 [U]."""
        log = self._deletions
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
    """See `shoal.table.shard.Snapshot`. Verbs that change rows go on while it is open.

    Each verb that changes rows makes one launch more. The device holds 4 bytes a row of the shard,
    12 a row of the table read last, two pieces of what is read, and rows on their way to the host;
    the host two pieces beside what is returned and the memory for rows that change. Ends with this
    object at the latest.

    Args:
        shard: whose rows.
        epochs: since and epoch; rows stamped in `(since, epoch]` are in it.
        deleted: of each table, the ids that went in that span.
        images: keeps rows that change.
    """

    def __init__(
        self,
        shard: CudaSnapshots,
        epochs: tuple[int, int],
        deleted: Sequence[Tensor],
        images: DeviceImages,
    ) -> None:
        self._shard = shard
        self._since, self._epoch = epochs
        self._deleted = tuple(deleted)
        self._images = images
        self._reading = threading.Lock()
        on_gpu = shard.device.type == "cuda"
        self._side = torch.cuda.Stream(shard.device) if on_gpu else None  # type: ignore[no-untyped-call]
        self._table = -1
        self._order: tuple[Tensor, Tensor] | None = None
        self._tick = 0
        self._open = True
        # Not when the process ends: a save that reads it is waited for then.
        weakref.finalize(self, images.close).atexit = False

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
        """True: verbs that change rows go on."""
        return True

    @property
    def images(self) -> DeviceImages:
        """What keeps rows that change."""
        return self._images

    @property
    def stats(self) -> SnapshotStats:
        """What it has cost so far, rows on their way to the host left out."""
        return self._images.stats

    def histogram(self, table: int, bits: int) -> Tensor:
        """Rows by the top `bits` of their hash: int64 [2^bits] on the CPU, bits in [0, 20].

        Raises:
            InputError: bits outside that range, or the snapshot is closed.
            CheckpointError: rows that changed could not be kept.
        """
        check_bits(bits)
        with self._reading:
            self._check(table)
            with self._beside():
                keys_R, _ = self._sorted(table)
                firsts = np.arange(1 << bits, dtype=np.uint64)
                firsts = (firsts << np.uint64(64 - bits) if bits else firsts) ^ np.uint64(1 << 63)
                edges = sent(torch.from_numpy(firsts.view(np.int64)), keys_R.device)
                starts = torch.searchsorted(keys_R, edges)
                ends = torch.cat([starts[1:], starts.new_tensor([len(keys_R)])])
                counts = (ends - starts).cpu()
            self._images.check()
            return counts + self._images.images.histogram(table, bits, self._tick)

    def read(self, table: int, start: int, stop: int) -> RowChunk:
        """Rows with `start <= h < stop`, ordered by h, on the CPU.

        Raises:
            InputError: not 0 <= start <= stop <= HASHES, or the snapshot is closed.
            CheckpointError: rows that changed could not be kept.
        """
        check_range(start, stop)
        images, shard = self._images, self._shard
        with self._reading:
            self._check(table)
            with self._beside():
                keys_R, handles_R = self._sorted(table)
                low, high = (_place(keys_R, bound) for bound in (start, stop))
                still = shard._rows_still(table, handles_R[low:high], images)
            images.check()
            kept = images.images.read(table, start, stop)
        return joined_by_hash(shard.specs[table].hash_name, still, kept)

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
        """Forget it; nothing is kept from now on. Waits for a read. May be called twice."""
        with self._reading:
            if self._open:
                self._open = False
                self._shard._end(self)
                self._forget()
                self._images.close()

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
            raise native.closed_snapshot()

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """Makes the reader's own stream the present one, so that training does not wait for it."""
        if self._side is None:
            yield
            return
        with torch.cuda.stream(self._side):
            yield

    def _sorted(self, table: int) -> tuple[Tensor, Tensor]:
        """Keys and handles, by hash, of a table's rows that were not kept when it was first asked
        for; those kept before have an earlier tick."""
        if self._order is None or self._table != table:
            self._forget()
            shard, images = self._shard, self._images
            with shard._aside():
                mark = images.mark()
                handles_R, rows_1 = images.stamps.listed(table)
                ids_R = read_ids(shard._layout, handles_R)
                images.stamps.retire()
            retire(handles_R, rows_1, ids_R)
            rows = int(rows_1)
            hashes_R = hash_ids(shard.specs[table].hash_name, ids_R[:rows])
            keys_R, order_R = sort_key(hashes_R).sort()
            self._order = keys_R, handles_R[:rows][order_R]
            # Rows are gathered on the shard's stream, which does not wait for this one.
            if self._side is not None:
                self._side.synchronize()
            self._table, self._tick = table, mark.wait()
        return self._order

    def _forget(self) -> None:
        if self._order is not None:
            with self._beside():
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
