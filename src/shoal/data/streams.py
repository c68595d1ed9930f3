"""Batches of a stream: examples as they come, how long to wait for them, and where to continue.

A `Feed` has partitions, each with examples in an order of its own. Ranks share out the partitions,
and a batch holds what has come in all of them. Batches carry the places that they end at, so that a
run continues exactly there, over any number of ranks.
"""

from __future__ import annotations

import logging
import math
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from shoal.data.batch import Batch, TensorSource, join
from shoal.data.loader import RankShare, ahead, require
from shoal.data.sources import Source
from shoal.errors import DataError

_log = logging.getLogger("shoal.data")

Place = tuple[int, int]
"""Where a partition continues: the offset of a record, and its rows that are done."""

_POLL_S = 0.25  # so soon a stop is noticed
_HURRY_S = 0.02
_PARTITIONS = 240  # of a replay; many numbers of ranks divide it


@dataclass(frozen=True, slots=True)
class StreamPart:
    """Examples that have come.

    Args:
        source: where they are; may be empty.
        rows_N: int64 [N], their numbers there.
        after: by example, its partition and where that continues after it.
        ends: where partitions continue once all are used, which may be behind records left out.
    """

    source: Source
    rows_N: Tensor
    after: Sequence[tuple[str, Place]]
    ends: Mapping[str, Place] = field(default_factory=dict)


class Feed(Protocol):
    """A stream of examples, in partitions."""

    features: tuple[str, ...]
    num_dense: int
    stopping: threading.Event
    """Set, nothing is waited for any more."""
    size: int | None
    """Examples that it has; None: it has no end."""

    def start(self, share: RankShare, places: Mapping[str, Place]) -> dict[str, Place]:
        """Begin to read this share of the partitions; returns where each of them begins.

        Args:
            share: of the partitions.
            places: where partitions continue; empty: the stream begins.
        """

    def read(self, most: int, timeout_s: float) -> StreamPart | None:
        """About `most` examples, or what has come within `timeout_s`; None: nothing."""

    def nothing(self) -> Source:
        """A source whose rows, of which none are taken, give batches without examples."""

    def added(self) -> dict[str, Place]:
        """Partitions that came since, and where they begin; they are read from now on."""

    def left_out(self, places: Mapping[str, Place]) -> int:
        """Bad examples ahead of these places, over all processes that continued the stream."""

    def continues(self, left_out: int) -> None:
        """Count this many bad examples as those of processes before."""

    @property
    def ended(self) -> bool:
        """Whether nothing will come any more."""

    @property
    def lost(self) -> bool:
        """Whether nothing comes because what it comes from is away."""

    def close(self) -> None:
        """Let go of connections."""


class StreamLoader:
    """Batches of a stream, in the place of a `Loader`.

    Every rank sees the same number of batches; those of a rank whose partitions are silent are
    empty. A batch comes when it is full, or after `wait_s` with what has come.

    Args:
        feed: the stream.
        batch_size: examples of a batch over all ranks.
        share: this rank's part of a batch.
        partitions: its part of the partitions; None: `share`. Of processes that have a share of
            partitions only, each takes its part of `batch_size`, `max_examples` and `least`.
        wait_s: for a batch that is not full.
        idle_s: the stream ends when nothing has come for so long; None: it does not.
        max_examples: it ends after so many, over all ranks; None: it does not.
        least: examples that every batch has, over all ranks; one with less waits for more.
        prefetch: batches prepared ahead.
        pin_memory: as for `Loader`.

    Attributes:
        agree: gives every rank's numbers for those of this rank; a collective call.
        waits: called about once a second while no batch comes, by who waits for it.
        asks_pause: whether this rank wants a batch that `pauses`; asked in another thread, after a
            first batch, until it says no. A batch of examples goes first. None: nobody does.
        places: where its partitions continue after what has been taken; to begin with, where those
            of all ranks do.
        emptied: examples at the end that are too few for a batch; they are read again on resuming.

    Raises:
        ConfigError: a size below what it may be.
    """

    short_examples = dropped = 0
    short = "drop"

    def __init__(
        self,
        feed: Feed,
        batch_size: int,
        *,
        share: RankShare | None = None,
        partitions: RankShare | None = None,
        wait_s: float = 1.0,
        idle_s: float | None = None,
        max_examples: int | None = None,
        least: int = 1,
        prefetch: int = 2,
        pin_memory: bool = False,
    ) -> None:
        require("least", least, least >= 1, "at least 1")
        require("batch_size", batch_size, batch_size >= least, f"at least {least}")
        self.feed, self.share = feed, share or RankShare()
        self._partitions = partitions or self.share
        many = self._partitions.world_size // self.share.world_size
        alone = RankShare(self._partitions.rank // self.share.world_size, many)
        self.batch_size = _part(alone, batch_size)
        self.agree: Callable[[list[float]], list[list[float]]] = lambda mine: [mine]
        self.waits: Callable[[], None] | None = None
        self.asks_pause: Callable[[], bool] | None = None
        self.places: dict[str, Place] = {}
        self.emptied = 0
        self._hurries = False
        self._wait_s, self._idle_s = wait_s, idle_s
        self._most = None if max_examples is None else _part(alone, max_examples)
        self._least, self._depth = max(1, least // many), max(1, prefetch)
        self._pin_memory = pin_memory
        self._stopping = feed.stopping
        self._held: deque[StreamPart] = deque()

    @property
    def examples(self) -> int:
        """Examples that come, over all ranks, as far as that is known; 0: it is not."""
        return self._most or 0

    @property
    def most_batches(self) -> int:
        """Batches, as many as there may be."""
        return -(-(self._most or 1 << 47) // self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        return self.batches()

    @property
    def size(self) -> int | None:
        """Examples of a pass, as far as that is known."""
        return self.feed.size if self._most is None else self._most

    def stop(self) -> None:
        """End the stream after what has come; from any thread, and on any rank."""
        self._stopping.set()

    @contextmanager
    def until_sigterm(self) -> Iterator[None]:
        """Within it SIGTERM ends the stream; nothing outside of the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGTERM, lambda *_: self.stop())
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)

    def batches(self, position: int = 0) -> Generator[Batch]:
        """Batches from `places` on; `position` examples have come before, over all ranks.

        Whoever leaves them ends the stream.

        Raises:
            DataError: what the feed raises; a bad record without a quarantine for one.
        """
        return ahead(self._batches(position), self._depth, leave=self.stop, waits=self.waits)

    def _batches(self, position: int) -> Generator[Batch]:
        self._held.clear()
        came = False
        with closing(self.feed):
            self.places = self.feed.start(self._partitions, self.places)
            came_s = time.monotonic()
            while self._most is None or position < self._most:
                quota = self._quota(position)
                self.places.update(self.feed.added())
                if self._gather(quota) or self.feed.lost:
                    came_s = time.monotonic()
                idle = self._idle_s is not None and time.monotonic() - came_s > self._idle_s
                ready = min(self._ready(), quota)
                done = self.feed.ended or idle
                asked = came and self.asks_pause is not None and self.asks_pause()
                votes = self.agree([ready, self._stopping.is_set(), done, asked])
                ends = any(vote[1] for vote in votes) or all(vote[2] for vote in votes)
                taken = self._allotted([int(vote[0]) for vote in votes], position)
                # The others have enough: a rank that had nothing does not hold them up again.
                self._hurries = not ready and max(vote[0] for vote in votes) >= quota
                if sum(taken) >= self._least:
                    position += sum(taken)
                    yield self._batch(taken[self.share.rank], position)
                    came_s = time.monotonic()  # using up what had come is no silence
                    came = True
                elif ends:
                    self.emptied += taken[self.share.rank]
                elif any(vote[3] for vote in votes):
                    yield replace(self._batch(0, position), pauses=True)
                if ends and (any(vote[1] for vote in votes) or sum(taken) < self._least):
                    return

    def _quota(self, position: int) -> int:
        """Examples of this rank that fill its part of a batch."""
        quota = max(1, _part(self.share, self.batch_size))
        return quota if self._most is None else min(quota, self._most - position)

    def _ready(self) -> int:
        return sum(piece.rows_N.numel() for piece in self._held)

    def _gather(self, quota: int) -> bool:
        """Read until a batch is full, for as long as it waits; whether anything came."""
        wait_s = _HURRY_S if self._hurries and self._wait_s < math.inf else self._wait_s
        ready, until_s, came = self._ready(), time.monotonic() + wait_s, False
        while self.places and ready < quota and not self.feed.ended:
            if self._stopping.is_set():
                break
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                break
            piece = self.feed.read(quota - ready, min(left_s, _POLL_S))
            if piece is not None:
                self._hold(piece)
                ready += piece.rows_N.numel()
                came = True
        return came

    def _hold(self, piece: StreamPart) -> None:
        """Keep it until it is used; of one without examples, where it ends."""
        if piece.rows_N.numel():
            self._held.append(piece)
        elif self._held:
            last = self._held[-1]
            self._held[-1] = replace(last, ends={**last.ends, **piece.ends})
        else:
            self.places.update(piece.ends)

    def _allotted(self, ready: Sequence[int], position: int) -> list[int]:
        """Examples that each rank takes of those it has."""
        room = self.batch_size if self._most is None else self._most - position
        room, taken = min(room, self.batch_size), []
        for one in ready:
            taken.append(min(one, room))
            room -= taken[-1]
        return taken

    def _batch(self, size: int, position: int) -> Batch:
        parts: list[tuple[Source, Tensor]] = []
        left = size
        while left:
            piece = self._held.popleft()
            rows_M = piece.rows_N[:left]
            taken = rows_M.numel()
            parts.append((piece.source, rows_M))
            left -= taken
            self.places.update(piece.after[:taken])
            if taken < piece.rows_N.numel():
                rest = replace(piece, rows_N=piece.rows_N[taken:], after=piece.after[taken:])
                self._held.appendleft(rest)
            else:
                self.places.update(piece.ends)
        batch = replace(self._taken(parts), position=position, places=dict(self.places))
        return batch.pin_memory() if self._pin_memory else batch

    def _taken(self, parts: Sequence[tuple[Source, Tensor]]) -> Batch:
        source = parts[0][0] if parts else self.feed.nothing()
        rows = [rows_M for _, rows_M in parts]
        if all(one is source for one, _ in parts):
            return source.take(torch.cat(rows) if rows else torch.arange(0, device="cpu"))
        chosen = [one.select(rows_M) for one, rows_M in parts if isinstance(one, TensorSource)]
        return join(chosen).take(torch.arange(sum(map(len, rows)), device="cpu"))


def _part(share: RankShare, size: int) -> int:
    low, high = share.of(0, size)
    return high - low


class Replay:
    """Examples of a source as a stream: in order of time, each once it is due.

    Args:
        source: the examples.
        speed: seconds of event time that pass in a second; None: `rate` says when each is due.
        rate: examples a second, over all ranks; None: `speed` does. Neither: all are due at once.
        since_s: the event time that is due at `clock_s`; None: that of the first example to come.
        clock_s: seconds since 1970 on this machine's clock; None: when reading begins.

    Raises:
        ConfigError: both a speed and a rate, or one of 0 or less.
        DataError: no examples.
    """

    lost = False

    def __init__(
        self,
        source: Source,
        *,
        speed: float | None = None,
        rate: float | None = None,
        since_s: float | None = None,
        clock_s: float | None = None,
    ) -> None:
        for name, value in (("speed", speed), ("rate", rate)):
            require(f"{name} of a replay", value, value is None or value > 0, "more than 0")
        one = speed is None or rate is None
        require("speed and rate of a replay", (speed, rate), one, "one of them")
        if not len(source):
            remedy = "Check the files and the split."
            raise DataError("examples of a replay", got=0, allowed="at least 1", remedy=remedy)
        self.features, self.num_dense = source.features, source.num_dense
        self._source, self._speed, self._rate = source, speed, rate
        self._since_s, self._clock_s = since_s, clock_s
        self.stopping = threading.Event()
        self.size: int | None = len(source)
        self._rows_N = self._numbers_N = torch.empty(0, dtype=torch.int64, device="cpu")
        self._due_N = torch.empty(0, dtype=torch.float64, device="cpu")
        self._at = 0

    def start(self, share: RankShare, places: Mapping[str, Place]) -> dict[str, Place]:
        """Begin, or continue; as `Feed`."""
        times_N = self._source.times()
        order_N = torch.argsort(times_N, stable=True)
        own = {
            str(number): places.get(str(number), (0, 0))
            for number in range(share.rank, _PARTITIONS, share.world_size)
        }
        numbers_N = torch.arange(len(order_N), device="cpu")
        done_P = torch.full((_PARTITIONS,), len(order_N), device="cpu")
        for name, (count, _) in own.items():
            done_P[int(name)] = count
        self._numbers_N = numbers_N[numbers_N // _PARTITIONS >= done_P[numbers_N % _PARTITIONS]]
        self._rows_N, self._at = order_N[self._numbers_N], 0
        # All ranks count from the first that any of them has left.
        left = (count * _PARTITIONS + int(name) for name, (count, _) in places.items())
        first = min(min(left, default=0), len(order_N) - 1)
        if self._rate is not None:
            self._due_N = (self._numbers_N - first).double() / self._rate
        elif self._speed is not None:
            since_s = float(times_N[order_N[first]]) if self._since_s is None else self._since_s
            self._due_N = (times_N[self._rows_N].double() - since_s) / self._speed
        else:
            self._due_N = torch.zeros(len(self._rows_N), dtype=torch.float64, device="cpu")
        self._due_N = self._due_N + (time.time() if self._clock_s is None else self._clock_s)
        return own

    def read(self, most: int, timeout_s: float) -> StreamPart | None:
        """Examples that are due; as `Feed`."""
        at, now_s = self._at, time.time()
        if (wait_s := float(self._due_N[at]) - now_s) > 0:
            time.sleep(min(wait_s, timeout_s))
            now_s = time.time()
        due = int(torch.searchsorted(self._due_N[at : at + most], now_s, right=True))
        if not due:
            return None
        self._at += due
        after = [
            (str(number % _PARTITIONS), (number // _PARTITIONS + 1, 0))
            for number in self._numbers_N[at : at + due].tolist()
        ]
        return StreamPart(self._source, self._rows_N[at : at + due], after)

    def nothing(self) -> Source:
        """The source."""
        return self._source

    def added(self) -> dict[str, Place]:
        """None."""
        return {}

    def left_out(self, places: Mapping[str, Place]) -> int:
        """None: bad rows of files are found when these are opened."""
        return 0

    def continues(self, left_out: int) -> None:
        """Nothing to count."""

    @property
    def ended(self) -> bool:
        """Whether all have come."""
        return self._at >= len(self._rows_N)

    def close(self) -> None:
        """Nothing is open."""
