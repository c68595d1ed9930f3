"""Find or claim the rows of ids in the index of a shard, for all its tables in one launch.

An id's walk begins at the first slot of the bucket of its hash and goes on slot by slot. It ends
at the id's key, or at the first empty slot, where the id would be claimed; erased slots are
passed. A bucket is read whole, keys and handles in one wide load, so nearly every id costs one
access to memory.

**One row per id.** Within a launch a slot changes once at most, from empty to a key, and an id is
claimed only at a slot before which its walk has seen no empty slot. Whoever looks for the same id
walks the same slots, so the two meet: one wins the compare-and-swap, the other is told the key.
A load may still show a slot as empty that has been taken since (the cache of a multiprocessor is
not coherent); that only sends the lane to the compare-and-swap, which tells the truth. So the
lanes before an empty slot of a bucket are full, too, at any time.

**No deadlock.** A handle is -1 until the winner of its slot has published it, and others poll for
it. A program claims, numbers and publishes all its own rows first and polls only afterwards; what
it does until then waits for nobody. So whatever a program polls for has been claimed by a program
that runs already and that will publish whether or not anyone else makes progress.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from shoal.kernels.launching import launch
from shoal.kernels.row_tiles import blocks_of
from shoal.kernels.table_layout import (
    BUCKET_BYTES,
    BUCKET_SLOTS,
    CHUNK_IDS,
    COUNT_ISSUED,
    COUNT_WORDS,
    EMPTY_KEY,
    ERASED_KEY,
    SIDE_KEY,
    TABLE_ENTRIES,
    TABLE_MASK,
    TABLE_SALT,
    CallGroups,
    ShardLayout,
    group_of,
    issued_handle,
    mix64,
    row_address,
    search_steps,
    table_word,
)

__all__ = [
    "any_of",
    "claim",
    "count_up",
    "first_bucket",
    "handle_at",
    "key_at",
    "new_entries",
    "probe",
    "stored_key",
    "walk",
]

_FIND_BLOCK, _FIND_WARPS = 32, 1
_INSERT_BLOCK, _INSERT_WARPS = 32, 1

_EMPTY = tl.constexpr(EMPTY_KEY)
_ERASED = tl.constexpr(ERASED_KEY)
_SIDE = tl.constexpr(SIDE_KEY)
_SLOTS = tl.constexpr(BUCKET_SLOTS)
_BITS = tl.constexpr(BUCKET_SLOTS.bit_length() - 1)
_LANES = tl.constexpr(BUCKET_SLOTS - 1)
_NOWHERE = tl.constexpr(2 * BUCKET_SLOTS)
_BYTES = tl.constexpr(BUCKET_BYTES)
_HANDLES = tl.constexpr(8 * BUCKET_SLOTS)  # bytes of a bucket before its handles
_COUNT_WORDS = tl.constexpr(COUNT_WORDS)
_ISSUED = tl.constexpr(COUNT_ISSUED)
_ENTRIES = tl.constexpr(TABLE_ENTRIES)
_MASK = tl.constexpr(TABLE_MASK)
_SALT = tl.constexpr(TABLE_SALT)
_IDS = tl.constexpr(CHUNK_IDS)


@triton.jit
def any_of(lanes):  # type: ignore[no-untyped-def]
    return tl.max(lanes.to(tl.int32), axis=0) > 0


@triton.jit
def stored_key(id_):  # type: ignore[no-untyped-def]
    """What stands for an id in its slot; the marker values have side keys, told apart by 1."""
    return tl.where(id_ <= _ERASED, (id_ & 1) + _SIDE, id_)


@triton.jit
def first_bucket(id_, salt, mask):  # type: ignore[no-untyped-def]
    """Where an id's walk begins; for the marker values, the side bucket."""
    home = (mix64(id_ ^ salt) & mask) >> _BITS
    return tl.where(id_ <= _ERASED, (mask + 1) >> _BITS, home)


@triton.jit
def key_at(entries, slot):  # type: ignore[no-untyped-def]
    """Pointer to the key of each slot; `entries` are addresses."""
    address = entries + (slot >> _BITS) * _BYTES + (slot & _LANES) * 8
    return address.to(tl.pointer_type(tl.int64))


@triton.jit
def handle_at(entries, slot):  # type: ignore[no-untyped-def]
    """Pointer to the handle of each slot."""
    address = entries + (slot >> _BITS) * _BYTES + _HANDLES + (slot & _LANES) * 4
    return address.to(tl.pointer_type(tl.int32))


@triton.jit  # type: ignore[untyped-decorator]
def _words(start, live, WORD: tl.constexpr):  # type: ignore[no-untyped-def]
    """Two neighbouring words of each lane's bucket, in one load of 16 bytes."""
    pair = tl.load(start[:, None] + (tl.arange(0, 2) + WORD)[None, :], mask=live[:, None], other=0)
    return tl.split(pair)


@triton.jit  # type: ignore[untyped-decorator]
def _coded(code, first, second, key, LANE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Fold two keys, at LANE and LANE + 1, into the code of those behind them."""
    # No key stands behind an empty slot, unless it is the second of the side bucket.
    code = tl.where(second == _EMPTY, _SLOTS + LANE + 1, code)
    code = tl.where(second == key, LANE + 1, code)
    code = tl.where((first == _EMPTY) & (second != key), _SLOTS + LANE, code)
    return tl.where(first == key, LANE, code)


@triton.jit
def walk(entries, bucket, mask, key, live):  # type: ignore[no-untyped-def]
    """Walk from the first slot of `bucket` to the key, or to the first empty slot.

    Returns that slot, its handle (-1 without the key, or where it is not published yet), and
    whether it holds the key. In a table without an empty slot a walk ends after one round.
    """
    slot = bucket * _SLOTS
    handle = tl.full(key.shape, -1, tl.int32)
    there = live & (live == 0)
    last = mask >> _BITS
    steps = mask * 0
    while any_of(live):
        start = (entries + bucket * _BYTES).to(tl.pointer_type(tl.int64))
        start = tl.multiple_of(start, 16)
        key0, key1 = _words(start, live, 0)
        key2, key3 = _words(start, live, 2)
        key4, key5 = _words(start, live, 4)
        key6, key7 = _words(start, live, 6)
        pair0, pair1 = _words(start, live, 8)
        pair2, pair3 = _words(start, live, 10)
        # Lane of the key, else 8 + the first empty lane, else 16.
        code = tl.full(key.shape, _NOWHERE, tl.int32)
        code = _coded(code, key6, key7, key, 6)
        code = _coded(code, key4, key5, key, 4)
        code = _coded(code, key2, key3, key, 2)
        code = _coded(code, key0, key1, key, 0)
        lane = code & _LANES
        near = tl.where(lane < 2, pair0, pair1)
        pair = tl.where(lane < 4, near, tl.where(lane < 6, pair2, pair3))
        hit = live & (code < _SLOTS)
        there = there | hit
        handle = tl.where(hit, (pair >> ((lane & 1) * 32).to(tl.int64)).to(tl.int32), handle)
        slot = tl.where(live & (code < _NOWHERE), bucket * _SLOTS + lane, slot)
        live = live & (code == _NOWHERE) & (steps < last)
        bucket = tl.where(live, (bucket + 1) & last, bucket)
        steps += 1
    return slot, handle, there


@triton.jit
def claim(entries, slot, mask, key, live):  # type: ignore[no-untyped-def]
    """Walk on from `slot` by compare-and-swap until the key is there, ours or another's.

    Returns the slot, whether this lane put it there, and whether it is there at all.
    """
    won = live & (live == 0)
    there = won
    steps = mask * 0
    while any_of(live):
        # There is no mask. An idle lane swaps a value for itself, one that its slot does not hold.
        held = tl.atomic_cas(
            key_at(entries, slot),
            tl.where(live, _EMPTY, ~key),
            tl.where(live, key, ~key),
            sem="relaxed",
        )
        mine = live & (held == _EMPTY)
        won = won | mine
        there = there | mine | (live & (held == key))
        live = live & (held != _EMPTY) & (held != key) & (steps < mask)
        slot = tl.where(live, (slot + 1) & mask, slot)
        steps += 1
    return slot, won, there


@triton.jit  # type: ignore[untyped-decorator]
def count_up(counters_ptr, table, live, WORD: tl.constexpr):  # type: ignore[no-untyped-def]
    """Count each live lane in a counter of its table; returns the count before it.

    A program whose lanes share a table adds once.
    """
    first = tl.min(table, axis=0)
    ones = live.to(tl.int32)
    if first == tl.max(table, axis=0):
        word = counters_ptr + first.to(tl.int64) * _COUNT_WORDS + WORD
        before = tl.atomic_add(word, tl.sum(ones, axis=0).to(tl.int64), sem="relaxed")
        number = before + (tl.cumsum(ones, axis=0) - 1).to(tl.int64)
    else:
        words = counters_ptr + table.to(tl.int64) * _COUNT_WORDS + WORD
        number = tl.atomic_add(words, ones.to(tl.int64), mask=live, sem="relaxed")
    return number


@triton.jit(do_not_specialize=["n", "groups", "columns"])  # type: ignore[untyped-decorator]
def _probe(  # type: ignore[no-untyped-def]
    ids_ptr,
    splits_ptr,
    group_tables_ptr,
    wanted_ptr,
    handles_ptr,
    found_ptr,
    tables_ptr,
    counters_ptr,
    chunks_ptr,
    n,
    groups,
    columns,
    STEPS: tl.constexpr,
    INSERT: tl.constexpr,
    HAS_WANTED: tl.constexpr,
    HAS_FOUND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    lane = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = lane < n
    # Lanes behind the end look at the last id, so that every lane has a table and addresses.
    at = tl.where(live, lane, n - 1)
    valid = at >= 0
    id_ = tl.load(ids_ptr + at)
    table = tl.load(group_tables_ptr + group_of(splits_ptr, groups, at, valid, STEPS))
    entries = table_word(tables_ptr, table, valid, _ENTRIES)
    mask = table_word(tables_ptr, table, valid, _MASK)
    key = stored_key(id_)
    bucket = first_bucket(id_, table_word(tables_ptr, table, valid, _SALT), mask)
    slot, handle, there = walk(entries, bucket, mask, key, live)
    if HAS_FOUND:
        tl.store(found_ptr + at, there.to(tl.int8), mask=live)
    if INSERT:
        missing = live & (there == 0)
        if HAS_WANTED:
            missing = missing & (tl.load(wanted_ptr + at) != 0)
        if any_of(missing):
            slot = tl.where(id_ <= _ERASED, mask + 1 + (id_ & 1), slot)
            slot, won, met = claim(entries, slot, mask, key, missing)
            issue = count_up(counters_ptr, table, won, _ISSUED)
            row = issued_handle(tables_ptr, counters_ptr, table, issue, won)
            home = row_address(chunks_ptr, columns, row, 8, won, _IDS)
            tl.store(home.to(tl.pointer_type(tl.int64)), id_, mask=won)
            tl.store(handle_at(entries, slot), row, mask=won)
            handle = tl.where(won, row, handle)
            there = there | met
        waiting = there & (handle < 0)
        while any_of(waiting):
            published = tl.load(handle_at(entries, slot), mask=waiting, other=0, volatile=True)
            handle = tl.where(waiting, published, handle)
            waiting = waiting & (published < 0)
    tl.store(handles_ptr + at, handle, mask=live)


def new_entries(slots: int, device: torch.device | str) -> Tensor:
    """An index without ids: int64 [slots / 8 + 1, 12], keys empty, handles -1.

    slots: a power of two from 8 on; the last bucket is the side bucket.
    """
    entries = torch.full(
        (slots // BUCKET_SLOTS + 1, BUCKET_BYTES // 8), -1, dtype=torch.int64, device=device
    )
    entries[:, :BUCKET_SLOTS] = EMPTY_KEY
    return entries


def probe(
    layout: ShardLayout,
    groups: CallGroups,
    handles_N: Tensor,
    found_N: Tensor | None,
    wanted_N: Tensor | None,
    *,
    insert: bool,
) -> None:
    """Write each id's handle, int32 [N], -1 where it has none; with `insert`, give it one.

    Args:
        found_N: bool [N], filled with whether the search met the id. With `insert` an id that is
            new may be met where it occurs again, but not at the position that inserts it: an id
            had a row before the call if and only if it was met at all its positions.
        wanted_N: bool [N], which of the missing ids to insert; None: all.

    An inserted row is counted in `COUNT_ISSUED`, and its id stands in its chunk; the rest of it
    is not written. The caller has seen to it that there is room: an empty slot for each id, and
    a place on the free list or in the directory's chunks.
    """
    n, unused = groups.ids_N.numel(), groups.ids_N
    if n == 0:
        return
    block, warps = (_INSERT_BLOCK, _INSERT_WARPS) if insert else (_FIND_BLOCK, _FIND_WARPS)
    launch(
        _probe,
        (blocks_of(n, block),),
        groups.ids_N,
        groups.splits_G1,
        groups.tables_G,
        unused if wanted_N is None else wanted_N.view(torch.int8),
        handles_N,
        unused if found_N is None else found_N.view(torch.int8),
        layout.tables_KT,
        layout.counters_KC,
        layout.chunks_WC,
        n,
        groups.tables_G.numel(),
        layout.chunks_WC.shape[1],
        STEPS=search_steps(groups.tables_G.numel()),
        INSERT=insert,
        HAS_WANTED=wanted_N is not None,
        HAS_FOUND=found_N is not None,
        BLOCK=block,
        num_warps=warps,
    )
