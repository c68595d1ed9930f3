"""Rows of a shard at a snapshot point, read back from a snapshot, and a check of them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.placement import hash_ids
from shoal.table.shard import HASHES, Snapshot
from shoal.table.values import RowChunk

__all__ = ["assert_same", "in_pieces", "joined", "unsigned_hashes"]

COLUMNS = ("ids", "weights", "state", "versions", "last_seen_s", "counts")


def assert_same(got: RowChunk, want: RowChunk) -> None:
    """Every column of the chunks is the same, bit for bit."""
    assert got.table == want.table
    for name in COLUMNS:
        one, other = getattr(got, name), getattr(want, name)
        assert one.dtype == other.dtype, name
        assert torch.equal(one, other), name


def joined(chunks: Sequence[RowChunk]) -> RowChunk:
    """Chunks of one table, one after the other."""
    return RowChunk(
        chunks[0].table,
        *(torch.cat([getattr(chunk, name) for chunk in chunks]) for name in COLUMNS),
    )


def in_pieces(snapshot: Snapshot, table: int, pieces: int) -> RowChunk:
    """A table, read in so many ranges of equal width."""
    edges = [HASHES * k // pieces for k in range(pieces + 1)]
    return joined([snapshot.read(table, a, b) for a, b in itertools.pairwise(edges)])


def unsigned_hashes(ids_U: Tensor, hash_name: str) -> list[int]:
    """h of each id, 0..2^64-1."""
    return [h % HASHES for h in hash_ids(hash_name, ids_U).tolist()]
