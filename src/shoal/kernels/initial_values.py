"""What a new row holds: initial weights, fresh optimizer state, metadata.

Rows that a probe handed out but nobody wrote yet are those of issue numbers READY..ISSUED of each
table. `initialise` writes them, table form by table form; `settle` then declares them ready.
"""

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from shoal.kernels.launching import launch
from shoal.kernels.random_bits import quad_words, stream_key, words_at
from shoal.kernels.row_form import RowForm
from shoal.kernels.row_rounding import row_pointers, storage_of, store_nearest
from shoal.kernels.row_segments import device_form, initial_tile, processors
from shoal.kernels.row_tiles import blocks_of, power_of_2
from shoal.kernels.table_layout import (
    CHUNK_COUNTS,
    CHUNK_IDS,
    CHUNK_SEEN,
    CHUNK_STATE,
    CHUNK_VERSIONS,
    CHUNK_WEIGHTS,
    COUNT_ISSUED,
    COUNT_READY,
    COUNT_WORDS,
    TABLE_FIRST_COLUMN,
    TABLE_FORM,
    TABLE_SALT,
    TABLE_SEED,
    TABLE_STATE_BYTES,
    TABLE_WEIGHT_BYTES,
    TABLE_WORDS,
    ShardLayout,
    issued_handle,
    row_address,
    table_word,
)

__all__ = ["initialise", "settle"]

_ROWS = 128  # of a program's block: one for every thread, so that none looks a row up twice
_SECTOR = 32  # bytes of a row that a block writes at a time
_MOST_TABLES = 1024  # tables that a program looks at together
_PROGRAMS = 4  # on each multiprocessor

_TABLE_WORDS = tl.constexpr(TABLE_WORDS)
_COUNT_WORDS = tl.constexpr(COUNT_WORDS)
_SALT = tl.constexpr(TABLE_SALT)
_SEED = tl.constexpr(TABLE_SEED)
_FORM = tl.constexpr(TABLE_FORM)
_FIRST_COLUMN = tl.constexpr(TABLE_FIRST_COLUMN)
_WEIGHT_BYTES = tl.constexpr(TABLE_WEIGHT_BYTES)
_STATE_BYTES = tl.constexpr(TABLE_STATE_BYTES)
_ISSUED = tl.constexpr(COUNT_ISSUED)
_READY = tl.constexpr(COUNT_READY)
_WEIGHTS = tl.constexpr(CHUNK_WEIGHTS)
_STATE = tl.constexpr(CHUNK_STATE)
_IDS = tl.constexpr(CHUNK_IDS)
_VERSIONS = tl.constexpr(CHUNK_VERSIONS)
_SEEN = tl.constexpr(CHUNK_SEEN)
_COUNTS = tl.constexpr(CHUNK_COUNTS)


@triton.jit  # type: ignore[untyped-decorator]
def _write_weights(  # type: ignore[no-untyped-def]
    address_R, id_R, live_R, key, first_column, segments_ptr, segments, quantiles_ptr,
    DIM: tl.constexpr, STORAGE: tl.constexpr, DRAWN: tl.constexpr, SHIFT: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    for start in range(0, DIM, BLOCK_D):
        column = start + tl.arange(0, BLOCK_D)
        word = tl.zeros([id_R.shape[0], BLOCK_D], tl.uint32)
        if DRAWN:
            if SHIFT == 0 and BLOCK_D % 4 == 0:
                word = quad_words(key, id_R, (first_column + start) // 4, 0, BLOCK_D // 4)
            else:
                word = words_at(key, id_R[:, None], (first_column + column)[None, :], 0)
        value = tl.zeros([id_R.shape[0], BLOCK_D], tl.float32)
        value = initial_tile(value, word, column, segments_ptr, segments, quantiles_ptr)
        inside = live_R[:, None] & (column < DIM)[None, :]
        store_nearest(address_R, column, value, inside, STORAGE)


@triton.jit  # type: ignore[untyped-decorator]
def _write_state(address_R, live_R, state_ptr, STATE: tl.constexpr, BLOCK_S: tl.constexpr):  # type: ignore[no-untyped-def]
    for start in range(0, STATE, BLOCK_S):
        column = start + tl.arange(0, BLOCK_S)
        value = tl.load(state_ptr + column, mask=column < STATE, other=0.0)
        inside = live_R[:, None] & (column < STATE)[None, :]
        value = tl.zeros([address_R.shape[0], BLOCK_S], value.dtype) + value[None, :]
        tl.store(row_pointers(address_R, column, state_ptr.dtype.element_ty), value, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _write_rows(  # type: ignore[no-untyped-def]
    tables_ptr, chunks_ptr, columns, table, handle_R, live_R,
    segments_ptr, segments, quantiles_ptr, state_ptr, epoch, seen,
    DIM: tl.constexpr, STATE: tl.constexpr, STORAGE: tl.constexpr, DRAWN: tl.constexpr,
    SHIFT: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Everything of the fresh rows of one table but their ids, which are there.

    DIM, STATE: columns and the padding behind them, which is written too: stores stay wide.
    """
    line = tables_ptr + table.to(tl.int64) * _TABLE_WORDS
    key = stream_key(tl.load(line + _SEED), tl.load(line + _SALT))
    ids = row_address(chunks_ptr, columns, handle_R, 8, live_R, _IDS)
    id_R = tl.load(ids.to(tl.pointer_type(tl.int64)), mask=live_R, other=0)
    weights = tl.load(line + _WEIGHT_BYTES)
    address = row_address(chunks_ptr, columns, handle_R, weights, live_R, _WEIGHTS)
    first_column = tl.load(line + _FIRST_COLUMN).to(tl.int32)
    _write_weights(
        address, id_R, live_R, key, first_column, segments_ptr, segments, quantiles_ptr,
        DIM, STORAGE, DRAWN, SHIFT, BLOCK_D,
    )  # fmt: skip
    if STATE > 0:
        states = tl.load(line + _STATE_BYTES)
        address = row_address(chunks_ptr, columns, handle_R, states, live_R, _STATE)
        _write_state(address, live_R, state_ptr, STATE, BLOCK_S)
    nothing = handle_R * 0
    versions = row_address(chunks_ptr, columns, handle_R, 4, live_R, _VERSIONS)
    tl.store(versions.to(tl.pointer_type(tl.int32)), nothing + epoch, mask=live_R)
    times = row_address(chunks_ptr, columns, handle_R, 4, live_R, _SEEN)
    tl.store(times.to(tl.pointer_type(tl.int32)), nothing + seen, mask=live_R)
    counts = row_address(chunks_ptr, columns, handle_R, 4, live_R, _COUNTS)
    tl.store(counts.to(tl.pointer_type(tl.int32)), nothing, mask=live_R)


@triton.jit(do_not_specialize=["columns", "tables", "form", "epoch", "seen"])  # type: ignore[untyped-decorator]
def _initialise(  # type: ignore[no-untyped-def]
    tables_ptr, counters_ptr, chunks_ptr, columns, tables, form,
    segments_ptr, segments, quantiles_ptr, state_ptr, epoch, seen,
    DIM: tl.constexpr, STATE: tl.constexpr, STORAGE: tl.constexpr, DRAWN: tl.constexpr,
    SHIFT: tl.constexpr, TABLES: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Tiles of ROWS rows are numbered through all tables; programs take them in turn."""
    tile = tl.program_id(0).to(tl.int64)
    start = tile * 0
    for first in range(0, tables, TABLES):
        table = first + tl.arange(0, TABLES)
        counts = counters_ptr + table.to(tl.int64) * _COUNT_WORDS
        issued = tl.load(counts + _ISSUED, mask=table < tables, other=0)
        ready = tl.load(counts + _READY, mask=table < tables, other=0)
        # Mostly no table has new rows, and the counters are all that a step reads here.
        if tl.max(issued - ready, axis=0) > 0:
            grown = issued > ready
            grown = grown & (table_word(tables_ptr, table, grown, _FORM) == form)
            tiles = tl.where(grown, (issued - ready + ROWS - 1) // ROWS, 0)
            ends = start + tl.cumsum(tiles, axis=0)
            total = start + tl.sum(tiles, axis=0)
            while tile < total:
                passed = ends <= tile
                one = first + tl.sum(passed.to(tl.int32), axis=0)
                begin = tl.max(tl.where(passed, ends, start), axis=0)
                one_counts = counters_ptr + one.to(tl.int64) * _COUNT_WORDS
                issue = tl.load(one_counts + _READY) + (tile - begin) * ROWS + tl.arange(0, ROWS)
                live = issue < tl.load(one_counts + _ISSUED)
                handle = issued_handle(
                    tables_ptr, counters_ptr, one + tl.zeros([ROWS], tl.int32), issue, live
                )
                _write_rows(
                    tables_ptr, chunks_ptr, columns, one, handle, live,
                    segments_ptr, segments, quantiles_ptr, state_ptr, epoch, seen,
                    DIM, STATE, STORAGE, DRAWN, SHIFT, BLOCK_D, BLOCK_S,
                )  # fmt: skip
                tile += tl.num_programs(0)
            start = total


@triton.jit(do_not_specialize=["words", "host"])  # type: ignore[untyped-decorator]
def _settle(counters_ptr, host, words, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = at < words
    ready = (at & (_COUNT_WORDS - 1)) == _READY
    # One word of each line changes: it takes what ISSUED holds.
    source = tl.where(ready, at - _READY + _ISSUED, at)
    value = tl.load(counters_ptr + source, mask=live, other=0)
    tl.store(counters_ptr + at, value, mask=live & ready)
    tl.store(host.to(tl.pointer_type(tl.int64)) + at, value, mask=live)


def initialise(
    layout: ShardLayout,
    form: RowForm,
    form_index: int,
    bound: int,
    *,
    epoch: int,
    event_time_s: int,
) -> None:
    """Write the rows READY..ISSUED of all tables of one form; their ids are in place.

    Weights get the bits of `shoal.rules.initializers.initial_values` in the row dtype, state the
    rules' `init_state`, versions `epoch`, last-seen `event_time_s`, counts 0. One launch.

    Args:
        form: of the tables whose `TABLE_FORM` is `form_index`; keep the object, it is a cache key.
        bound: at least as many as there are new rows; 0 launches nothing.
        epoch, event_time_s: 0..2^32-1.
    """
    tables = layout.tables_KT.shape[0]
    if bound == 0 or tables == 0:
        return
    device = layout.tables_KT.device
    ready = device_form(form, device)
    programs = min(blocks_of(bound, _ROWS) + tables, processors(device) * _PROGRAMS)
    launch(
        _initialise, (programs,),
        layout.tables_KT, layout.counters_KC, layout.chunks_WC, layout.chunks_WC.shape[1],
        tables, form_index, ready.segments_PW, len(form.segments), ready.quantiles_Q,
        ready.state_S, _int32(epoch), _int32(event_time_s),
        DIM=form.weight_bytes // form.dtype.itemsize, STATE=ready.state_S.numel(),
        STORAGE=storage_of(form.dtype), DRAWN=ready.drawn, SHIFT=form.shift,
        TABLES=min(max(power_of_2(tables), 16), _MOST_TABLES),
        ROWS=_ROWS, BLOCK_D=_SECTOR // form.dtype.itemsize,
        BLOCK_S=_SECTOR // form.real.itemsize, enable_fp_fusion=False,
    )  # fmt: skip


def settle(layout: ShardLayout, host_counters_KC: Tensor) -> None:
    """READY = ISSUED in all tables; then all counters as they are, to the host. One launch.

    host_counters_KC: int64 like `counters_KC`, contiguous, in memory that the device may write
    (page-locked); it holds them once the launch is done.
    """
    words = layout.counters_KC.numel()
    if words == 0:
        return
    block = 512
    launch(
        _settle,
        (blocks_of(words, block),),
        layout.counters_KC,
        host_counters_KC.data_ptr(),
        words,
        BLOCK=block,
    )


def _int32(word: int) -> int:
    """The int32 of the same bits: one type for all values of a uint32 argument."""
    return word - (1 << 32) if word >> 31 else word
