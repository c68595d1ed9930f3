"""Sights of ids that have no row yet, on a device: counted, decided on, forgotten.

What kernels need to know of a table is one line of `SIGHT_*` words. Tables count exactly, in an
index of their own (`shoal.kernels.sight_index`), or by a sketch: `depth` rows of `width` uint32
cells; its formula is in `shoal.rules.admission`.

Counts stop at 2^32 - 1. An addition that wraps a cell around says so to the lane that made it, and
that lane sets all bits of the cell; whoever adds to it later wraps it again and does the same, so
in whatever order lanes meet, a cell ends at 2^32 - 1 if and only if its sum is that or more.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from shoal.kernels.launching import launch
from shoal.kernels.row_tiles import blocks_of
from shoal.kernels.sight_index import cell_ptr, claim_sights, find_sights, key_ptr
from shoal.kernels.table_layout import (
    ERASED_KEY,
    CallGroups,
    group_of,
    mix64,
    search_steps,
)

__all__ = [
    "EXACT",
    "NONE",
    "SIGHT_CELLS",
    "SIGHT_DEPTH",
    "SIGHT_KEYS",
    "SIGHT_KIND",
    "SIGHT_MASK",
    "SIGHT_SALT",
    "SIGHT_SHIFT",
    "SIGHT_SLOTS",
    "SIGHT_VALUES",
    "SIGHT_WORDS",
    "SKETCH",
    "SightTables",
    "add_sights",
    "admit",
    "forget_sights",
]

SIGHT_WORDS = 16
SIGHT_KIND = 0
SIGHT_KEYS, SIGHT_CELLS, SIGHT_MASK, SIGHT_SALT, SIGHT_DEPTH = 1, 2, 3, 4, 5
SIGHT_VALUES, SIGHT_SHIFT, SIGHT_SLOTS = 6, 7, 8  # sights needed by slot: address, shift, mask
NONE, EXACT, SKETCH = 0, 1, 2


_BLOCK = 256
_GOLDEN = -0x61C8864680B583EB

_SIGHT_WORDS = tl.constexpr(SIGHT_WORDS)
_KIND, _KEYS = tl.constexpr(SIGHT_KIND), tl.constexpr(SIGHT_KEYS)
_CELLS, _MASK = tl.constexpr(SIGHT_CELLS), tl.constexpr(SIGHT_MASK)
_SALT, _DEPTH = tl.constexpr(SIGHT_SALT), tl.constexpr(SIGHT_DEPTH)
_VALUES, _SHIFT = tl.constexpr(SIGHT_VALUES), tl.constexpr(SIGHT_SHIFT)
_SLOTS = tl.constexpr(SIGHT_SLOTS)
_NONE, _EXACT, _SKETCH = tl.constexpr(NONE), tl.constexpr(EXACT), tl.constexpr(SKETCH)
_ERASED = tl.constexpr(ERASED_KEY)
_FACTOR = tl.constexpr(_GOLDEN)
_LEAST_BLOCK = tl.constexpr(16)
_TOP = tl.constexpr((1 << 32) - 1)


@dataclass(frozen=True, slots=True)
class SightTables:
    """words_KW: int64 [K, SIGHT_WORDS]; tallies_KC: int64 [K, 2], slots claimed and forgotten.

    depth: the deepest sketch, 0 without one.
    """

    words_KW: Tensor
    tallies_KC: Tensor
    depth: int


@triton.jit  # type: ignore[untyped-decorator]
def _word(words_ptr, table, live, WORD: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.load(words_ptr + table * _SIGHT_WORDS + WORD, mask=live, other=0)


@triton.jit  # type: ignore[untyped-decorator]
def _call(  # type: ignore[no-untyped-def]
    ids_ptr, splits_ptr, groups_ptr, wanted_ptr, words_ptr, n, groups, at, STEPS: tl.constexpr
):
    """Ids that are asked about, their tables, and the sights that each needs; 1: none are kept."""
    live = at < n
    live = live & (tl.load(wanted_ptr + at, mask=live, other=0) != 0)
    id_ = tl.load(ids_ptr + at, mask=live, other=0)
    group = group_of(splits_ptr, groups, at, live, STEPS)
    table = tl.load(groups_ptr + group, mask=live, other=0).to(tl.int64)
    kind = _word(words_ptr, table, live, _KIND)
    counted = live & (kind != _NONE)
    slot = id_ >> _word(words_ptr, table, counted, _SHIFT)
    slot = slot & _word(words_ptr, table, counted, _SLOTS)
    values = _word(words_ptr, table, counted, _VALUES) + slot * 8
    needed = tl.load(values.to(tl.pointer_type(tl.int64)), mask=counted, other=1)
    return live, id_, table, kind, needed


@triton.jit
def _sketch_cell(id_, salt, mask, row):  # type: ignore[no-untyped-def]
    hashed = mix64(id_ ^ salt)
    low = tl.minimum(mask, tl.maximum((mask + 1) >> 16, _LEAST_BLOCK) - 1)  # of a block
    first = ((((hashed >> 48) & 0xFFFF) * (mask + 1)) >> 16) & (mask - low)
    return row * (mask + 1) + first + (mix64(hashed ^ ((row + 1) * _FACTOR)) & low)


@triton.jit
def _raise(cell, sights, live):  # type: ignore[no-untyped-def]
    """Add sights, 0..2^32-1, to cells that stop at 2^32 - 1."""
    before = tl.atomic_add(cell, sights.to(tl.int32), mask=live, sem="relaxed")
    wrapped = live & ((before.to(tl.int64) & _TOP) + sights > _TOP)
    tl.atomic_or(cell, before * 0 - 1, mask=wrapped, sem="relaxed")


@triton.jit(do_not_specialize=["n", "groups", "depth"])  # type: ignore[untyped-decorator]
def _add(  # type: ignore[no-untyped-def]
    ids_ptr,
    splits_ptr,
    groups_ptr,
    wanted_ptr,
    counts_ptr,
    words_ptr,
    tallies_ptr,
    n,
    groups,
    depth,
    STEPS: tl.constexpr,
    HAS_COUNTS: tl.constexpr,
    UNDO: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live, id_, table, kind, needed = _call(
        ids_ptr, splits_ptr, groups_ptr, wanted_ptr, words_ptr, n, groups, at, STEPS
    )
    live = live & (needed > 1)
    if tl.max(live.to(tl.int32), axis=0) > 0:
        sights = at * 0 + 1
        if HAS_COUNTS:
            sights = tl.load(counts_ptr + at, mask=live, other=0)
            sights = tl.minimum(tl.maximum(sights, 0), _TOP)
        mask = _word(words_ptr, table, live, _MASK)
        salt = _word(words_ptr, table, live, _SALT)
        cells = _word(words_ptr, table, live, _CELLS)
        exact = live & (kind == _EXACT)
        if tl.max(exact.to(tl.int32), axis=0) > 0:
            # Lanes without a table of their own borrow the keys of one that has: swaps need some.
            lender = tl.max(tl.where(exact, table, -1), axis=0)
            keys = _word(words_ptr, tl.where(exact, table, lender), at >= 0, _KEYS)
            room = _word(words_ptr, tl.where(exact, table, lender), at >= 0, _MASK)
            if UNDO:
                slot = find_sights(keys, id_, salt, mask, exact)
                exact = exact & (slot >= 0)
            else:
                slot, won = claim_sights(keys, room, id_, salt, mask, exact)
                tl.atomic_add(tallies_ptr + table * 2, won.to(tl.int64), mask=won, sem="relaxed")
            cell = cell_ptr(cells, slot)
            if UNDO:
                tl.atomic_add(cell, (-sights).to(tl.int32), mask=exact, sem="relaxed")
            else:
                _raise(cell, sights, exact)
        for row in range(depth):
            level = at * 0 + row
            inside = live & (kind == _SKETCH)
            inside = inside & (level < _word(words_ptr, table, inside, _DEPTH))
            cell = cell_ptr(cells, _sketch_cell(id_, salt, mask, level))
            if UNDO:
                tl.atomic_add(cell, (-sights).to(tl.int32), mask=inside, sem="relaxed")
            else:
                _raise(cell, sights, inside)


@triton.jit(do_not_specialize=["n", "groups", "depth"])  # type: ignore[untyped-decorator]
def _admit(  # type: ignore[no-untyped-def]
    ids_ptr,
    splits_ptr,
    groups_ptr,
    wanted_ptr,
    admitted_ptr,
    words_ptr,
    n,
    groups,
    depth,
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live, id_, table, kind, needed = _call(
        ids_ptr, splits_ptr, groups_ptr, wanted_ptr, words_ptr, n, groups, at, STEPS
    )
    counted = live & (needed > 1)
    total = tl.where(counted, _TOP, needed).to(tl.int64)
    if tl.max(counted.to(tl.int32), axis=0) > 0:
        mask = _word(words_ptr, table, counted, _MASK)
        salt = _word(words_ptr, table, counted, _SALT)
        cells = _word(words_ptr, table, counted, _CELLS)
        exact = counted & (kind == _EXACT)
        slot = find_sights(_word(words_ptr, table, exact, _KEYS), id_, salt, mask, exact)
        there = exact & (slot >= 0)
        sights = tl.load(cell_ptr(cells, slot), mask=there, other=0).to(tl.int64) & _TOP
        total = tl.where(exact, sights, total)
        for row in range(depth):
            level = at * 0 + row
            inside = counted & (kind == _SKETCH)
            inside = inside & (level < _word(words_ptr, table, inside, _DEPTH))
            cell = cell_ptr(cells, _sketch_cell(id_, salt, mask, level))
            sights = tl.load(cell, mask=inside, other=0).to(tl.int64) & _TOP
            total = tl.where(inside, tl.minimum(total, sights), total)
    tl.store(admitted_ptr + at, (live & (total >= needed)).to(tl.int8), mask=at < n)


@triton.jit(do_not_specialize=["n", "groups"])  # type: ignore[untyped-decorator]
def _forget(  # type: ignore[no-untyped-def]
    ids_ptr,
    splits_ptr,
    groups_ptr,
    wanted_ptr,
    words_ptr,
    tallies_ptr,
    n,
    groups,
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live, id_, table, kind, needed = _call(
        ids_ptr, splits_ptr, groups_ptr, wanted_ptr, words_ptr, n, groups, at, STEPS
    )
    live = live & (needed > 1) & (kind == _EXACT)
    mask = _word(words_ptr, table, live, _MASK)
    keys = _word(words_ptr, table, live, _KEYS)
    slot = find_sights(keys, id_, _word(words_ptr, table, live, _SALT), mask, live)
    live = live & (slot >= 0)
    cells = _word(words_ptr, table, live, _CELLS)
    # Of an id that comes twice, one lane takes the count; ids of no count stay, which costs a slot.
    before = tl.atomic_xchg(cell_ptr(cells, slot), slot.to(tl.int32) * 0, mask=live)
    taken = live & (before != 0) & (slot <= mask)
    tl.store(key_ptr(keys, slot), slot * 0 + _ERASED, mask=taken)
    tl.atomic_add(tallies_ptr + table * 2 + 1, taken.to(tl.int64), mask=taken, sem="relaxed")


def add_sights(
    sights: SightTables,
    call: CallGroups,
    counts_N: Tensor | None,
    wanted_N: Tensor,
    *,
    undo: bool = False,
) -> None:
    """Add the sights of a call, int64 [N] or 1 each, at its `wanted_N` positions, bool [N].

    With `undo`, take back what the same arguments have added. Every exact table has empty slots
    for the ids of the call that are its own.
    """
    n = call.ids_N.numel()
    if n == 0:
        return
    launch(
        _add,
        (blocks_of(n, _BLOCK),),
        call.ids_N,
        call.splits_G1,
        call.tables_G,
        wanted_N.view(torch.int8),
        call.ids_N if counts_N is None else counts_N,
        sights.words_KW,
        sights.tallies_KC,
        n,
        call.tables_G.numel(),
        sights.depth,
        STEPS=search_steps(call.tables_G.numel()),
        HAS_COUNTS=counts_N is not None,
        UNDO=undo,
        BLOCK=_BLOCK,
    )


def admit(sights: SightTables, call: CallGroups, wanted_N: Tensor, admitted_N: Tensor) -> None:
    """Which of the `wanted_N` positions have been seen often enough, to bool [N]."""
    n = call.ids_N.numel()
    if n == 0:
        return
    launch(
        _admit,
        (blocks_of(n, _BLOCK),),
        call.ids_N,
        call.splits_G1,
        call.tables_G,
        wanted_N.view(torch.int8),
        admitted_N.view(torch.int8),
        sights.words_KW,
        n,
        call.tables_G.numel(),
        sights.depth,
        STEPS=search_steps(call.tables_G.numel()),
        BLOCK=_BLOCK,
    )


def forget_sights(sights: SightTables, call: CallGroups, wanted_N: Tensor) -> None:
    """Drop exact counts of the ids at `wanted_N` positions; a sketch cannot forget."""
    n = call.ids_N.numel()
    if n == 0:
        return
    launch(
        _forget,
        (blocks_of(n, _BLOCK),),
        call.ids_N,
        call.splits_G1,
        call.tables_G,
        wanted_N.view(torch.int8),
        sights.words_KW,
        sights.tallies_KC,
        n,
        call.tables_G.numel(),
        STEPS=search_steps(call.tables_G.numel()),
        BLOCK=_BLOCK,
    )
