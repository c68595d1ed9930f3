"""Distinct ids in order of first appearance: a hash table in device memory, no sort, no host wait.

A slot holds 1 + the first position of its id, so every bit pattern is a legal id. `_insert` claims
slots by compare-and-swap and lowers them to the smallest position; `_rank` numbers the positions
that still own their slot; `_inverse` reads the numbers back. Which id gets which slot depends on
timing, the result does not. Until it is done, the inverse holds what the launches tell each other:
the slot of each id, then the rank of a first one and -1 - the first position of a repeated one.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from shoal.kernels.launching import launch
from shoal.kernels.row_tiles import blocks_of, power_of_2

__all__ = ["dedup", "dedup_first", "dedup_into"]

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
    ids_ptr,
    tables_ptr,
    slots_ptr,
    owner_ptr,
    n,
    mask,
    HAS_TABLES: tl.constexpr,
    BLOCK: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
):
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
    ids_ptr,
    slots_ptr,
    owner_ptr,
    ids_out_ptr,
    counts_out_ptr,
    first_out_ptr,
    size_ptr,
    n,
    mask,
    HAS_FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
):
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
        _insert,
        (blocks_of(n, _INSERT_BLOCK),),
        ids_N,
        ids_N if tables_N is None else tables_N,
        inverse_N,
        owner,
        n,
        capacity - 1,
        HAS_TABLES=tables_N is not None,
        BLOCK=_INSERT_BLOCK,
        RANK_BLOCK=block,
        num_warps=1,
    )
    launch(
        _rank,
        (blocks,),
        ids_N,
        inverse_N,
        owner,
        ids_out_N,
        counts_out_N,
        ids_N if first_out_N is None else first_out_N,
        size_1,
        n,
        capacity - 1,
        HAS_FIRST=first_out_N is not None,
        BLOCK=block,
        num_warps=block // _RANKS_A_WARP,
    )
    launch(_inverse, (blocks_of(n, _BLOCK),), counts_out_N, inverse_N, n, BLOCK=_BLOCK)
