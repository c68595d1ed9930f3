"""Rows with all their columns, as foreign forms have them and as tables do."""

from __future__ import annotations

import struct

import torch

from shoal.checkpoint.formats.foreign import Entries
from shoal.checkpoint.formats.monolith import masked_crc32c
from shoal.placement import hash_ids, sort_key
from shoal.table.values import RowChunk

NAMES = ("ids", "weights", "state", "versions", "last_seen_s", "counts")


def frame(record: bytes) -> bytes:
    """A record of a TFRecord file: with its length and checksums around it."""
    length = struct.pack("<Q", len(record))
    crc_length, crc_record = masked_crc32c([length, record])
    return length + struct.pack("<I", crc_length) + record + struct.pack("<I", crc_record)


def chunk_of(rows: int, dim: int, state: int, dtype: torch.dtype = torch.float32) -> RowChunk:
    some = torch.Generator().manual_seed(rows + dim)
    real = torch.float64 if dtype == torch.float64 else torch.float32
    return RowChunk(
        table="t",
        ids=torch.randperm(rows, generator=some) * 7_919_000_000_007 - (1 << 62),
        weights=torch.randn(rows, dim, generator=some).to(dtype),
        state=torch.randn(rows, state, generator=some, dtype=real),
        versions=torch.randint(1, 1 << 32, (rows,), generator=some),
        last_seen_s=torch.randint(0, 1 << 32, (rows,), generator=some),
        counts=torch.randint(0, 1 << 32, (rows,), generator=some),
    )


def entries_of(chunk: RowChunk) -> Entries:
    return Entries(
        ids=chunk.ids,
        weights=chunk.weights,
        state=chunk.state,
        versions=chunk.versions,
        last_seen_s=chunk.last_seen_s,
        counts=chunk.counts,
    )


def in_order(chunk: RowChunk) -> RowChunk:
    order = sort_key(hash_ids(chunk.table, chunk.ids)).argsort()
    parts = (chunk.ids, chunk.weights, chunk.state, chunk.versions, chunk.last_seen_s, chunk.counts)
    return RowChunk(chunk.table, *(part[order] for part in parts))


def rows_of(chunk: RowChunk, piece: slice) -> RowChunk:
    parts = (chunk.ids, chunk.weights, chunk.state, chunk.versions, chunk.last_seen_s, chunk.counts)
    return RowChunk(chunk.table, *(part[piece] for part in parts))


def same(left: RowChunk, right: RowChunk) -> bool:
    return all(
        getattr(left, name).dtype == getattr(right, name).dtype
        and torch.equal(getattr(left, name), getattr(right, name))
        for name in NAMES
    )
