"""Stable grouping by shard: counting sort by digits of at most four bits, lowest first."""

from __future__ import annotations

from typing import Any

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from shoal.kernels.launching import launch
from shoal.kernels.row_tiles import blocks_of, power_of_2

__all__ = ["partition", "permute_rows", "unpermute_rows"]

_BLOCK = 512
_DIGIT_BITS = 4
_TILE = 2048
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@triton.jit  # type: ignore[untyped-decorator]
def _digits(shards_ptr, order_ptr, at, live, shift, DIGITS: tl.constexpr, HAS_ORDER: tl.constexpr):  # type: ignore[no-untyped-def]
    place = at
    if HAS_ORDER:
        place = tl.load(order_ptr + at, mask=live, other=0)
    shard = tl.load(shards_ptr + place, mask=live, other=0)
    digit = ((shard >> shift) & (DIGITS - 1)).to(tl.int32)
    return place, tl.where(live, digit, DIGITS)


@triton.jit  # type: ignore[untyped-decorator]
def _count(  # type: ignore[no-untyped-def]
    shards_ptr,
    order_ptr,
    counts_ptr,
    n,
    shift,
    DIGITS: tl.constexpr,
    HAS_ORDER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64)
    at = block * BLOCK + tl.arange(0, BLOCK)
    _, digit = _digits(shards_ptr, order_ptr, at, at < n, shift, DIGITS, HAS_ORDER)
    all_digits = tl.arange(0, DIGITS)
    hits = (digit[:, None] == all_digits[None, :]).to(tl.int32)
    counts = tl.sum(hits, axis=0).to(tl.int64)
    tl.store(counts_ptr + all_digits * tl.num_programs(0).to(tl.int64) + block, counts)


@triton.jit  # type: ignore[untyped-decorator]
def _scatter(  # type: ignore[no-untyped-def]
    shards_ptr,
    order_ptr,
    ends_ptr,
    counts_ptr,
    out_ptr,
    n,
    shift,
    DIGITS: tl.constexpr,
    HAS_ORDER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64)
    at = block * BLOCK + tl.arange(0, BLOCK)
    live = at < n
    place, digit = _digits(shards_ptr, order_ptr, at, live, shift, DIGITS, HAS_ORDER)
    hits = (digit[:, None] == tl.arange(0, DIGITS)[None, :]).to(tl.int32)
    before = tl.sum(hits * tl.cumsum(hits, axis=0), axis=1) - 1
    cell = digit * tl.num_programs(0).to(tl.int64) + block
    end = tl.load(ends_ptr + cell, mask=live, other=0)
    to = end - tl.load(counts_ptr + cell, mask=live, other=0) + before
    tl.store(out_ptr + to, place, mask=live)


@triton.jit  # type: ignore[untyped-decorator]
def _bounds(shards_ptr, order_ptr, starts_ptr, n, num, STEPS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    shard = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    low = shard * 0
    high = low + n
    for _ in range(STEPS):
        middle = (low + high) // 2
        open_ = low < high
        place = tl.load(order_ptr + middle, mask=open_, other=0)
        less = open_ & (tl.load(shards_ptr + place, mask=open_, other=0) < shard)
        low = tl.where(less, middle + 1, low)
        high = tl.where(open_ & (less == 0), middle, high)
    tl.store(starts_ptr + shard, low, mask=shard <= num)


@triton.jit  # type: ignore[untyped-decorator]
def _move(  # type: ignore[no-untyped-def]
    rows_ptr,
    order_ptr,
    out_ptr,
    n,
    width,
    TAKE: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLS + tl.arange(0, COLS)
    other = tl.load(order_ptr + row, mask=row < n, other=0)
    mask = (row < n)[:, None] & (column < width)[None, :]
    near = row[:, None] * width + column[None, :]
    far = other[:, None] * width + column[None, :]
    if TAKE:
        tl.store(out_ptr + near, tl.load(rows_ptr + far, mask=mask), mask=mask)
    else:
        tl.store(out_ptr + far, tl.load(rows_ptr + near, mask=mask), mask=mask)


def partition(shards_N: Tensor, num: int, what: str = "") -> tuple[Tensor, Tensor]:
    """Stable order int64 [N] and sizes int64 [num]."""
    n, device = shards_N.numel(), shards_N.device
    if n == 0:
        return torch.empty(0, dtype=torch.int64, device=device), torch.zeros(
            num, dtype=torch.int64, device=device
        )
    shards_N = shards_N.contiguous()
    bits = max((num - 1).bit_length(), 1)
    passes = blocks_of(bits, _DIGIT_BITS)
    digit_bits = blocks_of(bits, passes)
    digits, blocks = 1 << digit_bits, blocks_of(n, _BLOCK)
    counts = torch.empty(digits * blocks, dtype=torch.int64, device=device)
    order: Tensor | None = None
    for number in range(passes):
        shared: dict[str, Any] = {
            "DIGITS": digits,
            "HAS_ORDER": order is not None,
            "BLOCK": _BLOCK,
        }
        source = shards_N if order is None else order
        shift = number * digit_bits
        launch(_count, (blocks,), shards_N, source, counts, n, shift, **shared)
        ends = counts.cumsum(0)
        out = torch.empty(n, dtype=torch.int64, device=device)
        launch(_scatter, (blocks,), shards_N, source, ends, counts, out, n, shift, **shared)
        order = out
    assert order is not None
    if passes == 1:
        return order, counts.view(digits, blocks).sum(1)[:num]
    starts = torch.empty(num + 1, dtype=torch.int64, device=device)
    steps = n.bit_length()
    launch(
        _bounds, (blocks_of(num + 1, 128),), shards_N, order, starts, n, num, STEPS=steps, BLOCK=128
    )
    return order, starts.diff()


def permute_rows(rows_N: Tensor, order_N: Tensor) -> Tensor:
    """out[i] = rows_N[order_N[i]]."""
    return _moved(rows_N, order_N, take=True)


def unpermute_rows(rows_N: Tensor, order_N: Tensor) -> Tensor:
    """out[order_N[i]] = rows_N[i]."""
    return _moved(rows_N, order_N, take=False)


def _moved(rows_N: Tensor, order_N: Tensor, *, take: bool) -> Tensor:
    rows_N, order_N = rows_N.contiguous(), order_N.contiguous()
    out_N = torch.empty_like(rows_N)
    if rows_N.numel() == 0:
        return out_N
    n = rows_N.shape[0]
    # Bits are moved, whatever they mean: Triton knows no complex numbers.
    word = _WORDS[min(rows_N.element_size(), 8)]
    rows_NC, out = (part.view(n, -1).view(word) for part in (rows_N, out_N))
    width = rows_NC.shape[1]
    columns = min(power_of_2(width), 256)
    rows = _TILE // columns
    launch(
        _move,
        (blocks_of(n, rows), blocks_of(width, columns)),
        rows_NC,
        order_N,
        out,
        n,
        width,
        TAKE=take,
        ROWS=rows,
        COLS=columns,
    )
    return out_N
