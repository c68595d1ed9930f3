"""Saved rows brought into the form of the table that gets them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.checkpoint.matching import SegmentMatch, TableMatch
from shoal.rules.initializers import initial_values
from shoal.table.rows import real_dtype, weight_dtype
from shoal.table.shard import RowChunk

__all__ = ["Adapted", "adapt"]


@dataclass(frozen=True, slots=True)
class Adapted:
    """Rows of a whole table as its spec wants them.

    Args:
        chunk: rows that are kept.
        expired_U: ids of rows that are left out, int64 [U].
        unfit: finite numbers of kept rows that the table's dtype cannot hold.
    """

    chunk: RowChunk
    expired_U: Tensor
    unfit: int


def adapt(match: TableMatch, chunk: RowChunk, *, seed: int, now_s: int | None) -> Adapted:
    """Rows of `match.saved` as rows of `match.spec`.

    Columns go to the segment of their name. A segment that was not saved gets the initial value
    of each id, and its rule's initial state. Weights are cast to nearest, ties to even.

    Args:
        match: what goes where.
        chunk: rows as they were saved.
        seed: of initial values.
        now_s: rows expired at this event time are dropped; None keeps all.
    """
    spec = match.spec
    expired_U = chunk.ids[:0]
    if now_s is not None and spec.expiry is not None and chunk.ids.numel():
        gone_R = spec.expiry.expired_N(chunk.ids, chunk.last_seen_s, now_s)
        if bool(gone_R.any()):
            expired_U, chunk = chunk.ids[gone_R], _rows(chunk, ~gone_R)
    weights, state = chunk.weights, chunk.state
    if not match.same_columns:
        weights = _weights(match, chunk, seed)
        state = torch.cat([_state(match, one, chunk) for one in match.segments], dim=1)
    cast = weights.to(weight_dtype(spec)), state.to(real_dtype(spec))
    return Adapted(
        RowChunk(
            table=spec.name,
            ids=chunk.ids,
            weights=cast[0],
            state=cast[1],
            versions=chunk.versions,
            last_seen_s=chunk.last_seen_s,
            counts=chunk.counts,
        ),
        expired_U,
        _unfit(weights, cast[0]) + _unfit(state, cast[1]),
    )


def _weights(match: TableMatch, chunk: RowChunk, seed: int) -> Tensor:
    """Weights [R, D] of the table, not yet in its dtype."""
    parts = []
    for one in match.segments:
        dim = one.segment.dim
        if one.source is not None:
            parts.append(chunk.weights[:, one.source : one.source + dim])
            continue
        initial = initial_values(
            one.segment.initializer,
            chunk.ids,
            seed=seed,
            table=match.spec.hash_name,
            column_start=match.spec.first_column + one.start,
            dim=dim,
        )
        parts.append(initial)
    return torch.cat(parts, dim=1)


def _state(match: TableMatch, one: SegmentMatch, chunk: RowChunk) -> Tensor:
    width = one.segment.state_width
    if one.state_source is not None:
        return chunk.state[:, one.state_source : one.state_source + width]
    fresh = one.segment.optimizer.init_state(one.segment.dim, dtype=real_dtype(match.spec))
    return fresh.expand(chunk.ids.numel(), width)


def _unfit(before: Tensor, after: Tensor) -> int:
    if torch.finfo(before.dtype).max <= torch.finfo(after.dtype).max:
        return 0
    return int((before.isfinite() & ~after.isfinite()).sum())


def _rows(chunk: RowChunk, kept_R: Tensor) -> RowChunk:
    return RowChunk(
        table=chunk.table,
        ids=chunk.ids[kept_R],
        weights=chunk.weights[kept_R],
        state=chunk.state[kept_R],
        versions=chunk.versions[kept_R],
        last_seen_s=chunk.last_seen_s[kept_R],
        counts=chunk.counts[kept_R],
    )
