"""Which ids get a row: how often an id must be seen, and the reference counters of sights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from shoal.ids import FidLayout, mix64, salt, to_signed
from shoal.rules.expiry import BySlot, check_per_slot
from shoal.rules.rule import Checked, whole

__all__ = ["Admission", "Counter", "ExactCounter", "SketchCounter", "make_counter", "sketch_block"]

_GOLDEN = 0x9E3779B97F4A7C15
_BUCKET_BITS, _LEAST_BLOCK = 16, 16
_LARGEST_COUNT = (1 << 32) - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Admission(Checked):
    """An id gets a row once it has been seen often enough.

    Sights of a step are summed over all senders first; then each id is decided once, on its
    total with this step's sights in it.

    Args:
        threshold: T; 0 admits at first sight and counts nothing.
        on: "reach" admits on the T-th sight, "after" on the one after it (Monolith's).
        counter: "exact" keeps one count per unadmitted id, "sketch" a count-min sketch of fixed
            size that may admit early (never late).
        per_slot: (slot, threshold) pairs that override `threshold`.
        sketch_width, sketch_depth: cells per row (a power of two) and rows of the sketch.
        fid_layout: where ids carry their slot; read only with `per_slot`.
    """

    threshold: Annotated[int, whole(0, _LARGEST_COUNT - 1)] = 0
    on: Literal["reach", "after"] = "reach"
    counter: Literal["exact", "sketch"] = "exact"
    per_slot: tuple[tuple[int, int], ...] = ()
    sketch_width: Annotated[int, whole(1, power_of_two=True)] = 1 << 20
    sketch_depth: Annotated[int, whole(1, 16)] = 4
    fid_layout: FidLayout = "v2"

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        check_per_slot(self, self.per_slot, self.fid_layout)

    @property
    def needed(self) -> BySlot:
        """Occurrences that ids need; 1 admits at first sight."""

        def counted(threshold: int) -> int:
            return threshold + (self.on == "after") if threshold else 1

        per_slot = tuple((slot, counted(threshold)) for slot, threshold in self.per_slot)
        return BySlot(counted(self.threshold), per_slot, self.fid_layout)

    def required(self, slot: int) -> int:
        """Occurrences an id of a slot needs."""
        return self.needed.of_slot(slot)

    def required_N(self, ids_N: Tensor) -> Tensor:
        """Occurrences each id needs, int64 [N], by the slot it carries."""
        return self.needed.of_ids(ids_N)


class Counter(ABC):
    """Sights of ids that have no row yet. Reference code: plain, not fast."""

    __slots__ = ()

    @abstractmethod
    def add(self, ids_U: Tensor, counts_U: Tensor) -> Tensor:
        """Add a step's sights of distinct ids; returns their totals, int64 [U]."""

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


def sketch_block(width: int) -> int:
    """Cells of one row in which all cells of a bucket lie."""
    return min(width, max(width >> _BUCKET_BITS, _LEAST_BLOCK))


def make_counter(admission: Admission, table: str) -> Counter:
    """The reference counter an `Admission` asks for."""
    if admission.counter == "exact":
        return ExactCounter()
    return SketchCounter(table, admission.sketch_width, admission.sketch_depth)
