"""Settings by slot on a device: one load per id."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shoal.kernels.transfer import sent
from shoal.rules.slots import FidLayout, slots_of

__all__ = ["SlotValues"]

_ALL_BITS = torch.tensor([-1], device="cpu")


class SlotValues:
    """The value of an id is `values_L[(id >> shift) & mask]`.

    Args:
        default: value of slots without one of their own.
        per_slot: (slot, value) pairs.
        fid_layout: where ids carry their slot; read only with `per_slot`.
        device: where `values_L`, int64, goes.
    """

    def __init__(
        self,
        default: int,
        per_slot: Sequence[tuple[int, int]],
        fid_layout: FidLayout,
        device: torch.device,
    ) -> None:
        self.mask = int(slots_of(_ALL_BITS, fid_layout)) if per_slot else 0
        self.shift = _shift_of(fid_layout)
        values_L = torch.full((self.mask + 1,), default, dtype=torch.int64, device="cpu")
        for slot, value in per_slot:
            values_L[slot] = value
        self.values_L = sent(values_L, device)


def _shift_of(fid_layout: FidLayout) -> int:
    """Lowest bit of a slot: the first that makes one out of nothing."""
    return next(
        bit
        for bit in range(64)
        if int(slots_of(torch.tensor([1 << bit], device="cpu"), fid_layout))
    )
