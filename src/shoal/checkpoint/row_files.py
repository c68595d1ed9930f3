"""Row files, and files of deleted ids and admission counters: written in order, read checked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import torch
from torch import Tensor

from shoal import _core
from shoal.checkpoint.manifest import FileKind, SavedFile
from shoal.checkpoint.row_layout import ROW_FIELDS, IdLayout, RowLayout
from shoal.checkpoint.storage import Buffer, DurableFile, Storage
from shoal.errors import CheckpointError, ShoalError
from shoal.table.values import RowChunk

if TYPE_CHECKING:
    import pyarrow as pa


HASHES = 1 << 64


class ReadBuffer:
    """Memory that files are read into, one after the other; it grows to the largest.

    Args:
        once: nobody else reads these files soon.
    """

    def __init__(self, *, once: bool = False) -> None:
        self.once = once
        self._bytes = torch.empty(0, dtype=torch.uint8, device="cpu")

    def take(self, size: int) -> Tensor:
        """uint8 [size]; what was read into it before is gone."""
        if len(self._bytes) < size:
            self._bytes = torch.empty(size, dtype=torch.uint8, device="cpu")
        return self._bytes[:size]


def read_checked(storage: Storage, saved: SavedFile, buffer: ReadBuffer | None = None) -> Tensor:
    """The bytes of a file, uint8 [bytes], after its size and checksum were compared.

    Raises:
        CheckpointError: missing, or other bytes than those that were saved.
    """
    size = storage.size(saved.path)
    if size != saved.bytes:
        raise damaged(storage, saved.path, f"{size} bytes", f"{saved.bytes} bytes")
    memory = buffer or ReadBuffer()
    content = memory.take(size)
    got, crc32 = storage.read_into(saved.path, _memory(content), once=memory.once)
    if got != size:
        raise damaged(storage, saved.path, f"{got} bytes", f"{size} bytes")
    if crc32 != saved.crc32:
        raise damaged(storage, saved.path, f"checksum {crc32:08x}", f"checksum {saved.crc32:08x}")
    return content


def check_sizes(storage: Storage, files: Iterable[SavedFile]) -> None:
    """Compare sizes alone, by one listing: bytes that are there bound what a manifest may claim.

    Raises:
        CheckpointError: a file is missing or of another size.
    """
    sizes = storage.sizes()
    for saved in files:
        if (size := sizes.get(saved.path)) != saved.bytes:
            got = "missing" if size is None else f"{size} bytes"
            raise damaged(storage, saved.path, got, f"{saved.bytes} bytes")


def check_streaming(storage: Storage, saved: SavedFile) -> None:
    """Compare a file's size and checksum, a piece in memory at a time.

    Raises:
        CheckpointError: missing, or other bytes than those that were saved.
    """
    size = storage.size(saved.path)
    if size != saved.bytes:
        raise damaged(storage, saved.path, f"{size} bytes", f"{saved.bytes} bytes")
    crc32 = 0
    for piece in storage.pieces(saved.path):
        crc32 = _core.crc32(piece, crc32)
    if crc32 != saved.crc32:
        raise damaged(storage, saved.path, f"checksum {crc32:08x}", f"checksum {saved.crc32:08x}")


def write_whole(
    storage: Storage, path: str, kind: FileKind, data: Buffer, tables: Sequence[str] = ()
) -> SavedFile:
    """Write a file of another kind, such as the cells of a sketch, durably."""
    with storage.create(path) as file:
        file.write(data)
    return SavedFile(
        path=path,
        kind=kind,
        tables=tuple(tables),
        start=0,
        stop=HASHES,
        rows=0,
        bytes=file.bytes,
        crc32=file.crc32,
    )


def sketch_path(collection: str, table: str) -> str:
    """Where the cells of a table's sketch of sights lie."""
    return f"sights/{quote(collection, safe='')}.{quote(table, safe='')}.sketch"


def damaged(storage: Storage, path: str, got: object, allowed: object) -> CheckpointError:
    """A file that is not what the manifest says."""
    return CheckpointError(
        f"file {path} of checkpoint {storage.url}",
        got=got,
        allowed=f"{allowed}, as its manifest says",
        remedy="It is damaged, or of another checkpoint: load an earlier one, or copy it anew.",
    )


@contextmanager
def parsing(storage: Storage, path: str, wanted: str) -> Iterator[None]:
    """Whatever a parser of another package raises inside is a `damaged` file."""
    try:
        yield
    except ShoalError:
        raise
    except Exception as error:
        got = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
        raise damaged(storage, path, got, wanted) from error


class ArrowFile:
    """An Arrow IPC file on its way into a storage; `rows` are in it so far."""

    def __init__(
        self,
        storage: Storage,
        path: str,
        kind: FileKind,
        tables: Sequence[str],
        ranges: tuple[int, int],
    ) -> None:
        self.saved_path, self._kind = path, kind
        self._tables, self._ranges = tuple(tables), ranges
        self.grouped = len(self._tables) > 1
        self.rows = 0
        self.file = storage.create(path)
        self._writer: Any = None

    def next_table(self, now: int, then: int) -> int:
        """The table after the one at hand, which comes later in the file."""
        if not now < then < len(self._tables):
            raise CheckpointError(
                f"table of rows for {self.saved_path}",
                got=f"index {then} after {now}",
                allowed=f"ascending, below {len(self._tables)}",
                remedy="Write the tables in the order of the file.",
            )
        return then

    def write(self, batch: pa.RecordBatch) -> None:
        """Append a record batch."""
        self._started(batch.schema).write_batch(batch)
        self.rows += batch.num_rows

    def close(self, schema: pa.Schema) -> SavedFile:
        """Finish it and make it durable; the schema is that of all batches."""
        self._started(schema).close()
        self.file.close()
        return SavedFile(
            path=self.saved_path,
            kind=self._kind,
            tables=self._tables,
            start=self._ranges[0],
            stop=self._ranges[1],
            rows=self.rows,
            bytes=self.file.bytes,
            crc32=self.file.crc32,
        )

    def abort(self) -> None:
        """Remove it."""
        self._writer = None
        self.file.abort()

    def _started(self, schema: pa.Schema) -> Any:
        if self._writer is None:
            import pyarrow as pa

            self._writer = pa.ipc.new_file(_ArrowSink(self.file), schema)
        return self._writer


class _ArrowSink:
    """What pyarrow writes into: it hands over its buffers as they are, and closes nothing."""

    closed = False

    def __init__(self, file: DurableFile) -> None:
        self._file = file

    def write(self, data: Buffer) -> int:
        return self._file.write(data)

    def tell(self) -> int:
        return self._file.bytes

    def flush(self) -> None:
        return

    def close(self) -> None:
        return


def _memory(content: Tensor) -> memoryview:
    bytes_N: Any = content.numpy()
    return memoryview(bytes_N)


def viewer(content: Tensor) -> Any:
    """What shows pyarrow's buffers in these bytes as tensors (`row_layout.Viewer`)."""
    base = content.data_ptr()

    def view(buffer: pa.Buffer, dtype: torch.dtype, first: int, count: int) -> Tensor:
        start = buffer.address - base + first * dtype.itemsize if count else 0
        return content[start : start + count * dtype.itemsize].view(dtype)

    return view


def read_batches(
    storage: Storage, saved: SavedFile, content: Tensor, schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    """The record batches of a file's checked bytes, which they lie in."""
    import pyarrow as pa

    reader = pa.ipc.open_file(pa.py_buffer(_memory(content)))
    if not reader.schema.equals(schema):
        got = " ".join(str(reader.schema).split())
        raise damaged(storage, saved.path, got, " ".join(str(schema).split()))
    rows = 0
    for k in range(reader.num_record_batches):
        batch = reader.get_batch(k)
        batch.validate()
        rows += batch.num_rows
        if batch.num_rows:
            yield batch
    if rows != saved.rows:
        raise damaged(storage, saved.path, f"{rows} rows", f"{saved.rows} rows")


def table_of(storage: Storage, saved: SavedFile, batch: pa.RecordBatch) -> int:
    """The table of all rows of a batch."""
    numbers = batch.column("table").to_numpy()
    first = int(numbers[0])
    if first >= len(saved.tables) or (numbers != first).any():
        raise damaged(storage, saved.path, "a batch of other tables", f"{len(saved.tables)} tables")
    return first


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
                f"counts of ids in {self._file.saved_path}",
                got="none" if counts_U is None else len(counts_U),
                allowed=f"{len(ids_U)}" if self._layout.counted else "none",
                remedy="Sights have a count each, deletions none.",
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
