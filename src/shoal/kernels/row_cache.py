"""A device cache of rows whose home is page-locked host memory: which row is where.

Rows of a shard are named by handles; the chunk of a handle says where its row lies. The cache has
chunks of its own, in device memory, so a place of the cache is a handle too: a *payload handle*.
Kernels take weights and state from payload handles, and all else (table, metadata) from the home
handle. A row with a slot has its truth there; any other row is its own payload and is read and
written in place, over the bus. So results are the same whatever the size of the cache.

Each row form has a pool of slots; `shoal.kernels.row_victims` decides which rows get them and
`shoal.kernels.row_moves` brings rows there and back. Which slot a row gets depends on timing; what
is read and written through it does not.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from shoal.kernels.launching import launch
from shoal.kernels.runs import Runs
from shoal.kernels.step_tiles import run_words, runs_listed

__all__ = [
    "ABSENT",
    "TALLY_HITS",
    "TALLY_MISSES",
    "TALLY_PLACED",
    "TALLY_WORDS",
    "TALLY_WRITTEN",
    "VACANT",
    "CacheMaps",
    "Pool",
    "drop",
    "mark_dirty",
    "new_maps",
    "programs_of",
    "resized",
    "translate",
]

VACANT = -1  # home of a slot without a row
ABSENT = -2  # home of a number that no slot has

TALLY_WORDS = 4
TALLY_HITS, TALLY_MISSES, TALLY_PLACED, TALLY_WRITTEN = 0, 1, 2, 3

_BLOCK = 1024
_INTERPRETED_PROGRAMS = 2

_NO_HOME = tl.constexpr(VACANT)


@dataclass(frozen=True, slots=True)
class Pool:
    """Slots [first, first + slots) of the cache: those of one row form."""

    first: int
    slots: int


@dataclass(frozen=True, slots=True)
class CacheMaps:
    """Which row is in which slot; on the shard's device.

    payload_H: int32, by home handle: payload handle of its slot, or -1. Covers all chunks.
    home_S: int32, by slot: home handle of its row, `VACANT` or `ABSENT`.
    used_S: int32, tick of its last use. uses_S: int32, ageing count of uses, or empty.
    dirty_S: int8, 1 where the slot's row differs from its home.
    tallies: int64 [TALLY_WORDS].
    base: payload handle of slot 0. pools: by row form.
    """

    payload_H: Tensor
    home_S: Tensor
    used_S: Tensor
    uses_S: Tensor
    dirty_S: Tensor
    tallies: Tensor
    base: int
    pools: tuple[Pool, ...]


@functools.lru_cache(maxsize=16)
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def programs_of(tiles: int, device: torch.device, each: int = 8) -> int:
    """Programs for so many tiles at most: `each` on every multiprocessor."""
    if device.type != "cuda":
        return min(tiles, _INTERPRETED_PROGRAMS)
    return min(tiles, each * _multiprocessors(device))


def new_maps(
    handles: int, base: int, pools: tuple[Pool, ...], device: torch.device, *, counted: bool
) -> CacheMaps:
    """Maps of an empty cache for home handles below `handles`; counted: with counts of uses."""
    slots = max((pool.first + pool.slots for pool in pools), default=0)
    home_S = torch.full((slots,), ABSENT, dtype=torch.int32, device=device)
    for pool in pools:
        home_S[pool.first : pool.first + pool.slots] = VACANT

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
    runs_ptr,
    room,
    cursors_ptr,
    form,
    first_run,
    last_run,
    payload_ptr,
    dirty_ptr,
    base,
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
        tl.store(dirty_ptr + (payload - base), (row * 0 + 1).to(tl.int8), mask=payload >= 0)


def translate(maps: CacheMaps, handles_N: Tensor) -> Tensor:
    """Payload handles of positions, int32 [N]; -1 stays -1."""
    out_N = torch.empty_like(handles_N)
    n = handles_N.numel()
    if n:
        with torch.cuda.device_of(out_N):  # type: ignore[no-untyped-call]
            launch(
                _translate,
                (triton.cdiv(n, _BLOCK),),
                handles_N,
                maps.payload_H,
                out_N,
                n,
                BLOCK=_BLOCK,
            )
    return out_N


def mark_dirty(maps: CacheMaps, runs: Runs) -> None:
    """Say that the rows of `runs` are about to be changed where they are."""
    device = maps.dirty_S.device
    if maps.dirty_S.numel() == 0:
        return
    with torch.cuda.device_of(maps.dirty_S):  # type: ignore[no-untyped-call]
        for form, room in enumerate(runs.rooms):
            if room:
                launch(
                    _mark_dirty,
                    (programs_of(triton.cdiv(room, _BLOCK), device),),
                    runs.runs_WN,
                    runs.runs_WN.shape[1],
                    runs.cursors_FW,
                    form,
                    runs.first_run(form),
                    runs.last_run(form),
                    maps.payload_H,
                    maps.dirty_S,
                    maps.base,
                    BLOCK=_BLOCK,
                )


@triton.jit(do_not_specialize=["base", "known"])  # type: ignore[untyped-decorator]
def _drop(  # type: ignore[no-untyped-def]
    handles_ptr,
    size_ptr,
    payload_ptr,
    home_ptr,
    dirty_ptr,
    base,
    known,
    BLOCK: tl.constexpr,
):
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
    tiles = triton.cdiv(handles_M.numel(), _BLOCK)
    if tiles == 0 or maps.home_S.numel() == 0:
        return
    with torch.cuda.device_of(handles_M):  # type: ignore[no-untyped-call]
        launch(
            _drop,
            (programs_of(tiles, handles_M.device),),
            handles_M,
            size_1,
            maps.payload_H,
            maps.home_S,
            maps.dirty_S,
            maps.base,
            maps.payload_H.numel(),
            BLOCK=_BLOCK,
        )
