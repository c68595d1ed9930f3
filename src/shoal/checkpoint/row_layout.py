"""How rows of a table lie in a row file, and ids of deletions and sights in theirs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from shoal.checkpoint.manifest import SavedTable
from shoal.errors import CheckpointError
from shoal.table.values import RowChunk

if TYPE_CHECKING:
    import pyarrow as pa


ROW_FIELDS = ("ids", "weights", "state", "versions", "last_seen_s", "counts")
"""What a `RowChunk` has of each row."""

_BATCH_BYTES = 8 << 20
_METADATA_BYTES = 8 + 4 + 4 + 4
_WEIGHTS = {
    "float32": torch.float32,
    "float64": torch.float64,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}

Viewer = Callable[["pa.Buffer", torch.dtype, int, int], Tensor]
"""(buffer, dtype, first element, elements) -> a tensor over that memory."""


def _batch_rows(row_bytes: int) -> int:
    """Rows of a full record batch: the largest power of two within 8 MiB, 1 at least."""
    return 1 << max(0, (_BATCH_BYTES // max(1, row_bytes)).bit_length() - 1)


@dataclass(frozen=True, slots=True)
class RowLayout:
    """Columns of a table's rows: `dim` weights of `dtype`, `state_width` floats of state.

    State is float64 for float64 tables, else float32. bfloat16 is kept as its int16 bits.

    Raises:
        CheckpointError: a dtype that rows do not have, or a negative width.
    """

    dim: int
    state_width: int
    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in _WEIGHTS or self.dim < 0 or self.state_width < 0:
            raise CheckpointError(
                "layout of a row",
                got=f"dim={self.dim}, state_width={self.state_width}, dtype={self.dtype!r}",
                allowed=f"widths of 0 or more and a dtype of {', '.join(_WEIGHTS)}",
                remedy="Load it with the version that wrote it.",
            )

    @staticmethod
    def of(table: SavedTable) -> RowLayout:
        """The layout of a saved table's rows."""
        return RowLayout(table.dim, table.state_width, table.dtype)

    @property
    def weights_dtype(self) -> torch.dtype:
        """Of weights in memory."""
        return _WEIGHTS[self.dtype]

    @property
    def state_dtype(self) -> torch.dtype:
        """Of state in memory."""
        return torch.float64 if self.dtype == "float64" else torch.float32

    @property
    def row_bytes(self) -> int:
        """Bytes of a row, the column that names its table left out."""
        weights, state = self.weights_dtype.itemsize, self.state_dtype.itemsize
        return _METADATA_BYTES + self.dim * weights + self.state_width * state

    @property
    def batch_rows(self) -> int:
        """Rows of every record batch but a table's last in a file."""
        return _batch_rows(self.row_bytes)

    def schema(self, grouped: bool) -> pa.Schema:
        """Of a file of one table, or of several (`grouped`), which names each row's table."""
        import pyarrow as pa

        fields = [
            ("id", pa.int64()),
            ("version", pa.uint32()),
            ("last_seen_s", pa.uint32()),
            ("count", pa.uint32()),
            ("weights", pa.list_(_arrow_type(self.weights_dtype), self.dim)),
            ("state", pa.list_(_arrow_type(self.state_dtype), self.state_width)),
        ]
        head = [("table", pa.uint32())] if grouped else []
        return pa.schema([pa.field(name, kind, nullable=False) for name, kind in head + fields])

    def to_arrow(self, chunk: RowChunk, table: int | None = None) -> pa.RecordBatch:
        """A record batch over the chunk's memory; `table` is its number in a grouped file.

        Raises:
            CheckpointError: rows of another layout, or metadata outside 32 bits.
        """
        import pyarrow as pa

        self.check(chunk)
        rows = len(chunk.ids)
        schema = self.schema(table is not None)
        arrays = [
            pa.array(chunk.ids.contiguous().numpy()),
            _words(chunk.versions, "versions", chunk.table),
            _words(chunk.last_seen_s, "last_seen_s", chunk.table),
            _words(chunk.counts, "counts", chunk.table),
            _vectors(chunk.weights, schema.field("weights").type),
            _vectors(chunk.state, schema.field("state").type),
        ]
        if table is not None:
            arrays.insert(0, pa.array(np.full(rows, table, dtype=np.uint32)))
        return pa.RecordBatch.from_arrays(arrays, schema=schema)

    def to_chunk(self, batch: pa.RecordBatch, table: str, view: Viewer) -> RowChunk:
        """Rows of a batch; ids, weights and state lie in the batch's memory, as `view` shows it."""
        rows = batch.num_rows
        return RowChunk(
            table=table,
            ids=view(_values(batch.column("id")), torch.int64, batch.column("id").offset, rows),
            weights=_matrix(batch.column("weights"), self.weights_dtype, self.dim, view),
            state=_matrix(batch.column("state"), self.state_dtype, self.state_width, view),
            versions=_longs(batch.column("version")),
            last_seen_s=_longs(batch.column("last_seen_s")),
            counts=_longs(batch.column("count")),
        )

    def empty(self, rows: int, table: str = "") -> RowChunk:
        """A chunk of that many rows with anything in them."""
        words = (torch.empty(rows, dtype=torch.int64, device="cpu") for _ in range(4))
        ids, versions, last_seen_s, counts = words
        return RowChunk(
            table=table,
            ids=ids,
            weights=torch.empty(rows, self.dim, dtype=self.weights_dtype, device="cpu"),
            state=torch.empty(rows, self.state_width, dtype=self.state_dtype, device="cpu"),
            versions=versions,
            last_seen_s=last_seen_s,
            counts=counts,
        )

    def check(self, chunk: RowChunk) -> None:
        """Check shapes, dtypes and device.

        Raises:
            CheckpointError: rows of another layout.
        """
        rows = len(chunk.ids)
        wanted = {
            "ids": ((rows,), torch.int64),
            "weights": ((rows, self.dim), self.weights_dtype),
            "state": ((rows, self.state_width), self.state_dtype),
            "versions": ((rows,), torch.int64),
            "last_seen_s": ((rows,), torch.int64),
            "counts": ((rows,), torch.int64),
        }
        for name, (shape, dtype) in wanted.items():
            part: Tensor = getattr(chunk, name)
            if tuple(part.shape) != shape or part.dtype != dtype or part.device.type != "cpu":
                raise CheckpointError(
                    f"{name} of rows of table {chunk.table!r}",
                    got=f"{tuple(part.shape)} {part.dtype} on {part.device}",
                    allowed=f"{shape} {dtype} on cpu",
                    remedy="Write each table with its own layout.",
                )


@dataclass(frozen=True, slots=True)
class IdLayout:
    """Ids of deleted rows, or (`counted`) of sights with their counts; always names the table."""

    counted: bool = False

    @property
    def row_bytes(self) -> int:
        """Bytes of an id with what goes with it."""
        return 16 if self.counted else 12

    @property
    def batch_rows(self) -> int:
        """Ids of every record batch but a table's last in a file."""
        return _batch_rows(self.row_bytes)

    def schema(self) -> pa.Schema:
        """Of the file."""
        import pyarrow as pa

        fields = [("table", pa.uint32()), ("id", pa.int64())]
        if self.counted:
            fields.append(("count", pa.uint32()))
        return pa.schema([pa.field(name, kind, nullable=False) for name, kind in fields])

    def to_arrow(self, table: int, ids_U: Tensor, counts_U: Tensor | None) -> pa.RecordBatch:
        """A record batch of one table's ids, int64 [U], and their counts, int64 [U]."""
        import pyarrow as pa

        arrays = [
            pa.array(np.full(len(ids_U), table, dtype=np.uint32)),
            pa.array(ids_U.contiguous().numpy()),
        ]
        if counts_U is not None:
            arrays.append(_words(counts_U, "sights", str(table)))
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema())


def _arrow_type(dtype: torch.dtype) -> pa.DataType:
    import pyarrow as pa

    types: dict[torch.dtype, Any] = {
        torch.float32: pa.float32(),
        torch.float64: pa.float64(),
        torch.float16: pa.float16(),
        torch.bfloat16: pa.int16(),
    }
    return types[dtype]


def _words(values_R: Tensor, name: str, table: str) -> pa.Array:
    """int64 [R] as uint32."""
    import pyarrow as pa

    values = values_R.contiguous().numpy()
    narrow = values.astype(np.uint32)
    if not np.array_equal(narrow, values):
        raise CheckpointError(
            f"{name} of rows of table {table!r}",
            got=f"{int(values.min())}..{int(values.max())}",
            allowed="0..2^32 - 1",
            remedy="These are whole counts, seconds or epochs of 32 bits.",
        )
    return pa.array(narrow)


def _vectors(values_RD: Tensor, kind: pa.DataType) -> pa.Array:
    """[R, D] as a list array over the same memory."""
    import pyarrow as pa

    flat = values_RD.contiguous().reshape(-1)
    if flat.dtype == torch.bfloat16:
        flat = flat.view(torch.int16)
    child = pa.array(flat.numpy())
    return pa.Array.from_buffers(kind, len(values_RD), [None], children=[child])


def _values(array: pa.Array) -> pa.Buffer:
    return array.buffers()[-1]


def _longs(array: pa.Array) -> Tensor:
    """uint32 as int64."""
    return torch.from_numpy(array.to_numpy(zero_copy_only=True).astype(np.int64))


def _matrix(array: pa.Array, dtype: torch.dtype, width: int, view: Viewer) -> Tensor:
    rows = len(array)
    if rows * width == 0:
        return torch.empty(rows, width, dtype=dtype, device="cpu")
    first = array.offset * width + array.values.offset
    return view(_values(array), dtype, first, rows * width).view(rows, width)
