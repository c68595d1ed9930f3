"""Row files, and files of deleted ids and of sights: written once, in order; checked, then read.

The bytes of a file depend on nothing but its rows: record batches have a fixed number of rows,
there is no compression, and no time or version is in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.checkpoint.arrow_files import (
    HASHES,
    ArrowFile,
    ReadBuffer,
    check_sizes,
    check_streaming,
    damaged,
    parsing,
    read_batches,
    read_checked,
    sketch_path,
    table_of,
    viewer,
    write_whole,
)
from shoal.checkpoint.manifest import FileKind, SavedFile
from shoal.checkpoint.row_layout import ROW_FIELDS, IdLayout, RowLayout
from shoal.checkpoint.storage import Storage
from shoal.errors import CheckpointError, describe
from shoal.table.shard import RowChunk

__all__ = [
    "HASHES",
    "IdFileWriter",
    "ReadBuffer",
    "RowFileWriter",
    "check_sizes",
    "check_streaming",
    "damaged",
    "read_checked",
    "read_ids",
    "read_rows",
    "sketch_path",
    "write_whole",
]


class RowFileWriter:
    """A row file being written.

    Args:
        storage: the checkpoint's folder.
        path: below it.
        layout: of all rows.
        tables: keys of the tables, in the order in which their rows come.
        ranges: hashes [start, stop) of the rows.

    Raises:
        CheckpointError: what the storage refuses.
    """

    def __init__(
        self,
        storage: Storage,
        path: str,
        layout: RowLayout,
        tables: Sequence[str],
        ranges: tuple[int, int] = (0, HASHES),
    ) -> None:
        self._layout = layout
        self._file = ArrowFile(storage, path, "rows", tables, ranges)
        self._staged: RowChunk | None = None
        self._staged_rows = 0
        self._table = 0

    @property
    def rows(self) -> int:
        """Rows added so far."""
        return self._file.rows + self._staged_rows

    @property
    def bytes(self) -> int:
        """Bytes that went to the file so far."""
        return self._file.file.bytes

    def add(self, table_index: int, chunk: RowChunk) -> None:
        """Append rows, any number, of the table of that index in `tables`, ordered by hash.

        Full batches are written before it returns; what is left over is copied, so that the
        caller's memory is free again.

        Raises:
            CheckpointError: rows of another layout, tables out of order, or no space.
        """
        if table_index != self._table:
            self._flush()
            self._table = self._file.next_table(self._table, table_index)
        rows, at, batch = len(chunk.ids), 0, self._layout.batch_rows
        while at < rows:
            if not self._staged_rows and rows - at >= batch:
                self._write(_slice(chunk, at, at + batch))
                at += batch
                continue
            took = min(rows - at, batch - self._staged_rows)
            self._stage(_slice(chunk, at, at + took))
            at += took

    def close(self) -> SavedFile:
        """Finish it and make it durable."""
        self._flush()
        return self._file.close(self._layout.schema(self._file.grouped))

    def abort(self) -> None:
        """Remove it."""
        self._staged, self._staged_rows = None, 0
        self._file.abort()

    def _stage(self, chunk: RowChunk) -> None:
        """Copy rows behind those that wait for a batch to be full, in memory that is reused."""
        self._layout.check(chunk)
        if self._staged is None:
            self._staged = self._layout.empty(self._layout.batch_rows)
        start = self._staged_rows
        self._staged_rows += len(chunk.ids)
        for name in ROW_FIELDS:
            # numpy's copy stays on this thread; torch's would wake those that train.
            _bits(getattr(self._staged, name))[start : self._staged_rows] = _bits(
                getattr(chunk, name)
            )
        if self._staged_rows == self._layout.batch_rows:
            self._flush()

    def _flush(self) -> None:
        if self._staged is not None and self._staged_rows:
            self._write(_slice(self._staged, 0, self._staged_rows))
            self._staged_rows = 0

    def _write(self, chunk: RowChunk) -> None:
        table = self._table if self._file.grouped else None
        self._file.write(self._layout.to_arrow(chunk, table))


class IdFileWriter:
    """A file of deleted ids, or of sights with their counts, being written.

    Args:
        kind: "deleted" or "sights".
        storage, path, tables, ranges: as `RowFileWriter`'s.
    """

    def __init__(
        self,
        storage: Storage,
        path: str,
        kind: FileKind,
        tables: Sequence[str],
        ranges: tuple[int, int] = (0, HASHES),
    ) -> None:
        self._layout = IdLayout(counted=kind == "sights")
        self._file = ArrowFile(storage, path, kind, tables, ranges)
        self._ids: list[Tensor] = []
        self._counts: list[Tensor] = []
        self._pending = self._table = 0

    def add(self, table_index: int, ids_U: Tensor, counts_U: Tensor | None = None) -> None:
        """Append ids int64 [U] of a table, ordered by hash, with counts int64 [U] of sights."""
        if table_index != self._table:
            self._flush()
            self._table = self._file.next_table(self._table, table_index)
        if (counts_U is not None) != self._layout.counted or (
            counts_U is not None and len(counts_U) != len(ids_U)
        ):
            raise CheckpointError(
                describe(
                    f"counts of ids in {self._file.saved_path}",
                    got="none" if counts_U is None else len(counts_U),
                    allowed=f"{len(ids_U)}" if self._layout.counted else "none",
                    remedy="Sights have a count each, deletions none.",
                )
            )
        at, batch = 0, self._layout.batch_rows
        while at < len(ids_U):
            took = min(len(ids_U) - at, batch - self._pending)
            self._ids.append(ids_U[at : at + took])
            if counts_U is not None:
                self._counts.append(counts_U[at : at + took])
            self._pending += took
            at += took
            if self._pending == batch:
                self._flush()

    def close(self) -> SavedFile:
        """Finish it and make it durable."""
        self._flush()
        return self._file.close(self._layout.schema())

    def abort(self) -> None:
        """Remove it."""
        self._ids, self._counts, self._pending = [], [], 0
        self._file.abort()

    def _flush(self) -> None:
        if self._pending:
            counts = torch.cat(self._counts) if self._counts else None
            self._file.write(self._layout.to_arrow(self._table, torch.cat(self._ids), counts))
            self._ids, self._counts, self._pending = [], [], 0


def read_rows(
    storage: Storage,
    saved: SavedFile,
    layout: RowLayout,
    buffer: ReadBuffer | None = None,
    *,
    epoch: int | None = None,
) -> Iterator[tuple[int, RowChunk]]:
    """Rows of a file, batch after batch: (index into `saved.tables`, rows of that table).

    The file is read whole and checked first. Ids, weights and state of the rows lie in the
    buffer: with a `buffer` they are good until its next use. A chunk's table is the key. With an
    `epoch`, no row may be of a later one.

    Raises:
        CheckpointError: missing, damaged, or not what the manifest says of it.
    """
    content = read_checked(storage, saved, buffer)
    grouped = len(saved.tables) > 1
    view = viewer(content)
    with parsing(storage, saved.path, "an Arrow IPC file of rows"):
        for batch in read_batches(storage, saved, content, layout.schema(grouped)):
            table = table_of(storage, saved, batch) if grouped else 0
            chunk = layout.to_chunk(batch, saved.tables[table], view)
            if epoch is not None and (newest := int(chunk.versions.max())) > epoch:
                raise damaged(storage, saved.path, f"a row of epoch {newest}", f"{epoch} at most")
            yield table, chunk


def read_ids(
    storage: Storage, saved: SavedFile, buffer: ReadBuffer | None = None
) -> Iterator[tuple[int, Tensor, Tensor | None]]:
    """Ids of a file of deletions or sights: (index into `saved.tables`, ids [U], counts [U]).

    Counts are those of sights, else None. Memory and errors as with `read_rows`.
    """
    layout = IdLayout(counted=saved.kind == "sights")
    content = read_checked(storage, saved, buffer)
    view = viewer(content)
    with parsing(storage, saved.path, "an Arrow IPC file of ids"):
        for batch in read_batches(storage, saved, content, layout.schema()):
            ids = batch.column("id")
            counts = None
            if layout.counted:
                counts = torch.from_numpy(batch.column("count").to_numpy().astype("int64"))
            ids_U = view(ids.buffers()[-1], torch.int64, ids.offset, len(ids))
            yield table_of(storage, saved, batch), ids_U, counts


def _bits(part: Tensor) -> Any:
    return (part.view(torch.int16) if part.dtype == torch.bfloat16 else part).numpy()


def _slice(chunk: RowChunk, start: int, stop: int) -> RowChunk:
    parts = {name: getattr(chunk, name)[start:stop] for name in ROW_FIELDS}
    return RowChunk(table=chunk.table, **parts)
