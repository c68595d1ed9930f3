"""Random words (Philox4x32-10) and the storage of weights in 16 bits, in kernels."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from shoal.kernels.tables import mix64

_ROUNDS = tl.constexpr(10)
_FIRST_FACTOR = tl.constexpr(0xD2511F53)
_SECOND_FACTOR = tl.constexpr(0xCD9E8D57)
_FIRST_STEP = tl.constexpr(0x9E3779B9)
_SECOND_STEP = tl.constexpr(0xBB67AE85)
_WORD = tl.constexpr(0xFFFFFFFF)


@triton.jit
def stream_key(seed, salt):  # type: ignore[no-untyped-def]
    """`shoal.rules.initializers.stream_key` of the int64 words `TABLE_SEED` and `TABLE_SALT`."""
    return mix64(seed ^ salt)


@triton.jit
def philox(key, id, block, domain):  # type: ignore[no-untyped-def]
    """The four words of a block, each uint32.

    key, id: int64; block, domain: integers of 32 bits. They broadcast.
    """
    like = (id ^ key) * 0 + block * 0
    c0 = (id + like).to(tl.uint32)
    c1 = ((id + like) >> 32).to(tl.uint32)
    c2 = (like + block).to(tl.uint32)
    c3 = (like + domain).to(tl.uint32)
    # The key's words step in 64 bits and are cut: 32-bit sums would be checked for overflow.
    k0 = key & _WORD
    k1 = (key >> 32) & _WORD
    for _ in tl.static_range(_ROUNDS):
        left = c0.to(tl.uint64) * _FIRST_FACTOR
        right = c2.to(tl.uint64) * _SECOND_FACTOR
        c0 = (right >> 32).to(tl.uint32) ^ c1 ^ k0.to(tl.uint32)
        c2 = (left >> 32).to(tl.uint32) ^ c3 ^ k1.to(tl.uint32)
        c1 = right.to(tl.uint32)
        c3 = left.to(tl.uint32)
        k0 = (k0 + _FIRST_STEP) & _WORD
        k1 = (k1 + _SECOND_STEP) & _WORD
    return c0, c1, c2, c3


@triton.jit  # type: ignore[untyped-decorator]
def quad_words(key, id_R, first_quad, domain, QUADS: tl.constexpr):  # type: ignore[no-untyped-def]
    """uint32 [R, 4 * QUADS]: words of columns 4 * first_quad on, of each id; int64 [R] ids.

    `key` is one int64, or int64 [R]; `first_quad` one int32, or int32 [R].
    """
    if key.type.is_block():
        key = key[:, None]
    if first_quad.type.is_block():
        quad = first_quad[:, None] + tl.arange(0, QUADS)[None, :]
    else:
        quad = (first_quad + tl.arange(0, QUADS))[None, :]
    c0, c1, c2, c3 = philox(key, id_R[:, None], quad, domain)
    return tl.interleave(tl.interleave(c0, c2), tl.interleave(c1, c3))


@triton.jit
def words_at(key, id, column, domain):  # type: ignore[no-untyped-def]
    """uint32: the word of each (id, column); shapes broadcast."""
    c0, c1, c2, c3 = philox(key, id, column >> 2, domain)
    lane = (column & 3) + c0.to(tl.int32) * 0
    return tl.where(lane == 0, c0, tl.where(lane == 1, c1, tl.where(lane == 2, c2, c3)))


# What a weight is stored as; `_STORAGE` for the host.
FLOAT32, FLOAT16, BFLOAT16, FLOAT64 = map(tl.constexpr, range(4))
_STORAGE = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.float64: 3}


def storage_of(dtype: torch.dtype) -> int:
    """The number of a weight dtype, that of FLOAT32, FLOAT16, BFLOAT16 or FLOAT64."""
    return _STORAGE[dtype]


def rounding_domain(global_step: int) -> int:
    """2 * (global_step mod 2^31) + 1 as the int32 of the same bits, for a kernel."""
    domain = ((global_step % (1 << 31)) << 1) | 1
    return domain - (1 << 32) if domain >> 31 else domain


@triton.jit  # type: ignore[untyped-decorator]
def wide_of_bits(bits, STORAGE: tl.constexpr):  # type: ignore[no-untyped-def]
    """float32 of int16 patterns."""
    if STORAGE == FLOAT16:
        wide = bits.to(tl.float16, bitcast=True).to(tl.float32)
    else:
        wide = (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return wide


@triton.jit  # type: ignore[untyped-decorator]
def nearest_bits(value, STORAGE: tl.constexpr):  # type: ignore[no-untyped-def]
    """int16 patterns of float32 values, to nearest, ties to even."""
    if STORAGE == FLOAT16:
        near = value.to(tl.float16).to(tl.int16, bitcast=True)
    else:
        bits = value.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        near = tl.where(value == value, rounded, (bits >> 16) | 64).to(tl.int16)
    return near


@triton.jit  # type: ignore[untyped-decorator]
def stochastic_bits(value, word, STORAGE: tl.constexpr):  # type: ignore[no-untyped-def]
    """int16 patterns of float32 values, rounded by their random words (uint32).

    `tests/support/rounding.py` with the words of domain `rounding_domain(step)`.
    """
    near = nearest_bits(value, STORAGE)
    bits = value.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    if STORAGE == FLOAT16:
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
    if STORAGE == FLOAT32:
        weights = tl.load(row_pointers(address_R, column_C, tl.float32), mask=mask_RC, other=0.0)
    elif STORAGE == FLOAT64:
        weights = tl.load(row_pointers(address_R, column_C, tl.float64), mask=mask_RC, other=0.0)
    else:
        bits = tl.load(row_pointers(address_R, column_C, tl.int16), mask=mask_RC, other=0)
        weights = wide_of_bits(bits, STORAGE)
    return weights


@triton.jit  # type: ignore[untyped-decorator]
def store_nearest(address_R, column_C, value_RC, mask_RC, STORAGE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store [R, C] float32 values (float64 for float64 rows), to nearest; addresses as above."""
    if STORAGE == FLOAT32:
        tl.store(row_pointers(address_R, column_C, tl.float32), value_RC, mask=mask_RC)
    elif STORAGE == FLOAT64:
        wide = value_RC.to(tl.float64)
        tl.store(row_pointers(address_R, column_C, tl.float64), wide, mask=mask_RC)
    else:
        bits = nearest_bits(value_RC, STORAGE)
        tl.store(row_pointers(address_R, column_C, tl.int16), bits, mask=mask_RC)
