"""Which rows go into which file, and which rank writes which file from which pieces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import zip_longest
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from shoal.checkpoint.manifest import SavedFile, SavedTable
from shoal.checkpoint.row_files import Columns, RowFileWriter, RowLayout
from shoal.checkpoint.storage import Storage
from shoal.placement import Hosted
from shoal.table.shard import HASHES

FILE_BYTES = 64 << 20
"""Bytes of rows that a file has at most."""

SMALL_BYTES = 8 << 20
"""A table below it shares a file with others."""

PIECE_BYTES = 8 << 20
"""Rows that are read, joined and handed to a file at a time."""

_HASH_BITS = 64
_MOST_BITS = 20


@dataclass(frozen=True, eq=False)
class TableRows:
    """A table's rows, counted by the top bits of their hash.

    Args:
        key: "collection/table".
        layout: of its rows, or of its ids.
        counts: rows of all ranks, int64 [2^bits], `bits` being at least `bits_for(rows)`.
        slices: its column slices, left to right; none where one process has them all.
    """

    key: str
    layout: RowLayout
    counts: Tensor
    slices: tuple[Hosted, ...] = ()

    @property
    def rows(self) -> int:
        """All of them."""
        return int(self._sums[-1])

    def within(self, start: int, stop: int) -> int:
        """Rows with hashes [start, stop), which are bounds of the histogram's cells."""
        return int(self._sums[stop >> self._shift] - self._sums[start >> self._shift])

    def pieces(self, start: int, stop: int, piece_bytes: int) -> Iterator[tuple[int, int]]:
        """Ascending ranges [start, stop) with rows of at most so many bytes, or of one cell."""
        most = max(1, piece_bytes // self.layout.row_bytes)
        at, last = start >> self._shift, stop >> self._shift
        while at < last:
            limit = int(self._sums[at]) + most
            end = int(torch.searchsorted(self._sums, limit, right=True)) - 1
            end = min(max(end, at + 1), last)
            if self._sums[end] > self._sums[at]:
                yield at << self._shift, end << self._shift
            at = end

    @cached_property
    def _shift(self) -> int:
        return _HASH_BITS - (len(self.counts).bit_length() - 1)

    @cached_property
    def _sums(self) -> Tensor:
        sums = torch.zeros(len(self.counts) + 1, dtype=torch.int64, device="cpu")
        torch.cumsum(self.counts, 0, out=sums[1:])
        return sums


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
    layout: RowLayout


def bits_for(total_rows: int) -> int:
    """Top bits of a hash by which rows are counted: some 128 to 256 rows to each of 2^bits.

    Fewer rows than that need no finer split, so that histograms of small tables stay small.
    """
    return min(_MOST_BITS, max(0, total_rows.bit_length() - 8))


def ascends(keys_U: Tensor) -> bool:
    """Whether sort keys are in order, each once."""
    return bool((keys_U[1:] > keys_U[:-1]).all())


def bounds(keys_U: Tensor, start: int, stop: int) -> tuple[int, int]:
    """Where the hashes [start, stop) lie in ascending sort keys."""
    first = int(torch.searchsorted(keys_U, start - (1 << 63))) if start else 0
    last = int(torch.searchsorted(keys_U, stop - (1 << 63))) if stop < HASHES else len(keys_U)
    return first, last


def histogram(keys_U: Tensor, bits: int) -> Tensor:
    """Sort keys by the top bits of their hash: int64 [2^bits]."""
    cells_U = (keys_U >> (64 - bits)) + (1 << (bits - 1)) if bits else torch.zeros_like(keys_U)
    return torch.bincount(cells_U, minlength=1 << bits)


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
        folder: of the files: "rows", "deleted" or "admission".
    """
    plans: list[FilePlan] = []
    shared: dict[RowLayout, int] = {}  # the file that small tables of a layout go to
    for table in tables:
        rows, row_bytes = table.rows, table.layout.row_bytes
        if not rows:
            continue
        if rows * row_bytes >= small_bytes:
            # By as many bits as its rows ask for, whatever finer counts it was given by.
            counts = table.counts.view(1 << bits_for(rows), -1).sum(1)
            for start, stop, part in _halved(counts, max(1, file_bytes // row_bytes)):
                plans.append(FilePlan("", (table.key,), start, stop, part, table.layout))
            continue
        at = shared.get(table.layout, -1)
        if at < 0 or (plans[at].rows + rows) * row_bytes > file_bytes:
            at = shared[table.layout] = len(plans)
            plans.append(FilePlan("", (), 0, HASHES, 0, table.layout))
        one = plans[at]
        plans[at] = replace(one, tables=(*one.tables, table.key), rows=one.rows + rows)
    return tuple(replace(one, path=f"{folder}/{n:05d}.arrow") for n, one in enumerate(plans))


class RowsByHash(Protocol):
    """Rows of whole tables by number, which one process has."""

    def most_rows(self, table: int) -> int:
        """As many as a table has, or more."""

    def histogram(self, table: int, bits: int) -> Tensor:
        """Rows by the top bits of their hash, int64 [2^bits]."""

    def read(self, table: int, start: int, stop: int) -> Columns:
        """Rows with hashes [start, stop), in order of hash."""


def write_tables(
    folder: Storage, tables: Sequence[SavedTable], source: RowsByHash
) -> tuple[list[SavedTable], list[SavedFile]]:
    """Write the row files of tables as a save would; the tables and files as they are there."""
    counted = [
        TableRows(
            table.key, RowLayout.of(table), source.histogram(k, bits_for(source.most_rows(k)))
        )
        for k, table in enumerate(tables)
    ]
    numbers, files = {table.key: number for number, table in enumerate(tables)}, []
    for plan in split(counted):
        ranges = (plan.start, plan.stop)
        writer = RowFileWriter(folder, plan.path, plan.layout, plan.tables, ranges)
        try:
            for index, key in enumerate(plan.tables):
                number = numbers[key]
                for start, stop in counted[number].pieces(*ranges, PIECE_BYTES):
                    writer.add(index, source.read(number, start, stop))
            files.append(writer.close())
        except BaseException:
            writer.abort()
            raise
    pairs = zip(tables, counted, strict=True)
    return [replace(table, rows=one.rows, deleted=0) for table, one in pairs], files


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


class HashSpan(NamedTuple):
    """Hashes [start, stop) of a table, which is an index into the plan's tables."""

    table: int
    start: int
    stop: int


class Piece(NamedTuple):
    """What a file's writer gets at a time: some spans of one table each, in the file's order.

    travels: another rank than the writer may have rows of it.
    """

    file: int
    spans: tuple[HashSpan, ...]
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
    return tuple(rank for rank, _ in hosted.holders(start, stop))


def plan_writing(
    files: Sequence[FilePlan],
    tables: Sequence[TableRows],
    world_size: int,
    *,
    piece_bytes: int = PIECE_BYTES,
) -> WritingPlan:
    """Share files out among ranks, and split them into pieces; the same on every rank.

    A file goes to a rank that has at least half as much of it as the rank that has most: of those
    to the one with least to do. Pieces of which other ranks have rows come first on each rank, so
    that all ranks exchange them at the same time and then write on their own.

    Args:
        files: ranges that are multiples of the histograms' cells.
        tables: by `key`, the same on every rank.
    """
    counted = {table.key: (number, table) for number, table in enumerate(tables)}
    load = [0] * world_size
    writers: list[int] = []
    taken: list[list[list[Piece]]] = [[] for _ in range(world_size)]
    for number, file in enumerate(files):
        here = [counted[key] for key in file.tables]
        writer = _writer(file, [table for _, table in here], load)
        load[writer] += file.rows * file.layout.row_bytes
        writers.append(writer)
        taken[writer].append(_pieces(number, file, here, writer, piece_bytes))
    pieces_W = []
    for of_files in taken:
        of_files.sort(key=lambda pieces: not any(piece.travels for piece in pieces))
        pieces_W.append(tuple(piece for pieces in of_files for piece in pieces))
    travelling = ([piece for piece in pieces if piece.travels] for pieces in pieces_W)
    return WritingPlan(tuple(writers), tuple(pieces_W), tuple(zip_longest(*travelling)))


def _writer(file: FilePlan, here: Sequence[TableRows], load: Sequence[int]) -> int:
    """Hashes are uniform: a rank holds such a part of the rows as of the file's hashes."""
    held: dict[int, int] = {}
    for table in here:
        size = table.within(file.start, file.stop) * table.layout.row_bytes
        columns = sum(one.stop - one.start for one in table.slices)
        for one in table.slices:
            for rank, hashes in one.holders(file.start, file.stop):
                whole = columns * (file.stop - file.start)
                part = size * (one.stop - one.start) * hashes // whole
                held[rank] = held.get(rank, 0) + part
    enough = [rank for rank, part in held.items() if 2 * part >= max(held.values())]
    return min(enough, key=lambda rank: (load[rank], -held[rank], rank))


def _pieces(
    number: int,
    file: FilePlan,
    here: Sequence[tuple[int, TableRows]],
    writer: int,
    piece_bytes: int,
) -> list[Piece]:
    """The file's spans, gathered until the next one would not fit."""
    found: list[Piece] = []
    size = 0
    for index, table in here:
        for start, stop in table.pieces(file.start, file.stop, piece_bytes):
            wanted = table.within(start, stop) * file.layout.row_bytes
            travels = any(speakers(one, writer, start, stop) != (writer,) for one in table.slices)
            if not found or size + wanted > piece_bytes:
                found.append(Piece(number, (), False))
                size = 0
            last, size = found[-1], size + wanted
            spans = (*last.spans, HashSpan(index, start, stop))
            found[-1] = Piece(number, spans, last.travels or travels)
    return found
