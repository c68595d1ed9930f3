"""What was known at a moment about earlier events of the same kind.

Each event has a key, a moment at which it asks (`asked_s`) and a moment at which its own outcome
became known (`settled_s`). An event may use only outcomes that were settled when it asks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from shoal.errors import ShapeError, describe

__all__ = ["Earlier", "earlier"]

_Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True, eq=False)
class Earlier:
    """For each of N events, the earlier events of its key that were settled when it asked.

    Args:
        order_M: int64 [M], numbers of events, by key and then by the time they were settled.
        start_N, stop_N: int64 [N]; event n may use `order_M[start_N[n]:stop_N[n]]`, oldest first.
    """

    order_M: _Array
    start_N: _Array
    stop_N: _Array

    @property
    def count_N(self) -> _Array:
        """int64 [N]: earlier events of each event."""
        return self.stop_N - self.start_N

    def mean(self, values_N: _Array) -> _Array:
        """float64 [N]: mean of a value over the earlier events; NaN where there are none."""
        sums = np.concatenate([[0.0], np.cumsum(values_N[self.order_M].astype(np.float64))])
        total_N = sums[self.stop_N] - sums[self.start_N]
        count_N = self.count_N
        mean_N = np.full(count_N.shape, np.nan)
        np.divide(total_N, count_N, out=mean_N, where=count_N > 0)
        return mean_N

    def latest(self, values_N: _Array) -> _Array:
        """float64 [N]: a value of the event settled last; NaN where there is none."""
        latest_N = np.full(self.start_N.shape, np.nan)
        some = self.count_N > 0
        latest_N[some] = values_N[self.order_M[self.stop_N[some] - 1]]
        return latest_N

    def pairs(self) -> tuple[_Array, _Array]:
        """Numbers of the asking and of the earlier event of all pairs, int64 [P] each.

        By asking event, the event settled last first.
        """
        count_N = self.count_N
        ends_N = np.cumsum(count_N)
        asking_P = np.repeat(np.arange(count_N.size), count_N)
        back_P = np.arange(asking_P.size) - (ends_N - count_N)[asking_P]
        return asking_P, self.order_M[self.stop_N[asking_P] - 1 - back_P]


def earlier(
    key_N: _Array,
    settled_s_N: _Array,
    asked_s_N: _Array,
    *,
    last: int | None = None,
    window_s: int | None = None,
) -> Earlier:
    """Find the earlier events of each event.

    Args:
        key_N: int64 [N], at least 0; events of one key are of one kind. A negative key has no
            history and is in nobody's.
        settled_s_N, asked_s_N: int64 [N], seconds.
        last: at most so many, those settled last; None for all.
        window_s: only those settled less than so many seconds ago; None for all.

    Raises:
        ShapeError: arrays of different lengths.
    """
    shapes = {key_N.shape, settled_s_N.shape, asked_s_N.shape}
    if len(shapes) != 1 or key_N.ndim != 1:
        remedy = "Give one key and two times per event."
        raise ShapeError(
            describe("shapes of events", got=sorted(shapes), allowed="one [N]", remedy=remedy)
        )
    used = np.flatnonzero(key_N >= 0)
    order_M = used[np.lexsort((settled_s_N[used], key_N[used]))]
    # Key and time in one number, so that one sorted array answers all events.
    first_s = int(min(settled_s_N.min(initial=0), asked_s_N.min(initial=0) - (window_s or 0)))
    span = int(max(settled_s_N.max(initial=0), asked_s_N.max(initial=0))) - first_s + 2
    place_M = key_N[order_M] * span + (settled_s_N[order_M] - first_s)
    base_N = key_N * span - first_s
    stop_N = np.searchsorted(place_M, base_N + asked_s_N, side="right")
    oldest_N = base_N + first_s if window_s is None else base_N + asked_s_N - window_s + 1
    start_N = np.searchsorted(place_M, oldest_N, side="left")
    if last is not None:
        start_N = np.maximum(start_N, stop_N - last)
    stop_N = np.where(key_N >= 0, stop_N, start_N)
    return Earlier(order_M, start_N, stop_N)
