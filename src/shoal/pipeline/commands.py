"""What the scheduler of a pipeline and its executor say to each other, and what is remembered."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from shoal.errors import ConfigError, describe

__all__ = [
    "Command",
    "Done",
    "Event",
    "Facts",
    "Loaded",
    "Settings",
    "Settled",
    "State",
    "Verb",
]

Verb = Literal[
    "load",
    "vote",
    "settle",
    "begin",
    "probe",
    "fetch",
    "forward",
    "backward",
    "apply",
    "evict",
    "cut",
    "drop",
    "stop",
]


@dataclass(frozen=True, slots=True)
class Settings:
    """What a pipeline may do at the same time.

    Args:
        staleness: updates a fetched row may lack; 0 trains exactly as without a pipeline.
        accumulation: batches of one optimizer step.
        depth: most batches in flight, from load to backward; None takes what all stages need to
            overlap. 1 (without accumulation) is no pipeline.

    Raises:
        ConfigError: out of range.
    """

    staleness: int = 0
    accumulation: int = 1
    depth: int | None = None

    def __post_init__(self) -> None:
        _whole("staleness", self.staleness, 0)
        _whole("accumulation", self.accumulation, 1)
        if self.depth is not None:
            _whole("depth", self.depth, (self.staleness + 1) * self.accumulation)

    @property
    def in_flight(self) -> int:
        """Most batches in flight."""
        return self.ahead("vote") if self.depth is None else self.depth

    def ahead(self, stage: Literal["probe", "begin", "vote"]) -> int:
        """Batches that may have passed a stage while the first of them is trained."""
        least = {"probe": 2, "begin": 3, "vote": 4}[stage]
        # Windows are weighed as a whole, so the votes of one are settled before it is trained.
        wanted = max(least, self.accumulation) + self.staleness * self.accumulation
        return wanted if self.depth is None else min(wanted, self.depth)


@dataclass(frozen=True, slots=True)
class Facts:
    """What the ranks settled about batch i; the same on every rank.

    Args:
        train: the round takes place; False at the end of the data.
        drain: at the end, batches before it are trained; False drops them.
        defer_inserts: its new ids may not fit beside those of batches under way.
        cut: a cut is wanted before it (before the next window, if it is in the midst of one).
        evict_s: event time to evict at, once its window is applied; None: not due.
    """

    train: bool = True
    drain: bool = True
    defer_inserts: bool = False
    cut: bool = False
    evict_s: int | None = None


@dataclass(frozen=True, slots=True)
class Command:
    """Something to do now. `index` is a batch, or a window for "apply" and "evict"."""

    verb: Verb
    index: int
    evict_s: int | None = None


@dataclass(frozen=True, slots=True)
class Loaded:
    """The answer to "load"; found is False at the end of this rank's data."""

    index: int
    found: bool


@dataclass(frozen=True, slots=True)
class Settled:
    """The answer to "settle"."""

    index: int
    facts: Facts


@dataclass(frozen=True, slots=True)
class Done:
    """The answer to any other command."""

    command: Command


Event = Loaded | Settled | Done


@dataclass(frozen=True, slots=True)
class State:
    """Where everything stands. Counters say how many batches (windows) have passed a stage."""

    settings: Settings = field(default_factory=Settings)
    loads: int = 0
    answered: int = 0
    held: frozenset[int] = frozenset()
    dry_at: int | None = None
    votes: int = 0
    settled: int = 0
    begun: int = 0
    probed: int = 0
    fetched: int = 0
    forwarded: int = 0
    trained: int = 0
    applied: int = 0
    evicted: int = 0
    facts: tuple[Facts, ...] = ()
    facts_from: int = 0
    cuts: tuple[int, ...] = ()
    end: int | None = None
    running: Command | None = None
    stopped: bool = False

    @property
    def tickets(self) -> int:
        """Batches whose rows are held: probed, and neither applied nor dropped."""
        if self.stopped:
            return 0
        ended = self.applied * self.settings.accumulation
        return self.probed - min(ended, self.trained)

    @property
    def windows(self) -> int:
        """Windows whose batches are all trained; the last one may be short."""
        size = self.settings.accumulation
        return -(-self.trained // size) if self.trained == self.end else self.trained // size


def _whole(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(
            describe(
                f"{name} of a pipeline",
                got=repr(value),
                allowed=f"an int, at least {least}",
                remedy="Rows of staleness + 1 windows have to fit the batches in flight."
                if name == "depth"
                else "Leave it out for the default.",
            )
        )
