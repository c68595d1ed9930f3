"""Optimizer steps in plain torch: rows are read out, stepped by their rule, and written back."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from shoal.kernels.launching import launch
from shoal.kernels.row_form import RowForm, SegmentForm
from shoal.kernels.row_rounding import storage_of
from shoal.kernels.row_tiles import blocks_of
from shoal.kernels.step_plan import Stamp, columns_of_tile, rows_of_tile, step_form
from shoal.kernels.step_tiles import load_weights, payload_of, store_weights
from shoal.kernels.table_layout import (
    CHUNK_STATE,
    CHUNK_TABLE,
    CHUNK_WEIGHTS,
    ShardLayout,
    chunk_word,
    row_address,
)
from shoal.rules.optimizers import RuleContext

__all__ = ["step_in_torch"]

_WEIGHTS, _STATE = tl.constexpr(CHUNK_WEIGHTS), tl.constexpr(CHUNK_STATE)
_TABLE = tl.constexpr(CHUNK_TABLE)


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
        table = chunk_word(chunks_ptr, columns, handle, live, _TABLE)
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
        address = row_address(chunks_ptr, columns, payload, ROW_BYTES, live, _STATE)
        rows = tl.multiple_of(address.to(tl.pointer_type(REAL)), 16)
        tl.store(rows[:, None] + (COLUMN + column)[None, :], value, mask=inside)
    else:
        table = chunk_word(chunks_ptr, columns, handle, live, _TABLE)
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
        _read,
        (blocks_of(size, rows), blocks_of(width, columns)),
        layout.chunks_WC,
        layout.chunks_WC.shape[1],
        handles_U,
        handles_U if payload_H is None else payload_H,
        tables_U if addresses_U is None else addresses_U,
        out,
        tables_U,
        size,
        WIDTH=width,
        COLUMN=column,
        ROW_BYTES=form.state_bytes if state else form.weight_bytes,
        WORD=word,
        STORAGE=storage_of(form.real if state else form.dtype),
        REAL=step_form(form).real,
        CACHED=payload_H is not None,
        ROWS=rows,
        BLOCK_D=columns,
    )
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
        _write,
        (blocks_of(size, rows), blocks_of(width, columns)),
        layout.tables_KT,
        layout.chunks_WC,
        layout.chunks_WC.shape[1],
        handles_U,
        handles_U if payload_H is None else payload_H,
        values,
        size,
        stamp.domain,
        WIDTH=width,
        COLUMN=column,
        ROW_BYTES=form.state_bytes if state else form.weight_bytes,
        STATE=state,
        STORAGE=storage_of(form.dtype),
        REAL=step_form(form).real,
        CACHED=payload_H is not None,
        ROWS=rows,
        BLOCK_D=columns,
        SHIFT=form.shift,
    )
