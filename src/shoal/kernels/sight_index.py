"""Exact sights of one table: an open addressing index, int64 keys beside uint32 counts.

Two cells behind the last slot belong to the ids that are markers. Ids claim empty slots only; ids
that are forgotten leave an erased slot behind, which comes back when the index is rebuilt. Counts
are zero where nothing was counted, so a claimed slot is ready at once.
"""

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from shoal.kernels.launching import launch
from shoal.kernels.row_tiles import blocks_of
from shoal.kernels.table_layout import EMPTY_KEY, ERASED_KEY, mix64

__all__ = ["SIDE_CELLS", "cell_ptr", "claim_sights", "find_sights", "key_ptr", "move_sights"]

_SCRATCH = 256  # cells in which idle lanes swap: spread, so that they do not queue
SIDE_CELLS = 2 + _SCRATCH
"""Keys and cells that an index has behind its slots."""

_BLOCK = 256

_EMPTY, _ERASED = tl.constexpr(EMPTY_KEY), tl.constexpr(ERASED_KEY)
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
    return tl.where(id_ <= _ERASED, mask + 1 + (id_ & 1), mix64(id_ ^ salt) & mask)


@triton.jit
def find_sights(keys, id_, salt, mask, live):  # type: ignore[no-untyped-def]
    """Slot of each id, -1 where it has none."""
    slot = _home(id_, salt, mask)
    side = id_ <= _ERASED
    found = tl.where(live & side, slot, -1)
    seeking = live & (side == 0)
    while tl.max(seeking.to(tl.int32), axis=0) > 0:
        key = tl.load(key_ptr(keys, slot), mask=seeking, other=_EMPTY)
        found = tl.where(seeking & (key == id_), slot, found)
        seeking = seeking & (key != id_) & (key != _EMPTY)
        slot = tl.where(seeking, (slot + 1) & mask, slot)
    return found


@triton.jit
def claim_sights(keys, room, id_, salt, mask, live):  # type: ignore[no-untyped-def]
    """Slot of each id, one that was empty where it had none; and where that happened.

    Lanes that are not live must have keys, of any index, and its mask, `room`: swaps need some.
    """
    spare = room + 3 + (tl.arange(0, id_.shape[0]) & (_IDLE - 1)).to(tl.int64)
    slot = _home(id_, salt, mask)
    side = id_ <= _ERASED
    found = tl.where(live & side, slot, 0)
    won = live & (live == 0)
    seeking = live & (side == 0)
    while tl.max(seeking.to(tl.int32), axis=0) > 0:
        key = tl.load(key_ptr(keys, slot), mask=seeking, other=0)
        free = seeking & (key == _EMPTY)
        if tl.max(free.to(tl.int32), axis=0) > 0:
            # There is no mask: idle lanes compare spare keys, which stay empty, to 1.
            held = tl.atomic_cas(
                key_ptr(keys, tl.where(free, slot, spare)),
                tl.where(free, _EMPTY, 1),
                tl.where(free, id_, 0),
                sem="relaxed",
            )
            won = won | (free & (held == _EMPTY))
            key = tl.where(free, tl.where(held == _EMPTY, id_, held), key)
        met = seeking & (key == id_)
        found = tl.where(met, slot, found)
        seeking = seeking & (met == 0)
        slot = tl.where(seeking, (slot + 1) & mask, slot)
    return found, won


@triton.jit(do_not_specialize=["salt", "slots", "mask"])  # type: ignore[untyped-decorator]
def _move(  # type: ignore[no-untyped-def]
    keys_ptr,
    cells_ptr,
    new_keys_ptr,
    new_cells_ptr,
    tally_ptr,
    salt,
    slots,
    mask,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    sights = tl.load(cells_ptr + at, mask=at < slots + 2, other=0)
    key = tl.load(keys_ptr + at, mask=at < slots, other=_EMPTY)
    live = (at < slots) & (key > _ERASED) & (sights != 0)
    keys = at * 0 + new_keys_ptr.to(tl.int64)
    slot, won = claim_sights(keys, mask + at * 0, key, salt, mask + at * 0, live)
    tl.store(new_cells_ptr + slot, sights, mask=live)
    side = (at >= slots) & (at < slots + 2)
    tl.store(new_cells_ptr + mask + 1 + at - slots, sights, mask=side)
    tl.atomic_add(tally_ptr, tl.sum(won.to(tl.int64), axis=0), sem="relaxed")


def move_sights(
    keys: Tensor, cells: Tensor, new_keys: Tensor, new_cells: Tensor, tally_1: Tensor, salt: int
) -> None:
    """Copy an exact index into an empty one with room for it; adds the slots it took to a tally.

    Keys int64, all empty where new, and cells int32, zeros where new: [slots + SIDE_CELLS].
    """
    slots = len(keys) - SIDE_CELLS
    launch(
        _move,
        (blocks_of(slots + 2, _BLOCK),),
        keys,
        cells,
        new_keys,
        new_cells,
        tally_1,
        salt,
        slots,
        len(new_keys) - SIDE_CELLS - 1,
        BLOCK=_BLOCK,
    )
