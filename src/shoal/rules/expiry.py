"""Which rows are dropped for not having been seen in a while, and settings by slot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from shoal.errors import all_of_kind
from shoal.ids import BITS, FidLayout, max_slot, slot_of
from shoal.rules.rule import Allowed, Checked, check, whole

__all__ = ["Expiry"]

NEVER = -1  # for a time to live


@dataclass(frozen=True, slots=True)
class BySlot:
    """A whole number for each id, by the slot it carries: what backends read of such a setting.

    Args:
        otherwise: for slots without one of their own.
        values: (slot, number) pairs.
        layout: where ids carry their slot.
    """

    otherwise: int
    values: tuple[tuple[int, int], ...]
    layout: FidLayout

    @property
    def shift(self) -> int:
        """Lowest bit of the slot."""
        return BITS[self.layout][1]

    @property
    def mask(self) -> int:
        """The largest slot."""
        return max_slot(self.layout)

    def of_slot(self, slot: int) -> int:
        """The number of a slot."""
        return dict(self.values).get(slot, self.otherwise)

    def of_ids(self, ids_N: Tensor) -> Tensor:
        """The number of each id, int64 [N]."""
        slots_N = slot_of(ids_N, self.layout)
        values_N = torch.full_like(slots_N, self.otherwise)
        for slot, value in self.values:
            values_N[slots_N == slot] = value
        return values_N


class SlotRule(Checked):
    """A rule whose value may depend on the slot that an id carries.

    Raises:
        ConfigError: a (slot, value) pair is wrong: slots of the layout, each once; values whole
            and >= 0.
    """

    __slots__ = ()

    per_slot: tuple[tuple[int, int], ...]
    fid_layout: FidLayout

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        for slot, value in all_of_kind("per_slot", self.per_slot, tuple, list):
            check(self, "slot in per_slot", slot, whole(0, max_slot(self.fid_layout)))
            check(self, f"per_slot value of slot {slot}", value, whole(0))
        slots = [slot for slot, _ in self.per_slot]
        once = Allowed("each slot once", lambda all_: len(set(all_)) == len(all_), "Drop repeats.")
        check(self, "per_slot", slots, once)


@dataclass(frozen=True, kw_only=True, slots=True)
class Expiry(SlotRule):
    """A row is dropped if and only if now_s - last_seen_s >= its time to live.

    Args:
        ttl_s: time to live in seconds; None keeps rows forever, 0 drops all.
        per_slot: (slot, ttl_s) pairs that override `ttl_s`.
        fid_layout: where ids carry their slot; read only with `per_slot`.
    """

    ttl_s: Annotated[int | None, whole(0).or_none()] = None
    per_slot: tuple[tuple[int, int], ...] = ()
    fid_layout: FidLayout = "v2"

    @property
    def ttls(self) -> BySlot:
        """Times to live in seconds; NEVER where rows are kept forever."""
        otherwise = NEVER if self.ttl_s is None else self.ttl_s
        return BySlot(otherwise, self.per_slot, self.fid_layout)

    def ttl(self, slot: int) -> int | None:
        """Time to live of a slot's rows in seconds; None is forever."""
        ttl_s = self.ttls.of_slot(slot)
        return None if ttl_s == NEVER else ttl_s

    def expired_N(self, ids_N: Tensor, last_seen_s_N: Tensor, now_s: int) -> Tensor:
        """bool [N]: rows to drop at `now_s`.

        A row seen later than now_s (out-of-order events) stays.

        Args:
            ids_N: int64 [N].
            last_seen_s_N: int64 [N], event time each row was last seen.
            now_s: event time to evaluate at.
        """
        ttl_s_N = self.ttls.of_ids(ids_N)
        return (ttl_s_N != NEVER) & (now_s - last_seen_s_N.to(torch.int64) >= ttl_s_N)
