"""The last rows to go of those that a selection has narrowed down to: one program a table.

A list is divided by the highest eight bits in which its keys still differ: rows below the bin in
which the number is met go, rows in it stay on the list, until all that stay go.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from shoal.kernels.launching import launch
from shoal.kernels.row_scan import (
    JOB_TABLE,
    JOB_WORDS,
    Scan,
    drop_rows,
    key_high,
    key_low,
)
from shoal.kernels.table_layout import ShardLayout

__all__ = ["finish_bins", "finish_rows"]

_BLOCK, _WARPS = 4096, 16
_BINS = 256
_LEVELS = 16  # each takes eight bits off the range of either half of a key

_TABLE, _JOB_WORDS = tl.constexpr(JOB_TABLE), tl.constexpr(JOB_WORDS)
_LEAST, _MOST = tl.constexpr(-(1 << 63)), tl.constexpr((1 << 63) - 1)


@triton.jit
def _halves(tables_ptr, chunks_ptr, columns, words, list_ptr, at, live, lower):  # type: ignore[no-untyped-def]
    """Handles of a list, and one half of each key: the upper one, or with `lower` the hash."""
    handle = tl.load(list_ptr + at, mask=live, other=0)
    table = tl.load(words + _TABLE)
    high = key_high(chunks_ptr, columns, words, handle, live & (lower == 0))
    low = key_low(tables_ptr, chunks_ptr, columns, table, handle, live & (lower != 0))
    return handle, tl.where(lower != 0, low, high)


@triton.jit  # type: ignore[untyped-decorator]
def _range(  # type: ignore[no-untyped-def]
    tables_ptr, chunks_ptr, columns, words, list_ptr, size, lower, BLOCK: tl.constexpr
):
    """Least half of a key on the list, and the span of all, uint64."""
    least = tl.full([BLOCK], _MOST, tl.int64)
    most = tl.full([BLOCK], _LEAST, tl.int64)
    for tile in range(tl.cdiv(size, BLOCK)):
        at = tl.arange(0, BLOCK).to(tl.int64) + tile * BLOCK
        live = at < size
        _, half = _halves(tables_ptr, chunks_ptr, columns, words, list_ptr, at, live, lower)
        least = tl.minimum(least, tl.where(live, half, _MOST))
        most = tl.maximum(most, tl.where(live, half, _LEAST))
    base = tl.min(least, axis=0)
    return base, (tl.max(most, axis=0) - base).to(tl.uint64, bitcast=True)


@triton.jit
def _bin(half, base, shift):  # type: ignore[no-untyped-def]
    return ((half - base).to(tl.uint64, bitcast=True) >> shift).to(tl.int64)


@triton.jit  # type: ignore[untyped-decorator]
def _tally(  # type: ignore[no-untyped-def]
    tables_ptr,
    chunks_ptr,
    columns,
    words,
    list_ptr,
    size,
    lower,
    base,
    shift,
    bins_ptr,
    BLOCK: tl.constexpr,
):
    """Count the list's keys per bin."""
    for tile in range(tl.cdiv(size, BLOCK)):
        at = tl.arange(0, BLOCK).to(tl.int64) + tile * BLOCK
        live = at < size
        _, half = _halves(tables_ptr, chunks_ptr, columns, words, list_ptr, at, live, lower)
        tl.atomic_add(bins_ptr + _bin(half, base, shift), 1, mask=live, sem="relaxed")
    tl.debug_barrier()


@triton.jit  # type: ignore[untyped-decorator]
def _divide(  # type: ignore[no-untyped-def]
    tables_ptr,
    chunks_ptr,
    columns,
    words,
    list_ptr,
    size,
    lower,
    base,
    shift,
    edge,
    out_ptr,
    size_ptr,
    BLOCK: tl.constexpr,
):
    """Drop rows below bin `edge`, keep those of that bin on the list; returns its new size."""
    kept = size * 0
    for tile in range(tl.cdiv(size, BLOCK)):
        at = tl.arange(0, BLOCK).to(tl.int64) + tile * BLOCK
        live = at < size
        handle, half = _halves(tables_ptr, chunks_ptr, columns, words, list_ptr, at, live, lower)
        bin_ = _bin(half, base, shift)
        gone = live & (bin_ < edge)
        drop_rows(chunks_ptr, columns, handle, gone, out_ptr, size_ptr)
        # Places come from a sum over all lanes, so no store overtakes a lane's load.
        stays = (live & (bin_ == edge)).to(tl.int64)
        tl.store(list_ptr + kept + tl.cumsum(stays, axis=0) - 1, handle, mask=stays != 0)
        kept += tl.sum(stays, axis=0)
    tl.debug_barrier()
    return kept


@triton.jit(do_not_specialize=["columns", "room"])  # type: ignore[untyped-decorator]
def _finish(  # type: ignore[no-untyped-def]
    tables_ptr,
    chunks_ptr,
    columns,
    jobs_ptr,
    left_ptr,
    lists_ptr,
    sizes_ptr,
    room,
    bins_ptr,
    out_ptr,
    size_ptr,
    BLOCK: tl.constexpr,
    BINS: tl.constexpr,
    LEVELS: tl.constexpr,
):
    job = tl.program_id(0).to(tl.int64)
    words = jobs_ptr + job * _JOB_WORDS
    rows = lists_ptr + job * room
    bins = bins_ptr + job * LEVELS * BINS
    size = tl.load(sizes_ptr + job)
    left = tl.minimum(tl.load(left_ptr + job), size)
    lower = size * 0
    while (left > 0) & (left < size) & (lower < 2):
        base, span = _range(tables_ptr, chunks_ptr, columns, words, rows, size, lower, BLOCK)
        if span == 0:
            lower += 1
        else:
            shift = span * 0
            while (span >> shift) >= BINS:
                shift += 1
            _tally(
                tables_ptr, chunks_ptr, columns, words, rows, size, lower, base, shift, bins, BLOCK
            )
            ends = tl.cumsum(tl.load(bins + tl.arange(0, BINS)).to(tl.int64), axis=0)
            edge = tl.sum((ends < left).to(tl.int64), axis=0)
            left -= tl.max(tl.where(ends < left, ends, 0), axis=0)
            size = _divide(
                tables_ptr,
                chunks_ptr,
                columns,
                words,
                rows,
                size,
                lower,
                base,
                shift,
                edge,
                out_ptr,
                size_ptr,
                BLOCK,
            )
            bins += BINS
    for tile in range(tl.cdiv(left, BLOCK)):
        at = tl.arange(0, BLOCK).to(tl.int64) + tile * BLOCK
        handle = tl.load(rows + at, mask=at < left, other=0)
        drop_rows(chunks_ptr, columns, handle, at < left, out_ptr, size_ptr)


def finish_bins(jobs: int, device: torch.device) -> Tensor:
    """Scratch of `finish_rows`."""
    return torch.zeros(jobs * _LEVELS * _BINS, dtype=torch.int32, device=device)


def finish_rows(
    layout: ShardLayout, scan: Scan, left_E: Tensor, out_M: Tensor, size_1: Tensor, bins: Tensor
) -> None:
    """Drop the `left_E` rows of lowest key, or all, of each list of `scan`, which it uses up.

    Handles go behind the first `size_1` of `out_M`, int32.
    """
    jobs, rest_EM = len(scan.jobs_EW), scan.lists_EM
    launch(
        _finish,
        (jobs,),
        layout.tables_KT,
        layout.chunks_WC,
        layout.chunks_WC.shape[1],
        scan.jobs_EW,
        left_E,
        rest_EM,
        scan.sizes_E,
        scan.rows,
        bins,
        out_M,
        size_1,
        BLOCK=_BLOCK,
        BINS=_BINS,
        LEVELS=_LEVELS,
        num_warps=_WARPS,
    )
