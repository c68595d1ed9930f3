"""Weights written into rows by position: the last of a row's positions wins, or all add up.

Positions are sorted by handle, stably, so a row's are neighbours in their order. Whoever adds does
so one position after the other, rounding to the row's storage each time, as the compiled core
does: the same bits.
"""

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from shoal.kernels.launching import launch
from shoal.kernels.row_form import RowForm
from shoal.kernels.row_rounding import (
    STORED_BFLOAT16,
    STORED_FLOAT16,
    load_weights,
    nearest_bits,
    storage_of,
    store_nearest,
    wide_of_bits,
)
from shoal.kernels.row_tiles import blocks_of, power_of_2
from shoal.kernels.table_layout import (
    CHUNK_SEEN,
    CHUNK_VERSIONS,
    CHUNK_WEIGHTS,
    ShardLayout,
    row_address,
)

__all__ = ["write_weights"]

_TILE = 2048  # elements of a program's block
_MOST_COLUMNS = 128

_WEIGHTS, _SEEN = tl.constexpr(CHUNK_WEIGHTS), tl.constexpr(CHUNK_SEEN)
_VERSIONS = tl.constexpr(CHUNK_VERSIONS)
_FLOAT16, _BFLOAT16 = tl.constexpr(STORED_FLOAT16), tl.constexpr(STORED_BFLOAT16)


@triton.jit  # type: ignore[untyped-decorator]
def _rounded(value, STORAGE: tl.constexpr):  # type: ignore[no-untyped-def]
    """A value as it is after it was stored."""
    if (STORAGE == _FLOAT16) | (STORAGE == _BFLOAT16):
        value = wide_of_bits(nearest_bits(value, STORAGE), STORAGE)
    return value


@triton.jit
def _stamp(chunks_ptr, columns, handle, live, epoch, event_time_s):  # type: ignore[no-untyped-def]
    """Version and last-seen time of written rows."""
    version = row_address(chunks_ptr, columns, handle, 4, live, _VERSIONS)
    stamp = (handle.to(tl.int64) * 0 + epoch).to(tl.int32)
    tl.store(version.to(tl.pointer_type(tl.int32)), stamp, mask=live)
    address = row_address(chunks_ptr, columns, handle, 4, live, _SEEN)
    seen = tl.load(address.to(tl.pointer_type(tl.uint32)), mask=live, other=0).to(tl.int64)
    seen = tl.maximum(seen, seen * 0 + event_time_s)
    tl.store(address.to(tl.pointer_type(tl.int32)), seen.to(tl.int32), mask=live)


@triton.jit(do_not_specialize=["n", "columns", "epoch", "event_time_s"])  # type: ignore[untyped-decorator]
def _write(  # type: ignore[no-untyped-def]
    handles_ptr,
    order_ptr,
    values_ptr,
    chunks_ptr,
    columns,
    n,
    width,
    row_bytes,
    epoch,
    event_time_s,
    ADD: tl.constexpr,
    STORAGE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    handle = tl.load(handles_ptr + at, mask=at < n, other=-1)
    # A run of equal handles is added from its first position on, or its last position is copied.
    side = at + 1
    if ADD:
        side = at - 1
    beside = tl.load(handles_ptr + side, mask=(side >= 0) & (side < n), other=-1)
    edge = (handle >= 0) & (beside != handle)
    address = row_address(chunks_ptr, columns, handle, row_bytes, edge, _WEIGHTS)
    inside = (column < width)[None, :]
    mask = edge[:, None] & inside
    if ADD:
        value = load_weights(address, column, mask, STORAGE)
        reading = edge
        further = at
        while tl.max(reading.to(tl.int32), axis=0) > 0:
            position = tl.load(order_ptr + further, mask=reading, other=0)
            source = values_ptr + position[:, None] * width + column[None, :]
            delta = tl.load(source, mask=reading[:, None] & inside, other=0.0)
            total = _rounded(value + delta, STORAGE)
            value = tl.where(reading[:, None], total, value)
            further += 1
            other = tl.load(handles_ptr + further, mask=reading & (further < n), other=-1)
            reading = reading & (other == handle)
    else:
        position = tl.load(order_ptr + at, mask=edge, other=0)
        value = tl.load(
            values_ptr + position[:, None] * width + column[None, :], mask=mask, other=0.0
        )
    store_nearest(address, column, value, mask, STORAGE)
    if tl.program_id(1) == 0:
        _stamp(chunks_ptr, columns, handle, edge, epoch, event_time_s)


def write_weights(
    layout: ShardLayout,
    form: RowForm,
    handles_N: Tensor,
    values_ND: Tensor,
    *,
    add: bool,
    epoch: int,
    event_time_s: int,
) -> None:
    """Set rows to values, or add values to them; rows of one form.

    Of positions with one handle, the last is set, or all are added in their order. Values that a
    16-bit row cannot hold are rounded to the nearest, ties to even. The row's version becomes
    `epoch`, its last-seen time no less than `event_time_s`; its state and count stay.

    Args:
        handles_N: int32 [N]; -1 is passed over.
        values_ND: [N, D] of `form.real`, contiguous.
    """
    n, width = values_ND.shape
    if n == 0:
        return
    sorted_N, order_N = handles_N.sort(stable=True)
    block = min(power_of_2(width), _MOST_COLUMNS)
    rows = max(_TILE // block, 1)
    launch(
        _write,
        (blocks_of(n, rows), blocks_of(width, block)),
        sorted_N,
        order_N,
        values_ND,
        layout.chunks_WC,
        layout.chunks_WC.shape[1],
        n,
        width,
        form.weight_bytes,
        epoch,
        event_time_s,
        ADD=add,
        STORAGE=storage_of(form.dtype),
        ROWS=rows,
        BLOCK=block,
    )
