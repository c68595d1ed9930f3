"""Scans of device tables: expired rows, rows changed between versions, rows of a snapshot."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from shoal.kernels.launch import blocks_of, launch
from shoal.kernels.tables import (
    CHUNK_BITS,
    CHUNK_COUNTS,
    CHUNK_SEEN,
    COUNT_LINE,
    COUNTS_AT,
    DIRECTORY_AT,
    FREE_AT,
    FRESH_AT,
    ISSUED_AT,
    SALT_AT,
    SEEN_AT,
    STATE_AT,
    STATE_BYTES_AT,
    TABLE_AT,
    TABLE_LINE,
    VERSIONS_AT,
    WEIGHT_BYTES_AT,
    WEIGHTS_AT,
    ShardLayout,
    chunk_word,
    handle_of,
    id_of,
    mix64,
    payload_of,
    row_address,
    set_uint32,
    table_word,
    uint32_of,
)

JOB_WORDS = 8
JOB_TABLE, JOB_SCORE, JOB_SECOND = 0, 1, 2  # scores: SCORE_SEEN or SCORE_COUNTS
JOB_VALUES, JOB_SHIFT, JOB_SLOTS = 3, 4, 5  # times to live by slot: address, shift, mask
SCORE_SEEN, SCORE_COUNTS = CHUNK_SEEN, CHUNK_COUNTS

_BLOCK = 2048
_WARPS = 8
_PROGRAMS = 132 * 4  # that a large device runs at a time

_JOB_WORDS, _LEAST = tl.constexpr(JOB_WORDS), tl.constexpr(-(1 << 63))
_TABLE, _SCORE, _SECOND, _VALUES, _SHIFT, _SLOTS = map(tl.constexpr, range(6))


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


def grid_of_scan(scan: Scan, block: int) -> tuple[int, int]:
    """Grid over a scan: programs a job, jobs."""
    jobs = len(scan.jobs_EW)
    return min(blocks_of(scan.rows, block), math.ceil(_PROGRAMS / jobs)), jobs


@triton.jit
def score_of(chunks_ptr, columns, handle, live, word):  # type: ignore[no-untyped-def]
    """A row's uint32 in the array that a SCORE_* names, as int64."""
    seen = row_address(chunks_ptr, columns, handle, 4, live & (word == SEEN_AT), SEEN_AT)
    count = row_address(chunks_ptr, columns, handle, 4, live & (word == COUNTS_AT), COUNTS_AT)
    address = tl.where(word == SEEN_AT, seen, count)
    return tl.load(address.to(tl.pointer_type(tl.uint32)), mask=live, other=0).to(tl.int64)


@triton.jit
def key_high(chunks_ptr, columns, words, handle, live):  # type: ignore[no-untyped-def]
    """Upper half of a row's key, in the order of signed numbers: both scores of the job."""
    score = score_of(chunks_ptr, columns, handle, live, tl.load(words + _SCORE))
    second = score_of(chunks_ptr, columns, handle, live, tl.load(words + _SECOND))
    return ((score << 32) | second) ^ _LEAST


@triton.jit
def key_low(tables_ptr, chunks_ptr, columns, table, handle, live):  # type: ignore[no-untyped-def]
    """Lower half of a row's key, in the order of signed numbers: the hash of its id."""
    salt = tl.load(tables_ptr + table * TABLE_LINE + SALT_AT)
    return mix64(id_of(chunks_ptr, columns, handle, live) ^ salt) ^ _LEAST


@triton.jit
def directory_of(tables_ptr, table):  # type: ignore[no-untyped-def]
    return tl.load(tables_ptr + table * TABLE_LINE + DIRECTORY_AT)


@triton.jit  # type: ignore[untyped-decorator]
def scan_size(counters_ptr, sizes_ptr, job, table, LISTED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rows to go through: of a list, or all that the table has handed out."""
    if LISTED:
        size = tl.load(sizes_ptr + job)
    else:
        counts = counters_ptr + table * COUNT_LINE
        further = tl.load(counts + ISSUED_AT) - tl.load(counts + FREE_AT)
        size = tl.load(counts + FRESH_AT) + tl.where(further > 0, further, 0)
    return size


@triton.jit  # type: ignore[untyped-decorator]
def rows_at(  # type: ignore[no-untyped-def]
    chunks_ptr, columns, directory, list_ptr, pins_ptr, at, live,
    LISTED: tl.constexpr, PINS: tl.constexpr,
):  # fmt: skip
    """Handles at places of a scan, and which of these rows may go."""
    if LISTED:
        handle = tl.load(list_ptr + at, mask=live, other=-1)
        live = live & (handle >= 0)
    else:
        handle = handle_of(directory, at, live)
        live = live & (uint32_of(chunks_ptr, columns, handle, live, VERSIONS_AT) != 0)
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
        set_uint32(chunks_ptr, columns, handle, gone, 0, VERSIONS_AT)


@triton.jit(do_not_specialize=["jobs"])  # type: ignore[untyped-decorator]
def _overdraw(counters_ptr, budgets_ptr, drops_ptr, jobs, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    job = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = job < jobs
    table = tl.load(budgets_ptr + 3 * job, mask=live, other=0)
    counts = counters_ptr + table * COUNT_LINE
    rows = tl.load(counts + FRESH_AT, mask=live, other=0)
    rows += tl.load(counts + ISSUED_AT, mask=live, other=0)
    rows -= tl.load(counts + FREE_AT, mask=live, other=0)
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
    tables_ptr, counters_ptr, chunks_ptr, columns, jobs_ptr, lists_ptr, width, sizes_ptr, pins_ptr,
    out_ptr, size_ptr, now_s,
    LISTED: tl.constexpr, PINS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
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
        age_s = now_s - uint32_of(chunks_ptr, columns, handle, live, SEEN_AT)
        gone = live & (ttl_s >= 0) & (age_s >= ttl_s)
        drop_rows(chunks_ptr, columns, handle, gone, out_ptr, size_ptr)


def overdrafts(layout: ShardLayout, budgets_EW: Tensor) -> Tensor:
    """Rows that tables have to drop, int64 [E]: what they hold too many, and a little ahead.

    budgets_EW: int64 [E, 3]: table, rows it may hold, rows to drop beyond those too many.
    """
    jobs = len(budgets_EW)
    drops_E = torch.empty(jobs, dtype=torch.int64, device=budgets_EW.device)
    launch(
        _overdraw, (blocks_of(jobs, 64),),
        layout.counters_KC, budgets_EW, drops_E, jobs,
        BLOCK=64,
    )  # fmt: skip
    return drops_E


def pin_marks(handles: list[Tensor], chunks: int) -> Tensor:
    """uint8 [chunks << CHUNK_BITS]: 1 where a ticket holds the row of that handle.

    Args:
        handles: int32 handles of each live ticket, -1 where an id has no row; at least one ticket.
        chunks: of the shard, up to the last one with rows; handles lie below their end.
    """
    marks = torch.zeros(chunks << CHUNK_BITS, dtype=torch.uint8, device=handles[0].device)
    for handles_N in handles:
        n = handles_N.numel()
        if n:
            launch(_pin, (blocks_of(n, 1024),), handles_N, marks, n, BLOCK=1024)
    return marks


def expired_rows(layout: ShardLayout, scan: Scan, now_s: int) -> tuple[Tensor, Tensor]:
    """Drop rows whose job's time to live has run out at event time `now_s`.

    A value below 0 keeps rows forever; the row is dropped at now_s - last_seen_s >= value.

    Returns:
        int32 handles, the first `size` of which count, and size, int32 [1]; on the device.
    """
    jobs = len(scan.jobs_EW)
    out_M = torch.empty(jobs * scan.rows, dtype=torch.int32, device=scan.jobs_EW.device)
    size_1 = torch.zeros(1, dtype=torch.int32, device=scan.jobs_EW.device)
    if out_M.numel():
        launch(
            _expire, grid_of_scan(scan, _BLOCK),
            out_ptr=out_M, size_ptr=size_1, now_s=now_s,
            BLOCK=_BLOCK, num_warps=_WARPS, **scan.arguments(layout),
        )  # fmt: skip
    return out_M, size_1


SPAN_ROWS = 1024  # that one program looks at
SPAN_WORDS = 3  # of a span: table, first sequence number, the one after its last
LOG_WORDS = 2  # of a record: id, and table << 32 | version

_LOG_BLOCK = 256

_SPAN_WORDS, _LOG_WORDS = tl.constexpr(SPAN_WORDS), tl.constexpr(LOG_WORDS)


@triton.jit  # type: ignore[untyped-decorator]
def _rows_of_span(  # type: ignore[no-untyped-def]
    tables_ptr, chunks_ptr, columns, words, from_version, to_version, BLOCK: tl.constexpr
):
    """Handles of a span, their versions, and which of these are in (from_version, to_version]."""
    at = tl.load(words + 1) + tl.arange(0, BLOCK)
    live = at < tl.load(words + 2)
    handle = handle_of(directory_of(tables_ptr, tl.load(words)), at, live)
    version = uint32_of(chunks_ptr, columns, handle, live, VERSIONS_AT)
    return handle, version, live & (version > from_version) & (version <= to_version)


@triton.jit(do_not_specialize=["columns", "from_version", "to_version", "room"])  # type: ignore[untyped-decorator]
def _changed(  # type: ignore[no-untyped-def]
    tables_ptr, chunks_ptr, columns, spans_ptr, ends_ptr, out_ptr, from_version, to_version, room,
    COUNT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    span = tl.program_id(0).to(tl.int64)
    words = spans_ptr + span * _SPAN_WORDS
    # Blocks without a row to list are over at once.
    count = 1
    end = tl.full((), 0, tl.int64)
    if not COUNT:
        end = tl.load(ends_ptr + span)
        count = (end - tl.load(ends_ptr + span - 1, mask=span > 0, other=0)).to(tl.int32)
    if count > 0:
        handle, _version, live = _rows_of_span(
            tables_ptr, chunks_ptr, columns, words, from_version, to_version, BLOCK
        )
        found = tl.sum(live.to(tl.int32), axis=0)
        if COUNT:
            tl.store(ends_ptr + span, found.to(tl.int64))
        else:
            rank = end - found + tl.cumsum(live.to(tl.int32), axis=0) - 1
            tl.store(out_ptr + rank, handle, mask=live & (rank < room))


@triton.jit(do_not_specialize=["n", "columns", "room", "version"])  # type: ignore[untyped-decorator]
def _log(  # type: ignore[no-untyped-def]
    handles_ptr, size_ptr, chunks_ptr, columns, log_ptr, n, room, version, BLOCK: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = (at < n) & (at < tl.load(size_ptr))
    handle = tl.load(handles_ptr + at, mask=live, other=-1)
    live = live & (handle >= 0)
    count = tl.sum(live.to(tl.int32), axis=0)
    if count > 0:
        first = tl.atomic_add(log_ptr, count.to(tl.int64), sem="relaxed")
        place = first + tl.cumsum(live.to(tl.int32), axis=0) - 1
        live = live & (place < room)
        table = chunk_word(chunks_ptr, columns, handle, live, TABLE_AT)
        record = log_ptr + 1 + place * _LOG_WORDS
        tl.store(record, id_of(chunks_ptr, columns, handle, live), mask=live)
        tl.store(record + 1, (table << 32) | version, mask=live)


def count_changed(
    layout: ShardLayout, spans_BW: Tensor, from_version: int, to_version: int
) -> Tensor:
    """Rows with `from_version < version <= to_version` up to the end of each span: int64 [B].

    spans_BW: int64 [B, SPAN_WORDS] on the device, of SPAN_ROWS rows at most, all handed out.
    """
    counts_B = torch.empty(len(spans_BW), dtype=torch.int64, device=spans_BW.device)
    _scan(layout, spans_BW, counts_B, counts_B, from_version, to_version, 0, counting=True)
    return counts_B.cumsum(0)


def list_changed(
    layout: ShardLayout,
    spans_BW: Tensor,
    ends_B: Tensor,
    from_version: int,
    to_version: int,
    room: int,
) -> Tensor:
    """Handles int32 [room] of the first `room` of these rows in the order of their numbers, -1
    behind the last.

    Args:
        spans_BW, ends_B: what `count_changed` was given, and gave.
        room: 1 or more.
    """
    out_R = torch.full((room,), -1, dtype=torch.int32, device=spans_BW.device)
    _scan(layout, spans_BW, ends_B, out_R, from_version, to_version, room, counting=False)
    return out_R


def _scan(
    layout: ShardLayout, spans_BW: Tensor, ends_B: Tensor, *rest: Tensor | int, counting: bool
) -> None:
    if len(spans_BW):
        launch(
            _changed, (len(spans_BW),),
            layout.tables_KT, *layout.chunks, spans_BW, ends_B, *rest,
            COUNT=counting, BLOCK=SPAN_ROWS,
        )  # fmt: skip


def log_deleted(
    layout: ShardLayout, handles_M: Tensor, size_1: Tensor, log_L: Tensor, version: int
) -> None:
    """Append (id, table, version) of rows that are about to be erased. One launch.

    Args:
        handles_M, size_1: as `kernels.index.erase` takes them.
        log_L: int64 [1 + LOG_WORDS * room]: how many records there are, then the records. Those
            without room are counted and left out.
    """
    n = handles_M.numel()
    if n:
        launch(
            _log, (blocks_of(n, _LOG_BLOCK),),
            handles_M, size_1, *layout.chunks, log_L, n, (log_L.numel() - 1) // LOG_WORDS, version,
            BLOCK=_LOG_BLOCK,
        )  # fmt: skip


HEAD_WORDS = 4  # of a record: id; last seen and count; version; handle. Weights and state follow.
IMAGE_VERSION = 2
IMAGE_CURSORS = 2  # words before the places of records: how many records, how many words of them

_ROWS, _COPY_WARPS = 128, 4  # a thread a row: each takes one stamp
_COPY_BLOCK = 8  # words of a row that a program copies at a time
_STILL_BLOCK = 256

_HEAD, _BITS = tl.constexpr(HEAD_WORDS), tl.constexpr(CHUNK_BITS)


@triton.jit(do_not_specialize=["columns", "stamped", "from_version", "to_version"])  # type: ignore[untyped-decorator]
def _stamp(  # type: ignore[no-untyped-def]
    tables_ptr, chunks_ptr, columns, stamped_ptr, stamped, spans_ptr, from_version, to_version,
    BLOCK: tl.constexpr,
):  # fmt: skip
    words = spans_ptr + tl.program_id(0).to(tl.int64) * _SPAN_WORDS
    handle, version, live = _rows_of_span(
        tables_ptr, chunks_ptr, columns, words, from_version, to_version, BLOCK
    )
    set_uint32(stamped_ptr, stamped, handle, live, version, VERSIONS_AT)


@triton.jit(do_not_specialize=["stamped", "chunks", "n", "from_version", "to_version"])  # type: ignore[untyped-decorator]
def _still(  # type: ignore[no-untyped-def]
    handles_ptr, stamped_ptr, stamped, chunks, out_ptr, n, from_version, to_version,
    BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    handle = tl.load(handles_ptr + at, mask=at < n, other=-1)
    live = (handle >= 0) & ((handle >> _BITS) < chunks)
    stamp = uint32_of(stamped_ptr, stamped, handle, live, VERSIONS_AT)
    live = live & (stamp > from_version) & (stamp <= to_version)
    tl.store(out_ptr + at, tl.where(live, handle, -1), mask=at < n)


@triton.jit(do_not_specialize=["columns", "stamped", "chunks", "first", "n", "room"])  # type: ignore[untyped-decorator]
def _keep(  # type: ignore[no-untyped-def]
    handles_ptr, size_ptr, payloads_ptr, tables_ptr, chunks_ptr, columns, stamped_ptr, stamped,
    chunks, out_ptr, first, n, room,
    HAS_SIZE: tl.constexpr, CACHED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`out`: two cursors, `room` places, then records; see `keep_rows`."""
    at = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = at < n
    at += first
    if HAS_SIZE:
        live = live & (at < tl.load(size_ptr))
    handle = tl.load(handles_ptr + at, mask=live, other=-1)
    live = live & (handle >= 0) & ((handle >> _BITS) < chunks)
    address = row_address(stamped_ptr, stamped, handle, 4, live, VERSIONS_AT)
    stamps = address.to(tl.pointer_type(tl.int32))
    live = live & (tl.load(stamps, mask=live, other=0) != 0)
    if tl.max(live.to(tl.int32), axis=0) > 0:
        stamp = tl.atomic_xchg(stamps, handle * 0, mask=live, sem="relaxed")
        kept = live & (stamp != 0)
        table = chunk_word(chunks_ptr, columns, handle, kept, TABLE_AT)
        weight_bytes = table_word(tables_ptr, table, kept, WEIGHT_BYTES_AT)
        state_bytes = table_word(tables_ptr, table, kept, STATE_BYTES_AT)
        words = tl.where(kept, (weight_bytes + state_bytes) >> 3, 0)
        sizes = tl.where(kept, words + _HEAD, 0)
        ones = kept.to(tl.int32)
        rank = tl.atomic_add(out_ptr, tl.sum(ones, axis=0).to(tl.int64), sem="relaxed")
        place = tl.atomic_add(out_ptr + 1, tl.sum(sizes, axis=0), sem="relaxed")
        rank += tl.cumsum(ones, axis=0) - 1
        place += tl.cumsum(sizes, axis=0) - sizes
        tl.store(out_ptr + 2 + rank, (table << 32) | place, mask=kept)
        record = out_ptr + 2 + room + place
        seen = uint32_of(chunks_ptr, columns, handle, kept, SEEN_AT)
        count = uint32_of(chunks_ptr, columns, handle, kept, COUNTS_AT)
        tl.store(record, id_of(chunks_ptr, columns, handle, kept), mask=kept)
        tl.store(record + 1, (count << 32) | seen, mask=kept)
        version = stamp.to(tl.uint32, bitcast=True)
        tl.store(record + 2, version.to(tl.int64), mask=kept)
        tl.store(record + 3, handle.to(tl.int64), mask=kept)
        payload = payload_of(payloads_ptr, handle, kept, CACHED)
        weights = row_address(chunks_ptr, columns, payload, weight_bytes, kept, WEIGHTS_AT)
        state = (
            row_address(chunks_ptr, columns, payload, state_bytes, kept, STATE_AT) - weight_bytes
        )
        for start in range(0, tl.max(words, axis=0).to(tl.int32), BLOCK):
            column = (start + tl.arange(0, BLOCK)).to(tl.int64)[None, :]
            inside = kept[:, None] & (column < words[:, None])
            of_weights = 8 * column < weight_bytes[:, None]
            source = tl.where(of_weights, weights[:, None], state[:, None]) + 8 * column
            value = tl.load(source.to(tl.pointer_type(tl.int64)), mask=inside, other=0)
            tl.store(record[:, None] + _HEAD + column, value, mask=inside)


def stamp_rows(
    layout: ShardLayout, stamped_WC: Tensor, spans_BW: Tensor, from_version: int, to_version: int
) -> None:
    """Stamp rows with `from_version < version <= to_version`; others' stamps stay. One launch.

    Args:
        stamped_WC: int64 [CHUNK_WORDS, C], see above; a row's stamp is 0 or its version before.
        spans_BW: as `count_changed` takes them.
    """
    if len(spans_BW):
        launch(
            _stamp, (len(spans_BW),),
            layout.tables_KT, *layout.chunks, stamped_WC, stamped_WC.shape[1], spans_BW,
            from_version, to_version,
            BLOCK=SPAN_ROWS,
        )  # fmt: skip


def still_stamped(
    stamped_WC: Tensor, chunks: int, handles_R: Tensor, from_version: int, to_version: int
) -> Tensor:
    """Handles int32 [R] of rows that bear a stamp in (from_version, to_version]; -1 for others.

    One launch. chunks: that `stamped_WC` tells of.
    """
    n = handles_R.numel()
    out_R = torch.empty_like(handles_R)
    if n:
        launch(
            _still, (blocks_of(n, _STILL_BLOCK),),
            handles_R, stamped_WC, stamped_WC.shape[1], chunks, out_R, n, from_version, to_version,
            BLOCK=_STILL_BLOCK,
        )  # fmt: skip
    return out_R


def keep_rows(
    layout: ShardLayout,
    stamped_WC: Tensor,
    chunks: int,
    handles_M: Tensor,
    rows: slice,
    room: int,
    out_L: Tensor,
    *,
    size_1: Tensor | None = None,
    payload_H: Tensor | None = None,
) -> None:
    """Copy whole rows that bear a stamp, and take it from them. One launch.

    Args:
        chunks: that `stamped_WC` tells of; rows of later ones bear none.
        handles_M: int32 [M], of any tables; -1 is passed over, and any may come twice.
        rows: the part of them to look at.
        room: records that `out_L` has room for.
        out_L: int64: two cursors, 0 before; `room` places, table << 32 | word; then the records,
            which start at those words from here on: HEAD_WORDS, weights and state as stored.
        size_1: int32 [1], how many of the handles count; None: all.
        payload_H: int32 by handle, a row's handle in a cache, or -1 where it has none.
    """
    n = rows.stop - rows.start
    if n > 0:
        launch(
            _keep, (blocks_of(n, _ROWS),),
            handles_M, handles_M if size_1 is None else size_1,
            handles_M if payload_H is None else payload_H, layout.tables_KT, *layout.chunks,
            stamped_WC, stamped_WC.shape[1], chunks, out_L, rows.start, n, room,
            HAS_SIZE=size_1 is not None, CACHED=payload_H is not None, ROWS=_ROWS,
            BLOCK=_COPY_BLOCK, num_warps=_COPY_WARPS,
        )  # fmt: skip
