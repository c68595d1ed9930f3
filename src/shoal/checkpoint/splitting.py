"""Which rows go into which file: a function of the rows alone.

A table of 8 MB or more has files of its own: the range of all hashes, halved until the rows of
each part fit into a file. Smaller ones of equal layout share files, in the order of the tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.checkpoint.row_layout import IdLayout, RowLayout
from shoal.errors import CheckpointError, describe

__all__ = ["FILE_BYTES", "SMALL_BYTES", "FilePlan", "TableRows", "bits_for", "pieces", "split"]

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
            describe(
                f"histogram of table {table.key!r}",
                got=f"{cells} cells for {table.rows} rows",
                allowed=f"2^n counts, n at least {bits}",
                remedy="Count with bits_for(rows).",
            )
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
