"""Files with a size and a checksum, and Arrow files among them: written in order, checked first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import torch
from torch import Tensor

from shoal import _core
from shoal.checkpoint.manifest import FileKind, SavedFile
from shoal.checkpoint.storage import Buffer, DurableFile, Storage
from shoal.errors import CheckpointError, ShoalError, describe

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = [
    "HASHES",
    "ArrowFile",
    "ReadBuffer",
    "check_sizes",
    "check_streaming",
    "damaged",
    "parsing",
    "read_batches",
    "read_checked",
    "sketch_path",
    "table_of",
    "viewer",
    "write_whole",
]

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
        describe(
            f"file {path} of checkpoint {storage.url}",
            got=got,
            allowed=f"{allowed}, as its manifest says",
            remedy="It is damaged, or of another checkpoint: load an earlier one, or copy it anew.",
        )
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
                describe(
                    f"table of rows for {self.saved_path}",
                    got=f"index {then} after {now}",
                    allowed=f"ascending, below {len(self._tables)}",
                    remedy="Write the tables in the order of the file.",
                )
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
