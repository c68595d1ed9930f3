"""The scheduler: whatever order events come in, commands keep the rules and nothing gets stuck."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import hypothesis.strategies as st
import pytest
from hypothesis import given

from shoal.errors import ConfigError
from shoal.pipeline.scheduler import Command, Facts, Settings, State, done, loaded, start

# What is answered next: 0 the command that runs, 1 the oldest load.
Order = Callable[[], int]


@dataclass
class World:
    """Plays the executor, and checks each command against what has happened so far."""

    settings: Settings
    facts: list[Facts]  # the last one is the end
    found: int  # batches of this rank
    order: Order
    log: list[Command] = field(default_factory=list)
    asked: int = 0
    loads: deque[int] = field(default_factory=deque)
    main: Command | None = None
    done: dict[str, list[int]] = field(default_factory=dict)
    ended: int | None = None
    dry: bool = False
    snapshots: list[int] = field(default_factory=list)

    def run(self) -> State:
        state = start(self.settings)
        self.take(state)
        for _ in range(10_000):
            if state.stopped:
                return state
            assert self.main is not None or self.loads, f"stuck at {state}"
            state = self.answered(state)
            self.take(state)
        raise AssertionError("no end")

    def answered(self, state: State) -> State:
        if self.loads and (self.main is None or self.order()):
            index = self.loads.popleft()
            self.dry = self.dry or index >= self.found
            return loaded(state, index < self.found)
        command, self.main = self.main, None
        assert command is not None
        if command.action != "evict":
            assert command.index == len(self.done.get(command.action, ())) or command.action in (
                "snapshot",
                "drop",
                "stop",
            )
        self.done.setdefault(command.action, []).append(command.index)
        if command.action == "snapshot":
            self.snapshots.append(command.index)
        if command.action == "settle":
            facts = self.facts[min(command.index, len(self.facts) - 1)]
            if self.ended is None and not facts.train:
                self.ended = command.index if self.settings.drain else self.count("backward")
            return done(state, facts)
        return done(state)

    def count(self, action: str) -> int:
        return len(self.done.get(action, ()))

    def take(self, state: State) -> None:
        for index in range(self.asked, state.loads):
            self.loads.append(index)
            assert index - self.count("backward") < self.settings.in_flight
        self.asked = state.loads
        command = state.running
        if self.main is not None:
            assert command is self.main
        elif command is not None:
            self.main = command
            self.log.append(command)
            self.check(command)

    def check(self, command: Command) -> None:
        i, size, k = command.index, self.settings.accumulation, self.settings.staleness
        window = i // size
        before = {"vote": None, "settle": "vote", "begin": "settle", "probe": "begin"}
        before |= {"fetch": "probe", "forward": "fetch", "backward": "forward"}
        earlier = before.get(command.action)
        if earlier is not None:
            assert self.count(earlier) > i, f"{command} before its {earlier}"
        if command.action == "vote":
            assert i not in self.loads or self.dry
        if command.action in ("begin", "probe", "fetch", "forward"):
            assert self.ended is None or i < self.ended
        if command.action == "fetch":
            assert self.count("apply") == max(window - k, 0) or self.after_cut(window)
            assert self.count("apply") >= window - k
        if command.action == "probe":
            self.check_probe(command, window - k)
        if command.action == "forward":
            closed = self.count("settle") >= (window + 1) * size or self.ended is not None
            assert closed and self.count("apply") == window
        if command.action == "apply":
            trained = self.count("backward")
            assert trained == (i + 1) * size or trained == self.ended
        if command.action == "evict":
            assert self.count("apply") == i + 1
            assert command.evict_s == self.evict_s(i)
        if command.action == "snapshot":
            assert i in (self.count("probe"), self.ended)
            assert self.count("begin") == i or not self.settings.drain
            assert self.count("backward") == i
            assert self.count("apply") == -(-i // size)

    def after_cut(self, window: int) -> bool:
        """Rows of the windows after a snapshot point are fetched with all updates before it."""
        first = max((snapshot for snapshot in self.snapshots), default=None)
        size = self.settings.accumulation
        return first is not None and window - self.settings.staleness < first // size

    def check_probe(self, command: Command, needs: int) -> None:
        applied = self.count("apply")
        if self.facts[command.index].defer_inserts:
            assert applied >= needs
        for window in range(needs):
            if self.evict_s(window) is not None:
                assert window in self.done.get("evict", ())

    def evict_s(self, window: int) -> int | None:
        size = self.settings.accumulation
        times = [f.evict_s for f in self.facts[window * size : (window + 1) * size]]
        return max((t for t in times if t is not None), default=None)


@st.composite
def settings_of(draw: st.DrawFn) -> Settings:
    k, size = draw(st.integers(0, 3)), draw(st.integers(1, 4))
    depth = draw(st.none() | st.integers((k + 1) * size, (k + 1) * size + 6))
    return Settings(staleness=k, accumulation=size, depth=depth, drain=draw(st.booleans()))


ROUND = st.builds(
    Facts,
    defer_inserts=st.booleans(),
    snapshot=st.sampled_from([False, False, False, True]),
    evict_s=st.sampled_from([None, None, 5, 9]),
)
END = st.builds(Facts, train=st.just(False), snapshot=st.booleans())


@given(
    settings_of(),
    st.lists(ROUND, max_size=14),
    END,
    st.integers(0, 16),
    st.data(),
)
def test_any_order_keeps_the_rules(
    settings: Settings, rounds: list[Facts], end: Facts, found: int, data: st.DataObject
) -> None:
    def order() -> int:
        return data.draw(st.integers(0, 1))

    world = World(settings, [*rounds, end], found, order)
    state = world.run()
    trained = world.done.get("backward", [])
    assert trained == list(range(len(trained)))
    assert len(trained) == world.ended
    if settings.drain:
        assert len(trained) == len(rounds)
        # No wish for a snapshot point is lost, also while another one is to come.
        size = settings.accumulation
        wanted = {-(-i // size) * size for i, facts in enumerate([*rounds, end]) if facts.snapshot}
        inside = {snapshot for snapshot in wanted if snapshot < len(rounds)}
        assert world.snapshots == sorted(inside) + [len(rounds)] * (inside != wanted)
    assert state.tickets == 0
    assert not state.held
    assert world.count("settle") == world.count("vote")
    # What was loaded and not trained is dropped, once.
    dropped = world.done.get("drop", [])
    answered = min(found, state.answered)
    assert sorted(dropped) == [i for i in range(answered) if i >= len(trained)]


@pytest.mark.slow
@given(settings_of(), st.lists(ROUND, max_size=10), END, st.data())
def test_ranks_call_in_one_order(
    settings: Settings, rounds: list[Facts], end: Facts, data: st.DataObject
) -> None:
    """Neither a rank's timing nor how much data it has changes its commands."""
    logs = []
    for rank in range(2):
        found = data.draw(st.integers(0, 12), label=f"batches of rank {rank}")
        world = World(settings, [*rounds, end], found, lambda: data.draw(st.integers(0, 1)))
        world.run()
        logs.append([c for c in world.log if c.action not in ("drop", "stop")])
    assert logs[0] == logs[1]


def actions(settings: Settings, facts: list[Facts]) -> list[str]:
    world = World(settings, facts, len(facts) - 1, lambda: 1)
    world.run()
    return [f"{c.action} {c.index}" for c in world.log if c.action not in ("vote", "settle")]


def test_staleness_0_probes_ahead_and_fetches_late() -> None:
    facts = [Facts()] * 3 + [Facts(train=False)]
    assert actions(Settings(), facts) == [
        "begin 0",
        "probe 0",
        "fetch 0",
        "begin 1",
        "probe 1",
        "begin 2",
        "forward 0",
        "backward 0",
        "apply 0",
        "fetch 1",
        "probe 2",
        "forward 1",
        "backward 1",
        "apply 1",
        "fetch 2",
        "forward 2",
        "backward 2",
        "apply 2",
        "stop 3",
    ]


def test_deferred_inserts_wait_for_the_update_and_the_eviction() -> None:
    facts = [Facts(evict_s=7), Facts(defer_inserts=True), Facts(train=False)]
    listed = actions(Settings(), facts)
    assert listed[-9:] == [
        "backward 0",
        "apply 0",
        "evict 0",
        "probe 1",
        "fetch 1",
        "forward 1",
        "backward 1",
        "apply 1",
        "stop 2",
    ]


def test_staleness_k_fetches_k_windows_ahead() -> None:
    facts = [Facts()] * 4 + [Facts(train=False)]
    listed = actions(Settings(staleness=1), facts)
    assert listed.index("fetch 1") < listed.index("apply 0") < listed.index("fetch 2")
    assert listed.index("fetch 2") < listed.index("apply 1") < listed.index("fetch 3")


def test_a_cut_drains_first() -> None:
    facts = [Facts(), Facts(), Facts(snapshot=True), Facts(), Facts(train=False)]
    listed = actions(Settings(staleness=1), facts)
    at = listed.index("snapshot 2")
    assert "apply 1" in listed[:at] and "begin 2" in listed[at:]


def test_depth_1_is_a_plain_loop() -> None:
    facts = [Facts()] * 2 + [Facts(train=False)]
    one = ["begin", "probe", "fetch", "forward", "backward", "apply"]
    assert actions(Settings(depth=1), facts) == [
        *(f"{action} 0" for action in one),
        *(f"{action} 1" for action in one),
        "stop 2",
    ]


def test_a_cut_in_a_window_waits_for_its_end() -> None:
    facts = [Facts(), Facts(snapshot=True), Facts(), Facts(train=False)]
    listed = actions(Settings(accumulation=2), facts)
    assert listed.index("apply 0") < listed.index("snapshot 2") < listed.index("begin 2")


def test_no_data_ends_at_once() -> None:
    assert actions(Settings(), [Facts(train=False)]) == ["stop 0"]


@pytest.mark.parametrize(
    "change", [{"staleness": -1}, {"accumulation": 0}, {"depth": 3}, {"staleness": True}]
)
def test_settings_out_of_range(change: dict[str, int]) -> None:
    good = Settings(staleness=1, accumulation=2)
    with pytest.raises(ConfigError, match=r"of a pipeline: got"):
        replace(good, **change)
