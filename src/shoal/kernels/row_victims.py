"""Which rows of a batch get a slot of the cache, and which rows lose theirs, without a host wait.

Rows that have a slot are stamped with the batch's tick; the others are listed. Slots that no live
batch uses are then sorted into 255 classes by how soon their rows may go, and the missing rows
take the slots of the lowest classes, as many as it needs. Among slots of one class, and among
missing rows when there are too few slots, timing decides.

LRU: classes are ages, exact up to 127 ticks, to a sixteenth beyond. LFU: classes are counts of
uses (a batch is one use), to half an octave, and within them ages to an octave; a count is halved
for every `HALVED_AFTER` ticks without use.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from shoal.kernels.launching import launch
from shoal.kernels.row_cache import (
    TALLY_HITS,
    TALLY_MISSES,
    TALLY_PLACED,
    TALLY_WRITTEN,
    VACANT,
    CacheMaps,
    Pool,
    programs_of,
)
from shoal.kernels.row_form import RowForm
from shoal.kernels.row_moves import Moves, move
from shoal.kernels.runs import Runs
from shoal.kernels.step_tiles import run_words, runs_listed
from shoal.kernels.table_layout import ShardLayout

__all__ = ["HALVED_AFTER", "admit"]

HALVED_AFTER = 64

_BLOCK = 1024
_CLASSES = 256  # the last one: slots that may not be taken
_WORDS = 260
_NEED, _BELOW, _AT, _MOVED = 256, 257, 258, 259

_HALVED = tl.constexpr(HALVED_AFTER)
_MOST_USES = tl.constexpr(1 << 16)
_NO_HOME = tl.constexpr(VACANT)
_HITS, _MISSES = tl.constexpr(TALLY_HITS), tl.constexpr(TALLY_MISSES)
_PLACED, _WRITTEN = tl.constexpr(TALLY_PLACED), tl.constexpr(TALLY_WRITTEN)
_CLASS_COUNT = tl.constexpr(_CLASSES)
_NEED_WORD, _BELOW_WORD = tl.constexpr(_NEED), tl.constexpr(_BELOW)
_AT_WORD, _MOVED_WORD = tl.constexpr(_AT), tl.constexpr(_MOVED)


@triton.jit
def _aged(uses, age):  # type: ignore[no-untyped-def]
    return uses >> tl.minimum(age // _HALVED, 31)


@triton.jit
def _octaves(value):  # type: ignore[no-untyped-def]
    """The bits of positive numbers as float32: their logarithm is in the highest."""
    return value.to(tl.float32).to(tl.int32, bitcast=True) - (127 << 23)


@triton.jit  # type: ignore[untyped-decorator]
def _class_of(home, used, uses_ptr, slot, live, tick, keep_from, LFU: tl.constexpr):  # type: ignore[no-untyped-def]
    """0 for vacant slots, 255 for those that may not be taken, else the higher the later."""
    age = tl.maximum(tick - used, 1)
    if LFU:
        uses = _aged(tl.load(uses_ptr + slot, mask=live, other=0), age)
        often = tl.minimum(_octaves(tl.maximum(uses, 1)) >> 22, 30)
        late = 7 - tl.minimum(_octaves(age) >> 23, 7)
        class_ = 1 + often * 8 + late
    else:
        old = (_octaves(age) >> 19) + 16
        class_ = 254 - tl.minimum(tl.where(age < 128, age, old), 253)
    class_ = tl.where(used < keep_from, class_, 255)
    return tl.where(home == _NO_HOME, 0, tl.where(live & (home >= 0), class_, 255))


@triton.jit(do_not_specialize=["room", "form", "first_run", "last_run", "base", "tick"])  # type: ignore[untyped-decorator]
def _mark(  # type: ignore[no-untyped-def]
    runs_ptr,
    room,
    cursors_ptr,
    form,
    first_run,
    last_run,
    payload_ptr,
    used_ptr,
    uses_ptr,
    tallies_ptr,
    base,
    tick,
    work_ptr,
    missing_ptr,
    LFU: tl.constexpr,
    BLOCK: tl.constexpr,
):
    size = runs_listed(cursors_ptr, form, first_run)
    for tile in range(tl.program_id(0), tl.cdiv(size, BLOCK), tl.num_programs(0)):
        row = tile * BLOCK + tl.arange(0, BLOCK)
        live = row < size
        handle, _first, _items, _length = run_words(
            runs_ptr, room, cursors_ptr, form, first_run, last_run, row, live
        )
        payload = tl.load(payload_ptr + handle, mask=live, other=-1)
        hit = live & (payload >= 0)
        slot = payload - base
        if LFU:
            age = tick - tl.load(used_ptr + slot, mask=hit, other=0)
            uses = _aged(tl.load(uses_ptr + slot, mask=hit, other=0), age) + 1
            tl.store(uses_ptr + slot, tl.minimum(uses, _MOST_USES), mask=hit)
        tl.store(used_ptr + slot, row * 0 + tick, mask=hit)
        misses = (live & (payload < 0)).to(tl.int32)
        hits, count = tl.sum(hit.to(tl.int32), axis=0), tl.sum(misses, axis=0)
        start = tl.atomic_add(work_ptr + _NEED_WORD, count, sem="relaxed")
        place = start + tl.cumsum(misses, axis=0) - 1
        tl.store(missing_ptr + place, handle, mask=misses > 0)
        tl.atomic_add(tallies_ptr + _HITS, hits.to(tl.int64), sem="relaxed")
        tl.atomic_add(tallies_ptr + _MISSES, count.to(tl.int64), sem="relaxed")


@triton.jit(do_not_specialize=["first", "slots", "tick", "keep_from"])  # type: ignore[untyped-decorator]
def _classes(  # type: ignore[no-untyped-def]
    home_ptr,
    used_ptr,
    uses_ptr,
    first,
    slots,
    tick,
    keep_from,
    work_ptr,
    LFU: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Counts the slots of each class, if any row is missing."""
    size = tl.where(tl.load(work_ptr + _NEED_WORD) > 0, slots, 0)
    found = tl.zeros([_CLASS_COUNT], tl.int32)
    for tile in range(tl.program_id(0), tl.cdiv(size, BLOCK), tl.num_programs(0)):
        at = tile * BLOCK + tl.arange(0, BLOCK)
        slot, live = first + at, at < size
        home = tl.load(home_ptr + slot, mask=live, other=-2)
        used = tl.load(used_ptr + slot, mask=live, other=0)
        class_ = _class_of(home, used, uses_ptr, slot, live, tick, keep_from, LFU)
        found += tl.histogram(class_, _CLASS_COUNT)
    class_at = tl.arange(0, _CLASS_COUNT)
    tl.atomic_add(work_ptr + class_at, found, mask=found > 0, sem="relaxed")


@triton.jit
def _cut(work_ptr, need):  # type: ignore[no-untyped-def]
    """The class that goes in part, if any does, the slots below it, which go, and all that go."""
    class_at = tl.arange(0, _CLASS_COUNT)
    counts = tl.load(work_ptr + class_at, mask=class_at < 255, other=0)
    ends = tl.cumsum(counts, axis=0)
    edge = tl.sum((ends < need).to(tl.int32), axis=0)
    below = tl.max(tl.where(ends < need, ends, 0), axis=0)
    return edge, below, tl.minimum(need, tl.max(ends, axis=0))


@triton.jit(do_not_specialize=["first", "slots", "base", "tick", "keep_from"])  # type: ignore[untyped-decorator]
def _take(  # type: ignore[no-untyped-def]
    payload_ptr,
    home_ptr,
    used_ptr,
    uses_ptr,
    dirty_ptr,
    tallies_ptr,
    first,
    slots,
    base,
    tick,
    keep_from,
    work_ptr,
    missing_ptr,
    slots_ptr,
    outs_ptr,
    LFU: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gives slots to missing rows, in the maps, and lists what is to be moved."""
    need = tl.load(work_ptr + _NEED_WORD)
    edge, below, moved = _cut(work_ptr, need)
    if tl.program_id(0) == 0:
        tl.store(work_ptr + _MOVED_WORD, moved)
        tl.atomic_add(tallies_ptr + _PLACED, moved.to(tl.int64), sem="relaxed")
    size = tl.where(moved > 0, slots, 0)
    for tile in range(tl.program_id(0), tl.cdiv(size, BLOCK), tl.num_programs(0)):
        at = tile * BLOCK + tl.arange(0, BLOCK)
        slot, live = first + at, at < size
        home = tl.load(home_ptr + slot, mask=live, other=-2)
        used = tl.load(used_ptr + slot, mask=live, other=0)
        class_ = _class_of(home, used, uses_ptr, slot, live, tick, keep_from, LFU)
        class_ = tl.where(live, class_, 255)
        under = (class_ < edge) & (class_ < 255)
        on_edge = (class_ == edge) & (class_ < 255)
        unders, edges = tl.sum(under.to(tl.int32), axis=0), tl.sum(on_edge.to(tl.int32), axis=0)
        if unders + edges > 0:
            under_from = tl.atomic_add(work_ptr + _BELOW_WORD, unders, sem="relaxed")
            edge_from = tl.atomic_add(work_ptr + _AT_WORD, edges, sem="relaxed")
            under_at = under_from + tl.cumsum(under.to(tl.int32), axis=0) - 1
            edge_at = below + edge_from + tl.cumsum(on_edge.to(tl.int32), axis=0) - 1
            place = tl.where(under, under_at, edge_at)
            goes = under | (on_edge & (edge_at < need))
            dirty = tl.load(dirty_ptr + slot, mask=goes, other=0)
            new = tl.load(missing_ptr + place, mask=goes, other=0)
            tl.store(payload_ptr + home, home * 0 - 1, mask=goes & (home >= 0))
            tl.store(payload_ptr + new, slot + base, mask=goes)
            tl.store(home_ptr + slot, new, mask=goes)
            tl.store(used_ptr + slot, at * 0 + tick, mask=goes)
            if LFU:
                tl.store(uses_ptr + slot, at * 0 + 1, mask=goes)
            tl.store(dirty_ptr + slot, (at * 0).to(tl.int8), mask=goes)
            tl.store(slots_ptr + place, slot, mask=goes)
            leaves = goes & (home >= 0) & (dirty != 0)
            tl.store(outs_ptr + place, tl.where(leaves, home, -1), mask=goes)
            written = tl.sum(leaves.to(tl.int64), axis=0)
            tl.atomic_add(tallies_ptr + _WRITTEN, written, sem="relaxed")


def admit(
    layout: ShardLayout,
    maps: CacheMaps,
    forms: tuple[RowForm, ...],
    runs: Runs,
    tick: int,
    keep_from: int,
    *,
    lfu: bool,
) -> None:
    """Give slots to the rows of a batch, and bring rows there and back.

    tick: number of this use, larger than any before. keep_from: slots last used at this tick or
    later keep their rows; at most `tick`.
    """
    for number, form in enumerate(forms):
        if runs.rooms[number]:
            _admit_form(layout, maps, form, number, runs, tick, keep_from, lfu)


def _admit_form(
    layout: ShardLayout,
    maps: CacheMaps,
    form: RowForm,
    number: int,
    runs: Runs,
    tick: int,
    keep_from: int,
    lfu: bool,
) -> None:
    pool, room, device = maps.pools[number], runs.rooms[number], maps.home_S.device
    work = torch.zeros(_WORDS, dtype=torch.int32, device=device)
    missing = torch.empty(room, dtype=torch.int32, device=device)
    uses = maps.uses_S if lfu else maps.used_S
    with torch.cuda.device_of(work):  # type: ignore[no-untyped-call]
        launch(
            _mark,
            (programs_of(triton.cdiv(room, _BLOCK), device),),
            runs.runs_WN,
            runs.runs_WN.shape[1],
            runs.cursors_FW,
            number,
            runs.first_run(number),
            runs.last_run(number),
            maps.payload_H,
            maps.used_S,
            uses,
            maps.tallies,
            maps.base,
            tick,
            work,
            missing,
            LFU=lfu,
            BLOCK=_BLOCK,
        )
        if pool.slots:
            moves = _taken(maps, pool, work, missing, tick, keep_from, lfu)
            move(layout, maps, form, moves)


def _taken(
    maps: CacheMaps,
    pool: Pool,
    work: Tensor,
    missing: Tensor,
    tick: int,
    keep_from: int,
    lfu: bool,
) -> Moves:
    """Give slots of a pool to missing rows, and say what is to be moved."""
    uses = maps.uses_S if lfu else maps.used_S
    grid = (programs_of(triton.cdiv(pool.slots, _BLOCK), work.device),)
    launch(
        _classes,
        grid,
        maps.home_S,
        maps.used_S,
        uses,
        pool.first,
        pool.slots,
        tick,
        keep_from,
        work,
        LFU=lfu,
        BLOCK=_BLOCK,
    )
    slots, outs = torch.empty(
        2, min(len(missing), pool.slots), dtype=torch.int32, device=work.device
    )
    launch(
        _take,
        grid,
        maps.payload_H,
        maps.home_S,
        maps.used_S,
        uses,
        maps.dirty_S,
        maps.tallies,
        pool.first,
        pool.slots,
        maps.base,
        tick,
        keep_from,
        work,
        missing,
        slots,
        outs,
        LFU=lfu,
        BLOCK=_BLOCK,
    )
    return Moves(work[_MOVED:], slots, outs, missing)
