"""Where examples come from: memory, Parquet files, CSV files.

A `Source` is examples by number: how many there are, when each happened, and any of them as a
batch. Order, passes, ranks and read-ahead are the loader's.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from shoal.data.batch import Batch, TensorSource, checked_rows, join
from shoal.data.columns import Rows, decoded, times
from shoal.data.features import Recipe, encode, encode_times
from shoal.data.quarantine import BadRow, Quarantine, sort_out
from shoal.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

Made = TypeVar("Made")
_CSV_BLOCK = 1 << 24  # bytes that hold a row


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
        checked_rows(rows_N, len(source), "rows of a subset")
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
        checked_rows(rows_B, len(self))
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
    """A row group of a file: the number of its first example, of all and in the file, and rows."""

    file: int
    group: int
    start: int
    first_row: int
    size: int


@dataclass(frozen=True, slots=True)
class _Decoded:
    """Examples of a row group.

    places_N: where each of its rows is among the examples, -1 for one that is left out; None: all
    are there.
    """

    examples: TensorSource
    places_N: Tensor | None = None
    bad: Mapping[int, BadRow] = field(default_factory=dict)


class ParquetSource:
    """Parquet files, one after the other, read a row group at a time as examples are taken.

    Opening reads the footers only. The last `cached_groups` row groups stay decoded, so reading in
    order, or shuffled within windows of a few groups, decodes each group once.

    Args:
        paths: files with the same columns.
        recipe: which columns are what.
        cached_groups: decoded row groups kept.
        quarantine: where rows and files go that cannot be used; None: they are errors. A bad row
            keeps its number, and is missing from what is taken; a bad file has no numbers.

    Raises:
        DataError: no files; a file that is missing, empty, not Parquet, lacks a column, names it
            twice, or has it of a type that does not fit.
    """

    def __init__(
        self,
        paths: Sequence[str | Path],
        recipe: Recipe,
        *,
        cached_groups: int = 4,
        quarantine: Quarantine | None = None,
    ) -> None:
        self._recipe = recipe
        self._cached_groups = cached_groups
        self._quarantine = quarantine
        self._paths: list[Path] = []
        self._files: list[Any] = []
        groups: list[_Group] = []
        start = 0
        for path, file in _usable(paths, self._opened, quarantine):
            first = start
            for group in range(file.num_row_groups):
                size = file.metadata.row_group(group).num_rows
                groups.append(_Group(len(self._files), group, start, start - first, size))
                start += size
            self._paths.append(path)
            self._files.append(file)
        self._groups = groups
        self._starts_G = torch.tensor([group.start for group in groups], device="cpu")
        self._size = start
        self._cache: OrderedDict[int, _Decoded] = OrderedDict()
        self._lock = threading.Lock()  # training and evaluation may share a source

    def _opened(self, path: Path) -> Any:
        import pyarrow as pa

        file = _open_parquet(path)
        # Names and types of all files, before the first batch.
        encode(file.schema_arrow.empty_table(), self._recipe, str(path))
        if file.metadata.num_rows == 0:
            raise _empty(path)
        if self._files:
            own, first = file.schema_arrow, self._files[0].schema_arrow
            keys, remedy = self._recipe.keys, "Convert the file, or predict it by itself."
            mine, theirs = (pa.schema([one.field(k) for k in keys]) for one in (own, first))
            check_same_columns(path, mine, theirs, remedy)
            if self._quarantine is not None and self._quarantine.same_columns:
                check_same_columns(path, own, first)
        return file

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
        """int64 [N]: event time of each example; 0 without a time column, and where it is bad.

        Reads that column.
        """
        times_N = torch.zeros(self._size, dtype=torch.int64, device="cpu")
        if self._recipe.time is None:
            return times_N
        for at in self._groups:
            path, own_N = self._paths[at.file], times_N[at.start : at.start + at.size]

            def read(table: pa.Table, first: int, at: _Group = at, path: Path = path) -> Tensor:
                return encode_times(table, self._recipe, str(path), first_row=at.first_row + first)

            table = self._read(at, [self._recipe.time], alike=True)
            if table is None:
                continue
            if self._quarantine is None:
                own_N[:] = read(table, 0)
                continue
            found = sort_out(table, read, self._quarantine.most_rows)
            self._check_number(at, found.bad)
            for first, size, part_N in found.parts:
                own_N[first : first + size] = part_N
        return times_N

    def take(self, rows_B: Tensor) -> Batch:
        """The examples of these numbers, in this order, but for those in quarantine.

        Raises:
            DataError: a row group is damaged or holds what the recipe does not allow.
        """
        checked_rows(rows_B, len(self))
        with self._lock:
            return self._taken(rows_B)

    def _taken(self, rows_B: Tensor) -> Batch:
        group_B = torch.searchsorted(self._starts_G, rows_B, right=True) - 1
        needed = torch.unique(group_B).tolist()
        if not needed:
            return self._decoded(0).examples.take(rows_B)
        if len(needed) == 1:
            examples, places, _ = self._found(needed[0], rows_B)
            return examples.take(places)
        parts, order = [], []
        for group in needed:
            at = torch.nonzero(group_B == group).squeeze(1)
            examples, places, kept = self._found(group, rows_B[at])
            parts.append(examples.select(places))
            order.append(at if kept is None else at[kept])
        return join(parts).take(torch.argsort(torch.cat(order)))

    def _found(self, number: int, rows_M: Tensor) -> tuple[TensorSource, Tensor, Tensor | None]:
        """Examples of a group, places there of rows by number, and which rows are there if not all.

        Bad rows are reported to the quarantine.
        """
        at, decoded = self._groups[number], self._decoded(number)
        rows_M = rows_M - at.start
        if decoded.places_N is None:
            return decoded.examples, rows_M, None
        assert self._quarantine is not None
        places_M = decoded.places_N[rows_M]
        path = self._paths[at.file]
        for row in rows_M[places_M < 0].tolist():
            if row in decoded.bad:
                self._quarantine.row(path, at.first_row + row, decoded.bad[row])
        return decoded.examples, places_M[places_M >= 0], places_M >= 0

    def _check_number(self, at: _Group, bad: Mapping[int, BadRow]) -> None:
        """Put the bad rows of a group into quarantine at once, if they alone are too many for it.

        Raises:
            DataError: they are.
        """
        assert self._quarantine is not None
        if len(bad) > self._quarantine.most_rows:
            for row, one in bad.items():
                self._quarantine.row(self._paths[at.file], at.first_row + row, one)

    def _read(self, at: _Group, columns: list[str], *, alike: bool = False) -> pa.Table | None:
        """Columns of a row group; None: it is damaged, and in quarantine."""
        path, file = self._paths[at.file], self._files[at.file]
        try:
            return _read(path, lambda: file.read_row_group(at.group, columns=columns))
        except DataError as error:
            if self._quarantine is None:
                raise
            bad = BadRow(str(error))
            self._quarantine.row(path, at.first_row, bad, size=at.size, alike=alike)
            return None

    def _decoded(self, number: int) -> _Decoded:
        if number in self._cache:
            self._cache.move_to_end(number)
            return self._cache[number]
        at = self._groups[number]
        path, file = self._paths[at.file], self._files[at.file]

        def make(table: pa.Table, first: int) -> TensorSource:
            return encode(table, self._recipe, str(path), first_row=at.first_row + first)

        table = self._read(at, self._recipe.columns_of(file.schema_arrow.names))
        if table is None:
            nothing = make(file.schema_arrow.empty_table(), 0)
            decoded = _Decoded(nothing, torch.full((at.size,), -1, device="cpu"))
        elif self._quarantine is None:
            decoded = _Decoded(make(table, 0))
        else:
            examples, places_N, bad = _good_rows(table, make, self._quarantine)
            self._check_number(at, bad)
            decoded = _Decoded(examples, places_N if bad else None, bad)
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
        quarantine: where rows and files go that cannot be used; None: they are errors. The other
            rows are numbered without them.

    Raises:
        DataError: no files; a file that is missing, empty, not CSV, lacks a column or names it
            twice, or holds what the recipe does not allow.
    """

    paths: tuple[str | Path, ...]
    recipe: Recipe
    quarantine: Quarantine | None = field(default=None, compare=False)
    features: tuple[str, ...] = field(init=False, repr=False, compare=False)
    num_dense: int = field(init=False, repr=False, compare=False)
    _examples: TensorSource = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        header: list[pa.Schema] = []

        def read(path: Path) -> TensorSource:
            names = _csv_header(path, self.recipe)
            if self.quarantine is not None and self.quarantine.same_columns:
                header.append(names)
                check_same_columns(path, names, header[0])
            return _csv_examples(path, names, self.recipe, self.quarantine)

        examples = join([part for _, part in _usable(self.paths, read, self.quarantine)])
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


def _usable(
    paths: Sequence[str | Path], opened: Callable[[Path], Made], quarantine: Quarantine | None
) -> Iterator[tuple[Path, Made]]:
    """Files that can be used, and what opening each gives; the others go to the quarantine."""
    found, problem = False, None
    for path in _some_paths(paths):
        try:
            one = opened(path)
        except DataError as error:
            if quarantine is None:
                raise
            quarantine.file(path, error)
            problem = error
            continue
        found = True
        yield path, one
    if not found and problem is not None:
        raise problem


def _good_rows(
    table: pa.Table, make: Callable[[pa.Table, int], TensorSource], quarantine: Quarantine
) -> tuple[TensorSource, Tensor, dict[int, BadRow]]:
    """Examples of the rows that can be used; the place of each row among them, or -1; the others.

    Where one more is bad than may be in quarantine, rows after it are in none of them.
    """
    sorted_out = sort_out(table, make, quarantine.most_rows)
    places_N = torch.full((table.num_rows,), -1, device="cpu")
    good_M = torch.ones(table.num_rows, dtype=torch.bool, device="cpu")
    good_M[list(sorted_out.bad)] = False
    places_N[good_M] = torch.arange(int(good_M.sum()), device="cpu")
    parts = [part for _, _, part in sorted_out.parts] or [make(table.slice(0, 0), 0)]
    return join(parts), places_N, sorted_out.bad


def check_same_columns(
    path: Path,
    own: pa.Schema,
    first: pa.Schema,
    remedy: str = "Convert the file, or set data.quarantine.same_columns=false.",
) -> None:
    """Check that a file has the columns of the first file, of the same types, in any order."""
    mine, theirs = ({one.name: str(one.type) for one in schema} for schema in (own, first))
    names = sorted(mine.keys() | theirs.keys())
    differ = [
        f"{name!r}: {mine.get(name, 'missing')}, not {theirs.get(name, 'missing')}"
        for name in names
        if mine.get(name) != theirs.get(name)
    ]
    if differ:
        raise DataError(f"columns of {path}", ", ".join(differ), "those of the first file", remedy)


def _csv_header(path: Path, recipe: Recipe) -> pa.Schema:
    import pyarrow as pa
    import pyarrow.csv as csv

    # Rows are not its matter.
    lenient = csv.ParseOptions(invalid_row_handler=lambda _: "skip")
    blocks = csv.ReadOptions(block_size=_CSV_BLOCK)
    names = _read(path, lambda: csv.open_csv(path, blocks, lenient).schema.names)
    recipe.check_columns(names, str(path))
    return pa.schema([(name, pa.large_string()) for name in names])


def _csv_examples(
    path: Path, header: pa.Schema, recipe: Recipe, quarantine: Quarantine | None
) -> TensorSource:
    """Examples of a file, all its columns read as text, so that no type depends on the file."""
    import pyarrow as pa
    from pyarrow import csv

    text, uneven, lines = pa.large_string(), dict[int, BadRow](), dict[int, int]()

    def leave_out(row: csv.InvalidRow) -> str:
        reason = f"{row.actual_columns} values, not {row.expected_columns}"
        at = row.number - 2  # from 1, the header's
        uneven[at] = BadRow(reason, {"line": row.text[:1000]})
        lines[at] = row.text.count("\n") + 1
        return "skip"

    # Text that is no UTF-8 is a bad row, not a bad file. Only one thread knows rows' numbers.
    kind, handler = (text, None) if quarantine is None else (pa.large_binary(), leave_out)
    names = recipe.columns_of(header.names)
    options = csv.ConvertOptions(include_columns=names, column_types=dict.fromkeys(names, kind))
    # A stray quote makes one row of all that follows.
    block = _CSV_BLOCK if quarantine is None else min(path.stat().st_size + 1, (1 << 31) - 1)
    table = _read(
        path,
        lambda: csv.read_csv(
            path,
            read_options=csv.ReadOptions(use_threads=quarantine is None, block_size=block),
            parse_options=csv.ParseOptions(newlines_in_values=True, invalid_row_handler=handler),
            convert_options=options,
        ),
    )
    if table.num_rows == 0:
        raise _empty(path)
    if quarantine is None:
        return encode(table, recipe, str(path), spelled=True)
    rows = [n for n in range(table.num_rows + len(uneven)) if n not in uneven]
    lines.update(zip(rows, _lines(table), strict=True))
    starts = [0, *accumulate(lines[n] for n in range(len(lines)))]

    def make(part: pa.Table, first: int) -> TensorSource:
        number = starts[rows[first]] if part.num_rows else 0
        try:
            readable = part.cast(pa.schema([(name, text) for name in part.column_names]))
        except pa.ArrowInvalid as error:
            what, remedy = f"text in row {number} of {path}", "Write the file as UTF-8."
            raise DataError(what, got=str(error), allowed="UTF-8", remedy=remedy) from error
        made = encode(readable, recipe, str(path), first_row=number, spelled=True)
        if recipe.time is not None and part.num_rows:  # spelled as in the first good row
            own = pa.concat_arrays([*first_time, decoded(readable.column(recipe.time))])
            times(own, recipe.time, Rows(str(path), number - len(first_time), spelled=True))
            first_time[:] = [own[:1]]
        return made

    first_time: list[pa.Array] = []
    examples, _, bad = _good_rows(table, make, quarantine)
    for n, one in sorted({**uneven, **{rows[at]: own for at, own in bad.items()}}.items()):
        quarantine.row(path, starts[n], one, size=lines[n], alike=True)
    return examples


def _lines(table: pa.Table) -> list[int]:
    """Lines that each row of a CSV file takes: a stray quote makes one row of many."""
    import pyarrow.compute as pc

    lines = torch.ones(table.num_rows, dtype=torch.int64, device="cpu")
    for column in table.columns:
        breaks, at_end = pc.count_substring(column, "\n"), pc.ends_with(column, "\n")
        for count, sign in ((breaks, 1), (at_end.cast("int64"), -1)):
            lines += sign * torch.tensor(count.to_numpy(), device="cpu")
    return lines.tolist()


def _read(path: Path, read: Any) -> Any:
    import pyarrow as pa

    try:
        return read()
    except (OSError, UnicodeError, pa.ArrowException) as error:
        allowed = "a file that exists, is not empty and is whole"
        remedy = "Check its path and end; of a CSV its quotes, and that it is UTF-8."
        got = str(error).strip() or type(error).__name__
        raise DataError(f"data file {path}", got=got, allowed=allowed, remedy=remedy) from error


def _empty(path: Path) -> DataError:
    remedy = "Leave the file out, or check what wrote it."
    return DataError(f"examples of {path}", got="none", allowed="at least one", remedy=remedy)
