"""Rows of a hash range out of a row file or a file of ids, without the rest of it in memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from shoal.checkpoint.arrow_files import parsing, table_of
from shoal.checkpoint.manifest import SavedFile
from shoal.checkpoint.row_files import HASHES, check_streaming, damaged
from shoal.checkpoint.row_layout import ROW_FIELDS, IdLayout, RowLayout
from shoal.checkpoint.storage import Storage
from shoal.placement import hash_ids, sort_key
from shoal.table.shard import RowChunk

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["RangedFile", "bounds", "concatenated"]

_OPEN = 32  # readers


def bounds(keys: Tensor, start: int, stop: int) -> tuple[int, int]:
    """Where the hashes [start, stop) lie in ascending sort keys."""
    first = int(torch.searchsorted(keys, start - (1 << 63))) if start else 0
    last = len(keys)
    if stop < HASHES:
        last = int(torch.searchsorted(keys, stop - (1 << 63)))
    return first, last


@dataclass(frozen=True, slots=True)
class _Batch:
    """Table, first and last sort key of a record batch."""

    number: int
    table: int
    first: int
    last: int


class OpenFiles:
    """Readers of files that were read last; opening one costs more than reading a batch."""

    def __init__(self) -> None:
        self._readers: OrderedDict[object, tuple[Any, Any]] = OrderedDict()

    def reader(self, key: object, opened: Callable[[], tuple[Any, Any]]) -> Any:
        """The reader of that key; `opened` makes it, with the file to close after it."""
        if key not in self._readers:
            self._readers[key] = opened()
            while len(self._readers) > _OPEN:
                self._readers.popitem(last=False)[1][1].close()
        self._readers.move_to_end(key)
        return self._readers[key][0]


class RangedFile:
    """A file of rows (`layout` given) or of ids.

    Its checksum is compared before it is parsed for the first time.

    Args:
        hash_names: of its tables, in the order of `saved.tables`.
        opened: where it stays open between two reads.
    """

    def __init__(
        self,
        storage: Storage,
        saved: SavedFile,
        hash_names: Sequence[str],
        layout: RowLayout | None,
        opened: OpenFiles,
    ) -> None:
        self.saved = saved
        self._opened_files = opened
        self._storage = storage
        self._hash_names = tuple(hash_names)
        self._layout = layout
        self._named = layout is None or len(saved.tables) > 1
        self._index: list[_Batch] | None = None
        ids = IdLayout(counted=saved.kind == "sights")
        self._schema = layout.schema(self._named) if layout else ids.schema()

    def ids(self, table: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Ids and ascending sort keys of the hashes [start, stop) of a table of the file."""
        with self._parsing():
            parts = [self._ids_of(batch) for batch in self._read(table, start, stop, ids_only=True)]
        ids = torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device="cpu")
        keys = sort_key(hash_ids(self._hash_names[table], ids))
        if not bool((keys[1:] > keys[:-1]).all()):
            raise damaged(self._storage, self.saved.path, "rows out of order", "rows by hash")
        first, last = bounds(keys, start, stop)
        return ids[first:last], keys[first:last]

    def rows(self, table: int, start: int, stop: int) -> Iterator[RowChunk]:
        """Rows of the hashes [start, stop) of a table of the file, batch after batch."""
        layout, key = self._layout, self.saved.tables[table]
        assert layout is not None, "a file of ids has no rows"
        for batch in self._read(table, start, stop, ids_only=False):
            with self._parsing():
                chunk = layout.to_chunk(batch, key, _copied)
            keys = sort_key(hash_ids(self._hash_names[table], chunk.ids))
            first, last = bounds(keys, start, stop)
            if (first, last) != (0, len(keys)):
                parts = {name: getattr(chunk, name)[first:last] for name in ROW_FIELDS}
                chunk = RowChunk(table=key, **parts)
            yield chunk

    def _read(
        self, table: int, start: int, stop: int, *, ids_only: bool
    ) -> Iterator[pa.RecordBatch]:
        if self._index is None:
            check_streaming(self._storage, self.saved)
            with self._parsing():
                self._index = list(self._indexed())
        low, high = start - (1 << 63), stop - 1 - (1 << 63)
        wanted = [
            one.number
            for one in self._index
            if one.table == table and one.first <= high and one.last >= low
        ]
        for number in wanted:
            with self._parsing():
                batch = self._reader(ids_only=ids_only).get_batch(number)
                batch.validate()
            yield batch

    def _indexed(self) -> Iterator[_Batch]:
        rows = 0
        self._check_schema()
        reader = self._reader(ids_only=True)
        for number in range(reader.num_record_batches):
            batch = reader.get_batch(number)
            batch.validate()
            rows += batch.num_rows
            if batch.num_rows:
                table = table_of(self._storage, self.saved, batch) if self._named else 0
                ends = self._ids_of(batch)[[0, -1]]
                keys = sort_key(hash_ids(self._hash_names[table], ends)).tolist()
                yield _Batch(number, table, keys[0], keys[1])
        if rows != self.saved.rows:
            got = f"{rows} rows"
            raise damaged(self._storage, self.saved.path, got, f"{self.saved.rows} rows")

    def _reader(self, *, ids_only: bool) -> Any:
        def opened() -> tuple[Any, Any]:
            import pyarrow as pa

            options = None
            if ids_only:
                names = enumerate(self._schema.names)
                columns = [k for k, name in names if name in ("table", "id")]
                options = pa.ipc.IpcReadOptions(included_fields=columns)
            file = self._storage.open_arrow(self.saved.path)
            return pa.ipc.open_file(file, options=options), file

        return self._opened_files.reader((self, ids_only), opened)

    def _check_schema(self) -> None:
        schema = self._reader(ids_only=False).schema
        if not schema.equals(self._schema):
            got, wanted = (" ".join(str(one).split()) for one in (schema, self._schema))
            raise damaged(self._storage, self.saved.path, got, wanted)

    def _ids_of(self, batch: pa.RecordBatch) -> Tensor:
        return torch.from_numpy(batch.column("id").to_numpy().copy())

    def _parsing(self) -> AbstractContextManager[None]:
        return parsing(self._storage, self.saved.path, "an Arrow IPC file")


def concatenated(layout: RowLayout, table: str, chunks: Sequence[RowChunk]) -> RowChunk:
    """Rows of several chunks in one."""
    if len(chunks) == 1:
        return chunks[0]
    if not chunks:
        return layout.empty(0, table)
    parts = {name: torch.cat([getattr(one, name) for one in chunks]) for name in ROW_FIELDS}
    return RowChunk(table=table, **parts)


def _copied(buffer: pa.Buffer, dtype: torch.dtype, first: int, count: int) -> Tensor:
    size = dtype.itemsize
    memory = np.frombuffer(buffer, dtype=np.uint8, count=count * size, offset=first * size)
    return torch.from_numpy(memory.copy()).view(dtype)
