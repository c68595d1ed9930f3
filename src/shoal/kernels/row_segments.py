"""A row's segments on the device: what their weights start as, and what a read makes of them.

One line of SEGMENT_WORDS int64 a segment, read at run time, so that tables of one width share
compiled kernels whatever their laws. Reals are stored as the bits of float32 (laws) or float64
(compressors). Launch with `enable_fp_fusion=False`: the bits of initial values are pinned.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cache

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from shoal.kernels.row_form import RowForm, SegmentForm
from shoal.kernels.row_rounding import (
    STORED_FLOAT32,
    STORED_FLOAT64,
    nearest_bits,
    wide_of_bits,
)
from shoal.kernels.transfer import sent
from shoal.rules.compressors import FixedR8, OneBit
from shoal.rules.initializers import _quantiles

__all__ = [
    "DeviceForm",
    "as_read",
    "device_form",
    "initial_tile",
    "processors",
    "retrieved",
    "tanh",
]

SEGMENT_WORDS = 12
COLUMN, STOP, LAW, FIRST, SECOND, RETRIEVER, UNIT = range(7)
STEP_SIZE, INIT_SCALE, MAX_SCALE, AMPLITUDE = range(7, 11)

LAWS = {"constant": 0, "uniform": 1, "normal": 2, "truncated_normal": 3}
RETRIEVERS = {"float32": 0, "float16": 0, "fixed_r8": 1, "one_bit": 2}
QUANTILES = 4096

_FLOAT32 = tl.constexpr(STORED_FLOAT32)
_FLOAT64 = tl.constexpr(STORED_FLOAT64)
_WORDS = tl.constexpr(SEGMENT_WORDS)
_COLUMN = tl.constexpr(COLUMN)
_STOP = tl.constexpr(STOP)
_LAW = tl.constexpr(LAW)
_FIRST = tl.constexpr(FIRST)
_SECOND = tl.constexpr(SECOND)
_RETRIEVER = tl.constexpr(RETRIEVER)
_UNIT = tl.constexpr(UNIT)
_STEP_SIZE = tl.constexpr(STEP_SIZE)
_INIT_SCALE = tl.constexpr(INIT_SCALE)
_MAX_SCALE = tl.constexpr(MAX_SCALE)
_AMPLITUDE = tl.constexpr(AMPLITUDE)
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
        drawn=any(s.initializer.kind != "constant" for s in form.segments),
        plain=all(RETRIEVERS[s.compressor.kind] == 0 for s in form.segments),
    )
    if len(_forms) >= _FORMS_KEPT:
        _forms.clear()
    # The value holds its form, so the identity in the key stays taken.
    _forms[key] = made
    return made


@cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; a few for the interpreter."""
    if device.type != "cuda":
        return 2
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


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
    first, second = (_float32(value) for value in segment.initializer.core_params())
    if segment.initializer.kind == "uniform":
        second = _float32(second - first)
    line = [0] * SEGMENT_WORDS
    line[COLUMN], line[STOP] = segment.column, segment.column + segment.dim
    line[LAW] = LAWS[segment.initializer.kind]
    line[FIRST], line[SECOND] = _bits32(first), _bits32(second)
    compressor = segment.compressor
    line[RETRIEVER] = RETRIEVERS[compressor.kind]
    if isinstance(compressor, FixedR8):
        line[UNIT] = _bits64(compressor.r / 128)
    if isinstance(compressor, OneBit):
        line[STEP_SIZE] = compressor.step_size
        line[INIT_SCALE] = _bits64(compressor.init_scale)
        line[MAX_SCALE] = _bits64(compressor.max_scale)
        line[AMPLITUDE] = _bits64(compressor.amplitude)
    return line


def _float32(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float32, device="cpu"))


def _bits32(value: float) -> int:
    return int(torch.tensor(value, dtype=torch.float32, device="cpu").view(torch.int32))


def _bits64(value: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


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
    if STORAGE == _FLOAT64:
        read = value_RC.to(tl.float64)
    elif STORAGE == _FLOAT32:
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
    held = step - step % tl.load(line + _STEP_SIZE)
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
            read = _fixed_r8(value_RC, _real64(line + _UNIT))
            value_RC = tl.where(here[None, :], read, value_RC)
        elif kind == _ONE_BIT:
            scale = one_bit_scale(line, step).to(value_RC.dtype)
            amplitude = _real64(line + _AMPLITUDE).to(value_RC.dtype)
            value_RC = tl.where(here[None, :], tanh(value_RC * scale) * amplitude, value_RC)
    return value_RC
