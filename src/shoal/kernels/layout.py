"""Rows of ids pooled per example and laid out as model inputs; their gradients."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from shoal import lookup
from shoal.kernels.host_copies import sent
from shoal.kernels.launch import ELEMENTS, blocks_of, launch, power_of_2, wide_of
from shoal.lookup import LayoutCall

FIRSTN = tl.constexpr(lookup.FIRST_N)
DIVIDED = tl.constexpr(lookup.DIVIDED)
MEAN = tl.constexpr(lookup.MEAN)
BY_ROW = tl.constexpr(lookup.BY_ROW)


@triton.jit  # type: ignore[untyped-decorator]
def row_pointers(  # type: ignore[no-untyped-def]
    addresses, rows_N, buffer_N, ids, valid, ELEMENT: tl.constexpr,
):  # fmt: skip
    buffers = tl.load(buffer_N + ids, mask=valid, other=0)
    bases = tl.load(addresses + buffers, mask=valid, other=0)
    rows = tl.load(rows_N + ids, mask=valid, other=0)
    return bases.to(tl.pointer_type(ELEMENT)) + rows


@triton.jit  # type: ignore[untyped-decorator]
def share_of(pooling: tl.tensor, count: tl.tensor, SUM: tl.constexpr) -> tl.tensor:
    """What each row of a cell counts for: 1 over their number in a shard's mean, else 1."""
    shared = (pooling % BY_ROW) == MEAN
    many = tl.where(shared, tl.maximum(count, 1), 1).to(SUM)
    one = tl.full(many.shape, 1.0, SUM)
    return one / many if tl.float64 == SUM else tl.div_rn(one, many)


@triton.jit  # type: ignore[untyped-decorator]
def _store_slices(  # type: ignore[no-untyped-def]
    tile, features, slices, outputs, feature, examples, inside, columns, step,
    ELEMENT: tl.constexpr,
):  # fmt: skip
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
def _tile(  # type: ignore[no-untyped-def]
    addresses, rows_N, buffer_N, ids, valid, columns, high, ELEMENT: tl.constexpr,
):  # fmt: skip
    """Columns below `high` of the rows of some ids, [ids, columns]."""
    rows = row_pointers(addresses, rows_N, buffer_N, ids, valid, ELEMENT)
    mask = valid[:, None] & (columns < high)[None, :]
    return tl.load(rows[:, None] + columns[None, :], mask=mask, other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _lay_feature(  # type: ignore[no-untyped-def]
    program, addresses, outputs, rows_N, buffer_N, splits, cells, features, slices, requests,
    n_examples, n_features, n_blocks, ELEMENT: tl.constexpr, SUM: tl.constexpr,
    EXAMPLES: tl.constexpr, COLUMNS: tl.constexpr, MANY: tl.constexpr,
):  # fmt: skip
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
            if pooling == DIVIDED:
                pooled = pooled / tl.maximum(count, 1).to(SUM)[:, None]
            _store_slices(
                pooled, features, slices, outputs, feature, examples, inside, columns, 0, ELEMENT
            )


@triton.jit  # type: ignore[untyped-decorator]
def _lay_sum(  # type: ignore[no-untyped-def]
    program, addresses, outputs, rows_N, buffer_N, splits, cells, features, slices, sums, requests,
    n_examples, n_features, most, ELEMENT: tl.constexpr, SUM: tl.constexpr, SLICES: tl.constexpr,
    COLUMNS: tl.constexpr, MANY: tl.constexpr,
):  # fmt: skip
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
            divisor = tl.where(pooling == DIVIDED, tl.maximum(count, 1), 1).to(SUM)
            total += tl.sum(pooled / divisor[:, None], axis=0)
        at = example.to(tl.int64) * tl.load(whole + 8) + tl.load(whole + 4) + columns
        tl.store(output + at, total.to(ELEMENT), mask=columns < width)


@triton.jit  # type: ignore[untyped-decorator]
def _lay(  # type: ignore[no-untyped-def]
    addresses, rows_N, buffer_N, splits, cells, features, slices, sums, requests, n_buffers,
    n_examples, n_features, n_blocks, most, ELEMENT: tl.constexpr, SUM: tl.constexpr,
    EXAMPLES: tl.constexpr, COLUMNS: tl.constexpr, MANY: tl.constexpr,
):  # fmt: skip
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


def layout_forward(buffers: Sequence[Tensor], *call: Any) -> list[Tensor]:
    """`shoal::layout_forward`; never waits for the device."""
    given = LayoutCall(*call)
    sources = [buffer.contiguous() for buffer in buffers]
    size, like = sum(given.batch_sizes), sources[0]
    outputs = [
        torch.empty(
            [size, *(n for n in given.shapes[i : i + 3] if n)], dtype=like.dtype, device=like.device
        )
        for i in range(0, len(given.shapes), 3)
    ]
    if size == 0:
        return outputs
    element, summed = ELEMENTS[like.dtype], wide_of(like.dtype)
    examples, columns = tile_of(size, given.limits[0])
    blocks = blocks_of(size, examples)
    index = [tensor.contiguous() for tensor in given[:4]]
    many = len(given.batch_sizes) > 1
    launch(
        _lay, (given.features.shape[0] * blocks + given.sums.shape[0] * size,),
        addresses_of([*sources, *outputs]), *index, given.features, given.slices, given.sums,
        _requests(given.batch_sizes, like.device) if many else given.cells, len(sources), size,
        given.features.shape[0], blocks, given.sums.shape[1] - 1,
        ELEMENT=element, SUM=summed, EXAMPLES=examples, COLUMNS=columns, MANY=many,
        enable_fp_fusion=False,
    )  # fmt: skip
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


NOWHERE = tl.constexpr(2**63 - 1)
TILE = 32


@triton.jit  # type: ignore[untyped-decorator]
def _sum_shared(  # type: ignore[no-untyped-def]
    grads, sums, cells, features, slices, n_examples, ELEMENT: tl.constexpr, SUM: tl.constexpr,
    EXAMPLES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """For each slice of a shared feature, its gradient summed over the batch."""
    piece = slices + tl.program_id(0) * 9
    feature = tl.load(piece)
    address = tl.load(grads + tl.load(piece + 3))
    if (tl.load(cells + feature * 3 + 2) != 0) & (address != 0):
        width = tl.load(piece + 2)
        stride = tl.load(piece + 8)
        length = tl.maximum(tl.load(features + feature * 6 + 3), 1)
        for j in range(length):
            grad = address.to(tl.pointer_type(ELEMENT)) + tl.load(piece + 4)
            grad += j * tl.load(piece + 5)
            for column in range(0, width, COLUMNS):
                columns = column + tl.arange(0, COLUMNS)
                total = tl.zeros((COLUMNS,), SUM)
                for b in range(0, n_examples, EXAMPLES):
                    examples = b + tl.arange(0, EXAMPLES)
                    mask = (examples < n_examples)[:, None] & (columns < width)[None, :]
                    at = (examples.to(tl.int64) * stride)[:, None] + columns[None, :]
                    part = tl.load(grad + at, mask=mask, other=0.0)
                    total += tl.sum(part.to(SUM), axis=0)
                at = tl.load(piece + 7) + j * width + columns
                tl.store(sums + at, total, mask=columns < width)


@triton.jit  # type: ignore[untyped-decorator]
def _file_ids(  # type: ignore[no-untyped-def]
    keys, entries, begins, rows_N, buffer_N, splits, cells, features, crowded, n_examples, n_blocks,
    n_features, EXAMPLES: tl.constexpr,
):  # fmt: skip
    """For each id that passes a gradient on: its row's address, and its (feature, example).

    Where features share cells, that of any of them, and `crowded` becomes 1.
    """
    feature = tl.program_id(0) // n_blocks
    if tl.program_id(0) % n_blocks == 0:
        first, many = tl.load(cells + feature * 3), tl.load(cells + feature * 3 + 1)
        for start in range(feature + 1, n_features, EXAMPLES):
            others = start + tl.arange(0, EXAMPLES)
            begin = tl.load(cells + others * 3, mask=others < n_features, other=0)
            end = begin + tl.load(cells + others * 3 + 1, mask=others < n_features, other=0)
            if tl.max(((begin < first + many) & (first < end)).to(tl.int32), axis=0) != 0:
                tl.store(crowded, 1)
    examples = (tl.program_id(0) % n_blocks) * EXAMPLES + tl.arange(0, EXAMPLES)
    row = features + feature * 6
    cell = tl.load(cells + feature * 3) + examples
    # A shared feature has one cell: that of example 0.
    filled = (examples < n_examples) & (examples < tl.load(cells + feature * 3 + 1))
    filled = filled & (tl.load(row) < tl.load(row + 1))
    start = tl.load(splits + cell, mask=filled, other=0)
    count = tl.load(splits + cell + 1, mask=filled, other=0) - start
    if tl.load(row + 2) == FIRSTN:
        count = tl.minimum(count, tl.load(row + 3))
    entry = feature.to(tl.int64) * n_examples + examples
    for j in range(tl.max(count, 0)):
        ids, valid = start + j, j < count
        buffers = tl.load(buffer_N + ids, mask=valid, other=0)
        begin = tl.load(begins + buffers, mask=valid, other=0)
        key = begin + tl.load(rows_N + ids, mask=valid, other=0)
        tl.store(keys + ids, key, mask=valid)
        tl.store(entries + ids, entry, mask=valid)


@triton.jit  # type: ignore[untyped-decorator]
def _share(  # type: ignore[no-untyped-def]
    id_, entry, grads, shared_sums, splits, cells, features, slices, n_examples, columns,
    ELEMENT: tl.constexpr, SUM: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One id's part of its cell's gradient, for some columns of its row."""
    feature = entry // n_examples
    example = entry % n_examples
    row = features + feature * 6
    pooling = tl.load(row + 2)
    start = tl.load(splits + tl.load(cells + feature * 3) + example)
    stop = tl.load(splits + tl.load(cells + feature * 3) + example + 1)
    step = tl.where(pooling == FIRSTN, id_ - start, 0)
    shared = tl.load(cells + feature * 3 + 2) != 0
    share = tl.zeros((COLUMNS,), SUM)
    for s in range(tl.load(row), tl.load(row + 1)):
        piece = slices + s * 9
        address = tl.load(grads + tl.load(piece + 3))
        if address != 0:
            offset = columns - tl.load(piece + 1)
            width = tl.load(piece + 2)
            mask = (offset >= 0) & (offset < width)
            if shared:
                at = tl.load(piece + 7) + step * width
                share += tl.load(shared_sums + at + offset, mask=mask, other=0.0)
            else:
                at = example * tl.load(piece + 8) + tl.load(piece + 4) + step * tl.load(piece + 5)
                grad = address.to(tl.pointer_type(ELEMENT)) + at
                share += tl.load(grad + offset, mask=mask, other=0.0).to(SUM)
    mean = (pooling == DIVIDED) | (pooling % BY_ROW == MEAN)
    divisor = tl.where(mean, stop - start, 1)
    return share / divisor.to(SUM)


@triton.jit  # type: ignore[untyped-decorator]
def _shares(  # type: ignore[no-untyped-def]
    id_, entry, grads, shared_sums, splits, cells, features, slices, n_examples, n_features,
    columns, ELEMENT: tl.constexpr, SUM: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """`_share` of all features that the id's cell belongs to, and how far into the row they go."""
    total = tl.zeros((COLUMNS,), SUM)
    reach = tl.zeros((), tl.int64)
    cell = tl.load(cells + (entry // n_examples) * 3) + entry % n_examples
    step = id_ - tl.load(splits + cell)
    for feature in range(n_features):
        example = cell - tl.load(cells + feature * 3)
        row = features + feature * 6
        read = (example >= 0) & (example < tl.load(cells + feature * 3 + 1))
        read = read & (tl.load(row) < tl.load(row + 1))
        if read & ((tl.load(row + 2) != FIRSTN) | (step < tl.load(row + 3))):
            # In 64 bits, as the cell is.
            own = (cell * 0 + feature) * n_examples + example
            total += _share(
                id_, own, grads, shared_sums, splits, cells, features, slices, n_examples, columns,
                ELEMENT, SUM, COLUMNS,
            )  # fmt: skip
            reach = tl.maximum(reach, tl.load(row + 5))
    return total, reach


@triton.jit  # type: ignore[untyped-decorator]
def _put(  # type: ignore[no-untyped-def]
    total, id_, reach, targets, rows_N, buffer_N, scale, columns, ELEMENT: tl.constexpr,
    SCALED: tl.constexpr,
):  # fmt: skip
    if SCALED:
        total = total * tl.load(scale).to(total.dtype)
    row = row_pointers(targets, rows_N, buffer_N, id_, id_ >= 0, ELEMENT)
    tl.store(row + columns, total.to(ELEMENT), mask=columns < reach)


@triton.jit  # type: ignore[untyped-decorator]
def _leave(total: tl.tensor, reach: tl.tensor, part: tl.tensor, reached: tl.tensor) -> None:
    """Part of a row that other tiles have parts of, too."""
    tl.store(part, total)
    tl.store(reached, reach)


@triton.jit  # type: ignore[untyped-decorator]
def _opening(keys: tl.tensor, base: tl.tensor) -> tl.tensor:
    """A tile's first key, and whether the tile before ends with it."""
    opened = tl.load(keys + base)
    return opened, tl.load(keys + base - 1, mask=base > 0, other=-1) == opened


@triton.jit  # type: ignore[untyped-decorator]
def _sum_tiles(  # type: ignore[no-untyped-def]
    order, keys, entries, grads, targets, shared_sums, parts, reaches, rows_N, buffer_N, splits,
    cells, features, slices, scale, crowded, n_ids, n_examples, n_features, n_columns,
    ELEMENT: tl.constexpr, SUM: tl.constexpr, IDS: tl.constexpr, COLUMNS: tl.constexpr,
    SCALED: tl.constexpr,
):  # fmt: skip
    """Sums rows within a tile; `parts` gets what a row's first or last tile leaves to others."""
    tile = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    head = parts + tile * 2 * n_columns + columns
    base = tile * IDS
    opened, continued = _opening(keys, base)
    total = tl.zeros((COLUMNS,), SUM)
    reach = tl.zeros((), tl.int64)
    last = tl.zeros((), tl.int64)
    for i in range(IDS):
        key = tl.load(keys + base + i, mask=base + i < n_ids, other=NOWHERE)
        if key != opened:
            if continued:
                _leave(total, reach, head, reaches + tile * 2)
            elif opened != NOWHERE:
                _put(total, last, reach, targets, rows_N, buffer_N, scale, columns, ELEMENT, SCALED)
            total = tl.zeros((COLUMNS,), SUM)
            reach = tl.zeros((), tl.int64)
            opened = key
            continued = key < 0
        if key != NOWHERE:
            last = tl.load(order + base + i)
            entry = tl.load(entries + last)
            if tl.load(crowded) != 0:
                several, far = _shares(
                    last, entry, grads, shared_sums, splits, cells, features, slices, n_examples,
                    n_features, columns, ELEMENT, SUM, COLUMNS,
                )  # fmt: skip
                total += several
                reach = tl.maximum(reach, far)
            else:
                total += _share(
                    last, entry, grads, shared_sums, splits, cells, features, slices, n_examples,
                    columns, ELEMENT, SUM, COLUMNS,
                )  # fmt: skip
                reach = tl.maximum(reach, tl.load(features + (entry // n_examples) * 6 + 5))
    if opened != NOWHERE:
        if continued:
            _leave(total, reach, head, reaches + tile * 2)
        elif tl.load(keys + base + IDS, mask=base + IDS < n_ids, other=NOWHERE) == opened:
            _leave(total, reach, head + n_columns, reaches + tile * 2 + 1)
        else:
            _put(total, last, reach, targets, rows_N, buffer_N, scale, columns, ELEMENT, SCALED)


@triton.jit  # type: ignore[untyped-decorator]
def _join_tiles(  # type: ignore[no-untyped-def]
    order, keys, targets, parts, reaches, rows_N, buffer_N, scale, n_ids, n_columns,
    ELEMENT: tl.constexpr, IDS: tl.constexpr, COLUMNS: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Sums each row that begins in one tile and ends in a later one."""
    tile = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    end = tile * IDS + IDS
    key = tl.load(keys + end - 1, mask=end < n_ids, other=NOWHERE)
    after = tl.load(keys + end, mask=end < n_ids, other=NOWHERE)
    before = tl.load(keys + tile * IDS - 1, mask=tile > 0, other=-1)
    if (key == after) & (key != NOWHERE) & (before != key):
        total = tl.load(parts + (tile * 2 + 1) * n_columns + columns)
        reach = tl.load(reaches + tile * 2 + 1)
        other = tile + 1
        while after == key:
            total += tl.load(parts + other * 2 * n_columns + columns)
            reach = tl.maximum(reach, tl.load(reaches + other * 2))
            other += 1
            after = tl.load(keys + other * IDS, mask=other * IDS < n_ids, other=NOWHERE)
        last = tl.load(order + end - 1)
        _put(total, last, reach, targets, rows_N, buffer_N, scale, columns, ELEMENT, SCALED)


def layout_backward(
    grads: Sequence[Tensor], scale: Tensor | None, sizes: Sequence[int], *call: Any
) -> list[Tensor]:
    """`shoal::layout_backward`; never waits for the device."""
    given = LayoutCall(*call)
    like, size, ids = grads[0], sum(given.batch_sizes), given.rows_N.shape[0]
    targets = [like.new_zeros(floats) for floats in sizes]
    if size == 0 or ids == 0:
        return targets
    sources = [grad.contiguous() for grad in grads]
    element, summed = ELEMENTS[like.dtype], wide_of(like.dtype)
    examples, columns = tile_of(size, given.limits[0])
    wide = blocks_of(max(given.limits[0], 1), columns)
    index = [tensor.contiguous() for tensor in given[:4]]
    of_grads, of_targets = addresses_of(sources), addresses_of(targets)
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    shared_sums = torch.empty(given.limits[1], dtype=dtype, device=like.device)
    launch(
        _sum_shared, (given.slices.shape[0],),
        *(of_grads, shared_sums, index[3], given.features, given.slices, size),
        ELEMENT=element, SUM=summed, EXAMPLES=examples, COLUMNS=columns,
    )  # fmt: skip
    keys, order, entries, crowded = _filed(sizes, index, given.features, size)
    tiles = blocks_of(ids, TILE)
    parts = torch.empty(tiles, 2, wide * columns, dtype=dtype, device=like.device)
    reaches = torch.empty(tiles, 2, dtype=torch.int64, device=like.device)
    scaled, factor = scale is not None, like if scale is None else scale
    options = {"num_warps": 1 if columns <= 128 else 4}
    launch(
        _sum_tiles, (tiles, wide),
        *(order, keys, entries, of_grads, of_targets, shared_sums, parts, reaches, *index),
        *(given.features, given.slices, factor, crowded, ids, size, given.features.shape[0]),
        wide * columns,
        ELEMENT=element, SUM=summed, IDS=TILE, COLUMNS=columns, SCALED=scaled, **options,
    )  # fmt: skip
    launch(
        _join_tiles, (tiles, wide),
        *(order, keys, of_targets, parts, reaches, *index[:2], factor, ids, wide * columns),
        ELEMENT=element, IDS=TILE, COLUMNS=columns, SCALED=scaled, **options,
    )  # fmt: skip
    return targets


def _filed(
    sizes: Sequence[int], index: Sequence[Tensor], features: Tensor, size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sorted keys of the ids' rows, the ids in that order, the cell of each id, and whether
    features share cells: int32 [1], 1 if so."""
    keys = torch.full_like(index[0], NOWHERE.value)
    entries = torch.empty_like(keys)
    crowded = torch.zeros(1, dtype=torch.int32, device=keys.device)
    blocks = blocks_of(size, 64)
    launch(
        _file_ids, (features.shape[0] * blocks,),
        *(keys, entries, _begins(sizes, keys.device), *index, features, crowded),
        *(size, blocks, features.shape[0]),
        EXAMPLES=64,
    )  # fmt: skip
    keys, order = torch.sort(keys, stable=True)
    return keys, order, entries, crowded


def _begins(sizes: Sequence[int], device: torch.device) -> Tensor:
    """int64: where each buffer begins when they follow each other."""
    return sent(list(itertools.accumulate(sizes, initial=0)), device)
