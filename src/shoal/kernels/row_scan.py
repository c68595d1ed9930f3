"""Scans of device tables: rows that have run out of time, rows that tickets hold.

A scan reads rows in the order of their sequence numbers, so that metadata are read as they lie; a
row that is free has version 0. Handles that a scan drops get that version at once and are left in
one list, in no set order, for an erase to take out of the index.

What a scan needs to know of a table is one line of `JOB_*` words; it runs over all its jobs in one
launch. `shoal.kernels.row_select` scans for the rows of lowest score.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from shoal.kernels.launching import launch
from shoal.kernels.row_tiles import blocks_of
from shoal.kernels.table_layout import (
    CHUNK_BITS,
    CHUNK_COUNTS,
    CHUNK_IDS,
    CHUNK_SEEN,
    CHUNK_VERSIONS,
    COUNT_FREE,
    COUNT_FRESH,
    COUNT_ISSUED,
    COUNT_WORDS,
    TABLE_DIRECTORY,
    TABLE_SALT,
    TABLE_WORDS,
    ShardLayout,
    handle_of,
    mix64,
    row_address,
)

__all__ = [
    "JOB_SCORE",
    "JOB_SECOND",
    "JOB_SHIFT",
    "JOB_SLOTS",
    "JOB_TABLE",
    "JOB_VALUES",
    "JOB_WORDS",
    "SCORE_COUNTS",
    "SCORE_SEEN",
    "Scan",
    "directory_of",
    "drop_rows",
    "expired_rows",
    "id_of",
    "key_high",
    "key_low",
    "overdrafts",
    "pin_marks",
    "programs_of",
    "rows_at",
    "scan_size",
    "score_of",
    "uint32_of",
]

JOB_WORDS = 8
JOB_TABLE, JOB_SCORE, JOB_SECOND = 0, 1, 2  # scores: SCORE_SEEN or SCORE_COUNTS
JOB_VALUES, JOB_SHIFT, JOB_SLOTS = 3, 4, 5  # times to live by slot: address, shift, mask
SCORE_SEEN, SCORE_COUNTS = CHUNK_SEEN, CHUNK_COUNTS

_BLOCK = 2048
_WARPS = 8
_PROGRAMS = 132 * 4  # that a large device runs at a time

_TABLE, _VALUES = tl.constexpr(JOB_TABLE), tl.constexpr(JOB_VALUES)
_SCORE, _SECOND = tl.constexpr(JOB_SCORE), tl.constexpr(JOB_SECOND)
_SHIFT, _SLOTS = tl.constexpr(JOB_SHIFT), tl.constexpr(JOB_SLOTS)
_JOB_WORDS = tl.constexpr(JOB_WORDS)
_TABLE_WORDS, _COUNT_WORDS = tl.constexpr(TABLE_WORDS), tl.constexpr(COUNT_WORDS)
_SALT, _LEAST = tl.constexpr(TABLE_SALT), tl.constexpr(-(1 << 63))
_DIRECTORY, _ISSUED = tl.constexpr(TABLE_DIRECTORY), tl.constexpr(COUNT_ISSUED)
_FREE, _FRESH = tl.constexpr(COUNT_FREE), tl.constexpr(COUNT_FRESH)
_IDS, _VERSIONS = tl.constexpr(CHUNK_IDS), tl.constexpr(CHUNK_VERSIONS)
_SEEN, _COUNTS = tl.constexpr(CHUNK_SEEN), tl.constexpr(CHUNK_COUNTS)


@dataclass(frozen=True, slots=True)
class Scan:
    """What a scan goes through, for E jobs in one launch.

    jobs_EW: int64 [E, JOB_WORDS]. rows: no job has more rows than that to go through; of a table,
    rows ever handed out since it was empty. lists_EM: int32 [E, M] handles and sizes_E: int64
    [E], or None to go through whole tables. marks: what `pin_marks` made, or None.
    """

    jobs_EW: Tensor
    rows: int
    lists_EM: Tensor | None = None
    sizes_E: Tensor | None = None
    marks: Tensor | None = None

    def arguments(self, layout: ShardLayout) -> dict[str, Any]:
        """Arguments that all scanning kernels share."""
        unused = self.jobs_EW
        lists_EM = unused if self.lists_EM is None else self.lists_EM
        return {
            "tables_ptr": layout.tables_KT,
            "counters_ptr": layout.counters_KC,
            "chunks_ptr": layout.chunks_WC,
            "columns": layout.chunks_WC.shape[1],
            "jobs_ptr": self.jobs_EW,
            "lists_ptr": lists_EM,
            "width": lists_EM.shape[1],
            "sizes_ptr": unused if self.sizes_E is None else self.sizes_E,
            "pins_ptr": unused if self.marks is None else self.marks,
            "LISTED": self.lists_EM is not None,
            "PINS": self.marks is not None,
        }


def programs_of(scan: Scan, block: int) -> tuple[int, int]:
    """Grid over a scan: programs a job, jobs."""
    jobs = len(scan.jobs_EW)
    return min(blocks_of(scan.rows, block), math.ceil(_PROGRAMS / jobs)), jobs


@triton.jit  # type: ignore[untyped-decorator]
def uint32_of(chunks_ptr, columns, handle, live, WORD: tl.constexpr):  # type: ignore[no-untyped-def]
    """A uint32 of each row, as int64."""
    address = row_address(chunks_ptr, columns, handle, 4, live, WORD)
    return tl.load(address.to(tl.pointer_type(tl.uint32)), mask=live, other=0).to(tl.int64)


@triton.jit
def score_of(chunks_ptr, columns, handle, live, word):  # type: ignore[no-untyped-def]
    """A row's uint32 in the array that a SCORE_* names, as int64."""
    seen = row_address(chunks_ptr, columns, handle, 4, live & (word == _SEEN), _SEEN)
    count = row_address(chunks_ptr, columns, handle, 4, live & (word == _COUNTS), _COUNTS)
    address = tl.where(word == _SEEN, seen, count)
    return tl.load(address.to(tl.pointer_type(tl.uint32)), mask=live, other=0).to(tl.int64)


@triton.jit
def id_of(chunks_ptr, columns, handle, live):  # type: ignore[no-untyped-def]
    address = row_address(chunks_ptr, columns, handle, 8, live, _IDS)
    return tl.load(address.to(tl.pointer_type(tl.int64)), mask=live, other=0)


@triton.jit
def key_high(chunks_ptr, columns, words, handle, live):  # type: ignore[no-untyped-def]
    """Upper half of a row's key, in the order of signed numbers: both scores of the job."""
    score = score_of(chunks_ptr, columns, handle, live, tl.load(words + _SCORE))
    second = score_of(chunks_ptr, columns, handle, live, tl.load(words + _SECOND))
    return ((score << 32) | second) ^ _LEAST


@triton.jit
def key_low(tables_ptr, chunks_ptr, columns, table, handle, live):  # type: ignore[no-untyped-def]
    """Lower half of a row's key, in the order of signed numbers: the hash of its id."""
    salt = tl.load(tables_ptr + table * _TABLE_WORDS + _SALT)
    return mix64(id_of(chunks_ptr, columns, handle, live) ^ salt) ^ _LEAST


@triton.jit
def directory_of(tables_ptr, table):  # type: ignore[no-untyped-def]
    return tl.load(tables_ptr + table * _TABLE_WORDS + _DIRECTORY)


@triton.jit  # type: ignore[untyped-decorator]
def scan_size(counters_ptr, sizes_ptr, job, table, LISTED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rows to go through: of a list, or all that the table has handed out."""
    if LISTED:
        size = tl.load(sizes_ptr + job)
    else:
        counts = counters_ptr + table * _COUNT_WORDS
        further = tl.load(counts + _ISSUED) - tl.load(counts + _FREE)
        size = tl.load(counts + _FRESH) + tl.where(further > 0, further, 0)
    return size


@triton.jit  # type: ignore[untyped-decorator]
def rows_at(  # type: ignore[no-untyped-def]
    chunks_ptr,
    columns,
    directory,
    list_ptr,
    pins_ptr,
    at,
    live,
    LISTED: tl.constexpr,
    PINS: tl.constexpr,
):
    """Handles at places of a scan, and which of these rows may go."""
    if LISTED:
        handle = tl.load(list_ptr + at, mask=live, other=-1)
        live = live & (handle >= 0)
    else:
        handle = handle_of(directory, at, live)
        live = live & (uint32_of(chunks_ptr, columns, handle, live, _VERSIONS) != 0)
    if PINS:
        live = live & (tl.load(pins_ptr + handle.to(tl.int64), mask=live, other=1) == 0)
    return handle, live


@triton.jit
def drop_rows(chunks_ptr, columns, handle, gone, out_ptr, size_ptr):  # type: ignore[no-untyped-def]
    """List rows that go, and mark them as free."""
    count = tl.sum(gone.to(tl.int32), axis=0)
    if count > 0:
        first = tl.atomic_add(size_ptr, count, sem="relaxed").to(tl.int64)
        place = first + tl.cumsum(gone.to(tl.int32), axis=0) - 1
        tl.store(out_ptr + place, handle, mask=gone)
        address = row_address(chunks_ptr, columns, handle, 4, gone, _VERSIONS)
        tl.store(address.to(tl.pointer_type(tl.int32)), handle * 0, mask=gone)


@triton.jit(do_not_specialize=["jobs"])  # type: ignore[untyped-decorator]
def _overdraw(counters_ptr, budgets_ptr, drops_ptr, jobs, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    job = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = job < jobs
    table = tl.load(budgets_ptr + 3 * job, mask=live, other=0)
    counts = counters_ptr + table * _COUNT_WORDS
    rows = tl.load(counts + _FRESH, mask=live, other=0) + tl.load(
        counts + _ISSUED, mask=live, other=0
    )
    rows -= tl.load(counts + _FREE, mask=live, other=0)
    over = rows - tl.load(budgets_ptr + 3 * job + 1, mask=live, other=0)
    ahead = tl.load(budgets_ptr + 3 * job + 2, mask=live, other=0)
    tl.store(drops_ptr + job, tl.where(over > 0, over + ahead, 0), mask=live)


@triton.jit(do_not_specialize=["n"])  # type: ignore[untyped-decorator]
def _pin(handles_ptr, marks_ptr, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    handle = tl.load(handles_ptr + at, mask=at < n, other=-1).to(tl.int64)
    tl.store(marks_ptr + handle, (at * 0 + 1).to(tl.uint8), mask=handle >= 0)


@triton.jit(do_not_specialize=["columns", "width", "now_s"])  # type: ignore[untyped-decorator]
def _expire(  # type: ignore[no-untyped-def]
    tables_ptr,
    counters_ptr,
    chunks_ptr,
    columns,
    jobs_ptr,
    lists_ptr,
    width,
    sizes_ptr,
    pins_ptr,
    out_ptr,
    size_ptr,
    now_s,
    LISTED: tl.constexpr,
    PINS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    job = tl.program_id(1).to(tl.int64)
    words = jobs_ptr + job * _JOB_WORDS
    table = tl.load(words + _TABLE)
    directory = directory_of(tables_ptr, table)
    rows = lists_ptr + job * width
    values = tl.load(words + _VALUES).to(tl.pointer_type(tl.int64))
    shift, slots = tl.load(words + _SHIFT), tl.load(words + _SLOTS)
    size = scan_size(counters_ptr, sizes_ptr, job, table, LISTED)
    for tile in range(tl.program_id(0), tl.cdiv(size, BLOCK), tl.num_programs(0)):
        at = tl.arange(0, BLOCK).to(tl.int64) + tile * BLOCK
        handle, live = rows_at(
            chunks_ptr, columns, directory, rows, pins_ptr, at, at < size, LISTED, PINS
        )
        slot = (id_of(chunks_ptr, columns, handle, live) >> shift) & slots
        ttl_s = tl.load(values + slot, mask=live, other=-1)
        age_s = now_s - uint32_of(chunks_ptr, columns, handle, live, _SEEN)
        gone = live & (ttl_s >= 0) & (age_s >= ttl_s)
        drop_rows(chunks_ptr, columns, handle, gone, out_ptr, size_ptr)


def overdrafts(layout: ShardLayout, budgets_EW: Tensor) -> Tensor:
    """Rows that tables have to drop, int64 [E]: what they hold too many, and a little ahead.

    budgets_EW: int64 [E, 3]: table, rows it may hold, rows to drop beyond those too many.
    """
    jobs = len(budgets_EW)
    drops_E = torch.empty(jobs, dtype=torch.int64, device=budgets_EW.device)
    launch(
        _overdraw,
        (blocks_of(jobs, 64),),
        layout.counters_KC,
        budgets_EW,
        drops_E,
        jobs,
        BLOCK=64,
    )
    return drops_E


def pin_marks(handles: list[Tensor], chunks: int) -> Tensor:
    """uint8 [chunks << CHUNK_BITS]: 1 where a ticket holds the row of that handle.

    Args:
        handles: int32 handles of each live ticket, -1 where an id has no row; at least one ticket.
        chunks: chunks present in the shard; handles lie below their end.
    """
    marks = torch.zeros(chunks << CHUNK_BITS, dtype=torch.uint8, device=handles[0].device)
    for handles_N in handles:
        n = handles_N.numel()
        if n:
            launch(_pin, (blocks_of(n, 1024),), handles_N, marks, n, BLOCK=1024)
    return marks


def expired_rows(layout: ShardLayout, scan: Scan, now_s: int) -> tuple[Tensor, Tensor]:
    """Drop rows whose job's time to live has run out at event time `now_s`.

    A value below 0 keeps rows for ever; the row is dropped at now_s - last_seen_s >= value.

    Returns:
        int32 handles, the first `size` of which count, and size, int32 [1]; on the device.
    """
    jobs = len(scan.jobs_EW)
    out_M = torch.empty(jobs * scan.rows, dtype=torch.int32, device=scan.jobs_EW.device)
    size_1 = torch.zeros(1, dtype=torch.int32, device=scan.jobs_EW.device)
    if out_M.numel():
        launch(
            _expire,
            programs_of(scan, _BLOCK),
            out_ptr=out_M,
            size_ptr=size_1,
            now_s=now_s,
            BLOCK=_BLOCK,
            num_warps=_WARPS,
            **scan.arguments(layout),
        )
    return out_M, size_1
