"""Segments of rows by offsets or by index: sums, means, norms, and their gradients."""

from __future__ import annotations

from typing import Any

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from shoal.kernels.launch import blocks_of, columns_of, grid_of, launch, rows_of_tile, wide_of

MODES = {"sum": 0, "mean": 1, "sqrtn": 2, "l2": 3}
CHUNK = 1024
UNROLL = 4  # rows of a segment asked for at once


@triton.jit  # type: ignore[untyped-decorator]
def divided(x: tl.tensor, counts: tl.tensor, mode: tl.constexpr) -> tl.tensor:
    """A sum, or its gradient, over what its mode divides by."""
    if mode == 1:
        x = x / tl.maximum(counts, 1).to(x.dtype)[:, None]
    elif mode == 2:
        x = x / tl.sqrt(tl.maximum(counts, 1).to(x.dtype))[:, None]
    return x


@triton.jit  # type: ignore[untyped-decorator]
def over_norm(grads: tl.tensor, norms: tl.tensor) -> tl.tensor:
    zero = norms == 0
    return tl.where(zero, 0.0, grads / tl.where(zero, 1.0, norms))


@triton.jit  # type: ignore[untyped-decorator]
def add_span(
    sums: tl.tensor,
    values: tl.tensor,
    order: tl.tensor,
    first: tl.tensor,
    last: tl.tensor,
    columns: tl.tensor,
    live: tl.tensor,
    dim: tl.tensor,
    squared: tl.constexpr,
    ordered: tl.constexpr,
    unroll: tl.constexpr,
) -> tl.tensor:
    """Add rows first .. last - 1 of each segment to its sums, in order."""
    longest = tl.max(last - first, axis=0)
    for step in range(0, longest, unroll):
        for k in tl.static_range(unroll):
            at = first + step + k
            inside = at < last
            row = at
            if ordered:
                row = tl.load(order + at, mask=inside, other=0)
            where = row[:, None] * dim + columns[None, :]
            x = tl.load(values + where, mask=inside[:, None] & live[None, :], other=0.0)
            x = x.to(sums.dtype)
            if squared:
                x = x * x
            sums += x
    return sums


@triton.jit  # type: ignore[untyped-decorator]
def _pieces(first: tl.tensor, last: tl.tensor, chunk: tl.constexpr) -> tl.tensor:
    """Head end, first and last whole chunk, tail start; no whole chunk: all is head."""
    chunk_first = (first + chunk - 1) // chunk
    chunk_last = last // chunk
    none = chunk_last <= chunk_first
    chunk_last = tl.where(none, chunk_first, chunk_last)
    head = tl.where(none, last, chunk_first * chunk)
    tail = tl.where(none, last, chunk_last * chunk)
    return head, chunk_first, chunk_last, tail


@triton.jit  # type: ignore[untyped-decorator]
def _reduce(
    values: tl.tensor,
    offsets: tl.tensor,
    order: tl.tensor,
    partial: tl.tensor,
    out: tl.tensor,
    segments: tl.tensor,
    steps: tl.tensor,
    step: tl.constexpr,
    mode: tl.constexpr,
    ordered: tl.constexpr,
    chunk: tl.constexpr,
    wide: tl.constexpr,
    block_s: tl.constexpr,
    block_d: tl.constexpr,
    unroll: tl.constexpr,
) -> None:
    dim = steps * step
    segment = tl.program_id(0).to(tl.int64) * block_s + tl.arange(0, block_s)
    real = segment < segments
    columns = tl.program_id(1) * block_d + tl.arange(0, block_d)
    live = columns < dim
    first = tl.load(offsets + segment, mask=real, other=0)
    last = tl.load(offsets + segment + 1, mask=real, other=0)
    sums = tl.zeros([block_s, block_d], dtype=wide)
    squared: tl.constexpr = mode == 3
    if chunk == 0:
        sums = add_span(
            sums, values, order, first, last, columns, live, dim, squared, ordered, unroll
        )
    else:
        head, chunk_first, chunk_last, tail = _pieces(first, last, chunk)
        sums = add_span(
            sums, values, order, first, head, columns, live, dim, squared, ordered, unroll
        )
        sums = add_span(
            sums, partial, order, chunk_first, chunk_last, columns, live, dim, False, False, unroll
        )
        sums = add_span(
            sums, values, order, tail, last, columns, live, dim, squared, ordered, unroll
        )
    if squared:
        sums = tl.sqrt(sums)
    sums = divided(sums, last - first, mode)
    where = segment[:, None] * dim + columns[None, :]
    tl.store(out + where, sums.to(out.dtype.element_ty), mask=real[:, None] & live[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def _segment_holding(
    offsets: tl.tensor, row: tl.tensor, segments: tl.tensor, rounds: tl.tensor
) -> tl.tensor:
    low = row * 0
    high = low + segments
    for _ in range(rounds):
        middle = (low + high) // 2
        before = tl.load(offsets + middle) <= row
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    return low


@triton.jit  # type: ignore[untyped-decorator]
def _sum_chunks(
    values: tl.tensor,
    offsets: tl.tensor,
    order: tl.tensor,
    partial: tl.tensor,
    segments: tl.tensor,
    rounds: tl.tensor,
    steps: tl.tensor,
    step: tl.constexpr,
    squared: tl.constexpr,
    ordered: tl.constexpr,
    chunk: tl.constexpr,
    wide: tl.constexpr,
    block_r: tl.constexpr,
    block_d: tl.constexpr,
) -> None:
    dim = steps * step
    place = tl.program_id(0).to(tl.int64)
    start = place * chunk
    segment = _segment_holding(offsets, start, segments, rounds)
    if tl.load(offsets + segment + 1) >= start + chunk:
        columns = tl.program_id(1) * block_d + tl.arange(0, block_d)
        live = columns < dim
        sums = tl.zeros([block_r, block_d], dtype=wide)
        for begin in range(0, chunk, block_r):
            row = start + begin + tl.arange(0, block_r)
            if ordered:
                row = tl.load(order + row)
            where = row[:, None] * dim + columns[None, :]
            x = tl.load(values + where, mask=live[None, :], other=0.0).to(wide)
            if squared:
                x = x * x
            sums += x
        tl.store(partial + place * dim + columns, tl.sum(sums, axis=0), mask=live)


@triton.jit  # type: ignore[untyped-decorator]
def write_span(
    row: tl.tensor,
    inputs: tl.tensor,
    out: tl.tensor,
    first: tl.tensor,
    last: tl.tensor,
    columns: tl.tensor,
    live: tl.tensor,
    dim: tl.tensor,
    product: tl.constexpr,
    unroll: tl.constexpr,
) -> None:
    longest = tl.max(last - first, axis=0)
    for step in range(0, longest, unroll):
        for k in tl.static_range(unroll):
            at = first + step + k
            mask = (at < last)[:, None] & live[None, :]
            where = at[:, None] * dim + columns[None, :]
            x = row
            if product:
                x = row * tl.load(inputs + where, mask=mask, other=0.0).to(row.dtype)
            tl.store(out + where, x.to(out.dtype.element_ty), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _spread(
    grads: tl.tensor,
    offsets: tl.tensor,
    inputs: tl.tensor,
    pooled: tl.tensor,
    out: tl.tensor,
    segments: tl.tensor,
    steps: tl.tensor,
    step: tl.constexpr,
    mode: tl.constexpr,
    chunk: tl.constexpr,
    wide: tl.constexpr,
    block_s: tl.constexpr,
    block_d: tl.constexpr,
    unroll: tl.constexpr,
) -> None:
    dim = steps * step
    segment = tl.program_id(0).to(tl.int64) * block_s + tl.arange(0, block_s)
    real = segment < segments
    columns = tl.program_id(1) * block_d + tl.arange(0, block_d)
    live = columns < dim
    first = tl.load(offsets + segment, mask=real, other=0)
    last = tl.load(offsets + segment + 1, mask=real, other=0)
    mask = real[:, None] & live[None, :]
    where = segment[:, None] * dim + columns[None, :]
    row = tl.load(grads + where, mask=mask, other=0.0).to(wide)
    if mode == 3:
        row = over_norm(row, tl.load(pooled + where, mask=mask, other=0.0).to(wide))
    row = divided(row, last - first, mode)
    product: tl.constexpr = mode == 3
    if chunk == 0:
        write_span(row, inputs, out, first, last, columns, live, dim, product, unroll)
    else:
        head, _, _, tail = _pieces(first, last, chunk)
        write_span(row, inputs, out, first, head, columns, live, dim, product, unroll)
        write_span(row, inputs, out, tail, last, columns, live, dim, product, unroll)


@triton.jit  # type: ignore[untyped-decorator]
def _spread_chunks(
    grads: tl.tensor,
    offsets: tl.tensor,
    inputs: tl.tensor,
    pooled: tl.tensor,
    out: tl.tensor,
    segments: tl.tensor,
    rounds: tl.tensor,
    steps: tl.tensor,
    step: tl.constexpr,
    mode: tl.constexpr,
    chunk: tl.constexpr,
    wide: tl.constexpr,
    block_r: tl.constexpr,
    block_d: tl.constexpr,
) -> None:
    dim = steps * step
    start = tl.program_id(0).to(tl.int64) * chunk
    segment = _segment_holding(offsets, start, segments, rounds)
    first = tl.load(offsets + segment)
    last = tl.load(offsets + segment + 1)
    if last >= start + chunk:
        columns = tl.program_id(1) * block_d + tl.arange(0, block_d)
        live = columns < dim
        same = segment + tl.zeros([block_r], dtype=tl.int64)
        where = same[:, None] * dim + columns[None, :]
        row = tl.load(grads + where, mask=live[None, :], other=0.0).to(wide)
        if mode == 3:
            norms = tl.load(pooled + where, mask=live[None, :], other=0.0).to(wide)
            row = over_norm(row, norms)
        row = divided(row, last - first + tl.zeros([block_r], dtype=tl.int64), mode)
        for begin in range(0, chunk, block_r):
            at = start + begin + tl.arange(0, block_r)
            place = at[:, None] * dim + columns[None, :]
            x = row
            if mode == 3:
                x = row * tl.load(inputs + place, mask=live[None, :], other=0.0).to(wide)
            tl.store(out + place, x.to(out.dtype.element_ty), mask=live[None, :])


def reduce(values_ND: Tensor, offsets_B1: Tensor, mode: str) -> Tensor:
    """Sums, means or norms of segments, [B, D]."""
    return reduce_rows(values_ND.contiguous(), offsets_B1.contiguous(), None, mode)


def reduce_rows(values_ND: Tensor, offsets_B1: Tensor, order_N: Tensor | None, mode: str) -> Tensor:
    (rows, dim), segments = values_ND.shape, offsets_B1.shape[0] - 1
    out_BD = torch.empty(segments, dim, dtype=values_ND.dtype, device=values_ND.device)
    if segments == 0 or dim == 0:
        return out_BD
    wide, chunks = wide_of(values_ND.dtype), rows // CHUNK
    dtype = torch.float64 if wide is tl.float64 else torch.float32
    partial = torch.empty(chunks, dim, dtype=dtype, device=values_ND.device)
    order = offsets_B1 if order_N is None else order_N
    shared: dict[str, Any] = {
        **columns_of(dim),
        "ordered": order_N is not None,
        "chunk": CHUNK if chunks else 0,
        "wide": wide,
    }
    block = rows_of_tile(dim)
    if chunks:
        launch(
            _sum_chunks,
            grid_of(chunks, 1, dim),
            values_ND,
            offsets_B1,
            order,
            partial,
            segments,
            segments.bit_length(),
            squared=mode == "l2",
            block_r=min(2 * block, CHUNK),
            **shared,
        )
    launch(
        _reduce,
        grid_of(segments, block, dim),
        values_ND,
        offsets_B1,
        order,
        partial,
        out_BD,
        segments,
        mode=MODES[mode],
        block_s=block,
        unroll=UNROLL,
        **shared,
    )
    return out_BD


def reduce_backward(
    grads_BD: Tensor,
    offsets_B1: Tensor,
    values_ND: Tensor | None,
    pooled_BD: Tensor | None,
    mode: str,
    rows: int,
) -> Tensor:
    """Gradient of `reduce` by its values, [N, D]."""
    grads_BD, offsets_B1 = grads_BD.contiguous(), offsets_B1.contiguous()
    segments, dim = grads_BD.shape
    out_ND = torch.empty(rows, dim, dtype=grads_BD.dtype, device=grads_BD.device)
    if segments == 0 or rows == 0 or dim == 0:
        return out_ND
    inputs = grads_BD if values_ND is None else values_ND.contiguous()
    pooled = grads_BD if pooled_BD is None else pooled_BD.contiguous()
    chunks, block = rows // CHUNK, rows_of_tile(dim)
    shared: dict[str, Any] = {
        **columns_of(dim),
        "mode": MODES[mode],
        "chunk": CHUNK if chunks else 0,
        "wide": wide_of(grads_BD.dtype),
    }
    if chunks:
        launch(
            _spread_chunks,
            grid_of(chunks, 1, dim),
            grads_BD,
            offsets_B1,
            inputs,
            pooled,
            out_ND,
            segments,
            segments.bit_length(),
            block_r=min(2 * block, CHUNK),
            **shared,
        )
    launch(
        _spread,
        grid_of(segments, block, dim),
        grads_BD,
        offsets_B1,
        inputs,
        pooled,
        out_ND,
        segments,
        block_s=block,
        unroll=UNROLL,
        **shared,
    )
    return out_ND


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
