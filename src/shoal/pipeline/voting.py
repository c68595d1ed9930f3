"""What the ranks report about each batch, and what follows: `Facts`, alike on all.

It is one small all-reduce on the host, begun a batch ahead and waited for when it is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shoal.errors import DataError
from shoal.pipeline.scheduler import Facts, Settings


class Ballot(NamedTuple):
    """What one rank reports about one batch.

    Args:
        found: it has the batch.
        failed: its source raised instead.
        weight: what the batch weighs in a loss; 0 without one.
        event_time_s: when it happened.
        snapshot: a snapshot point is asked for.
        incoming: ids that look up each limited table.
        room: rows that each limited table may still take on this rank.
    """

    found: bool
    failed: bool = False
    weight: float = 0.0
    event_time_s: int = 0
    snapshot: bool = False
    incoming: tuple[int, ...] = ()
    room: tuple[int, ...] = ()

    def numbers(self) -> list[float]:
        """As float64 numbers, exact below 2^53."""
        return [*map(float, self[:5]), *self.incoming, *self.room]

    @classmethod
    def of(cls, numbers: Sequence[float]) -> Ballot:
        """From `numbers`."""
        found, failed, weight, event_time_s, snapshot, *rest = numbers
        half = len(rest) // 2
        incoming, room = (tuple(map(int, part)) for part in (rest[:half], rest[half:]))
        return cls(
            bool(found), bool(failed), weight, int(event_time_s), bool(snapshot), incoming, room
        )


class Tally:
    """Turns ballots, in the order of their batches, into facts.

    Args:
        settings: of the run.
        due_s: event time of its first eviction, where an earlier run has settled it.

    Attributes:
        ended: the round that does not take place is settled.
    """

    def __init__(self, settings: Settings, due_s: int | None = None) -> None:
        self._settings = settings
        self._settled = 0
        self._incoming: dict[int, tuple[int, ...]] = {}
        self._latest_s: int | None = None
        self._due_s = due_s
        self._dues: dict[int, int | None] = {0: due_s}
        self._weights: dict[int, float] = {}
        self.ended = False

    def settle(self, ballots: Sequence[Ballot], probed: int) -> Facts:
        """What the ranks settled about the next batch.

        probed: batches that had been probed when the ballots were cast.

        Raises:
            DataError: a rank could not load its batch.
        """
        index = self._settled
        failed = [rank for rank, ballot in enumerate(ballots) if ballot.failed]
        if failed:
            raise DataError(
                f"batch {index}",
                got=f"an error while rank {', '.join(map(str, failed))} loaded it",
                allowed="batches or the end of the data",
                remedy="See what that rank raised.",
            )
        self._settled += 1
        self._weights[index] = sum(ballot.weight for ballot in ballots)
        self._incoming[index] = tuple(map(sum, zip(*(b.incoming for b in ballots), strict=True)))
        train = (all if self._settings.stop_at_first else any)(ballot.found for ballot in ballots)
        times = [ballot.event_time_s for ballot in ballots if ballot.found] if train else []
        facts = Facts(
            train=train,
            defer_inserts=train and self._tight(ballots, probed, index),
            snapshot=any(ballot.snapshot for ballot in ballots),
            evict_s=None if self.ended else self._evict_s(index, train, times),
        )
        self._dues[index + 1] = self._due_s
        self.ended = self.ended or not train
        return facts

    def weight(self, first: int, stop: int) -> float:
        """What batches first..stop-1 weigh over all ranks; earlier ones are forgotten."""
        self._weights = {i: weight for i, weight in self._weights.items() if i >= first}
        self._dues = {i: due_s for i, due_s in self._dues.items() if i >= first}
        return sum(weight for i, weight in self._weights.items() if i < stop)

    def due_s(self, batches: int) -> int | None:
        """When the next eviction is due, after the windows of so many batches."""
        return self._dues[batches]

    def _tight(self, ballots: Sequence[Ballot], probed: int, index: int) -> bool:
        """Whether the ids since the last probe might not fit a rank, were they all new to it."""
        self._incoming = {i: ids for i, ids in self._incoming.items() if i >= probed}
        wanted = map(sum, zip(*self._incoming.values(), strict=True))
        room = map(min, zip(*(ballot.room for ballot in ballots), strict=True))
        return any(more > left for more, left in zip(wanted, room, strict=True))

    def _evict_s(self, index: int, train: bool, times: Sequence[int]) -> int | None:
        """The time to evict at once this batch's window, which it closes, is applied."""
        every_s = self._settings.evict_every_s
        if every_s is None:
            return None
        if times:
            self._latest_s = max(times if self._latest_s is None else [self._latest_s, *times])
        now_s = self._latest_s
        closes = not train or (index + 1) % self._settings.accumulation == 0
        if not closes or now_s is None:
            return None
        self._latest_s = None
        due = self._due_s is not None and now_s >= self._due_s
        if due or self._due_s is None:
            self._due_s = now_s + every_s
        return now_s if due else None
