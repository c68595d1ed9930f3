"""Distinct ids, stable grouping by shard, row numbers and the fused reorder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from shoal.kernels.host_copies import staged
from shoal.kernels.launch import blocks_of, launch, power_of_2
from shoal.kernels.tables import mix64

_BLOCK = 1024
_RANK_BLOCK = 512  # this and the next: multiples of the insert's, which counts for one at a time
_LARGE_RANK_BLOCK = 2048  # each adds up those before it, so of many ids there are fewer
_MANY_IDS = 1 << 23
_RANKS_A_WARP = 128
_INSERT_BLOCK = 128
_SLOTS_AN_ID = 2
_LARGEST_INT32 = (1 << 31) - 1


@triton.jit
def _hash(id_, table):  # type: ignore[no-untyped-def]
    x = id_ ^ (table * 0x632BE59BD9B4E019)
    x = x ^ ((x >> 32) & 0xFFFFFFFF)
    x = x * -0x61C8864680B583EB
    return x ^ ((x >> 29) & 0x7FFFFFFFF)


@triton.jit(do_not_specialize=["n", "mask"])  # type: ignore[untyped-decorator]
def _insert(  # type: ignore[no-untyped-def]
    ids_ptr, tables_ptr, slots_ptr, owner_ptr, n, mask,
    HAS_TABLES: tl.constexpr, BLOCK: tl.constexpr, RANK_BLOCK: tl.constexpr,
):  # fmt: skip
    sums_ptr = owner_ptr + mask + 1
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = at < n
    id_ = tl.load(ids_ptr + at, mask=live, other=0)
    table = tl.zeros([BLOCK], tl.int64)
    if HAS_TABLES:
        table = tl.load(tables_ptr + at, mask=live, other=0)
    # Positions and slots are as wide as the table's words: registers bound what is under way.
    key = (at + 1).to(owner_ptr.dtype.element_ty)
    vacant = key * 0
    idle = (at & mask).to(key.dtype)
    slot = ((_hash(id_, table) >> 20) & mask).to(key.dtype)
    found = slot
    todo = live
    claimed = tl.zeros([BLOCK], tl.int32)
    while tl.max(todo.to(tl.int32), axis=0) > 0:
        owner = tl.load(owner_ptr + slot, mask=todo, other=1)
        # No slot ever holds -1: lanes with nothing to claim compare against it, in slots side by
        # side, which cost one access together.
        free = todo & (owner == 0)
        before = tl.atomic_cas(
            owner_ptr + tl.where(free, slot, idle),
            tl.where(free, vacant, vacant - 1),
            key,
            sem="relaxed",
        )
        owner = tl.where(free, before, owner)
        mine = free & (owner == 0)
        other = tl.where(owner > 0, owner, 1) - 1
        taken_by = todo & (owner > 0)
        same = taken_by & (tl.load(ids_ptr + other, mask=taken_by, other=0) == id_)
        if HAS_TABLES:
            same = same & (tl.load(tables_ptr + other, mask=taken_by, other=0) == table)
        claimed += mine.to(tl.int32)
        late = same & (owner > key)
        taken = tl.atomic_min(owner_ptr + slot, key, mask=late, sem="relaxed")
        # First place moves from an earlier claimer's block to this one.
        moved = late & (taken > key)
        loser = tl.where(moved, taken, 1) - 1
        tl.atomic_add(sums_ptr + loser // RANK_BLOCK, -1, mask=moved, sem="relaxed")
        claimed += moved.to(tl.int32)
        found = tl.where(mine | same, slot, found)
        todo = todo & ~(mine | same)
        slot = tl.where(todo, (slot + 1) & mask, slot)
    tl.store(slots_ptr + at, found.to(tl.int64), mask=live)
    block = tl.program_id(0).to(tl.int64) * BLOCK // RANK_BLOCK
    tl.atomic_add(sums_ptr + block, tl.sum(claimed, axis=0), sem="relaxed")


@triton.jit(do_not_specialize=["n", "mask"])  # type: ignore[untyped-decorator]
def _rank(  # type: ignore[no-untyped-def]
    ids_ptr, slots_ptr, owner_ptr, ids_out_ptr, counts_out_ptr, first_out_ptr, size_ptr, n, mask,
    HAS_FIRST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    sums_ptr = owner_ptr + mask + 1
    block = tl.program_id(0).to(tl.int64)
    at = block * BLOCK + tl.arange(0, BLOCK)
    live = at < n
    slot = tl.load(slots_ptr + at, mask=live, other=0)
    id_ = tl.load(ids_ptr + at, mask=live, other=0)
    sums = tl.zeros([BLOCK], tl.int64)
    for begin in range(0, block, BLOCK):
        k = begin + tl.arange(0, BLOCK)
        sums += tl.load(sums_ptr + k, mask=k < block, other=0).to(tl.int64)
    owner = tl.load(owner_ptr + slot, mask=live, other=0).to(tl.int64)
    first = live & (owner == at + 1)
    within = tl.cumsum(first.to(tl.int32), axis=0)
    start = tl.sum(sums, axis=0)
    rank = start + within - 1
    tl.store(ids_out_ptr + rank, id_, mask=first)
    tl.store(counts_out_ptr + rank, at * 0 + 1, mask=first)
    if HAS_FIRST:
        tl.store(first_out_ptr + rank, at, mask=first)
    tl.store(slots_ptr + at, tl.where(first, rank, -owner), mask=live)
    if block == tl.num_programs(0) - 1:
        tl.store(size_ptr, start + tl.max(within, axis=0))


@triton.jit(do_not_specialize=["n"])  # type: ignore[untyped-decorator]
def _inverse(counts_ptr, inverse_ptr, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    found = tl.load(inverse_ptr + at, mask=at < n, other=0)
    repeated = found < 0
    # Of a first one, so nothing writes it here.
    rank = tl.load(inverse_ptr + tl.where(repeated, -1 - found, 0), mask=repeated, other=0)
    tl.store(inverse_ptr + at, rank, mask=repeated)
    tl.atomic_add(counts_ptr + rank, at * 0 + 1, mask=repeated, sem="relaxed")


def dedup_into(
    ids_N: Tensor,
    ids_out_N: Tensor,
    counts_out_N: Tensor,
    inverse_out_N: Tensor,
    size_out_1: Tensor,
) -> None:
    """Fill the heads of the outputs [N] and the number of distinct ids [1]."""
    _launch(ids_N, None, ids_out_N, counts_out_N, inverse_out_N, None, size_out_1)


def dedup_first(ids_N: Tensor, tables_N: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Distinct (table, id) pairs without a host wait.

    Returns ids, counts, first positions (heads of [N]), inverse [N], and their number [1].
    """
    ids_out_N, counts_out_N, first_out_N = (torch.empty_like(ids_N) for _ in range(3))
    inverse_N, size_1 = torch.empty_like(ids_N), ids_N.new_empty(1)
    _launch(ids_N, tables_N, ids_out_N, counts_out_N, inverse_N, first_out_N, size_1)
    return ids_out_N, counts_out_N, first_out_N, inverse_N, size_1


def dedup(ids_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Distinct ids, counts, inverse; waits for the device to learn how many there are."""
    ids_out_N, counts_out_N = torch.empty_like(ids_N), torch.empty_like(ids_N)
    inverse_N, size_1 = torch.empty_like(ids_N), ids_N.new_empty(1)
    dedup_into(ids_N, ids_out_N, counts_out_N, inverse_N, size_1)
    size = int(size_1)
    return ids_out_N[:size], counts_out_N[:size], inverse_N


def _launch(
    ids_N: Tensor,
    tables_N: Tensor | None,
    ids_out_N: Tensor,
    counts_out_N: Tensor,
    inverse_N: Tensor,
    first_out_N: Tensor | None,
    size_1: Tensor,
) -> None:
    n = ids_N.numel()
    if n == 0:
        size_1.zero_()
        return
    ids_N = ids_N.contiguous()
    block = _RANK_BLOCK if n < _MANY_IDS else _LARGE_RANK_BLOCK
    blocks = blocks_of(n, block)
    capacity = power_of_2(_SLOTS_AN_ID * n)
    word = torch.int32 if capacity < _LARGEST_INT32 else torch.int64
    # The table, then the number of new ids of each block, zeroed at one go.
    owner = torch.zeros(capacity + blocks, dtype=word, device=ids_N.device)
    launch(
        _insert, (blocks_of(n, _INSERT_BLOCK),),
        ids_N, ids_N if tables_N is None else tables_N, inverse_N, owner, n, capacity - 1,
        HAS_TABLES=tables_N is not None, BLOCK=_INSERT_BLOCK, RANK_BLOCK=block, num_warps=1,
    )  # fmt: skip
    launch(
        _rank, (blocks,),
        ids_N, inverse_N, owner, ids_out_N, counts_out_N,
        ids_N if first_out_N is None else first_out_N, size_1, n, capacity - 1,
        HAS_FIRST=first_out_N is not None, BLOCK=block, num_warps=block // _RANKS_A_WARP,
    )  # fmt: skip
    launch(_inverse, (blocks_of(n, _BLOCK),), counts_out_N, inverse_N, n, BLOCK=_BLOCK)


_PARTITION_BLOCK = 512
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
    shards_ptr, order_ptr, counts_ptr, n, shift,
    DIGITS: tl.constexpr, HAS_ORDER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64)
    at = block * BLOCK + tl.arange(0, BLOCK)
    _, digit = _digits(shards_ptr, order_ptr, at, at < n, shift, DIGITS, HAS_ORDER)
    all_digits = tl.arange(0, DIGITS)
    hits = (digit[:, None] == all_digits[None, :]).to(tl.int32)
    counts = tl.sum(hits, axis=0).to(tl.int64)
    tl.store(counts_ptr + all_digits * tl.num_programs(0).to(tl.int64) + block, counts)


@triton.jit  # type: ignore[untyped-decorator]
def _scatter(  # type: ignore[no-untyped-def]
    shards_ptr, order_ptr, ends_ptr, counts_ptr, out_ptr, n, shift,
    DIGITS: tl.constexpr, HAS_ORDER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
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
    rows_ptr, order_ptr, out_ptr, n, width,
    TAKE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
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
    digits, blocks = 1 << digit_bits, blocks_of(n, _PARTITION_BLOCK)
    counts = torch.empty(digits * blocks, dtype=torch.int64, device=device)
    order: Tensor | None = None
    for number in range(passes):
        shared: dict[str, Any] = {
            "DIGITS": digits,
            "HAS_ORDER": order is not None,
            "BLOCK": _PARTITION_BLOCK,
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


def move_rows(rows_N: Tensor, order_N: Tensor, take: bool) -> Tensor:
    """out[i] = rows_N[order_N[i]]; or back, out[order_N[i]] = rows_N[i]."""
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
        _move, (blocks_of(n, rows), blocks_of(width, columns)),
        rows_NC, order_N, out, n, width,
        TAKE=take, ROWS=rows, COLS=columns,
    )  # fmt: skip
    return out_N


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
    ids_ptr, first_ptr, given_ptr, tables_ptr, size_ptr, shard_ptr, n, num, wrap,
    RULE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
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
    order_ptr, shard_ptr, first_ptr, tables_ptr, size_ptr, starts_ptr, cells, tables,
    STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
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
    order_ptr, shard_ptr, first_ptr, tables_ptr, size_ptr, starts_ptr, floats_ptr, dims_ptr,
    ids_ptr, counts_ptr, ids_out_ptr, counts_out_ptr, row_start_ptr, tables,
    BLOCK: tl.constexpr,
):  # fmt: skip
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
            _rowids, (blocks_of(n, _BLOCK),),
            offsets_B1.contiguous(), out, n, rows,
            STEPS=rows.bit_length(), BLOCK=_BLOCK,
        )  # fmt: skip
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
        _place, grid,
        order_N, shard_N, first_N, tables_N, size_1, starts, floats_WK, dims_K, found_ids,
        found_counts, ids_out_N, counts_out_N, row_start_N, tables,
        BLOCK=_BLOCK,
    )  # fmt: skip
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
        _assign, (blocks_of(n, _BLOCK),),
        ids_N, first_N, given_N, tables_N, size_1, shard_N, n, num, (1 << 32) % num,
        RULE=_RULES[rule], BLOCK=_BLOCK,
    )  # fmt: skip
    order_N, _ = partition(shard_N, num + 1)
    starts = torch.empty(cells + 1, dtype=torch.int64, device=ids_N.device)
    launch(
        _cells, (blocks_of(cells + 1, 128),),
        order_N, shard_N, first_N, tables_N, size_1, starts, cells, tables,
        STEPS=n.bit_length(), BLOCK=128,
    )  # fmt: skip
    return shard_N, order_N, starts
