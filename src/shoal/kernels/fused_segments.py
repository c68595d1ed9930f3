"""Segment sums of many tables in one launch, split by columns on the way out.

A program finds its table's addresses and sizes in a small array, and where each column of the
result lies, and how far apart its rows are, in another. Both are written by the host to
page-locked memory and copied without waiting.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from shoal.kernels.launch import (
    blocks_of,
    columns_per_program,
    launch,
    rows_of_tile,
    sent,
    step_of,
    wide_of,
)
from shoal.kernels.segments import (
    UNROLL,
    add_span,
    in_order,
    index_reduce_backward,
    offsets_of,
    write_span,
)

FIELDS = 6  # of a table: values, offsets, order, segments, steps, first entry in `columns`
ELEMENTS = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}


@triton.jit  # type: ignore[untyped-decorator]
def _fused(
    tables: tl.tensor,
    columns: tl.tensor,
    fields: tl.constexpr,
    element: tl.constexpr,
    size: tl.constexpr,
    wide: tl.constexpr,
    step: tl.constexpr,
    back: tl.constexpr,
    ordered: tl.constexpr,
    block_s: tl.constexpr,
    block_d: tl.constexpr,
    unroll: tl.constexpr,
) -> None:
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
def _lower_bounds(
    tables: tl.tensor, rounds: tl.tensor, fields: tl.constexpr, block: tl.constexpr
) -> None:
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


def segment_sum(
    values: Sequence[Tensor],
    offsets: Sequence[Tensor],
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
    _launch(rows, offsets, None, outs, parts, back=False)
    return outs


def segment_sum_backward(
    grads: Sequence[Tensor],
    offsets: Sequence[Tensor],
    rows: Sequence[int],
    parts: Sequence[int],
    op: str,
) -> list[Tensor]:
    """Gradients of `segment_sum` by its values, one [N, D] for each table."""
    pooled, parted = [part.contiguous() for part in grads], iter(grads)
    outs = []
    for count, number in zip(rows, parts, strict=True):
        dim = sum(part.shape[1] for part in itertools.islice(parted, number))
        outs.append(grads[0].new_empty(count, dim))
    _launch(outs, offsets, None, pooled, parts, back=True)
    return outs


def index_sum_split(
    values_MD: Tensor,
    index_M: Tensor,
    length: int,
    widths: Sequence[int],
    indices_sorted: bool,
) -> list[Tensor]:
    """Sums of the values of each index, one [B, width] for each width."""
    index_M, order_M = in_order(index_M, indices_sorted)
    outs = [values_MD.new_empty(length, width) for width in widths]
    offsets_B1 = offsets_of(index_M, length)
    _launch([values_MD.contiguous()], [offsets_B1], order_M, outs, [len(widths)], back=False)
    return outs


def index_sum_split_backward(grads: Sequence[Tensor], index_M: Tensor) -> Tensor:
    """Gradient of `index_sum_split` by its values, [M, D]."""
    return index_reduce_backward(
        torch.cat(list(grads), dim=1), index_M, None, None, "sum", indices_sorted=False
    )


def segment_offsets(indices: Sequence[Tensor], lengths: Sequence[int], op: str) -> list[Tensor]:
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
    order_M: Tensor | None,
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
        order = offsets_B1 if order_M is None else order_M
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
        _fused,
        grid,
        facts,
        facts[len(tables) :],
        fields=FIELDS,
        element=ELEMENTS[dtype],
        size=rows[0].element_size(),
        wide=wide_of(dtype),
        step=step,
        back=back,
        ordered=order_M is not None,
        block_s=block_s,
        block_d=block_d,
        unroll=UNROLL,
    )
