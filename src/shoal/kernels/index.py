"""The index of a GPU shard: find, claim, erase, list and rebuild, for all tables in one launch."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from shoal.ids import to_signed
from shoal.kernels.launch import blocks_of, launch
from shoal.kernels.tables import (
    BUCKET_BYTES,
    BUCKET_SLOTS,
    COUNT_LINE,
    EMPTY,
    EMPTY_KEY,
    ENTRIES_AT,
    ERASED,
    ERASED_AT,
    ERASED_KEY,
    EVICTED_AT,
    FREE_AT,
    FREE_LIST_AT,
    FRESH_AT,
    IDS_AT,
    INSERTED_AT,
    ISSUED_AT,
    MASK_AT,
    READY_AT,
    SALT_AT,
    SIDE_KEY,
    TABLE_AT,
    CallGroups,
    ShardLayout,
    chunk_word,
    group_of,
    id_of,
    issued_handle,
    mix64,
    row_address,
    search_steps,
    table_word,
)

_FIND_BLOCK, _FIND_WARPS = 32, 1
_INSERT_BLOCK, _INSERT_WARPS = 32, 1

_SIDE = tl.constexpr(SIDE_KEY)
_SLOTS = tl.constexpr(BUCKET_SLOTS)
_BITS = tl.constexpr(BUCKET_SLOTS.bit_length() - 1)
_LANES = tl.constexpr(BUCKET_SLOTS - 1)
_NOWHERE = tl.constexpr(2 * BUCKET_SLOTS)
_BYTES = tl.constexpr(BUCKET_BYTES)
_HANDLES = tl.constexpr(8 * BUCKET_SLOTS)  # bytes of a bucket before its handles


@triton.jit
def any_of(lanes):  # type: ignore[no-untyped-def]
    return tl.max(lanes.to(tl.int32), axis=0) > 0


@triton.jit
def stored_key(id_):  # type: ignore[no-untyped-def]
    """What stands for an id in its slot; the marker values have side keys, told apart by 1."""
    return tl.where(id_ <= ERASED, (id_ & 1) + _SIDE, id_)


@triton.jit
def first_bucket(id_, salt, mask):  # type: ignore[no-untyped-def]
    """Where an id's walk begins; for the marker values, the side bucket."""
    home = (mix64(id_ ^ salt) & mask) >> _BITS
    return tl.where(id_ <= ERASED, (mask + 1) >> _BITS, home)


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
    code = tl.where(second == EMPTY, _SLOTS + LANE + 1, code)
    code = tl.where(second == key, LANE + 1, code)
    code = tl.where((first == EMPTY) & (second != key), _SLOTS + LANE, code)
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
            tl.where(live, EMPTY, ~key),
            tl.where(live, key, ~key),
            sem="relaxed",
        )
        mine = live & (held == EMPTY)
        won = won | mine
        there = there | mine | (live & (held == key))
        live = live & (held != EMPTY) & (held != key) & (steps < mask)
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
        word = counters_ptr + first.to(tl.int64) * COUNT_LINE + WORD
        before = tl.atomic_add(word, tl.sum(ones, axis=0).to(tl.int64), sem="relaxed")
        number = before + (tl.cumsum(ones, axis=0) - 1).to(tl.int64)
    else:
        words = counters_ptr + table.to(tl.int64) * COUNT_LINE + WORD
        number = tl.atomic_add(words, ones.to(tl.int64), mask=live, sem="relaxed")
    return number


@triton.jit(do_not_specialize=["n", "groups", "columns"])  # type: ignore[untyped-decorator]
def _probe(  # type: ignore[no-untyped-def]
    ids_ptr, splits_ptr, group_tables_ptr, wanted_ptr, handles_ptr, found_ptr, tables_ptr,
    counters_ptr, chunks_ptr, n, groups, columns,
    STEPS: tl.constexpr, INSERT: tl.constexpr, HAS_WANTED: tl.constexpr, HAS_FOUND: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    lane = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = lane < n
    # Lanes behind the end look at the last id, so that every lane has a table and addresses.
    at = tl.where(live, lane, n - 1)
    valid = at >= 0
    id_ = tl.load(ids_ptr + at)
    table = tl.load(group_tables_ptr + group_of(splits_ptr, groups, at, valid, STEPS))
    entries = table_word(tables_ptr, table, valid, ENTRIES_AT)
    mask = table_word(tables_ptr, table, valid, MASK_AT)
    key = stored_key(id_)
    bucket = first_bucket(id_, table_word(tables_ptr, table, valid, SALT_AT), mask)
    slot, handle, there = walk(entries, bucket, mask, key, live)
    if HAS_FOUND:
        tl.store(found_ptr + at, there.to(tl.int8), mask=live)
    if INSERT:
        missing = live & (there == 0)
        if HAS_WANTED:
            missing = missing & (tl.load(wanted_ptr + at) != 0)
        if any_of(missing):
            slot = tl.where(id_ <= ERASED, mask + 1 + (id_ & 1), slot)
            slot, won, met = claim(entries, slot, mask, key, missing)
            issue = count_up(counters_ptr, table, won, ISSUED_AT)
            row = issued_handle(tables_ptr, counters_ptr, table, issue, won)
            home = row_address(chunks_ptr, columns, row, 8, won, IDS_AT)
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
        found_N: bool or int8 [N], filled with whether the search met the id. With `insert` an id
            that is new may be met where it occurs again, but not at the position that inserts it:
            an id had a row before the call if and only if it was met at all its positions.
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
        _probe, (blocks_of(n, block),),
        groups.ids_N, groups.splits_G1, groups.tables_G,
        unused if wanted_N is None else _bytes(wanted_N), handles_N,
        unused if found_N is None else _bytes(found_N), layout.tables_KT,
        layout.counters_KC, layout.chunks_WC, n, groups.tables_G.numel(), layout.chunks_WC.shape[1],
        STEPS=search_steps(groups.tables_G.numel()), INSERT=insert, HAS_WANTED=wanted_N is not None,
        HAS_FOUND=found_N is not None, BLOCK=block, num_warps=warps,
    )  # fmt: skip


def _bytes(flags: Tensor) -> Tensor:
    return flags.view(torch.int8) if flags.dtype is torch.bool else flags


_ERASE_BLOCK, _ERASE_WARPS = 64, 1
_REBUILD_BLOCK, _REBUILD_WARPS = 64, 1
_FOLD_BLOCK = 128
_LIST_BUCKETS = 1 << 20  # at a time: what finds their places takes memory


@triton.jit(do_not_specialize=["tables"])  # type: ignore[untyped-decorator]
def _fold(counters_ptr, tables, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    table = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = table < tables
    words = counters_ptr + table.to(tl.int64) * COUNT_LINE
    issued = tl.load(words + ISSUED_AT, mask=live, other=0)
    free = tl.load(words + FREE_AT, mask=live, other=0)
    fresh = tl.load(words + FRESH_AT, mask=live, other=0)
    inserted = tl.load(words + INSERTED_AT, mask=live, other=0)
    reused = tl.minimum(issued, free)
    tl.store(words + FREE_AT, free - reused, mask=live)
    tl.store(words + FRESH_AT, fresh + issued - reused, mask=live)
    tl.store(words + INSERTED_AT, inserted + issued, mask=live)
    tl.store(words + ISSUED_AT, issued * 0, mask=live)
    tl.store(words + READY_AT, issued * 0, mask=live)


@triton.jit(do_not_specialize=["n", "columns"])  # type: ignore[untyped-decorator]
def _erase(  # type: ignore[no-untyped-def]
    handles_ptr, size_ptr, tables_ptr, counters_ptr, chunks_ptr, n, columns,
    HAS_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = at < n
    if HAS_SIZE:
        live = live & (at < tl.load(size_ptr))
    handle = tl.load(handles_ptr + at, mask=live, other=-1)
    live = live & (handle >= 0)
    if any_of(live):
        table = chunk_word(chunks_ptr, columns, handle, live, TABLE_AT).to(tl.int32)
        # Idle lanes side with a live one, so that they do not split the program's counts.
        table = tl.where(live, table, tl.max(table, axis=0))
        id_ = id_of(chunks_ptr, columns, handle, live)
        entries = table_word(tables_ptr, table, live, ENTRIES_AT)
        mask = table_word(tables_ptr, table, live, MASK_AT)
        bucket = first_bucket(id_, table_word(tables_ptr, table, live, SALT_AT), mask)
        slot, held, gone = walk(entries, bucket, mask, stored_key(id_), live)
        gone = gone & (held == handle)
        aside = id_ <= ERASED
        tl.store(key_at(entries, slot), tl.where(aside, EMPTY, ERASED), mask=gone)
        tl.store(handle_at(entries, slot), handle * 0 - 1, mask=gone & aside)
        place = count_up(counters_ptr, table, gone, FREE_AT)
        stack = table_word(tables_ptr, table, gone, FREE_LIST_AT).to(tl.pointer_type(tl.int32))
        tl.store(stack + place, handle, mask=gone)
        count_up(counters_ptr, table, gone & (aside == 0), ERASED_AT)
        count_up(counters_ptr, table, gone, EVICTED_AT)


@triton.jit(do_not_specialize=["slots", "mask", "salt"])  # type: ignore[untyped-decorator]
def _rebuild(old_ptr, new_ptr, slots, mask, salt, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < slots
    old = at * 0 + old_ptr.to(tl.int64)
    new = at * 0 + new_ptr.to(tl.int64)
    key = tl.load(key_at(old, at), mask=inside, other=EMPTY)
    live = key > ERASED
    if any_of(live):
        handle = tl.load(handle_at(old, at), mask=live, other=-1)
        masks = at * 0 + mask
        slot, _, _ = walk(new, first_bucket(key, salt, masks), masks, key, live)
        slot, won, _ = claim(new, slot, masks, key, live)
        tl.store(handle_at(new, slot), handle, mask=won)


def fold(layout: ShardLayout) -> None:
    """Start the count of issued rows at zero again, for all tables; rows in use stay the same."""
    tables = len(layout.counters_KC)
    launch(
        _fold, (blocks_of(tables, _FOLD_BLOCK),),
        layout.counters_KC, tables,
        BLOCK=_FOLD_BLOCK,
    )  # fmt: skip


def erase(layout: ShardLayout, handles_M: Tensor, size_1: Tensor | None) -> None:
    """Take the rows of handles int32 [M], of any tables, out of the index; their rows are free.

    Handles are distinct but for -1, which is passed over, as are rows that are not in use.
    size_1: int32 [1], how many of the handles count; None: all. The free lists have room.
    """
    m = handles_M.numel()
    if m == 0:
        return
    fold(layout)
    launch(
        _erase, (blocks_of(m, _ERASE_BLOCK),),
        handles_M, handles_M if size_1 is None else size_1, layout.tables_KT, layout.counters_KC,
        layout.chunks_WC, m, layout.chunks_WC.shape[1],
        HAS_SIZE=size_1 is not None, BLOCK=_ERASE_BLOCK, num_warps=_ERASE_WARPS,
    )  # fmt: skip


def rebuild(old_entries: Tensor, new_entries: Tensor, salt: int) -> None:
    """Put all that is live in an index into an empty one, of any size that has room for it.

    salt: of the table. Erased slots are left behind: its count of them is zero afterwards.
    """
    slots = (len(old_entries) - 1) * BUCKET_SLOTS
    new_entries[-1].copy_(old_entries[-1])
    launch(
        _rebuild, (blocks_of(slots, _REBUILD_BLOCK),),
        old_entries, new_entries, slots, (len(new_entries) - 1) * BUCKET_SLOTS - 1, to_signed(salt),
        BLOCK=_REBUILD_BLOCK, num_warps=_REBUILD_WARPS,
    )  # fmt: skip


def list_handles(entries: Tensor) -> Tensor:
    """Handles int32 [R] of all rows in an index in the order of their slots; waits for it."""
    parts = torch.split(entries, _LIST_BUCKETS)
    return torch.cat(
        [
            part[:, BUCKET_SLOTS:].view(torch.int32)[part[:, :BUCKET_SLOTS] > ERASED_KEY]
            for part in parts
        ]
    )
