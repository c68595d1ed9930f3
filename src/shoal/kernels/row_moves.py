"""Rows on their way between slots of the cache and their homes in page-locked host memory.

Kernels read and write host memory themselves, 16 bytes a thread and access: rows are small and lie
anywhere, so copy engines, which want long stretches, are no help.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from shoal.kernels.launching import launch
from shoal.kernels.row_cache import TALLY_WRITTEN, VACANT, CacheMaps, Pool, programs_of
from shoal.kernels.row_form import RowForm
from shoal.kernels.table_layout import CHUNK_STATE, CHUNK_WEIGHTS, ShardLayout, row_address

__all__ = ["Moves", "move", "sweep"]

_BLOCK = 1024
_TILE_BYTES = 8192
_MOST_WORDS = 128  # of 8 bytes: columns of a tile
_MOST_ROWS = 64
_PROGRAMS = 2  # on each multiprocessor: enough for the bus, and leaves room beside a model

_WEIGHTS, _STATE = tl.constexpr(CHUNK_WEIGHTS), tl.constexpr(CHUNK_STATE)
_WRITTEN = tl.constexpr(TALLY_WRITTEN)
_NO_HOME = tl.constexpr(VACANT)


@dataclass(frozen=True, slots=True)
class Moves:
    """Rows to be moved through slots; the first `count` of each list count.

    count_1: int32 [1]. slots_M: int32. outs_M: int32, home handle that the slot's present content
    goes to, or -1. ins_M: int32, home handle that its next content comes from; None for none.
    """

    count_1: Tensor
    slots_M: Tensor
    outs_M: Tensor
    ins_M: Tensor | None


@triton.jit(do_not_specialize=["first", "slots", "keep_from", "base"])  # type: ignore[untyped-decorator]
def _collect(  # type: ignore[no-untyped-def]
    payload_ptr,
    home_ptr,
    used_ptr,
    dirty_ptr,
    tallies_ptr,
    count_ptr,
    slots_ptr,
    outs_ptr,
    first,
    slots,
    keep_from,
    base,
    FORGET: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Lists slots whose rows go home; with FORGET they lose their rows, dirty or not."""
    for tile in range(tl.program_id(0), tl.cdiv(slots, BLOCK), tl.num_programs(0)):
        at = tile * BLOCK + tl.arange(0, BLOCK)
        slot = first + at
        live = at < slots
        home = tl.load(home_ptr + slot, mask=live, other=-1)
        used = tl.load(used_ptr + slot, mask=live, other=0)
        dirty = tl.load(dirty_ptr + slot, mask=live, other=0)
        held = live & (home >= 0) & (used < keep_from)
        goes = held & (dirty != 0)
        count = tl.sum(goes.to(tl.int32), axis=0)
        if count > 0:
            start = tl.atomic_add(count_ptr, count, sem="relaxed")
            place = start + tl.cumsum(goes.to(tl.int32), axis=0) - 1
            tl.store(slots_ptr + place, slot, mask=goes)
            tl.store(outs_ptr + place, home, mask=goes)
            tl.store(dirty_ptr + slot, (home * 0).to(tl.int8), mask=goes)
            tl.atomic_add(tallies_ptr + _WRITTEN, count.to(tl.int64), sem="relaxed")
        if FORGET:
            tl.store(payload_ptr + home, home * 0 - 1, mask=held)
            tl.store(home_ptr + slot, home * 0 + _NO_HOME, mask=held)


@triton.jit
def _words_at(address_R, column_C):  # type: ignore[no-untyped-def]
    # What is known of an integer is lost as it becomes a pointer, so the pointer is told.
    row = tl.multiple_of(address_R.to(tl.pointer_type(tl.int64)), 16)
    return row[:, None] + column_C[None, :]


@triton.jit  # type: ignore[untyped-decorator]
def _exchange(  # type: ignore[no-untyped-def]
    chunks_ptr,
    columns,
    payload,
    out,
    new,
    live,
    WORD: tl.constexpr,
    WORDS: tl.constexpr,
    FETCH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Rows of slots go to their homes, and others come in their place."""
    leaves = live & (out >= 0)
    slot_at = row_address(chunks_ptr, columns, payload, WORDS * 8, live, WORD)
    out_at = row_address(chunks_ptr, columns, out, WORDS * 8, leaves, WORD)
    if FETCH:
        new_at = row_address(chunks_ptr, columns, new, WORDS * 8, live, WORD)
    for start in range(0, WORDS, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = live[:, None] & (column < WORDS)[None, :]
        leaving = leaves[:, None] & (column < WORDS)[None, :]
        kept = tl.load(_words_at(slot_at, column), mask=leaving, other=0)
        if FETCH:
            came = tl.load(_words_at(new_at, column), mask=inside, other=0)
            # All of the old row is read before any of it is overwritten.
            tl.debug_barrier()
            tl.store(_words_at(slot_at, column), came, mask=inside)
        tl.store(_words_at(out_at, column), kept, mask=leaving)


@triton.jit(do_not_specialize=["columns", "base"])  # type: ignore[untyped-decorator]
def _move(  # type: ignore[no-untyped-def]
    chunks_ptr,
    columns,
    count_ptr,
    slots_ptr,
    outs_ptr,
    ins_ptr,
    base,
    WEIGHT_WORDS: tl.constexpr,
    STATE_WORDS: tl.constexpr,
    FETCH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    count = tl.load(count_ptr)
    for tile in range(tl.program_id(0), tl.cdiv(count, ROWS), tl.num_programs(0)):
        at = tile * ROWS + tl.arange(0, ROWS)
        live = at < count
        payload = tl.load(slots_ptr + at, mask=live, other=0) + base
        out = tl.load(outs_ptr + at, mask=live, other=-1)
        new = out
        if FETCH:
            new = tl.load(ins_ptr + at, mask=live, other=0)
        _exchange(
            chunks_ptr, columns, payload, out, new, live, _WEIGHTS, WEIGHT_WORDS, FETCH, BLOCK_W
        )
        if STATE_WORDS > 0:
            _exchange(
                chunks_ptr, columns, payload, out, new, live, _STATE, STATE_WORDS, FETCH, BLOCK_S
            )


def _block(words: int) -> int:
    return min(int(triton.next_power_of_2(max(words, 1))), _MOST_WORDS)


def move(layout: ShardLayout, maps: CacheMaps, form: RowForm, moves: Moves) -> None:
    """Copy rows between slots and homes, both ways at once: the bus carries both ways at once."""
    weight_words, state_words = form.weight_bytes // 8, form.state_bytes // 8
    block_w, block_s = _block(weight_words), _block(state_words)
    rows = min(max(_TILE_BYTES // (8 * max(block_w, block_s)), 1), _MOST_ROWS)
    slots_M = moves.slots_M
    if slots_M.numel() == 0:
        return
    with torch.cuda.device_of(slots_M):  # type: ignore[no-untyped-call]
        launch(
            _move,
            (programs_of(triton.cdiv(slots_M.numel(), rows), slots_M.device, _PROGRAMS),),
            layout.chunks_WC,
            layout.chunks_WC.shape[1],
            moves.count_1,
            slots_M,
            moves.outs_M,
            slots_M if moves.ins_M is None else moves.ins_M,
            maps.base,
            WEIGHT_WORDS=weight_words,
            STATE_WORDS=state_words,
            FETCH=moves.ins_M is not None,
            ROWS=rows,
            BLOCK_W=block_w,
            BLOCK_S=block_s,
        )


def sweep(
    layout: ShardLayout, maps: CacheMaps, form: RowForm, pool: Pool, keep_from: int, *, forget: bool
) -> None:
    """Bring rows of a pool that were last used before tick `keep_from` home where they are dirty.

    forget: take their slots from them, too.
    """
    if pool.slots == 0:
        return
    device = maps.home_S.device
    count_1 = torch.zeros(1, dtype=torch.int32, device=device)
    slots_M, outs_M = torch.empty(2, pool.slots, dtype=torch.int32, device=device)
    with torch.cuda.device_of(count_1):  # type: ignore[no-untyped-call]
        launch(
            _collect,
            (programs_of(triton.cdiv(pool.slots, _BLOCK), device),),
            maps.payload_H,
            maps.home_S,
            maps.used_S,
            maps.dirty_S,
            maps.tallies,
            count_1,
            slots_M,
            outs_M,
            pool.first,
            pool.slots,
            keep_from,
            maps.base,
            FORGET=forget,
            BLOCK=_BLOCK,
        )
    move(layout, maps, form, Moves(count_1, slots_M, outs_M, None))
