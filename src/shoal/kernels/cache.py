"""A device cache of rows whose home is pinned host memory: slots, moves and victims."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from shoal.kernels.gradients import Runs
from shoal.kernels.launch import blocks_of, launch, power_of_2, shared_programs
from shoal.kernels.rounding import row_pointers
from shoal.kernels.step_tiles import run_words, runs_listed
from shoal.kernels.tables import STATE_AT, WEIGHTS_AT, RowForm, ShardLayout, row_address

VACANT = -1  # home of a slot without a row
ABSENT = -2  # home of a number that no slot has

TALLY_WORDS = 4
TALLY_HITS, TALLY_MISSES, TALLY_PLACED, TALLY_WRITTEN = 0, 1, 2, 3
_HITS, _MISSES, _PLACED, _WRITTEN = map(tl.constexpr, range(TALLY_WORDS))

_BLOCK = 1024

_NO_HOME = tl.constexpr(VACANT)


@dataclass(frozen=True, slots=True)
class CacheMaps:
    """Which row is in which slot; on the shard's device.

    payload_H: int32, by home handle: payload handle of its slot, or -1. Covers all chunks.
    home_S: int32, by slot: home handle of its row, `VACANT` or `ABSENT`.
    used_S: int32, tick of its last use. uses_S: int32, ageing count of uses, or empty.
    dirty_S: int8, 1 where the slot's row differs from its home.
    tallies: int64 [TALLY_WORDS].
    base: payload handle of slot 0. pools: slots of each row form.
    """

    payload_H: Tensor
    home_S: Tensor
    used_S: Tensor
    uses_S: Tensor
    dirty_S: Tensor
    tallies: Tensor
    base: int
    pools: tuple[range, ...]


def programs_of(tiles: int, device: torch.device) -> int:
    return shared_programs(tiles, device, 8)


def new_maps(
    handles: int, base: int, pools: tuple[range, ...], device: torch.device, *, counted: bool
) -> CacheMaps:
    """Maps of an empty cache for home handles below `handles`; counted: with counts of uses."""
    slots = max((pool.stop for pool in pools), default=0)
    home_S = torch.full((slots,), ABSENT, dtype=torch.int32, device=device)
    for pool in pools:
        home_S[pool.start : pool.stop] = VACANT

    def zeros(size: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(size, dtype=dtype, device=device)

    return CacheMaps(
        torch.full((handles,), -1, dtype=torch.int32, device=device),
        home_S,
        zeros(slots, torch.int32),
        zeros(slots if counted else 0, torch.int32),
        zeros(slots, torch.int8),
        zeros(TALLY_WORDS, torch.int64),
        base,
        pools,
    )


def resized(payload_H: Tensor, handles: int) -> Tensor:
    """`CacheMaps.payload_H` for more handles."""
    longer = torch.full((handles,), -1, dtype=torch.int32, device=payload_H.device)
    longer[: payload_H.numel()] = payload_H
    return longer


@triton.jit(do_not_specialize=["n"])  # type: ignore[untyped-decorator]
def _translate(handles_ptr, payload_ptr, out_ptr, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = at < n
    handle = tl.load(handles_ptr + at, mask=live, other=-1)
    payload = tl.load(payload_ptr + handle, mask=live & (handle >= 0), other=-1)
    tl.store(out_ptr + at, tl.where(payload >= 0, payload, handle), mask=live)


@triton.jit(do_not_specialize=["room", "form", "first_run", "last_run", "base"])  # type: ignore[untyped-decorator]
def _mark_dirty(  # type: ignore[no-untyped-def]
    runs_ptr, room, cursors_ptr, form, first_run, last_run, payload_ptr, dirty_ptr, base,
    BLOCK: tl.constexpr,
):  # fmt: skip
    size = runs_listed(cursors_ptr, form, first_run)
    for tile in range(tl.program_id(0), tl.cdiv(size, BLOCK), tl.num_programs(0)):
        row, live, handle, _first, _items, _length = run_words(
            runs_ptr, room, cursors_ptr, form, first_run, last_run, 0, tile, size, BLOCK
        )
        payload = tl.load(payload_ptr + handle, mask=live, other=-1)
        tl.store(dirty_ptr + (payload - base), (row * 0 + 1).to(tl.int8), mask=payload >= 0)


def translate(maps: CacheMaps, handles_N: Tensor) -> Tensor:
    """Payload handles of positions, int32 [N]; -1 stays -1."""
    out_N = torch.empty_like(handles_N)
    n = handles_N.numel()
    if n:
        launch(
            _translate, (blocks_of(n, _BLOCK),),
            handles_N, maps.payload_H, out_N, n,
            BLOCK=_BLOCK,
        )  # fmt: skip
    return out_N


def mark_dirty(maps: CacheMaps, runs: Runs) -> None:
    """Say that the rows of `runs` are about to be changed where they are."""
    device = maps.dirty_S.device
    if maps.dirty_S.numel() == 0:
        return
    for form, room in enumerate(runs.rooms):
        if room:
            launch(
                _mark_dirty, (programs_of(blocks_of(room, _BLOCK), device),),
                runs.runs_WN, runs.runs_WN.shape[1], runs.cursors_FW, form,
                runs.first_run(form), runs.last_run(form), maps.payload_H, maps.dirty_S,
                maps.base,
                BLOCK=_BLOCK,
            )  # fmt: skip


@triton.jit(do_not_specialize=["base", "known"])  # type: ignore[untyped-decorator]
def _drop(  # type: ignore[no-untyped-def]
    handles_ptr, size_ptr, payload_ptr, home_ptr, dirty_ptr, base, known,
    BLOCK: tl.constexpr,
):  # fmt: skip
    size = tl.load(size_ptr)
    for tile in range(tl.program_id(0), tl.cdiv(size, BLOCK), tl.num_programs(0)):
        at = tile * BLOCK + tl.arange(0, BLOCK)
        live = at < size
        handle = tl.load(handles_ptr + at, mask=live, other=0)
        payload = tl.load(payload_ptr + handle, mask=live & (handle < known), other=-1)
        held = live & (payload >= 0)
        slot = payload - base
        tl.store(payload_ptr + handle, handle * 0 - 1, mask=held)
        tl.store(home_ptr + slot, handle * 0 + _NO_HOME, mask=held)
        tl.store(dirty_ptr + slot, (handle * 0).to(tl.int8), mask=held)


def drop(maps: CacheMaps, handles_M: Tensor, size_1: Tensor) -> None:
    """Forget rows that are no more: their slots are vacant, what was in them is lost.

    Rows of chunks that the maps do not cover yet have no slots. Allocates nothing.

    handles_M: int32, distinct, the first `size_1` (on the device) of which count.
    """
    tiles = blocks_of(handles_M.numel(), _BLOCK)
    if tiles == 0 or maps.home_S.numel() == 0:
        return
    launch(
        _drop, (programs_of(tiles, handles_M.device),),
        handles_M, size_1, maps.payload_H, maps.home_S, maps.dirty_S, maps.base,
        maps.payload_H.numel(),
        BLOCK=_BLOCK,
    )  # fmt: skip


_TILE_BYTES = 8192
_MOST_WORDS = 128  # of 8 bytes: columns of a tile
_MOST_ROWS = 64
_PROGRAMS = 2  # on each multiprocessor: enough for the bus, and leaves room next to a model


@triton.jit(do_not_specialize=["first", "slots", "keep_from", "base"])  # type: ignore[untyped-decorator]
def _collect(  # type: ignore[no-untyped-def]
    payload_ptr, home_ptr, used_ptr, dirty_ptr, tallies_ptr, count_ptr, slots_ptr, outs_ptr, first,
    slots, keep_from, base,
    FORGET: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
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


@triton.jit  # type: ignore[untyped-decorator]
def _exchange(  # type: ignore[no-untyped-def]
    chunks_ptr, columns, payload, out, new, live,
    WORD: tl.constexpr, WORDS: tl.constexpr, FETCH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
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
        kept = tl.load(row_pointers(slot_at, column, tl.int64), mask=leaving, other=0)
        if FETCH:
            came = tl.load(row_pointers(new_at, column, tl.int64), mask=inside, other=0)
            # All of the old row is read before any of it is overwritten.
            tl.debug_barrier()
            tl.store(row_pointers(slot_at, column, tl.int64), came, mask=inside)
        tl.store(row_pointers(out_at, column, tl.int64), kept, mask=leaving)


@triton.jit(do_not_specialize=["columns", "base"])  # type: ignore[untyped-decorator]
def _move(  # type: ignore[no-untyped-def]
    chunks_ptr, columns, count_ptr, slots_ptr, outs_ptr, ins_ptr, base,
    WEIGHT_WORDS: tl.constexpr, STATE_WORDS: tl.constexpr, FETCH: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_W: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
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
            chunks_ptr, columns, payload, out, new, live, WEIGHTS_AT, WEIGHT_WORDS, FETCH, BLOCK_W
        )
        if STATE_WORDS > 0:
            _exchange(
                chunks_ptr, columns, payload, out, new, live, STATE_AT, STATE_WORDS, FETCH, BLOCK_S
            )


def _block(words: int) -> int:
    return min(power_of_2(max(words, 1)), _MOST_WORDS)


def _moved(
    layout: ShardLayout,
    maps: CacheMaps,
    form: RowForm,
    count_1: Tensor,
    slots_M: Tensor,
    outs_M: Tensor,
    ins_M: Tensor | None,
) -> None:
    """Copy rows between slots and homes, both ways at once: the bus carries both ways at once.

    Args:
        count_1: int32 [1], how many of each list count.
        slots_M: int32.
        outs_M: int32, home handle that the slot's present content goes to, or -1.
        ins_M: int32, home handle that its next content comes from; None for none.
    """
    weight_words, state_words = form.weight_bytes // 8, form.state_bytes // 8
    block_w, block_s = _block(weight_words), _block(state_words)
    rows = min(max(_TILE_BYTES // (8 * max(block_w, block_s)), 1), _MOST_ROWS)
    tiles = blocks_of(slots_M.numel(), rows)
    if tiles:
        launch(
            _move, (shared_programs(tiles, slots_M.device, _PROGRAMS),),
            *layout.chunks, count_1, slots_M, outs_M, slots_M if ins_M is None else ins_M,
            maps.base,
            WEIGHT_WORDS=weight_words, STATE_WORDS=state_words, FETCH=ins_M is not None,
            ROWS=rows, BLOCK_W=block_w, BLOCK_S=block_s,
        )  # fmt: skip


def sweep(
    layout: ShardLayout,
    maps: CacheMaps,
    form: RowForm,
    pool: range,
    keep_from: int,
    *,
    forget: bool,
) -> None:
    """Bring rows of a pool that were last used before tick `keep_from` home where they are dirty.

    forget: take their slots from them, too.
    """
    if not pool:
        return
    device = maps.home_S.device
    count_1 = torch.zeros(1, dtype=torch.int32, device=device)
    slots_M, outs_M = torch.empty(2, len(pool), dtype=torch.int32, device=device)
    launch(
        _collect, (programs_of(blocks_of(len(pool), _BLOCK), device),),
        maps.payload_H, maps.home_S, maps.used_S, maps.dirty_S, maps.tallies, count_1, slots_M,
        outs_M, pool.start, len(pool), keep_from, maps.base,
        FORGET=forget, BLOCK=_BLOCK,
    )  # fmt: skip
    _moved(layout, maps, form, count_1, slots_M, outs_M, None)


HALVED_AFTER = 64


_CLASSES = 256  # the last one: slots that may not be taken
_WORDS = 260
_NEED, _BELOW, _AT, _MOVED = 256, 257, 258, 259

_HALVED = tl.constexpr(HALVED_AFTER)
_MOST_USES = tl.constexpr(1 << 16)

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
def _class_of(  # type: ignore[no-untyped-def]
    home_ptr, used_ptr, uses_ptr, first, tile, size, tick, keep_from,
    LFU: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Slots of a tile, which of them there are, whose rows they have, and their class.

    0 for vacant slots, 255 for those that may not be taken, else the higher the later.
    """
    at = tile * BLOCK + tl.arange(0, BLOCK)
    slot, live = first + at, at < size
    home = tl.load(home_ptr + slot, mask=live, other=-2)
    used = tl.load(used_ptr + slot, mask=live, other=0)
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
    class_ = tl.where(home == _NO_HOME, 0, tl.where(live & (home >= 0), class_, 255))
    return slot, live, home, class_


@triton.jit(do_not_specialize=["room", "form", "first_run", "last_run", "base", "tick"])  # type: ignore[untyped-decorator]
def _mark(  # type: ignore[no-untyped-def]
    runs_ptr, room, cursors_ptr, form, first_run, last_run, payload_ptr, used_ptr, uses_ptr,
    tallies_ptr, base, tick, work_ptr, missing_ptr,
    LFU: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    size = runs_listed(cursors_ptr, form, first_run)
    for tile in range(tl.program_id(0), tl.cdiv(size, BLOCK), tl.num_programs(0)):
        row, live, handle, _first, _items, _length = run_words(
            runs_ptr, room, cursors_ptr, form, first_run, last_run, 0, tile, size, BLOCK
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
    home_ptr, used_ptr, uses_ptr, first, slots, tick, keep_from, work_ptr,
    LFU: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Counts the slots of each class, if any row is missing."""
    size = tl.where(tl.load(work_ptr + _NEED_WORD) > 0, slots, 0)
    found = tl.zeros([_CLASS_COUNT], tl.int32)
    for tile in range(tl.program_id(0), tl.cdiv(size, BLOCK), tl.num_programs(0)):
        _slot, _live, _home, class_ = _class_of(
            home_ptr, used_ptr, uses_ptr, first, tile, size, tick, keep_from, LFU, BLOCK
        )
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
    payload_ptr, home_ptr, used_ptr, uses_ptr, dirty_ptr, tallies_ptr, first, slots, base, tick,
    keep_from, work_ptr, missing_ptr, slots_ptr, outs_ptr,
    LFU: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gives slots to missing rows, in the maps, and lists what is to be moved."""
    need = tl.load(work_ptr + _NEED_WORD)
    edge, below, moved = _cut(work_ptr, need)
    if tl.program_id(0) == 0:
        tl.store(work_ptr + _MOVED_WORD, moved)
        tl.atomic_add(tallies_ptr + _PLACED, moved.to(tl.int64), sem="relaxed")
    size = tl.where(moved > 0, slots, 0)
    for tile in range(tl.program_id(0), tl.cdiv(size, BLOCK), tl.num_programs(0)):
        slot, live, home, class_ = _class_of(
            home_ptr, used_ptr, uses_ptr, first, tile, size, tick, keep_from, LFU, BLOCK
        )
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
            tl.store(used_ptr + slot, slot * 0 + tick, mask=goes)
            if LFU:
                tl.store(uses_ptr + slot, slot * 0 + 1, mask=goes)
            tl.store(dirty_ptr + slot, (slot * 0).to(tl.int8), mask=goes)
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
    device, uses = maps.home_S.device, maps.uses_S if lfu else maps.used_S
    for number, (form, room, pool) in enumerate(zip(forms, runs.rooms, maps.pools, strict=True)):
        if not room:
            continue
        work = torch.zeros(_WORDS, dtype=torch.int32, device=device)
        missing = torch.empty(room, dtype=torch.int32, device=device)
        launch(
            _mark, (programs_of(blocks_of(room, _BLOCK), device),),
            runs.runs_WN, runs.runs_WN.shape[1], runs.cursors_FW, number, runs.first_run(number),
            runs.last_run(number), maps.payload_H, maps.used_S, uses, maps.tallies, maps.base, tick,
            work, missing,
            LFU=lfu, BLOCK=_BLOCK,
        )  # fmt: skip
        if not pool:
            continue
        grid = (programs_of(blocks_of(len(pool), _BLOCK), device),)
        launch(
            _classes, grid,
            maps.home_S, maps.used_S, uses, pool.start, len(pool), tick, keep_from, work,
            LFU=lfu, BLOCK=_BLOCK,
        )  # fmt: skip
        slots, outs = torch.empty(2, min(room, len(pool)), dtype=torch.int32, device=device)
        launch(
            _take, grid,
            maps.payload_H, maps.home_S, maps.used_S, uses, maps.dirty_S, maps.tallies, pool.start,
            len(pool), maps.base, tick, keep_from, work, missing, slots, outs,
            LFU=lfu, BLOCK=_BLOCK,
        )  # fmt: skip
        _moved(layout, maps, form, work[_MOVED:], slots, outs, missing)
