"""Tables as Parquet: a folder of files for each, read by pandas, polars, DuckDB and Shoal."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from pyarrow import compute
from pyarrow import parquet as pq
from pydantic import TypeAdapter
from torch import Tensor

from shoal.checkpoint.formats.dumps import rows_at_once
from shoal.checkpoint.formats.foreign import (
    Entries,
    ForeignSource,
    Offered,
    malformed,
    need_file,
    source_of,
)
from shoal.checkpoint.manifest import SavedTable
from shoal.checkpoint.row_files import Columns, selected
from shoal.errors import known_name

_NOTE, _SEED, _PLACE = b"shoal.table", b"shoal.seed", b"shoal.place"
_SAVED = TypeAdapter(SavedTable)
_FILE_BYTES = 256 << 20
_VECTORS = ("weights", "weight", "vector", "embedding")
_IDS = ("id", "ids", "fid")
_METADATA = {"version": "versions", "last_seen_s": "last_seen_s", "count": "counts"}


def write_parquet(
    folder: Path,
    table: SavedTable,
    chunks: Iterable[Columns],
    *,
    seed: int = 0,
    place: int = 0,
    weights_only: bool = False,
) -> int:
    """Write the rows of a table into files of a new folder.

    Args:
        chunks: any number of rows each; a row group has some MiB of rows at most.
        seed: of the table's initial values.
        place: among the tables that are read together again.
        weights_only: without state and metadata.

    Returns:
        rows written.
    """
    folder.mkdir(parents=True)
    schema = _schema(table, weights_only, {_SEED: str(seed), _PLACE: str(place)})
    per_group = rows_at_once(table.dim + table.state_width)
    per_file = max(1, _FILE_BYTES // (4 * (table.dim + table.state_width) + 20))
    batches = (
        pa.record_batch(_arrays(selected(chunk, slice(at, at + per_group)), schema), schema=schema)
        for chunk in chunks
        for at in range(0, len(chunk[0]), per_group)
    )
    batch, rows, files = next(batches, None), 0, 0
    while batch is not None or not files:  # without rows a file all the same, for what it says
        with pq.ParquetWriter(folder / f"rows-{files:05d}.parquet", schema) as writer:
            left, files = per_file, files + 1
            while batch is not None and left > 0:
                writer.write_batch(batch)
                rows, left = rows + batch.num_rows, left - batch.num_rows
                batch = next(batches, None)
    return rows


def open_parquet(
    path: Path, table: str | None = None, *, ids: str | None = None, vectors: str | None = None
) -> ForeignSource:
    """Open a file, the folder of a table's files, or a folder of such folders.

    Args:
        path: what `write_parquet` wrote, or any Parquet with a column of ids and one of vectors.
        table: the name of the table, where the files do not say it. Tables of one name in several
            collections are offered as "collection/table".
        ids, vectors: the columns; "id" and "weights", or other usual names.

    Raises:
        DataError: no Parquet there, no such columns, or columns of another type.
        UnknownName: a column that was named is not there.
    """
    need_file(path, "a Parquet file, or a folder with some")
    folders = [path] if path.is_file() or any(path.glob("*.parquet")) else sorted(path.iterdir())
    parts = [_TableFiles(folder, table, ids, vectors) for folder in folders if _files_in(folder)]
    if not parts:
        raise malformed(path, "no .parquet files", "a Parquet file or a folder of them", "Check.")
    parts.sort(key=lambda part: part.place)
    # Tables of one name in several collections go by "collection/table".
    names = Counter(part.offered.name for part in parts)
    for part in parts:
        saved = part.offered.saved
        if saved is not None and names[part.offered.name] > 1:
            part.offered = replace(part.offered, name=saved.key)
    return source_of([(part.offered, part.entries) for part in parts])


class _TableFiles:
    """The files of one table."""

    def __init__(self, path: Path, table: str | None, ids: str | None, vectors: str | None) -> None:
        self._path, self._files = path, _files_in(path)
        schema = _parquet(self._files[0]).schema_arrow
        self._id = _column(self._files[0], schema.names, "ids", ids, _IDS)
        self._vector = _column(self._files[0], schema.names, "vectors", vectors, _VECTORS)
        saved, seed, self.place = _saved_in(self._files[0], schema)
        self._extra = [name for name in ("state", *_METADATA) if saved and name in schema.names]
        name = saved.name if saved else table
        if name is None:
            raise malformed(path, "a table without a name", "one to be named", "Add --table NAME.")
        self.offered = Offered(
            name=name,
            dim=saved.dim if saved else self._first_dim(),
            saved=saved,
            seed=seed,
            has_state=saved is not None and (not saved.state_width or "state" in self._extra),
        )

    def entries(self) -> Iterator[Entries]:
        many = rows_at_once(self.offered.dim)
        for file in self._files:
            for batch in self._batches(file, many):
                ids = _ids_of(file, self._id, batch.column(self._id))
                extra = {name: batch.column(name) for name in self._extra}
                saved = self.offered.saved
                yield Entries(
                    ids=ids,
                    weights=_matrix(file, self._vector, batch, ids, self.offered.dim),
                    state=_matrix(file, "state", batch, ids, saved.state_width)
                    if saved and "state" in extra
                    else None,
                    **{
                        field: _whole(extra[name])
                        for name, field in _METADATA.items()
                        if name in extra
                    },
                )

    def _first_dim(self) -> int:
        for file in self._files:
            for batch in self._batches(file, 1):
                ids = _ids_of(file, self._id, batch.column(self._id))
                return _matrix(file, self._vector, batch, ids, None).shape[1]
        raise malformed(self._path, "no rows", "one row or more", "Nothing says its columns.")

    def _batches(self, file: Path, many: int) -> Iterator[Any]:
        wanted = [self._id, self._vector, *self._extra]
        opened = _parquet(file)
        names = opened.schema_arrow.names
        if missing := [name for name in wanted if name not in names]:
            got = f"no column {missing[0]!r}, which {self._files[0].name} has"
            raise malformed(file, got, ", ".join(wanted), "Keep files of one form in a folder.")
        try:
            yield from opened.iter_batches(batch_size=many, columns=wanted)
        except (pa.ArrowException, OSError) as error:
            raise _unreadable(file, error) from error


def _schema(table: SavedTable, weights_only: bool, notes: Mapping[bytes, str]) -> Any:
    real = pa.float64() if table.dtype == "float64" else pa.float32()
    fields = [pa.field("id", pa.int64(), nullable=False), pa.field("weights", pa.list_(real))]
    if not weights_only:
        fields += [pa.field("state", pa.list_(real))] if table.state_width else []
        fields += [pa.field(name, pa.uint32(), nullable=False) for name in _METADATA]
    return pa.schema(fields, metadata={_NOTE: json.dumps(asdict(table)), **notes})


def _arrays(columns: Columns, schema: Any) -> list[Any]:
    ids, versions, last_seen_s, counts, weights, state = columns
    words = dict(zip(_METADATA, (versions, last_seen_s, counts), strict=True))
    every = {"id": pa.array(ids.numpy()), "weights": _lists(weights)}
    every |= {name: pa.array(one.numpy().astype(np.uint32)) for name, one in words.items()}
    return [every[name] if name in every else _lists(state) for name in schema.names]


def _lists(matrix: Tensor) -> Any:
    rows, width = matrix.shape
    wide = matrix if matrix.dtype == torch.float64 else matrix.float()
    offsets = np.arange(0, rows * width + 1, width, dtype=np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(wide.reshape(-1).numpy()))


def _matrix(file: Path, column: str, batch: Any, ids: Tensor, width: int | None) -> Tensor:
    """A column of lists as [N, width]; `width` None takes the first row's."""
    values = batch.column(column)
    inner = getattr(values.type, "value_type", None)
    if inner is None or not pa.types.is_floating(inner):
        raise _of_type(file, column, values.type, "lists of floats")
    lengths = compute.list_value_length(values)
    width = lengths[0].as_py() if width is None and len(lengths) else width
    other = compute.fill_null(compute.not_equal(lengths, width or 0), True)
    if not width or compute.any(other).as_py():
        row = compute.index(other, True).as_py() if width else 0
        got = f"{lengths[row].as_py() or 'no'} values at id {int(ids[row])}"
        allowed = f"{width or 'one or more'} in each row"
        raise malformed(f"column {column!r} of {file}", got, allowed, "Correct that row.")
    flat = values.flatten()
    if flat.null_count:
        raise malformed(f"column {column!r} of {file}", "nulls", "numbers", "Write NaN instead.")
    matrix = np.array(flat.to_numpy(zero_copy_only=False)).reshape(len(values), width)
    return torch.from_numpy(matrix)


def _ids_of(file: Path, column: str, values: Any) -> Tensor:
    if not pa.types.is_integer(values.type) or values.null_count:
        got = "nulls" if values.null_count else values.type
        raise _of_type(file, column, got, "integers, none missing")
    return _whole(values)


def _whole(values: Any) -> Tensor:
    """int64 [N]; 64-bit numbers without a sign keep their bits."""
    return torch.from_numpy(values.to_numpy(zero_copy_only=False).astype(np.int64))


def _column(
    file: Path, names: list[str], what: str, asked: str | None, usual: tuple[str, ...]
) -> str:
    if asked is not None:
        known_name(f"column of {what} in {file}", asked, names)
        return asked
    found = next((name for name in usual if name in names), None)
    if found is None:
        option = "--id-column" if what == "ids" else "--vector-column"
        got = f"columns {', '.join(names) or 'none'}"
        allowed = f"a column of {what} named {' or '.join(usual)}"
        raise malformed(file, got, allowed, f"Name the column with {option}.")
    return found


def _saved_in(file: Path, schema: Any) -> tuple[SavedTable | None, int | None, int]:
    notes = schema.metadata or {}
    if _NOTE not in notes:
        return None, None, 0
    try:
        saved = _SAVED.validate_json(notes[_NOTE])
        return saved, int(notes.get(_SEED, b"0")), int(notes.get(_PLACE, b"0"))
    except ValueError as error:
        raise _unreadable(file, error) from error


def _files_in(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(path.glob("*.parquet"))


def _parquet(file: Path) -> Any:
    try:
        return pq.ParquetFile(file)
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(file, error) from error


def _unreadable(file: Path, error: Exception) -> Exception:
    got = " ".join(str(error).split())
    return malformed(file, got, "a Parquet file as it was written", "Copy it again.")


def _of_type(file: Path, column: str, got: object, allowed: str) -> Exception:
    remedy = "Convert the column, or name another."
    return malformed(f"column {column!r} of {file}", got, allowed, remedy)
