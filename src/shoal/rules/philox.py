"""Counter-based random words (Philox4x32-10) keyed by (seed, table), counted by (id, column).

The same word for the same id and column on every device, rank and run, in any order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.hashing import mix64, salt

__all__ = ["column_words", "philox4x32", "stream_key"]

_WORD = (1 << 32) - 1
_FACTORS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def stream_key(seed: int, table: str) -> int:
    """The 64-bit Philox key of a table's random words: mix64(seed ^ salt(table)).

    The seed is taken modulo 2^64; the low 32 bits of the key are its first word.
    """
    return mix64(seed ^ salt(table))


def philox4x32(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: int) -> Tensor:
    """Philox4x32 with 10 rounds (Salmon et al. 2011, "Parallel random numbers").

    Args:
        counter: four int64 tensors that broadcast, each element one word 0..2^32-1.
        key: 64 bits, low word first.

    Returns:
        int64 [..., 4], each element a word 0..2^32-1.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key & _WORD, (key >> 32) & _WORD
    for _ in range(_ROUNDS):
        # The low 64 bits of a product are the same signed or unsigned, so int64 serves.
        left, right = c0 * _FACTORS[0], c2 * _FACTORS[1]
        c0, c1, c2, c3 = (
            ((right >> 32) & _WORD) ^ c1 ^ k0,
            right & _WORD,
            ((left >> 32) & _WORD) ^ c3 ^ k1,
            left & _WORD,
        )
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return torch.stack([c0, c1, c2, c3], dim=-1)


def column_words(ids_N: Tensor, *, key: int, column_start: int, dim: int, domain: int) -> Tensor:
    """One random word per id and column.

    The word of column c (counted from the row's first column, not the segment's) is lane c % 4 of
    Philox at counter (id low word, id high word, c // 4, domain).

    Args:
        ids_N: int64 [N].
        key: `stream_key(seed, table)`.
        column_start, dim: columns column_start .. column_start + dim - 1.
        domain: the fourth counter word, 0..2^32-1.

    Returns:
        int64 [N, dim], each element a word 0..2^32-1.
    """
    first, last = column_start // 4, (column_start + dim + 3) // 4
    blocks = torch.arange(first, last, dtype=torch.int64, device=ids_N.device)
    ids_N1 = ids_N.unsqueeze(1)
    counter = (ids_N1 & _WORD, (ids_N1 >> 32) & _WORD, blocks, torch.full_like(blocks, domain))
    words = philox4x32(counter, key).flatten(1)
    skipped = column_start - 4 * first
    return words[:, skipped : skipped + dim]
