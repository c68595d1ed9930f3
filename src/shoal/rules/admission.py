"""Which ids get a row: how often an id must be seen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from torch import Tensor

from shoal.ids import FidLayout
from shoal.rules.expiry import BySlot, SlotRule
from shoal.rules.rule import whole

__all__ = ["Admission", "sketch_block"]

_BUCKET_BITS, _LEAST_BLOCK = 16, 16
_LARGEST_COUNT = (1 << 32) - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Admission(SlotRule):
    """An id gets a row once it has been seen often enough.

    Occurrences of a step are summed over all senders first; then each id is decided once, on its
    total with this step's occurrences in it.

    Args:
        threshold: T; 0 admits at the first occurrence and counts nothing.
        on: "reach" admits at occurrence T, "after" at the next one (Monolith's).
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

    @property
    def needed(self) -> BySlot:
        """Occurrences that ids need; 1 admits at the first occurrence."""

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


def sketch_block(width: int) -> int:
    """Cells of one row in which all cells of a bucket lie."""
    return min(width, max(width >> _BUCKET_BITS, _LEAST_BLOCK))
