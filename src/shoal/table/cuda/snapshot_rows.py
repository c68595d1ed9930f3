"""Rows of the open snapshots of a GPU shard, kept as they were while training changes them."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal import _core
from shoal.address import address
from shoal.ids import salt
from shoal.kernels.host_copies import retire, sent
from shoal.kernels.row_changes import (
    HEAD_WORDS,
    IMAGE_CURSORS,
    IMAGE_VERSION,
    count_changed,
    keep_rows,
    list_changed,
    stamp_rows,
    still_stamped,
)
from shoal.kernels.tables import CHUNK_CAPACITY, CHUNK_VERSIONS, CHUNK_WORDS, RowForm, ShardLayout
from shoal.placement import hash_ids, sort_key
from shoal.table import native, rows
from shoal.table.cuda.calls import ShardTables
from shoal.table.cuda.counters import Counts
from shoal.table.cuda.export import Span, blocks_of_spans
from shoal.table.cuda.side_stream import reader_stream
from shoal.table.shard import SnapshotStats
from shoal.table.spec import TableSpec
from shoal.table.values import RowChunk

T = TypeVar("T")

_WORD = 0xFFFFFFFF
_COLUMNS = ("ids", "weights", "state", "versions", "last_seen_s", "counts")


def chosen(chunk: RowChunk, rows: Tensor) -> RowChunk:
    """Some rows of a chunk: a mask, or numbers."""
    return RowChunk(chunk.table, *(getattr(chunk, name)[rows] for name in _COLUMNS))


def joined_by_hash(hashed_as: str, first: RowChunk, second: RowChunk) -> RowChunk:
    """Rows of two chunks of one table, each ordered by hash, in that order.

    An id that both have is taken from the first.
    """
    if not len(second.ids):
        return first
    keys_A, keys_B = (sort_key(hash_ids(hashed_as, part.ids)) for part in (first, second))
    if len(keys_A):
        at_B = torch.searchsorted(keys_A, keys_B).clamp(max=len(keys_A) - 1)
        new_B = keys_A[at_B] != keys_B
        if not bool(new_B.all()):
            second, keys_B = chosen(second, new_B), keys_B[new_B]
    order_R = torch.cat([keys_A, keys_B]).argsort()
    both = (torch.cat([getattr(first, name), getattr(second, name)])[order_R] for name in _COLUMNS)
    return RowChunk(first.table, *both)


_PIECE_BYTES = 128 << 20  # of device memory that one launch may fill
_FLYING_BYTES = 512 << 20  # of device memory that waits to be brought to the host
_LANDING_BYTES = 8 << 20


class Stamps:
    """Which rows are unchanged since a snapshot point that they belong to, for all open snapshots:
    such a row bears its version; see `kernels.row_changes`.

    That is enough for any number of points. A row that is unchanged since one of them is unchanged
    since all later ones, and belongs to those in whose span its version is.

    Holds 4 bytes a row of each chunk up to the last one with memory; chunks of addresses only that
    lie among them count, too.

    Args:
        layout: the shard's.

    Attributes:
        chunks: that rows with a stamp are in.
        home: the stream that the memory is of, as a number; 0 when interpreted.
    """

    def __init__(self, layout: ShardLayout) -> None:
        self._shard = layout
        device = layout.tables_KT.device
        self.chunks, self.home = 0, 0
        self._stamps = torch.empty(0, dtype=torch.int32, device=device)
        self.columns_WC = torch.empty((CHUNK_WORDS, 0), dtype=torch.int64, device=device)
        self._layout = layout

    @property
    def device(self) -> torch.device:
        """The shard's."""
        return self.columns_WC.device

    def add(
        self,
        layout: ShardLayout,
        columns_WC: Counts,
        spans: Sequence[Span],
        versions: tuple[int, int],
    ) -> dict[int, int]:
        """Stamp the rows of a snapshot point; how many each table has.

        Args:
            layout: the shard's, now.
            columns_WC: columns of its chunks, on the host, up to the last one with rows.
            spans: all rows that the tables have handed out; a table once at most.
            versions: rows with a version in `(since, version]` are those of the point.
        """
        if self.chunks < columns_WC.shape[1]:
            self._cover(columns_WC.copy())
        if not spans:
            return {}
        spans_BW = blocks_of_spans(spans, self.device)
        stamp_rows(layout, self.columns_WC, spans_BW, *versions)
        ends_B = count_changed(self._layout, spans_BW, *versions)
        lasts = np.cumsum([span.blocks for span in spans]) - 1
        ends = ends_B[sent(torch.from_numpy(lasts), self.device)].tolist()
        return dict(zip([s.table for s in spans], np.diff(ends, prepend=0).tolist(), strict=True))

    def _cover(self, columns_WC: Counts) -> None:
        """Have room for the stamps of these chunks, which only grow in number; stamps stay."""
        ends_C = np.cumsum(columns_WC[CHUNK_CAPACITY])
        stamps = torch.zeros(int(ends_C[-1]), dtype=torch.int32, device=self.device)
        columns_WC[CHUNK_VERSIONS] = stamps.data_ptr() + 4 * (ends_C - columns_WC[CHUNK_CAPACITY])
        there = sent(torch.from_numpy(columns_WC), self.device)
        stamps[: len(self._stamps)].copy_(self._stamps)
        self.retire()
        self._stamps, self.columns_WC, self.chunks = stamps, there, columns_WC.shape[1]
        self._layout = ShardLayout(self._shard.tables_KT, self._shard.counters_KC, there)
        if self.device.type == "cuda":
            self.home = torch._C._cuda_getCurrentRawStream(self.device.index)

    def listed(self, span: Span, rows: int, versions: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Handles int32 [R], R at least 1, of a table's rows stamped in `(since, version]`, -1
        behind them; and how many they are, int64 [1].

        Args:
            span: all rows that the table had handed out.
            rows: that they are at most; 1 or more.
        """
        spans_BW = blocks_of_spans([span], self.device)
        ends_B = count_changed(self._layout, spans_BW, *versions)
        return list_changed(self._layout, spans_BW, ends_B, *versions, rows), ends_B[-1:]

    def retire(self) -> None:
        """See `kernels.host_copies.retire`."""
        retire(self._stamps, self.columns_WC)

    def free(self) -> None:
        """Give the memory back; no call may follow."""
        self._stamps = self.columns_WC = torch.empty(0, device=self.device)


@dataclass(slots=True)
class _Staged:
    """What a launch has kept: two cursors, places, records; and when it is there."""

    words_L: Tensor
    room: int
    launched: torch.cuda.Event | None


class Mark:
    """A point between launches: after those before it, before those after it."""

    def __init__(self) -> None:
        self._passed = threading.Event()
        self._tick = 0

    def wait(self) -> int:
        """Wait until all that was kept before it is on the host; the `tick` that parts it."""
        self._passed.wait()
        return self._tick

    def passed(self, tick: int) -> None:
        """It is."""
        self._tick = tick
        self._passed.set()


class SnapshotRows:
    """The rows of one snapshot: those that still bear a stamp, and copies of the others. One thread
    reads; that of its `DeviceImages` adds copies. Made by `DeviceImages.join`.

    Attributes:
        versions: rows stamped in `(since, version]` are those of the snapshot.
    """

    def __init__(
        self,
        images: DeviceImages,
        spans: Sequence[Span],
        rows: dict[int, int],
        versions: tuple[int, int],
        buffer_bytes: int,
    ) -> None:
        self.versions = versions
        self._images = images
        self._spans = {span.table: span for span in spans}
        self._rows = rows
        self._buffer_bytes = buffer_bytes
        self._waited_before_s = images.waited_s
        self._cost = SnapshotStats(0, 0, 0.0)
        self._core: _core.SnapshotImages | None = None
        self._closed = False
        self._joined = threading.Event()
        self._changing = threading.RLock()  # a collector may close it anywhere

    def started(self, core: _core.RowImages) -> None:
        """What is added to the core from now on may be rows of it."""
        try:
            with self._changing:
                if not self._closed:
                    self._core = _core.SnapshotImages(core, *self.versions, self._buffer_bytes)
        finally:
            self._joined.set()

    def close(self) -> None:
        """Keep no more for it, and let go of copies that no other snapshot needs."""
        with self._changing:
            self._cost = self.stats
            self._closed, core, self._core = True, self._core, None
        if core is not None:
            core.close()

    def listed(self, table: int) -> tuple[Tensor, Tensor]:
        """As `Stamps.listed`, of one of its tables."""
        rows, device = self._rows.get(table, 0), self._images.stamps.device
        if rows == 0:
            none = torch.full((1,), -1, dtype=torch.int32, device=device)
            return none, torch.zeros(1, dtype=torch.int64, device=device)
        return self._images.stamps.listed(self._spans[table], rows, self.versions)

    def still(self, handles_R: Tensor) -> Tensor:
        """Those of these handles whose rows still bear a stamp; -1 for others."""
        stamps = self._images.stamps
        return still_stamped(stamps.columns_WC, stamps.chunks, handles_R, *self.versions)

    def check(self) -> None:
        """Raise if a copy was lost.

        Raises:
            CheckpointError: there was no memory, or the file failed.
        """
        self._images.check()
        self._kept(lambda core: core.check())

    @property
    def stats(self) -> SnapshotStats:
        """What it has cost, as far as rows are on the host."""
        with self._changing:  # else the core's part may be closed meanwhile
            core = self._core
            if self._closed or core is None:
                return self._cost
            rows, spilled = core.stats()[:2]
        return SnapshotStats(rows, spilled, self._images.waited_s - self._waited_before_s)

    def histogram(self, table: int, bits: int, before: int) -> Tensor:
        """Rows copied before that tick of a `Mark`, by the top `bits` of their hash: int64
        [2^bits].

        Raises:
            CheckpointError: a copy was lost.
        """
        counts = torch.zeros(1 << bits, dtype=torch.int64, device="cpu")
        self._kept(lambda core: core.histogram(table, bits, before, address(counts)))
        return counts

    def read(self, table: int, start: int, stop: int) -> RowChunk:
        """Rows copied so far with `start <= h < stop`, ordered by h.

        Raises:
            CheckpointError: a copy was lost.
        """
        count = 0
        if start < stop:
            count = self._kept(lambda core: core.find(table, start, stop - 1))
        chunk = rows.empty_chunk(self._images.specs[table], count)
        if count:
            self._kept(lambda core: core.copy(rows.pointers(chunk)))
        return chunk

    def _kept(self, call: Callable[[_core.SnapshotImages], T]) -> T:
        self._joined.wait()
        core = self._core
        if core is None:  # it could not be made
            self._images.check()
            raise native.copies_lost("the snapshot was closed")
        return native.kept(lambda: call(core))


class DeviceImages:
    """What keeps rows for any number of open snapshots. Methods call `keep` and `join` one at a
    time; each snapshot has another thread that reads. Ends when the last snapshot leaves.

    Args:
        layout: the shard's.
        tables: what it hosts.
        skipped: rows that steps had left alone so far, for their gradients.

    Attributes:
        skipped: as given.
        stamps: of rows that are unchanged.
        waited_s: that methods waited for rows to be brought to the host.
        shut: no snapshot may join any more: rows were loaded, whose versions are not of the time
            when they changed.
    """

    def __init__(self, layout: ShardLayout, tables: ShardTables, skipped: int) -> None:
        self.skipped = skipped
        self.stamps = Stamps(layout)
        self.specs = tables.specs
        self.waited_s = 0.0
        self.shut = False
        self._core = _core.RowImages(
            [_table_form(spec, tables.form(k)) for k, spec in enumerate(tables.specs)]
        )
        self._snapshots: set[SnapshotRows] = set()
        self._record_words = [_record_words(form) for form in tables.forms]
        device = self.stamps.device
        self._device = device
        self._on_gpu = device.type == "cuda"
        self._copies: torch.cuda.Stream | None = None
        self._landing_L: Tensor | None = None  # the thread's own
        self._queue: queue.SimpleQueue[_Staged | Mark | SnapshotRows | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._flying = 0  # bytes of staged rows
        self._lost: str | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._take_all, name="shoal-snapshot", daemon=True)
        self._thread.start()

    @property
    def joinable(self) -> bool:
        """Whether another snapshot may join."""
        return not self.shut and self._lost is None

    def join(
        self,
        layout: ShardLayout,
        columns_WC: Counts,
        spans: Sequence[Span],
        versions: tuple[int, int],
        buffer_bytes: int,
    ) -> SnapshotRows:
        """Keep the rows of a further snapshot point; nobody else joins or leaves meanwhile.

        Args:
            layout, columns_WC, spans, versions: as `Stamps.add` takes them.
            buffer_bytes: memory for copies of its rows; the rest goes to a file.
        """
        try:
            rows = self.stamps.add(layout, columns_WC, spans, versions)
        except BaseException:
            if not self._snapshots:
                self._close()
            raise
        joined = SnapshotRows(self, spans, rows, versions, buffer_bytes)
        self._snapshots.add(joined)
        self._queue.put(joined)  # behind what was kept before its point
        return joined

    def leave(self, snapshot: SnapshotRows) -> None:
        """A snapshot is closed; the last one ends this. May be called twice, by any thread."""
        snapshot.close()
        self._snapshots.discard(snapshot)
        if not self._snapshots:
            self._close()

    def keep(
        self,
        layout: ShardLayout,
        handles_M: Tensor,
        size_1: Tensor | None = None,
        *,
        forms: Sequence[int] | None = None,
        payload_H: Tensor | None = None,
    ) -> None:
        """Keep those of the given rows that bear a stamp, and take it: they are about to change.

        If that fails, the snapshots are lost, not the method.

        Args:
            layout: the shard's, now.
            handles_M, size_1, payload_H: as `kernels.row_changes.keep_rows` takes them.
            forms: row forms that the rows have; None: any.
        """
        m = handles_M.numel()
        words = max(self._record_words[f] for f in forms or range(len(self._record_words)))
        rows = max(_PIECE_BYTES // (8 * words), 1)
        for first in range(0, m, rows):
            if self._lost is not None:
                return
            part = slice(first, min(first + rows, m))
            staged = self._staged(part.stop - first, words)
            if staged is None:
                return
            keep_rows(
                layout,
                self.stamps.columns_WC,
                self.stamps.chunks,
                handles_M,
                part,
                staged.room,
                staged.words_L,
                size_1=size_1,
                payload_H=payload_H,
            )
            if self._on_gpu:
                staged.launched = torch.cuda.Event()  # type: ignore[no-untyped-call]
                staged.launched.record(torch.cuda.current_stream(self._device))
                if torch._C._cuda_getCurrentRawStream(self._device.index) != self.stamps.home:
                    self.stamps.retire()
            self._queue.put(staged)

    def _staged(self, rows: int, words: int) -> _Staged | None:
        """Device memory for so many rows of at most so many words; None: there is none."""
        size = IMAGE_CURSORS + rows * (1 + words)
        for most in (max(_FLYING_BYTES - 8 * size, 0), 0):
            self._wait(most)
            try:
                words_L = self._room_for(size)
            except torch.OutOfMemoryError as error:
                why = str(error).partition("\n")[0]
                continue
            words_L[:IMAGE_CURSORS].zero_()
            with self._changed:
                self._flying += 8 * size
            return _Staged(words_L, rows, None)
        self._lose(f"no memory for them on {self._device}: {why}")
        return None

    def _room_for(self, words: int) -> Tensor:
        return torch.empty(words, dtype=torch.int64, device=self._device)

    def _wait(self, most: int) -> None:
        """Wait until no more than so many bytes are on their way."""
        with self._changed:
            if self._flying <= most:
                return
            start = time.monotonic()
            self._changed.wait_for(lambda: self._flying <= most)
            self.waited_s += time.monotonic() - start

    def mark(self) -> Mark:
        """A mark at this point of the shard's order of methods."""
        mark = Mark()
        self._queue.put(mark)
        return mark

    def check(self) -> None:
        """Raise if a row was lost.

        Raises:
            CheckpointError: it was.
        """
        if self._lost is not None:
            raise native.copies_lost(self._lost)

    def _close(self) -> None:
        """Keep no more, and give memory on the device back."""
        if self._closed:
            return
        self._closed = True
        self._lose("the snapshot was closed")
        self._queue.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join()
        self.stamps.free()

    def _lose(self, why: str) -> None:
        if self._lost is None:
            self._lost = why

    def _take_all(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, Mark):
                item.passed(self._core.tick())
                continue
            if isinstance(item, SnapshotRows):
                try:
                    item.started(self._core)
                except Exception as error:  # noqa: BLE001 - raised in the reader
                    self._lose(f"{type(error).__name__}: {error}")
                continue
            size = 8 * item.words_L.numel()
            try:
                if self._lost is None:
                    self._take(item)
            except Exception as error:  # noqa: BLE001 - raised in the reader
                self._lose(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
            finally:
                del item
                with self._changed:
                    self._flying -= size
                    self._changed.notify_all()
        self._landing_L = None

    def _take(self, staged: _Staged) -> None:
        words_L = staged.words_L
        if staged.launched is None:
            count = int(words_L[0])
            places_R = words_L[IMAGE_CURSORS : IMAGE_CURSORS + count].numpy()
            records_L = words_L[IMAGE_CURSORS + staged.room :].numpy()
            self._add(records_L, places_R, 0)
            return
        if self._copies is None:
            self._copies = reader_stream(self._device)
        staged.launched.synchronize()
        with torch.cuda.stream(self._copies):
            self._bring(words_L, staged.room)

    def _bring(self, words_L: Tensor, room: int) -> None:
        count, words = self._brought(words_L[:IMAGE_CURSORS]).tolist()
        if count == 0:
            return
        places = words_L[IMAGE_CURSORS : IMAGE_CURSORS + count]
        places_R = np.empty(count, dtype=np.int64)
        step = _LANDING_BYTES // 8
        for at in range(0, count, step):
            places_R[at : at + step] = self._brought(places[at : at + step])
        places_R = places_R[np.argsort(places_R & _WORD)]
        starts_R = places_R & _WORD
        ends_R = np.append(starts_R[1:], words)
        records_L = words_L[IMAGE_CURSORS + room :]
        at = 0
        while at < count:
            first = int(starts_R[at])
            stop = max(int(np.searchsorted(ends_R, first + step, side="right")), at + 1)
            part = self._brought(records_L[first : int(ends_R[stop - 1])])
            self._add(part, places_R[at:stop], first)
            at = stop

    def _add(self, records_L: NDArray[np.int64], places_R: NDArray[np.int64], first: int) -> None:
        """Add records as `kernels.row_changes` writes them; waits while the file is behind.

        Args:
            records_L: words of whole records, the first of which is word `first` of all.
            places_R: table << 32 | word of each.
        """
        tables_R, words_R = places_R >> 32, (places_R & _WORD) - first
        for k in np.unique(tables_R).tolist():
            own_R = words_R[tables_R == k]
            versions_R = records_L[own_R + IMAGE_VERSION].astype(np.uint32)
            places = own_R.astype(np.int32)
            self._core.keep(
                k, records_L.ctypes.data, places.ctypes.data, versions_R.ctypes.data, len(own_R)
            )

    def _brought(self, words_L: Tensor) -> NDArray[np.int64]:
        """Words of the device in pinned memory, which the next call uses again."""
        size = words_L.numel()
        if self._landing_L is None or self._landing_L.numel() < size:
            room = max(size, _LANDING_BYTES // 8)
            self._landing_L = torch.empty(room, dtype=torch.int64, pin_memory=True, device="cpu")
        assert self._copies is not None
        landed_L = self._landing_L[:size]
        landed_L.copy_(words_L, non_blocking=True)
        self._copies.synchronize()
        return landed_L.numpy()


def _record_words(form: RowForm) -> int:
    return HEAD_WORDS + (form.weight_bytes + form.state_bytes) // 8


def _table_form(spec: TableSpec, form: RowForm) -> tuple[int, int, int, int]:
    """Bytes of weights and of state, where state lies in a record, salt."""
    return (
        form.dim * form.dtype.itemsize,
        form.state_width * form.real.itemsize,
        8 * HEAD_WORDS + form.weight_bytes,
        salt(spec.hash_name),
    )
