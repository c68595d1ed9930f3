"""A small shard in device memory, built directly, for tests of kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from shoal.ids import mix64, to_signed
from shoal.kernels.index import new_entries
from shoal.kernels.tables import (
    BUCKET_SLOTS,
    CHUNK_BITS,
    CHUNK_CAPACITY,
    CHUNK_COUNTS,
    CHUNK_IDS,
    CHUNK_ROWS,
    CHUNK_SEEN,
    CHUNK_STATE,
    CHUNK_TABLE,
    CHUNK_VERSIONS,
    CHUNK_WEIGHTS,
    CHUNK_WORDS,
    COUNT_WORDS,
    FIRST_ROWS,
    TABLE_DIRECTORY,
    TABLE_ENTRIES,
    TABLE_FORM,
    TABLE_FREE,
    TABLE_MASK,
    TABLE_SALT,
    TABLE_SEED,
    TABLE_STATE_BYTES,
    TABLE_WEIGHT_BYTES,
    TABLE_WORDS,
    CallGroups,
    ShardLayout,
)

__all__ = ["DEVICES", "Chunk", "DeviceTables", "TableSize", "ids_from", "make_tables"]

DEVICES = [
    pytest.param("cuda", marks=pytest.mark.gpu) if torch.cuda.is_available() else "cpu",
]
"""Where a test of kernels runs: compiled on a GPU, else interpreted."""


@dataclass(frozen=True, kw_only=True)
class TableSize:
    """One table: row capacity, index slots, dim D, state width S, and the key of its hashes."""

    rows: int = FIRST_ROWS
    slots: int = 2 * FIRST_ROWS
    dim: int = 4
    state_width: int = 0
    dtype: torch.dtype = torch.float32
    form: int = 0
    salt: int = 0
    seed: int = 0

    @property
    def real(self) -> torch.dtype:
        return torch.float64 if self.dtype is torch.float64 else torch.float32

    @property
    def columns(self) -> int:
        """Elements from one row's weights to the next's: a multiple of 16 bytes."""
        return _padded(self.dim, self.dtype)

    @property
    def state_columns(self) -> int:
        return _padded(self.state_width, self.real)


@dataclass(frozen=True)
class Chunk:
    """Rows of one chunk, poisoned until something is written: NaN, and -1 in metadata."""

    table: int
    weights: Tensor
    state: Tensor
    ids: Tensor
    versions: Tensor
    seen: Tensor
    counts: Tensor


class DeviceTables:
    """Tensors of a shard and the `layout` that points at them.

    Chunks of the tables are numbered in turn, so those of one table are not neighbours.
    """

    def __init__(self, sizes: Sequence[TableSize], device: str) -> None:
        self.sizes = tuple(sizes)
        self.device = device
        self.entries = [new_entries(size.slots, device) for size in sizes]
        self.chunks: list[Chunk] = []
        numbers: list[list[int]] = [[] for _ in sizes]
        waiting = [(table, 0) for table, size in enumerate(sizes) if size.rows > 0]
        room = [0] * len(sizes)
        while waiting:
            table, order = waiting.pop(0)
            numbers[table].append(len(self.chunks))
            capacity = min(FIRST_ROWS << order, CHUNK_ROWS)
            self.chunks.append(_chunk(table, sizes[table], capacity, device))
            room[table] += capacity
            if room[table] < sizes[table].rows:
                waiting.append((table, order + 1))
        self.directories = [
            torch.tensor(own or [0], dtype=torch.int32, device=device) for own in numbers
        ]
        self.free_lists = [
            torch.full((max(rows, 1),), -1, dtype=torch.int32, device=device) for rows in room
        ]
        self.layout = ShardLayout(
            torch.tensor([self._table_words(t) for t in range(len(sizes))]).to(device),
            torch.zeros(len(sizes), COUNT_WORDS, dtype=torch.int64, device=device),
            torch.tensor([_chunk_words(chunk) for chunk in self.chunks], dtype=torch.int64)
            .reshape(-1, CHUNK_WORDS)
            .T.contiguous()
            .to(device),
        )

    def count(self, table: int, word: int) -> int:
        """A word of `counters_KC`."""
        return int(self.layout.counters_KC[table, word])

    def replace_entries(self, table: int, entries: Tensor) -> None:
        """Point a table at another index."""
        self.entries[table] = entries
        self.layout.tables_KT[table].copy_(torch.tensor(self._table_words(table)))

    def chunk_of(self, handle: int) -> tuple[Chunk, int]:
        """Chunk of a handle, and the row's place in it."""
        return self.chunks[handle >> CHUNK_BITS], handle & (CHUNK_ROWS - 1)

    def weights_of(self, handle: int) -> Tensor:
        """View of a row's weights [D]."""
        chunk, place = self.chunk_of(handle)
        return chunk.weights[place, : self.sizes[chunk.table].dim]

    def state_of(self, handle: int) -> Tensor:
        """View of a row's optimizer state [S]."""
        chunk, place = self.chunk_of(handle)
        return chunk.state[place, : self.sizes[chunk.table].state_width]

    def id_of(self, handle: int) -> int:
        chunk, place = self.chunk_of(handle)
        return int(chunk.ids[place])

    def groups(self, *groups: tuple[int, Sequence[int]]) -> CallGroups:
        """A call: (table, ids) of each group."""
        splits = [0]
        for _, ids in groups:
            splits.append(splits[-1] + len(ids))
        flat = [id_ for _, ids in groups for id_ in ids]
        tables = torch.tensor([table for table, _ in groups], dtype=torch.int32)
        return CallGroups(
            torch.tensor(flat, dtype=torch.int64, device=self.device),
            torch.tensor(splits, dtype=torch.int64, device=self.device),
            tables.to(self.device),
        )

    def _table_words(self, table: int) -> list[int]:
        size, words = self.sizes[table], [0] * TABLE_WORDS
        words[TABLE_ENTRIES] = self.entries[table].data_ptr()
        words[TABLE_MASK] = (len(self.entries[table]) - 1) * BUCKET_SLOTS - 1
        words[TABLE_SALT] = to_signed(size.salt)
        words[TABLE_SEED] = to_signed(size.seed)
        words[TABLE_DIRECTORY] = self.directories[table].data_ptr()
        words[TABLE_FREE] = self.free_lists[table].data_ptr()
        words[TABLE_WEIGHT_BYTES] = size.columns * size.dtype.itemsize
        words[TABLE_STATE_BYTES] = size.state_columns * size.real.itemsize
        words[TABLE_FORM] = size.form
        return words


def make_tables(sizes: Sequence[TableSize], device: str) -> DeviceTables:
    """Tables without rows; a table gets as many chunks as its rows want."""
    return DeviceTables(sizes, device)


def _padded(width: int, dtype: torch.dtype) -> int:
    unit = 16 // dtype.itemsize
    return (width + unit - 1) // unit * unit


def _chunk(table: int, size: TableSize, capacity: int, device: str) -> Chunk:
    def words(dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.full((capacity,), -1, dtype=dtype, device=device)

    return Chunk(
        table,
        torch.full((capacity, size.columns), torch.nan, dtype=size.dtype, device=device),
        torch.full((capacity, size.state_columns), torch.nan, dtype=size.real, device=device),
        words(torch.int64),
        words(),
        words(),
        words(),
    )


def _chunk_words(chunk: Chunk) -> list[int]:
    words = [0] * CHUNK_WORDS
    words[CHUNK_WEIGHTS] = chunk.weights.data_ptr()
    words[CHUNK_STATE] = chunk.state.data_ptr()
    words[CHUNK_IDS] = chunk.ids.data_ptr()
    words[CHUNK_VERSIONS] = chunk.versions.data_ptr()
    words[CHUNK_SEEN] = chunk.seen.data_ptr()
    words[CHUNK_COUNTS] = chunk.counts.data_ptr()
    words[CHUNK_TABLE] = chunk.table
    words[CHUNK_CAPACITY] = len(chunk.ids)
    return words


def _unmix64(word: int) -> int:
    """The word that `mix64` makes this one of."""
    whole = 1 << 64

    def unshifted(word: int, bits: int) -> int:
        return word ^ (word >> bits) ^ (word >> 2 * bits)

    word = unshifted(word, 31) * pow(0x94D049BB133111EB, -1, whole) % whole
    word = unshifted(word, 27) * pow(0xBF58476D1CE4E5B9, -1, whole) % whole
    return unshifted(word, 30)


def ids_from(slot: int, slots: int, count: int, salt: int = 0) -> list[int]:
    """Ids whose walk begins in the bucket of `slot` in an index of so many slots."""
    ids = [to_signed(_unmix64(slot + n * slots) ^ salt) for n in range(1, count + 1)]
    assert all(mix64(id_ ^ salt) % slots == slot for id_ in ids)
    return ids
