"""Segments of rows: sums, means, norms, their gradients; of many tables in one launch.

For many tables a program finds its table's addresses and sizes in a small array, and where each
column of the result lies, and how far apart its rows are, in another. Both are written by the host
to pinned memory and copied without waiting.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from shoal.kernels.host_copies import sent
from shoal.kernels.ids import value_rowids
from shoal.kernels.launch import (
    ELEMENTS,
    blocks_of,
    columns_of,
    columns_per_program,
    grid_of,
    launch,
    rows_of_tile,
    step_of,
    wide_of,
)

CHUNK = 1024
MODES = {"sum": 0, "mean": 1, "sqrtn": 2, "l2": 3}
UNROLL = 4  # rows of a segment asked for at once
FIELDS = 6  # of a table: values, offsets, order, segments, steps, first entry in `columns`


@triton.jit  # type: ignore[untyped-decorator]
def divided(x, counts, mode: tl.constexpr):  # type: ignore[no-untyped-def]
    """A sum, or its gradient, over what its mode divides by."""
    if mode == 1:
        x = x / tl.maximum(counts, 1).to(x.dtype)[:, None]
    elif mode == 2:
        x = x / tl.sqrt(tl.maximum(counts, 1).to(x.dtype))[:, None]
    return x


@triton.jit
def over_norm(grads, norms):  # type: ignore[no-untyped-def]
    zero = norms == 0
    return tl.where(zero, 0.0, grads / tl.where(zero, 1.0, norms))


@triton.jit  # type: ignore[untyped-decorator]
def _gradient(  # type: ignore[no-untyped-def]
    grads, norms, where, mask, counts,
    mode: tl.constexpr, wide: tl.constexpr,
):  # fmt: skip
    """What each row of a segment of so many rows gets; of a norm, over that."""
    row = tl.load(grads + where, mask=mask, other=0.0).to(wide)
    if mode == 3:
        row = over_norm(row, tl.load(norms + where, mask=mask, other=0.0).to(wide))
    return divided(row, counts, mode)


@triton.jit  # type: ignore[untyped-decorator]
def add_span(  # type: ignore[no-untyped-def]
    sums, values, order, first, last, columns, live, dim,
    squared: tl.constexpr, ordered: tl.constexpr, unroll: tl.constexpr,
):  # fmt: skip
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
def _pieces(first, last, chunk: tl.constexpr):  # type: ignore[no-untyped-def]
    """Head end, first and last whole chunk, tail start; no whole chunk: all is head."""
    chunk_first = (first + chunk - 1) // chunk
    chunk_last = last // chunk
    none = chunk_last <= chunk_first
    chunk_last = tl.where(none, chunk_first, chunk_last)
    head = tl.where(none, last, chunk_first * chunk)
    tail = tl.where(none, last, chunk_last * chunk)
    return head, chunk_first, chunk_last, tail


@triton.jit  # type: ignore[untyped-decorator]
def _tile(count, steps, step: tl.constexpr, block_r: tl.constexpr, block_d: tl.constexpr):  # type: ignore[no-untyped-def]
    """A program's rows, which of them there are, its columns, which of them, and how many all are.

    A row has `steps` times `step` columns.
    """
    dim = steps * step
    row = tl.program_id(0).to(tl.int64) * block_r + tl.arange(0, block_r)
    real = row < count
    columns = tl.program_id(1) * block_d + tl.arange(0, block_d)
    return row, real, columns, columns < dim, dim


@triton.jit  # type: ignore[untyped-decorator]
def _reduce(  # type: ignore[no-untyped-def]
    values, offsets, order, partial, out, segments, steps,
    step: tl.constexpr, mode: tl.constexpr, ordered: tl.constexpr, chunk: tl.constexpr,
    wide: tl.constexpr, block_s: tl.constexpr, block_d: tl.constexpr, unroll: tl.constexpr,
):  # fmt: skip
    segment, real, columns, live, dim = _tile(segments, steps, step, block_s, block_d)
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


@triton.jit
def _segment_holding(offsets, row, segments, rounds):  # type: ignore[no-untyped-def]
    low = row * 0
    high = low + segments
    for _ in range(rounds):
        middle = (low + high) // 2
        before = tl.load(offsets + middle) <= row
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    return low


@triton.jit  # type: ignore[untyped-decorator]
def _sum_chunks(  # type: ignore[no-untyped-def]
    values, offsets, order, partial, segments, rounds, steps,
    step: tl.constexpr, squared: tl.constexpr, ordered: tl.constexpr, chunk: tl.constexpr,
    wide: tl.constexpr, block_r: tl.constexpr, block_d: tl.constexpr,
):  # fmt: skip
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
def write_span(  # type: ignore[no-untyped-def]
    row, inputs, out, first, last, columns, live, dim,
    product: tl.constexpr, unroll: tl.constexpr,
):  # fmt: skip
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
def _spread(  # type: ignore[no-untyped-def]
    grads, offsets, inputs, pooled, out, segments, steps,
    step: tl.constexpr, mode: tl.constexpr, chunk: tl.constexpr, wide: tl.constexpr,
    block_s: tl.constexpr, block_d: tl.constexpr, unroll: tl.constexpr,
):  # fmt: skip
    segment, real, columns, live, dim = _tile(segments, steps, step, block_s, block_d)
    first = tl.load(offsets + segment, mask=real, other=0)
    last = tl.load(offsets + segment + 1, mask=real, other=0)
    mask = real[:, None] & live[None, :]
    where = segment[:, None] * dim + columns[None, :]
    row = _gradient(grads, pooled, where, mask, last - first, mode, wide)
    product: tl.constexpr = mode == 3
    if chunk == 0:
        write_span(row, inputs, out, first, last, columns, live, dim, product, unroll)
    else:
        head, _, _, tail = _pieces(first, last, chunk)
        write_span(row, inputs, out, first, head, columns, live, dim, product, unroll)
        write_span(row, inputs, out, tail, last, columns, live, dim, product, unroll)


@triton.jit  # type: ignore[untyped-decorator]
def _spread_chunks(  # type: ignore[no-untyped-def]
    grads, offsets, inputs, pooled, out, segments, rounds, steps,
    step: tl.constexpr, mode: tl.constexpr, chunk: tl.constexpr, wide: tl.constexpr,
    block_r: tl.constexpr, block_d: tl.constexpr,
):  # fmt: skip
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
        counts = last - first + tl.zeros([block_r], dtype=tl.int64)
        row = _gradient(grads, pooled, where, live[None, :], counts, mode, wide)
        for begin in range(0, chunk, block_r):
            at = start + begin + tl.arange(0, block_r)
            place = at[:, None] * dim + columns[None, :]
            x = row
            if mode == 3:
                x = row * tl.load(inputs + place, mask=live[None, :], other=0.0).to(wide)
            tl.store(out + place, x.to(out.dtype.element_ty), mask=live[None, :])


def reduce(
    values_ND: Tensor,
    offsets_B1: Tensor,
    order_N: Tensor | None,
    index_N: Tensor | None,
    mode: str,
) -> Tensor:
    """Sums, means or norms of segments, [B, D]."""
    values_ND, offsets_B1 = values_ND.contiguous(), offsets_B1.contiguous()
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
            _sum_chunks, grid_of(chunks, 1, dim),
            values_ND, offsets_B1, order, partial, segments, segments.bit_length(),
            squared=mode == "l2", block_r=min(2 * block, CHUNK), **shared,
        )  # fmt: skip
    launch(
        _reduce, grid_of(segments, block, dim),
        values_ND, offsets_B1, order, partial, out_BD, segments,
        mode=MODES[mode], block_s=block, unroll=UNROLL, **shared,
    )  # fmt: skip
    return out_BD


def spread(
    grads_BD: Tensor,
    offsets_B1: Tensor,
    order_N: Tensor | None,
    index_N: Tensor | None,
    values_ND: Tensor | None,
    pooled_BD: Tensor | None,
    mode: str,
    rows: int,
) -> Tensor:
    """Gradient of `reduce` by its values, [N, D]; by the index where there is one."""
    grads_BD, offsets_B1 = grads_BD.contiguous(), offsets_B1.contiguous()
    segments, dim = grads_BD.shape
    out_ND = torch.empty(rows, dim, dtype=grads_BD.dtype, device=grads_BD.device)
    if segments == 0 or rows == 0 or dim == 0:
        return out_ND
    inputs = grads_BD if values_ND is None else values_ND.contiguous()
    pooled = grads_BD if pooled_BD is None else pooled_BD.contiguous()
    shared: dict[str, Any] = {
        **columns_of(dim),
        "mode": MODES[mode],
        "wide": wide_of(grads_BD.dtype),
    }
    block = rows_of_tile(dim)
    if index_N is not None:
        launch(
            _spread_index, grid_of(rows, 2 * block, dim),
            grads_BD, index_N.contiguous(), offsets_B1, inputs, pooled, out_ND, rows, segments,
            block_r=2 * block, **shared,
        )  # fmt: skip
        return out_ND
    chunks = rows // CHUNK
    shared["chunk"] = CHUNK if chunks else 0
    if chunks:
        launch(
            _spread_chunks, grid_of(chunks, 1, dim),
            grads_BD, offsets_B1, inputs, pooled, out_ND, segments, segments.bit_length(),
            block_r=min(2 * block, CHUNK), **shared,
        )  # fmt: skip
    launch(
        _spread, grid_of(segments, block, dim),
        grads_BD, offsets_B1, inputs, pooled, out_ND, segments,
        block_s=block, unroll=UNROLL, **shared,
    )  # fmt: skip
    return out_ND


@triton.jit  # type: ignore[untyped-decorator]
def _spread_index(  # type: ignore[no-untyped-def]
    grads, index, offsets, inputs, pooled, out, count, segments, steps,
    step: tl.constexpr, mode: tl.constexpr, wide: tl.constexpr, block_r: tl.constexpr,
    block_d: tl.constexpr,
):  # fmt: skip
    at, real, columns, live, dim = _tile(count, steps, step, block_r, block_d)
    segment = tl.load(index + at, mask=real, other=-1)
    known = (segment >= 0) & (segment < segments)
    where = segment[:, None] * dim + columns[None, :]
    mask = known[:, None] & live[None, :]
    counts = at
    if (mode == 1) | (mode == 2):
        counts = tl.load(offsets + segment + 1, mask=known, other=1)
        counts -= tl.load(offsets + segment, mask=known, other=0)
    row = _gradient(grads, pooled, where, mask, counts, mode, wide)
    place = at[:, None] * dim + columns[None, :]
    keep = real[:, None] & live[None, :]
    if mode == 3:
        row = row * tl.load(inputs + place, mask=keep, other=0.0).to(wide)
    tl.store(out + place, row.to(out.dtype.element_ty), mask=keep)


@triton.jit  # type: ignore[untyped-decorator]
def _move_first(  # type: ignore[no-untyped-def]
    source, offsets, ids, out, count, length, steps,
    step: tl.constexpr, back: tl.constexpr, block_r: tl.constexpr, block_d: tl.constexpr,
):  # fmt: skip
    """First rows of segments to places; or, going back, what lies at a place to its row."""
    at, real, columns, live, dim = _tile(count, steps, step, block_r, block_d)
    if back:
        segment = tl.load(ids + at, mask=real, other=0)
        place = at - tl.load(offsets + segment, mask=real, other=0)
        kept = real & (place < length)
        row = segment * length + place
    else:
        segment = at // length
        row = tl.load(offsets + segment, mask=real, other=0) + at % length
        kept = real & (row < tl.load(offsets + segment + 1, mask=real, other=0))
    where = row[:, None] * dim + columns[None, :]
    x = tl.load(source + where, mask=kept[:, None] & live[None, :], other=0.0)
    tl.store(out + at[:, None] * dim + columns[None, :], x, mask=real[:, None] & live[None, :])


def group_index(
    index_M: Tensor, length: int, indices_sorted: bool, op: str
) -> tuple[Tensor, Tensor]:
    """Offsets int64 [B+1] of an index, and where its values lie by segment; none if sorted."""
    order_M = index_M.new_empty(0)
    if not indices_sorted:
        index_M, order_M = torch.sort(index_M, stable=True)
    bounds_B1 = torch.arange(length + 1, device=index_M.device)
    return torch.searchsorted(index_M.contiguous(), bounds_B1), order_M


def index_reduce(
    values_ND: Tensor, index_N: Tensor, length: int, indices_sorted: bool, mode: str, op: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Sums, means or norms of the values of each index, [B, D]; its offsets and order."""
    offsets_B1, order_N = group_index(index_N, length, indices_sorted, op)
    order = None if indices_sorted else order_N
    return reduce(values_ND, offsets_B1, order, index_N, mode), offsets_B1, order_N


def first_n(source: Tensor, offsets_B1: Tensor, length: int, rows: int, back: bool) -> Tensor:
    """First rows of each segment, zero padded, [B, L, D]; or back, [N, D]."""
    source, offsets_B1 = source.contiguous(), offsets_B1.contiguous()
    segments, dim = offsets_B1.shape[0] - 1, source.shape[-1]
    out = source.new_empty((rows, dim) if back else (segments, length, dim))
    if out.numel() == 0:
        return out
    block, count = 2 * rows_of_tile(dim), rows if back else segments * length
    launch(
        _move_first, grid_of(count, block, dim),
        source, offsets_B1, value_rowids(offsets_B1, rows) if back else offsets_B1, out, count,
        length,
        back=back, block_r=block, **columns_of(dim),
    )  # fmt: skip
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _fused(  # type: ignore[no-untyped-def]
    tables, columns,
    fields: tl.constexpr, element: tl.constexpr, size: tl.constexpr, wide: tl.constexpr,
    step: tl.constexpr, back: tl.constexpr, ordered: tl.constexpr, block_s: tl.constexpr,
    block_d: tl.constexpr, unroll: tl.constexpr,
):  # fmt: skip
    """Sum rows into the columns' places; or, going back, write what lies there to the rows."""
    table = tables + tl.program_id(1) * fields
    segments = tl.load(table + 3)
    dim = tl.load(table + 4) * step
    begin = tl.program_id(0).to(tl.int64) * block_s
    if (begin < segments) & (tl.program_id(2) * block_d < dim):
        values = tl.load(table).to(tl.pointer_type(element))
        if step * size >= 16:
            values = tl.multiple_of(values, 16)
        offsets = tl.load(table + 1).to(tl.pointer_type(tl.int64))
        segment = begin + tl.arange(0, block_s)
        real = segment < segments
        column = tl.program_id(2) * block_d + tl.arange(0, block_d)
        live = column < dim
        first = tl.load(offsets + segment, mask=real, other=0)
        last = tl.load(offsets + segment + 1, mask=real, other=0)
        entry = columns + 2 * (tl.load(table + 5) + column)
        place = tl.load(entry, mask=live, other=0)
        apart = tl.load(entry + 1, mask=live, other=0) * size
        where = place[None, :] + segment[:, None] * apart[None, :]
        pooled = where.to(tl.pointer_type(element))
        mask = real[:, None] & live[None, :]
        if back:
            row = tl.load(pooled, mask=mask, other=0.0)
            write_span(row, values, values, first, last, column, live, dim, False, unroll)
        else:
            order = tl.load(table + 2).to(tl.pointer_type(tl.int64))
            sums = tl.zeros([block_s, block_d], dtype=wide)
            sums = add_span(
                sums, values, order, first, last, column, live, dim, False, ordered, unroll
            )
            tl.store(pooled, sums.to(element), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _lower_bounds(tables, rounds, fields: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """Offsets of sorted indices: the first position that holds b or more, for each b."""
    table = tables + tl.program_id(1) * fields
    count = tl.load(table + 2)
    length = tl.load(table + 3)
    begin = tl.program_id(0).to(tl.int64) * block
    if begin <= length:
        index = tl.load(table).to(tl.pointer_type(tl.int64))
        offsets = tl.load(table + 1).to(tl.pointer_type(tl.int64))
        bound = begin + tl.arange(0, block)
        live = bound <= length
        low = bound * 0
        high = low + count
        for _ in range(rounds):
            unsettled = live & (low < high)
            middle = (low + high) // 2
            less = tl.load(index + middle, mask=unsettled, other=0) < bound
            low = tl.where(unsettled & less, middle + 1, low)
            high = tl.where(unsettled & (less == 0), middle, high)
        tl.store(offsets + bound, low, mask=live)


def sums(
    values: Sequence[Tensor],
    offsets: Sequence[Tensor],
    order_N: Tensor | None,
    index_N: Tensor | None,
    widths: Sequence[int],
    parts: Sequence[int],
    op: str,
) -> list[Tensor]:
    """Segment sums of each table, one [B, width] for each width."""
    rows = [rows_ND.contiguous() for rows_ND in values]
    owners = [k for k, count in enumerate(parts) for _ in range(count)]
    outs = [
        rows[k].new_empty(offsets[k].shape[0] - 1, width)
        for k, width in zip(owners, widths, strict=True)
    ]
    _launch(rows, offsets, order_N, outs, parts, back=False)
    return outs


def sums_backward(
    grads: Sequence[Tensor],
    offsets: Sequence[Tensor],
    rows: Sequence[int],
    parts: Sequence[int],
    op: str,
) -> list[Tensor]:
    """Gradients of `sums` by its values, one [N, D] for each table."""
    pooled, parted = [part.contiguous() for part in grads], iter(grads)
    outs = []
    for count, number in zip(rows, parts, strict=True):
        dim = sum(part.shape[1] for part in itertools.islice(parted, number))
        outs.append(grads[0].new_empty(count, dim))
    _launch(outs, offsets, None, pooled, parts, back=True)
    return outs


def sorted_offsets(indices: Sequence[Tensor], lengths: Sequence[int], op: str) -> list[Tensor]:
    """Offsets int64 [B+1] of each sorted index."""
    index = [index_M.contiguous() for index_M in indices]
    outs = [index_M.new_empty(length + 1) for index_M, length in zip(index, lengths, strict=True)]
    if not outs:
        return outs
    block = 256
    fields = [
        value
        for index_M, offsets_B1, length in zip(index, outs, lengths, strict=True)
        for value in (index_M.data_ptr(), offsets_B1.data_ptr(), index_M.shape[0], length)
    ]
    rounds = max(index_M.shape[0] for index_M in index).bit_length()
    grid = (max(lengths) // block + 1, len(outs))
    launch(_lower_bounds, grid, sent(fields, index[0].device), rounds, fields=4, block=block)
    return outs


def _launch(
    rows: Sequence[Tensor],
    offsets: Sequence[Tensor],
    order_N: Tensor | None,
    pooled: Sequence[Tensor],
    parts: Sequence[int],
    *,
    back: bool,
) -> None:
    cuts = [offsets_B1.contiguous() for offsets_B1 in offsets]
    segments = max(offsets_B1.shape[0] - 1 for offsets_B1 in cuts)
    dim = max(rows_ND.shape[1] for rows_ND in rows)
    if segments == 0 or dim == 0:
        return
    step = min(step_of(rows_ND.shape[1]) for rows_ND in rows)
    if any(rows_ND.data_ptr() % 16 for rows_ND in rows):
        step = 1
    tables: list[int] = []
    columns: list[int] = []
    parted = iter(pooled)
    for rows_ND, offsets_B1, number in zip(rows, cuts, parts, strict=True):
        order = offsets_B1 if order_N is None else order_N
        tables += [rows_ND.data_ptr(), offsets_B1.data_ptr(), order.data_ptr()]
        tables += [offsets_B1.shape[0] - 1, rows_ND.shape[1] // step, len(columns) // 2]
        for part in itertools.islice(parted, number):
            size, width = part.element_size(), part.shape[1]
            for column in range(width):
                columns += [part.data_ptr() + column * size, width]
    device, dtype = rows[0].device, rows[0].dtype
    facts = sent(tables + columns, device)
    block_d, block_s = columns_per_program(dim), rows_of_tile(dim)
    grid = (blocks_of(segments, block_s), len(rows), blocks_of(dim, block_d))
    launch(
        _fused, grid,
        facts, facts[len(tables) :],
        fields=FIELDS, element=ELEMENTS[dtype], size=rows[0].element_size(), wide=wide_of(dtype),
        step=step, back=back, ordered=order_N is not None, block_s=block_s, block_d=block_d,
        unroll=UNROLL,
    )  # fmt: skip
