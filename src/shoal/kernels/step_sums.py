"""Sums of a call's gradients per row in memory, and optimizer steps that start from them."""

from __future__ import annotations

from typing import Any

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from shoal.kernels.gradients import Runs, Sources, piece_room
from shoal.kernels.launch import blocks_of, launch
from shoal.kernels.rounding import storage_of
from shoal.kernels.step_rules import stepped
from shoal.kernels.step_tiles import (
    FormCall,
    Stamp,
    accepted,
    columns_of_tile,
    describe_rows,
    item_rows,
    item_tallies,
    item_where,
    load_rows,
    load_weights,
    payload_of,
    programs_of,
    rates_of,
    rows_of_tile,
    run_words,
    runs_listed,
    settle_rows,
    step_form,
    store_rows,
    store_weights,
)
from shoal.kernels.tables import (
    CHUNK_STATE,
    CHUNK_WEIGHTS,
    STATE_AT,
    TABLE_AT,
    RowForm,
    SegmentForm,
    ShardLayout,
    chunk_word,
    row_address,
)
from shoal.rules.optimizers import RuleContext

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


def add_pieces(call: FormCall) -> tuple[Tensor, Tensor]:
    """Sums of the pieces of a form's runs, [P, pitch], and what they stand for, int64 [P]."""
    form, runs, number = call.form, call.runs, call.number
    plan, real = step_form(form), form.real
    room, device = piece_room(call.room), call.device
    partials = torch.empty(room, plan.pitch, dtype=real, device=device)
    tallies = partials  # not read where each position counts once
    if call.counts_N is not None:
        tallies = torch.empty(room, dtype=torch.int64, device=device)
    if room == 0:
        return partials, tallies
    columns = columns_of_tile(form.dim)
    launch(
        _add_pieces, (programs_of(room, device), blocks_of(form.dim, columns)),
        runs.pieces_WP, runs.pieces_WP.shape[1], runs.cursors_FW, number, runs.first_piece(number),
        *call.gradients(), partials, tallies,
        DIM=form.dim, PITCH=plan.pitch, REAL=plan.real,
        ROWS=rows_of_tile(form.dim, real, most=_MOST_ROWS, size=2), BLOCK_D=columns,
        **call.constants(),
    )  # fmt: skip
    return partials, tallies


@triton.jit  # type: ignore[untyped-decorator]
def _summed(  # type: ignore[no-untyped-def]
    addresses_ptr, factors_ptr, partials, first, items, hot, most_items, column,
    DIM: tl.constexpr, PITCH_BYTES: tl.constexpr, ALIGN: tl.constexpr, REAL: tl.constexpr,
    FACTORS: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Columns of the sums of a tile's runs over their places, or pieces, in order."""
    g = tl.zeros([ROWS, BLOCK_D], REAL)
    for item in range(most_items):
        at, _on, cold, address = item_where(
            addresses_ptr, partials, first, item, items, hot, PITCH_BYTES
        )
        g += item_rows(address, factors_ptr, at, cold, column, DIM, ALIGN, REAL, FACTORS)
    return g


@triton.jit(do_not_specialize=["room", "last_run", "rows"])  # type: ignore[untyped-decorator]
def _write_rows(  # type: ignore[no-untyped-def]
    sums_ptr, runs_ptr, room, cursors_ptr, last_run, addresses_ptr, factors_ptr, partials_ptr, rows,
    DIM: tl.constexpr, PITCH_BYTES: tl.constexpr, ALIGN: tl.constexpr, REAL: tl.constexpr,
    FACTORS: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    size = runs_listed(cursors_ptr, 0, 0)
    partials = partials_ptr.to(tl.int64)
    for tile in range(tl.program_id(0), tl.cdiv(size, ROWS), tl.num_programs(0)):
        _run, live, row, first, items, length = run_words(
            runs_ptr, room, cursors_ptr, 0, 0, last_run, 0, tile, size, ROWS
        )
        hot = items < length
        first = first.to(tl.int64)
        most_items = tl.max(items, axis=0)
        live = live & (row < rows)
        out = sums_ptr + row.to(tl.int64) * DIM
        for start in range(0, DIM, BLOCK_D):
            column = start + tl.arange(0, BLOCK_D)
            g = _summed(
                addresses_ptr, factors_ptr, partials, first, items, hot, most_items, column,
                DIM, PITCH_BYTES, ALIGN, REAL, FACTORS, ROWS, BLOCK_D,
            )  # fmt: skip
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
    call = FormCall(0, form, runs, sources)
    partials, _ = add_pieces(call)
    launch(
        _write_rows,
        (programs_of(blocks_of(min(most, rows), tile), device),),
        sums,
        runs.runs_WN,
        runs.runs_WN.shape[1],
        runs.cursors_FW,
        runs.last_run(0),
        *call.gradients()[:2],
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


@triton.jit(do_not_specialize=["columns", "size"])  # type: ignore[untyped-decorator]
def _read(  # type: ignore[no-untyped-def]
    chunks_ptr, columns, handles_ptr, payloads_ptr, addresses_ptr, out_ptr, tables_ptr, size,
    WIDTH: tl.constexpr, COLUMN: tl.constexpr, ROW_BYTES: tl.constexpr, WORD: tl.constexpr,
    STORAGE: tl.constexpr, REAL: tl.constexpr, CACHED: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """[U, WIDTH] of rows' columns COLUMN on; from chunks, or from addresses if WORD is negative."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    handle = tl.load(handles_ptr + row, mask=row < size, other=-1)
    live = handle >= 0
    inside = live[:, None] & (column < WIDTH)[None, :]
    if WORD < 0:
        address = tl.load(addresses_ptr + row, mask=live, other=0)
        rows = address.to(tl.pointer_type(REAL))
        value = tl.load(rows[:, None] + (COLUMN + column)[None, :], mask=inside, other=0.0)
    else:
        handle = tl.where(live, handle, 0)
        payload = payload_of(payloads_ptr, handle, live, CACHED)
        address = row_address(chunks_ptr, columns, payload, ROW_BYTES, live, WORD)
        value = load_weights(address, COLUMN + column, inside, STORAGE, REAL)
        table = chunk_word(chunks_ptr, columns, handle, live, TABLE_AT)
        tl.store(tables_ptr + row, table, mask=row < size)
    inside = (row < size)[:, None] & (column < WIDTH)[None, :]
    tl.store(out_ptr + row[:, None] * WIDTH + column[None, :], value, mask=inside)


@triton.jit(do_not_specialize=["columns", "size", "domain"])  # type: ignore[untyped-decorator]
def _write(  # type: ignore[no-untyped-def]
    layout_ptr, chunks_ptr, columns, handles_ptr, payloads_ptr, values_ptr, size, domain,
    WIDTH: tl.constexpr, COLUMN: tl.constexpr, ROW_BYTES: tl.constexpr, STATE: tl.constexpr,
    STORAGE: tl.constexpr, REAL: tl.constexpr, CACHED: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Write [U, WIDTH] to rows' weights, or to their STATE, columns COLUMN on."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    start = tl.program_id(1) * BLOCK_D
    column = start + tl.arange(0, BLOCK_D)
    handle = tl.load(handles_ptr + row, mask=row < size, other=-1)
    live = handle >= 0
    handle = tl.where(live, handle, 0)
    payload = payload_of(payloads_ptr, handle, live, CACHED)
    inside = live[:, None] & (column < WIDTH)[None, :]
    value = tl.load(values_ptr + row[:, None] * WIDTH + column[None, :], mask=inside, other=0.0)
    if STATE:
        address = row_address(chunks_ptr, columns, payload, ROW_BYTES, live, STATE_AT)
        rows = tl.multiple_of(address.to(tl.pointer_type(REAL)), 16)
        tl.store(rows[:, None] + (COLUMN + column)[None, :], value, mask=inside)
    else:
        table = chunk_word(chunks_ptr, columns, handle, live, TABLE_AT)
        store_weights(
            layout_ptr, chunks_ptr, columns, handle, payload, table, live, start, column, inside,
            value, domain, COLUMN, ROW_BYTES, STORAGE, REAL, BLOCK_D, SHIFT,
        )  # fmt: skip


def step_in_torch(
    layout: ShardLayout,
    form: RowForm,
    segment: SegmentForm,
    handles_U: Tensor,
    sums_UD: Tensor,
    rates_KR: Tensor,
    stamp: Stamp,
    seen_U: Tensor | None,
    payload_H: Tensor | None,
) -> None:
    """One step of a segment by `rule.step`; waits for the device.

    Args:
        handles_U: int32 [U]; rows of negative ones stay as they are.
        sums_UD: [U, >= D] summed gradients of whole rows.
        rates_KR: float64 [K, R].
        seen_U: int64 [U], addresses of the whole rows that the gradients were computed at.
    """
    size = handles_U.numel()
    if size == 0:
        return
    column, dim = segment.column, segment.dim
    tables_U = torch.zeros(size, dtype=torch.int64, device=handles_U.device)
    w_UD = _fetched(layout, form, handles_U, payload_H, None, tables_U, dim, column, CHUNK_WEIGHTS)
    state_US = w_UD[:, :0]
    if segment.state_width:
        width, start = segment.state_width, segment.state_column
        state_US = _fetched(
            layout, form, handles_U, payload_H, None, tables_U, width, start, CHUNK_STATE
        )
    seen_UD = None
    if seen_U is not None:
        seen_UD = _fetched(layout, form, handles_U, payload_H, seen_U, tables_U, dim, column, -1)
    g_UD = sums_UD[:, column : column + dim]
    g_UD = segment.compressor.retrieve_backward(w_UD, g_UD, stamp.global_step)
    rates_U = rates_KR[:, segment.rate][tables_U]
    rates = torch.unique(rates_U).tolist()
    new_w_UD, new_state_US = torch.empty_like(w_UD), torch.empty_like(state_US)
    for rate in rates:
        chosen = slice(None) if len(rates) == 1 else (rates_U == rate).nonzero().flatten()
        context = RuleContext(stamp.global_step, None if seen_UD is None else seen_UD[chosen])
        new_w_UD[chosen], new_state_US[chosen] = segment.optimizer.step(
            w_UD[chosen], state_US[chosen], g_UD[chosen], rate, context
        )
    _stored(layout, form, handles_U, payload_H, new_w_UD, column, False, stamp)
    if segment.state_width:
        _stored(layout, form, handles_U, payload_H, new_state_US, segment.state_column, True, stamp)


def _fetched(
    layout: ShardLayout,
    form: RowForm,
    handles_U: Tensor,
    payload_H: Tensor | None,
    addresses_U: Tensor | None,
    tables_U: Tensor,
    width: int,
    column: int,
    word: int,
) -> Tensor:
    size = handles_U.numel()
    out = torch.empty(size, width, dtype=form.real, device=handles_U.device)
    state = word == CHUNK_STATE
    rows, columns = rows_of_tile(width, form.real), columns_of_tile(width)
    launch(
        _read, (blocks_of(size, rows), blocks_of(width, columns)),
        *layout.chunks, handles_U, handles_U if payload_H is None else payload_H,
        tables_U if addresses_U is None else addresses_U, out, tables_U, size,
        WIDTH=width, COLUMN=column, ROW_BYTES=form.state_bytes if state else form.weight_bytes,
        WORD=word, STORAGE=storage_of(form.real if state else form.dtype),
        REAL=step_form(form).real, CACHED=payload_H is not None, ROWS=rows, BLOCK_D=columns,
    )  # fmt: skip
    return out


def _stored(
    layout: ShardLayout,
    form: RowForm,
    handles_U: Tensor,
    payload_H: Tensor | None,
    values: Tensor,
    column: int,
    state: bool,
    stamp: Stamp,
) -> None:
    size, width = values.shape
    rows, columns = rows_of_tile(width, form.real), columns_of_tile(width)
    launch(
        _write, (blocks_of(size, rows), blocks_of(width, columns)),
        layout.tables_KT, *layout.chunks, handles_U, handles_U if payload_H is None else payload_H,
        values, size, stamp.domain,
        WIDTH=width, COLUMN=column, ROW_BYTES=form.state_bytes if state else form.weight_bytes,
        STATE=state, STORAGE=storage_of(form.dtype), REAL=step_form(form).real,
        CACHED=payload_H is not None, ROWS=rows, BLOCK_D=columns, SHIFT=form.shift,
    )  # fmt: skip


_SLAB = 1 << 18  # runs of a slab at most
_SLAB_BYTES = 1 << 28  # of their sums


@triton.jit(do_not_specialize=["room", "form", "first_run", "last_run"])  # type: ignore[untyped-decorator]
def _mark_firsts(  # type: ignore[no-untyped-def]
    runs_ptr, room, cursors_ptr, form, first_run, last_run, pieces_ptr, order_ptr, marks_ptr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """1 at the first position of each run."""
    size = runs_listed(cursors_ptr, form, first_run)
    for tile in range(tl.program_id(0), tl.cdiv(size, BLOCK), tl.num_programs(0)):
        _row, live, _handle, place, items, length = run_words(
            runs_ptr, room, cursors_ptr, form, first_run, last_run, 0, tile, size, BLOCK
        )
        hot = items < length
        place = tl.where(hot, tl.load(pieces_ptr + place, mask=hot, other=0), place)
        position = tl.load(order_ptr + place, mask=live, other=0)
        tl.store(marks_ptr + position, position.to(tl.int32) * 0 + 1, mask=live)


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=[
        "columns", "room", "form", "first_run", "last_run", "first_piece", "begin", "most",
        "version", "event_time_s",
    ]
)  # fmt: skip
def _write_sums(  # type: ignore[no-untyped-def]
    counters_ptr, chunks_ptr, columns,
    runs_ptr, room, cursors_ptr, form, first_run, last_run, pieces_ptr, first_piece, begin, most,
    order_ptr, ranks_ptr, addresses_ptr, factors_ptr, counts_ptr, partials_ptr, tallies_ptr,
    sums_ptr, handles_ptr, places_ptr, ids_ptr, occurrences_ptr, tables_ptr, version, event_time_s,
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
        row, live, handle, first, items, length = run_words(
            runs_ptr, room, cursors_ptr, form, first_run, last_run, begin, tile, size, ROWS
        )
        hot = items < length
        place = tl.where(hot, tl.load(pieces_ptr + first, mask=live & hot, other=0), first)
        first = tl.where(hot, first - first_piece, first).to(tl.int64)
        table = chunk_word(chunks_ptr, columns, handle, live, TABLE_AT)
        out = row.to(tl.int64)
        if RANKED:
            position = tl.load(order_ptr + place, mask=live, other=0)
            out = tl.load(ranks_ptr + position, mask=live, other=1).to(tl.int64) - 1
        good, most_items = live, tl.max(items, axis=0)
        for start in range(0, DIM, BLOCK_D):
            column = start + tl.arange(0, BLOCK_D)
            g = _summed(
                addresses_ptr, factors_ptr, partials, first, items, hot, most_items, column,
                DIM, PITCH_BYTES, ALIGN, REAL, FACTORS, ROWS, BLOCK_D,
            )  # fmt: skip
            if SETTLE:
                g, fine = accepted(g, live, LARGEST, CLIP)
                good = good & fine
            inside = live[:, None] & (column < DIM)[None, :]
            tl.store(sums_ptr + out[:, None] * OUT_PITCH + column[None, :], g, mask=inside)
        occurrences = length.to(tl.int64)
        if COUNTED:
            occurrences = occurrences * 0
            for item in range(most_items):
                occurrences += item_tallies(
                    counts_ptr, tallies_ptr, first + item, item < items, hot
                )
        if SETTLE:
            settle_rows(
                counters_ptr, chunks_ptr, columns, handle, table, live, good, version, event_time_s,
                occurrences, out, place, handles_ptr, places_ptr, CLIP,
            )  # fmt: skip
        else:
            describe_rows(
                chunks_ptr, columns, handle, live, out, occurrences, table,
                ids_ptr, occurrences_ptr, tables_ptr,
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
    PARAMS: tl.constexpr,
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
        table = chunk_word(chunks_ptr, columns, handle, live, TABLE_AT)
        rate = rates_of(rates_ptr, rate_columns, table, live, RATE, REAL)
        w, s0, s1, s2, p0, p1 = stepped(
            w, g, s0, s1, s2, p0, p1, rate, inside, global_step, DIM, RULE, PARAMS
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
    call = FormCall(
        number, form, runs, sources, None if counts_N is None else counts_N[runs.order_N]
    )
    size = _listed(call)
    if call.room == 0:
        return size
    marks_N = torch.zeros(runs.order_N.numel(), dtype=torch.int32, device=call.device)
    block = 512
    launch(
        _mark_firsts, (programs_of(blocks_of(call.room, block), call.device),),
        *call.run_words(), runs.pieces_WP, runs.order_N, marks_N, BLOCK=block,
    )  # fmt: skip
    ranks_N = torch.cumsum(marks_N, 0, dtype=torch.int32)
    outputs = (out_UD, None, None, ids_U, counts_U, tables_U)
    _sum(layout, call, add_pieces(call), 0, call.room, outputs, ranks_N, None)
    return size


def compose(
    layout: ShardLayout,
    call: FormCall,
    rates_KR: Tensor,
    stamp: Stamp,
    seen: Sources | None,
    payload_H: Tensor | None = None,
) -> None:
    """`step.apply` of one form from materialised sums.

    Waits for the device where plain torch steps a segment.
    """
    form, device, room = call.form, call.device, call.room
    plan = step_form(form)
    partials = add_pieces(call)
    rows_each = max(min(_SLAB, _SLAB_BYTES // (plan.pitch * form.real.itemsize)), 1)
    for begin in range(0, room, rows_each):
        most = min(rows_each, room - begin)
        sums = torch.empty(most, plan.pitch, dtype=form.real, device=device)
        handles = torch.empty(most, dtype=torch.int32, device=device)
        places = torch.empty(most, dtype=torch.int64, device=device)
        outputs = (sums, handles, places, None, None, None)
        _sum(layout, call, partials, begin, most, outputs, None, stamp)
        for segment, constants in zip(form.segments, plan.segments, strict=True):
            if constants is not None:
                _step_segment(
                    layout, call, segment, constants, begin, handles, sums, rates_KR, stamp,
                    payload_H,
                )  # fmt: skip
                continue
            rows = min(max(int(_listed(call)) - begin, 0), most)
            addresses = None if seen is None else seen.addresses_N[places[:rows]]
            step_in_torch(
                layout, form, segment, handles[:rows], sums[:rows], rates_KR, stamp, addresses,
                payload_H,
            )  # fmt: skip


def _listed(call: FormCall) -> Tensor:
    first = call.runs.first_run(call.number)
    return call.runs.cursors_FW[call.number, :2].sum() - first


def _step_segment(
    layout: ShardLayout,
    call: FormCall,
    segment: SegmentForm,
    constants: dict[str, Any],
    begin: int,
    handles_U: Tensor,
    sums_UD: Tensor,
    rates_KR: Tensor,
    stamp: Stamp,
    payload_H: Tensor | None,
) -> None:
    most = handles_U.numel()
    launch(
        _step_sums, (programs_of(blocks_of(most, constants["ROWS"]), call.device),),
        layout.tables_KT, *layout.chunks, *call.run_words()[2:5], begin, most, handles_U,
        handles_U if payload_H is None else payload_H, sums_UD, rates_KR, rates_KR.shape[1],
        stamp.global_step, stamp.domain,
        PITCH=sums_UD.shape[1], COLUMN=segment.column, STATE_COLUMN=segment.state_column,
        CACHED=payload_H is not None, **constants,
    )  # fmt: skip


def _sum(
    layout: ShardLayout,
    call: FormCall,
    partials: tuple[Tensor, Tensor],
    begin: int,
    most: int,
    outputs: tuple[Tensor | None, ...],
    ranks_N: Tensor | None,
    stamp: Stamp | None,
) -> None:
    """Launch `_write_sums`; outputs: sums, handles, places, ids, counts, tables."""
    form, runs, unused = call.form, call.runs, call.sources.addresses_N
    plan, rows = step_form(form), rows_of_tile(form.dim, form.real)
    sums, *others = (unused if output is None else output for output in outputs)
    launch(
        _write_sums,
        (programs_of(blocks_of(most, rows), call.device),),
        layout.counters_KC,
        *layout.chunks,
        *call.run_words(),
        runs.pieces_WP,
        runs.first_piece(call.number),
        begin,
        most,
        runs.order_N,
        unused if ranks_N is None else ranks_N,
        *call.gradients(),
        *partials,
        sums,
        *others,
        0 if stamp is None else stamp.version,
        0 if stamp is None else stamp.event_time_s,
        DIM=form.dim,
        PITCH_BYTES=plan.pitch * form.real.itemsize,
        OUT_PITCH=sums.shape[1],
        REAL=plan.real,
        LARGEST=plan.largest,
        CLIP=-1.0 if stamp is None else stamp.clip,
        RANKED=ranks_N is not None,
        SETTLE=stamp is not None,
        ROWS=rows,
        BLOCK_D=columns_of_tile(form.dim),
        # As the fused step sums: each operation by itself.
        enable_fp_fusion=False,
        **call.constants(),
    )
