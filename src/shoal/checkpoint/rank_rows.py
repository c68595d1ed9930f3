"""Rows of whole tables, read from the ranks that hold parts and joined at a file's writer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from shoal.checkpoint.plan import Piece, PlacedRows, Span, WritingPlan, bits_for, speakers
from shoal.checkpoint.row_layout import RowLayout
from shoal.comm.collectives import Collectives, Part
from shoal.errors import CheckpointError, CollectiveFailed
from shoal.placement import Hosted, hash_ids, sort_key
from shoal.table.hosting import joined_state
from shoal.table.shard import HASHES, Snapshot
from shoal.table.spec import TableSpec
from shoal.table.values import RowChunk


@dataclass(frozen=True, slots=True)
class Column:
    """A field of rows: [R] where `width` is None, else [R, width]."""

    dtype: torch.dtype
    width: int | None = None

    @property
    def row_bytes(self) -> int:
        """Bytes of a row's part."""
        return self.dtype.itemsize * (1 if self.width is None else self.width)


def row_columns(layout: RowLayout) -> tuple[Column, ...]:
    """Of rows: ids, versions, last seen, counts, state, weights; wide dtypes first."""
    return (
        *(Column(torch.int64),) * 4,
        Column(layout.state_dtype, layout.state_width),
        Column(layout.weights_dtype, layout.dim),
    )


def id_columns(counted: bool) -> tuple[Column, ...]:
    """Of ids, and their counts."""
    return (Column(torch.int64),) * (2 if counted else 1)


class SliceSource(Protocol):
    """Rows of a slice on this rank, read by one thread."""

    def histogram(self, bits: int) -> Tensor:
        """Rows by the top bits of their hash, int64 [2^bits]."""
        ...

    def read(self, start: int, stop: int) -> tuple[Tensor, ...]:
        """Columns of the rows with hashes [start, stop), ordered by hash."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class RowSlice:
    """Table `table` of a snapshot."""

    snapshot: Snapshot
    table: int

    def histogram(self, bits: int) -> Tensor:
        """See `SliceSource`."""
        return self.snapshot.histogram(self.table, bits)

    def read(self, start: int, stop: int) -> tuple[Tensor, ...]:
        """See `SliceSource`."""
        chunk: RowChunk = self.snapshot.read(self.table, start, stop)
        return (
            *(chunk.ids, chunk.versions, chunk.last_seen_s, chunk.counts),
            *(chunk.state, chunk.weights),
        )


class IdSlice:
    """Ids in memory, with their counts or without.

    Args:
        hash_name: of the table.
        read: makes ids int64 [U], each once, in any order, and of sights counts int64 [U]. Called
            once, when they are first asked for.
    """

    def __init__(self, hash_name: str, read: Callable[[], tuple[Tensor, ...]]) -> None:
        self._hash_name, self._read = hash_name, read

    def histogram(self, bits: int) -> Tensor:
        """See `SliceSource`."""
        keys_U, _ = self._sorted
        if bits == 0:
            return torch.tensor([keys_U.numel()], device="cpu")
        bins_U = (keys_U >> (64 - bits)) + (1 << (bits - 1))
        return torch.bincount(bins_U, minlength=1 << bits)

    def read(self, start: int, stop: int) -> tuple[Tensor, ...]:
        """See `SliceSource`."""
        first, last = self._below(start), self._below(stop)
        return tuple(column[first:last] for column in self._sorted[1])

    def _below(self, hash_: int) -> int:
        keys_U, _ = self._sorted
        if hash_ == HASHES:
            return keys_U.numel()
        return int(torch.searchsorted(keys_U, hash_ - (HASHES >> 1)))

    @cached_property
    def _sorted(self) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Ascending keys [U], and the columns in their order."""
        columns = self._read()
        keys_U, order_U = sort_key(hash_ids(self._hash_name, columns[0])).sort()
        return keys_U, tuple(column[order_U] for column in columns)


Columns = tuple[Tensor, ...]
Join = Callable[[Sequence[tuple[Hosted, Columns]]], Columns]

_FIRST_BITS = 10  # enough for 2^18 rows
_ALIGNED = 8  # bytes: what arrives is viewed in its own dtypes


class OtherRankFailed(CheckpointError):
    """Another rank could not go on; it says why in the vote at the end."""

    def __init__(self) -> None:
        super().__init__(
            "a save by all ranks",
            got="a failure on another rank",
            allowed="all ranks to go on",
            remedy="Look at that rank's error.",
        )


@dataclass(frozen=True, slots=True, eq=False)
class ShardedTable:
    """A whole table as its slices lie on ranks.

    Args:
        key: what files call it.
        slices: those that are read, left to right.
        columns: of each of them.
        sources: what this rank has of each; None: nothing.
        join: makes a whole table's columns of all slices'.
    """

    key: str
    slices: tuple[Hosted, ...]
    columns: tuple[tuple[Column, ...], ...]
    sources: tuple[SliceSource | None, ...]
    join: Join

    @property
    def slice_bytes(self) -> tuple[int, ...]:
        """Bytes of a row of each slice."""
        return tuple(sum(column.row_bytes for column in columns) for columns in self.columns)


class ShardedRows:
    """Rows of whole tables of all ranks.

    A rank that fails tells the others at the next exchange, so that none waits for it.

    Args:
        tables: the same on every rank but for what it has.
        collectives: nobody else's meanwhile.
    """

    def __init__(self, tables: Sequence[ShardedTable], collectives: Collectives) -> None:
        self.tables = tuple(tables)
        self._collectives = collectives
        self._rank = collectives.rank
        self._rounds: list[tuple[Piece | None, ...]] = []

    def placed(self) -> tuple[PlacedRows, ...]:
        """The tables with their rows counted over all ranks.

        Raises:
            CheckpointError: a rank failed to count.
            CollectiveFailed: a rank died or did not come in time.
        """
        # Tables of so few rows that these bits are enough are gone through once.
        parts = self._histograms([_FIRST_BITS] * len(self.tables))
        bits = [bits_for(int(part.sum())) for part in parts]
        many = [k for k, wanted in enumerate(bits) if wanted > _FIRST_BITS]
        if many:
            finer = self._histograms([bits[k] if k in many else 0 for k in range(len(bits))])
            parts = [finer[k] if k in many else part for k, part in enumerate(parts)]
        return tuple(
            PlacedRows(table.key, table.slices, table.slice_bytes, part)
            for table, part in zip(self.tables, parts, strict=True)
        )

    def pieces(self, plan: WritingPlan) -> Iterator[tuple[int, int, Columns]]:
        """What this rank writes: (file, table, whole columns in order of hash).

        Every rank runs through it; one that stops before its end calls `abandon`.

        Raises:
            CheckpointError: a rank failed, or column slices have different rows.
            CollectiveFailed: a rank died or did not come in time.
        """
        self._rounds = list(plan.rounds[::-1])
        for piece in plan.pieces[self._rank]:
            found = self._exchange() if piece.travels else self._own(piece)
            for span in piece.spans:
                columns = self._joined(span, found[: len(self.tables[span.table].slices)])
                del found[: len(self.tables[span.table].slices)]
                yield piece.file, span.table, columns
                del columns
        while self._rounds:
            self._exchange()

    def abandon(self) -> None:
        """Tell the other ranks that this one failed, if they still wait for it."""
        if self._rounds:
            self._sizes(self._rounds.pop(), [], failed=True)
            self._rounds.clear()

    def _histograms(self, bits_K: Sequence[int]) -> list[Tensor]:
        """Rows of each table over all ranks by so many bits of their hash; 0 bits: not counted."""

        def count() -> list[Tensor]:
            return [
                self._counted(table, bits)
                for table, bits in zip(self.tables, bits_K, strict=True)
                if bits
            ]

        sizes = [1 << bits if bits else 0 for bits in bits_K]
        return list(torch.split(self._summed(count, sum(sizes)), sizes))

    def _summed(self, make: Callable[[], list[Tensor]], size: int) -> Tensor:
        """Sum of what all ranks make, int64 [size]."""
        error: Exception | None = None
        values = torch.zeros(size + 1, dtype=torch.int64, device="cpu")
        try:
            if made := make():
                torch.cat(made, out=values[:-1])
        except Exception as caught:  # noqa: BLE001 - raised once the other ranks know
            error = caught
            values.zero_()[-1] = 1
        collectives = self._collectives
        sent = values.to(collectives.device)
        (total,) = collectives.all_reduce(sent, "sum", what="rows of a checkpoint").wait()
        if error is not None:
            raise error
        if int(total[-1]):
            raise OtherRankFailed
        return total[:-1].cpu()

    def _counted(self, table: ShardedTable, bits: int) -> Tensor:
        """Rows that this rank answers for: those of its first slice, of replicas on one rank."""
        first, source = table.slices[0], table.sources[0]
        if source is None or (first.replicated and first.ranks[0] != self._rank):
            return torch.zeros(1 << bits, dtype=torch.int64, device="cpu")
        return source.histogram(bits)

    def _own(self, piece: Piece) -> list[list[Columns]]:
        """Of each span and slice what this rank has itself, nothing else being needed."""
        return [
            [self._read(span, number) for _ in speaking]
            for span, number, speaking in self._asked(piece, self._rank)
        ]

    def _exchange(self) -> list[list[Columns]]:
        """One round: hand in what others write, and get the parts of this rank's own piece."""
        pieces_W = self._rounds.pop()
        sent: list[list[Columns]] = []
        packed: tuple[Tensor, tuple[int, ...]] | None = None
        error: Exception | None = None
        try:
            sent = [
                [] if piece is None or writer == self._rank else self._handed(piece, writer)
                for writer, piece in enumerate(pieces_W)
            ]
            packed = self._packed(sent)  # what takes memory, while others can still be told
        except Exception as caught:  # noqa: BLE001 - raised once the other ranks know
            error = caught
        try:
            rows_WX = self._sizes(pieces_W, sent, failed=error is not None)
        finally:
            if error is not None:
                self._rounds.clear()
                raise error
        del sent
        assert packed is not None
        return self._swap(pieces_W, packed, rows_WX)

    def _packed(self, sent: Sequence[Sequence[Columns]]) -> tuple[Tensor, tuple[int, ...]]:
        """What goes to all ranks as one tensor, and bytes for each."""
        packed_W = [_packed(parts) for parts in sent]
        data = torch.cat(packed_W).to(self._collectives.device)
        return data, tuple(part.numel() for part in packed_W)

    def _handed(self, piece: Piece, writer: int) -> list[Columns]:
        return [
            self._read(span, number) if self._rank in speaking else ()
            for span, number, speaking in self._asked(piece, writer)
        ]

    def _sizes(
        self, pieces_W: Sequence[Piece | None], sent: list[list[Columns]], *, failed: bool
    ) -> Tensor:
        """Rows of each span and slice of this rank's piece, by rank: int64 [W, X]."""
        width = max(
            sum(len(self.tables[span.table].slices) for span in piece.spans)
            for piece in pieces_W
            if piece is not None
        )
        sizes_WX = torch.zeros(len(pieces_W), width + 1, dtype=torch.int64, device="cpu")
        sizes_WX[:, width] = failed
        for writer, parts in enumerate(sent):
            for number, columns in enumerate(parts):
                sizes_WX[writer, number] = len(columns[0]) if columns else 0
        what = "sizes of a checkpoint's rows"
        received_WX = self._collectives.exchange_sizes(sizes_WX, what=what).wait().received_WX
        if not failed and bool(received_WX[:, width].any()):
            self._rounds.clear()
            raise OtherRankFailed
        return received_WX[:, :width]

    def _swap(
        self,
        pieces_W: Sequence[Piece | None],
        packed: tuple[Tensor, tuple[int, ...]],
        rows_WX: Tensor,
    ) -> list[list[Columns]]:
        piece = pieces_W[self._rank]
        asked = [] if piece is None else list(self._asked(piece, self._rank))
        layouts = [self.tables[span.table].columns[number] for span, number, _ in asked]
        receive = tuple(
            sum(_bytes(c, n) for c, n in zip(layouts, rows_X, strict=False))
            for rows_X in rows_WX.tolist()
        )
        got = self._swapped(Part(*packed, receive))
        starts = list(accumulate(receive, initial=0))
        by_rank = [
            _unpacked(got[starts[rank] : starts[rank + 1]].cpu(), layouts, rows_X)
            for rank, rows_X in enumerate(rows_WX.tolist())
        ]
        return [
            [
                self._read(span, number) if rank == self._rank else by_rank[rank][slot]
                for rank in speaking
            ]
            for slot, (span, number, speaking) in enumerate(asked)
        ]

    def _swapped(self, part: Part) -> Tensor:
        """What the other ranks sent.

        Raises:
            CollectiveFailed: whatever went wrong, such as no memory for it: the others wait inside
                for this rank, which may call nothing else of theirs any more.
        """
        try:
            (got,) = self._collectives.all_to_all([part], what="rows of a checkpoint").wait()
        except CollectiveFailed:
            raise
        except Exception as error:
            self._rounds.clear()
            raise CollectiveFailed(
                f"rows of a checkpoint on their way to rank {self._rank}",
                got=f"{type(error).__name__}: {error}",
                allowed=f"{sum(part.receive)} bytes of memory for them",
                remedy="Leave more memory free on this rank, and start again from the last "
                "checkpoint.",
            ) from error
        return got

    def _asked(self, piece: Piece, writer: int) -> Iterator[tuple[Span, int, tuple[int, ...]]]:
        """Each span with each slice of its table, and the ranks that hand it in."""
        for span in piece.spans:
            for number, hosted in enumerate(self.tables[span.table].slices):
                yield span, number, speakers(hosted, writer, span.start, span.stop)

    def _read(self, span: Span, number: int) -> Columns:
        table = self.tables[span.table]
        source = table.sources[number]
        if source is None:
            raise AssertionError(f"rank {self._rank} has no rows of slice {number} of {table.key}")
        return source.read(span.start, span.stop)

    def _joined(self, span: Span, found: Sequence[list[Columns]]) -> Columns:
        """Parts of ranks put behind each other, which is by hash, then slices side by side."""
        table = self.tables[span.table]
        slices = [
            parts[0] if len(parts) == 1 else tuple(map(torch.cat, zip(*parts, strict=True)))
            for parts in found
        ]
        for other in slices[1:]:
            if not torch.equal(other[0], slices[0][0]):
                raise _torn(table.key, len(slices[0][0]), len(other[0]))
        return table.join(list(zip(table.slices, slices, strict=True)))


def joined_ids(parts: Sequence[tuple[Hosted, Columns]]) -> Columns:
    """Of ids, which every slice has: those of the one that is read."""
    return parts[0][1]


def joined_rows(spec: TableSpec) -> Join:
    """Of rows (`row_columns`): columns side by side; versions, times and counts the largest."""

    def join(parts: Sequence[tuple[Hosted, Columns]]) -> Columns:
        if len(parts) == 1:
            return parts[0][1]
        metadata = [
            torch.stack([columns[k] for _, columns in parts]).amax(dim=0) for k in range(1, 4)
        ]
        return (
            parts[0][1][0],
            *metadata,
            joined_state(spec, [(hosted, columns[4]) for hosted, columns in parts]),
            torch.cat([columns[5] for _, columns in parts], dim=1),
        )

    return join


def _packed(parts: Sequence[Columns]) -> Tensor:
    """uint8: of each part its columns, one behind the other, filled up to whole words."""
    flat = [torch.empty(0, dtype=torch.uint8, device="cpu")]
    for columns in parts:
        size = 0
        for column in columns:
            flat.append(column.contiguous().view(-1).view(torch.uint8))
            size += flat[-1].numel()
        flat.append(torch.zeros(-size % _ALIGNED, dtype=torch.uint8, device="cpu"))
    return torch.cat(flat)


def _unpacked(
    data: Tensor, layouts: Sequence[tuple[Column, ...]], rows_X: Sequence[int]
) -> list[Columns]:
    parts, at = [], 0
    for columns, rows in zip(layouts, rows_X, strict=False):
        part = []
        end = at
        for column in columns:
            flat = data[end : end + rows * column.row_bytes].view(column.dtype)
            part.append(flat if column.width is None else flat.view(rows, column.width))
            end += rows * column.row_bytes
        parts.append(tuple(part))
        at += _bytes(columns, rows)
    return parts


def _bytes(columns: tuple[Column, ...], rows: int) -> int:
    size = rows * sum(column.row_bytes for column in columns)
    return size + -size % _ALIGNED


def _torn(key: str, rows: int, others: int) -> CheckpointError:
    return CheckpointError(
        f"column slices of table {key!r}",
        got=f"slices with different rows ({rows} and {others} of a range of hashes)",
        allowed="the same ids in each, changed at the same steps",
        remedy="Rows that a slice alone skipped (nan_policy='skip') or dropped may be the "
        "cause; a full checkpoint does not need the same changes.",
    )
