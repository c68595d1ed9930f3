"""Row numbers, joined row splits, and the fused reorder of several tables' ids."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from shoal.kernels.dedup import dedup_first
from shoal.kernels.launching import launch
from shoal.kernels.partition import partition
from shoal.kernels.row_tiles import blocks_of
from shoal.kernels.table_layout import mix64
from shoal.kernels.transfer import staged

__all__ = ["fused_reorder", "fused_reorder_into", "normalize_merged_split", "value_rowids"]

_BLOCK = 1024
_RULES = {"given": 0, "floormod": 1, "unsigned_mod": 2, "hash_ranges": 3}


@triton.jit  # type: ignore[untyped-decorator]
def _rowids(offsets_ptr, out_ptr, n, rows, STEPS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = at < n
    # The last row that starts at or before the value; rows that hold nothing are passed over.
    low = at * 0
    high = low + rows
    for _ in range(STEPS):
        middle = (low + high) // 2
        open_ = live & (low < high)
        after = open_ & (tl.load(offsets_ptr + middle + 1, mask=open_, other=0) > at)
        high = tl.where(after, middle, high)
        low = tl.where(open_ & (after == 0), middle + 1, low)
    tl.store(out_ptr + at, low, mask=live)


@triton.jit  # type: ignore[untyped-decorator]
def _join(splits_ptr, sizes_ptr, out_ptr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    # One program a part: the ends of the parts before it are few and in the cache.
    part = tl.program_id(0).to(tl.int64)
    start = part * 0
    base = part * 0
    for before in range(part):
        start += tl.load(sizes_ptr + before)
        base += tl.load(splits_ptr + start - 1)
    size = tl.load(sizes_ptr + part)
    for first in range(0, size, BLOCK):
        k = first + tl.arange(0, BLOCK)
        # A part's first entry repeats the last of the part before it.
        mask = (k < size) & ((k > 0) | (part == 0))
        tl.store(
            out_ptr + start - part + k, base + tl.load(splits_ptr + start + k, mask=mask), mask=mask
        )


@triton.jit  # type: ignore[untyped-decorator]
def _assign(  # type: ignore[no-untyped-def]
    ids_ptr,
    first_ptr,
    given_ptr,
    tables_ptr,
    size_ptr,
    shard_ptr,
    n,
    num,
    wrap,
    RULE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    u = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = u < tl.load(size_ptr)
    if RULE == 0:
        first = tl.load(first_ptr + u, mask=live, other=0)
        shard = tl.load(given_ptr + first, mask=live, other=0).to(tl.int64)
    elif RULE == 3:
        first = tl.load(first_ptr + u, mask=live, other=0)
        line = given_ptr + tl.load(tables_ptr + first, mask=live, other=0) * (2 + num)
        salt = tl.load(line, mask=live, other=0)
        shares = tl.load(line + 1, mask=live, other=0)
        hash_ = mix64(tl.load(ids_ptr + u, mask=live, other=0) ^ salt)
        share = (((hash_ >> 48) & 0xFFFF) * shares) >> 16
        shard = tl.load(line + 2 + share, mask=live, other=0)
    else:
        id_ = tl.load(ids_ptr + u, mask=live, other=0)
        if RULE == 1:
            rest = id_ % num
            shard = tl.where(rest < 0, rest + num, rest)
        else:
            high = (id_ >> 32) & 0xFFFFFFFF
            low = id_ & 0xFFFFFFFF
            shard = ((high % num) * wrap + low) % num
    # What lies behind the last distinct id goes to a shard of its own, behind all others.
    tl.store(shard_ptr + u, tl.where(live, shard, num), mask=u < n)


@triton.jit  # type: ignore[untyped-decorator]
def _cells(  # type: ignore[no-untyped-def]
    order_ptr,
    shard_ptr,
    first_ptr,
    tables_ptr,
    size_ptr,
    starts_ptr,
    cells,
    tables,
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # Where each (shard, table) starts among the ordered ids.
    cell = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    low = cell * 0
    high = low + tl.load(size_ptr)
    for _ in range(STEPS):
        middle = (low + high) // 2
        open_ = low < high
        u = tl.load(order_ptr + middle, mask=open_, other=0)
        shard = tl.load(shard_ptr + u, mask=open_, other=0)
        table = tl.load(
            tables_ptr + tl.load(first_ptr + u, mask=open_, other=0), mask=open_, other=0
        )
        less = open_ & (shard * tables + table < cell)
        low = tl.where(less, middle + 1, low)
        high = tl.where(open_ & (less == 0), middle, high)
    tl.store(starts_ptr + cell, low, mask=cell <= cells)


@triton.jit  # type: ignore[untyped-decorator]
def _place(  # type: ignore[no-untyped-def]
    order_ptr,
    shard_ptr,
    first_ptr,
    tables_ptr,
    size_ptr,
    starts_ptr,
    floats_ptr,
    dims_ptr,
    ids_ptr,
    counts_ptr,
    ids_out_ptr,
    counts_out_ptr,
    row_start_ptr,
    tables,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = row < tl.load(size_ptr)
    u = tl.load(order_ptr + row, mask=live, other=0)
    table = tl.load(tables_ptr + tl.load(first_ptr + u, mask=live, other=0), mask=live, other=0)
    cell = tl.load(shard_ptr + u, mask=live, other=0) * tables + table
    inside = row - tl.load(starts_ptr + cell, mask=live, other=0)
    start = tl.load(floats_ptr + cell, mask=live, other=0)
    dim = tl.load(dims_ptr + table, mask=live, other=0)
    tl.store(ids_out_ptr + row, tl.load(ids_ptr + u, mask=live, other=0), mask=live)
    tl.store(counts_out_ptr + row, tl.load(counts_ptr + u, mask=live, other=0), mask=live)
    tl.store(row_start_ptr + u, start + inside * dim, mask=live)


@triton.jit  # type: ignore[untyped-decorator]
def _map(inverse_ptr, row_start_ptr, out_ptr, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    u = tl.load(inverse_ptr + at, mask=at < n, other=0)
    tl.store(out_ptr + at, tl.load(row_start_ptr + u, mask=at < n, other=0), mask=at < n)


def value_rowids(offsets_B1: Tensor, n: int, op: str = "") -> Tensor:
    """Row of each of n values, int64 [n]."""
    out = torch.empty(n, dtype=torch.int64, device=offsets_B1.device)
    rows = offsets_B1.numel() - 1
    if n > 0:
        launch(
            _rowids,
            (blocks_of(n, _BLOCK),),
            offsets_B1.contiguous(),
            out,
            n,
            rows,
            STEPS=rows.bit_length(),
            BLOCK=_BLOCK,
        )
    return out


def normalize_merged_split(splits_T: Tensor, sizes_P: Tensor) -> Tensor:
    """One row split from P of them."""
    parts = sizes_P.numel()
    out = torch.empty(splits_T.numel() + 1 - parts, dtype=torch.int64, device=splits_T.device)
    launch(_join, (parts,), splits_T.contiguous(), sizes_P.contiguous(), out, BLOCK=_BLOCK)
    return out


def fused_reorder(
    ids: Sequence[Tensor],
    offsets_K1: Tensor | None,
    dims: Sequence[int],
    num: int,
    rule: str,
    shards_N: Tensor | None,
    what: str = "",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ids, counts, sizes [num*K], offsets; waits for the device to learn how many ids there are."""
    n, device = sum(part.numel() for part in ids), ids[0].device
    ids_N, counts_N, offsets_N = (
        torch.empty(n, dtype=torch.int64, device=device) for _ in range(3)
    )
    sizes_WK = torch.empty(num * len(dims), dtype=torch.int64, device=device)
    size_1 = torch.empty(1, dtype=torch.int64, device=device)
    fused_reorder_into(
        ids, offsets_K1, dims, num, rule, shards_N, ids_N, counts_N, sizes_WK, offsets_N, size_1
    )
    size = int(size_1)
    return ids_N[:size], counts_N[:size], sizes_WK, offsets_N


def fused_reorder_into(
    ids: Sequence[Tensor],
    offsets_K1: Tensor | None,
    dims: Sequence[int],
    num: int,
    rule: str,
    shards_N: Tensor | None,
    ids_out_N: Tensor,
    counts_out_N: Tensor,
    sizes_out_WK: Tensor,
    offsets_out_N: Tensor,
    size_out_1: Tensor,
    what: str = "",
) -> None:
    """Fill the heads of the outputs; nothing waits for the device."""
    tables = len(dims)
    ids_N = ids[0].contiguous() if len(ids) == 1 else torch.cat(list(ids))
    n = ids_N.numel()
    if n == 0:
        sizes_out_WK.zero_()
        size_out_1.zero_()
        return
    if offsets_K1 is None:
        sizes_K = np.array([part.numel() for part in ids], dtype=np.int64)
        offsets_K1 = staged(np.concatenate([[0], sizes_K.cumsum()]), ids_N.device)
    dims_K = staged(np.array(dims, dtype=np.int64), ids_N.device)
    tables_N = value_rowids(offsets_K1, n)
    found_ids, found_counts, first_N, inverse_N, size_1 = dedup_first(ids_N, tables_N)
    given_N = ids_N if shards_N is None else shards_N.contiguous()
    distinct = (first_N, tables_N, size_1)
    shard_N, order_N, starts = _grouped(found_ids, distinct, given_N, tables, num, rule)
    torch.diff(starts, out=sizes_out_WK)
    widths_WK = (sizes_out_WK.view(num, tables) * dims_K).flatten()
    floats_WK = widths_WK.cumsum(0) - widths_WK
    row_start_N = torch.empty_like(ids_N)
    grid = (blocks_of(n, _BLOCK),)
    launch(
        _place,
        grid,
        order_N,
        shard_N,
        first_N,
        tables_N,
        size_1,
        starts,
        floats_WK,
        dims_K,
        found_ids,
        found_counts,
        ids_out_N,
        counts_out_N,
        row_start_N,
        tables,
        BLOCK=_BLOCK,
    )
    launch(_map, grid, inverse_N, row_start_N, offsets_out_N, n, BLOCK=_BLOCK)
    size_out_1.copy_(size_1)


def _grouped(
    ids_N: Tensor,
    distinct: tuple[Tensor, Tensor, Tensor],
    given_N: Tensor,
    tables: int,
    num: int,
    rule: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Shard of each distinct id, their order, and where each (shard, table) starts in it."""
    n, cells, shard_N = ids_N.numel(), num * tables, torch.empty_like(ids_N)
    first_N, tables_N, size_1 = distinct
    launch(
        _assign,
        (blocks_of(n, _BLOCK),),
        ids_N,
        first_N,
        given_N,
        tables_N,
        size_1,
        shard_N,
        n,
        num,
        (1 << 32) % num,
        RULE=_RULES[rule],
        BLOCK=_BLOCK,
    )
    order_N, _ = partition(shard_N, num + 1)
    starts = torch.empty(cells + 1, dtype=torch.int64, device=ids_N.device)
    launch(
        _cells,
        (blocks_of(cells + 1, 128),),
        order_N,
        shard_N,
        first_N,
        tables_N,
        size_1,
        starts,
        cells,
        tables,
        STEPS=n.bit_length(),
        BLOCK=128,
    )
    return shard_N, order_N, starts
