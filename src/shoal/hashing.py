"""The one bijective mix of 64-bit words and the salt of a table name.

Placement hashes ids with them, initial values and rounding take their random key from them; the
compiled core computes the same bits.
"""

from __future__ import annotations

import hashlib
from typing import overload

from torch import Tensor

__all__ = ["mix64", "salt", "to_signed"]

_MASK = (1 << 64) - 1
_FIRST_FACTOR = 0xBF58476D1CE4E5B9
_SECOND_FACTOR = 0x94D049BB133111EB


def to_signed(word: int) -> int:
    """The int64 with the same 64 bits as `word` (any Python int, taken modulo 2^64)."""
    word &= _MASK
    return word - (1 << 64) if word >> 63 else word


@overload
def mix64(word: int) -> int: ...
@overload
def mix64(word: Tensor) -> Tensor: ...


def mix64(word: int | Tensor) -> int | Tensor:
    """The finalizer of splitmix64 (Steele, Lea, Flood 2014): a bijection of 64-bit words.

    An int is taken modulo 2^64 and gives 0..2^64-1. An int64 tensor of any shape is read as
    uint64 bits and gives a new int64 tensor of the same shape that holds uint64 bits.
    """
    if isinstance(word, Tensor):
        word = (word ^ _shifted(word, 30)) * to_signed(_FIRST_FACTOR)
        word = (word ^ _shifted(word, 27)) * to_signed(_SECOND_FACTOR)
        return word ^ _shifted(word, 31)
    word &= _MASK
    word = ((word ^ (word >> 30)) * _FIRST_FACTOR) & _MASK
    word = ((word ^ (word >> 27)) * _SECOND_FACTOR) & _MASK
    return word ^ (word >> 31)


def salt(table: str) -> int:
    """The salt of a table, 0..2^64-1: first 8 bytes, little-endian, of SHA-256 of its name."""
    return int.from_bytes(hashlib.sha256(table.encode()).digest()[:8], "little")


def _shifted(word: Tensor, bits: int) -> Tensor:
    """Logical right shift: torch's shift of int64 copies the sign bit, which is masked off."""
    return (word >> bits) & ((1 << (64 - bits)) - 1)
