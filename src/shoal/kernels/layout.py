"""Rows of ids, pooled per example and laid out as model inputs, in one launch.

A program pools the rows of one feature for a block of examples and stores each slice where it
belongs; for "addn" outputs a program of its own pools all slices of one example and adds them, so
no output is added to by two programs. The int64 tables are described in `ops.layout_specs` and
`ops.layout_index`; buffers and outputs are reached through a table of addresses.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from shoal.kernels.launching import launch
from shoal.kernels.row_tiles import blocks_of, power_of_2
from shoal.kernels.transfer import sent

__all__ = ["addresses_of", "layout_forward", "tile_of"]

FIRSTN = tl.constexpr(3)
MEAN = tl.constexpr(1)
SHARES = tl.constexpr(2)
BY_ROW = tl.constexpr(8)
ELEMENTS = {
    torch.float32: (tl.float32, tl.float32),
    torch.float64: (tl.float64, tl.float64),
    torch.float16: (tl.float16, tl.float32),
    torch.bfloat16: (tl.bfloat16, tl.float32),
}
"""dtype -> how it is stored and how it is summed."""


@triton.jit  # type: ignore[untyped-decorator]
def row_pointers(
    addresses: tl.tensor,
    rows_N: tl.tensor,
    buffer_N: tl.tensor,
    ids: tl.tensor,
    valid: tl.tensor,
    ELEMENT: tl.constexpr,
) -> tl.tensor:
    buffers = tl.load(buffer_N + ids, mask=valid, other=0)
    bases = tl.load(addresses + buffers, mask=valid, other=0)
    rows = tl.load(rows_N + ids, mask=valid, other=0)
    return bases.to(tl.pointer_type(ELEMENT)) + rows


@triton.jit  # type: ignore[untyped-decorator]
def share_of(pooling: tl.tensor, count: tl.tensor, SUM: tl.constexpr) -> tl.tensor:
    """What each row of a cell counts for: 1 over their number in a shard's mean, else 1."""
    shared = (pooling % BY_ROW) == SHARES
    many = tl.where(shared, tl.maximum(count, 1), 1).to(SUM)
    one = tl.full(many.shape, 1.0, SUM)
    return one / many if tl.float64 == SUM else tl.div_rn(one, many)


@triton.jit  # type: ignore[untyped-decorator]
def _store_slices(
    tile: tl.tensor,
    features: tl.tensor,
    slices: tl.tensor,
    outputs: tl.tensor,
    feature: tl.tensor,
    examples: tl.tensor,
    inside: tl.tensor,
    columns: tl.tensor,
    step: tl.tensor,
    ELEMENT: tl.constexpr,
) -> None:
    first = tl.load(features + feature * 6)
    last = tl.load(features + feature * 6 + 1)
    for s in range(first, last):
        piece = slices + s * 9
        role = tl.load(piece + 6)
        if role == 0:
            start = tl.load(piece + 1)
            width = tl.load(piece + 2)
            place = tl.load(piece + 4) + step * tl.load(piece + 5)
            output = tl.load(outputs + tl.load(piece + 3)).to(tl.pointer_type(ELEMENT))
            at = (examples.to(tl.int64) * tl.load(piece + 8) + place)[:, None]
            chosen = (columns >= start) & (columns < start + width)
            mask = inside[:, None] & chosen[None, :]
            tl.store(output + at + (columns - start)[None, :], tile.to(ELEMENT), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _tile(
    addresses: tl.tensor,
    rows_N: tl.tensor,
    buffer_N: tl.tensor,
    ids: tl.tensor,
    valid: tl.tensor,
    columns: tl.tensor,
    high: tl.tensor,
    ELEMENT: tl.constexpr,
) -> tl.tensor:
    """Columns below `high` of the rows of some ids, [ids, columns]."""
    rows = row_pointers(addresses, rows_N, buffer_N, ids, valid, ELEMENT)
    mask = valid[:, None] & (columns < high)[None, :]
    return tl.load(rows[:, None] + columns[None, :], mask=mask, other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _lay_feature(
    program: tl.tensor,
    addresses: tl.tensor,
    outputs: tl.tensor,
    rows_N: tl.tensor,
    buffer_N: tl.tensor,
    splits: tl.tensor,
    cells: tl.tensor,
    features: tl.tensor,
    slices: tl.tensor,
    requests: tl.tensor,
    n_examples: tl.tensor,
    n_features: tl.tensor,
    n_blocks: tl.tensor,
    ELEMENT: tl.constexpr,
    SUM: tl.constexpr,
    EXAMPLES: tl.constexpr,
    COLUMNS: tl.constexpr,
    MANY: tl.constexpr,
) -> None:
    feature = program // n_blocks
    examples = (program % n_blocks) * EXAMPLES + tl.arange(0, EXAMPLES)
    inside = examples < n_examples
    local = examples.to(tl.int64)
    own = cells + feature * 3 + examples * 0
    if MANY:
        request = tl.load(requests + examples * 2, mask=inside, other=0)
        local = tl.load(requests + examples * 2 + 1, mask=inside, other=0)
        own = cells + (request * n_features + feature) * 3
    first = tl.load(own, mask=inside, other=0)
    filled = inside & (tl.load(own + 1, mask=inside, other=0) > 0)
    shared = tl.load(own + 2, mask=inside, other=0)
    cell = first + tl.where(shared != 0, 0, local)
    start = tl.load(splits + cell, mask=filled, other=0)
    count = tl.load(splits + cell + 1, mask=filled, other=0) - start
    pooling = tl.load(features + feature * 6 + 2)
    length = tl.load(features + feature * 6 + 3)
    low = tl.load(features + feature * 6 + 4)
    high = tl.load(features + feature * 6 + 5)
    for column in range(low, high, COLUMNS):
        columns = column + tl.arange(0, COLUMNS)
        if pooling == FIRSTN:
            for j in range(length):
                valid = filled & (j < count)
                tile = _tile(addresses, rows_N, buffer_N, start + j, valid, columns, high, ELEMENT)
                _store_slices(
                    tile, features, slices, outputs, feature, examples, inside, columns, j, ELEMENT
                )
        else:
            pooled = tl.zeros((EXAMPLES, COLUMNS), SUM)
            factor = share_of(pooling, count, SUM)
            for j in range(tl.max(count, 0)):
                valid = filled & (j < count)
                tile = _tile(addresses, rows_N, buffer_N, start + j, valid, columns, high, ELEMENT)
                pooled += tile.to(SUM) * factor[:, None]
            if pooling == MEAN:
                pooled = pooled / tl.maximum(count, 1).to(SUM)[:, None]
            _store_slices(
                pooled, features, slices, outputs, feature, examples, inside, columns, 0, ELEMENT
            )


@triton.jit  # type: ignore[untyped-decorator]
def _lay_sum(
    program: tl.tensor,
    addresses: tl.tensor,
    outputs: tl.tensor,
    rows_N: tl.tensor,
    buffer_N: tl.tensor,
    splits: tl.tensor,
    cells: tl.tensor,
    features: tl.tensor,
    slices: tl.tensor,
    sums: tl.tensor,
    requests: tl.tensor,
    n_examples: tl.tensor,
    n_features: tl.tensor,
    most: tl.tensor,
    ELEMENT: tl.constexpr,
    SUM: tl.constexpr,
    SLICES: tl.constexpr,
    COLUMNS: tl.constexpr,
    MANY: tl.constexpr,
) -> None:
    own = sums + (program // n_examples) * (most + 1)
    example = program % n_examples
    local = example.to(tl.int64)
    request_cells = cells
    if MANY:
        local = tl.load(requests + example * 2 + 1)
        request_cells = cells + tl.load(requests + example * 2) * n_features * 3
    whole = slices + tl.load(own + 1) * 9
    width = tl.load(whole + 2)
    output = tl.load(outputs + tl.load(own)).to(tl.pointer_type(ELEMENT))
    for column in range(0, width, COLUMNS):
        columns = column + tl.arange(0, COLUMNS)
        total = tl.zeros((COLUMNS,), SUM)
        for k in range(0, most, SLICES):
            order = k + tl.arange(0, SLICES)
            numbers = tl.load(own + 1 + order, mask=order < most, other=-1)
            given = numbers >= 0
            feature = tl.load(slices + numbers * 9, mask=given, other=0)
            offset = tl.load(slices + numbers * 9 + 1, mask=given, other=0)
            place = request_cells + feature * 3
            filled = given & (tl.load(place + 1, mask=given, other=0) > 0)
            shared = tl.load(place + 2, mask=given, other=0)
            cell = tl.load(place, mask=given, other=0) + tl.where(shared != 0, 0, local)
            start = tl.load(splits + cell, mask=filled, other=0)
            count = tl.load(splits + cell + 1, mask=filled, other=0) - start
            pooling = tl.load(features + feature * 6 + 2, mask=given, other=0)
            factor = share_of(pooling, count, SUM)
            pooled = tl.zeros((SLICES, COLUMNS), SUM)
            for j in range(tl.max(count, 0)):
                valid = filled & (j < count)
                rows = row_pointers(addresses, rows_N, buffer_N, start + j, valid, ELEMENT)
                mask = valid[:, None] & (columns < width)[None, :]
                at = (rows + offset)[:, None] + columns[None, :]
                pooled += tl.load(at, mask=mask, other=0.0).to(SUM) * factor[:, None]
            divisor = tl.where(pooling == MEAN, tl.maximum(count, 1), 1).to(SUM)
            total += tl.sum(pooled / divisor[:, None], axis=0)
        at = example.to(tl.int64) * tl.load(whole + 8) + tl.load(whole + 4) + columns
        tl.store(output + at, total.to(ELEMENT), mask=columns < width)


@triton.jit  # type: ignore[untyped-decorator]
def _lay(
    addresses: tl.tensor,
    rows_N: tl.tensor,
    buffer_N: tl.tensor,
    splits: tl.tensor,
    cells: tl.tensor,
    features: tl.tensor,
    slices: tl.tensor,
    sums: tl.tensor,
    requests: tl.tensor,
    n_buffers: tl.tensor,
    n_examples: tl.tensor,
    n_features: tl.tensor,
    n_blocks: tl.tensor,
    most: tl.tensor,
    ELEMENT: tl.constexpr,
    SUM: tl.constexpr,
    EXAMPLES: tl.constexpr,
    COLUMNS: tl.constexpr,
    MANY: tl.constexpr,
) -> None:
    program = tl.program_id(0)
    outputs = addresses + n_buffers
    by_feature = n_features * n_blocks
    if program < by_feature:
        _lay_feature(
            program, addresses, outputs, rows_N, buffer_N, splits, cells, features, slices,
            requests, n_examples, n_features, n_blocks, ELEMENT, SUM, EXAMPLES, COLUMNS, MANY,
        )  # fmt: skip
    else:
        _lay_sum(
            program - by_feature, addresses, outputs, rows_N, buffer_N, splits, cells, features,
            slices, sums, requests, n_examples, n_features, most, ELEMENT, SUM, EXAMPLES, COLUMNS,
            MANY,
        )  # fmt: skip


def layout_forward(
    buffers: Sequence[Tensor],
    rows_N: Tensor,
    buffer_N: Tensor,
    cell_splits: Tensor,
    cells: Tensor,
    features: Tensor,
    slices: Tensor,
    sums: Tensor,
    batch_sizes: Sequence[int],
    shapes: Sequence[int],
    limits: Sequence[int],
) -> list[Tensor]:
    """`shoal::layout_forward`; never waits for the device."""
    sources = [buffer.contiguous() for buffer in buffers]
    size, like = sum(batch_sizes), sources[0]
    outputs = [
        torch.empty(
            [size, *(n for n in shapes[i : i + 3] if n)], dtype=like.dtype, device=like.device
        )
        for i in range(0, len(shapes), 3)
    ]
    if size == 0:
        return outputs
    element, summed = ELEMENTS[like.dtype]
    examples, columns = tile_of(size, limits[0])
    blocks = blocks_of(size, examples)
    index = [tensor.contiguous() for tensor in (rows_N, buffer_N, cell_splits, cells)]
    many = len(batch_sizes) > 1
    launch(
        _lay,
        (features.shape[0] * blocks + sums.shape[0] * size,),
        addresses_of([*sources, *outputs]),
        *index,
        features,
        slices,
        sums,
        _requests(batch_sizes, like.device) if many else cells,
        len(sources),
        size,
        features.shape[0],
        blocks,
        sums.shape[1] - 1,
        ELEMENT=element,
        SUM=summed,
        EXAMPLES=examples,
        COLUMNS=columns,
        MANY=many,
        enable_fp_fusion=False,
    )
    return outputs


def tile_of(size: int, widest: int) -> tuple[int, int]:
    """Examples and columns of a program: about a thousand elements."""
    columns = min(max(power_of_2(max(widest, 1)), 16), 512)
    return max(min(power_of_2(size), 1024 // columns), 1), columns


def addresses_of(tensors: Sequence[Tensor]) -> Tensor:
    """int64, where each tensor begins (0: it is empty), sent without waiting for the device."""
    places = [tensor.data_ptr() if tensor.numel() else 0 for tensor in tensors]
    return sent(places, tensors[0].device)


def _requests(batch_sizes: Sequence[int], device: torch.device) -> Tensor:
    """int64 [B, 2]: each example's request, and its number there."""
    pairs = [(r, b) for r, size in enumerate(batch_sizes) for b in range(size)]
    return sent(torch.tensor(pairs, dtype=torch.int64, device="cpu").view(-1, 2), device)
