"""Where examples come from: memory, Parquet files, CSV files.

A `Source` is examples by number: how many there are, when each happened, and any of them as a
batch. Order, passes, ranks and read-ahead are the loader's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from shoal.data.batch import Batch, TensorSource, join
from shoal.data.features import Recipe, encode, encode_times
from shoal.errors import DataError, InputError, ShapeError

if TYPE_CHECKING:
    import pyarrow as pa


@runtime_checkable
class Source(Protocol):
    """Examples by number, 0 to len - 1."""

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the id features, in batch order."""

    @property
    def num_dense(self) -> int:
        """Dense columns."""

    def __len__(self) -> int:
        """Examples."""

    def times(self) -> Tensor:
        """int64 [len]: event time of each example, whole seconds since 1970."""

    def take(self, rows_B: Tensor) -> Batch:
        """The examples of these numbers (int64 [B], any order, repeats allowed), in this order.

        Raises:
            DataError: a file is damaged or holds what its recipe does not allow.
        """


class Subset:
    """Some examples of a source, as a source.

    Args:
        source: where they are.
        rows_N: int64 [N], their numbers in the order of the subset.

    Raises:
        InputError: a number out of range.
        ShapeError: not one-dimensional int64.
    """

    def __init__(self, source: Source, rows_N: Tensor) -> None:
        if rows_N.ndim != 1 or rows_N.dtype != torch.int64:
            got = f"{rows_N.dtype} {list(rows_N.shape)}"
            remedy = "Give one number per example."
            raise ShapeError("rows of a subset", got=got, allowed="int64 [N]", remedy=remedy)
        size = len(source)
        if rows_N.numel() and not 0 <= int(rows_N.min()) <= int(rows_N.max()) < size:
            got = f"{int(rows_N.min())}..{int(rows_N.max())}"
            remedy = "Take rows of this source."
            raise InputError("rows of a subset", got=got, allowed=f"0..{size - 1}", remedy=remedy)
        self._source = source
        self._rows_N = rows_N
        self.features, self.num_dense = source.features, source.num_dense

    def __len__(self) -> int:
        return self._rows_N.numel()

    def times(self) -> Tensor:
        """int64 [N]: event time of each example in seconds."""
        return self._source.times()[self._rows_N]

    def take(self, rows_B: Tensor) -> Batch:
        """The examples of these numbers, in this order."""
        return self._source.take(self._rows_N[rows_B])


def first_of(source: Source, count: int | None) -> Source:
    """The first examples of a source; None: all."""
    if count is None or count >= len(source):
        return source
    return Subset(source, torch.arange(count, device="cpu"))


def split_by_time(source: Source, at_s: int) -> tuple[Subset, Subset]:
    """The examples before a time and those from it on, each in order of time.

    Examples of the same second keep the source's order.

    Args:
        source: any source.
        at_s: whole seconds since 1970.
    """
    times_N = source.times()
    order_N = torch.argsort(times_N, stable=True)
    before = int((times_N < at_s).sum())
    return Subset(source, order_N[:before]), Subset(source, order_N[before:])


@dataclass(frozen=True, slots=True)
class _Group:
    """A row group of a file, and the number of its first example: of all, and in the file."""

    file: int
    group: int
    start: int
    first_row: int


class ParquetSource:
    """Parquet files, one after the other, read a row group at a time as examples are taken.

    Opening reads the footers only. The last `cached_groups` row groups stay decoded, so reading in
    order, or shuffled within windows of a few groups, decodes each group once.

    Args:
        paths: files with the same columns.
        recipe: which columns are what.
        cached_groups: decoded row groups kept.

    Raises:
        DataError: no files; a file that is missing, empty, not Parquet, lacks a column, names it
            twice, or has it of a type that does not fit.
    """

    def __init__(
        self, paths: Sequence[str | Path], recipe: Recipe, *, cached_groups: int = 4
    ) -> None:
        self._paths = _some_paths(paths)
        self._recipe = recipe
        self._cached_groups = cached_groups
        self._files = [_open_parquet(path) for path in self._paths]
        groups: list[_Group] = []
        start = 0
        for number, (path, file) in enumerate(zip(self._paths, self._files, strict=True)):
            # Names and types of all files, before the first batch.
            encode(file.schema_arrow.empty_table(), recipe, str(path))
            if file.metadata.num_rows == 0:
                raise _empty(path)
            first = start
            for group in range(file.num_row_groups):
                groups.append(_Group(number, group, start, start - first))
                start += file.metadata.row_group(group).num_rows
        self._groups = groups
        self._starts_G = torch.tensor([group.start for group in groups], device="cpu")
        self._size = start
        self._cache: OrderedDict[int, TensorSource] = OrderedDict()

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the id features, in batch order."""
        return self._recipe.features

    @property
    def num_dense(self) -> int:
        """Dense columns."""
        return self._recipe.num_dense

    def __len__(self) -> int:
        return self._size

    def times(self) -> Tensor:
        """int64 [N]: event time of each example; 0 without a time column. Reads that column."""
        if self._recipe.time is None:
            return torch.zeros(self._size, dtype=torch.int64, device="cpu")
        parts = []
        for path, file in zip(self._paths, self._files, strict=True):
            table = _read(path, lambda file=file: file.read(columns=[self._recipe.time]))
            parts.append(encode_times(table, self._recipe, str(path)))
        return torch.cat(parts)

    def take(self, rows_B: Tensor) -> Batch:
        """The examples of these numbers, in this order.

        Raises:
            DataError: a row group is damaged or holds what the recipe does not allow.
        """
        group_B = torch.searchsorted(self._starts_G, rows_B, right=True) - 1
        needed = torch.unique(group_B).tolist()
        if not needed:
            return self._decoded(0).take(rows_B)
        if len(needed) == 1:
            return self._decoded(needed[0]).take(rows_B - self._starts_G[needed[0]])
        picks = [torch.nonzero(group_B == group).squeeze(1) for group in needed]
        parts = [
            self._decoded(group).select(rows_B[at] - self._starts_G[group])
            for group, at in zip(needed, picks, strict=True)
        ]
        back_B = torch.empty_like(rows_B)
        back_B[torch.cat(picks)] = torch.arange(rows_B.numel(), device="cpu")
        return join(parts).take(back_B)

    def _decoded(self, number: int) -> TensorSource:
        if number in self._cache:
            self._cache.move_to_end(number)
            return self._cache[number]
        at = self._groups[number]
        path, file = self._paths[at.file], self._files[at.file]
        table = _read(path, lambda: file.read_row_group(at.group, columns=self._recipe.columns))
        decoded = encode(table, self._recipe, str(path), first_row=at.first_row)
        self._cache[number] = decoded
        while len(self._cache) > self._cached_groups:
            self._cache.popitem(last=False)
        return decoded


@dataclass(frozen=True, slots=True)
class CsvSource:
    """CSV files with a header line, read whole into memory.

    Args:
        paths: files with the same columns.
        recipe: which columns are what; a list column is ids with blanks between them, a time is
            whole seconds or in ISO 8601.

    Raises:
        DataError: no files; a file that is missing, empty, not CSV, lacks a column or names it
            twice, or holds what the recipe does not allow.
    """

    paths: tuple[str | Path, ...]
    recipe: Recipe
    features: tuple[str, ...] = field(init=False, repr=False, compare=False)
    num_dense: int = field(init=False, repr=False, compare=False)
    _examples: TensorSource = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        parts = []
        for path in _some_paths(self.paths):
            table = _read_csv(path, self.recipe)
            parts.append(encode(table, self.recipe, str(path), spelled=True))
        examples = join(parts)
        object.__setattr__(self, "_examples", examples)
        object.__setattr__(self, "features", examples.features)
        object.__setattr__(self, "num_dense", examples.num_dense)

    def __len__(self) -> int:
        return len(self._examples)

    def times(self) -> Tensor:
        """int64 [N]: event time of each example; 0 without a time column."""
        return self._examples.times()

    def take(self, rows_B: Tensor) -> Batch:
        """The examples of these numbers, in this order."""
        return self._examples.take(rows_B)


def _some_paths(paths: Sequence[str | Path]) -> tuple[Path, ...]:
    if not paths or isinstance(paths, str | Path):
        allowed = "a list of one or more files"
        raise DataError(
            "paths of a source", got=repr(paths), allowed=allowed, remedy="Name the files."
        )
    return tuple(Path(path) for path in paths)


def _open_parquet(path: Path) -> Any:
    import pyarrow.parquet as pq

    return _read(path, lambda: pq.ParquetFile(path))


def _read_csv(path: Path, recipe: Recipe) -> pa.Table:
    """The columns of a recipe, all as text, so that no type depends on the file."""
    import pyarrow as pa
    import pyarrow.csv as csv

    with _read(path, lambda: csv.open_csv(path)) as opened:
        recipe.check_columns(opened.schema.names, str(path))
    options = csv.ConvertOptions(
        include_columns=recipe.columns,
        column_types=dict.fromkeys(recipe.columns, pa.large_string()),
    )
    table = _read(path, lambda: csv.read_csv(path, convert_options=options))
    if table.num_rows == 0:
        raise _empty(path)
    return table


def _read(path: Path, read: Any) -> Any:
    import pyarrow as pa

    try:
        return read()
    except (OSError, pa.ArrowException) as error:
        allowed = "a file that exists, is not empty and is whole"
        remedy = "Check the path, and that the file was written to its end."
        got = str(error).strip() or type(error).__name__
        raise DataError(f"data file {path}", got=got, allowed=allowed, remedy=remedy) from error


def _empty(path: Path) -> DataError:
    remedy = "Leave the file out, or check what wrote it."
    return DataError(f"examples of {path}", got="none", allowed="at least one", remedy=remedy)
