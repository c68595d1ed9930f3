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
from shoal.kernels.rows import read_ids, read_values, write_state
from shoal.kernels.step_rules import stepped
from shoal.kernels.step_tiles import (
    FormCall,
    Stamp,
    accepted,
    columns_of_tile,
    count_nonfinite,
    item_rows,
    item_tallies,
    item_where,
    load_rows,
    load_stamps,
    programs_of,
    rates_of,
    rows_of_tile,
    run_words,
    runs_listed,
    step_form,
    store_rows,
    store_stamps,
    store_weights,
)
from shoal.kernels.tables import (
    TABLE_AT,
    RowForm,
    SegmentForm,
    ShardLayout,
    chunk_word,
    payload_of,
    tables_of,
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
        _write_rows, (programs_of(blocks_of(min(most, rows), tile), device),),
        sums, runs.runs_WN, runs.runs_WN.shape[1], runs.cursors_FW, runs.last_run(0),
        *call.gradients()[:2], partials, rows,
        DIM=form.dim, PITCH_BYTES=plan.pitch * form.real.itemsize, ALIGN=sources.alignments[0],
        REAL=plan.real, FACTORS=sources.factors_N is not None, ROWS=tile,
        BLOCK_D=columns_of_tile(form.dim),
        # As a step rounds: each operation by itself.
        enable_fp_fusion=False,
    )  # fmt: skip
    return sums


@triton.jit(do_not_specialize=["size"])  # type: ignore[untyped-decorator]
def _read_seen(  # type: ignore[no-untyped-def]
    addresses_ptr, out_ptr, size,
    DIM: tl.constexpr, COLUMN: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """[U, DIM]: columns COLUMN on of rows at addresses; 0 where that is 0."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    address = tl.load(addresses_ptr + row, mask=row < size, other=0)
    rows = address.to(tl.pointer_type(out_ptr.dtype.element_ty)) + COLUMN
    inside = (address != 0)[:, None] & (column < DIM)[None, :]
    value = tl.load(rows[:, None] + column[None, :], mask=inside, other=0.0)
    inside = (row < size)[:, None] & (column < DIM)[None, :]
    tl.store(out_ptr + row[:, None] * DIM + column[None, :], value, mask=inside)


@triton.jit(do_not_specialize=["columns", "size", "domain"])  # type: ignore[untyped-decorator]
def _write_weights(  # type: ignore[no-untyped-def]
    layout_ptr, chunks_ptr, columns, handles_ptr, places_ptr, values_ptr, size, domain,
    DIM: tl.constexpr, COLUMN: tl.constexpr, ROW_BYTES: tl.constexpr, STORAGE: tl.constexpr,
    REAL: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Write [U, DIM] to rows' weights, columns COLUMN on."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    start = tl.program_id(1) * BLOCK_D
    column = start + tl.arange(0, BLOCK_D)
    handle = tl.load(handles_ptr + row, mask=row < size, other=-1)
    live = handle >= 0
    handle = tl.where(live, handle, 0)
    place = tl.load(places_ptr + row, mask=live, other=0)
    inside = live[:, None] & (column < DIM)[None, :]
    value = tl.load(values_ptr + row[:, None] * DIM + column[None, :], mask=inside, other=0.0)
    table = chunk_word(chunks_ptr, columns, handle, live, TABLE_AT)
    store_weights(
        layout_ptr, chunks_ptr, columns, handle, place, table, live, start, column, inside,
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
    places_U = handles_U
    if payload_H is not None:
        cached_U = payload_H[handles_U.clamp(min=0)]
        places_U = torch.where((handles_U >= 0) & (cached_U >= 0), cached_U, handles_U)
    weights_UD, states_US = read_values(layout, form, places_U)
    column, dim = segment.column, segment.dim
    w_UD = weights_UD[:, column : column + dim].to(form.real)
    state_US = states_US[:, segment.state_column :][:, : segment.state_width]
    rows, columns = rows_of_tile(dim, form.real), columns_of_tile(dim)
    grid, tile = (
        (blocks_of(size, rows), blocks_of(dim, columns)),
        {"ROWS": rows, "BLOCK_D": columns},
    )
    seen_UD = None
    if seen_U is not None:
        seen_UD = torch.empty_like(w_UD, memory_format=torch.contiguous_format)
        launch(_read_seen, grid, seen_U, seen_UD, size, DIM=dim, COLUMN=column, **tile)
    g_UD = sums_UD[:, column : column + dim]
    g_UD = segment.compressor.retrieve_backward(w_UD, g_UD, stamp.global_step)
    rates_U = rates_KR[:, segment.rate][tables_of(layout, handles_U)]
    rates = torch.unique(rates_U).tolist()
    new_w_UD = torch.empty(size, dim, dtype=form.real, device=handles_U.device)
    for rate in rates:
        chosen = slice(None) if len(rates) == 1 else (rates_U == rate).nonzero().flatten()
        context = RuleContext(stamp.global_step, None if seen_UD is None else seen_UD[chosen])
        new_w_UD[chosen], state_US[chosen] = segment.optimizer.step(
            w_UD[chosen], state_US[chosen], g_UD[chosen], rate, context
        )
    launch(
        _write_weights, grid,
        layout.tables_KT, *layout.chunks, handles_U, places_U, new_w_UD, size, stamp.domain,
        DIM=dim, COLUMN=column, ROW_BYTES=form.weight_bytes, STORAGE=storage_of(form.dtype),
        REAL=step_form(form).real, SHIFT=form.shift, **tile,
    )  # fmt: skip
    write_state(layout, form, places_U, states_US)


_SLAB = 1 << 18  # runs of a slab at most
_SLAB_BYTES = 1 << 28  # of their sums


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=[
        "columns", "room", "form", "first_run", "last_run", "first_piece", "begin", "most",
        "version", "event_time_s",
    ]
)  # fmt: skip
def _write_sums(  # type: ignore[no-untyped-def]
    counters_ptr, chunks_ptr, columns,
    runs_ptr, room, cursors_ptr, form, first_run, last_run, pieces_ptr, first_piece, begin, most,
    addresses_ptr, factors_ptr, counts_ptr, partials_ptr, tallies_ptr,
    sums_ptr, handles_ptr, places_ptr, occurrences_ptr, version, event_time_s,
    DIM: tl.constexpr, PITCH_BYTES: tl.constexpr, OUT_PITCH: tl.constexpr, ALIGN: tl.constexpr,
    REAL: tl.constexpr, LARGEST: tl.constexpr, CLIP: tl.constexpr, FACTORS: tl.constexpr,
    COUNTED: tl.constexpr, SETTLE: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Sums of runs `begin` on, `most` of them at the most, with their handles and first places.

    SETTLE: apply the policy, stamp the rows that will be stepped, and put -1 for the handles of
    others, which are counted. Else write occurrences.
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
        if SETTLE:
            table = chunk_word(chunks_ptr, columns, handle, live, TABLE_AT)
        out = row.to(tl.int64)
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
            count_nonfinite(counters_ptr, table, live & (good == 0), CLIP)
            last, count = load_stamps(chunks_ptr, columns, handle, good)
            store_stamps(
                chunks_ptr, columns, handle, good, last, count, version, event_time_s, occurrences
            )  # fmt: skip
        else:
            tl.store(occurrences_ptr + out, occurrences, mask=live)
        tl.store(handles_ptr + out, tl.where(good, handle, -1), mask=live)
        tl.store(places_ptr + out, place.to(tl.int64), mask=live)


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
    *,
    counts_N: Tensor | None = None,
) -> list[tuple[int, Tensor, Tensor, Tensor]]:
    """Sums per row of one form; waits for the device.

    Args:
        number: of the form.
        counts_N: as `step.apply` takes them.

    Returns:
        Of each table that has rows here: its index, ids int64 [U], sums [U, D] and occurrences
        int64 [U], in order of first appearance in the call.
    """
    call = FormCall(
        number, form, runs, sources, None if counts_N is None else counts_N[runs.order_N]
    )
    if call.room == 0:
        return []
    sums_UD = torch.empty(call.room, form.dim, dtype=form.real, device=call.device)
    handles_U, places_U, occurrences_U = _sum(layout, call, add_pieces(call), 0, sums_UD, None)
    size = int(_listed(call))
    order_U = runs.order_N[places_U[:size]].argsort()
    handles_U = handles_U[:size][order_U]
    ids_U, tables_U = read_ids(layout, handles_U), tables_of(layout, handles_U)
    found = []
    for table in torch.unique(tables_U).tolist():
        mine_U = tables_U == table
        own_U = order_U[mine_U]
        found.append((table, ids_U[mine_U], sums_UD[own_U], occurrences_U[own_U]))
    return found


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
    plan, partials = step_form(form), add_pieces(call)
    rows_each = max(min(_SLAB, _SLAB_BYTES // (plan.pitch * form.real.itemsize)), 1)
    for begin in range(0, room, rows_each):
        most = min(rows_each, room - begin)
        sums = torch.empty(most, plan.pitch, dtype=form.real, device=device)
        handles, places, _ = _sum(layout, call, partials, begin, sums, stamp)
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
    sums_UD: Tensor,
    stamp: Stamp | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch `_write_sums` for runs `begin` on, as many as sums have room for; stamp: SETTLE.

    Returns:
        handles int32 [U], first places int64 [U], and occurrences int64 [U] without a stamp.
    """
    form, runs, most = call.form, call.runs, len(sums_UD)
    plan, rows = step_form(form), rows_of_tile(form.dim, form.real)
    handles_U = torch.empty(most, dtype=torch.int32, device=call.device)
    places_U = torch.empty(most, dtype=torch.int64, device=call.device)
    occurrences_U = places_U if stamp is not None else torch.empty_like(places_U)
    launch(
        _write_sums, (programs_of(blocks_of(most, rows), call.device),),
        layout.counters_KC, *layout.chunks, *call.run_words(), runs.pieces_WP,
        runs.first_piece(call.number), begin, most, *call.gradients(), *partials,
        sums_UD, handles_U, places_U, occurrences_U,
        0 if stamp is None else stamp.version, 0 if stamp is None else stamp.event_time_s,
        DIM=form.dim, PITCH_BYTES=plan.pitch * form.real.itemsize, OUT_PITCH=sums_UD.shape[1],
        REAL=plan.real, LARGEST=plan.largest, CLIP=-1.0 if stamp is None else stamp.clip,
        SETTLE=stamp is not None, ROWS=rows, BLOCK_D=columns_of_tile(form.dim),
        # As the fused step sums: each operation by itself.
        enable_fp_fusion=False, **call.constants(),
    )  # fmt: skip
    return handles_U, places_U, occurrences_U
