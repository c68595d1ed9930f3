"""How far replicas and publishers are, as values that a metrics page can print."""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Literal

State = Literal["LOADING", "AVAILABLE"]

_RATE_S = 10.0  # over which a rate is taken


@dataclass(frozen=True, slots=True)
class SourceStatus:
    """How far a replica is with one publisher, or with its checkpoint if it has no publisher.

    Args:
        state: AVAILABLE once all rows have been there.
        incarnation, version: what it has.
        staleness_s: age of the newest state of the trainer that it shows; None: none yet.
        passes, segments: how many it has taken.
        failures: requests that failed or brought damaged pages, loads that failed; they are
            repeated.
        rows_per_s: rows taken, deletions included, over the last seconds.
        error: of the last request or load; "" after one that did not fail.
    """

    state: State
    incarnation: int
    version: int
    staleness_s: float | None
    passes: int
    segments: int
    failures: int
    rows_per_s: float = 0.0
    error: str = ""


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """A replica as a whole.

    Args:
        state: AVAILABLE once all its sources are.
        version: the oldest of its sources'.
        staleness_s: the largest of them; None: some have nothing yet.
        rows: that it holds, by table.
        row_bytes: memory of rows, metadata and index.
        rows_per_s, failures: of all sources.
        dense_version: of the dense weights; 0: those of the checkpoint, or none.
        checkpoint: folder of the one it began with; None: without.
        share, of: which part of the rows it has.
        sources: by rank.
    """

    state: State
    version: int
    staleness_s: float | None
    rows: tuple[tuple[str, int], ...]
    row_bytes: int
    rows_per_s: float
    failures: int
    dense_version: int
    checkpoint: str | None
    share: int
    of: int
    sources: tuple[SourceStatus, ...]


@dataclass(frozen=True, slots=True)
class FollowerStatus:
    """A replica as a publisher sees it.

    Args:
        replica: its name.
        version: what it has.
        lag_s: age of the oldest segment that it lacks; 0: it has all; None: a pass is due.
        quiet_s: since it asked last.
    """

    replica: str
    version: int
    lag_s: float | None
    quiet_s: float


@dataclass(frozen=True, slots=True)
class PublisherStatus:
    """A publisher.

    Args:
        incarnation, version: what replicas can have; 0 before the first turn.
        closed_s: Unix time of that version; None before.
        segments, segment_bytes: that are kept.
        passes: that are open.
        rows_per_s: published, over the last seconds.
        turn_s: how long the last turn took.
        failures: turns that failed; the next one takes their rows.
        dense_version: of dense weights.
        replicas: that have asked lately.
    """

    incarnation: int
    version: int
    closed_s: float | None
    segments: int
    segment_bytes: int
    passes: int
    rows_per_s: float
    turn_s: float
    failures: int
    dense_version: int
    replicas: tuple[FollowerStatus, ...]


class Rate:
    """Counts over the last seconds. Thread-safe."""

    def __init__(self) -> None:
        self._counts: deque[tuple[float, int]] = deque()
        self._sum, self._lock = 0, threading.Lock()

    def add(self, count: int) -> None:
        """So many more, now."""
        with self._lock:
            self._counts.append((time.monotonic(), count))
            self._sum += count
            self._forget()

    def per_s(self) -> float:
        """How many a second."""
        with self._lock:
            self._forget()
            return self._sum / _RATE_S

    def _forget(self) -> None:
        since = time.monotonic() - _RATE_S
        while self._counts and self._counts[0][0] < since:
            self._sum -= self._counts.popleft()[1]
