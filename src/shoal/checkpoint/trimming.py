"""Which saved rows an evicting table keeps where it has room for fewer."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.table.shard import RowChunk
from shoal.table.spec import OnFull

__all__ = ["Trim"]


class Trim:
    """Chooses the most recently ("lru") or most frequently ("lfu") used rows of a table.

    All rows are weighed first, then asked about in the same order. Of rows that are alike in
    that, those that come first are kept. It remembers how many rows have each value, not rows.

    Args:
        capacity_rows: rows to keep.
        on_full: the table's policy.
    """

    def __init__(self, capacity_rows: int, on_full: OnFull) -> None:
        self._capacity, self._recent = capacity_rows, on_full == "lru"
        self._values_V = torch.empty(0, dtype=torch.int64, device="cpu")  # ascending
        self._rows_V = torch.empty(0, dtype=torch.int64, device="cpu")
        self._threshold: int | None = None
        self._room = 0  # for rows at the threshold; those above are all kept

    def weigh(self, chunk: RowChunk) -> None:
        """Count rows."""
        values, rows = torch.unique(self._value(chunk), return_counts=True)
        every = torch.cat([self._values_V, values])
        self._values_V, place = torch.unique(every, return_inverse=True)
        counts = torch.cat([self._rows_V, rows])
        self._rows_V = torch.zeros_like(self._values_V).index_add_(0, place, counts)

    def weighed(self) -> None:
        """All rows were counted: `kept` may be called."""
        above = self._rows_V.flip(0).cumsum(0).flip(0)  # rows of this value or a larger one
        fits = above <= self._capacity
        if bool(fits.all()):
            return
        last = int((~fits).nonzero()[-1])
        self._threshold = int(self._values_V[last])
        self._room = self._capacity - int(above[last] - self._rows_V[last])

    def kept(self, chunk: RowChunk) -> Tensor:
        """bool [R]: rows to keep."""
        value_R = self._value(chunk)
        if self._threshold is None:
            return torch.ones_like(value_R, dtype=torch.bool)
        equal_R = value_R == self._threshold
        taken_R = equal_R & (equal_R.cumsum(0) <= self._room)
        self._room -= int(taken_R.sum())
        return (value_R > self._threshold) | taken_R

    def _value(self, chunk: RowChunk) -> Tensor:
        return chunk.last_seen_s if self._recent else chunk.counts
