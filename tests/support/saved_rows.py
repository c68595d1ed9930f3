"""Rows made by hand, and checkpoints of them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from shoal.checkpoint.row_layout import RowLayout
from shoal.placement import hash_ids, sort_key
from shoal.table.shard import RowChunk

FIELDS = ("ids", "weights", "state", "versions", "last_seen_s", "counts")


def by_hash(table: str, ids: Tensor) -> Tensor:
    """The ids in the order of files."""
    return ids[sort_key(hash_ids(table, ids)).argsort()]


def rows_of(
    table: str, ids: Tensor, layout: RowLayout, *, salt: int = 0, key: str | None = None
) -> RowChunk:
    """Rows whose values follow from their id and the salt, ordered by hash."""
    ids = by_hash(table, ids)
    seed = (ids % 1000 + salt).double()
    columns = torch.arange(layout.dim + layout.state_width).double()
    values = (seed[:, None] * 0.5 + columns[None, :] * 0.25).float()
    return RowChunk(
        table=key or table,
        ids=ids,
        weights=values[:, : layout.dim].to(layout.weights_dtype).contiguous(),
        state=values[:, layout.dim :].to(layout.state_dtype).contiguous(),
        versions=ids % 7 + 1 + salt,
        last_seen_s=ids % 100 + salt,
        counts=ids % 5 + 1,
    )


def same(a: RowChunk, b: RowChunk) -> bool:
    """Equal in every field, bit for bit."""
    return all(
        getattr(a, name).dtype == getattr(b, name).dtype
        and torch.equal(getattr(a, name), getattr(b, name))
        for name in FIELDS
    )


def joined(chunks: list[RowChunk]) -> RowChunk:
    """All rows in one."""
    parts: Mapping[str, Tensor] = {
        name: torch.cat([getattr(chunk, name) for chunk in chunks]) for name in FIELDS
    }
    return RowChunk(table=chunks[0].table, **parts)
