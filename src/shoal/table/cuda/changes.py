"""What changed in a GPU shard: pages of rows and deleted ids, out of versions and a log."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.kernels.history import count_changed, list_changed
from shoal.kernels.launch import sent
from shoal.kernels.tables import COUNT_FREE, COUNT_FRESH, COUNT_ISSUED, CallGroups
from shoal.table import native, shard
from shoal.table.cuda.counters import Counts
from shoal.table.cuda.deletions import Records
from shoal.table.cuda.export import Span, blocks_of_spans, read_rows
from shoal.table.cuda.upkeep import CudaUpkeep
from shoal.table.values import (
    Changes,
    Cursor,
    DeletedIds,
    RowChunk,
    checked_limit,
    not_closed,
    released,
)

# What one page looks at, at most: other verbs wait that long.
_DELETIONS = 1 << 16
_VERSIONS = 1 << 26
# Positions below are numbers of deletions, those from here on are rows: plus table << 32 | row.
_ROWS = 1 << 62


class CudaChanges(CudaUpkeep):
    """Cuts and changes of a `CudaShard`; all of it waits for the device, but for `cut`."""

    @property
    def incarnation(self) -> int:
        """Whose cursors are good; see `shoal.table.values.ChangeFeed`."""
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
        """Forget deletions up to `epoch`; None forgets all and keeps none until `changes`.

        Raises:
            InputError: not an int in [0, 2^32).
        """
        closed = None if epoch is None else released(epoch)
        with self._turn():
            if closed is None:
                self._deletions.stop()
                return
            self._deletions.drain()
            self._deletions.log.release(min(closed, self._epoch - 1))

    def changes(self, cursor: Cursor, limit: int) -> Changes:
        """The next page of what changed: at most `limit` rows and deleted ids together.

        Raises:
            InputError: limit is below 1, or `to_epoch` is not closed yet.
        """
        checked_limit(limit)
        with self._rows_at_home():
            self._settled()
            self._deletions.drain()
            if not self._deletions.kept:
                self._keep_deletions()
            return self._page(self._good(cursor), limit)

    def _good(self, cursor: Cursor) -> Cursor:
        """The cursor with the span it is to scan; one that is of no use starts a full pass."""
        closed = self._epoch - 1
        floor = self._deletions.log.floor
        if cursor.incarnation != self._incarnation or 0 < cursor.from_epoch < floor:
            cursor = Cursor(self._incarnation, 0, closed, 0)
        if cursor.to_epoch > closed:
            raise not_closed(cursor)
        if cursor.from_epoch == cursor.to_epoch and cursor.position == 0:
            cursor = dataclasses.replace(cursor, to_epoch=closed)
        return cursor

    def _page(self, cursor: Cursor, limit: int) -> Changes:
        restarted = cursor.from_epoch == 0 and cursor.position == 0
        deleted: tuple[DeletedIds, ...] = ()
        # Who starts from nothing has nothing to delete.
        position = max(cursor.position, _ROWS) if cursor.from_epoch == 0 else cursor.position
        if position < _ROWS:
            deleted, position = self._deleted_page(cursor, limit)
            limit -= sum(len(part.ids) for part in deleted)
        chunks: tuple[RowChunk, ...] = ()
        done = False
        if position >= _ROWS:
            chunks, further = self._rows_page(cursor, position - _ROWS, limit)
            done, position = further is None, _ROWS + (further or 0)
        after = Cursor(cursor.incarnation, cursor.to_epoch, cursor.to_epoch, 0)
        later = after if done else dataclasses.replace(cursor, position=position)
        return Changes(chunks, deleted, later, done, restarted)

    def _deleted_page(self, cursor: Cursor, limit: int) -> tuple[tuple[DeletedIds, ...], int]:
        """Ids without a row, and where to go on."""
        log = self._deletions.log
        stop = log.after(cursor.to_epoch)
        at = max(cursor.position, log.after(cursor.from_epoch))
        records_R = log.read(at, min(_DELETIONS, max(stop - at, 0)))
        gone = np.flatnonzero(self._lack_rows(records_R))
        if len(gone) > limit:
            gone = gone[:limit]
            at += int(gone[-1]) + 1
        else:
            at += len(records_R)
        return self._by_table(records_R[gone]), _ROWS if at >= stop else at

    def _by_table(self, records_R: Records) -> tuple[DeletedIds, ...]:
        parts = []
        for k in np.unique(records_R["table"]).tolist():
            ids_U = torch.from_numpy(records_R["id"][records_R["table"] == k].copy())
            parts.append(DeletedIds(self._specs[k].name, ids_U))
        return tuple(parts)

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

    def _rows_page(
        self, cursor: Cursor, position: int, limit: int
    ) -> tuple[tuple[RowChunk, ...], int | None]:
        """Rows of the scan from a place on, and where to go on; None at its end."""
        spans, further = self._spans_from(position >> 32, position & 0xFFFFFFFF)
        epochs = (cursor.from_epoch, cursor.to_epoch)
        handles, number = self._changed(spans, epochs, limit)
        chunks = tuple(
            self._rows_of_table(span.table, handles_R)
            for span, handles_R in zip(spans, handles, strict=True)
            if len(handles_R)
        )
        return chunks, further if number is None else number

    def _rows_of_table(self, table: int, handles_R: Tensor) -> RowChunk:
        form = self._forms[self._form_of[table]]
        return read_rows(self._layout, form, self._specs[table].name, handles_R)

    @property
    def _handed_out_K(self) -> Counts:
        """Rows that each table has handed out since it was empty; counters have arrived."""
        known_KC = self._memory.counters.known_KC
        more_K = np.maximum(known_KC[:, COUNT_ISSUED] - known_KC[:, COUNT_FREE], 0)
        handed_K: Counts = known_KC[:, COUNT_FRESH] + more_K
        return handed_K

    def _spans_from(self, table: int, row: int) -> tuple[list[Span], int | None]:
        """What a page looks at from a row of a table on, and where the next one goes on."""
        spans, left = list[Span](), _VERSIONS
        for k, size in enumerate(self._handed_out_K.tolist()):
            first = row if k == table else 0
            if k < table or first >= size:
                continue
            if left == 0:
                return spans, k << 32 | first
            stop = min(size, first + left)
            spans.append(Span(k, first, stop))
            left -= stop - first
            if stop < size:
                return spans, k << 32 | stop
        return spans, None

    def _changed(
        self, spans: Sequence[Span], epochs: tuple[int, int], limit: int | None = None
    ) -> tuple[list[Tensor], int | None]:
        """Handles of each span's rows stamped in `(epochs[0], epochs[1]]`, by rising number.

        Waits for the device once, for how many there are.

        Returns:
            the handles of at most `limit` rows; where to go on if there are more, else None.
        """
        none_R = torch.empty(0, dtype=torch.int32, device=self._device)
        if not spans or limit == 0:
            return [none_R for _ in spans], _place(spans[0]) if spans else None
        spans_BW = blocks_of_spans(spans, self._device)
        ends_B = count_changed(self._layout, spans_BW, *epochs)
        lasts = np.cumsum([span.blocks for span in spans]) - 1
        ends = ends_B[sent(torch.from_numpy(lasts), self._device)].tolist()
        taken = ends[-1] if limit is None else min(ends[-1], limit)
        if taken == 0:
            return [none_R for _ in spans], None
        handles_R, last_1 = list_changed(self._layout, spans_BW, ends_B, *epochs, taken)
        cuts = [0, *(min(end, taken) for end in ends)]
        parts = [handles_R[low:high] for low, high in itertools.pairwise(cuts)]
        if taken == ends[-1]:
            return parts, None
        owner = next(span for span, end in zip(spans, ends, strict=True) if end >= taken)
        return parts, owner.table << 32 | int(last_1) + 1


def _place(span: Span) -> int:
    return span.table << 32 | span.first
