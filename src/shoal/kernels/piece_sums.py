"""Sums of the pieces of hot runs: many places at a time, in a fixed order."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from shoal.kernels.grad_sources import Sources
from shoal.kernels.launching import launch
from shoal.kernels.row_form import RowForm
from shoal.kernels.row_tiles import blocks_of
from shoal.kernels.runs import Runs, piece_room
from shoal.kernels.step_plan import columns_of_tile, programs_of, rows_of_tile, step_form
from shoal.kernels.step_tiles import item_rows

__all__ = ["add_pieces"]

_MOST_ROWS = 16


@triton.jit(do_not_specialize=["form", "begin", "room"])  # type: ignore[untyped-decorator]
def _add_pieces(  # type: ignore[no-untyped-def]
    pieces_ptr, room, cursors_ptr, form, begin,
    addresses_ptr, factors_ptr, counts_ptr, partials_ptr, tallies_ptr,
    DIM: tl.constexpr, PITCH: tl.constexpr, ALIGN: tl.constexpr, REAL: tl.constexpr,
    FACTORS: tl.constexpr, COUNTED: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    end = tl.load(cursors_ptr + 4 * form + 2)
    for piece in range(begin + tl.program_id(0), end, tl.num_programs(0)):
        start = tl.load(pieces_ptr + piece)
        stop = tl.load(pieces_ptr + room + piece)
        total = tl.zeros([ROWS, BLOCK_D], REAL)
        tally = tl.zeros([ROWS], tl.int64)
        for place in range(start, stop, ROWS):
            at = (place + tl.arange(0, ROWS)).to(tl.int64)
            on = at < stop
            address = tl.load(addresses_ptr + at, mask=on, other=0)
            total += item_rows(address, factors_ptr, at, on, column, DIM, ALIGN, REAL, FACTORS)
            if COUNTED:
                tally += tl.load(counts_ptr + at, mask=on, other=0).to(tl.int64)
        slot = (piece - begin).to(tl.int64)
        tl.store(partials_ptr + slot * PITCH + column, tl.sum(total, axis=0), mask=column < DIM)
        if COUNTED:
            tl.store(tallies_ptr + slot, tl.sum(tally, axis=0))


def add_pieces(
    number: int, form: RowForm, runs: Runs, sources: Sources, counts_N: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Sums of the pieces of a form's runs, [P, pitch], and what they stand for, int64 [P].

    counts_N: int32 [N] in the order of the runs, or None.
    """
    plan, real = step_form(form), form.real
    room = piece_room(runs.rooms[number])
    device = runs.order_N.device
    partials = torch.empty(room, plan.pitch, dtype=real, device=device)
    tallies = torch.empty(room if counts_N is not None else 0, dtype=torch.int64, device=device)
    if room == 0:
        return partials, tallies
    columns = columns_of_tile(form.dim)
    unused = sources.addresses_N
    launch(
        _add_pieces,
        (programs_of(room, device), blocks_of(form.dim, columns)),
        runs.pieces_WP,
        runs.pieces_WP.shape[1],
        runs.cursors_FW,
        number,
        runs.first_piece(number),
        sources.addresses_N,
        unused if sources.factors_N is None else sources.factors_N,
        unused if counts_N is None else counts_N,
        partials,
        tallies,
        DIM=form.dim,
        PITCH=plan.pitch,
        ALIGN=sources.alignments[number],
        REAL=plan.real,
        FACTORS=sources.factors_N is not None,
        COUNTED=counts_N is not None,
        ROWS=rows_of_tile(form.dim, real, most=_MOST_ROWS, size=2),
        BLOCK_D=columns,
    )
    return partials, tallies
