"""Which rows go into which file, and which rank writes which file from which pieces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from shoal.checkpoint.row_layout import IdLayout, RowLayout
from shoal.errors import CheckpointError
from shoal.placement import BUCKET_BITS, Hosted, rank_buckets

FILE_BYTES = 64 << 20
"""Bytes of rows that a file has at most."""

SMALL_BYTES = 8 << 20
"""A table below it shares a file with others."""

_HASH_BITS = 64
_MOST_BITS = 20


@dataclass(frozen=True, slots=True, eq=False)
class TableRows:
    """How many rows a table has, by the top bits of their hash.

    Args:
        key: "collection/table".
        layout: of its rows, or of its ids.
        counts: int64 [2^bits], `bits` being at least `bits_for(rows)`.
    """

    key: str
    layout: RowLayout | IdLayout
    counts: Tensor

    @property
    def rows(self) -> int:
        """All of them."""
        return int(self.counts.sum())


@dataclass(frozen=True, slots=True)
class FilePlan:
    """A file to be written.

    Args:
        path: below the checkpoint's folder.
        tables: keys, in the file's order.
        start, stop: hashes [start, stop) of its rows.
        rows: rows of all its tables.
        layout: of them.
    """

    path: str
    tables: tuple[str, ...]
    start: int
    stop: int
    rows: int
    layout: RowLayout | IdLayout


def bits_for(total_rows: int) -> int:
    """Top bits of a hash by which rows are counted: some 128 to 256 rows to each of 2^bits.

    Fewer rows than that need no finer cut, so that histograms of small tables stay small.
    """
    return min(_MOST_BITS, max(0, total_rows.bit_length() - 8))


def split(
    tables: Sequence[TableRows],
    folder: str = "rows",
    *,
    file_bytes: int = FILE_BYTES,
    small_bytes: int = SMALL_BYTES,
) -> tuple[FilePlan, ...]:
    """The files for the rows of whole tables; tables without rows are in none.

    A file goes over `file_bytes` only where more rows than that share the top bits of their hash.

    Args:
        folder: of the files: "rows", "deleted" or "sights".

    Raises:
        CheckpointError: a histogram that is too coarse, or not one.
    """
    plans: list[_Draft] = []
    shared: dict[RowLayout | IdLayout, _Draft] = {}
    for table in tables:
        counts, rows = _counts_of(table), table.rows
        size = rows * table.layout.row_bytes
        if not rows:
            continue
        if size >= small_bytes:
            fitting = max(1, file_bytes // table.layout.row_bytes)
            for start, stop, part in _halved(counts, fitting):
                plans.append(_Draft([table.key], start, stop, part, table.layout))
            continue
        draft = shared.get(table.layout)
        if draft is None or (draft.rows + rows) * table.layout.row_bytes > file_bytes:
            draft = shared[table.layout] = _Draft([], 0, 1 << _HASH_BITS, 0, table.layout)
            plans.append(draft)
        draft.tables.append(table.key)
        draft.rows += rows
    return tuple(
        FilePlan(f"{folder}/{n:05d}.arrow", tuple(d.tables), d.start, d.stop, d.rows, d.layout)
        for n, d in enumerate(plans)
    )


def pieces(
    table: TableRows, start: int = 0, stop: int = 1 << _HASH_BITS, *, piece_bytes: int
) -> Iterator[tuple[int, int, int]]:
    """Cut the rows of [start, stop) into ascending parts of at most about `piece_bytes`.

    Yields (start, stop, rows). The bounds given must be bounds of the histogram's cells.
    """
    counts = table.counts
    shift = _HASH_BITS - (len(counts).bit_length() - 1)
    first, last = start >> shift, stop >> shift
    fitting = max(1, piece_bytes // table.layout.row_bytes)
    sums = torch.cat(
        [torch.zeros(1, dtype=torch.int64, device="cpu"), counts[first:last].cumsum(0)]
    )
    at = 0
    while at < last - first:
        upto = int(torch.searchsorted(sums, int(sums[at]) + fitting, right=True)) - 1
        upto = max(at + 1, upto)
        rows = int(sums[upto] - sums[at])
        if rows:
            yield (first + at) << shift, (first + upto) << shift, rows
        at = upto


@dataclass(slots=True)
class _Draft:
    tables: list[str]
    start: int
    stop: int
    rows: int
    layout: RowLayout | IdLayout


def _counts_of(table: TableRows) -> Tensor:
    """The histogram by as many bits as its rows ask for, whatever finer one it was given by."""
    counts, cells = table.counts, len(table.counts)
    bits = bits_for(table.rows)
    if cells & (cells - 1) or cells < 1 << bits or bool((counts < 0).any()):
        raise CheckpointError(
            f"histogram of table {table.key!r}",
            got=f"{cells} cells for {table.rows} rows",
            allowed=f"2^n counts, n at least {bits}",
            remedy="Count with bits_for(rows).",
        )
    return counts.view(1 << bits, -1).sum(1)


def _halved(counts: Tensor, fitting: int) -> Iterator[tuple[int, int, int]]:
    shift = _HASH_BITS - (len(counts).bit_length() - 1)
    waiting = [(0, len(counts))]
    while waiting:
        first, last = waiting.pop()
        rows = int(counts[first:last].sum())
        if rows > fitting and last - first > 1:
            middle = (first + last) // 2
            waiting += [(middle, last), (first, middle)]
        elif rows:
            yield first << shift, last << shift, rows


PIECE_BYTES = 8 << 20
"""Rows that are read, joined and handed to a file at a time."""


class PlannedFile(Protocol):
    """A file that is to be written: rows with hashes [start, stop) of some tables, in order."""

    @property
    def tables(self) -> tuple[str, ...]: ...
    @property
    def start(self) -> int: ...
    @property
    def stop(self) -> int: ...


@dataclass(frozen=True, slots=True, eq=False)
class PlacedRows:
    """Rows of a whole table and where they lie.

    Args:
        key: what files call the table.
        slices: its column slices, left to right.
        slice_bytes: of a row of each of them.
        counts: rows of all ranks by the top bits of their hash, int64 [2^bits].
    """

    key: str
    slices: tuple[Hosted, ...]
    slice_bytes: tuple[int, ...]
    counts: Tensor

    @property
    def row_bytes(self) -> int:
        """Bytes of a whole row."""
        return sum(self.slice_bytes)


@dataclass(frozen=True, slots=True)
class Span:
    """Hashes [start, stop) of a table, which is an index into the plan's tables."""

    table: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Piece:
    """What a file's writer gets at a time: some spans of one table each, in the file's order.

    travels: another rank than the writer may have rows of it.
    """

    file: int
    spans: tuple[Span, ...]
    travels: bool


@dataclass(frozen=True, slots=True)
class WritingPlan:
    """A checkpoint's files and who writes them.

    Args:
        writers: rank of each file.
        pieces: by rank, in the order in which it takes them; those of a file are together.
        rounds: for each exchange the piece that each rank gets, None where it gets no more.
    """

    writers: tuple[int, ...]
    pieces: tuple[tuple[Piece, ...], ...]
    rounds: tuple[tuple[Piece | None, ...], ...]


def speakers(hosted: Hosted, writer: int, start: int, stop: int) -> tuple[int, ...]:
    """Ranks that hand in rows of a slice with hashes [start, stop), in order of hash.

    Of replicas it is the file's writer, with its own.
    """
    if hosted.replicated:
        return (writer,)
    return tuple(rank for rank, _ in _holders(hosted, start, stop))


def plan_writing(
    files: Sequence[PlannedFile],
    tables: Sequence[PlacedRows],
    world_size: int,
    *,
    piece_bytes: int = PIECE_BYTES,
) -> WritingPlan:
    """Give each file to a rank that holds much of it, and cut it into pieces.

    Of the ranks that hold at least half as much of a file as the one that holds most, the one
    with least to write so far takes it. Files of which rows travel come first, so that ranks
    seldom wait for each other.

    Args:
        files: edges of their ranges are edges of the histograms' bins.
        tables: by `key`, the same on every rank.
    """
    counted = {table.key: _Counted(number, table) for number, table in enumerate(tables)}
    load = [0] * world_size
    writers: list[int] = []
    taken: list[list[list[Piece]]] = [[] for _ in range(world_size)]
    for number, file in enumerate(files):
        here = [counted[key] for key in file.tables]
        writer = _writer(file, here, load)
        load[writer] += sum(one.bytes(file.start, file.stop) for one in here)
        writers.append(writer)
        taken[writer].append(_pieces(number, file, here, writer, piece_bytes))
    pieces_W = []
    for of_files in taken:
        of_files.sort(key=lambda pieces: not any(piece.travels for piece in pieces))
        pieces_W.append(tuple(piece for pieces in of_files for piece in pieces))
    return WritingPlan(tuple(writers), tuple(pieces_W), _rounds(pieces_W))


class _Counted:
    """A table whose rows are counted by hash."""

    def __init__(self, number: int, table: PlacedRows) -> None:
        self.number, self.table, self.row_bytes = number, table, table.row_bytes
        bins = table.counts.numel()
        self._shift = _HASH_BITS - (bins.bit_length() - 1)
        self._before = torch.zeros(bins + 1, dtype=torch.int64, device="cpu")
        torch.cumsum(table.counts, 0, out=self._before[1:])

    def bytes(self, start: int, stop: int) -> int:
        return self._rows(start >> self._shift, stop >> self._shift) * self.row_bytes

    def cut(self, start: int, stop: int, most_bytes: int) -> Iterator[Span]:
        """Spans of at most so many bytes, or of one bin; none without rows."""
        most_rows = max(most_bytes // self.row_bytes, 1)
        at, last = start >> self._shift, stop >> self._shift
        while at < last:
            limit = int(self._before[at]) + most_rows
            end = int(torch.searchsorted(self._before, limit, right=True)) - 1
            end = min(max(end, at + 1), last)
            if self._rows(at, end):
                yield Span(self.number, at << self._shift, end << self._shift)
            at = end

    def _rows(self, first: int, last: int) -> int:
        return int(self._before[last] - self._before[first])


def _writer(file: PlannedFile, here: Sequence[_Counted], load: Sequence[int]) -> int:
    """Hashes are uniform: a rank holds such a part of the rows as of the file's hashes."""
    held: dict[int, int] = {}
    for one in here:
        size = one.bytes(file.start, file.stop)
        for hosted, row_bytes in zip(one.table.slices, one.table.slice_bytes, strict=True):
            for rank, hashes in _holders(hosted, file.start, file.stop):
                part = size * row_bytes * hashes // (one.row_bytes * (file.stop - file.start))
                held[rank] = held.get(rank, 0) + part
    enough = [rank for rank, part in held.items() if 2 * part >= max(held.values())]
    return min(enough, key=lambda rank: (load[rank], -held[rank], rank))


def _pieces(
    number: int, file: PlannedFile, here: Sequence[_Counted], writer: int, piece_bytes: int
) -> list[Piece]:
    """The file's spans, gathered until the next one would not fit."""
    gathered: list[list[Span]] = [[]]
    travels, size = [False], 0
    for one in here:
        for span in one.cut(file.start, file.stop, piece_bytes):
            wanted = one.bytes(span.start, span.stop)
            if gathered[-1] and size + wanted > piece_bytes:
                gathered.append([])
                travels.append(False)
                size = 0
            gathered[-1].append(span)
            size += wanted
            travels[-1] |= any(
                speakers(hosted, writer, span.start, span.stop) != (writer,)
                for hosted in one.table.slices
            )
    return [
        Piece(number, tuple(spans), moves)
        for spans, moves in zip(gathered, travels, strict=True)
        if spans
    ]


def _rounds(pieces_W: Sequence[Sequence[Piece]]) -> tuple[tuple[Piece | None, ...], ...]:
    travelling = [[piece for piece in pieces if piece.travels] for pieces in pieces_W]
    count = max(map(len, travelling), default=0)
    return tuple(
        tuple(pieces[k] if k < len(pieces) else None for pieces in travelling) for k in range(count)
    )


def _holders(hosted: Hosted, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Ranks that may have rows with hashes [start, stop), and how many of the hashes."""
    if hosted.replicated:
        for rank in hosted.ranks:
            yield rank, stop - start
        return
    count, shift = len(hosted.ranks), _HASH_BITS - BUCKET_BITS
    first = (start >> shift) * count >> BUCKET_BITS
    last = (stop - 1 >> shift) * count >> BUCKET_BITS
    for share in range(first, last + 1):
        low, high = (bucket << shift for bucket in rank_buckets(share, count))
        yield hosted.ranks[share], min(high, stop) - max(low, start)
