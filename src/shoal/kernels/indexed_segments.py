"""Segments of rows by the index of each row, and their first rows; with gradients."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from shoal.kernels.launching import launch
from shoal.kernels.row_tiles import blocks_of, columns_of, grid_of, rows_of_tile, wide_of
from shoal.kernels.segments import MODES, divided, over_norm, reduce_rows

__all__ = [
    "first_n",
    "first_n_backward",
    "in_order",
    "index_reduce",
    "index_reduce_backward",
    "offsets_of",
    "row_ids",
]

_BLOCK = 1024


@triton.jit  # type: ignore[untyped-decorator]
def _spread_index(
    grads: tl.tensor,
    index: tl.tensor,
    counts: tl.tensor,
    inputs: tl.tensor,
    pooled: tl.tensor,
    out: tl.tensor,
    count: tl.tensor,
    segments: tl.tensor,
    steps: tl.tensor,
    step: tl.constexpr,
    mode: tl.constexpr,
    wide: tl.constexpr,
    runs: tl.constexpr,
    block_r: tl.constexpr,
    block_d: tl.constexpr,
) -> None:
    dim = steps * step
    at = tl.program_id(0).to(tl.int64) * block_r + tl.arange(0, block_r)
    real = at < count
    columns = tl.program_id(1) * block_d + tl.arange(0, block_d)
    live = columns < dim
    segment = tl.load(index + at, mask=real, other=-1)
    known = (segment >= 0) & (segment < segments)
    where = segment[:, None] * dim + columns[None, :]
    mask = known[:, None] & live[None, :]
    row = tl.load(grads + where, mask=mask, other=0.0).to(wide)
    place = at[:, None] * dim + columns[None, :]
    keep = real[:, None] & live[None, :]
    if mode == 3:
        row = over_norm(row, tl.load(pooled + where, mask=mask, other=0.0).to(wide))
        row = row * tl.load(inputs + place, mask=keep, other=0.0).to(wide)
    elif mode != 0:
        rows = tl.load(counts + segment, mask=known, other=1)
        if runs:
            rows -= tl.load(counts + segments + segment, mask=known, other=0)
        row = divided(row, rows, mode)
    tl.store(out + place, row.to(out.dtype.element_ty), mask=keep)


@triton.jit  # type: ignore[untyped-decorator]
def _mark_runs(
    index: tl.tensor,
    bounds: tl.tensor,
    count: tl.tensor,
    segments: tl.tensor,
    block: tl.constexpr,
) -> None:
    """Ends [B], then starts [B], of the segments a sorted index has; others stay unwritten."""
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    segment = tl.load(index + at, mask=at < count, other=-1)
    before = tl.load(index + at - 1, mask=(at > 0) & (at < count), other=-1)
    after = tl.load(index + at + 1, mask=at + 1 < count, other=-1)
    known = (segment >= 0) & (segment < segments)
    tl.store(bounds + segment, at + 1, mask=known & (segment != after))
    tl.store(bounds + segments + segment, at, mask=known & (segment != before))


@triton.jit  # type: ignore[untyped-decorator]
def _count(
    index: tl.tensor,
    counts: tl.tensor,
    count: tl.tensor,
    segments: tl.tensor,
    block: tl.constexpr,
) -> None:
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    segment = tl.load(index + at, mask=at < count, other=-1)
    known = (segment >= 0) & (segment < segments)
    tl.atomic_add(counts + segment, at * 0 + 1, mask=known, sem="relaxed")


@triton.jit  # type: ignore[untyped-decorator]
def _take_first(
    rows: tl.tensor,
    offsets: tl.tensor,
    out: tl.tensor,
    places: tl.tensor,
    length: tl.tensor,
    steps: tl.tensor,
    step: tl.constexpr,
    block_r: tl.constexpr,
    block_d: tl.constexpr,
) -> None:
    dim = steps * step
    place = tl.program_id(0).to(tl.int64) * block_r + tl.arange(0, block_r)
    real = place < places
    columns = tl.program_id(1) * block_d + tl.arange(0, block_d)
    live = columns < dim
    segment = place // length
    row = tl.load(offsets + segment, mask=real, other=0) + place % length
    inside = real & (row < tl.load(offsets + segment + 1, mask=real, other=0))
    where = row[:, None] * dim + columns[None, :]
    x = tl.load(rows + where, mask=inside[:, None] & live[None, :], other=0.0)
    to = place[:, None] * dim + columns[None, :]
    tl.store(out + to, x, mask=real[:, None] & live[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def _return_first(
    grads: tl.tensor,
    offsets: tl.tensor,
    ids: tl.tensor,
    out: tl.tensor,
    count: tl.tensor,
    length: tl.tensor,
    steps: tl.tensor,
    step: tl.constexpr,
    block_r: tl.constexpr,
    block_d: tl.constexpr,
) -> None:
    dim = steps * step
    at = tl.program_id(0).to(tl.int64) * block_r + tl.arange(0, block_r)
    real = at < count
    columns = tl.program_id(1) * block_d + tl.arange(0, block_d)
    live = columns < dim
    segment = tl.load(ids + at, mask=real, other=0)
    place = at - tl.load(offsets + segment, mask=real, other=0)
    kept = real & (place < length)
    where = (segment * length + place)[:, None] * dim + columns[None, :]
    x = tl.load(grads + where, mask=kept[:, None] & live[None, :], other=0.0)
    to = at[:, None] * dim + columns[None, :]
    tl.store(out + to, x, mask=real[:, None] & live[None, :])


def index_reduce(
    values_MD: Tensor, index_M: Tensor, length: int, mode: str, indices_sorted: bool
) -> Tensor:
    """Sums, means or norms of the values of each index, [B, D]."""
    index_M, order_M = in_order(index_M, indices_sorted)
    return reduce_rows(values_MD.contiguous(), offsets_of(index_M, length), order_M, mode)


def in_order(index_M: Tensor, indices_sorted: bool) -> tuple[Tensor, Tensor | None]:
    """The index sorted, and where each of its values was; None: where it is."""
    if indices_sorted:
        return index_M.contiguous(), None
    found = torch.sort(index_M, stable=True)
    return found.values, found.indices


def offsets_of(index_M: Tensor, length: int) -> Tensor:
    """Offsets int64 [B+1] of a sorted index."""
    bounds_B1 = torch.arange(length + 1, device=index_M.device)
    return torch.searchsorted(index_M, bounds_B1)


def index_reduce_backward(
    grads_BD: Tensor,
    index_M: Tensor,
    values_MD: Tensor | None,
    pooled_BD: Tensor | None,
    mode: str,
    indices_sorted: bool,
) -> Tensor:
    """Gradient of `index_reduce` by its values, [M, D]."""
    grads_BD, index_M = grads_BD.contiguous(), index_M.contiguous()
    (segments, dim), count = grads_BD.shape, index_M.shape[0]
    out_MD = torch.empty(count, dim, dtype=grads_BD.dtype, device=grads_BD.device)
    if count == 0 or dim == 0:
        return out_MD
    counts = index_M
    if mode in ("mean", "sqrtn"):
        counts = _counts(index_M, segments, indices_sorted)
    block = 2 * rows_of_tile(dim)
    launch(
        _spread_index,
        grid_of(count, block, dim),
        grads_BD,
        index_M,
        counts,
        grads_BD if values_MD is None else values_MD.contiguous(),
        grads_BD if pooled_BD is None else pooled_BD.contiguous(),
        out_MD,
        count,
        segments,
        mode=MODES[mode],
        wide=wide_of(grads_BD.dtype),
        runs=indices_sorted,
        block_r=block,
        **columns_of(dim),
    )
    return out_MD


def _counts(index_M: Tensor, segments: int, indices_sorted: bool) -> Tensor:
    """Rows of each segment [B]; of a sorted index the ends and starts of runs [2B], no atomics."""
    rows, grid = index_M.shape[0], (blocks_of(index_M.shape[0], _BLOCK),)
    if indices_sorted:
        bounds = torch.empty(2 * segments, dtype=torch.int64, device=index_M.device)
        launch(_mark_runs, grid, index_M, bounds, rows, segments, block=_BLOCK)
        return bounds
    counts_B = torch.zeros(segments, dtype=torch.int64, device=index_M.device)
    launch(_count, grid, index_M, counts_B, rows, segments, block=_BLOCK)
    return counts_B


def first_n(rows_ND: Tensor, offsets_B1: Tensor, length: int) -> Tensor:
    """First rows of each segment, zero padded, [B, L, D]."""
    rows_ND, offsets_B1 = rows_ND.contiguous(), offsets_B1.contiguous()
    segments, dim = offsets_B1.shape[0] - 1, rows_ND.shape[1]
    out_BLD = torch.empty(segments, length, dim, dtype=rows_ND.dtype, device=rows_ND.device)
    if out_BLD.numel() == 0:
        return out_BLD
    block, places = 2 * rows_of_tile(dim), segments * length
    launch(
        _take_first,
        grid_of(places, block, dim),
        rows_ND,
        offsets_B1,
        out_BLD,
        places,
        length,
        block_r=block,
        **columns_of(dim),
    )
    return out_BLD


def first_n_backward(grads_BLD: Tensor, offsets_B1: Tensor, rows: int) -> Tensor:
    """Gradient of `first_n` by its rows, [N, D]."""
    grads_BLD, offsets_B1 = grads_BLD.contiguous(), offsets_B1.contiguous()
    _, length, dim = grads_BLD.shape
    out_ND = torch.empty(rows, dim, dtype=grads_BLD.dtype, device=grads_BLD.device)
    if out_ND.numel() == 0:
        return out_ND
    block = 2 * rows_of_tile(dim)
    ids_N = row_ids(offsets_B1, rows)
    launch(
        _return_first,
        grid_of(rows, block, dim),
        grads_BLD,
        offsets_B1,
        ids_N,
        out_ND,
        rows,
        length,
        block_r=block,
        **columns_of(dim),
    )
    return out_ND


def row_ids(offsets_B1: Tensor, rows: int) -> Tensor:
    """Segment of each row, int64 [N]."""
    places_N = torch.arange(rows, device=offsets_B1.device)
    return torch.searchsorted(offsets_B1[1:].contiguous(), places_N, right=True)
