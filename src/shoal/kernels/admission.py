"""Occurrences of ids that have no row yet, on a device: counted, decided on, forgotten."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from shoal.kernels.launch import blocks_of, launch, power_of_2
from shoal.kernels.tables import (
    COUNT_LINE,
    EMPTY,
    ERASED,
    REFUSED_AT,
    CallGroups,
    ShardLayout,
    group_of,
    mix64,
    search_steps,
)

_SCRATCH = 256  # cells in which idle lanes swap: spread, so that they do not queue
SIDE_CELLS = 2 + _SCRATCH
"""Keys and cells that an index has behind its slots."""

_BLOCK = 256

_IDLE = tl.constexpr(_SCRATCH)


@triton.jit
def key_ptr(keys, slot):  # type: ignore[no-untyped-def]
    return (keys + slot * 8).to(tl.pointer_type(tl.int64))


@triton.jit
def cell_ptr(cells, cell):  # type: ignore[no-untyped-def]
    return (cells + cell * 4).to(tl.pointer_type(tl.int32))


@triton.jit
def _home(id_, salt, mask):  # type: ignore[no-untyped-def]
    """First slot of an id's walk; markers have a cell of their own behind the last slot."""
    return tl.where(id_ <= ERASED, mask + 1 + (id_ & 1), mix64(id_ ^ salt) & mask)


@triton.jit
def find_counters(keys, id_, salt, mask, live):  # type: ignore[no-untyped-def]
    """Slot of each id, -1 where it has none."""
    slot = _home(id_, salt, mask)
    side = id_ <= ERASED
    found = tl.where(live & side, slot, -1)
    seeking = live & (side == 0)
    while tl.max(seeking.to(tl.int32), axis=0) > 0:
        key = tl.load(key_ptr(keys, slot), mask=seeking, other=EMPTY)
        found = tl.where(seeking & (key == id_), slot, found)
        seeking = seeking & (key != id_) & (key != EMPTY)
        slot = tl.where(seeking, (slot + 1) & mask, slot)
    return found


@triton.jit
def claim_counters(keys, room, id_, salt, mask, live):  # type: ignore[no-untyped-def]
    """Slot of each id, one that was empty where it had none; and where that happened.

    Lanes that are not live must have keys, of any index, and its mask, `room`: swaps need some.
    """
    spare = room + 3 + (tl.arange(0, id_.shape[0]) & (_IDLE - 1)).to(tl.int64)
    slot = _home(id_, salt, mask)
    side = id_ <= ERASED
    found = tl.where(live & side, slot, 0)
    won = live & (live == 0)
    seeking = live & (side == 0)
    while tl.max(seeking.to(tl.int32), axis=0) > 0:
        key = tl.load(key_ptr(keys, slot), mask=seeking, other=0)
        free = seeking & (key == EMPTY)
        if tl.max(free.to(tl.int32), axis=0) > 0:
            # There is no mask: idle lanes compare spare keys, which stay empty, to 1.
            held = tl.atomic_cas(
                key_ptr(keys, tl.where(free, slot, spare)),
                tl.where(free, EMPTY, 1),
                tl.where(free, id_, 0),
                sem="relaxed",
            )
            won = won | (free & (held == EMPTY))
            key = tl.where(free, tl.where(held == EMPTY, id_, held), key)
        met = seeking & (key == id_)
        found = tl.where(met, slot, found)
        seeking = seeking & (met == 0)
        slot = tl.where(seeking, (slot + 1) & mask, slot)
    return found, won


@triton.jit(do_not_specialize=["salt", "slots", "mask"])  # type: ignore[untyped-decorator]
def _move(  # type: ignore[no-untyped-def]
    keys_ptr, cells_ptr, new_keys_ptr, new_cells_ptr, tally_ptr, salt, slots, mask,
    BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    occurrences = tl.load(cells_ptr + at, mask=at < slots + 2, other=0)
    key = tl.load(keys_ptr + at, mask=at < slots, other=EMPTY)
    live = (at < slots) & (key > ERASED) & (occurrences != 0)
    keys = at * 0 + new_keys_ptr.to(tl.int64)
    slot, won = claim_counters(keys, mask + at * 0, key, salt, mask + at * 0, live)
    tl.store(new_cells_ptr + slot, occurrences, mask=live)
    side = (at >= slots) & (at < slots + 2)
    tl.store(new_cells_ptr + mask + 1 + at - slots, occurrences, mask=side)
    tl.atomic_add(tally_ptr, tl.sum(won.to(tl.int64), axis=0), sem="relaxed")


def move_counters(
    keys: Tensor, cells: Tensor, new_keys: Tensor, new_cells: Tensor, tally_1: Tensor, salt: int
) -> None:
    """Copy an exact index into an empty one with room for it; adds the slots it took to a tally.

    Keys int64, all empty where new, and cells int32, zeros where new: [slots + SIDE_CELLS].
    """
    slots = len(keys) - SIDE_CELLS
    launch(
        _move, (blocks_of(slots + 2, _BLOCK),),
        keys, cells, new_keys, new_cells, tally_1, salt, slots, len(new_keys) - SIDE_CELLS - 1,
        BLOCK=_BLOCK,
    )  # fmt: skip


COUNTER_WORDS = 16
COUNTER_KIND, COUNTER_KEYS, COUNTER_CELLS = 0, 1, 2
COUNTER_MASK, COUNTER_SALT, COUNTER_DEPTH = 3, 4, 5
# Occurrences needed by slot: address, shift, mask.
COUNTER_VALUES, COUNTER_SHIFT, COUNTER_SLOTS = 6, 7, 8
NONE, EXACT, SKETCH = 0, 1, 2


_GOLDEN = -0x61C8864680B583EB

_SIGHT_WORDS = tl.constexpr(COUNTER_WORDS)
_KIND, _KEYS, _CELLS, _MASK, _SALT = map(tl.constexpr, range(5))
_DEPTH, _VALUES, _SHIFT, _SLOTS = map(tl.constexpr, range(5, 9))
_NONE, _EXACT, _SKETCH = map(tl.constexpr, range(3))

_FACTOR = tl.constexpr(_GOLDEN)
_LEAST_BLOCK = tl.constexpr(16)
_TOP = tl.constexpr((1 << 32) - 1)


@dataclass(frozen=True, slots=True)
class CounterTables:
    """words_KW: int64 [K, COUNTER_WORDS]; tallies_KC: int64 [K, 2], slots claimed and forgotten.

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
    """The given ids, their tables, and the occurrences that each needs; 1: none are kept."""
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
def _raise(cell, occurrences, live):  # type: ignore[no-untyped-def]
    """Add occurrences, 0..2^32-1, to cells that stop at 2^32 - 1."""
    before = tl.atomic_add(cell, occurrences.to(tl.int32), mask=live, sem="relaxed")
    wrapped = live & ((before.to(tl.int64) & _TOP) + occurrences > _TOP)
    tl.atomic_or(cell, before * 0 - 1, mask=wrapped, sem="relaxed")


@triton.jit(do_not_specialize=["n", "groups", "depth"])  # type: ignore[untyped-decorator]
def _add(  # type: ignore[no-untyped-def]
    ids_ptr, splits_ptr, groups_ptr, wanted_ptr, n, groups, words_ptr, counts_ptr, tallies_ptr,
    depth,
    STEPS: tl.constexpr, HAS_COUNTS: tl.constexpr, UNDO: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live, id_, table, kind, needed = _call(
        ids_ptr, splits_ptr, groups_ptr, wanted_ptr, words_ptr, n, groups, at, STEPS
    )
    live = live & (needed > 1)
    if tl.max(live.to(tl.int32), axis=0) > 0:
        occurrences = at * 0 + 1
        if HAS_COUNTS:
            occurrences = tl.load(counts_ptr + at, mask=live, other=0)
            occurrences = tl.minimum(tl.maximum(occurrences, 0), _TOP)
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
                slot = find_counters(keys, id_, salt, mask, exact)
                exact = exact & (slot >= 0)
            else:
                slot, won = claim_counters(keys, room, id_, salt, mask, exact)
                tl.atomic_add(tallies_ptr + table * 2, won.to(tl.int64), mask=won, sem="relaxed")
            cell = cell_ptr(cells, slot)
            if UNDO:
                tl.atomic_add(cell, (-occurrences).to(tl.int32), mask=exact, sem="relaxed")
            else:
                _raise(cell, occurrences, exact)
        for row in range(depth):
            level = at * 0 + row
            inside = live & (kind == _SKETCH)
            inside = inside & (level < _word(words_ptr, table, inside, _DEPTH))
            cell = cell_ptr(cells, _sketch_cell(id_, salt, mask, level))
            if UNDO:
                tl.atomic_add(cell, (-occurrences).to(tl.int32), mask=inside, sem="relaxed")
            else:
                _raise(cell, occurrences, inside)


@triton.jit(do_not_specialize=["n", "groups", "depth"])  # type: ignore[untyped-decorator]
def _admit(  # type: ignore[no-untyped-def]
    ids_ptr, splits_ptr, groups_ptr, wanted_ptr, n, groups, words_ptr, admitted_ptr, depth,
    STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
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
        slot = find_counters(_word(words_ptr, table, exact, _KEYS), id_, salt, mask, exact)
        there = exact & (slot >= 0)
        occurrences = tl.load(cell_ptr(cells, slot), mask=there, other=0).to(tl.int64) & _TOP
        total = tl.where(exact, occurrences, total)
        for row in range(depth):
            level = at * 0 + row
            inside = counted & (kind == _SKETCH)
            inside = inside & (level < _word(words_ptr, table, inside, _DEPTH))
            cell = cell_ptr(cells, _sketch_cell(id_, salt, mask, level))
            occurrences = tl.load(cell, mask=inside, other=0).to(tl.int64) & _TOP
            total = tl.where(inside, tl.minimum(total, occurrences), total)
    tl.store(admitted_ptr + at, (live & (total >= needed)).to(tl.int8), mask=at < n)


@triton.jit(do_not_specialize=["n", "groups"])  # type: ignore[untyped-decorator]
def _forget(  # type: ignore[no-untyped-def]
    ids_ptr, splits_ptr, groups_ptr, wanted_ptr, n, groups, words_ptr, tallies_ptr,
    STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live, id_, table, kind, needed = _call(
        ids_ptr, splits_ptr, groups_ptr, wanted_ptr, words_ptr, n, groups, at, STEPS
    )
    live = live & (needed > 1) & (kind == _EXACT)
    mask = _word(words_ptr, table, live, _MASK)
    keys = _word(words_ptr, table, live, _KEYS)
    slot = find_counters(keys, id_, _word(words_ptr, table, live, _SALT), mask, live)
    live = live & (slot >= 0)
    cells = _word(words_ptr, table, live, _CELLS)
    # Of an id that comes twice, one lane takes the count; ids of no count stay, which costs a slot.
    before = tl.atomic_xchg(cell_ptr(cells, slot), slot.to(tl.int32) * 0, mask=live)
    taken = live & (before != 0) & (slot <= mask)
    tl.store(key_ptr(keys, slot), slot * 0 + ERASED, mask=taken)
    tl.atomic_add(tallies_ptr + table * 2 + 1, taken.to(tl.int64), mask=taken, sem="relaxed")


def _launch(
    kernel: Any,
    call: CallGroups,
    wanted_N: Tensor,
    *rest: Any,
    block: int = _BLOCK,
    **constants: bool,
) -> None:
    """Start a kernel over the positions of a call; `rest` follows what all of these read."""
    n, groups = call.ids_N.numel(), call.tables_G.numel()
    if n == 0:
        return
    launch(
        kernel, (blocks_of(n, block),),
        call.ids_N, call.splits_G1, call.tables_G, wanted_N.view(torch.int8), n, groups, *rest,
        STEPS=search_steps(groups), BLOCK=block, **constants,
    )  # fmt: skip


def add_occurrences(
    counters: CounterTables,
    call: CallGroups,
    counts_N: Tensor | None,
    wanted_N: Tensor,
    *,
    undo: bool = False,
) -> None:
    """Add the occurrences of a call, int64 [N] or 1 each, at its `wanted_N` positions, bool [N].

    With `undo`, take back what the same arguments have added. Every exact table has empty slots
    for the ids of the call that are its own.
    """
    counts = call.ids_N if counts_N is None else counts_N
    rest = counters.words_KW, counts, counters.tallies_KC, counters.depth
    _launch(_add, call, wanted_N, *rest, HAS_COUNTS=counts_N is not None, UNDO=undo)


def admit(counters: CounterTables, call: CallGroups, wanted_N: Tensor, admitted_N: Tensor) -> None:
    """Which of the `wanted_N` positions have been seen often enough, to bool [N]."""
    rest = counters.words_KW, admitted_N.view(torch.int8), counters.depth
    _launch(_admit, call, wanted_N, *rest)


def forget_occurrences(counters: CounterTables, call: CallGroups, wanted_N: Tensor) -> None:
    """Drop exact counts of the ids at `wanted_N` positions; a sketch cannot forget."""
    _launch(_forget, call, wanted_N, counters.words_KW, counters.tallies_KC)


_REFUSALS_BLOCK = 128


@triton.jit  # type: ignore[untyped-decorator]
def _table_of(splits_ptr, groups_ptr, groups, at, live, STEPS: tl.constexpr):  # type: ignore[no-untyped-def]
    group = group_of(splits_ptr, groups, at, live, STEPS)
    return tl.load(groups_ptr + group, mask=live, other=0).to(tl.int64)


@triton.jit(do_not_specialize=["n", "groups", "mask"])  # type: ignore[untyped-decorator]
def _count(  # type: ignore[no-untyped-def]
    ids_ptr, splits_ptr, groups_ptr, wanted_ptr, n, groups, admitted_ptr, owner_ptr, counters_ptr,
    mask,
    STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    seeking = at < n
    seeking = seeking & (tl.load(wanted_ptr + at, mask=seeking, other=0) != 0)
    seeking = seeking & (tl.load(admitted_ptr + at, mask=seeking, other=1) == 0)
    if tl.max(seeking.to(tl.int32), axis=0) > 0:
        id_ = tl.load(ids_ptr + at, mask=seeking, other=0)
        table = _table_of(splits_ptr, groups_ptr, groups, at, seeking, STEPS)
        slot = mix64(id_ ^ mix64(table)) & mask
        key = (at + 1).to(tl.int32)
        first = seeking & (seeking == 0)
        while tl.max(seeking.to(tl.int32), axis=0) > 0:
            # No slot ever holds -1: lanes with nothing to claim compare against it.
            held = tl.atomic_cas(
                owner_ptr + slot, tl.where(seeking, 0, -1).to(tl.int32), key, sem="relaxed"
            )
            first = first | (seeking & (held == 0))
            taken = seeking & (held > 0)
            other = (tl.where(taken, held, 1) - 1).to(tl.int64)
            same = taken & (tl.load(ids_ptr + other, mask=taken, other=0) == id_)
            same = same & (_table_of(splits_ptr, groups_ptr, groups, other, taken, STEPS) == table)
            seeking = taken & (same == 0)
            slot = tl.where(seeking, (slot + 1) & mask, slot)
        refused = counters_ptr + table * COUNT_LINE + REFUSED_AT
        tl.atomic_add(refused, first.to(tl.int64), mask=first, sem="relaxed")


def count_refused(
    layout: ShardLayout, call: CallGroups, wanted_N: Tensor, admitted_N: Tensor
) -> None:
    """Add to `COUNT_REFUSED` the distinct ids at positions wanted, but not admitted; bool [N]."""
    capacity = power_of_2(2 * max(call.ids_N.numel(), 1))
    owner = torch.zeros(capacity, dtype=torch.int32, device=call.ids_N.device)
    rest = admitted_N.view(torch.int8), owner, layout.counters_KC, capacity - 1
    _launch(_count, call, wanted_N, *rest, block=_REFUSALS_BLOCK)
