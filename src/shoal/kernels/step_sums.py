"""Sums of a call's gradients per row in memory, and optimizer steps that start from them.

What `step` cannot do in one go: rows of several segments (a non-finite component anywhere leaves
the whole row as it is, so all columns are summed before any is stepped), rules that kernels do not
know, very wide rows. Runs are taken a slab at a time, so that sums never take [N, D].
"""

from __future__ import annotations

from typing import Any

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from shoal.kernels.grad_sources import Sources
from shoal.kernels.launching import launch
from shoal.kernels.piece_sums import add_pieces
from shoal.kernels.row_form import RowForm, SegmentForm
from shoal.kernels.row_tiles import blocks_of
from shoal.kernels.runs import Runs
from shoal.kernels.step_plan import (
    Stamp,
    columns_of_tile,
    programs_of,
    rows_of_tile,
    step_form,
)
from shoal.kernels.step_rows import step_in_torch
from shoal.kernels.step_rules import stepped
from shoal.kernels.step_tiles import (
    accepted,
    describe_rows,
    item_rows,
    item_tallies,
    item_where,
    load_rows,
    payload_of,
    rates_of,
    run_words,
    runs_listed,
    settle_rows,
    store_rows,
)
from shoal.kernels.table_layout import CHUNK_TABLE, ShardLayout, chunk_word

__all__ = ["compose", "sum_runs"]

_SLAB = 1 << 18  # runs of a slab at most
_SLAB_BYTES = 1 << 28  # of their sums

_TABLE = tl.constexpr(CHUNK_TABLE)


@triton.jit(do_not_specialize=["room", "form", "first_run", "last_run"])  # type: ignore[untyped-decorator]
def _mark_firsts(  # type: ignore[no-untyped-def]
    runs_ptr, room, pieces_ptr, cursors_ptr, form, first_run, last_run, order_ptr, marks_ptr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """1 at the first position of each run."""
    size = runs_listed(cursors_ptr, form, first_run)
    for tile in range(tl.program_id(0), tl.cdiv(size, BLOCK), tl.num_programs(0)):
        row = tile * BLOCK + tl.arange(0, BLOCK)
        live = row < size
        _handle, place, items, length = run_words(
            runs_ptr, room, cursors_ptr, form, first_run, last_run, row, live
        )
        hot = items < length
        place = tl.where(hot, tl.load(pieces_ptr + place, mask=hot, other=0), place)
        position = tl.load(order_ptr + place, mask=live, other=0)
        tl.store(marks_ptr + position, position.to(tl.int32) * 0 + 1, mask=live)


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=[
        "columns", "room", "form", "first_run", "last_run", "first_piece", "begin", "most",
        "epoch", "event_time_s",
    ]
)  # fmt: skip
def _write_sums(  # type: ignore[no-untyped-def]
    counters_ptr, chunks_ptr, columns,
    runs_ptr, room, pieces_ptr, cursors_ptr, form, first_run, last_run, first_piece, begin, most,
    order_ptr, ranks_ptr, addresses_ptr, factors_ptr, counts_ptr, partials_ptr, tallies_ptr,
    sums_ptr, handles_ptr, places_ptr, ids_ptr, sights_ptr, tables_ptr, epoch, event_time_s,
    DIM: tl.constexpr, PITCH_BYTES: tl.constexpr, OUT_PITCH: tl.constexpr, ALIGN: tl.constexpr,
    REAL: tl.constexpr, LARGEST: tl.constexpr, CLIP: tl.constexpr, FACTORS: tl.constexpr,
    COUNTED: tl.constexpr, RANKED: tl.constexpr, SETTLE: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Sums of runs `begin` on, `most` of them at the most.

    SETTLE: apply the policy, stamp the rows that will be stepped, and put -1 for the handles of
    others. RANKED: the row of each sum is that of its first position among those of all runs.
    """
    size = tl.minimum(runs_listed(cursors_ptr, form, first_run) - begin, most)
    partials = partials_ptr.to(tl.int64)
    for tile in range(tl.program_id(0), tl.cdiv(size, ROWS), tl.num_programs(0)):
        row = tile * ROWS + tl.arange(0, ROWS)
        live = row < size
        handle, first, items, length = run_words(
            runs_ptr, room, cursors_ptr, form, first_run, last_run, begin + row, live
        )
        hot = items < length
        place = tl.where(hot, tl.load(pieces_ptr + first, mask=live & hot, other=0), first)
        first = tl.where(hot, first - first_piece, first).to(tl.int64)
        table = chunk_word(chunks_ptr, columns, handle, live, _TABLE)
        out = row.to(tl.int64)
        if RANKED:
            position = tl.load(order_ptr + place, mask=live, other=0)
            out = tl.load(ranks_ptr + position, mask=live, other=1).to(tl.int64) - 1
        good, most_items = live, tl.max(items, axis=0)
        for start in range(0, DIM, BLOCK_D):
            column = start + tl.arange(0, BLOCK_D)
            g = tl.zeros([ROWS, BLOCK_D], REAL)
            for item in range(most_items):
                at, _on, cold, address = item_where(
                    addresses_ptr, partials, first, item, items, hot, PITCH_BYTES
                )
                g += item_rows(address, factors_ptr, at, cold, column, DIM, ALIGN, REAL, FACTORS)
            if SETTLE:
                g, fine = accepted(g, live, LARGEST, CLIP)
                good = good & fine
            inside = live[:, None] & (column < DIM)[None, :]
            tl.store(sums_ptr + out[:, None] * OUT_PITCH + column[None, :], g, mask=inside)
        sights = length.to(tl.int64)
        if COUNTED:
            sights = sights * 0
            for item in range(most_items):
                sights += item_tallies(counts_ptr, tallies_ptr, first + item, item < items, hot)
        if SETTLE:
            settle_rows(
                counters_ptr, chunks_ptr, columns, handle, table, live, good, epoch, event_time_s,
                sights, out, place, handles_ptr, places_ptr, CLIP,
            )  # fmt: skip
        else:
            describe_rows(
                chunks_ptr, columns, handle, live, out, sights, table,
                ids_ptr, sights_ptr, tables_ptr,
            )  # fmt: skip


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=[
        "columns", "form", "first_run", "begin", "most", "rate_columns", "global_step", "domain",
    ]
)  # fmt: skip
def _step_sums(  # type: ignore[no-untyped-def]
    tables_ptr, chunks_ptr, columns, cursors_ptr, form, first_run, begin, most,
    handles_ptr, payloads_ptr, sums_ptr, rates_ptr, rate_columns, global_step, domain,
    PITCH: tl.constexpr, COLUMN: tl.constexpr, STATE_COLUMN: tl.constexpr,
    DIM: tl.constexpr, RATE: tl.constexpr,
    WEIGHT_BYTES: tl.constexpr, STATE_BYTES: tl.constexpr, STORAGE: tl.constexpr,
    REAL: tl.constexpr, VECTORS: tl.constexpr, SCALARS: tl.constexpr, RULE: tl.constexpr,
    A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, D: tl.constexpr,
    E: tl.constexpr, F: tl.constexpr, G: tl.constexpr,
    CACHED: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """One segment of the rows whose sums `_write_sums` has settled."""
    column = tl.arange(0, BLOCK_D)
    size = tl.minimum(runs_listed(cursors_ptr, form, first_run) - begin, most)
    for tile in range(tl.program_id(0), tl.cdiv(size, ROWS), tl.num_programs(0)):
        row = tile * ROWS + tl.arange(0, ROWS)
        handle = tl.load(handles_ptr + row, mask=row < size, other=-1)
        live = handle >= 0
        handle = tl.where(live, handle, 0)
        inside = live[:, None] & (column < DIM)[None, :]
        payload = payload_of(payloads_ptr, handle, live, CACHED)
        w, s0, s1, s2, p0, p1 = load_rows(
            chunks_ptr, columns, payload, live, column, inside, COLUMN, STATE_COLUMN, DIM,
            WEIGHT_BYTES, STATE_BYTES, STORAGE, REAL, VECTORS, SCALARS,
        )  # fmt: skip
        sums = sums_ptr + row.to(tl.int64)[:, None] * PITCH + (COLUMN + column)[None, :]
        g = tl.load(sums, mask=inside, other=0.0)
        table = chunk_word(chunks_ptr, columns, handle, live, _TABLE)
        rate = rates_of(rates_ptr, rate_columns, table, live, RATE, REAL)
        w, s0, s1, s2, p0, p1 = stepped(
            w, g, s0, s1, s2, p0, p1, rate, inside, global_step, DIM, RULE,
            A, B, C, D, E, F, G,
        )  # fmt: skip
        store_rows(
            tables_ptr, chunks_ptr, columns, handle, payload, table, live, column, inside,
            w, s0, s1, s2, p0, p1, domain, COLUMN, STATE_COLUMN, DIM,
            WEIGHT_BYTES, STATE_BYTES, STORAGE, REAL, VECTORS, SCALARS, BLOCK_D, SHIFT,
        )  # fmt: skip


def sum_runs(
    layout: ShardLayout,
    number: int,
    form: RowForm,
    runs: Runs,
    sources: Sources,
    out_UD: Tensor,
    ids_U: Tensor,
    counts_U: Tensor,
    tables_U: Tensor,
    *,
    counts_N: Tensor | None = None,
) -> Tensor:
    """Sums per row of one form, in order of first appearance in the call.

    Args:
        number: of the form; `runs.rooms[number]` rows of the outputs are enough.
        out_UD: `form.real` [>= U, D], contiguous.
        ids_U, counts_U: int64 [>= U]; tables_U: int32 [>= U], each row's table.
        counts_N: as `step.apply` takes them.

    Returns:
        U, an int32 scalar on the device.
    """
    first, room = runs.first_run(number), runs.rooms[number]
    size = _listed(runs, number)
    if room == 0:
        return size
    n, device = runs.order_N.numel(), runs.order_N.device
    counts = None if counts_N is None else counts_N[runs.order_N]
    marks_N = torch.zeros(n, dtype=torch.int32, device=device)
    block = 512
    launch(
        _mark_firsts, (programs_of(blocks_of(room, block), device),),
        runs.runs_WN, runs.runs_WN.shape[1], runs.pieces_WP, runs.cursors_FW, number, first,
        runs.last_run(number), runs.order_N, marks_N, BLOCK=block,
    )  # fmt: skip
    ranks_N = torch.cumsum(marks_N, 0, dtype=torch.int32)
    partials = add_pieces(number, form, runs, sources, counts)
    outputs = (out_UD, None, None, ids_U, counts_U, tables_U)
    _sum(layout, number, form, runs, sources, counts, partials, 0, room, outputs, ranks_N, None)
    return size


def compose(
    layout: ShardLayout,
    number: int,
    form: RowForm,
    runs: Runs,
    sources: Sources,
    rates_KR: Tensor,
    stamp: Stamp,
    counts_N: Tensor | None,
    seen: Sources | None,
    payload_H: Tensor | None = None,
) -> None:
    """`step.apply` of one form from materialised sums; counts_N in the order of the runs.

    Waits for the device where plain torch steps a segment.
    """
    device, room = runs.order_N.device, runs.rooms[number]
    plan = step_form(form)
    partials = add_pieces(number, form, runs, sources, counts_N)
    rows_each = max(min(_SLAB, _SLAB_BYTES // (plan.pitch * form.real.itemsize)), 1)
    for begin in range(0, room, rows_each):
        most = min(rows_each, room - begin)
        sums = torch.empty(most, plan.pitch, dtype=form.real, device=device)
        handles = torch.empty(most, dtype=torch.int32, device=device)
        places = torch.empty(most, dtype=torch.int64, device=device)
        outputs = (sums, handles, places, None, None, None)
        _sum(
            layout, number, form, runs, sources, counts_N, partials, begin, most, outputs,
            None, stamp,
        )  # fmt: skip
        for segment, constants in zip(form.segments, plan.segments, strict=True):
            if constants is not None:
                slab = (number, runs, begin, most)
                _step_segment(
                    layout, segment, constants, slab, handles, sums, rates_KR, stamp, payload_H
                )
                continue
            rows = min(max(int(_listed(runs, number)) - begin, 0), most)
            addresses = None if seen is None else seen.addresses_N[places[:rows]]
            step_in_torch(
                layout,
                form,
                segment,
                handles[:rows],
                sums[:rows],
                rates_KR,
                stamp,
                addresses,
                payload_H,
            )


def _listed(runs: Runs, number: int) -> Tensor:
    return runs.cursors_FW[number, :2].sum() - runs.first_run(number)


def _step_segment(
    layout: ShardLayout,
    segment: SegmentForm,
    constants: dict[str, Any],
    slab: tuple[int, Runs, int, int],
    handles_U: Tensor,
    sums_UD: Tensor,
    rates_KR: Tensor,
    stamp: Stamp,
    payload_H: Tensor | None,
) -> None:
    number, runs, begin, most = slab
    programs = programs_of(blocks_of(most, constants["ROWS"]), sums_UD.device)
    launch(
        _step_sums,
        (programs,),
        layout.tables_KT,
        layout.chunks_WC,
        layout.chunks_WC.shape[1],
        runs.cursors_FW,
        number,
        runs.first_run(number),
        begin,
        most,
        handles_U,
        handles_U if payload_H is None else payload_H,
        sums_UD,
        rates_KR,
        rates_KR.shape[1],
        stamp.global_step,
        stamp.domain,
        PITCH=sums_UD.shape[1],
        COLUMN=segment.column,
        STATE_COLUMN=segment.state_column,
        CACHED=payload_H is not None,
        **constants,
    )


def _sum(
    layout: ShardLayout,
    number: int,
    form: RowForm,
    runs: Runs,
    sources: Sources,
    counts_N: Tensor | None,
    partials: tuple[Tensor, Tensor],
    begin: int,
    most: int,
    outputs: tuple[Tensor | None, ...],
    ranks_N: Tensor | None,
    stamp: Stamp | None,
) -> None:
    """Launch `_write_sums`; outputs: sums, handles, places, ids, counts, tables."""
    unused: Any = sources.addresses_N
    plan, rows = step_form(form), rows_of_tile(form.dim, form.real)
    sums, *others = (unused if output is None else output for output in outputs)
    launch(
        _write_sums,
        (programs_of(blocks_of(most, rows), unused.device),),
        layout.counters_KC,
        layout.chunks_WC,
        layout.chunks_WC.shape[1],
        runs.runs_WN,
        runs.runs_WN.shape[1],
        runs.pieces_WP,
        runs.cursors_FW,
        number,
        runs.first_run(number),
        runs.last_run(number),
        runs.first_piece(number),
        begin,
        most,
        runs.order_N,
        unused if ranks_N is None else ranks_N,
        sources.addresses_N,
        unused if sources.factors_N is None else sources.factors_N,
        unused if counts_N is None else counts_N,
        *partials,
        sums,
        *others,
        0 if stamp is None else stamp.epoch,
        0 if stamp is None else stamp.event_time_s,
        DIM=form.dim,
        PITCH_BYTES=plan.pitch * form.real.itemsize,
        OUT_PITCH=sums.shape[1],
        ALIGN=sources.alignments[number],
        REAL=plan.real,
        LARGEST=plan.largest,
        CLIP=-1.0 if stamp is None else stamp.clip,
        FACTORS=sources.factors_N is not None,
        COUNTED=counts_N is not None,
        RANKED=ranks_N is not None,
        SETTLE=stamp is not None,
        ROWS=rows,
        BLOCK_D=columns_of_tile(form.dim),
        # As the fused step sums: each operation by itself.
        enable_fp_fusion=False,
    )
