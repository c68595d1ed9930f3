"""What `shoal ckpt inspect` says of the rows of a table, gathered while they stream by."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.table.shard import RowChunk

__all__ = ["Norms", "RowFigures", "Spread", "figures_of"]

_DISTINCT = 1 << 20


@dataclass(frozen=True, slots=True)
class Norms:
    """Euclidean norms of the finite rows; `nonfinite` rows have NaN or infinity."""

    mean: float
    largest: float
    nonfinite: int


@dataclass(frozen=True, slots=True)
class RowFigures:
    """Of one table. Ages are seconds before `newest_s`, the latest time that a row was seen.

    Ages and counts are (least, median, most); None without rows, norms of state without state.
    """

    rows: int
    newest_s: int | None
    ages_s: tuple[int, int, int] | None
    counts: tuple[int, int, int] | None
    weights: Norms | None
    state: Norms | None

    def plain(self) -> dict[str, Any]:
        """As JSON has it."""

        def norms(of: Norms | None) -> dict[str, Any] | None:
            parts = (
                {"mean": of.mean, "max": of.largest, "nonfinite_rows": of.nonfinite} if of else {}
            )
            return parts or None

        def spread(of: tuple[int, int, int] | None) -> dict[str, int] | None:
            return dict(zip(("min", "median", "max"), of, strict=True)) if of else None

        return {
            "newest_s": self.newest_s,
            "ages_s": spread(self.ages_s),
            "counts": spread(self.counts),
            "weight_norms": norms(self.weights),
            "state_norms": norms(self.state),
        }


def figures_of(chunks: Iterable[RowChunk]) -> RowFigures:
    """Figures of rows that come in chunks; no more than one is kept."""
    seen, counts, weights, state = Spread(), Spread(), _NormSums(), _NormSums()
    rows = 0
    for chunk in chunks:
        rows += len(chunk.ids)
        seen.add(chunk.last_seen_s)
        counts.add(chunk.counts)
        weights.add(chunk.weights)
        state.add(chunk.state)
    if not rows:
        return RowFigures(0, None, None, None, None, None)
    newest = seen.largest
    oldest_first = (newest - seen.largest, newest - seen.median(upper=True), newest - seen.least)
    return RowFigures(
        rows=rows,
        newest_s=newest,
        ages_s=oldest_first,
        counts=(counts.least, counts.median(), counts.largest),
        weights=weights.norms(),
        state=state.norms(),
    )


@dataclass(slots=True)
class Spread:
    """Least, median and largest of many whole numbers >= 0 in bounded memory.

    Least and largest are exact. So is the median while there are up to a million distinct numbers;
    beyond that, numbers are rounded down to a power of two that keeps them within it.
    """

    distinct: int = _DISTINCT
    least: int = -1
    largest: int = -1
    _shift: int = 0
    _values: Any = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    _counts: Any = field(default_factory=lambda: np.empty(0, dtype=np.int64))

    def add(self, values: Tensor) -> None:
        """Take int64 [N]."""
        if not len(values):
            return
        low, high = int(values.min()), int(values.max())
        self.least = low if self.least < 0 else min(self.least, low)
        self.largest = max(self.largest, high)
        found, counts = np.unique(values.numpy() >> self._shift, return_counts=True)
        self._merge(found, counts)
        while len(self._values) > self.distinct:
            self._shift += 1
            found, counts = self._values >> 1, self._counts
            self._values = self._counts = np.empty(0, dtype=np.int64)
            self._merge(found, counts)

    def median(self, *, upper: bool = False) -> int:
        """The lower (or upper) of the middle ones."""
        totals = np.cumsum(self._counts)
        middle = (int(totals[-1]) - (0 if upper else 1)) // 2
        at = int(np.searchsorted(totals, middle, side="right"))
        value = int(self._values[min(at, len(self._values) - 1)]) << self._shift
        return min(max(value, self.least), self.largest)

    def _merge(self, values: Any, counts: Any) -> None:
        every = np.concatenate([self._values, values])
        self._values, where = np.unique(every, return_inverse=True)
        amounts = np.concatenate([self._counts, counts])
        totals = np.zeros(len(self._values), dtype=np.int64)
        np.add.at(totals, where, amounts)
        self._counts = totals


@dataclass(slots=True)
class _NormSums:
    rows: int = 0
    total: float = 0.0
    largest: float = 0.0
    nonfinite: int = 0
    wide: bool = False

    def add(self, matrix: Tensor) -> None:
        if not matrix.shape[1]:
            return
        self.wide = True
        norms = torch.linalg.vector_norm(matrix.double(), dim=1)
        finite = norms[norms.isfinite()]
        self.nonfinite += len(norms) - len(finite)
        self.rows += len(finite)
        self.total += float(finite.sum())
        self.largest = max(self.largest, float(finite.max()) if len(finite) else 0.0)

    def norms(self) -> Norms | None:
        if not self.wide:
            return None
        return Norms(self.total / max(1, self.rows), self.largest, self.nonfinite)
