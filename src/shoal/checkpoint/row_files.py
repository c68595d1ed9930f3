"""Files of rows, of deleted ids and of admission counters: written in order, checked when read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from struct import unpack, unpack_from
from typing import Any
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from shoal import _core
from shoal.checkpoint.manifest import FileKind, SavedFile, SavedTable
from shoal.checkpoint.storage import Buffer, DurableFile, Storage
from shoal.errors import CheckpointError, ShoalError
from shoal.table.rows import REAL_DTYPES, WEIGHT_DTYPES
from shoal.table.shard import HASHES
from shoal.table.values import RowChunk

Columns = tuple[Tensor, ...]
"""Rows as tensors, one for each field of their layout."""

Viewer = Callable[[pa.Buffer, torch.dtype, int, int], Tensor]
"""(buffer, dtype, first element, elements) -> a tensor over that memory."""

_BATCH_BYTES = 8 << 20
_NAMING = ("table", "id")  # columns
_ARROW = {torch.int64: "uint32", torch.bfloat16: "int16", torch.float16: "float16"} | {
    torch.float32: "float32",
    torch.float64: "float64",
}


@dataclass(frozen=True, slots=True)
class Field:
    """A column: [R] where `width` is None, else [R, width].

    Whole numbers are int64 in memory; in a file all but ids are uint32. bfloat16 is kept as its
    int16 bits.
    """

    name: str
    dtype: torch.dtype = torch.int64
    width: int | None = None

    def shape(self, rows: int) -> tuple[int, ...]:
        """Of a number of rows."""
        return (rows,) if self.width is None else (rows, self.width)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row's part in memory."""
        return self.dtype.itemsize * (1 if self.width is None else self.width)

    @property
    def file_bytes(self) -> int:
        """Bytes of a row's part in a file."""
        return 4 if self.width is None and self.name != "id" else self.row_bytes

    def arrow(self) -> pa.Field:
        """Of a file's schema."""
        kind = getattr(pa, "int64" if self.name == "id" else _ARROW[self.dtype])()
        kind = kind if self.width is None else pa.list_(kind, self.width)
        return pa.field(self.name, kind, nullable=False)

    def to_arrow(self, values: Tensor, table: str) -> pa.Array:
        """An array, over the same memory where it can.

        Raises:
            CheckpointError: a whole number outside 32 bits.
        """
        flat = values.contiguous().reshape(-1)
        array = (flat.view(torch.int16) if flat.dtype == torch.bfloat16 else flat).numpy()
        if self.width is not None:
            kind = self.arrow().type
            return pa.Array.from_buffers(kind, len(values), [None], children=[pa.array(array)])
        if self.name == "id":
            return pa.array(array)
        narrow = array.astype(np.uint32)
        if not np.array_equal(narrow, array):
            what, got = f"{self.name} of rows of table {table!r}", f"{array.min()}..{array.max()}"
            remedy = "These are whole counts, seconds or versions of 32 bits."
            raise CheckpointError(what, got, "0..2^32 - 1", remedy)
        return pa.array(narrow)

    def to_tensor(self, array: pa.Array, view: Viewer) -> Tensor:
        """The column; ids, weights and state lie in the array's memory, as `view` shows it."""
        rows, width = len(array), self.width
        if width is None and self.name != "id":
            return torch.from_numpy(array.to_numpy(zero_copy_only=True).astype(np.int64))
        if width is None:
            return view(array.buffers()[-1], self.dtype, array.offset, rows)
        if rows * width == 0:
            return torch.empty(rows, width, dtype=self.dtype, device="cpu")
        first = array.offset * width + array.values.offset
        return view(array.buffers()[-1], self.dtype, first, rows * width).view(rows, width)


@dataclass(frozen=True, slots=True)
class RowLayout:
    """The columns of a file, ids first. `named`: also a file of one table names it in each row."""

    fields: tuple[Field, ...]
    named: bool = False

    @staticmethod
    def rows(dim: int, state_width: int, dtype: str) -> RowLayout:
        """Of rows; state is float64 for float64 tables, else float32.

        Raises:
            CheckpointError: a dtype that rows do not have, or a negative width.
        """
        if dtype not in WEIGHT_DTYPES or dim < 0 or state_width < 0:
            raise CheckpointError(
                "layout of a row",
                got=f"dim={dim}, state_width={state_width}, dtype={dtype!r}",
                allowed=f"widths of 0 or more and a dtype of {', '.join(WEIGHT_DTYPES)}",
                remedy="Load it with the version that wrote it.",
            )
        return RowLayout(
            (
                *(Field(name) for name in ("id", "version", "last_seen_s", "count")),
                Field("weights", WEIGHT_DTYPES[dtype], dim),
                Field("state", REAL_DTYPES[dtype], state_width),
            )
        )

    @staticmethod
    def of(table: SavedTable) -> RowLayout:
        """Of a saved table's rows."""
        return RowLayout.rows(table.dim, table.state_width, table.dtype)

    @staticmethod
    def ids(*, counted: bool) -> RowLayout:
        """Of deleted ids, or of counted ones."""
        return RowLayout((Field("id"), Field("count")) if counted else (Field("id"),), named=True)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in a file; of rows the column that names their table is left out."""
        return sum(field.file_bytes for field in self.fields) + 4 * self.named

    @property
    def batch_rows(self) -> int:
        """Rows of every record batch but a table's last in a file: a power of two within 8 MiB."""
        return 1 << max(0, (_BATCH_BYTES // max(1, self.row_bytes)).bit_length() - 1)

    def schema(self, tables: int) -> pa.Schema:
        """Of a file of so many tables."""
        names = [pa.field("table", pa.uint32(), nullable=False)] * (self.named or tables > 1)
        return pa.schema([*names, *(field.arrow() for field in self.fields)])

    def to_arrow(self, columns: Columns, schema: pa.Schema, number: int, table: str) -> pa.Array:
        """A record batch of a file's schema. `number` is the table's in the file.

        Raises:
            CheckpointError: rows of another layout, or whole numbers outside 32 bits.
        """
        self.check(columns, table)
        pairs = zip(self.fields, columns, strict=True)
        arrays = [field.to_arrow(column, table) for field, column in pairs]
        if len(schema) > len(arrays):
            arrays.insert(0, pa.array(np.full(len(columns[0]), number, dtype=np.uint32)))
        return pa.RecordBatch.from_arrays(arrays, schema=schema)

    def to_columns(self, batch: pa.RecordBatch, view: Viewer) -> Columns:
        """Rows of a batch, of those fields that it has."""
        have = batch.schema.names
        return tuple(
            field.to_tensor(batch.column(field.name), view)
            for field in self.fields
            if field.name in have
        )

    def empty(self, rows: int) -> Columns:
        """So many rows with anything in them."""
        return tuple(
            torch.empty(field.shape(rows), dtype=field.dtype, device="cpu") for field in self.fields
        )

    def check(self, columns: Columns, table: str) -> None:
        """Check shapes, dtypes and device.

        Raises:
            CheckpointError: rows of another layout.
        """
        rows = len(columns[0])
        for field, column in zip(self.fields, columns, strict=True):
            got = f"{tuple(column.shape)} {column.dtype} on {column.device}"
            if got != (wanted := f"{field.shape(rows)} {field.dtype} on cpu"):
                what = f"{field.name} of rows of table {table!r}"
                raise CheckpointError(what, got, wanted, "Write each table with its own layout.")


def chunk_of(table: str, columns: Columns) -> RowChunk:
    """Rows of a layout of rows as a chunk, whose `columns` they are."""
    ids, versions, last_seen_s, counts, weights, state = columns
    return RowChunk(table, ids, weights, state, versions, last_seen_s, counts)


def selected(columns: Columns, rows: Tensor | slice) -> Columns:
    """Some of the rows."""
    return tuple(column[rows] for column in columns)


def joined(layout: RowLayout, parts: Sequence[Columns]) -> Columns:
    """The rows of all parts, one after the other."""
    if len(parts) == 1:
        return parts[0]
    return tuple(map(torch.cat, zip(*parts, strict=True))) if parts else layout.empty(0)


def tallied(values_N: Tensor, counts_N: Tensor) -> tuple[Tensor, Tensor]:
    """Each of some numbers once, ascending, int64 [V], and the sum of its counts, int64 [V]."""
    values_V, where_N = torch.unique(values_N, return_inverse=True)
    return values_V, torch.zeros_like(values_V).index_add_(0, where_N, counts_N)


def layout_of(saved: SavedFile, tables: Iterable[SavedTable]) -> RowLayout:
    """Of a file of rows or ids among these tables."""
    if saved.kind != "rows":
        return RowLayout.ids(counted=saved.kind == "admission")
    return next(RowLayout.of(table) for table in tables if table.key in saved.tables)


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
    memory = buffer or ReadBuffer()
    check_streaming(storage, saved, memory)
    return memory.take(saved.bytes)


def checked_pieces(
    storage: Storage, saved: SavedFile, buffer: ReadBuffer | None = None
) -> Iterator[memoryview]:
    """The bytes of a file; size and checksum are compared at its end.

    buffer: memory for all of them; None: each piece is good until the next.

    Raises:
        CheckpointError: missing, or other bytes than those that were saved.
    """
    _check(storage, saved, storage.size(saved.path))
    into, once = (None, False) if buffer is None else (buffer.take(saved.bytes), buffer.once)
    size = crc32 = 0
    for piece in storage.pieces(saved.path, None if into is None else _memory(into), once=once):
        crc32 = _core.crc32(piece, crc32)
        size += len(piece)
        yield piece
    _check(storage, saved, size, crc32)


def check_streaming(storage: Storage, saved: SavedFile, buffer: ReadBuffer | None = None) -> None:
    """Compare a file's size and checksum; raises as the above."""
    for _ in checked_pieces(storage, saved, buffer):
        pass


def check_sizes(storage: Storage, files: Iterable[SavedFile]) -> None:
    """Compare sizes alone, by one listing: bytes that are there bound what a manifest may claim.

    Raises:
        CheckpointError: a file is missing or of another size.
    """
    sizes = storage.sizes()
    for saved in files:
        if saved.path not in sizes:
            raise damaged(storage, saved.path, "missing", f"{saved.bytes} bytes")
        _check(storage, saved, sizes[saved.path])


def _check(storage: Storage, saved: SavedFile, size: int, crc32: int | None = None) -> None:
    if size != saved.bytes:
        raise damaged(storage, saved.path, f"{size} bytes", f"{saved.bytes} bytes")
    if crc32 not in (None, saved.crc32):
        raise damaged(storage, saved.path, f"checksum {crc32:08x}", f"checksum {saved.crc32:08x}")


def write_whole(
    storage: Storage, path: str, kind: FileKind, data: Buffer, tables: Sequence[str] = ()
) -> SavedFile:
    """Write a file of another kind, such as the cells of a sketch, durably."""
    with storage.create(path) as file:
        file.write(data)
    return saved_file(file, kind, tables)


def saved_file(
    file: DurableFile,
    kind: FileKind,
    tables: Sequence[str] = (),
    ranges: tuple[int, int] = (0, HASHES),
    rows: int = 0,
) -> SavedFile:
    """What a manifest says of a file that was written."""
    return SavedFile(file.path, kind, tuple(tables), *ranges, rows, file.bytes, file.crc32)


def sketch_path(collection: str, table: str) -> str:
    """Where the cells of a table's admission sketch lie."""
    return f"admission/{quote(collection, safe='')}.{quote(table, safe='')}.sketch"


def damaged(storage: Storage, path: str, got: object, allowed: object) -> CheckpointError:
    """A file that is not what the manifest says."""
    return CheckpointError(
        f"file {path} of checkpoint {storage.url}",
        got=got,
        allowed=f"{allowed}, as its manifest says",
        remedy="It is damaged, or of another checkpoint: load an earlier one, or copy it again.",
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


class RowFileWriter:
    """A file of rows or ids being written, as record batches of an Arrow IPC file.

    Args:
        storage: the checkpoint's folder.
        path: below it.
        layout: of all rows.
        tables: keys of the tables, in the order in which their rows come.
        ranges: hashes [start, stop) of the rows.
        kind: "rows", "deleted" or "admission".

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
        kind: FileKind = "rows",
    ) -> None:
        self._layout, self._kind = layout, kind
        self._tables, self._ranges = tuple(tables), ranges
        self._schema = layout.schema(len(self._tables))
        self._file = storage.create(path)
        self._writer: Any = pa.ipc.new_file(self._file, self._schema)
        self._rows = self._staged_rows = self._table = 0
        self._staged: Columns = ()

    def add(self, table_index: int, columns: Columns) -> None:
        """Append rows, any number, of the table of that index in `tables`, ordered by hash.

        Full batches are written before it returns; what is left over is copied, so that the
        caller's memory is free again.

        Raises:
            CheckpointError: rows of another layout, tables out of order, or no space.
        """
        if table_index != self._table:
            if not self._table < table_index < len(self._tables):
                what = f"table of rows for {self._file.path}"
                got = f"index {table_index} after {self._table}"
                allowed = f"ascending, below {len(self._tables)}"
                remedy = "Write the tables in the order of the file."
                raise CheckpointError(what, got, allowed, remedy)
            self._flush()
            self._table = table_index
        rows, at, batch = len(columns[0]), 0, self._layout.batch_rows
        while at < rows:
            taken = min(rows - at, batch - self._staged_rows)
            write = self._write_batch if taken == batch else self._stage
            write(selected(columns, slice(at, at + taken)))
            at += taken

    def close(self) -> SavedFile:
        """Finish it and make it durable."""
        self._flush()
        self._writer.close()
        self._file.close()
        return saved_file(self._file, self._kind, self._tables, self._ranges, self._rows)

    def abort(self) -> None:
        """Remove it."""
        self._writer, self._staged, self._staged_rows = None, (), 0
        self._file.abort()

    def _stage(self, columns: Columns) -> None:
        """Copy rows behind those that wait for a batch to be full, in memory that is reused."""
        self._layout.check(columns, self._tables[self._table])
        self._staged = self._staged or self._layout.empty(self._layout.batch_rows)
        start = self._staged_rows
        self._staged_rows += len(columns[0])
        for to, column in zip(self._staged, columns, strict=True):
            # numpy's copy stays on this thread; torch's would wake those that train.
            _bits(to)[start : self._staged_rows] = _bits(column)
        if self._staged_rows == self._layout.batch_rows:
            self._flush()

    def _flush(self) -> None:
        if self._staged_rows:
            self._write_batch(selected(self._staged, slice(0, self._staged_rows)))
            self._staged_rows = 0

    def _write_batch(self, columns: Columns) -> None:
        key = self._tables[self._table]
        self._writer.write_batch(self._layout.to_arrow(columns, self._schema, self._table, key))
        self._rows += len(columns[0])


def read_rows(
    storage: Storage,
    saved: SavedFile,
    layout: RowLayout,
    buffer: ReadBuffer | None = None,
    *,
    version: int | None = None,
) -> Iterator[tuple[int, Columns]]:
    """Rows or ids of a file, batch after batch: (index into `saved.tables`, rows of that table).

    The file is read whole and checked, and its first batch parsed, before this returns. Ids,
    weights and state of the rows lie in the buffer: with a `buffer` they are good until its next
    use. With a `version`, no row may be of a later one.

    Raises:
        CheckpointError: missing, damaged, or not what the manifest says of it.
    """
    content = read_checked(storage, saved, buffer)
    base = content.data_ptr()

    def view(part: pa.Buffer, dtype: torch.dtype, first: int, count: int) -> Tensor:
        start = part.address - base + first * dtype.itemsize if count else 0
        stop = start + count * dtype.itemsize
        if not 0 <= start <= stop <= len(content):
            got = "rows that are converted as they are read"
            raise damaged(storage, saved.path, got, "rows as they lie in memory")
        return content[start:stop].view(dtype)

    def rows() -> Iterator[tuple[int, Columns]]:
        with parsing(storage, saved.path, "an Arrow IPC file"):
            reader = open_batches(storage, saved, layout, _memory(content))
            for _, table, batch in batches(storage, saved, reader):
                columns = layout.to_columns(batch, view)
                newest = 0 if version is None or layout.named else int(columns[1].max())
                if version is not None and newest > version:
                    got = f"a row of version {newest}"
                    raise damaged(storage, saved.path, got, f"{version} at most")
                yield table, columns

    parts = rows()
    first = next(parts, None)
    return parts if first is None else chain([first], parts)


def open_batches(
    storage: Storage, saved: SavedFile, layout: RowLayout, source: Any, *, ids_only: bool = False
) -> Any:
    """What reads the record batches of a file of rows or ids, or only their ids.

    Raises:
        CheckpointError: other columns than its manifest says, or compressed ones.
    """
    wanted, options = layout.schema(len(saved.tables)), pa.ipc.IpcReadOptions()
    if ids_only:
        options.included_fields = [k for k, name in enumerate(wanted.names) if name in _NAMING]
        wanted = pa.schema([field for field in wanted if field.name in _NAMING])
    file = source if isinstance(source, pa.NativeFile) else pa.BufferReader(source)
    if _is_packed(file):
        raise damaged(storage, saved.path, "compressed rows", "rows as they lie in memory")
    reader = pa.ipc.open_file(file, options=options)
    if not reader.schema.equals(wanted):
        got = " ".join(str(reader.schema).split())
        raise damaged(storage, saved.path, got, " ".join(str(wanted).split()))
    return reader


def _is_packed(file: pa.NativeFile) -> bool:
    """Whether an Arrow IPC file has compressed batches or dictionaries.

    These grow as they are read, to any size. pyarrow has no limit for that and shows neither, so
    they are looked up in the file's footer and in the headers of its batches: flatbuffers, laid
    out as Arrow's format/File.fbs and Message.fbs say.
    """
    size = file.size()
    (length,) = unpack("<i", file.read_at(4, size - 10))
    footer = file.read_at(length, size - 10 - length)
    root = _target(footer, 0)
    if (dictionaries := _field(footer, root, 2)) and _number(footer, _target(footer, dictionaries)):
        return True
    batches_at = _field(footer, root, 3)
    first = _target(footer, batches_at) if batches_at else 0
    for number in range(_number(footer, first) if first else 0):
        at, header_bytes = unpack_from("<qi", footer, first + 4 + 24 * number)
        header = file.read_at(header_bytes, at)
        marked = 8 if _number(header, 0) == 0xFFFFFFFF else 4  # before Arrow 0.15: only a length
        message = marked + _number(header, marked)
        if _field(header, _target(header, _field(header, message, 2)), 3):
            return True
    return False


def _number(data: bytes, at: int) -> int:
    (number,) = unpack_from("<I", data, at)
    return int(number)


def _target(data: bytes, at: int) -> int:
    """Where an offset of a flatbuffer leads."""
    return at + _number(data, at)


def _field(data: bytes, table: int, number: int) -> int:
    """Where a field of a flatbuffer's table lies; 0 if it is left out."""
    (back,) = unpack_from("<i", data, table)
    fields, at = table - back, 4 + 2 * number
    if at >= unpack_from("<H", data, fields)[0]:
        return 0
    offset = unpack_from("<H", data, fields + at)[0]
    return table + offset if offset else 0


def batches(
    storage: Storage, saved: SavedFile, reader: Any
) -> Iterator[tuple[int, int, pa.RecordBatch]]:
    """All record batches of a file of rows or ids with rows in them: (number, table, batch).

    Raises:
        CheckpointError: other tables or rows than its manifest says.
    """
    rows = 0
    for number in range(reader.num_record_batches):
        batch = reader.get_batch(number)
        batch.validate()
        rows += batch.num_rows
        if batch.num_rows:
            table = 0
            if batch.schema.names[0] == "table":
                numbers = batch.column("table").to_numpy()
                table = int(numbers[0])
                if table >= len(saved.tables) or (numbers != table).any():
                    allowed = f"{len(saved.tables)} tables"
                    raise damaged(storage, saved.path, "a batch of other tables", allowed)
            yield number, table, batch
    if rows != saved.rows:
        raise damaged(storage, saved.path, f"{rows} rows", f"{saved.rows} rows")


def _memory(content: Tensor) -> memoryview:
    bytes_N: Any = content.numpy()
    return memoryview(bytes_N)


def _bits(part: Tensor) -> Any:
    return (part.view(torch.int16) if part.dtype == torch.bfloat16 else part).numpy()
