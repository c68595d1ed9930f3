"""Take ids out of the index of a shard, list what is in it, and build it anew.

An erased slot keeps its handle and is passed by walks; it is empty again only in a new index.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from shoal.hashing import to_signed
from shoal.kernels.launching import launch
from shoal.kernels.row_tiles import blocks_of
from shoal.kernels.table_index import (
    any_of,
    claim,
    count_up,
    first_bucket,
    handle_at,
    key_at,
    stored_key,
    walk,
)
from shoal.kernels.table_layout import (
    BUCKET_SLOTS,
    CHUNK_IDS,
    CHUNK_TABLE,
    COUNT_ERASED,
    COUNT_EVICTED,
    COUNT_FREE,
    COUNT_FRESH,
    COUNT_INSERTED,
    COUNT_ISSUED,
    COUNT_READY,
    COUNT_WORDS,
    EMPTY_KEY,
    ERASED_KEY,
    TABLE_ENTRIES,
    TABLE_FREE,
    TABLE_MASK,
    TABLE_SALT,
    ShardLayout,
    chunk_word,
    row_address,
    table_word,
)

__all__ = ["erase", "fold", "list_handles", "rebuild"]

_ERASE_BLOCK, _ERASE_WARPS = 64, 1
_REBUILD_BLOCK, _REBUILD_WARPS = 64, 1
_FOLD_BLOCK = 128
_LIST_BLOCK = 1024

_EMPTY = tl.constexpr(EMPTY_KEY)
_ERASED_KEY = tl.constexpr(ERASED_KEY)
_SLOTS = tl.constexpr(BUCKET_SLOTS)
_WORDS = tl.constexpr(COUNT_WORDS)
_ISSUED, _READY = tl.constexpr(COUNT_ISSUED), tl.constexpr(COUNT_READY)
_FREE, _FRESH = tl.constexpr(COUNT_FREE), tl.constexpr(COUNT_FRESH)
_INSERTED = tl.constexpr(COUNT_INSERTED)
_ERASED, _EVICTED = tl.constexpr(COUNT_ERASED), tl.constexpr(COUNT_EVICTED)
_ENTRIES, _MASK = tl.constexpr(TABLE_ENTRIES), tl.constexpr(TABLE_MASK)
_SALT, _FREE_LIST = tl.constexpr(TABLE_SALT), tl.constexpr(TABLE_FREE)
_IDS, _TABLE = tl.constexpr(CHUNK_IDS), tl.constexpr(CHUNK_TABLE)


@triton.jit(do_not_specialize=["tables"])  # type: ignore[untyped-decorator]
def _fold(counters_ptr, tables, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    table = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = table < tables
    words = counters_ptr + table.to(tl.int64) * _WORDS
    issued = tl.load(words + _ISSUED, mask=live, other=0)
    free = tl.load(words + _FREE, mask=live, other=0)
    fresh = tl.load(words + _FRESH, mask=live, other=0)
    inserted = tl.load(words + _INSERTED, mask=live, other=0)
    reused = tl.minimum(issued, free)
    tl.store(words + _FREE, free - reused, mask=live)
    tl.store(words + _FRESH, fresh + issued - reused, mask=live)
    tl.store(words + _INSERTED, inserted + issued, mask=live)
    tl.store(words + _ISSUED, issued * 0, mask=live)
    tl.store(words + _READY, issued * 0, mask=live)


@triton.jit(do_not_specialize=["n", "columns"])  # type: ignore[untyped-decorator]
def _erase(  # type: ignore[no-untyped-def]
    handles_ptr,
    size_ptr,
    tables_ptr,
    counters_ptr,
    chunks_ptr,
    n,
    columns,
    HAS_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = at < n
    if HAS_SIZE:
        live = live & (at < tl.load(size_ptr))
    handle = tl.load(handles_ptr + at, mask=live, other=-1)
    live = live & (handle >= 0)
    if any_of(live):
        table = chunk_word(chunks_ptr, columns, handle, live, _TABLE).to(tl.int32)
        # Idle lanes side with a live one, so that they do not split the program's counts.
        table = tl.where(live, table, tl.max(table, axis=0))
        home = row_address(chunks_ptr, columns, handle, 8, live, _IDS)
        id_ = tl.load(home.to(tl.pointer_type(tl.int64)), mask=live, other=0)
        entries = table_word(tables_ptr, table, live, _ENTRIES)
        mask = table_word(tables_ptr, table, live, _MASK)
        bucket = first_bucket(id_, table_word(tables_ptr, table, live, _SALT), mask)
        slot, held, gone = walk(entries, bucket, mask, stored_key(id_), live)
        gone = gone & (held == handle)
        aside = id_ <= _ERASED_KEY
        tl.store(key_at(entries, slot), tl.where(aside, _EMPTY, _ERASED_KEY), mask=gone)
        tl.store(handle_at(entries, slot), handle * 0 - 1, mask=gone & aside)
        place = count_up(counters_ptr, table, gone, _FREE)
        stack = table_word(tables_ptr, table, gone, _FREE_LIST).to(tl.pointer_type(tl.int32))
        tl.store(stack + place, handle, mask=gone)
        count_up(counters_ptr, table, gone & (aside == 0), _ERASED)
        count_up(counters_ptr, table, gone, _EVICTED)


@triton.jit(do_not_specialize=["slots", "mask", "salt"])  # type: ignore[untyped-decorator]
def _rebuild(old_ptr, new_ptr, slots, mask, salt, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < slots
    old = at * 0 + old_ptr.to(tl.int64)
    new = at * 0 + new_ptr.to(tl.int64)
    key = tl.load(key_at(old, at), mask=inside, other=_EMPTY)
    live = key > _ERASED_KEY
    if any_of(live):
        handle = tl.load(handle_at(old, at), mask=live, other=-1)
        masks = at * 0 + mask
        slot, _, _ = walk(new, first_bucket(key, salt, masks), masks, key, live)
        slot, won, _ = claim(new, slot, masks, key, live)
        tl.store(handle_at(new, slot), handle, mask=won)


@triton.jit(do_not_specialize=["table", "slots", "room"])  # type: ignore[untyped-decorator]
def _list(  # type: ignore[no-untyped-def]
    tables_ptr,
    counts_ptr,
    ends_ptr,
    out_ptr,
    size_ptr,
    table,
    slots,
    room,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    at = program * BLOCK + tl.arange(0, BLOCK)
    entries = at * 0 + table_word(tables_ptr, table, table >= 0, _ENTRIES)
    inside = at < slots + _SLOTS
    key = tl.load(key_at(entries, at), mask=inside, other=_EMPTY)
    live = (key > _ERASED_KEY).to(tl.int32)
    count = tl.sum(live, axis=0)
    if COUNT:
        tl.store(counts_ptr + program, count)
    else:
        end = tl.load(ends_ptr + program)
        rank = end - count + tl.cumsum(live, axis=0) - 1
        kept = (live > 0) & (rank < room)
        handle = tl.load(handle_at(entries, at), mask=kept, other=-1)
        tl.store(out_ptr + rank, handle, mask=kept)
        if program == tl.num_programs(0) - 1:
            tl.store(size_ptr, end)


def fold(layout: ShardLayout) -> None:
    """Start the count of issued rows at zero again, for all tables; rows in use stay the same."""
    tables = len(layout.counters_KC)
    launch(
        _fold,
        (blocks_of(tables, _FOLD_BLOCK),),
        layout.counters_KC,
        tables,
        BLOCK=_FOLD_BLOCK,
    )


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
        _erase,
        (blocks_of(m, _ERASE_BLOCK),),
        handles_M,
        handles_M if size_1 is None else size_1,
        layout.tables_KT,
        layout.counters_KC,
        layout.chunks_WC,
        m,
        layout.chunks_WC.shape[1],
        HAS_SIZE=size_1 is not None,
        BLOCK=_ERASE_BLOCK,
        num_warps=_ERASE_WARPS,
    )


def rebuild(old_entries: Tensor, new_entries: Tensor, salt: int) -> None:
    """Put all that is live in an index into an empty one, of any size that has room for it.

    salt: of the table. Erased slots are left behind: its count of them is zero afterwards.
    """
    slots = (len(old_entries) - 1) * BUCKET_SLOTS
    new_entries[-1].copy_(old_entries[-1])
    launch(
        _rebuild,
        (blocks_of(slots, _REBUILD_BLOCK),),
        old_entries,
        new_entries,
        slots,
        (len(new_entries) - 1) * BUCKET_SLOTS - 1,
        to_signed(salt),
        BLOCK=_REBUILD_BLOCK,
        num_warps=_REBUILD_WARPS,
    )


def list_handles(
    layout: ShardLayout, table: int, slots: int, out_M: Tensor, size_1: Tensor
) -> None:
    """Handles of all rows of a table in the order of their slots, to the head of int32 [M].

    slots: of the table's index. size_1: int32 [1], receives the number of rows, even if more
    than M; handles beyond M are left out.
    """
    programs = blocks_of(slots + BUCKET_SLOTS, _LIST_BLOCK)
    counts = torch.empty(programs, dtype=torch.int32, device=out_M.device)
    ends = counts
    for counting in (True, False):
        launch(
            _list,
            (programs,),
            layout.tables_KT,
            counts,
            ends,
            out_M,
            size_1,
            table,
            slots,
            out_M.numel(),
            COUNT=counting,
            BLOCK=_LIST_BLOCK,
        )
        if counting:
            ends = counts.cumsum(0, dtype=torch.int32)
