"""Rows of a snapshot of a GPU shard, kept as they were while training changes them."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal import _core
from shoal.address import address
from shoal.ids import salt
from shoal.kernels.history import (
    HEAD_WORDS,
    IMAGE_CURSORS,
    IMAGE_VERSION,
    count_changed,
    keep_rows,
    list_changed,
    stamp_rows,
)
from shoal.kernels.launch import retire, sent
from shoal.kernels.tables import CHUNK_CAPACITY, CHUNK_VERSIONS, RowForm, ShardLayout
from shoal.placement import hash_ids, sort_key
from shoal.table import native, rows
from shoal.table.cuda.counters import Counts
from shoal.table.cuda.export import Span, blocks_of_spans
from shoal.table.shard import SnapshotStats
from shoal.table.spec import TableSpec
from shoal.table.values import RowChunk

_WORD = 0xFFFFFFFF
_COLUMNS = ("ids", "weights", "state", "versions", "last_seen_s", "counts")


class RowImages:
    """One thread adds, another reads.

    Args:
        specs, forms: the tables, and the row form of each.
        epochs: rows stamped in `(since, epoch]` are those of the snapshot.
        buffer_bytes: memory for copies; the rest goes to the file.
    """

    def __init__(
        self,
        specs: Sequence[TableSpec],
        forms: Sequence[RowForm],
        epochs: tuple[int, int],
        buffer_bytes: int,
    ) -> None:
        self._specs = tuple(specs)
        self._core = _core.RowImages(
            [
                (
                    form.dim * form.dtype.itemsize,
                    form.state_width * form.real.itemsize,
                    8 * HEAD_WORDS + form.weight_bytes,
                    salt(spec.hash_name),
                )
                for spec, form in zip(specs, forms, strict=True)
            ],
            *epochs,
            buffer_bytes,
        )

    def keep(self, records_L: NDArray[np.int64], places_R: NDArray[np.int64], first: int) -> None:
        """Add records as `kernels.history` writes them; waits while the file is behind.

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

    def tick(self) -> int:
        """What is added from now on is not before the number this returns."""
        return self._core.tick()

    def check(self) -> None:
        """Raise if a copy was lost.

        Raises:
            CheckpointError: memory or the file failed.
        """
        native.kept(self._core.check)

    def stats(self) -> tuple[int, int]:
        """Rows added, and bytes of those in the file."""
        return self._core.stats()[:2]

    def histogram(self, table: int, bits: int, before: int) -> Tensor:
        """Rows added before that `tick`, by the top `bits` of their hash: int64 [2^bits].

        Raises:
            CheckpointError: a copy was lost.
        """
        counts = torch.zeros(1 << bits, dtype=torch.int64, device="cpu")
        native.kept(lambda: self._core.histogram(table, bits, before, address(counts)))
        return counts

    def read(self, table: int, start: int, stop: int) -> RowChunk:
        """Rows added so far with `start <= h < stop`, ordered by h.

        Raises:
            CheckpointError: a copy was lost.
        """
        count = 0
        if start < stop:
            count = native.kept(lambda: self._core.find(table, start, stop - 1))
        chunk = rows.empty_chunk(self._specs[table], count)
        if count:
            self._core.copy(rows.pointers(chunk))
        return chunk


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

_LATEST = (1 << 32) - 1  # no row is stamped later


class Stamps:
    """Which rows belong to a snapshot and are unchanged; see `kernels.history`.

    Holds 4 bytes a row that the shard has room for.

    Args:
        layout: the shard's.
        columns_WC: its chunks' columns, on the host.
        spans: all rows that the tables have handed out; a table once at most.
        epochs: rows stamped in `(since, epoch]` are those of the snapshot.

    Attributes:
        chunks: that there were.
        rows_K: rows of each table.
    """

    def __init__(
        self,
        layout: ShardLayout,
        columns_WC: Counts,
        spans: Sequence[Span],
        epochs: tuple[int, int],
    ) -> None:
        device = layout.tables_KT.device
        columns_WC, self.chunks = columns_WC.copy(), columns_WC.shape[1]
        ends_C = np.cumsum(columns_WC[CHUNK_CAPACITY])
        rows = int(ends_C[-1]) if self.chunks else 0
        self._stamps = torch.zeros(rows, dtype=torch.int32, device=device)
        starts_C = ends_C - columns_WC[CHUNK_CAPACITY]
        columns_WC[CHUNK_VERSIONS] = self._stamps.data_ptr() + 4 * starts_C
        self.columns_WC = sent(torch.from_numpy(columns_WC), device)
        self._layout = ShardLayout(layout.tables_KT, layout.counters_KC, self.columns_WC)
        self._spans = {span.table: span for span in spans}
        self.rows_K = [0] * len(layout.tables_KT)
        spans_BW = blocks_of_spans(spans, device)
        stamp_rows(layout, self.columns_WC, spans_BW, *epochs)
        if spans:
            ends_B = count_changed(self._layout, spans_BW, 0, _LATEST)
            lasts = np.cumsum([span.blocks for span in spans]) - 1
            ends = ends_B[sent(torch.from_numpy(lasts), device)].tolist()
            for span, rows in zip(spans, np.diff(ends, prepend=0).tolist(), strict=True):
                self.rows_K[span.table] = rows

    @property
    def device(self) -> torch.device:
        """The shard's."""
        return self.columns_WC.device

    def listed(self, table: int) -> tuple[Tensor, Tensor]:
        """Handles int32 [R], R at least 1, of rows that still bear a stamp, -1 behind them; and how
        many they are, int64 [1]."""
        rows, device = self.rows_K[table], self.device
        if rows == 0:
            none = torch.full((1,), -1, dtype=torch.int32, device=device)
            return none, torch.zeros(1, dtype=torch.int64, device=device)
        spans_BW = blocks_of_spans([self._spans[table]], device)
        ends_B = count_changed(self._layout, spans_BW, 0, _LATEST)
        handles_R, _ = list_changed(self._layout, spans_BW, ends_B, 0, _LATEST, rows)
        return handles_R, ends_B[-1:]

    def retire(self) -> None:
        """See `kernels.transfer.retire`."""
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


class DeviceImages:
    """Methods call `keep` one at a time; one other thread reads. Ends with `close`.

    Args:
        stamps: of the snapshot point.
        images: where rows end up.
        forms: the shard's.
    """

    def __init__(self, stamps: Stamps, images: RowImages, forms: Sequence[RowForm]) -> None:
        self.stamps = stamps
        self.images = images
        self._record_words = [_record_words(form) for form in forms]
        device = stamps.device
        self._device = device
        self._on_gpu = device.type == "cuda"
        # Where its memory comes from; a method on another stream has to record it.
        self._home = torch._C._cuda_getCurrentRawStream(device.index) if self._on_gpu else 0
        self._copies: torch.cuda.Stream | None = None
        self._landing_L: Tensor | None = None  # the thread's own
        self._queue: queue.SimpleQueue[_Staged | Mark | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._flying = 0  # bytes of staged rows
        self._waited_s = 0.0
        self._lost: str | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._take_all, name="shoal-snapshot", daemon=True)
        self._thread.start()

    def keep(
        self,
        layout: ShardLayout,
        handles_M: Tensor,
        size_1: Tensor | None = None,
        *,
        forms: Sequence[int] | None = None,
        payload_H: Tensor | None = None,
    ) -> None:
        """Keep the given rows of the snapshot that are not kept yet: they are about to change.

        If that fails, the snapshot is lost, not the method.

        Args:
            layout: the shard's, now.
            handles_M, size_1, payload_H: as `kernels.history.keep_rows` takes them.
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
                if torch._C._cuda_getCurrentRawStream(self._device.index) != self._home:
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
            self._waited_s += time.monotonic() - start

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
        self.images.check()

    @property
    def stats(self) -> SnapshotStats:
        """What it has cost, as far as rows are on the host."""
        rows, spilled = self.images.stats()
        return SnapshotStats(rows, spilled, self._waited_s)

    def close(self) -> None:
        """Keep no more, and give memory on the device back. May be called twice."""
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
                item.passed(self.images.tick())
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
            self.images.keep(records_L, places_R, 0)
            return
        if self._copies is None:
            self._copies = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
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
            self.images.keep(part, places_R[at:stop], first)
            at = stop

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
