"""When each stage of each batch runs: pure functions from a state and an answer to the next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

from shoal.rules.rule import Checked, Steps, check, whole

Action = Literal[
    "vote",
    "settle",
    "begin",
    "probe",
    "fetch",
    "forward",
    "backward",
    "apply",
    "evict",
    "snapshot",
    "drop",
    "stop",
]


@dataclass(frozen=True, slots=True)
class Settings(Checked):
    """What a pipeline may do at the same time, and when its run ends and evicts.

    Args:
        staleness: updates by which a fetched row may be stale; 0 trains exactly as without a
            pipeline.
        accumulation: batches of one optimizer step.
        depth: most batches in flight, from load to backward; None takes what all stages need to
            overlap. 1 (without accumulation) is no pipeline.
        stop_at_first: the data ends when any rank's does; else when all ranks' do.
        drain: batches before the end are trained.
        evict_every_s: event time between evictions; None: never.

    Raises:
        ConfigError: out of range.
    """

    staleness: Annotated[int, whole(0)] = 0
    accumulation: Steps = 1
    depth: int | None = None
    stop_at_first: bool = False
    drain: bool = True
    evict_every_s: int | None = None

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        if self.depth is not None:
            remedy = "Rows of staleness + 1 windows have to fit the batches in flight."
            least = (self.staleness + 1) * self.accumulation
            check(self, "depth", self.depth, whole(least, remedy=remedy))

    def described(self) -> str:
        """In errors."""
        return "a pipeline"

    @property
    def in_flight(self) -> int:
        """Most batches in flight."""
        return self.ahead("vote") if self.depth is None else self.depth

    def ahead(self, stage: Literal["probe", "begin", "vote"]) -> int:
        """Batches that may have passed a stage while the first of them is trained."""
        least = {"probe": 2, "begin": 3, "vote": 4}[stage]
        # Windows are weighed as a whole, so the agreement on one is complete before it is trained.
        wanted = max(least, self.accumulation) + self.staleness * self.accumulation
        return wanted if self.depth is None else min(wanted, self.depth)


@dataclass(frozen=True, slots=True)
class Facts:
    """What the ranks settled about batch i; the same on every rank.

    Args:
        train: the round takes place; False at the end of the data.
        defer_inserts: its new ids may not fit next to those of batches under way.
        snapshot: a snapshot point is wanted before it (before the next window, if it is in the
            midst of one).
        evict_s: event time to evict at, once its window is applied; None: not due.
    """

    train: bool = True
    defer_inserts: bool = False
    snapshot: bool = False
    evict_s: int | None = None


@dataclass(frozen=True, slots=True)
class Command:
    """Something to do now. `index` is a batch, or a window for "apply" and "evict"."""

    action: Action
    index: int
    evict_s: int | None = None


class State(NamedTuple):
    """Where everything stands. Counters say how many batches (windows) have passed a stage.

    `loads` batches are to be loaded by now, one after the other; `running` is the one other thing
    to do, if there is any. A tuple, since a round makes some thirty of them between the launches of
    a step.
    """

    settings: Settings = Settings()
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
    snapshots: tuple[int, ...] = ()
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


def start(settings: Settings) -> State:
    """The first state."""
    return _released(State(settings))


def loaded(state: State, found: bool) -> State:
    """The state after the next batch was asked for; not found: this rank's data has ended."""
    index = state.answered
    state = state._replace(answered=index + 1)
    if found:
        state = state._replace(held=state.held | {index})
    elif state.dry_at is None:
        state = state._replace(dry_at=index)
    return _released(state)


def done(state: State, facts: Facts | None = None) -> State:
    """The state after what was `running`; facts: what a "settle" found."""
    command = state.running
    assert command is not None, "nothing runs"
    state = state._replace(running=None)
    if facts is None:
        return _released(_passed(state, command))
    return _released(_settled(state, command.index, facts))


def _released(state: State) -> State:
    if state.dry_at is None and state.end is None:
        most = state.trained + state.settings.in_flight
        state = state._replace(loads=max(state.loads, most))
    if state.running is None and not state.stopped:
        state = state._replace(running=_following(state))
    return state


def _settled(state: State, index: int, facts: Facts) -> State:
    state = state._replace(settled=state.settled + 1)
    if state.end is not None:
        return state
    state = state._replace(facts=(*state.facts, facts))
    if facts.snapshot:
        size = state.settings.accumulation
        snapshot_at = -(-index // size) * size
        if snapshot_at not in state.snapshots:
            state = state._replace(snapshots=(*state.snapshots, snapshot_at))
    if not facts.train:
        state = state._replace(end=index if state.settings.drain else state.trained)
    return state


_PASSED = {
    "vote": "votes",
    "begin": "begun",
    "probe": "probed",
    "fetch": "fetched",
    "forward": "forwarded",
    "backward": "trained",
    "apply": "applied",
    "evict": "evicted",
}


def _passed(state: State, command: Command) -> State:
    counter = _PASSED.get(command.action)
    if counter is not None:
        state = state._replace(**{counter: getattr(state, counter) + 1})
    if command.action in ("backward", "drop"):
        state = state._replace(held=state.held - {command.index})
    elif command.action == "snapshot":
        # The snapshot point at the end is the last one, whatever was asked for after it.
        state = state._replace(snapshots=() if state.trained == state.end else state.snapshots[1:])
    elif command.action == "stop":
        state = state._replace(stopped=True)
    # Windows after which nothing is due are passed over.
    while state.evicted < state.applied and _evict_s(state, state.evicted) is None:
        state = state._replace(evicted=state.evicted + 1)
    needless = state.evicted * state.settings.accumulation - state.facts_from
    if needless > 0:
        kept = state.facts[needless:]
        state = state._replace(facts=kept, facts_from=state.facts_from + needless)
    return state


def _following(state: State) -> Command | None:
    """The next command of the one order; None while its batch is not loaded."""
    if state.forwarded > state.trained:
        return Command("backward", state.trained)
    between = _between_windows(state)
    if between is not None:
        return between
    if state.end is not None and state.trained == state.end:
        return _ending(state)
    early = _early(state)
    if early is not None:
        return early
    if state.votes < _bound(state, "vote") and state.end is None:
        known = state.answered > state.votes or state.dry_at is not None
        return Command("vote", state.votes) if known else None
    return Command("forward", state.trained)


def _between_windows(state: State) -> Command | None:
    if state.applied < state.windows:
        return Command("apply", state.applied)
    if state.evicted < state.applied:
        return Command("evict", state.evicted, _evict_s(state, state.evicted))
    if state.snapshots and state.trained == _barrier(state) != state.end:
        return Command("snapshot", state.trained)
    return None


def _early(state: State) -> Command | None:
    """What can run ahead of the batch to be trained: later stages first."""
    settings = state.settings
    if state.fetched < state.probed and state.applied >= _needs(state, state.fetched):
        return Command("fetch", state.fetched)
    barrier = _barrier(state)
    if state.probed < min(state.begun, barrier, _bound(state, "probe")) and _may_probe(state):
        return Command("probe", state.probed)
    begin_before = _bound(state, "begin")
    if state.begun < min(state.settled, barrier, begin_before):
        return Command("begin", state.begun)
    window_end = (state.trained // settings.accumulation + 1) * settings.accumulation
    if state.settled < min(state.votes, max(begin_before, window_end)):
        return Command("settle", state.settled)
    return None


def _ending(state: State) -> Command | None:
    if state.settled < state.votes:
        return Command("settle", state.settled)
    if state.answered < state.loads and state.dry_at is None:
        return None
    if state.held:
        return Command("drop", min(state.held))
    if state.snapshots:
        return Command("snapshot", state.trained)
    return Command("stop", state.trained)


def _bound(state: State, stage: Literal["probe", "begin", "vote"]) -> int:
    bound = state.trained + state.settings.ahead(stage)
    return bound if state.end is None else min(bound, state.end)


def _barrier(state: State) -> int:
    """The first batch that may not begin yet: what a snapshot point or the end holds back."""
    edges = [*state.snapshots[:1], *([] if state.end is None else [state.end])]
    return min(edges, default=state.trained + state.settings.in_flight)


def _needs(state: State, batch: int) -> int:
    """Windows that are applied before a batch's rows are read."""
    return batch // state.settings.accumulation - state.settings.staleness


def _may_probe(state: State) -> bool:
    needs = _needs(state, state.probed)
    if any(_evict_s(state, window) is not None for window in range(state.evicted, needs)):
        return False
    facts = state.facts[state.probed - state.facts_from]
    return not facts.defer_inserts or state.applied >= needs


def _evict_s(state: State, window: int) -> int | None:
    size = state.settings.accumulation
    first = max(window * size - state.facts_from, 0)
    facts = state.facts[first : (window + 1) * size - state.facts_from]
    return max((one.evict_s for one in facts if one.evict_s is not None), default=None)
