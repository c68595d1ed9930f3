"""Rows read into dense tensors: by handle, or by id in the same pass as the index is searched."""

from __future__ import annotations

from typing import Any

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from shoal.kernels.launching import launch
from shoal.kernels.random_bits import stream_key, words_at
from shoal.kernels.row_form import RowForm
from shoal.kernels.row_rounding import load_weights, storage_of
from shoal.kernels.row_segments import as_read, device_form, initial_tile, retrieved
from shoal.kernels.row_tiles import blocks_of, power_of_2
from shoal.kernels.table_index import first_bucket, stored_key, walk
from shoal.kernels.table_layout import (
    CHUNK_WEIGHTS,
    TABLE_ENTRIES,
    TABLE_FIRST_COLUMN,
    TABLE_MASK,
    TABLE_SALT,
    TABLE_SEED,
    CallGroups,
    ShardLayout,
    group_of,
    row_address,
    search_steps,
    table_word,
)

__all__ = ["find_handle", "gather", "gather_found", "initial_rows"]

_TILE = 4096  # elements of a program's block: 16 KB of rows in flight
_HEAVY_TILE = 1024  # where values are computed, which takes registers
_FIND_TILE = 2048  # of one warp
_FIND_ROWS = 32  # few: a program waits for its longest search
_MOST_COLUMNS = 256
_MOST_ROWS = 512

_ENTRIES = tl.constexpr(TABLE_ENTRIES)
_MASK = tl.constexpr(TABLE_MASK)
_SALT = tl.constexpr(TABLE_SALT)
_SEED = tl.constexpr(TABLE_SEED)
_FIRST_COLUMN = tl.constexpr(TABLE_FIRST_COLUMN)
_WEIGHTS = tl.constexpr(CHUNK_WEIGHTS)


@triton.jit
def find_handle(tables_ptr, table_R, id_R, live_R):  # type: ignore[no-untyped-def]
    """int32 handle of each id in its table, -1 where it has none; nobody inserts meanwhile."""
    entries = table_word(tables_ptr, table_R, live_R, _ENTRIES)
    mask = table_word(tables_ptr, table_R, live_R, _MASK)
    bucket = first_bucket(id_R, table_word(tables_ptr, table_R, live_R, _SALT), mask)
    _slot, handle, there = walk(entries, bucket, mask, stored_key(id_R), live_R)
    return tl.where(there, handle, -1)


@triton.jit  # type: ignore[untyped-decorator]
def initial_rows(  # type: ignore[no-untyped-def]
    tables_ptr, table_R, id_R, live_R, column_C, segments_ptr, segments, quantiles_ptr,
    STORAGE: tl.constexpr,
):  # fmt: skip
    """[R, C] values that the ids' rows would hold when new, as they read from storage."""
    seed = table_word(tables_ptr, table_R, live_R, _SEED)
    key = stream_key(seed, table_word(tables_ptr, table_R, live_R, _SALT))
    start = table_word(tables_ptr, table_R, live_R, _FIRST_COLUMN).to(tl.int32)
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
    address = row_address(chunks_ptr, columns, handle, WEIGHT_BYTES, there, _WEIGHTS)
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
    handles_N: Tensor,
    out: Tensor,
    out_rows_G: Tensor | None = None,
    *,
    start: int = 0,
    stop: int | None = None,
    initial: bool = False,
    global_step: int = 0,
) -> None:
    """Rows of positions [start, stop) of a call, as training reads them, into `out`. One launch.

    Args:
        form: of the tables read; keep the object, it is a cache key.
        groups: the call; read only with `out_rows_G` or `initial`.
        handles_N: int32 [N]; -1 reads as zeros, or with `initial` as the id's initial value, which
            costs registers: leave it off where every id has a row.
        out: contiguous [n, D] in the form's real dtype.
        out_rows_G: int64 [G], the row of `out` that takes the group's first row, -1 for groups
            whose tables have another form; those are left alone. None: position p goes to row
            p - start, and all positions are of this form.
        stop: default N.
        global_step: what OneBit's scale goes by.
    """
    last = handles_N.numel() if stop is None else stop
    _launch(
        layout, form, groups, handles_N, None, out, out_rows_G,
        (start, last), initial=initial, step=global_step,
    )  # fmt: skip


def gather_found(
    layout: ShardLayout,
    form: RowForm,
    groups: CallGroups,
    found_N: Tensor,
    out: Tensor,
    out_rows_G: Tensor | None = None,
    *,
    start: int = 0,
    stop: int | None = None,
    global_step: int = 0,
) -> None:
    """Search the index for ids and copy out their rows, zeros for missing ones. One launch.

    found_N: bool [N], set for the positions read. Other arguments as for `gather`; the index must
    not change meanwhile.
    """
    last = found_N.numel() if stop is None else stop
    _launch(
        layout, form, groups, None, found_N, out, out_rows_G,
        (start, last), initial=False, step=global_step,
    )  # fmt: skip


def _launch(
    layout: ShardLayout,
    form: RowForm,
    groups: CallGroups,
    handles_N: Tensor | None,
    found_N: Tensor | None,
    out: Tensor,
    out_rows_G: Tensor | None,
    span: tuple[int, int],
    *,
    initial: bool,
    step: int,
) -> None:
    first, last = span
    if last <= first or out.numel() == 0:
        return
    ready = device_form(form, out.device)
    find = found_N is not None
    rows, block_d, warps = _shape(form.dim, find, ready.plain and not initial)
    count = groups.tables_G.numel()
    unused: Any = groups.ids_N
    launch(
        _gather, (blocks_of(last - first, rows),),
        layout.tables_KT, layout.chunks_WC, layout.chunks_WC.shape[1],
        groups.ids_N, groups.splits_G1, groups.tables_G, count,
        unused if out_rows_G is None else out_rows_G,
        unused if handles_N is None else handles_N,
        unused if found_N is None else found_N.view(torch.uint8),
        out, first, last,
        ready.segments_PW, len(form.segments), ready.quantiles_Q, step,
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
