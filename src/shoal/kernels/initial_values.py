"""A row's segments on the device, and what a new row holds."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from shoal.kernels.host_copies import sent
from shoal.kernels.launch import blocks_of, launch, power_of_2, shared_programs
from shoal.kernels.rounding import (
    FLOAT32,
    FLOAT64,
    nearest_bits,
    quad_words,
    row_pointers,
    storage_of,
    store_nearest,
    stream_key,
    wide_of_bits,
    words_at,
)
from shoal.kernels.tables import (
    COUNT_LINE,
    COUNTS_AT,
    FIRST_COLUMN_AT,
    FORM_AT,
    ISSUED_AT,
    READY_AT,
    SALT_AT,
    SEED_AT,
    SEEN_AT,
    STATE_AT,
    STATE_BYTES_AT,
    TABLE_LINE,
    VERSIONS_AT,
    WEIGHT_BYTES_AT,
    WEIGHTS_AT,
    RowForm,
    SegmentForm,
    ShardLayout,
    id_of,
    issued_handle,
    row_address,
    set_uint32,
    table_word,
)
from shoal.rules.initializers import _quantiles

SEGMENT_WORDS = 12
# Its columns, its law and the law's numbers, its retriever; then that one's parameters in the
# declared order.
_COLUMN, _STOP, _LAW, _FIRST, _SECOND, _RETRIEVER = (tl.constexpr(word) for word in range(6))
_STEP_SIZE, _INIT_SCALE, _MAX_SCALE, _AMPLITUDE = (tl.constexpr(word) for word in range(6, 10))
_R = tl.constexpr(6)

LAWS = {"constant": 0, "uniform": 1, "normal": 2, "truncated_normal": 3}
RETRIEVERS = {"float32": 0, "float16": 0, "fixed_r8": 1, "one_bit": 2}
QUANTILES = 4096

_WORDS = tl.constexpr(SEGMENT_WORDS)
_QUANTILES = tl.constexpr(QUANTILES)
_CONSTANT = tl.constexpr(LAWS["constant"])
_UNIFORM = tl.constexpr(LAWS["uniform"])
_NORMAL = tl.constexpr(LAWS["normal"])
_FIXED = tl.constexpr(RETRIEVERS["fixed_r8"])
_ONE_BIT = tl.constexpr(RETRIEVERS["one_bit"])

_FORMS_KEPT = 256


@dataclass(frozen=True, slots=True)
class DeviceForm:
    """A form's small tensors on one device.

    segments_PW: int64 [P, SEGMENT_WORDS]; state_S: the state of a fresh row with its padding, in
    the form's real dtype; quantiles_Q: int64, pairs (quantile, step to the next) of both normal
    laws. drawn: some initial value is random; plain: reads return what is stored.
    """

    form: RowForm
    segments_PW: Tensor
    state_S: Tensor
    quantiles_Q: Tensor
    drawn: bool
    plain: bool


_forms: dict[tuple[int, torch.device], DeviceForm] = {}


def device_form(form: RowForm, device: torch.device) -> DeviceForm:
    """The form's tensors on a device, made once for each form object."""
    key = (id(form), device)
    kept = _forms.get(key)
    if kept is not None:
        return kept
    states = [s.optimizer.init_state(s.dim, dtype=form.real) for s in form.segments]
    padding = form.state_bytes // form.real.itemsize - form.state_width
    states.append(torch.zeros(padding, dtype=form.real, device="cpu"))
    made = DeviceForm(
        form=form,
        segments_PW=sent([word for s in form.segments for word in _line(s)], device),
        state_S=sent(torch.cat(states), device),
        quantiles_Q=_device_quantiles(device),
        drawn=any(s.initializer.law != "constant" for s in form.segments),
        plain=all(RETRIEVERS[s.compressor.kind] == 0 for s in form.segments),
    )
    if len(_forms) >= _FORMS_KEPT:
        _forms.clear()
    # The value holds its form, so the identity in the key stays taken.
    _forms[key] = made
    return made


@cache
def _device_quantiles(device: torch.device) -> Tensor:
    pairs = []
    for kind in ("normal", "truncated_normal"):
        table = _quantiles(kind)
        steps = table[1:] - table[:-1]
        pairs.append(torch.stack([table[:-1], steps], dim=1))
    # Waits, once: all shards share it, and not all of them are on this stream.
    return torch.cat(pairs).contiguous().view(torch.int64).flatten().to(device)


def _line(segment: SegmentForm) -> list[int]:
    first, second = map(np.float32, (*segment.initializer.param_values(), 0.0)[:2])
    if segment.initializer.law == "uniform":
        second = np.float32(float(second) - float(first))
    line = [segment.column, segment.column + segment.dim, LAWS[segment.initializer.law]]
    line += [int(value.view(np.int32)) for value in (first, second)]
    line.append(RETRIEVERS[segment.compressor.kind])
    line += [int(np.float64(p).view(np.int64)) for p in segment.compressor.param_values()]
    return line + [0] * (SEGMENT_WORDS - len(line))


@triton.jit
def _real32(pointer):  # type: ignore[no-untyped-def]
    return tl.load(pointer).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _real64(pointer):  # type: ignore[no-untyped-def]
    return tl.load(pointer).to(tl.float64, bitcast=True)


@triton.jit
def _quantile(word_RC, quantiles_ptr):  # type: ignore[no-untyped-def]
    pair = tl.load(quantiles_ptr + (word_RC >> 20).to(tl.int32))
    low = pair.to(tl.int32).to(tl.float32, bitcast=True)
    step = (pair >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    part = (word_RC & 0xFFFFF).to(tl.int32).to(tl.float32) * 9.5367431640625e-07
    return low + part * step


@triton.jit
def initial_tile(value_RC, word_RC, column_C, segments_ptr, segments, quantiles_ptr):  # type: ignore[no-untyped-def]
    """float32 [R, C]: `value_RC` with the initial values of the columns of all segments.

    word_RC: uint32 words of the columns in domain 0; column_C counts from the row's first. Columns
    of no segment keep their value.
    """
    for segment in range(segments):
        line = segments_ptr + segment * _WORDS
        here = (column_C >= tl.load(line + _COLUMN)) & (column_C < tl.load(line + _STOP))
        law = tl.load(line + _LAW)
        first = _real32(line + _FIRST)
        second = _real32(line + _SECOND)
        if law == _CONSTANT:
            value_RC = tl.where(here[None, :], first, value_RC)
        else:
            if law == _UNIFORM:
                unit = (word_RC >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08
                drawn = unit * second + first
            else:
                drawn = _quantile(word_RC, quantiles_ptr + (law - _NORMAL) * _QUANTILES)
                drawn = drawn * second + first
            value_RC = tl.where(here[None, :], drawn, value_RC)
    return value_RC


@triton.jit  # type: ignore[untyped-decorator]
def as_read(value_RC, STORAGE: tl.constexpr):  # type: ignore[no-untyped-def]
    """float32 values (float64 for float64 rows) as they read once stored."""
    if STORAGE == FLOAT64:
        read = value_RC.to(tl.float64)
    elif STORAGE == FLOAT32:
        read = value_RC
    else:
        read = wide_of_bits(nearest_bits(value_RC, STORAGE), STORAGE)
    return read


@triton.jit
def tanh(x):  # type: ignore[no-untyped-def]
    """Hyperbolic tangent of float32 or float64, to a few units in the last place.

    Source: Cephes, tanh.c: a rational function near 0, the exponential elsewhere.
    """
    z = x * x
    p = (-9.64399179425052238628e-1 * z - 9.92877231001918586564e1) * z - 1.61468768441708447952e3
    q = ((z + 1.12811678491632931402e2) * z + 2.23548839060100448583e3) * z
    q = q + 4.84406305325125486048e3
    size = tl.abs(x)
    near = x + x * z * (p / q)
    far = 1.0 - 2.0 / (tl.exp(2.0 * tl.minimum(size, 40.0)) + 1.0)
    return tl.where(size < 0.625, near, tl.where(x < 0, -far, far))


@triton.jit
def _fixed_r8(value_RC, unit):  # type: ignore[no-untyped-def]
    unit = unit.to(value_RC.dtype)
    if value_RC.dtype == tl.float64:
        scaled = value_RC / unit
    else:
        scaled = tl.div_rn(value_RC, tl.zeros_like(value_RC) + unit)
    scaled = tl.where(value_RC == value_RC, scaled, 0.0)
    scaled = tl.minimum(tl.maximum(scaled, -200.0), 200.0)
    whole = scaled.to(tl.int32).to(value_RC.dtype)
    away = tl.where(scaled < 0, -1.0, 1.0)
    code = tl.where(tl.abs(scaled - whole) >= 0.5, whole + away, whole)
    return tl.minimum(tl.maximum(code, -128.0), 127.0) * unit


@triton.jit
def one_bit_scale(line, step):  # type: ignore[no-untyped-def]
    """float64: steepness of a OneBit segment's tanh at a global step."""
    held = step - step % _real64(line + _STEP_SIZE).to(tl.int64)
    scale = _real64(line + _INIT_SCALE) * tl.sqrt(1.0 + 0.005 * held.to(tl.float64))
    return tl.minimum(scale, _real64(line + _MAX_SCALE))


@triton.jit
def retrieved(value_RC, column_C, segments_ptr, segments, step):  # type: ignore[no-untyped-def]
    """[R, C]: what training reads where `value_RC` is stored; float32 or float64, kept."""
    for segment in range(segments):
        line = segments_ptr + segment * _WORDS
        here = (column_C >= tl.load(line + _COLUMN)) & (column_C < tl.load(line + _STOP))
        kind = tl.load(line + _RETRIEVER)
        if kind == _FIXED:
            read = _fixed_r8(value_RC, _real64(line + _R) / 128.0)
            value_RC = tl.where(here[None, :], read, value_RC)
        elif kind == _ONE_BIT:
            scale = one_bit_scale(line, step).to(value_RC.dtype)
            amplitude = _real64(line + _AMPLITUDE).to(value_RC.dtype)
            value_RC = tl.where(here[None, :], tanh(value_RC * scale) * amplitude, value_RC)
    return value_RC


_ROWS = 128  # of a program's block: one for every thread, so that none looks a row up twice
_SECTOR = 32  # bytes of a row that a block writes at a time
_MOST_TABLES = 1024  # tables that a program looks at together
_PROGRAMS = 4  # on each multiprocessor


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
    segments_ptr, segments, quantiles_ptr, state_ptr, version, seen,
    DIM: tl.constexpr, STATE: tl.constexpr, STORAGE: tl.constexpr, DRAWN: tl.constexpr,
    SHIFT: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Everything of the fresh rows of one table but their ids, which are there.

    DIM, STATE: columns and the padding behind them, which is written too: stores stay wide.
    """
    line = tables_ptr + table.to(tl.int64) * TABLE_LINE
    key = stream_key(tl.load(line + SEED_AT), tl.load(line + SALT_AT))
    id_R = id_of(chunks_ptr, columns, handle_R, live_R)
    weights = tl.load(line + WEIGHT_BYTES_AT)
    address = row_address(chunks_ptr, columns, handle_R, weights, live_R, WEIGHTS_AT)
    first_column = tl.load(line + FIRST_COLUMN_AT).to(tl.int32)
    _write_weights(
        address, id_R, live_R, key, first_column, segments_ptr, segments, quantiles_ptr,
        DIM, STORAGE, DRAWN, SHIFT, BLOCK_D,
    )  # fmt: skip
    if STATE > 0:
        states = tl.load(line + STATE_BYTES_AT)
        address = row_address(chunks_ptr, columns, handle_R, states, live_R, STATE_AT)
        _write_state(address, live_R, state_ptr, STATE, BLOCK_S)
    set_uint32(chunks_ptr, columns, handle_R, live_R, version, VERSIONS_AT)
    set_uint32(chunks_ptr, columns, handle_R, live_R, seen, SEEN_AT)
    set_uint32(chunks_ptr, columns, handle_R, live_R, 0, COUNTS_AT)


@triton.jit(do_not_specialize=["columns", "tables", "form", "version", "seen"])  # type: ignore[untyped-decorator]
def _initialise(  # type: ignore[no-untyped-def]
    tables_ptr, counters_ptr, chunks_ptr, columns, tables, form,
    segments_ptr, segments, quantiles_ptr, state_ptr, version, seen,
    DIM: tl.constexpr, STATE: tl.constexpr, STORAGE: tl.constexpr, DRAWN: tl.constexpr,
    SHIFT: tl.constexpr, TABLES: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Tiles of ROWS rows are numbered through all tables; programs take them in turn."""
    tile = tl.program_id(0).to(tl.int64)
    start = tile * 0
    for first in range(0, tables, TABLES):
        table = first + tl.arange(0, TABLES)
        counts = counters_ptr + table.to(tl.int64) * COUNT_LINE
        issued = tl.load(counts + ISSUED_AT, mask=table < tables, other=0)
        ready = tl.load(counts + READY_AT, mask=table < tables, other=0)
        # Mostly no table has new rows, and the counters are all that a step reads here.
        if tl.max(issued - ready, axis=0) > 0:
            grown = issued > ready
            grown = grown & (table_word(tables_ptr, table, grown, FORM_AT) == form)
            tiles = tl.where(grown, (issued - ready + ROWS - 1) // ROWS, 0)
            ends = start + tl.cumsum(tiles, axis=0)
            total = start + tl.sum(tiles, axis=0)
            while tile < total:
                passed = ends <= tile
                one = first + tl.sum(passed.to(tl.int32), axis=0)
                begin = tl.max(tl.where(passed, ends, start), axis=0)
                one_counts = counters_ptr + one.to(tl.int64) * COUNT_LINE
                issue = tl.load(one_counts + READY_AT) + (tile - begin) * ROWS + tl.arange(0, ROWS)
                live = issue < tl.load(one_counts + ISSUED_AT)
                handle = issued_handle(
                    tables_ptr, counters_ptr, one + tl.zeros([ROWS], tl.int32), issue, live
                )
                _write_rows(
                    tables_ptr, chunks_ptr, columns, one, handle, live,
                    segments_ptr, segments, quantiles_ptr, state_ptr, version, seen,
                    DIM, STATE, STORAGE, DRAWN, SHIFT, BLOCK_D, BLOCK_S,
                )  # fmt: skip
                tile += tl.num_programs(0)
            start = total


@triton.jit(do_not_specialize=["words", "host"])  # type: ignore[untyped-decorator]
def _settle(counters_ptr, host, words, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = at < words
    ready = (at & (COUNT_LINE - 1)) == READY_AT
    # One word of each line changes: it takes what ISSUED holds.
    source = tl.where(ready, at - READY_AT + ISSUED_AT, at)
    value = tl.load(counters_ptr + source, mask=live, other=0)
    tl.store(counters_ptr + at, value, mask=live & ready)
    tl.store(host.to(tl.pointer_type(tl.int64)) + at, value, mask=live)


def initialise(
    layout: ShardLayout,
    form: RowForm,
    form_index: int,
    bound: int,
    *,
    version: int,
    event_time_s: int,
) -> None:
    """Write the rows READY..ISSUED of all tables of one form; their ids are in place.

    Weights get the bits of `shoal.rules.initializers.initial_values` in the row dtype, state the
    rules' `init_state`, versions `version`, last-seen `event_time_s`, counts 0. One launch.

    Args:
        form: of the tables whose `TABLE_FORM` is `form_index`; keep the object, it is a cache key.
        bound: at least as many as there are new rows; 0 launches nothing.
        version, event_time_s: 0..2^32-1.
    """
    tables = layout.tables_KT.shape[0]
    if bound == 0 or tables == 0:
        return
    device = layout.tables_KT.device
    ready = device_form(form, device)
    tiles = blocks_of(bound, _ROWS) + tables
    launch(
        _initialise, (shared_programs(tiles, device, _PROGRAMS),),
        layout.tables_KT, layout.counters_KC, *layout.chunks,
        tables, form_index, ready.segments_PW, len(form.segments), ready.quantiles_Q,
        ready.state_S, _int32(version), _int32(event_time_s),
        DIM=form.weight_bytes // form.dtype.itemsize, STATE=ready.state_S.numel(),
        STORAGE=storage_of(form.dtype), DRAWN=ready.drawn, SHIFT=form.shift,
        TABLES=min(max(power_of_2(tables), 16), _MOST_TABLES),
        ROWS=_ROWS, BLOCK_D=_SECTOR // form.dtype.itemsize,
        BLOCK_S=_SECTOR // form.real.itemsize, enable_fp_fusion=False,
    )  # fmt: skip


def settle(layout: ShardLayout, host_counters_KC: Tensor) -> None:
    """READY = ISSUED in all tables; then all counters as they are, to the host. One launch.

    host_counters_KC: int64 like `counters_KC`, contiguous, in memory that the device may write
    (pinned); it holds them once the launch is done.
    """
    words = layout.counters_KC.numel()
    if words == 0:
        return
    block = 512
    launch(
        _settle, (blocks_of(words, block),),
        layout.counters_KC, host_counters_KC.data_ptr(), words,
        BLOCK=block,
    )  # fmt: skip


def _int32(word: int) -> int:
    """The int32 of the same bits: one type for all values of a uint32 argument."""
    return word - (1 << 32) if word >> 31 else word
