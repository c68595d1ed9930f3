"""The rows of lowest score of device tables, exactly as many as asked for, without a host wait."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from shoal.kernels.launch import blocks_of, launch
from shoal.kernels.row_changes import (
    JOB_SCORE,
    JOB_SECOND,
    JOB_TABLE,
    JOB_WORDS,
    Scan,
    directory_of,
    drop_rows,
    grid_of_scan,
    key_high,
    key_low,
    rows_at,
    scan_size,
    score_of,
)
from shoal.kernels.tables import ShardLayout

_BLOCK, _WARPS = 4096, 16
_BINS = 256
_LEVELS = 16  # each takes eight bits off the range of either half of a key

_TABLE, _SCORE, _SECOND = map(tl.constexpr, (JOB_TABLE, JOB_SCORE, JOB_SECOND))
_JOB_WORDS = tl.constexpr(JOB_WORDS)
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
    tables_ptr, chunks_ptr, columns, words, list_ptr, size, lower, base, shift, bins_ptr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Count the list's keys per bin."""
    for tile in range(tl.cdiv(size, BLOCK)):
        at = tl.arange(0, BLOCK).to(tl.int64) + tile * BLOCK
        live = at < size
        _, half = _halves(tables_ptr, chunks_ptr, columns, words, list_ptr, at, live, lower)
        tl.atomic_add(bins_ptr + _bin(half, base, shift), 1, mask=live, sem="relaxed")
    tl.debug_barrier()


@triton.jit  # type: ignore[untyped-decorator]
def _divide(  # type: ignore[no-untyped-def]
    tables_ptr, chunks_ptr, columns, words, list_ptr, size, lower, base, shift, edge, out_ptr,
    size_ptr,
    BLOCK: tl.constexpr,
):  # fmt: skip
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
    tables_ptr, chunks_ptr, columns, jobs_ptr, left_ptr, lists_ptr, sizes_ptr, room, bins_ptr,
    out_ptr, size_ptr,
    BLOCK: tl.constexpr, BINS: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
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
                tables_ptr, chunks_ptr, columns, words, rows, size, lower, base, shift, edge,
                out_ptr, size_ptr, BLOCK,
            )  # fmt: skip
            bins += BINS
    for tile in range(tl.cdiv(left, BLOCK)):
        at = tl.arange(0, BLOCK).to(tl.int64) + tile * BLOCK
        handle = tl.load(rows + at, mask=at < left, other=0)
        drop_rows(chunks_ptr, columns, handle, at < left, out_ptr, size_ptr)


_SELECT_BLOCK, _SELECT_WARPS = 2048, 8
_SMALL = 16384  # rows that one program may as well sift alone
_SAMPLES, _MINE, _OTHERS = 2048, 64, 256
_SHRINKS = 24  # to one part of this, mostly, a round of narrowing


@triton.jit
def _before(high, low, other_high, other_low):  # type: ignore[no-untyped-def]
    return (high < other_high) | ((high == other_high) & (low < other_low))


@triton.jit  # type: ignore[untyped-decorator]
def _job_of(  # type: ignore[no-untyped-def]
    tables_ptr, counters_ptr, jobs_ptr, lists_ptr, width, sizes_ptr, LISTED: tl.constexpr
):
    """A program's job: number, words, table and its directory, list, rows to go through."""
    job = tl.program_id(1).to(tl.int64)
    words = jobs_ptr + job * _JOB_WORDS
    table = tl.load(words + _TABLE)
    size = scan_size(counters_ptr, sizes_ptr, job, table, LISTED)
    return job, words, table, directory_of(tables_ptr, table), lists_ptr + job * width, size


@triton.jit(do_not_specialize=["columns", "width"])  # type: ignore[untyped-decorator]
def _bracket(  # type: ignore[no-untyped-def]
    tables_ptr, counters_ptr, chunks_ptr, columns, jobs_ptr, lists_ptr, width, sizes_ptr, pins_ptr,
    drops_ptr, bounds_ptr,
    LISTED: tl.constexpr, PINS: tl.constexpr, SAMPLES: tl.constexpr, MINE: tl.constexpr,
    OTHERS: tl.constexpr,
):  # fmt: skip
    """Writes bounds [E, 4], whose zeros stand for before every key and after every key."""
    job, words, table, directory, rows, size = _job_of(
        tables_ptr, counters_ptr, jobs_ptr, lists_ptr, width, sizes_ptr, LISTED
    )
    drop = tl.load(drops_ptr + job)
    if (drop > 0) & (size > 0):
        mine = tl.program_id(0).to(tl.int64) * MINE + tl.arange(0, MINE)
        at = mine * size // SAMPLES
        handle, live = rows_at(
            chunks_ptr, columns, directory, rows, pins_ptr, at, at < size, LISTED, PINS
        )
        high = key_high(chunks_ptr, columns, words, handle, live)
        low = key_low(tables_ptr, chunks_ptr, columns, table, handle, live)
        rank = tl.zeros([MINE], tl.int32)
        for start in range(0, SAMPLES, OTHERS):
            other = (start + tl.arange(0, OTHERS)).to(tl.int64)
            place = other * size // SAMPLES
            row, there = rows_at(
                chunks_ptr, columns, directory, rows, pins_ptr, place, place < size, LISTED, PINS
            )
            top = key_high(chunks_ptr, columns, words, row, there)[None, :]
            bottom = key_low(tables_ptr, chunks_ptr, columns, table, row, there)[None, :]
            before = _before(top, bottom, high[:, None], low[:, None])
            # A small table's sample holds rows several times.
            same = (top == high[:, None]) & (bottom == low[:, None])
            before = before | (same & (other[None, :] < mine[:, None]))
            rank += tl.sum((before & there[None, :]).to(tl.int32), axis=1)
        share = tl.minimum(drop.to(tl.float32) / size.to(tl.float32), 1.0) * SAMPLES
        margin = 4.0 * tl.sqrt(share) + 4.0
        first = tl.where(share > margin, (share - margin).to(tl.int32), -1)
        last = (share + margin).to(tl.int32) + 1
        to = bounds_ptr + job * 4 + mine * 0
        tl.store(to, high ^ _LEAST, mask=live & (rank == first))
        tl.store(to + 1, low ^ _LEAST, mask=live & (rank == first))
        tl.store(to + 2, high ^ _MOST, mask=live & (rank == last))
        tl.store(to + 3, low ^ _MOST, mask=live & (rank == last))


@triton.jit
def _zone_of(tables_ptr, chunks_ptr, columns, words, bounds, table, handle, live):  # type: ignore[no-untyped-def]
    """0 for rows before the bracket, 1 inside it, 2 after it; reads no more than it must."""
    first_high, first_low = tl.load(bounds) ^ _LEAST, tl.load(bounds + 1) ^ _LEAST
    last_high, last_low = tl.load(bounds + 2) ^ _MOST, tl.load(bounds + 3) ^ _MOST
    score = score_of(chunks_ptr, columns, handle, live, tl.load(words + _SCORE))
    high = (score << 32) ^ _LEAST
    near = live & (((high >> 32) == (first_high >> 32)) | ((high >> 32) == (last_high >> 32)))
    high = high | score_of(chunks_ptr, columns, handle, near, tl.load(words + _SECOND))
    near = near & ((high == first_high) | (high == last_high))
    low = key_low(tables_ptr, chunks_ptr, columns, table, handle, near)
    under = _before(high, low, first_high, first_low)
    over = _before(last_high, last_low, high, low)
    return tl.where(under, 0, tl.where(over, 2, 1))


@triton.jit(do_not_specialize=["columns", "width"])  # type: ignore[untyped-decorator]
def _census(  # type: ignore[no-untyped-def]
    tables_ptr, counters_ptr, chunks_ptr, columns, jobs_ptr, lists_ptr, width, sizes_ptr, pins_ptr,
    drops_ptr, bounds_ptr, zones_ptr,
    LISTED: tl.constexpr, PINS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Adds to zones [E, 2] the rows before the bracket and those inside it."""
    job, words, table, directory, rows, size = _job_of(
        tables_ptr, counters_ptr, jobs_ptr, lists_ptr, width, sizes_ptr, LISTED
    )
    size = tl.where(tl.load(drops_ptr + job) > 0, size, 0)
    before, inside = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    for tile in range(tl.program_id(0), tl.cdiv(size, BLOCK), tl.num_programs(0)):
        at = tl.arange(0, BLOCK).to(tl.int64) + tile * BLOCK
        handle, live = rows_at(
            chunks_ptr, columns, directory, rows, pins_ptr, at, at < size, LISTED, PINS
        )
        zone = _zone_of(
            tables_ptr, chunks_ptr, columns, words, bounds_ptr + job * 4, table, handle, live
        )
        before += (live & (zone == 0)).to(tl.int32)
        inside += (live & (zone == 1)).to(tl.int32)
    tl.atomic_add(zones_ptr + job * 2, tl.sum(before, axis=0).to(tl.int64), sem="relaxed")
    tl.atomic_add(zones_ptr + job * 2 + 1, tl.sum(inside, axis=0).to(tl.int64), sem="relaxed")


@triton.jit(do_not_specialize=["columns", "width", "room"])  # type: ignore[untyped-decorator]
def _narrow(  # type: ignore[no-untyped-def]
    tables_ptr, counters_ptr, chunks_ptr, columns, jobs_ptr, lists_ptr, width, sizes_ptr, pins_ptr,
    drops_ptr, bounds_ptr, zones_ptr, left_ptr, rest_ptr, rest_sizes_ptr, room, out_ptr, size_ptr,
    LISTED: tl.constexpr, PINS: tl.constexpr, BRACKETED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Drops what goes as a whole; lists what goes in part: rest [E, room], of which `left` go."""
    job, words, table, directory, rows, size = _job_of(
        tables_ptr, counters_ptr, jobs_ptr, lists_ptr, width, sizes_ptr, LISTED
    )
    drop = tl.load(drops_ptr + job)
    size = tl.where(drop > 0, size, 0)
    left, part = drop, 1
    if BRACKETED:
        before = tl.load(zones_ptr + job * 2)
        upto = before + tl.load(zones_ptr + job * 2 + 1)
        part = tl.where(drop < before, 0, tl.where(drop <= upto, 1, 2))
        left = drop - tl.where(part == 0, 0, tl.where(part == 1, before, upto))
    if tl.program_id(0) == 0:
        tl.store(left_ptr + job, left)
    for tile in range(tl.program_id(0), tl.cdiv(size, BLOCK), tl.num_programs(0)):
        at = tl.arange(0, BLOCK).to(tl.int64) + tile * BLOCK
        handle, live = rows_at(
            chunks_ptr, columns, directory, rows, pins_ptr, at, at < size, LISTED, PINS
        )
        kept = live
        if BRACKETED:
            zone = _zone_of(
                tables_ptr, chunks_ptr, columns, words, bounds_ptr + job * 4, table, handle, live
            )
            gone = live & (zone < part)
            kept = live & (zone == part)
            drop_rows(chunks_ptr, columns, handle, gone, out_ptr, size_ptr)
        count = tl.sum(kept.to(tl.int32), axis=0)
        if count > 0:
            first = tl.atomic_add(rest_sizes_ptr + job, count.to(tl.int64), sem="relaxed")
            place = job * room + first + tl.cumsum(kept.to(tl.int32), axis=0) - 1
            tl.store(rest_ptr + place, handle, mask=kept)


def _rounds(rows: int) -> int:
    """How often to narrow before one program can finish a table."""
    rounds = 0
    while rows > _SMALL * _SHRINKS**rounds and rounds < 3:
        rounds += 1
    return rounds


def lowest_rows(
    layout: ShardLayout, scan: Scan, drops_E: Tensor, most: int
) -> tuple[Tensor, Tensor]:
    """Drop, for each job, the rows of lowest key: all it has if it has fewer.

    Args:
        drops_E: int64 [E] on the device; 0 or less drops none.
        most: at least the sum of `drops_E`, known to the host.

    Returns:
        int32 handles, the first `size` of which count, and size, int32 [1]; on the device.
    """
    jobs, device = len(scan.jobs_EW), scan.jobs_EW.device
    out_M = torch.empty(min(most, jobs * scan.rows), dtype=torch.int32, device=device)
    size_1 = torch.zeros(1, dtype=torch.int32, device=device)
    if out_M.numel() == 0:
        return out_M, size_1
    # Everything first: rows that were marked as free must not be left without their erase.
    rounds = _rounds(scan.rows)
    turns = max(rounds, 1)
    lists = torch.empty(min(turns, 2), jobs, scan.rows, dtype=torch.int32, device=device)
    works = torch.zeros(turns, 8 * jobs, dtype=torch.int64, device=device)
    bins = torch.zeros(jobs * _LEVELS * _BINS, dtype=torch.int32, device=device)
    rest, left_E = scan, drops_E
    for turn in range(turns):
        space = (lists[turn % 2], works[turn])
        rest, left_E = _narrowed(layout, rest, left_E, out_M, size_1, space, bracketed=rounds > 0)
    launch(
        _finish, (jobs,),
        layout.tables_KT, *layout.chunks, rest.jobs_EW, left_E, rest.lists_EM, rest.sizes_E,
        rest.rows, bins, out_M, size_1,
        BLOCK=_BLOCK, BINS=_BINS, LEVELS=_LEVELS, num_warps=_WARPS,
    )  # fmt: skip
    return out_M, size_1


def _narrowed(
    layout: ShardLayout,
    scan: Scan,
    drops_E: Tensor,
    out_M: Tensor,
    size_1: Tensor,
    space: tuple[Tensor, Tensor],
    *,
    bracketed: bool,
) -> tuple[Scan, Tensor]:
    """A scan of the rows among which the last to go is, and how many of those go.

    space: int32 [E, rows] for a list, not the one that is scanned; int64 [8 * E] of zeros.
    """
    jobs = len(scan.jobs_EW)
    lists_EM, work = space
    bounds, zones = work[: 4 * jobs], work[4 * jobs : 6 * jobs]
    rest_E, left_E = work[6 * jobs : 7 * jobs], work[7 * jobs :]
    shared = scan.arguments(layout)
    if bracketed:
        launch(
            _bracket, (blocks_of(_SAMPLES, _MINE), jobs),
            drops_ptr=drops_E, bounds_ptr=bounds, SAMPLES=_SAMPLES, MINE=_MINE, OTHERS=_OTHERS,
            **shared,
        )  # fmt: skip
        launch(
            _census, grid_of_scan(scan, _SELECT_BLOCK),
            drops_ptr=drops_E, bounds_ptr=bounds, zones_ptr=zones, BLOCK=_SELECT_BLOCK,
            num_warps=_SELECT_WARPS, **shared,
        )  # fmt: skip
    launch(
        _narrow, grid_of_scan(scan, _SELECT_BLOCK),
        drops_ptr=drops_E, bounds_ptr=bounds, zones_ptr=zones, left_ptr=left_E, rest_ptr=lists_EM,
        rest_sizes_ptr=rest_E, room=scan.rows, out_ptr=out_M, size_ptr=size_1, BRACKETED=bracketed,
        BLOCK=_SELECT_BLOCK, num_warps=_SELECT_WARPS, **shared,
    )  # fmt: skip
    # Marks have been heeded; whoever is on the list may go.
    return Scan(scan.jobs_EW, scan.rows, lists_EM, rest_E), left_E
