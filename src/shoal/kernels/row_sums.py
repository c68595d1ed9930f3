"""Sums of gradients per row, written where the row's number says: for rows that lie densely."""

from __future__ import annotations

from typing import Any

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from shoal.kernels.grad_sources import Sources
from shoal.kernels.launching import launch
from shoal.kernels.piece_sums import add_pieces
from shoal.kernels.row_form import RowForm
from shoal.kernels.row_tiles import blocks_of
from shoal.kernels.runs import Runs
from shoal.kernels.step_plan import columns_of_tile, programs_of, rows_of_tile, step_form
from shoal.kernels.step_tiles import item_rows, item_where, run_words, runs_listed

__all__ = ["sum_rows"]


@triton.jit(do_not_specialize=["room", "last_run", "rows"])  # type: ignore[untyped-decorator]
def _write_rows(  # type: ignore[no-untyped-def]
    sums_ptr, runs_ptr, room, cursors_ptr, last_run, addresses_ptr, factors_ptr, partials_ptr, rows,
    DIM: tl.constexpr, PITCH_BYTES: tl.constexpr, ALIGN: tl.constexpr, REAL: tl.constexpr,
    FACTORS: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    size = runs_listed(cursors_ptr, 0, 0)
    partials = partials_ptr.to(tl.int64)
    for tile in range(tl.program_id(0), tl.cdiv(size, ROWS), tl.num_programs(0)):
        run = tile * ROWS + tl.arange(0, ROWS)
        live = run < size
        row, first, items, length = run_words(
            runs_ptr, room, cursors_ptr, 0, 0, last_run, run, live
        )
        hot = items < length
        first = first.to(tl.int64)
        most_items = tl.max(items, axis=0)
        live = live & (row < rows)
        out = sums_ptr + row.to(tl.int64) * DIM
        for start in range(0, DIM, BLOCK_D):
            column = start + tl.arange(0, BLOCK_D)
            g = tl.zeros([ROWS, BLOCK_D], REAL)
            for item in range(most_items):
                at, _on, cold, address = item_where(
                    addresses_ptr, partials, first, item, items, hot, PITCH_BYTES
                )
                g += item_rows(address, factors_ptr, at, cold, column, DIM, ALIGN, REAL, FACTORS)
            inside = live[:, None] & (column < DIM)[None, :]
            tl.store(out[:, None] + column[None, :], g, mask=inside)


def sum_rows(form: RowForm, runs: Runs, sources: Sources, rows: int) -> Tensor:
    """Sum of each row's gradients over its positions, `form.real` [rows, D].

    Runs are cut and added as a step does it. Rows without a position are left as they are.

    Args:
        runs: of one form; the handles are the rows' numbers.
        rows: how many there are; positions of others are left out.
    """
    device, most = runs.order_N.device, runs.rooms[0]
    sums = torch.empty(rows, form.dim, dtype=form.real, device=device)
    if most == 0 or rows == 0:
        return sums
    plan, tile = step_form(form), rows_of_tile(form.dim, form.real)
    partials, _ = add_pieces(0, form, runs, sources, None)
    unused: Any = sources.addresses_N
    launch(
        _write_rows,
        (programs_of(blocks_of(min(most, rows), tile), device),),
        sums,
        runs.runs_WN,
        runs.runs_WN.shape[1],
        runs.cursors_FW,
        runs.last_run(0),
        sources.addresses_N,
        unused if sources.factors_N is None else sources.factors_N,
        partials,
        rows,
        DIM=form.dim,
        PITCH_BYTES=plan.pitch * form.real.itemsize,
        ALIGN=sources.alignments[0],
        REAL=plan.real,
        FACTORS=sources.factors_N is not None,
        ROWS=tile,
        BLOCK_D=columns_of_tile(form.dim),
        # As a step rounds: each operation by itself.
        enable_fp_fusion=False,
    )
    return sums
