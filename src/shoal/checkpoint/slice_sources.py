"""What one rank has of a table's column slice at a cut: rows, deleted ids, or sights of ids."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from shoal.checkpoint.row_layout import RowLayout
from shoal.placement import hash_ids, sort_key
from shoal.table.shard import RowChunk
from shoal.table.snapshot import HASHES, Snapshot

__all__ = ["Column", "IdSlice", "RowSlice", "SliceSource", "id_columns", "row_columns"]


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
