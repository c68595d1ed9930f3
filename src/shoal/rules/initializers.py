"""Initial values of rows: frozen specs, Philox words, and the reference that fixes their bits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np
import torch
from torch import Tensor

from shoal.ids import mix64, salt
from shoal.rules.rule import Allowed, Finite, NotNegative, Rule, at_least, check

__all__ = [
    "BatchSoftmaxInit",
    "Constant",
    "Initializer",
    "Normal",
    "Ones",
    "TruncatedNormal",
    "Uniform",
    "Zeros",
    "initial_values",
]


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

    The word of column c (counted from the row's first column, not the segment's) is word c % 4 of
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


_QUANTILES = Path(__file__).with_name("quantiles.npz")
_INIT_DOMAIN = 0


class Initializer(Rule):
    """How the weights of a new row are filled.

    law: what the core and the kernels do with the parameters.
    """

    __slots__ = ()

    law: ClassVar[str] = "constant"


@dataclass(frozen=True, slots=True)
class Zeros(Initializer):
    """All 0."""

    kind = "zeros"
    params = ("value",)

    value: ClassVar[float] = 0.0


@dataclass(frozen=True, slots=True)
class Ones(Initializer):
    """All 1."""

    kind = "ones"
    params = ("value",)

    value: ClassVar[float] = 1.0


@dataclass(frozen=True, slots=True)
class Constant(Initializer):
    """All `value`."""

    kind = "constant"
    params = ("value",)

    value: Finite


@dataclass(frozen=True, slots=True)
class BatchSoftmaxInit(Initializer):
    """All `value`: the gap between samples that a new id is presumed to have, at least 1 step."""

    kind = "batch_softmax"
    params = ("value",)

    value: Annotated[float, at_least(1)] = 1.0


@dataclass(frozen=True, slots=True)
class Uniform(Initializer):
    """Uniform from minval to maxval, in 2^24 even steps.

    Raises:
        ConfigError: minval above maxval.
    """

    kind = law = "uniform"
    params = ("minval", "maxval")

    minval: Finite = -0.05
    maxval: Finite = 0.05

    def __post_init__(self) -> None:
        Initializer.__post_init__(self)
        words, remedy = f"at most maxval, {self.maxval}", "Swap the two."
        check(self, "minval", self.minval, Allowed(words, lambda low: low <= self.maxval, remedy))


@dataclass(frozen=True, slots=True)
class Normal(Initializer):
    """Normal with the given mean and standard deviation, truncated at 3.84 deviations."""

    kind = law = "normal"
    params = ("mean", "std")

    mean: Finite = 0.0
    std: NotNegative = 0.05


@dataclass(frozen=True, slots=True)
class TruncatedNormal(Initializer):
    """Normal redrawn beyond two deviations; `std` is that of the normal before truncation."""

    kind = law = "truncated_normal"
    params = ("mean", "std")

    mean: Finite = 0.0
    std: NotNegative = 0.05


def initial_values(
    initializer: Initializer, ids_N: Tensor, *, seed: int, table: str, column_start: int, dim: int
) -> Tensor:
    """The weights that new rows get, float32 [N, dim]; the oracle for every backend's bits.

    x is the word of `column_words` in domain 0 (an odd domain belongs to rounding); fl
    rounds to float32.

    uniform: u = (x >> 8) * 2^-24 (exact); width = fl(fl(maxval) - fl(minval));
    fl(fl(u * width) + fl(minval)).
    normal, truncated_normal: Q is the law's table of 4097 quantiles, i = x >> 20,
    f = (x & 0xfffff) * 2^-20 (exact); z = fl(Q[i] + fl(f * fl(Q[i+1] - Q[i])));
    fl(fl(z * fl(std)) + fl(mean)).

    Args:
        initializer: the segment's law.
        ids_N: int64 [N], any 64 bits, duplicates fine.
        seed: the shard's seed, modulo 2^64.
        table: the table's name.
        column_start: the segment's first column in the row.
        dim: the segment's columns.
    """
    first, *others = initializer.param_values()
    if initializer.law == "constant":
        return torch.full((ids_N.shape[0], dim), first, dtype=torch.float32, device=ids_N.device)
    second = others[0]
    words = column_words(
        ids_N, key=stream_key(seed, table), column_start=column_start, dim=dim, domain=_INIT_DOMAIN
    )
    if initializer.law == "uniform":
        unit = (words >> 8).to(torch.float32) * 2.0**-24
        width = _float32(_float32(second) - _float32(first))
        return unit * width + _float32(first)
    table_Q = _quantiles(initializer.law).to(ids_N.device)
    below = words >> 20
    part = (words & 0xFFFFF).to(torch.float32) * 2.0**-20
    low, high = table_Q[below], table_Q[below + 1]
    return (low + part * (high - low)) * _float32(second) + _float32(first)


def _float32(value: float) -> float:
    return float(np.float32(value))


@cache
def _quantiles(kind: str) -> Tensor:
    """float32 [4097]: quantiles of a law, written by csrc/make_quantiles.py."""
    with np.load(_QUANTILES) as tables:
        return torch.from_numpy(tables[kind].copy())
