"""Whole rows and weights of a GPU shard by row index: read, written, copied."""

from __future__ import annotations

from typing import Any

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from shoal.kernels.index import first_bucket, stored_key, walk
from shoal.kernels.initial_values import as_read, device_form, initial_tile, retrieved
from shoal.kernels.launch import blocks_of, launch, power_of_2
from shoal.kernels.rounding import (
    BFLOAT16,
    FLOAT16,
    load_weights,
    nearest_bits,
    row_pointers,
    storage_of,
    store_nearest,
    stream_key,
    wide_of_bits,
    words_at,
)
from shoal.kernels.tables import (
    CHUNK_STATE,
    CHUNK_WEIGHTS,
    COUNTS_AT,
    ENTRIES_AT,
    FIRST_COLUMN_AT,
    MASK_AT,
    SALT_AT,
    SEED_AT,
    SEEN_AT,
    VERSIONS_AT,
    WEIGHTS_AT,
    CallGroups,
    RowForm,
    ShardLayout,
    group_of,
    id_of,
    row_address,
    search_steps,
    set_uint32,
    table_word,
    uint32_of,
)

_TILE = 4096  # elements of a program's block: 16 KB of rows in flight
_HEAVY_TILE = 1024  # where values are computed, which takes registers
_FIND_TILE = 2048  # of one warp
_FIND_ROWS = 32  # few: a program waits for its longest search
_MOST_COLUMNS = 256
_MOST_ROWS = 512


@triton.jit
def find_handle(tables_ptr, table_R, id_R, live_R):  # type: ignore[no-untyped-def]
    """int32 handle of each id in its table, -1 where it has none; nobody inserts meanwhile."""
    entries = table_word(tables_ptr, table_R, live_R, ENTRIES_AT)
    mask = table_word(tables_ptr, table_R, live_R, MASK_AT)
    bucket = first_bucket(id_R, table_word(tables_ptr, table_R, live_R, SALT_AT), mask)
    _slot, handle, there = walk(entries, bucket, mask, stored_key(id_R), live_R)
    return tl.where(there, handle, -1)


@triton.jit  # type: ignore[untyped-decorator]
def initial_rows(  # type: ignore[no-untyped-def]
    tables_ptr, table_R, id_R, live_R, column_C, segments_ptr, segments, quantiles_ptr,
    STORAGE: tl.constexpr,
):  # fmt: skip
    """[R, C] values that the ids' rows would hold when new, as they read from storage."""
    seed = table_word(tables_ptr, table_R, live_R, SEED_AT)
    key = stream_key(seed, table_word(tables_ptr, table_R, live_R, SALT_AT))
    start = table_word(tables_ptr, table_R, live_R, FIRST_COLUMN_AT).to(tl.int32)
    word = words_at(key[:, None], id_R[:, None], start[:, None] + column_C[None, :], 0)
    value = tl.zeros(word.shape, tl.float32)
    value = initial_tile(value, word, column_C, segments_ptr, segments, quantiles_ptr)
    return as_read(value, STORAGE)


@triton.jit(do_not_specialize=["columns", "groups", "first", "last", "step"])  # type: ignore[untyped-decorator]
def _gather(  # type: ignore[no-untyped-def]
    tables_ptr, chunks_ptr, columns, ids_ptr, splits_ptr, group_tables_ptr, groups,
    rows_ptr, handles_ptr, found_ptr, out_ptr, first, last,
    segments_ptr, segments, quantiles_ptr, step,
    DIM: tl.constexpr, WEIGHT_BYTES: tl.constexpr, STORAGE: tl.constexpr, PLAIN: tl.constexpr,
    FIND: tl.constexpr, INITIAL: tl.constexpr, PLACED: tl.constexpr, STEPS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = first + row
    live = at < last
    group = at * 0
    if PLACED or FIND or INITIAL:
        group = group_of(splits_ptr, groups, at, live, STEPS)
    if PLACED:
        start = tl.load(rows_ptr + group, mask=live, other=-1)
        row = start + at - tl.load(splits_ptr + group, mask=live, other=0)
        live = live & (start >= 0)
    if FIND:
        table = tl.load(group_tables_ptr + group, mask=live, other=0)
        handle = find_handle(tables_ptr, table, tl.load(ids_ptr + at, mask=live, other=0), live)
        tl.store(found_ptr + at, (handle >= 0).to(tl.uint8), mask=live)
    else:
        handle = tl.load(handles_ptr + at, mask=live, other=-1)
    there = live & (handle >= 0)
    address = row_address(chunks_ptr, columns, handle, WEIGHT_BYTES, there, WEIGHTS_AT)
    for begin in range(0, DIM, BLOCK_D):
        column = begin + tl.arange(0, BLOCK_D)
        inside = (column < DIM)[None, :]
        value = load_weights(address, column, there[:, None] & inside, STORAGE)
        if INITIAL:
            absent = live & (handle < 0)
            if tl.max(absent.to(tl.int32), axis=0) > 0:
                table = tl.load(group_tables_ptr + group, mask=absent, other=0)
                id = tl.load(ids_ptr + at, mask=absent, other=0)
                fresh = initial_rows(
                    tables_ptr, table, id, absent, column, segments_ptr, segments, quantiles_ptr,
                    STORAGE,
                )  # fmt: skip
                value = tl.where(absent[:, None], fresh, value)
        if not PLAIN:
            value = retrieved(value, column, segments_ptr, segments, step)
        tl.store(out_ptr + row[:, None] * DIM + column[None, :], value, mask=live[:, None] & inside)


def gather(
    layout: ShardLayout,
    form: RowForm,
    groups: CallGroups,
    out: Tensor,
    *,
    start: int = 0,
    stop: int | None = None,
    out_rows_G: Tensor | None = None,
    handles_N: Tensor | None = None,
    found_N: Tensor | None = None,
    initial: bool = False,
    global_step: int = 0,
) -> None:
    """Rows of positions [start, stop) of a call, as training reads them, into `out`. One launch.

    Args:
        form: of the tables read; keep the object, it is a cache key.
        groups: the call; read only with `out_rows_G`, `initial` or `found_N`.
        out: contiguous [n, D] in the form's real dtype.
        stop: default N.
        out_rows_G: int64 [G], the row of `out` that takes the group's first row, -1 for groups
            whose tables have another form; those are left alone. None: position p goes to row
            p - start, and all positions are of this form.
        handles_N: int32 [N]; -1 reads as zeros, or with `initial` as the id's initial value, which
            costs registers: leave it off where every id has a row.
        found_N: bool [N], instead of handles: the index is searched, missing ids read as zeros, and
            this is set for the positions read. The index must not change meanwhile.
        global_step: what OneBit's scale goes by.
    """
    last = groups.ids_N.numel() if stop is None else stop
    if last <= start or out.numel() == 0:
        return
    ready = device_form(form, out.device)
    find = found_N is not None
    rows, block_d, warps = _shape(form.dim, find, ready.plain and not initial)
    count = groups.tables_G.numel()
    unused: Any = groups.ids_N
    launch(
        _gather, (blocks_of(last - start, rows),),
        layout.tables_KT, *layout.chunks,
        groups.ids_N, groups.splits_G1, groups.tables_G, count,
        unused if out_rows_G is None else out_rows_G,
        unused if handles_N is None else handles_N,
        unused if found_N is None else found_N.view(torch.uint8),
        out, start, last,
        ready.segments_PW, len(form.segments), ready.quantiles_Q, global_step,
        DIM=form.dim, WEIGHT_BYTES=form.weight_bytes, STORAGE=storage_of(form.dtype),
        PLAIN=ready.plain, FIND=find, INITIAL=initial, PLACED=out_rows_G is not None,
        STEPS=search_steps(count), ROWS=rows, BLOCK_D=block_d,
        num_warps=warps, enable_fp_fusion=False,
    )  # fmt: skip


def _shape(dim: int, find: bool, light: bool) -> tuple[int, int, int]:
    """Rows and columns of a program's block, and its warps."""
    block_d = min(power_of_2(dim), _MOST_COLUMNS)
    if find:
        rows = max(min(_FIND_TILE // block_d, _FIND_ROWS), 8)
        return rows, block_d, 1
    tile = _TILE if light else _HEAVY_TILE
    return max(min(tile // block_d, _MOST_ROWS), 8), block_d, 4


_WRITE_TILE = 2048  # elements of a program's block
_WRITE_COLUMNS = 128


@triton.jit  # type: ignore[untyped-decorator]
def _rounded(value, STORAGE: tl.constexpr):  # type: ignore[no-untyped-def]
    """A value as it is after it was stored."""
    if (STORAGE == FLOAT16) | (STORAGE == BFLOAT16):
        value = wide_of_bits(nearest_bits(value, STORAGE), STORAGE)
    return value


@triton.jit
def _stamp(chunks_ptr, columns, handle, live, version, event_time_s):  # type: ignore[no-untyped-def]
    """Version and last-seen time of written rows."""
    set_uint32(chunks_ptr, columns, handle, live, version, VERSIONS_AT)
    seen = uint32_of(chunks_ptr, columns, handle, live, SEEN_AT)
    seen = tl.maximum(seen, seen * 0 + event_time_s)
    set_uint32(chunks_ptr, columns, handle, live, seen, SEEN_AT)


@triton.jit(do_not_specialize=["n", "columns", "version", "event_time_s"])  # type: ignore[untyped-decorator]
def _write(  # type: ignore[no-untyped-def]
    handles_ptr, order_ptr, values_ptr, chunks_ptr, columns, n, width, row_bytes, version,
    event_time_s,
    ADD: tl.constexpr, STORAGE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    handle = tl.load(handles_ptr + at, mask=at < n, other=-1)
    # A run of equal handles is added from its first position on, or its last position is copied.
    side = at + 1
    if ADD:
        side = at - 1
    neighbour = tl.load(handles_ptr + side, mask=(side >= 0) & (side < n), other=-1)
    edge = (handle >= 0) & (neighbour != handle)
    address = row_address(chunks_ptr, columns, handle, row_bytes, edge, WEIGHTS_AT)
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
        _stamp(chunks_ptr, columns, handle, edge, version, event_time_s)


def write_weights(
    layout: ShardLayout,
    form: RowForm,
    handles_N: Tensor,
    values_ND: Tensor,
    *,
    add: bool,
    version: int,
    event_time_s: int,
) -> None:
    """Set rows to values, or add values to them; rows of one form.

    Of positions with one handle, the last is set, or all are added in their order. Values that a
    16-bit row cannot hold are rounded to the nearest, ties to even. The row's version becomes
    `version`, its last-seen time no less than `event_time_s`; its state and count stay.

    Args:
        handles_N: int32 [N]; -1 is passed over.
        values_ND: [N, D] of `form.real`, contiguous.
    """
    n, width = values_ND.shape
    if n == 0:
        return
    sorted_N, order_N = handles_N.sort(stable=True)
    block = min(power_of_2(width), _WRITE_COLUMNS)
    rows = max(_WRITE_TILE // block, 1)
    launch(
        _write, (blocks_of(n, rows), blocks_of(width, block)),
        sorted_N, order_N, values_ND, *layout.chunks, n, width, form.weight_bytes, version,
        event_time_s,
        ADD=add, STORAGE=storage_of(form.dtype), ROWS=rows, BLOCK=block,
    )  # fmt: skip


_BLOCK = 256
# Rows move as words of their elements' size: a copy must not change the bits of a NaN.
_WORDS = {2: (torch.int16, tl.int16), 4: (torch.int32, tl.int32), 8: (torch.int64, tl.int64)}


@triton.jit(do_not_specialize=["n", "columns"])  # type: ignore[untyped-decorator]
def _values(  # type: ignore[no-untyped-def]
    handles_ptr, dense_ptr, chunks_ptr, columns, n, width, row_bytes,
    CHUNK_WORD: tl.constexpr, ELEMENT: tl.constexpr, READ: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    handle = tl.load(handles_ptr + at, mask=at < n, other=-1)
    there = handle >= 0
    address = row_address(chunks_ptr, columns, handle, row_bytes, there, CHUNK_WORD)
    stored = row_pointers(address, column, ELEMENT)
    dense = dense_ptr + at[:, None] * width + column[None, :]
    inside = (column < width)[None, :]
    if READ:
        values = tl.load(stored, mask=there[:, None] & inside, other=0)
        tl.store(dense, values, mask=(at < n)[:, None] & inside)
    else:
        values = tl.load(dense, mask=there[:, None] & inside, other=0)
        tl.store(stored, values, mask=there[:, None] & inside)


@triton.jit(do_not_specialize=["n", "columns"])  # type: ignore[untyped-decorator]
def _read_metadata(  # type: ignore[no-untyped-def]
    handles_ptr, out_ptr, chunks_ptr, columns, n, IDS_ONLY: tl.constexpr, BLOCK: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = at < n
    handle = tl.load(handles_ptr + at, mask=live, other=-1)
    there = handle >= 0
    tl.store(out_ptr + at, id_of(chunks_ptr, columns, handle, there), mask=live)
    if not IDS_ONLY:
        size = at * 0 + n
        versions = uint32_of(chunks_ptr, columns, handle, there, VERSIONS_AT)
        tl.store(out_ptr + at + size, versions, mask=live)
        seen = uint32_of(chunks_ptr, columns, handle, there, SEEN_AT)
        tl.store(out_ptr + at + 2 * size, seen, mask=live)
        counts = uint32_of(chunks_ptr, columns, handle, there, COUNTS_AT)
        tl.store(out_ptr + at + 3 * size, counts, mask=live)


@triton.jit(do_not_specialize=["n", "columns"])  # type: ignore[untyped-decorator]
def _write_metadata(  # type: ignore[no-untyped-def]
    handles_ptr, versions_ptr, seen_ptr, counts_ptr, chunks_ptr, columns, n, BLOCK: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    handle = tl.load(handles_ptr + at, mask=at < n, other=-1)
    there = handle >= 0
    versions = tl.load(versions_ptr + at, mask=there, other=0)
    set_uint32(chunks_ptr, columns, handle, there, versions, VERSIONS_AT)
    seen = tl.load(seen_ptr + at, mask=there, other=0)
    set_uint32(chunks_ptr, columns, handle, there, seen, SEEN_AT)
    counts = tl.load(counts_ptr + at, mask=there, other=0)
    set_uint32(chunks_ptr, columns, handle, there, counts, COUNTS_AT)


def _copy(
    layout: ShardLayout, handles_R: Tensor, dense: Tensor, row_bytes: int, word: int, *, read: bool
) -> None:
    rows, width = dense.shape
    if rows == 0 or width == 0:
        return
    torch_word, element = _WORDS[dense.element_size()]
    block = min(power_of_2(width), _MOST_COLUMNS)
    tile_rows = max(_TILE // block, 1)
    launch(
        _values, (blocks_of(rows, tile_rows), blocks_of(width, block)),
        handles_R, dense.view(torch_word), *layout.chunks, rows, width, row_bytes,
        CHUNK_WORD=word, ELEMENT=element, READ=read, ROWS=tile_rows, BLOCK=block,
    )  # fmt: skip


def read_values(layout: ShardLayout, form: RowForm, handles_R: Tensor) -> tuple[Tensor, Tensor]:
    """Weights [R, D] as stored and state [R, S] of rows of one form; zeros for handle -1."""
    rows, device = len(handles_R), handles_R.device
    weights = torch.empty(rows, form.dim, dtype=form.dtype, device=device)
    state = torch.empty(rows, form.state_width, dtype=form.real, device=device)
    _copy(layout, handles_R, weights, form.weight_bytes, CHUNK_WEIGHTS, read=True)
    _copy(layout, handles_R, state, form.state_bytes, CHUNK_STATE, read=True)
    return weights, state


def write_values(
    layout: ShardLayout, form: RowForm, handles_R: Tensor, weights: Tensor, state: Tensor
) -> None:
    """Put weights [R, D] as stored and state [R, S] into distinct rows; -1 is passed over."""
    _copy(layout, handles_R, weights.contiguous(), form.weight_bytes, CHUNK_WEIGHTS, read=False)
    write_state(layout, form, handles_R, state.contiguous())


def write_state(layout: ShardLayout, form: RowForm, handles_R: Tensor, state_RS: Tensor) -> None:
    """Put state, contiguous, into distinct rows; -1 is passed over."""
    _copy(layout, handles_R, state_RS, form.state_bytes, CHUNK_STATE, read=False)


def read_metadata(layout: ShardLayout, handles_R: Tensor) -> Tensor:
    """int64 [4, R]: ids, versions, last-seen seconds, counts; zeros for handle -1."""
    return _metadata(layout, handles_R, words=4)


def read_ids(layout: ShardLayout, handles_R: Tensor) -> Tensor:
    """Ids int64 [R]; zeros for handle -1."""
    return _metadata(layout, handles_R, words=1)[0]


def _metadata(layout: ShardLayout, handles_R: Tensor, *, words: int) -> Tensor:
    rows = len(handles_R)
    out_WR = torch.empty(words, rows, dtype=torch.int64, device=handles_R.device)
    if rows:
        launch(
            _read_metadata, (blocks_of(rows, _BLOCK),),
            handles_R, out_WR, *layout.chunks, rows,
            IDS_ONLY=words == 1, BLOCK=_BLOCK,
        )  # fmt: skip
    return out_WR


def write_metadata(
    layout: ShardLayout, handles_R: Tensor, versions_R: Tensor, seen_R: Tensor, counts_R: Tensor
) -> None:
    """Put versions, last-seen seconds and counts, int64 [R] each, into rows; rows that come twice
    must get the same. -1 is passed over."""
    rows = len(handles_R)
    if rows:
        launch(
            _write_metadata, (blocks_of(rows, _BLOCK),),
            handles_R, versions_R, seen_R, counts_R, *layout.chunks, rows,
            BLOCK=_BLOCK,
        )  # fmt: skip
