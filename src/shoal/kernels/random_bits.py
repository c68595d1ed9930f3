"""Philox4x32-10 words in kernels: the bits of `shoal.rules.philox`.

A word belongs to (key, id, column, domain), the column counted from the first of the whole row: a
table of some columns of another starts at its `TABLE_FIRST_COLUMN`. `quad_words` draws each block
of four columns once and is what whole rows take; `words_at` draws a block for every lane, for
columns in any order.
"""

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from shoal.kernels.table_layout import mix64

__all__ = ["philox", "quad_words", "stream_key", "words_at"]

_ROUNDS = tl.constexpr(10)
_FIRST_FACTOR = tl.constexpr(0xD2511F53)
_SECOND_FACTOR = tl.constexpr(0xCD9E8D57)
_FIRST_STEP = tl.constexpr(0x9E3779B9)
_SECOND_STEP = tl.constexpr(0xBB67AE85)
_WORD = tl.constexpr(0xFFFFFFFF)


@triton.jit
def stream_key(seed, salt):  # type: ignore[no-untyped-def]
    """`shoal.rules.philox.stream_key` of the int64 words `TABLE_SEED` and `TABLE_SALT`."""
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
