"""Which rows are dropped for not having been seen in a while, and settings by slot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from shoal.errors import ConfigError
from shoal.rules import checks

__all__ = [
    "Expiry",
]


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
            f"per_slot of {type(owner).__name__}",
            got=slots,
            allowed="each slot once",
            remedy="Drop the repeated slot.",
        )


def lookup_per_slot(slots_N: Tensor, values: dict[int, int], default: int) -> Tensor:
    """The value of each slot, int64 [N]; `default` for slots that have none."""
    values_N = torch.full_like(slots_N, default)
    for slot, value in values.items():
        values_N[slots_N == slot] = value
    return values_N


# Longer than any difference of two u32 times, so that it stands for "never".
_NEVER = 1 << 40


@dataclass(frozen=True, kw_only=True, slots=True)
class Expiry:
    """A row is dropped if and only if now_s - last_seen_s >= its time to live.

    Args:
        ttl_s: time to live in seconds; None keeps rows for ever, 0 drops all.
        per_slot: (slot, ttl_s) pairs that override `ttl_s`.
        fid_layout: where ids carry their slot; read only with `per_slot`.
    """

    ttl_s: int | None = None
    per_slot: tuple[tuple[int, int], ...] = ()
    fid_layout: FidLayout = "v2"

    def __post_init__(self) -> None:
        if self.ttl_s is not None:
            checks.whole(self, "ttl_s", self.ttl_s, 0)
        check_per_slot(self, self.per_slot, self.fid_layout)

    def ttl(self, slot: int) -> int | None:
        """Time to live of a slot's rows in seconds; None is for ever."""
        return dict(self.per_slot).get(slot, self.ttl_s)

    def expired_N(self, ids_N: Tensor, last_seen_s_N: Tensor, now_s: int) -> Tensor:
        """bool [N]: rows to drop at `now_s`.

        A row seen later than now_s (out-of-order events) stays.

        Args:
            ids_N: int64 [N].
            last_seen_s_N: int64 [N], event time each row was last seen.
            now_s: event time to judge by.
        """
        default = _NEVER if self.ttl_s is None else self.ttl_s
        ttl_s_N = lookup_per_slot(slots_of(ids_N, self.fid_layout), dict(self.per_slot), default)
        return now_s - last_seen_s_N.to(torch.int64) >= ttl_s_N
