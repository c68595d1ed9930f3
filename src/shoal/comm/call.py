"""One collective under way: what was begun, when, and how a failure is told."""

from __future__ import annotations

import time
from typing import Protocol

from shoal.comm.watch import ALIKE, Group
from shoal.errors import CollectiveFailed, collective_failed

__all__ = ["Call"]


class _Owner(Protocol):
    """Collectives that keep the first failure: later calls raise it at once."""

    rank: int
    world_size: int
    step: int
    timeout_s: float
    watched: Group
    _failure: CollectiveFailed | None


class Call:
    """A collective that has begun.

    Raises:
        CollectiveFailed: an earlier one of the same collectives failed.
    """

    def __init__(self, owner: _Owner, what: str) -> None:
        if owner._failure is not None:
            raise owner._failure
        self._told, self._what, self._step = owner, what, owner.step
        self._start = time.monotonic()
        self._number = owner.watched.begin(what)

    def left_s(self) -> float:
        """Seconds until the collective counts as failed."""
        return self._start + self._told.timeout_s - time.monotonic()

    def look(self) -> None:
        """Between short waits: fail if ranks wait for each other in different calls."""
        told = self._told.watched.look(self._number)
        if told is not None:
            raise self.failed(told, remedy=ALIKE)

    def failed(self, reason: str, **remedy: str) -> CollectiveFailed:
        """The error, or an earlier one; later collectives of the same ranks raise it at once."""
        owner = self._told
        if owner._failure is None:
            owner._failure = collective_failed(
                self._what,
                rank=owner.rank,
                world_size=owner.world_size,
                step=self._step,
                elapsed_s=time.monotonic() - self._start,
                timeout_s=owner.timeout_s,
                reason=reason,
                **remedy,
            )
        return owner._failure
