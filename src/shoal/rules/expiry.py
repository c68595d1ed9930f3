"""Which rows are dropped for not having been seen in a while, by event time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.rules import checks
from shoal.rules.slots import FidLayout, check_per_slot, lookup_per_slot, slots_of

__all__ = ["Expiry"]

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
