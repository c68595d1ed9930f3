"""Pooling and its gradient for one position at a time: the oracle's half of a pooled lookup."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from shoal.lookup import PoolPlan, Slice
from shoal.table.shard import GradRecord

__all__ = ["pool_rows", "position_gradients"]


def pool_rows(
    rows: Sequence[Tensor],
    plan: PoolPlan,
    offsets_GB1: Tensor,
    weights_N: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, ...]:
    """One [B, width] per output; rows hold one [D] per position."""
    batch_size = (len(offsets_GB1) - 1) // len(plan.pools)
    outputs = tuple(torch.zeros(batch_size, o.width, dtype=dtype) for o in plan.outputs)
    for position, bag, part, columns, factor in _contributions(plan, offsets_GB1, weights_N):
        outputs[part.output][bag, columns] += factor * rows[position][part.start : part.stop]
    return outputs


def position_gradients(record: GradRecord, dims: Sequence[int]) -> list[Tensor]:
    """One [D] per position, without the record's scale."""
    if record.plan is None:
        return [row for part in record.grads for row in part]
    assert record.offsets_GB1 is not None
    # A plan may serve tables of both precisions.
    dtype = functools.reduce(torch.promote_types, (grad.dtype for grad in record.grads))
    rows = [torch.zeros(dim, dtype=dtype) for dim in dims]
    walk = _contributions(record.plan, record.offsets_GB1, record.weights_N)
    for position, bag, part, columns, factor in walk:
        rows[position][part.start : part.stop] += factor * record.grads[part.output][bag, columns]
    return rows


def _contributions(
    plan: PoolPlan, offsets_GB1: Tensor, weights_N: Tensor | None
) -> Iterator[tuple[int, int, Slice, slice, float]]:
    """Each (position, bag, slice, output columns, factor) that a pooled lookup adds up."""
    cuts = offsets_GB1.tolist()
    batch_size = (len(cuts) - 1) // len(plan.pools)
    for g, pool in enumerate(plan.pools):
        for bag in range(batch_size):
            first, last = cuts[g * batch_size + bag : g * batch_size + bag + 2]
            if pool.pooling == "first_n":
                last = min(last, first + pool.length)
            for position in range(first, last):
                factor = 1.0 if weights_N is None else float(weights_N[position])
                if pool.pooling == "mean":
                    factor /= last - first
                for part in pool.slices:
                    width = part.stop - part.start
                    lane = position - first if pool.pooling == "first_n" else 0
                    column = part.column + lane * part.stride
                    yield position, bag, part, slice(column, column + width), factor
