"""The slot an id carries in its high bits, and settings by slot."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from shoal.errors import ConfigError, describe
from shoal.rules import checks

__all__ = ["FidLayout", "check_per_slot", "lookup_per_slot", "slots_of"]

FidLayout = Literal["v1", "v2"]

_SHIFT = {"v1": 54, "v2": 48}
_MASK = {"v1": 0x3FF, "v2": 0x7FFF}


def slots_of(ids_N: Tensor, layout: FidLayout) -> Tensor:
    """Slots, int64 [N]: bits 63..54 of a v1 id, bits 62..48 of a v2 id."""
    return (ids_N >> _SHIFT[layout]) & _MASK[layout]


def check_per_slot(owner: object, per_slot: tuple[tuple[int, int], ...], layout: FidLayout) -> None:
    """Check (slot, value) pairs: slots of the layout, each once; values whole and >= 0.

    Raises:
        ConfigError: a pair is wrong.
    """
    checks.choice(owner, "fid_layout", layout, tuple(_SHIFT))
    for slot, value in per_slot:
        checks.whole(owner, "slot in per_slot", slot, 0, _MASK[layout])
        checks.whole(owner, f"per_slot value of slot {slot}", value, 0)
    slots = [slot for slot, _ in per_slot]
    if len(set(slots)) != len(slots):
        raise ConfigError(
            describe(
                f"per_slot of {type(owner).__name__}",
                got=slots,
                allowed="each slot once",
                remedy="Drop the repeated slot.",
            )
        )


def lookup_per_slot(slots_N: Tensor, values: dict[int, int], default: int) -> Tensor:
    """The value of each slot, int64 [N]; `default` for slots that have none."""
    values_N = torch.full_like(slots_N, default)
    for slot, value in values.items():
        values_N[slots_N == slot] = value
    return values_N
