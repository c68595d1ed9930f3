"""Plain dumps of (id, vector): .npz, text, weights of torch embeddings."""

from __future__ import annotations

import functools
import math
import pickle
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from pyarrow import csv
from torch import Tensor

from shoal.checkpoint.formats.foreign import (
    Entries,
    ForeignSource,
    Offered,
    malformed,
    need_file,
    source_of,
)
from shoal.errors import unknown_name

_PIECE_BYTES = 8 << 20
_DELIMITERS = (",", "\t", ";", " ")


def rows_at_once(dim: int) -> int:
    """Rows of D columns to hand on together: some MiB of them."""
    return max(1, _PIECE_BYTES // (8 * (dim + 4)))


def open_npz(path: Path, table: str) -> ForeignSource:
    """Open an .npz with one array of ids [N], integers, and one of vectors [N, D], floats.

    Raises:
        DataError: no such file, or other arrays in it.
    """
    need_file(path, "an .npz file with ids [N] and vectors [N, D]")
    try:
        with np.load(path, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files}
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise malformed(path, " ".join(str(error).split()), "an .npz file", "Check it.") from error
    ids = [a for a in arrays.values() if a.ndim == 1 and a.dtype.kind in "iu"]
    vectors = [a for a in arrays.values() if a.ndim == 2 and a.dtype.kind == "f"]
    if len(ids) != 1 or len(vectors) != 1 or len(ids[0]) != len(vectors[0]):
        got = ", ".join(f"{name} {a.dtype}{list(a.shape)}" for name, a in arrays.items())
        allowed = "one array of ids, integers [N], and one of vectors, floats [N, D]"
        raise malformed(path, got or "no arrays", allowed, "Save it with those two only.")
    ids_N, vectors_ND = torch.from_numpy(ids[0].astype(np.int64)), torch.from_numpy(vectors[0])
    return source_of([_offered(table, ids_N, vectors_ND)])


def _offered(
    name: str, ids_N: Tensor, weights_ND: Tensor
) -> tuple[Offered, Callable[[], Iterator[Entries]]]:
    """A table that is in memory, or mapped."""
    many = rows_at_once(weights_ND.shape[1])

    def read() -> Iterator[Entries]:
        pieces = (torch.split(one, many) for one in (ids_N, weights_ND))
        for ids, weights in zip(*pieces, strict=True):
            yield Entries(ids=ids, weights=weights.detach().contiguous())

    return Offered(name=name, dim=weights_ND.shape[1]), read


def open_text(path: Path, table: str) -> ForeignSource:
    """Open lines "id, v1, ..., vD", between them a comma, tab, semicolon or space.

    A first line that begins with no number is a header and is skipped, unless fractions follow:
    that is a row with a wrong id.

    Raises:
        DataError: no such file, or a first line of another form.
    """
    need_file(path, "a text file with lines of an id and its vector")
    allowed = "lines of an integer and at least one number"
    try:
        with path.open(encoding="utf-8") as file:
            first, second = file.readline().strip(), file.readline().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise malformed(path, error, allowed, "Check the file.") from error
    begins, *others = _split(first)
    fractions = any(_is_number(field) and not _is_whole(field) for field in others)
    skipped = not _is_number(begins) and not fractions
    line = second if skipped else first
    fields = _split(line)
    if len(fields) < 2 or not _is_whole(fields[0]):
        raise malformed(path, repr(line[:60]), allowed, "Put the id before its vector.")
    delimiter = next(one for one in _DELIMITERS if one in line)
    offered = Offered(name=table, dim=len(fields) - 1)
    read = functools.partial(_read_lines, path, offered.dim, delimiter, int(skipped))
    return source_of([(offered, read)])


def _read_lines(path: Path, dim: int, delimiter: str, skipped: int) -> Iterator[Entries]:
    names = ["id", *(f"v{index}" for index in range(dim))]
    types = {name: pa.float64() for name in names} | {"id": pa.int64()}
    try:
        with csv.open_csv(
            path,
            read_options=csv.ReadOptions(column_names=names, skip_rows=skipped),
            parse_options=csv.ParseOptions(delimiter=delimiter),
            convert_options=csv.ConvertOptions(column_types=types, null_values=[]),
        ) as reader:
            for batch in reader:
                ids, *columns = (one.to_numpy(zero_copy_only=False) for one in batch.columns)
                weights = np.ascontiguousarray(np.stack(columns, axis=1))
                yield Entries(ids=torch.from_numpy(ids.copy()), weights=torch.from_numpy(weights))
    except pa.ArrowException as error:
        got, allowed = " ".join(str(error).split()), f"lines of an integer and {dim} numbers"
        raise malformed(path, got, allowed, "Correct that line.") from error


def _split(line: str) -> list[str]:
    delimiter = next((one for one in _DELIMITERS if one in line), " ")
    return [field.strip() for field in line.split(delimiter)]


def _is_number(field: str) -> bool:
    try:
        return math.isfinite(float(field))
    except ValueError:
        return False


def _is_whole(field: str) -> bool:
    return field.lstrip("+-").isdigit()


def open_embeddings(path: Path, tables: Mapping[str, str | None]) -> ForeignSource:
    """Open a file that `torch.save(model.state_dict(), path)` wrote.

    Args:
        path: the file; dicts in it may be nested, as in `{"model": state_dict}`.
        tables: name of each table to be -> key of its weights, or the end of the key. Without a
            key it is the one that ends in "NAME.weight" (as torchrec's
            "embedding_bags.NAME.weight" does) or the only weights [rows, D] there are.

    Raises:
        DataError: no such file, or one that torch does not load.
        UnknownName: no weights of that key or table.
    """
    need_file(path, "a file of torch.save")
    every = dict(_flat(_load(path)))
    weights = {key: value for key, value in every.items() if _is_matrix(value)}
    for table, key in tables.items():
        _check_form(path, f"{table}.weight" if key is None else key, every)
    found = {table: weights[_key_of(path, table, key, weights)] for table, key in tables.items()}
    return source_of(
        _offered(name, torch.arange(len(one), device="cpu"), one) for name, one in found.items()
    )


def _load(path: Path) -> Any:
    try:
        try:
            return torch.load(path, weights_only=True, map_location="cpu", mmap=True)
        except RuntimeError:  # a file older than torch 1.6 cannot be mapped
            return torch.load(path, weights_only=True, map_location="cpu")
    except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
        got = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        remedy = "Save the state dict: torch.save(model.state_dict(), path)."
        raise malformed(path, got, "tensors by name, in dicts", remedy) from error


def _flat(part: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(part, Tensor):
        yield prefix or "weight", part
    elif isinstance(part, Mapping):
        for key, value in part.items():
            yield from _flat(value, f"{prefix}.{key}" if prefix else str(key))


def _is_matrix(value: Tensor) -> bool:
    return value.ndim == 2 and value.dtype.is_floating_point and value.layout is torch.strided


def _check_form(path: Path, ending: str, every: Mapping[str, Tensor]) -> None:
    """Refuse weights that are there, of another form than a table's."""
    for name, value in every.items():
        if (name == ending or name.endswith(f".{ending}")) and not _is_matrix(value):
            layout = "" if value.layout is torch.strided else f", {value.layout}"
            raise malformed(
                f"weights {name} in {path}",
                f"{value.dtype} of shape {list(value.shape)}{layout}",
                "floats of shape [rows, columns]",
                "Name other weights with --key, or save them in this form.",
            )


def _key_of(path: Path, table: str, key: str | None, weights: Mapping[str, Tensor]) -> str:
    ending = f"{table}.weight" if key is None else key
    if ending in weights:
        return ending
    found = [name for name in weights if name.endswith(f".{ending}")]
    if key is None and not found and len(weights) == 1:
        found = list(weights)
    if len(found) > 1:
        remedy = "Name one with --key."
        raise malformed(
            f"table {table!r} in {path}", f"weights {', '.join(found)}", "weights of one", remedy
        )
    if not found:
        remedy = "Name the key of its weights with --key."
        raise unknown_name(f"weights of table {table!r} in {path}", ending, weights, remedy=remedy)
    return found[0]
