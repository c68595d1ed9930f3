"""Rows of whole tables, read from the ranks that hold parts and joined at a file's writer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.checkpoint.row_files import Columns, RowLayout, joined, selected
from shoal.checkpoint.writing_plan import (
    HashSpan,
    Piece,
    TableRows,
    WritingPlan,
    bits_for,
    bounds,
    histogram,
    speakers,
)
from shoal.comm.collectives import Collectives, Part
from shoal.comm.consensus import reduced
from shoal.errors import CheckpointError, CollectiveFailed
from shoal.placement import Hosted, hash_ids, sort_key
from shoal.table.hosting import HostedTables, hosted_spec, joined_state
from shoal.table.shard import Snapshot
from shoal.table.spec import TableSpec


@dataclass(frozen=True, slots=True, eq=False)
class LocalSlice:
    """A column slice of a whole table, and where this rank has it.

    Args:
        hosted: which columns, on which ranks; all of them on one rank without a placement.
        spec: of the slice.
        table: index into its shard's specs; None: not on this rank.
    """

    hosted: Hosted
    spec: TableSpec
    table: int | None


def slices_of(tables: HostedTables, spec: TableSpec, rank: int) -> tuple[LocalSlice, ...]:
    """A whole table's slices, left to right."""
    names = {one.name: index for index, one in enumerate(tables.shard.specs)}
    if tables.placement is None:
        return (LocalSlice(Hosted(spec.name, 0, spec.dim, (rank,)), spec, names[spec.name]),)
    found = []
    for hosted in tables.placement.of(spec.name):
        part = hosted_spec(spec, hosted)
        found.append(LocalSlice(hosted, part, names[part.name] if rank in hosted.ranks else None))
    return tuple(found)


class SliceSource(NamedTuple):
    """What this rank has of a slice, read by one thread.

    histogram: (bits) -> rows by the top bits of their hash, int64 [2^bits].
    read: (start, stop) -> rows with hashes [start, stop), ordered by hash.
    """

    histogram: Callable[[int], Tensor]
    read: Callable[[int, int], Columns]


def rows_of(snapshot: Snapshot, table: int) -> SliceSource:
    """Rows of a table of a snapshot."""
    return SliceSource(
        partial(snapshot.histogram, table),
        lambda start, stop: snapshot.read(table, start, stop).columns,
    )


def ids_of(hash_name: str, read: Callable[[], Columns]) -> SliceSource:
    """Ids in memory, with their counts or without.

    Args:
        hash_name: of the table.
        read: makes ids int64 [U], each once, in any order, and counts int64 [U] where they are
            counted. Called once, when they are first asked for.
    """

    @cache
    def by_key() -> tuple[Tensor, Columns]:
        columns = read()
        keys_U, order_U = sort_key(hash_ids(hash_name, columns[0])).sort()
        return keys_U, selected(columns, order_U)

    def within(start: int, stop: int) -> Columns:
        keys_U, columns = by_key()
        return selected(columns, slice(*bounds(keys_U, start, stop)))

    return SliceSource(lambda bits: histogram(by_key()[0], bits), within)


_FIRST_BITS = 10  # enough for 2^18 rows
_ALIGNED = 8  # bytes: what arrives is viewed in its own dtypes


class OtherRankFailed(CheckpointError):
    """Another rank could not continue; it says why when the ranks next agree."""

    def __init__(self) -> None:
        got, remedy = "a failure on another rank", "Look at that rank's error."
        super().__init__("a save by all ranks", got, "all ranks to continue", remedy)


class ShardedTable(NamedTuple):
    """Rows or ids of a whole table as its slices lie on ranks.

    Args:
        key: what files call it.
        spec: of the whole table.
        layout: of the whole table's rows, or of its ids.
        slices: those that are read, left to right; of ids, which every slice has, the first.
        sources: what this rank has of each; None: nothing.
    """

    key: str
    spec: TableSpec
    layout: RowLayout
    slices: tuple[LocalSlice, ...]
    sources: tuple[SliceSource | None, ...]

    def layout_of(self, number: int) -> RowLayout:
        """Of a slice's rows."""
        spec = self.slices[number].spec
        if self.layout.named:
            return self.layout
        return RowLayout.rows(spec.dim, spec.state_width, spec.dtype)


class ShardedRows:
    """Rows of whole tables of all ranks.

    A rank that fails lets the others know at the next exchange, so that none waits for it.

    Args:
        tables: the same on every rank but for what it has.
        collectives: nobody else's until it is done.
    """

    def __init__(self, tables: Sequence[ShardedTable], collectives: Collectives) -> None:
        self.tables = tuple(tables)
        self._collectives = collectives
        self._rank = collectives.rank
        self._rounds: list[tuple[Piece | None, ...]] = []

    def counted(self) -> tuple[TableRows, ...]:
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
            TableRows(one.key, one.layout, part, tuple(each.hosted for each in one.slices))
            for one, part in zip(self.tables, parts, strict=True)
        )

    def pieces(self, plan: WritingPlan) -> Iterator[tuple[int, int, Columns]]:
        """What this rank writes: (file, table, whole rows in order of hash).

        Every rank runs through it; one that stops before its end calls `abandon`.

        Raises:
            CheckpointError: a rank failed, or column slices have different rows.
            CollectiveFailed: a rank died or did not come in time.
        """
        self._rounds = list(plan.rounds[::-1])
        for piece in plan.pieces[self._rank]:
            parts = self._exchange(piece) if piece.travels else {}
            found = self._gathered(piece, parts)
            for span in piece.spans:
                columns = self._joined(span, found[: len(self.tables[span.table].slices)])
                del found[: len(self.tables[span.table].slices)]
                yield piece.file, span.table, columns
                del columns
        while self._rounds:
            self._exchange(None)

    def abandon(self) -> None:
        """Report to the other ranks that this one failed, if they still wait for it."""
        if self._rounds:
            self._rounds.clear()
            self._sizes([0] * self._collectives.world_size, failed=True)

    def _histograms(self, bits_K: Sequence[int]) -> list[Tensor]:
        """Rows of each table over all ranks by so many bits of their hash; 0 bits: not counted."""
        sizes = [1 << bits if bits else 0 for bits in bits_K]
        error: Exception | None = None
        values = torch.zeros(sum(sizes) + 1, dtype=torch.int64, device="cpu")
        try:
            for part, table, bits in zip(
                torch.split(values[:-1], sizes), self.tables, bits_K, strict=True
            ):
                source = table.sources[0]
                if bits and source is not None and table.slices[0].hosted.answers(self._rank):
                    part.copy_(source.histogram(bits))
        except Exception as caught:  # noqa: BLE001 - raised once the other ranks know
            error = caught
            values.zero_()[-1] = 1
        total = reduced(self._collectives, values, "sum", what="rows of a checkpoint")
        if error is not None:
            raise error
        if int(total[-1]):
            raise OtherRankFailed
        return list(torch.split(total[:-1], sizes))

    def _gathered(self, piece: Piece, by_rank: Mapping[int, list[Columns]]) -> list[list[Columns]]:
        """Of each span and slice the parts, from this rank's rows and from what others sent."""
        return [
            [
                self._read(span, number) if rank == self._rank else by_rank[rank][slot]
                for rank in speaking
            ]
            for slot, (span, number, speaking) in enumerate(self._asked(piece, self._rank))
        ]

    def _exchange(self, own: Piece | None) -> dict[int, list[Columns]]:
        """One round: hand in what others write; what they sent of this rank's own piece."""
        pieces_W = self._rounds.pop()
        send = [0] * len(pieces_W)
        error: Exception | None = None
        try:
            # What takes memory, while others can still hear of it.
            packed_W = [_packed(self._handed(piece, w)) for w, piece in enumerate(pieces_W)]
            data = torch.cat(packed_W).to(self._collectives.device)
            send = [len(part) for part in packed_W]
            del packed_W
        except Exception as caught:  # noqa: BLE001 - raised once the other ranks know
            error = caught
        try:
            receive = self._sizes(send, failed=error is not None)
        finally:
            if error is not None:
                self._rounds.clear()
                raise error
        got = self._swapped(Part(data, tuple(send), tuple(receive)))
        asked = [] if own is None else list(self._asked(own, self._rank))
        layouts = [self.tables[span.table].layout_of(number) for span, number, _ in asked]
        parts = enumerate(torch.split(got, receive))
        return {rank: _unpacked(part.cpu(), layouts) for rank, part in parts if len(part)}

    def _handed(self, piece: Piece | None, writer: int) -> list[Columns]:
        if piece is None or writer == self._rank:
            return []
        return [
            self._read(span, number) if self._rank in speaking else ()
            for span, number, speaking in self._asked(piece, writer)
        ]

    def _sizes(self, sizes: Sequence[int], *, failed: bool) -> list[int]:
        """Bytes that come from each rank, given those for each."""
        sizes_W2 = torch.tensor([[size, failed] for size in sizes], dtype=torch.int64, device="cpu")
        what = "sizes of a checkpoint's rows"
        received_W2 = self._collectives.exchange_sizes(sizes_W2, what=what).wait().received_WX
        if not failed and bool(received_W2[:, 1].any()):
            self._rounds.clear()
            raise OtherRankFailed
        return received_W2[:, 0].tolist()

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

    def _asked(self, piece: Piece, writer: int) -> Iterator[tuple[HashSpan, int, tuple[int, ...]]]:
        """Each span with each slice of its table, and the ranks that hand it in."""
        for span in piece.spans:
            for number, one in enumerate(self.tables[span.table].slices):
                yield span, number, speakers(one.hosted, writer, span.start, span.stop)

    def _read(self, span: HashSpan, number: int) -> Columns:
        source = self.tables[span.table].sources[number]
        assert source is not None, f"no slice {number} on rank {self._rank}"
        return source.read(span.start, span.stop)

    def _joined(self, span: HashSpan, found: Sequence[list[Columns]]) -> Columns:
        """Parts of ranks put behind each other, which is by hash, then slices side by side.

        Weights and state are joined, versions, times and counts are the largest of any slice.
        """
        table = self.tables[span.table]
        slices = [joined(table.layout_of(number), parts) for number, parts in enumerate(found)]
        if len(slices) == 1:
            return slices[0]
        for other in slices[1:]:
            if not torch.equal(other[0], slices[0][0]):
                raise _torn(table.key, len(slices[0][0]), len(other[0]))
        states = [
            (one.hosted, columns[5]) for one, columns in zip(table.slices, slices, strict=True)
        ]
        return (
            slices[0][0],
            *(torch.stack([one[k] for one in slices]).amax(dim=0) for k in range(1, 4)),
            torch.cat([one[4] for one in slices], dim=1),
            joined_state(table.spec, states),
        )


def _packed(parts: Sequence[Columns]) -> Tensor:
    """uint8: rows of each part, then its columns one behind the other, filled up to whole words."""
    rows = [len(columns[0]) if columns else 0 for columns in parts]
    flat = [torch.tensor(rows, dtype=torch.int64, device="cpu").view(torch.uint8)]
    for column in (one for columns in parts for one in columns):
        flat.append(column.contiguous().view(-1).view(torch.uint8))
        flat.append(torch.zeros(-len(flat[-1]) % _ALIGNED, dtype=torch.uint8, device="cpu"))
    return torch.cat(flat)


def _unpacked(data: Tensor, layouts: Sequence[RowLayout]) -> list[Columns]:
    parts, at = [], _ALIGNED * len(layouts)
    for layout, rows in zip(layouts, data[:at].view(torch.int64).tolist(), strict=True):
        part = []
        for field in layout.fields:
            size = rows * field.row_bytes
            part.append(data[at : at + size].view(field.dtype).view(field.shape(rows)))
            at += size + -size % _ALIGNED
        parts.append(tuple(part))
    return parts


def _torn(key: str, rows: int, others: int) -> CheckpointError:
    return CheckpointError(
        f"column slices of table {key!r}",
        got=f"slices with different rows ({rows} and {others} of a range of hashes)",
        allowed="the same ids in each, changed at the same steps",
        remedy="Rows that a slice alone skipped (nan_policy='skip') or dropped may be the "
        "cause; a full checkpoint does not need the same changes.",
    )
