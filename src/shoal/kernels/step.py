"""The optimizer step of a call: each row's gradients summed and its rule applied in registers.

Runs longer than `COLD_RUN` positions come as pieces: a first launch adds up each piece, many places
at a time. A second one takes a tile of runs, adds the gradients (or pieces) of each in order, one
of every run at a time so that many loads are under way, steps the rows and stamps them. Weights
and state are asked for before the gradients, so that their way is not added to theirs.

Forms with several segments, rules that kernels do not know and very wide rows are stepped from
materialised sums (`step_sums`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from shoal.kernels.gradients import Runs, Sources
from shoal.kernels.launch import blocks_of, launch
from shoal.kernels.step_rules import stepped
from shoal.kernels.step_sums import add_pieces, compose
from shoal.kernels.step_tiles import (
    FormCall,
    Stamp,
    accepted,
    count_nonfinite,
    item_rows,
    item_tallies,
    item_where,
    load_rows,
    load_stamps,
    programs_of,
    rates_of,
    run_words,
    runs_listed,
    step_form,
    store_rows,
    store_stamps,
)
from shoal.kernels.tables import TABLE_AT, RowForm, ShardLayout, chunk_word, payload_of


@triton.jit  # type: ignore[untyped-decorator]
def _summed(  # type: ignore[no-untyped-def]
    addresses_ptr, factors_ptr, counts_ptr, tallies_ptr, partials,
    first, items, length, hot, column,
    DIM: tl.constexpr, PITCH_BYTES: tl.constexpr, ALIGN: tl.constexpr, REAL: tl.constexpr,
    FACTORS: tl.constexpr, COUNTED: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Sums of a tile of runs, [R, D], and the occurrences that they stand for, int64 [R]."""
    g = tl.zeros([ROWS, BLOCK_D], REAL)
    occurrences = length.to(tl.int64)
    if COUNTED:
        occurrences = occurrences * 0
    for item in range(0, tl.max(items, axis=0), 2):
        # Both are asked for before either is added.
        at, on, cold, address = item_where(
            addresses_ptr, partials, first, item, items, hot, PITCH_BYTES
        )
        next_at, next_on, next_cold, next_address = item_where(
            addresses_ptr, partials, first, item + 1, items, hot, PITCH_BYTES
        )
        value = item_rows(address, factors_ptr, at, cold, column, DIM, ALIGN, REAL, FACTORS)
        next_value = item_rows(
            next_address, factors_ptr, next_at, next_cold, column, DIM, ALIGN, REAL, FACTORS
        )
        g += value
        g += next_value
        if COUNTED:
            occurrences += item_tallies(counts_ptr, tallies_ptr, at, on, hot)
            occurrences += item_tallies(counts_ptr, tallies_ptr, next_at, next_on, hot)
    return g, occurrences


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=[
        "columns", "room", "form", "first_run", "last_run", "first_piece", "rate_columns",
        "version", "event_time_s", "global_step", "domain",
    ]
)  # fmt: skip
def _step(  # type: ignore[no-untyped-def]
    tables_ptr, counters_ptr, chunks_ptr, columns,
    runs_ptr, room, cursors_ptr, form, first_run, last_run, first_piece,
    addresses_ptr, factors_ptr, counts_ptr, partials_ptr, tallies_ptr, rates_ptr, rate_columns,
    payloads_ptr, version, event_time_s, global_step, domain,
    DIM: tl.constexpr, PITCH_BYTES: tl.constexpr, RATE: tl.constexpr,
    WEIGHT_BYTES: tl.constexpr, STATE_BYTES: tl.constexpr, STORAGE: tl.constexpr,
    ALIGN: tl.constexpr, REAL: tl.constexpr, LARGEST: tl.constexpr, CLIP: tl.constexpr,
    SHIFT: tl.constexpr, FACTORS: tl.constexpr, COUNTED: tl.constexpr, CACHED: tl.constexpr,
    VECTORS: tl.constexpr, SCALARS: tl.constexpr, RULE: tl.constexpr,
    PARAMS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK_D)
    size = runs_listed(cursors_ptr, form, first_run)
    partials = partials_ptr.to(tl.int64)
    for tile in range(tl.program_id(0), tl.cdiv(size, ROWS), tl.num_programs(0)):
        _row, live, handle, first, items, length = run_words(
            runs_ptr, room, cursors_ptr, form, first_run, last_run, 0, tile, size, ROWS
        )
        hot = items < length
        first = tl.where(hot, first - first_piece, first).to(tl.int64)
        inside = live[:, None] & (column < DIM)[None, :]
        payload = payload_of(payloads_ptr, handle, live, CACHED)
        w, s0, s1, s2, p0, p1 = load_rows(
            chunks_ptr, columns, payload, live, column, inside, 0, 0, DIM,
            WEIGHT_BYTES, STATE_BYTES, STORAGE, REAL, VECTORS, SCALARS,
        )  # fmt: skip
        last, count = load_stamps(chunks_ptr, columns, handle, live)
        table = chunk_word(chunks_ptr, columns, handle, live, TABLE_AT)
        rate = rates_of(rates_ptr, rate_columns, table, live, RATE, REAL)
        g, occurrences = _summed(
            addresses_ptr, factors_ptr, counts_ptr, tallies_ptr, partials,
            first, items, length, hot, column,
            DIM, PITCH_BYTES, ALIGN, REAL, FACTORS, COUNTED, ROWS, BLOCK_D,
        )  # fmt: skip
        g, good = accepted(g, live, LARGEST, CLIP)
        count_nonfinite(counters_ptr, table, live & (good == 0), CLIP)
        w, s0, s1, s2, p0, p1 = stepped(
            w, g, s0, s1, s2, p0, p1, rate, inside, global_step, DIM, RULE, PARAMS
        )  # fmt: skip
        store_rows(
            tables_ptr, chunks_ptr, columns, handle, payload, table, good, column,
            inside & good[:, None], w, s0, s1, s2, p0, p1, domain, 0, 0, DIM,
            WEIGHT_BYTES, STATE_BYTES, STORAGE, REAL, VECTORS, SCALARS, BLOCK_D, SHIFT,
        )  # fmt: skip
        store_stamps(
            chunks_ptr, columns, handle, good, last, count, version, event_time_s, occurrences
        )  # fmt: skip


def apply(
    layout: ShardLayout,
    forms: Sequence[RowForm],
    runs: Runs,
    sources: Sources,
    rates_KR: Tensor,
    stamp: Stamp,
    *,
    counts_N: Tensor | None = None,
    seen: Sources | None = None,
    payload_H: Tensor | None = None,
) -> None:
    """One optimizer step of every row that the call names, and its metadata.

    Args:
        forms: the shard's row forms; `runs.rooms` says how many positions each has.
        sources: gradients, in the order of the runs.
        rates_KR: float64 [K, R] on the device, the rate of each segment of each table.
        counts_N: int32 [N], occurrences that each position stands for; None means 1 each. A ticket
            counts once: where it has several records, positions of the later ones stand for 0.
        seen: weights that the gradients were computed at, as `sources`; delay-compensated rules
            read them, and those of a row's first position count.
        payload_H: int32 by handle, a row's handle in a cache, or -1 where it has none.
    """
    counts = None if counts_N is None else counts_N[runs.order_N]
    calls = [
        FormCall(number, forms[number], runs, sources, counts)
        for number, room in enumerate(runs.rooms)
        if room
    ]
    # What needs memory comes first, so that a lack of it finds no form stepped.
    pieces = {
        call.number: add_pieces(call) for call in calls if step_form(call.form).fused is not None
    }
    for call in calls:
        if call.number not in pieces:
            compose(layout, call, rates_KR, stamp, seen, payload_H)
    for call in calls:
        if call.number in pieces:
            _apply_fused(layout, call, rates_KR, stamp, pieces[call.number], payload_H)


def _apply_fused(
    layout: ShardLayout,
    call: FormCall,
    rates_KR: Tensor,
    stamp: Stamp,
    pieces: tuple[Tensor, Tensor],
    payload_H: Tensor | None,
) -> None:
    plan = step_form(call.form)
    constants: Any = plan.fused
    launch(
        _step, (programs_of(blocks_of(call.room, constants["ROWS"]), call.device),),
        layout.tables_KT, layout.counters_KC, *layout.chunks, *call.run_words(),
        call.runs.first_piece(call.number), *call.gradients(), *pieces, rates_KR, rates_KR.shape[1],
        rates_KR if payload_H is None else payload_H, stamp.version, stamp.event_time_s,
        stamp.global_step, stamp.domain,
        PITCH_BYTES=plan.pitch * call.form.real.itemsize, LARGEST=plan.largest, CLIP=stamp.clip,
        CACHED=payload_H is not None, **call.constants(), **constants,
    )  # fmt: skip
