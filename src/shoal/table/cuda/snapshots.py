"""Versions of a GPU shard, and its rows at snapshot points, read by hash range during training."""

from __future__ import annotations

import secrets
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal import _core
from shoal.errors import InputError
from shoal.kernels import tables as words
from shoal.kernels.host_copies import retire, sent
from shoal.kernels.row_changes import count_changed
from shoal.kernels.rows import read_ids, read_metadata, read_values
from shoal.kernels.tables import CallGroups
from shoal.placement import hash_ids, sort_key
from shoal.table import native
from shoal.table import shard as scalars
from shoal.table.cuda.calls import ShardTables, probed
from shoal.table.cuda.deletions import RECORD, DeviceDeletions, Records
from shoal.table.cuda.export import Span, blocks_of_spans, gathered_rows
from shoal.table.cuda.host_rows import RowsOnHost
from shoal.table.cuda.memory import DeviceMemory
from shoal.table.cuda.side_stream import reader_stream
from shoal.table.cuda.snapshot_rows import DeviceImages, Mark, SnapshotRows, chosen, joined_by_hash
from shoal.table.cuda.turns import Turns
from shoal.table.shard import HASHES, Snapshot, SnapshotStats
from shoal.table.values import Cursor, RowChunk
from shoal.uncompiled import uncompiled

_RECORDS = 1 << 20  # of deletions, looked up at a time
_NO_IDS = torch.empty(0, dtype=torch.int64, device="cpu")
_ALL = (1 << 32) - 1  # no row is stamped later


class History:
    """Versions of a GPU shard: the deletions that are logged, the snapshots that are open. Methods
    are called in turns; a snapshot's reader is another thread.

    Args:
        tables, memory, turns: the shard's.
        host: where rows are on the host; else None.

    Attributes:
        version: the open one, which rows are stamped with.
        incarnation: whose cursors are good.
        deletions: the log.
    """

    def __init__(
        self, tables: ShardTables, memory: DeviceMemory, turns: Turns, host: RowsOnHost | None
    ) -> None:
        self.tables = tables
        self.memory = memory
        self.turns = turns
        self.version = 1
        self.incarnation = _drawn_incarnation()
        self.deletions = DeviceDeletions(memory.counters, tables.device)
        self._host = host
        self._snapshots: list[weakref.ref[CudaSnapshot]] = []

    def open_snapshots(self) -> list[CudaSnapshot]:
        """Those that are open, oldest first; one that nobody holds any more is none. What is in
        the list stays open: closing takes turns, too."""
        if not self._snapshots:
            return []
        found = [snapshot for ref in self._snapshots if (snapshot := ref()) is not None]
        if len(found) < len(self._snapshots):
            self._snapshots = [weakref.ref(snapshot) for snapshot in found]
        return found

    def keep(
        self,
        handles_M: Tensor,
        size_1: Tensor | None = None,
        *,
        forms: Sequence[int] | None = None,
    ) -> None:
        """Keep rows that are about to change, as they are, for open snapshots that need them.

        handles_M, size_1, forms: as `DeviceImages.keep` takes them.
        """
        if not self._snapshots or handles_M.numel() == 0:
            return
        snapshots = self.open_snapshots()
        payload_H = None if self._host is None else self._host.cache.payload_H()
        # One for all, but where rows were loaded since the first one was opened.
        for images in dict.fromkeys(snapshot.images for snapshot in snapshots):
            images.keep(self.memory.layout, handles_M, size_1, forms=forms, payload_H=payload_H)

    def deleted(self, handles_M: Tensor, size_1: Tensor) -> None:
        """Log rows that are about to leave the index."""
        self.deletions.record(self.memory.layout, handles_M, size_1, self.version)

    def close_version(self) -> int:
        """Close the open version; returns it.

        Raises:
            InputError: the last of 2^32 - 2 versions is open.
        """
        if self.version > scalars.LAST_VERSION:
            raise native.last_version()
        self.deletions.bound()
        self.version += 1
        return self.version - 1

    def release(self, version: int | None, consumer: str) -> None:
        """A consumer has deletions up to a version, or wants none (None); those that nobody wants
        are forgotten."""
        self.deletions.release(
            None if version is None else min(version, self.version - 1), consumer
        )

    def loaded(self, latest: int) -> None:
        """Rows came in with versions of an earlier life, which no cursor of this one covers.

        latest: of these; stamps to come must not lie before it.
        """
        self.incarnation = _drawn_incarnation()
        self.version = max(self.version, latest)
        for snapshot in self.open_snapshots():
            snapshot.images.shut = True
        if self.deletions.open:
            self.deletions.start(self.version - 1)

    def cleared(self, table: int, handles_R: Tensor) -> None:
        """All rows of a table are about to go: keep them, and log their ids piece by piece."""
        self.keep(handles_R, forms=(self.tables.form_of[table],))
        if not self.deletions.kept:
            return
        self.deletions.drain()
        for piece_R in torch.split(handles_R, _RECORDS):
            ids_R = read_ids(self.memory.layout, piece_R)
            records_R = np.empty(len(ids_R), dtype=RECORD)
            records_R["id"], records_R["version"] = ids_R.cpu().numpy(), self.version
            records_R["table"] = table
            self.deletions.append(records_R)

    def snapshot(self, since: Cursor | None, buffer_bytes: int) -> CudaSnapshot:
        """Set a snapshot point and keep its rows; counters are at hand.

        Raises:
            InputError: too many are open, or `since` cannot be served.
        """
        tables, memory = self.tables, self.memory
        others = self.open_snapshots()
        if len(others) >= _core.MOST_SNAPSHOTS:
            raise native.too_many_snapshots()
        self.deletions.drain()
        versions, deleted = (0, self.version), [_NO_IDS] * len(tables.specs)
        if since is not None:
            self._check_since(since)
            versions = (since.version, self.version)
            deleted = self._deleted_in(versions)
        self.close_version()
        if not self.deletions.kept:
            # Older cursors, for which there is no log, are invalid.
            self.incarnation = _drawn_incarnation()
            self.deletions.start(self.version - 1)
        images = others[-1].images if others else None
        # A step keeps rows before it knows their gradients. One that then leaves a row alone has
        # taken its stamp: a younger snapshot that stamped it again would show older ones two rows.
        skipped = int(memory.counters.known_KC[:, words.COUNT_NONFINITE].sum())
        if images is None or not images.joinable or images.skipped != skipped:
            images = DeviceImages(memory.layout, tables, skipped)
        spans, columns_WC = self._handed_out(), memory.columns_WC[:, : memory.chunks_ready]
        rows = images.join(memory.layout, columns_WC, spans, versions, buffer_bytes)
        made = CudaSnapshot(self, deleted, images, rows)
        self._snapshots.append(weakref.ref(made))
        return made

    def _check_since(self, since: Cursor) -> None:
        if since.incarnation != self.incarnation:
            raise native.snapshot_since(str(since), "a cursor of the shard's incarnation")
        known = self.deletions.kept and since.version >= self.deletions.floor
        if not known or since.version >= self.version:
            raise native.snapshot_since(str(since), native.KEPT_VERSION)

    def resume(self, version: int) -> Cursor:
        """Close all versions up to `version` and keep deletions from here on; counters are at hand.

        Raises:
            InputError: a version below one that a row is stamped with, or outside [0, 2^32 - 2].
        """
        remedy = "Pass the version that the loaded rows were saved at."
        scalars.whole("version to resume at", version, 0, scalars.LAST_VERSION, remedy=remedy)
        spans = self._handed_out()
        spans_BW = blocks_of_spans(spans, self.tables.device)
        if spans and int(count_changed(self.memory.layout, spans_BW, version, _ALL)[-1]):
            allowed = "at least the version of every row"
            raise InputError("version to resume at", got=version, allowed=allowed, remedy=remedy)
        self.version = max(self.version, version + 1)
        self.incarnation = _drawn_incarnation()
        # Whoever resumes holds what is here now: earlier deletions do not matter to it.
        self.deletions.start(version)
        return Cursor(self.incarnation, version)

    def _handed_out(self) -> list[Span]:
        """All rows that tables have handed out since they were empty."""
        known_KC = self.memory.counters.known_KC
        more_K = np.maximum(known_KC[:, words.COUNT_ISSUED] - known_KC[:, words.COUNT_FREE], 0)
        sizes = (known_KC[:, words.COUNT_FRESH] + more_K).tolist()
        return [Span(k, 0, size) for k, size in enumerate(sizes) if size > 0]

    def rows_still(
        self, table: int, handles_R: Tensor, images: DeviceImages, rows: SnapshotRows
    ) -> RowChunk:
        """Those of these rows that are as at the snapshot point, in this order, on the CPU; the
        others are among the images.

        Other methods wait for the launches of one piece at a time.
        """
        form, memory = self.tables.form(table), self.memory
        marks: list[Mark] = []

        def gather(piece: slice) -> tuple[Tensor, Tensor, Tensor]:
            with self.turns.aside():
                marks.append(images.mark())
                own_R = rows.still(handles_R[piece])
                where_R = own_R if self._host is None else self._host.cache.places_N(own_R)
                values = read_values(memory.layout, form, where_R)
                metadata_4R = read_metadata(memory.layout, own_R)
                images.stamps.retire()
            retire(*values, metadata_4R)
            return *values, metadata_4R

        chunk = gathered_rows(form, self.tables.specs[table].name, len(handles_R), gather)
        for mark in marks[-1:]:
            mark.wait()
        # Version 0 says that a row has been kept, and changed maybe.
        still_R = chunk.versions != 0
        return chunk if bool(still_R.all()) else chosen(chunk, still_R)

    def close(self, snapshot: CudaSnapshot) -> None:
        """Keep nothing for this one any more."""
        with self.turns.lock:
            self._snapshots = [ref for ref in self._snapshots if ref() not in (None, snapshot)]

    def _deleted_in(self, versions: tuple[int, int]) -> list[Tensor]:
        """Ids of each table deleted in a span of versions that have no row, by hash: int64 [U]."""
        at, stop = (self.deletions.after(version) for version in versions)
        specs = self.tables.specs
        parts: list[list[NDArray[np.int64]]] = [[] for _ in specs]
        while at < stop:
            records_R = self.deletions.read(at, min(stop - at, _RECORDS))
            at += len(records_R)
            records_R = records_R[self._lack_rows(records_R)]
            for k in np.unique(records_R["table"]).tolist():
                parts[k].append(records_R["id"][records_R["table"] == k])
        return [
            _by_hash(spec.hash_name, np.unique(np.concatenate(ids))) if ids else _NO_IDS
            for spec, ids in zip(specs, parts, strict=True)
        ]

    def _lack_rows(self, records_R: Records) -> NDArray[np.bool_]:
        """Which of these deletions' ids have no row now, bool [R]; waits for the device."""
        device = self.tables.device
        order_R = np.argsort(records_R["table"], kind="stable")
        tables, sizes = np.unique(records_R["table"], return_counts=True)
        call = CallGroups(
            sent(torch.from_numpy(records_R["id"][order_R].copy()), device),
            sent(torch.from_numpy(np.concatenate([[0], np.cumsum(sizes)])), device),
            sent(torch.from_numpy(tables.astype(np.int32)), device),
        )
        lacking = np.empty(len(records_R), dtype=np.bool_)
        lacking[order_R] = ~probed(self.memory.layout, call)[1].cpu().numpy()
        return lacking


def _drawn_incarnation() -> int:
    """Random, in [1, 2^63)."""
    return secrets.randbelow((1 << 63) - 1) + 1


@uncompiled
class CudaSnapshot(Snapshot):
    """See `shoal.table.shard.Snapshot`. Methods that change rows continue while it is open.

    Each method that changes rows makes one launch more, however many are open. The device holds 4
    bytes a row of the shard's chunks (see `Stamps`) and rows on their way to the host for all, 12 a
    row of the table read last and two pieces of what is read for each; the host two pieces plus the
    result and the memory for rows that change. Ends with this object at the latest.

    Args:
        history: of the shard whose rows they are.
        deleted: of each table, the ids that went in its span of versions.
        images: keeps rows that change, for other snapshots, too.
        rows: its own.
    """

    def __init__(
        self,
        history: History,
        deleted: Sequence[Tensor],
        images: DeviceImages,
        rows: SnapshotRows,
    ) -> None:
        super().__init__(history.tables.specs, *rows.versions)
        self._history = history
        device = history.tables.device
        self._gone = tuple(deleted)
        self.images, self._rows = images, rows
        on_gpu = device.type == "cuda"
        self._side = reader_stream(device) if on_gpu else None
        self._table = -1
        self._order: tuple[Tensor, Tensor] | None = None
        self._tick = 0
        # Not when the process ends: a save that reads it is waited for then.
        weakref.finalize(self, images.leave, rows).atexit = False

    @property
    def stats(self) -> SnapshotStats:
        """What it has cost so far, rows on their way to the host left out."""
        return self._rows.stats

    def _histogram(self, table: int, bits: int) -> Tensor:
        with self._beside():
            keys_R, _ = self._sorted(table)
            firsts = np.arange(1 << bits, dtype=np.uint64)
            firsts = (firsts << np.uint64(64 - bits) if bits else firsts) ^ np.uint64(1 << 63)
            edges = sent(torch.from_numpy(firsts.view(np.int64)), keys_R.device)
            starts = torch.searchsorted(keys_R, edges)
            ends = torch.cat([starts[1:], starts.new_tensor([len(keys_R)])])
            counts = (ends - starts).cpu()
        self._rows.check()
        return counts + self._rows.histogram(table, bits, self._tick)

    def _read(self, table: int, start: int, stop: int, state: bool) -> RowChunk:
        with self._beside():
            keys_R, handles_R = self._sorted(table)
            low, high = (_place(keys_R, bound) for bound in (start, stop))
            still = self._history.rows_still(table, handles_R[low:high], self.images, self._rows)
        self._rows.check()
        kept = self._rows.read(table, start, stop)
        chunk = joined_by_hash(self._specs[table].hash_name, still, kept)
        return chunk if state else replace(chunk, state=chunk.state[:, :0])

    def _deleted(self, table: int) -> Tensor:
        return self._gone[table]

    def _close(self) -> None:
        self._history.close(self)
        self._forget()
        self.images.leave(self._rows)

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
            history, images = self._history, self.images
            with history.turns.aside():
                mark = images.mark()
                handles_R, rows_1 = self._rows.listed(table)
                ids_R = read_ids(history.memory.layout, handles_R)
                images.stamps.retire()
            retire(handles_R, rows_1, ids_R)
            rows = int(rows_1)
            hashes_R = hash_ids(self._specs[table].hash_name, ids_R[:rows])
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
