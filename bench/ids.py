"""Ids of the benches: uniform or Zipf indices, scattered over a table, and their 64-bit ids."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

__all__ = ["index_batches", "to_ids"]

ZIPF_EXPONENT = 1.05
# Prime and larger than any table here, so multiplying by it permutes 0..rows-1.
SCATTER = 2_654_435_761


def to_ids(index_N: Tensor | np.ndarray, *, salt: int = 0) -> Tensor:
    """Int64 ids [N] that look random, one to one with the indices (splitmix64's finalizer)."""
    x = np.asarray(index_N).astype(np.uint64) + np.uint64((salt * 0x9E3779B97F4A7C15) % 2**64)
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return torch.from_numpy(x.view(np.int64))


def index_batches(
    rows: int, batches: int, batch_ids: int, distribution: str, *, seed: int = 0
) -> list[Tensor]:
    """`batches` int64 tensors [batch_ids] of indices in 0..rows-1, hot ones scattered."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(batches):
        if distribution == "uniform":
            ranks = rng.integers(0, rows, batch_ids)
        else:
            ranks = np.searchsorted(_zipf_cumulative(rows), rng.random(batch_ids), side="right")
            ranks = np.minimum(ranks, rows - 1)
        found.append(torch.from_numpy(ranks.astype(np.int64) * SCATTER % rows))
    return found


@lru_cache(maxsize=1)
def _zipf_cumulative(rows: int) -> np.ndarray:
    weights = np.arange(1, rows + 1, dtype=np.float64) ** -ZIPF_EXPONENT
    cumulative = np.cumsum(weights)
    return cumulative / cumulative[-1]
