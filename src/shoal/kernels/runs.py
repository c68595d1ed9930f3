"""Positions of a call gathered by row: the runs that gradients are summed over.

Handles are sorted with their positions, stably, so that a row's positions lie side by side in the
order of the call. One launch then lists the runs. A run of more than COLD_RUN positions is cut
into pieces whose length follows from the run's alone: handles depend on which insert came first,
so a cut that depended on where a run lies would not give the same sums every time. In which order
runs and pieces are listed does depend on timing; nothing computed from them does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from shoal.kernels.launching import launch
from shoal.kernels.row_tiles import blocks_of
from shoal.kernels.table_layout import (
    CHUNK_TABLE,
    TABLE_FORM,
    ShardLayout,
    chunk_word,
    table_word,
)
from shoal.kernels.transfer import staged

__all__ = ["COLD_RUN", "Runs", "piece_room", "region_starts", "run_columns", "runs_of"]

COLD_RUN = 8  # positions of a run that one program adds in turn
SHORTEST_PIECE = 64

_BLOCK = 1024
_SHORT = tl.constexpr(2)  # as many as the step asks for at a time
_COLD = tl.constexpr(COLD_RUN)
_SHORTEST = tl.constexpr(SHORTEST_PIECE)
_DOUBLINGS = tl.constexpr(12)  # pieces of up to 2^18 positions
_TABLE = tl.constexpr(CHUNK_TABLE)
_FORM = tl.constexpr(TABLE_FORM)


@dataclass(frozen=True, slots=True)
class Runs:
    """Runs of N positions, listed by row form: form f has a region of its own.

    A region is filled from both ends: runs of one or two places from its first column on, longer
    ones from its last column backwards, so that those of a tile are about as long.

    order_N: int64 [N], the call's positions sorted by handle. "Place" means an index into it.
    runs_WN: int32 [4, N]: handle; first place, or first piece of a run that is cut; number of
        places or pieces; number of places.
    pieces_WP: int32 [2, P]: first place of each piece and the one behind its last.
    cursors_FW: int32 [F, 4]: behind the last short run; number of long runs; behind the last piece;
        behind the region's last column.
    rooms: most runs that each form can have, known without asking the device.
    """

    order_N: Tensor
    runs_WN: Tensor
    pieces_WP: Tensor
    cursors_FW: Tensor
    rooms: tuple[int, ...]

    def first_run(self, form: int) -> int:
        """Where the region of a form begins in `runs_WN`."""
        return sum(self.rooms[:form])

    def last_run(self, form: int) -> int:
        """Where it ends: its last column."""
        return sum(self.rooms[: form + 1]) - 1

    def first_piece(self, form: int) -> int:
        """Where the region of a form begins in `pieces_WP`."""
        return sum(piece_room(room) for room in self.rooms[:form])


def piece_room(positions: int) -> int:
    """Most pieces that so many positions can have."""
    return positions // (COLD_RUN + 1)


@triton.jit
def run_columns(runs_ptr, room, run):  # type: ignore[no-untyped-def]
    """Pointers to the words of each run; multiples of `room`, an int32, need not be one."""
    handles = runs_ptr + run.to(tl.int64)
    firsts = handles + room
    numbers = firsts + room
    return handles, firsts, numbers, numbers + room


@triton.jit
def _piece_length(length):  # type: ignore[no-untyped-def]
    # About four times the root: adding pieces then takes no longer than adding up one of them.
    piece = length * 0 + _SHORTEST
    for _ in tl.static_range(_DOUBLINGS):
        piece = tl.where(piece * piece < 16 * length, 2 * piece, piece)
    return piece


@triton.jit
def _run_length(sorted_ptr, handle, at, head, n):  # type: ignore[no-untyped-def]
    """Places of each run that starts at `at`; 0 for lanes where none does."""
    same = head
    length = head.to(tl.int64)
    for step in tl.static_range(1, _COLD + 1):
        following = tl.load(sorted_ptr + at + step, mask=same & (at + step < n), other=-1)
        same = same & (following == handle)
        length += same.to(tl.int64)
    low = at
    high = tl.where(same, n, at + 1).to(tl.int64)
    while tl.max(high - low, axis=0) > 1:
        middle = (low + high) // 2
        open_ = high - low > 1
        held = tl.load(sorted_ptr + middle, mask=open_, other=-1)
        low = tl.where(open_ & (held == handle), middle, low)
        high = tl.where(open_ & (held != handle), middle, high)
    return tl.where(same, high - at, length)


@triton.jit(do_not_specialize=["columns", "n", "room", "piece_room"])  # type: ignore[untyped-decorator]
def _list_runs(  # type: ignore[no-untyped-def]
    tables_ptr,
    chunks_ptr,
    columns,
    sorted_ptr,
    runs_ptr,
    pieces_ptr,
    cursors_ptr,
    n,
    room,
    piece_room,
    FORMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = at < n
    handle = tl.load(sorted_ptr + at, mask=live, other=-1)
    before = tl.load(sorted_ptr + at - 1, mask=live & (at > 0), other=-1)
    head = (handle >= 0) & (handle != before)
    length = _run_length(sorted_ptr, handle, at, head, n)
    hot = length > _COLD
    piece = _piece_length(length)
    items = tl.where(hot, (length + piece - 1) // piece, length)
    form = handle * 0
    if FORMS > 1:
        table = chunk_word(chunks_ptr, columns, handle, head, _TABLE)
        form = table_word(tables_ptr, table, head, _FORM).to(tl.int32)
    for number in range(FORMS):
        mine = head & (form == number)
        shorts = (mine & (length <= _SHORT)).to(tl.int32)
        longs = (mine & (length > _SHORT)).to(tl.int32)
        pieces = tl.where(mine & hot, items, 0).to(tl.int32)
        cursors = cursors_ptr + 4 * number
        first_short = tl.atomic_add(cursors, tl.sum(shorts, axis=0), sem="relaxed")
        first_long = tl.atomic_add(cursors + 1, tl.sum(longs, axis=0), sem="relaxed")
        first_piece = tl.atomic_add(cursors + 2, tl.sum(pieces, axis=0), sem="relaxed")
        last = tl.load(cursors + 3) - 1
        short = first_short + tl.cumsum(shorts, axis=0) - 1
        long = last - first_long - tl.cumsum(longs, axis=0) + 1
        run = tl.where(length > _SHORT, long, short).to(tl.int64)
        slot = (first_piece + tl.cumsum(pieces, axis=0) - pieces).to(tl.int64)
        first = tl.where(hot, slot, at)
        handles, firsts, numbers, lengths = run_columns(runs_ptr, room, run)
        tl.store(handles, handle, mask=mine)
        tl.store(firsts, first.to(tl.int32), mask=mine)
        tl.store(numbers, items.to(tl.int32), mask=mine)
        tl.store(lengths, length.to(tl.int32), mask=mine)
        for step in range(tl.max(pieces, axis=0)):
            cut = step < pieces
            start = at + step * piece
            stop = tl.minimum(start + piece, at + length)
            tl.store(pieces_ptr + slot + step, start.to(tl.int32), mask=cut)
            tl.store(pieces_ptr + piece_room + slot + step, stop.to(tl.int32), mask=cut)


def runs_of(
    handles_N: Tensor,
    layout: ShardLayout | None = None,
    rooms: Sequence[int] | None = None,
    *,
    starts_FW: Tensor | None = None,
) -> Runs:
    """Sort a call's positions by row and list the runs; negative handles are left out.

    Args:
        handles_N: int32 [N], N < 2^31; those of several lookups may follow one another.
        layout: the shard's, wanted where its tables have more than one row form.
        rooms: positions of each form, on the host; [N] if there is one form.
        starts_FW: `region_starts` of the rooms; sent from here if None, which a captured graph
            would do from memory that is gone.
    """
    n = handles_N.numel()
    bounds = (n,) if rooms is None else tuple(rooms)
    room, most_pieces = sum(bounds), sum(piece_room(count) for count in bounds)
    device = handles_N.device
    sorted_N, order_N = torch.sort(handles_N, stable=True)
    words = torch.empty(4 * room + 2 * most_pieces, dtype=torch.int32, device=device)
    runs = Runs(
        order_N,
        words[: 4 * room].view(4, room),
        words[4 * room :].view(2, most_pieces),
        region_starts(bounds, device) if starts_FW is None else starts_FW.clone(),
        bounds,
    )
    if n == 0:
        return runs
    unused = sorted_N if layout is None else layout.tables_KT
    chunks_WC = sorted_N if layout is None else layout.chunks_WC
    launch(
        _list_runs,
        (blocks_of(n, _BLOCK),),
        unused,
        chunks_WC,
        chunks_WC.shape[-1],
        sorted_N,
        runs.runs_WN,
        runs.pieces_WP,
        runs.cursors_FW,
        n,
        room,
        most_pieces,
        FORMS=len(bounds),
        BLOCK=_BLOCK,
        num_warps=8,
    )
    return runs


def region_starts(rooms: Sequence[int], device: torch.device) -> Tensor:
    """`Runs.cursors_FW` before any run is listed, on the device."""
    words, run, piece = [], 0, 0
    for count in rooms:
        words += [run, 0, piece, run + count]
        run, piece = run + count, piece + piece_room(count)
    pairs = np.array(words, dtype=np.int32).view(np.int64)
    return staged(pairs, device).view(torch.int32).view(-1, 4)
