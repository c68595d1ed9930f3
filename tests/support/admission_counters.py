"""Reference counters of occurrences: plain, not fast; the oracle of the core's and the GPU's."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from shoal.ids import mix64, salt, to_signed
from shoal.rules.admission import Admission, sketch_block

_GOLDEN = 0x9E3779B97F4A7C15
_BUCKET_BITS = 16
_LARGEST_COUNT = (1 << 32) - 1


class Counter(ABC):
    """Occurrences of ids that have no row yet. Reference code: plain, not fast."""

    __slots__ = ()

    @abstractmethod
    def add(self, ids_U: Tensor, counts_U: Tensor) -> Tensor:
        """Add a step's occurrences of distinct ids; returns their totals, int64 [U]."""

    @abstractmethod
    def forget(self, ids_U: Tensor) -> None:
        """Free what is kept of ids that got a row."""


class ExactCounter(Counter):
    """One count per id."""

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}

    def add(self, ids_U: Tensor, counts_U: Tensor) -> Tensor:
        totals = []
        for id, count in zip(ids_U.tolist(), counts_U.tolist(), strict=True):
            self._counts[id] = min(self._counts.get(id, 0) + count, _LARGEST_COUNT)
            totals.append(self._counts[id])
        return torch.tensor(totals, dtype=torch.int64, device="cpu")

    def forget(self, ids_U: Tensor) -> None:
        for id in ids_U.tolist():
            self._counts.pop(id, None)

    def __len__(self) -> int:
        return len(self._counts)


class SketchCounter(Counter):
    """A count-min sketch: a total is never too small, and too large only by collisions.

    An id's cells lie in the block of its bucket, the top 16 bits of h = mix64(id ^ salt(table)), so
    that no decision depends on how many ranks the buckets are split over. A block has B =
    max(width / 2^16, 16) cells of each row, or all where there are fewer; of narrow sketches
    several buckets share one. Row r's cell is number mix64(h ^ (r + 1) * 0x9e3779b97f4a7c15) mod B
    (the product modulo 2^64) of block (bucket * width / 2^16) / B. Counts of a whole step are added
    before any total is read, so the order of ids does not matter. Cells stop at 2^32 - 1. It cannot
    forget.
    """

    __slots__ = ("_cells", "_salt")

    def __init__(self, table: str, width: int, depth: int) -> None:
        self._salt = to_signed(salt(table))
        self._cells = torch.zeros(depth, width, dtype=torch.int64, device="cpu")

    def add(self, ids_U: Tensor, counts_U: Tensor) -> Tensor:
        depth, width = self._cells.shape
        block = sketch_block(width)
        hashes_U = mix64(ids_U ^ self._salt)
        buckets_U = (hashes_U >> (64 - _BUCKET_BITS)) & ((1 << _BUCKET_BITS) - 1)
        firsts_U = (buckets_U * width >> _BUCKET_BITS) & -block
        totals = []
        for row in range(depth):
            cells_U = mix64(hashes_U ^ to_signed((row + 1) * _GOLDEN)) & (block - 1)
            cells_U += firsts_U
            self._cells[row].index_add_(0, cells_U, counts_U).clamp_(max=_LARGEST_COUNT)
            totals.append(self._cells[row][cells_U])
        return torch.stack(totals).amin(dim=0)

    def forget(self, ids_U: Tensor) -> None:
        return None


def make_counter(admission: Admission, table: str) -> Counter:
    """The reference counter an `Admission` asks for."""
    if admission.counter == "exact":
        return ExactCounter()
    return SketchCounter(table, admission.sketch_width, admission.sketch_depth)
