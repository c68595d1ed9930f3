"""The rows of lowest score of device tables, exactly as many as asked for, without a host wait.

A row's key is 128 bits and no two are equal: score, second score, hash, each unsigned; so there
is one answer. Four launches find it:

- `_bracket` ranks a sample of a table's rows and keeps two keys that should enclose the last key
  to go: its rank in the sample is known to within a few standard deviations;
- `_census` counts the rows before and inside the bracket. Most rows are judged by their score
  alone, so a scan reads eight or nine bytes a row;
- `_narrow` drops the rows of each part that goes as a whole, and lists those of the part that
  goes in part: a few per cent of the table, or all of it if a bracket missed, which costs time;
- `shoal.kernels.row_sift` takes the rest from that list, one program a table.

Small tables need the last two only; huge ones are narrowed again first.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from shoal.kernels.launching import launch
from shoal.kernels.row_scan import (
    JOB_SCORE,
    JOB_SECOND,
    JOB_TABLE,
    JOB_WORDS,
    Scan,
    directory_of,
    drop_rows,
    key_high,
    key_low,
    programs_of,
    rows_at,
    scan_size,
    score_of,
)
from shoal.kernels.row_sift import finish_bins, finish_rows
from shoal.kernels.row_tiles import blocks_of
from shoal.kernels.table_layout import ShardLayout

__all__ = ["lowest_rows"]

_BLOCK, _WARPS = 2048, 8
_SMALL = 16384  # rows that one program may as well sift alone
_SAMPLES, _MINE, _OTHERS = 2048, 64, 256
_SHRINKS = 24  # to one part of this, mostly, a round of narrowing

_TABLE, _JOB_WORDS = tl.constexpr(JOB_TABLE), tl.constexpr(JOB_WORDS)
_SCORE, _SECOND = tl.constexpr(JOB_SCORE), tl.constexpr(JOB_SECOND)
_LEAST, _MOST = tl.constexpr(-(1 << 63)), tl.constexpr((1 << 63) - 1)


@triton.jit
def _before(high, low, other_high, other_low):  # type: ignore[no-untyped-def]
    return (high < other_high) | ((high == other_high) & (low < other_low))


@triton.jit(do_not_specialize=["columns", "width"])  # type: ignore[untyped-decorator]
def _bracket(  # type: ignore[no-untyped-def]
    tables_ptr,
    counters_ptr,
    chunks_ptr,
    columns,
    jobs_ptr,
    lists_ptr,
    width,
    sizes_ptr,
    pins_ptr,
    drops_ptr,
    bounds_ptr,
    LISTED: tl.constexpr,
    PINS: tl.constexpr,
    SAMPLES: tl.constexpr,
    MINE: tl.constexpr,
    OTHERS: tl.constexpr,
):
    """Writes bounds [E, 4], whose zeros stand for before every key and after every key."""
    job = tl.program_id(1).to(tl.int64)
    words = jobs_ptr + job * _JOB_WORDS
    table = tl.load(words + _TABLE)
    directory = directory_of(tables_ptr, table)
    rows = lists_ptr + job * width
    size = scan_size(counters_ptr, sizes_ptr, job, table, LISTED)
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
    tables_ptr,
    counters_ptr,
    chunks_ptr,
    columns,
    jobs_ptr,
    lists_ptr,
    width,
    sizes_ptr,
    pins_ptr,
    drops_ptr,
    bounds_ptr,
    zones_ptr,
    LISTED: tl.constexpr,
    PINS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Adds to zones [E, 2] the rows before the bracket and those inside it."""
    job = tl.program_id(1).to(tl.int64)
    words = jobs_ptr + job * _JOB_WORDS
    table = tl.load(words + _TABLE)
    directory = directory_of(tables_ptr, table)
    rows = lists_ptr + job * width
    size = scan_size(counters_ptr, sizes_ptr, job, table, LISTED)
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
    tables_ptr,
    counters_ptr,
    chunks_ptr,
    columns,
    jobs_ptr,
    lists_ptr,
    width,
    sizes_ptr,
    pins_ptr,
    drops_ptr,
    bounds_ptr,
    zones_ptr,
    left_ptr,
    rest_ptr,
    rest_sizes_ptr,
    room,
    out_ptr,
    size_ptr,
    LISTED: tl.constexpr,
    PINS: tl.constexpr,
    BRACKETED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Drops what goes as a whole; lists what goes in part: rest [E, room], of which `left` go."""
    job = tl.program_id(1).to(tl.int64)
    words = jobs_ptr + job * _JOB_WORDS
    table = tl.load(words + _TABLE)
    directory = directory_of(tables_ptr, table)
    rows = lists_ptr + job * width
    size = scan_size(counters_ptr, sizes_ptr, job, table, LISTED)
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
    bins = finish_bins(jobs, device)
    rest, left_E = scan, drops_E
    for turn in range(turns):
        space = (lists[turn % 2], works[turn])
        rest, left_E = _narrowed(layout, rest, left_E, out_M, size_1, space, bracketed=rounds > 0)
    finish_rows(layout, rest, left_E, out_M, size_1, bins)
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
            _bracket,
            (blocks_of(_SAMPLES, _MINE), jobs),
            drops_ptr=drops_E,
            bounds_ptr=bounds,
            SAMPLES=_SAMPLES,
            MINE=_MINE,
            OTHERS=_OTHERS,
            **shared,
        )
        launch(
            _census,
            programs_of(scan, _BLOCK),
            drops_ptr=drops_E,
            bounds_ptr=bounds,
            zones_ptr=zones,
            BLOCK=_BLOCK,
            num_warps=_WARPS,
            **shared,
        )
    launch(
        _narrow,
        programs_of(scan, _BLOCK),
        drops_ptr=drops_E,
        bounds_ptr=bounds,
        zones_ptr=zones,
        left_ptr=left_E,
        rest_ptr=lists_EM,
        rest_sizes_ptr=rest_E,
        room=scan.rows,
        out_ptr=out_M,
        size_ptr=size_1,
        BRACKETED=bracketed,
        BLOCK=_BLOCK,
        num_warps=_WARPS,
        **shared,
    )
    # Marks have been heeded; whoever is on the list may go.
    return Scan(scan.jobs_EW, scan.rows, lists_EM, rest_E), left_E
