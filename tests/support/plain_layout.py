"""The layout in plain torch: what every implementation is measured against.

`layout_forward` and `layout_backward` take the arguments of the operators of the same name.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.lookup import BY_ROW, DIVIDED, FIRST_N, MEAN, LayoutCall
from support.plain_rows import row_ids, segment_first_n, segment_pooled


class _PooledFeature(NamedTuple):
    """One feature of one request that has cells: its ids, and its slices as plan rows."""

    batch: slice
    shared: bool
    ids: slice
    splits: Tensor
    pooling: int
    length: int
    low: int
    high: int
    slices: list[list[int]]


def _features(
    cell_splits: Tensor,
    cells: Tensor,
    features: Tensor,
    slices: Tensor,
    batch_sizes: Sequence[int],
) -> Iterator[_PooledFeature]:
    plan = slices.tolist()
    edges = list(itertools.accumulate(batch_sizes, initial=0))
    for request, start, stop in zip(cells.tolist(), edges[:-1], edges[1:], strict=True):
        for row, (cell, count, shared) in zip(features.tolist(), request, strict=True):
            first, last, pooling, length, low, high = row
            if count == 0 or first == last:
                continue
            own = cell_splits[cell : cell + count + 1]
            ids = slice(int(own[0]), int(own[-1]))
            splits, chosen = own - own[0], plan[first:last]
            batch = slice(start, stop)
            yield _PooledFeature(
                batch, bool(shared), ids, splits, pooling, length, low, high, chosen
            )


def layout_forward(buffers: Sequence[Tensor], *call: Any) -> list[Tensor]:
    """Pool the rows of each cell, then put its columns where the plan says."""
    given = LayoutCall(*call)
    flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
    begin_N = _begins(buffers)[given.buffer_N.long()] + given.rows_N
    size = sum(given.batch_sizes)
    shapes_O = [[n for n in given.shapes[i : i + 3] if n] for i in range(0, len(given.shapes), 3)]
    outputs = [flat.new_zeros(size, *shape) for shape in shapes_O]
    filled = [out.flatten(1) for out in outputs]
    for feature in _features(
        given.cell_splits, given.cells, given.features, given.slices, given.batch_sizes
    ):
        columns = torch.arange(feature.low, feature.high, device=flat.device)
        rows = flat[begin_N[feature.ids].unsqueeze(1) + columns]
        pooled = _pooled(feature, rows)
        if feature.shared:
            examples = feature.batch.stop - feature.batch.start
            pooled = pooled.expand(examples, *pooled.shape[1:])
        for _, start, width, output, place, step, _, _, _ in feature.slices:
            for j, part in enumerate(pooled.unbind(1)):
                at = slice(place + j * step, place + j * step + width)
                taken = part[:, start - feature.low : start - feature.low + width]
                filled[output][feature.batch, at].add_(taken)
    return outputs


def _pooled(feature: _PooledFeature, rows: Tensor) -> Tensor:
    """[cells, L or 1, columns]."""
    if feature.pooling == FIRST_N:
        return segment_first_n(rows, feature.splits, feature.length)
    if feature.pooling % BY_ROW == MEAN:
        rows = rows * (1 / feature.splits.diff().to(rows.dtype))[row_ids(feature.splits), None]
    mode = "mean" if feature.pooling == DIVIDED else "sum"
    return segment_pooled(rows, feature.splits, mode).unsqueeze(1)


def layout_backward(
    grads: Sequence[Tensor], scale: Tensor | None, sizes: Sequence[int], *call: Any
) -> list[Tensor]:
    """Give each id its share of its cell's gradient, and add up what ids of one row got."""
    given = LayoutCall(*call)
    edges = torch.tensor([0, *itertools.accumulate(sizes)], device=given.rows_N.device)
    begin_N = edges[given.buffer_N.long()] + given.rows_N
    flat = grads[0].new_zeros(sum(sizes))
    for feature in _features(
        given.cell_splits, given.cells, given.features, given.slices, given.batch_sizes
    ):
        cell_n = row_ids(feature.splits)
        step_n = torch.arange(cell_n.numel(), device=flat.device) - feature.splits[cell_n]
        kept = step_n < feature.length if feature.pooling == FIRST_N else step_n >= 0
        counts_n = feature.splits.diff()[cell_n].unsqueeze(1).to(flat.dtype)
        for _, start, width, output, place, step, _, _, _ in feature.slices:
            if grads[output].numel() == 0:
                continue
            grad = _slice_grad(grads[output], feature, place, step, width)
            if scale is not None:
                grad = grad * scale
            share = grad[cell_n[kept], step_n[kept] if feature.length else 0]
            if feature.pooling == DIVIDED or feature.pooling % BY_ROW == MEAN:
                share = share / counts_n
            columns = torch.arange(start, start + width, device=flat.device)
            at = begin_N[feature.ids][kept].unsqueeze(1) + columns
            flat.index_put_((at,), share, accumulate=True)
    return [part.clone() for part in torch.split(flat, list(sizes))]


def _slice_grad(grad: Tensor, feature: _PooledFeature, place: int, step: int, width: int) -> Tensor:
    """[cells, L or 1, columns]; of a shared cell, the sum over the batch."""
    steps = max(feature.length, 1)
    flat = grad.flatten(1)
    parts = [flat[:, place + j * step : place + j * step + width] for j in range(steps)]
    stacked = torch.stack(parts, dim=1)
    return stacked.sum(0, keepdim=True) if feature.shared else stacked


def _begins(buffers: Sequence[Tensor]) -> Tensor:
    sizes = [buffer.numel() for buffer in buffers]
    begins = list(itertools.accumulate(sizes, initial=0))
    return torch.tensor(begins, device=buffers[0].device)
