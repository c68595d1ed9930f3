"""When a worker sends: updates while training continues, reads a second time; what it counts."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from shoal.comm.transport import wait_for
from shoal.errors import ConfigError, ServerLost, ShoalError

_LATENCIES = 256  # of the last reads
_KNOWN = 64  # before that many, none is late
_PERCENT = 0.99
_SOONEST_S = 0.02
_ONE_IN = 20  # reads are sent twice at most: a server that is overloaded must not get more


@dataclass(slots=True)
class Staleness:
    """What a worker's lookups lacked, and what it sent again; counted since it connected.

    Args:
        lookups: training lookups.
        on_their_way, most_on_their_way: own updates that a lookup did not see, in all and at most.
        updates: replies of servers to updates of what was looked up.
        behind, most_behind: updates of any worker that a server had applied between a lookup and
            its update, in all and at most.
        repeated: requests that were sent again for they had no reply.
        hedged: reads that were sent again for their reply was late.
        lost: own updates that servers lost, as servers last said: with each
            update, and when asked (`Servers.count_lost`).
    """

    lookups: int = 0
    on_their_way: int = 0
    most_on_their_way: int = 0
    updates: int = 0
    behind: int = 0
    most_behind: int = 0
    repeated: int = 0
    hedged: int = 0
    lost: int = 0
    _lost_by: dict[int, int] = field(default_factory=dict, repr=False)

    def looked_up(self, on_their_way: int) -> None:
        """A lookup is sent; this number of own updates have no reply yet."""
        self.lookups += 1
        self.on_their_way += on_their_way
        self.most_on_their_way = max(self.most_on_their_way, on_their_way)

    def updated(self, behind: Sequence[int]) -> None:
        """Servers have applied an update."""
        self.updates += len(behind)
        self.behind += sum(behind)
        self.most_behind = max([self.most_behind, *behind])

    def counted_lost(self, by_server: dict[int, int]) -> int:
        """What some servers have lost so far; how much all have."""
        self._lost_by |= by_server
        self.lost = sum(self._lost_by.values())
        return self.lost

    def scalars(self) -> dict[str, float]:
        """What a run logs: updates that the mean lookup lacked, and what was sent again so far."""
        return {
            "servers/updates_on_their_way": self.on_their_way / max(self.lookups, 1),
            "servers/updates_behind": self.behind / max(self.updates, 1),
            "servers/most_updates_behind": float(self.most_behind),
            "servers/repeated": float(self.repeated),
            "servers/hedged": float(self.hedged),
            "servers/lost": float(self.lost),
        }


class UpdateSender:
    """Sends one worker's updates in their order, from a thread of its own.

    Args:
        most: updates that may be on their way; 0 sends each from the caller's thread, and waits.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._changed = threading.Condition()
        self._failed: BaseException | None = None
        self._pool = ThreadPoolExecutor(1, "shoal-updates") if most else None
        self.on_their_way = 0
        self.failed = 0
        self._queued = self._given_up = 0  # updates so far; the last behind one that was lost
        self._closed = False

    def send(self, update: Callable[[], None]) -> None:
        """Send an update, when there is room.

        Raises:
            ShoalError: an update before this one failed, which is not sent then.
            ConfigError: it is closed.
        """
        if self._pool is None:
            update()
            return
        with self._changed:
            self._changed.wait_for(lambda: self.on_their_way < self.most)
            self._raise()
            if self._closed:
                raise ConfigError(
                    "update of parameter servers",
                    got="a connection that was closed",
                    allowed="an open one",
                    remedy="Connect again.",
                )
            self.on_their_way += 1
            self._queued += 1
            sent = self._pool.submit(self._sent, self._queued, update)
        sent.add_done_callback(self._done)

    def settle(self) -> None:
        """Wait for what is on its way.

        Raises:
            ShoalError: an update failed.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self.on_their_way)
            self._raise()

    def close(self) -> None:
        """`settle`, and no more. May be called twice."""
        try:
            self.settle()
        finally:
            with self._changed:
                self._closed = True
            if self._pool is not None:
                self._pool.shutdown()

    def _sent(self, number: int, update: Callable[[], None]) -> None:
        """Those behind an update that found no server are not sent: each would wait as long."""
        with self._changed:
            if number <= self._given_up:
                raise ServerLost("update behind one that found no server: not sent")
        try:
            update()
        except ServerLost:
            with self._changed:
                self._given_up = self._queued
            raise

    def _done(self, update: Future[None]) -> None:
        error = update.exception()
        with self._changed:
            if error is not None:
                self.failed += 1
                self._failed = self._failed or error
            self.on_their_way -= 1
            self._changed.notify_all()

    def _raise(self) -> None:
        error, count = self._failed, self.failed
        if error is None:
            return
        self._failed, self.failed = None, 0
        if not isinstance(error, ShoalError):
            raise error
        others = f" (and {count - 1} more)" if count > 1 else ""
        raise type(error)(f"update of an earlier step{others}: {error}") from error


class HedgeDelay:
    """How long a read may take before it is sent again: longer than 99 % of the last 256.

    None is sent again before 64 have been timed.
    """

    def __init__(self) -> None:
        self._recent_s: deque[float] = deque(maxlen=_LATENCIES)
        self._reads = self._late = 0

    def late(self, replies: Sequence[Future[Any] | None]) -> list[int]:
        """Wait for replies, for the delay; which of them are not there and should be asked again.

        Those are few: at most one read in twenty.
        """
        asked = {reply: n for n, reply in enumerate(replies) if reply is not None}
        wait_for(list(asked), self._delay_s())
        left = [reply for reply in asked if not reply.done()]
        self._reads += 1
        if not left or (self._late + 1) * _ONE_IN > self._reads:
            return []
        self._late += 1
        return sorted(asked[reply] for reply in left)

    def took(self, seconds: float) -> None:
        """A read has all its replies."""
        self._recent_s.append(seconds)

    def _delay_s(self) -> float | None:
        if len(self._recent_s) < _KNOWN:
            return None
        ordered = sorted(self._recent_s)
        return max(_SOONEST_S, ordered[int(_PERCENT * (len(ordered) - 1))])


def first_reply(one: Future[Any] | None, other: Future[Any] | None) -> Future[Any] | None:
    """The one that is there first and no error; an error if both are."""
    both = [each for each in (one, other) if each is not None]
    wait_for(both, first=True)
    if all(each.exception() is not None for each in both if each.done()):
        wait_for(both)
    return min(both, key=lambda each: not each.done() or each.exception() is not None)
