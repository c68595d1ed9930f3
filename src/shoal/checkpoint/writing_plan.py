"""Which rank writes which file of a checkpoint, from which pieces, and which of them travel.

Pure arithmetic over what every rank knows: the files, rows by hash summed over ranks, and where
the placements put them. So all ranks make the same plan without talking about it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from shoal.placement import BUCKET_BITS, Hosted, rank_buckets

__all__ = [
    "PIECE_BYTES",
    "Piece",
    "PlacedRows",
    "PlannedFile",
    "Span",
    "WritingPlan",
    "plan_writing",
    "speakers",
]

PIECE_BYTES = 8 << 20
"""Rows that are read, joined and handed to a file at a time."""

_HASH_BITS = 64


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
