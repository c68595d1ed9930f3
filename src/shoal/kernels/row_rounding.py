"""Storage of weights in kernels: 16-bit rows as bit patterns, rounded to nearest or by chance.

16-bit weights travel as int16 patterns, so that every backend shares one arithmetic: the bits are
those of `shoal.rules.rounding` and of the compiled core. `STORAGE` is one of the STORED_* numbers.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

__all__ = [
    "STORED_BFLOAT16",
    "STORED_FLOAT16",
    "STORED_FLOAT32",
    "STORED_FLOAT64",
    "load_weights",
    "nearest_bits",
    "rounding_domain",
    "row_pointers",
    "stochastic_bits",
    "storage_of",
    "store_nearest",
    "wide_of_bits",
]

STORED_FLOAT32, STORED_FLOAT16, STORED_BFLOAT16, STORED_FLOAT64 = 0, 1, 2, 3
_STORAGE = {
    torch.float32: STORED_FLOAT32,
    torch.float16: STORED_FLOAT16,
    torch.bfloat16: STORED_BFLOAT16,
    torch.float64: STORED_FLOAT64,
}
_FLOAT32 = tl.constexpr(STORED_FLOAT32)
_FLOAT16 = tl.constexpr(STORED_FLOAT16)
_FLOAT64 = tl.constexpr(STORED_FLOAT64)


def storage_of(dtype: torch.dtype) -> int:
    """The STORED_* number of a weight dtype."""
    return _STORAGE[dtype]


def rounding_domain(global_step: int) -> int:
    """`shoal.rules.rounding.rounding_domain` as the int32 of the same bits, for a kernel."""
    domain = ((global_step % (1 << 31)) << 1) | 1
    return domain - (1 << 32) if domain >> 31 else domain


@triton.jit  # type: ignore[untyped-decorator]
def wide_of_bits(bits, STORAGE: tl.constexpr):  # type: ignore[no-untyped-def]
    """float32 of int16 patterns."""
    if STORAGE == _FLOAT16:
        wide = bits.to(tl.float16, bitcast=True).to(tl.float32)
    else:
        wide = (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return wide


@triton.jit  # type: ignore[untyped-decorator]
def nearest_bits(value, STORAGE: tl.constexpr):  # type: ignore[no-untyped-def]
    """int16 patterns of float32 values, to nearest, ties to even."""
    if STORAGE == _FLOAT16:
        near = value.to(tl.float16).to(tl.int16, bitcast=True)
    else:
        bits = value.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        near = tl.where(value == value, rounded, (bits >> 16) | 64).to(tl.int16)
    return near


@triton.jit  # type: ignore[untyped-decorator]
def stochastic_bits(value, word, STORAGE: tl.constexpr):  # type: ignore[no-untyped-def]
    """int16 patterns of float32 values, rounded by their random words (uint32).

    `shoal.rules.rounding.stochastic_round` with the words of domain `rounding_domain(step)`.
    """
    near = nearest_bits(value, STORAGE)
    bits = value.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    if STORAGE == _FLOAT16:
        near32 = wide_of_bits(near, STORAGE)
        size = near.to(tl.int32) & 0x7FFF
        sign = near.to(tl.int32) & 0x8000
        under = size - (tl.abs(near32) > tl.abs(value)).to(tl.int32)
        toward = (under | sign).to(tl.int16)
        away = ((under + 1) | sign).to(tl.int16)
        low = tl.where(sign != 0, away, toward)
        high = tl.where(sign != 0, toward, away)
        low32 = wide_of_bits(low, STORAGE)
        span = wide_of_bits(high, STORAGE) - low32
        kept = (near32 == value) | ((bits & 0x7FFFFFFF) > 0x477FE000)
        part = tl.div_rn(tl.where(kept, 0.0, value - low32), tl.where(kept, 1.0, span))
        unit = (word >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08
        result = tl.where(kept, near, tl.where(unit < part, high, low))
    else:
        # An infinity or a NaN has all exponent bits set.
        finite = (bits & 0x7F800000) != 0x7F800000
        rounded = (bits + (word.to(tl.int64) & 0xFFFF)) >> 16
        result = tl.where(finite, rounded.to(tl.int16), near)
    return result


@triton.jit  # type: ignore[untyped-decorator]
def row_pointers(address_R, column_C, element: tl.constexpr):  # type: ignore[no-untyped-def]
    """[R, C] pointers to columns of rows at int64 byte addresses, multiples of 16."""
    # What is known of an integer is lost as it becomes a pointer, so the pointer is told.
    row = tl.multiple_of(address_R.to(tl.pointer_type(element)), 16)
    return row[:, None] + column_C[None, :]


@triton.jit  # type: ignore[untyped-decorator]
def load_weights(address_R, column_C, mask_RC, STORAGE: tl.constexpr):  # type: ignore[no-untyped-def]
    """[R, C] weights, float32 or (float64 rows) float64; 0 where masked.

    address_R: int64 byte addresses of rows, multiples of 16.
    """
    if STORAGE == _FLOAT32:
        weights = tl.load(row_pointers(address_R, column_C, tl.float32), mask=mask_RC, other=0.0)
    elif STORAGE == _FLOAT64:
        weights = tl.load(row_pointers(address_R, column_C, tl.float64), mask=mask_RC, other=0.0)
    else:
        bits = tl.load(row_pointers(address_R, column_C, tl.int16), mask=mask_RC, other=0)
        weights = wide_of_bits(bits, STORAGE)
    return weights


@triton.jit  # type: ignore[untyped-decorator]
def store_nearest(address_R, column_C, value_RC, mask_RC, STORAGE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store [R, C] float32 values (float64 for float64 rows), to nearest; addresses as above."""
    if STORAGE == _FLOAT32:
        tl.store(row_pointers(address_R, column_C, tl.float32), value_RC, mask=mask_RC)
    elif STORAGE == _FLOAT64:
        wide = value_RC.to(tl.float64)
        tl.store(row_pointers(address_R, column_C, tl.float64), wide, mask=mask_RC)
    else:
        bits = nearest_bits(value_RC, STORAGE)
        tl.store(row_pointers(address_R, column_C, tl.int16), bits, mask=mask_RC)
