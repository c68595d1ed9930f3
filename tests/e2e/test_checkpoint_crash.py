"""Saves that are killed at any moment: the last committed checkpoint is there, whole and exact."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.checkpoint import CheckpointStore, compact, maintenance, verify
from shoal.checkpoint.loading import load
from shoal.checkpoint.saving import Saving, begin
from shoal.comm import launch
from shoal.errors import ShoalError
from support import crash_program
from support.crash_program import POINTS, Order
from support.crashing_job import CrashingJob, Replay
from support.ranks import start_ranks
from support.saved_jobs import Job, placed_job
from support.shares import share_of
from support.tiny_job import TinyJob

CI_KILLS = 12
SLOW_STORES, SLOW_KILLS = 5, 40


@dataclass
class Killer:
    """Starts children in one store, kills them, and checks what they leave."""

    root: Path
    seed: int
    pipe: subprocess.Popen[str]
    reported: int = 0
    kills: int = 0
    moments: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.replay = Replay(self.seed)
        self.chosen = random.Random(self.seed)
        self.log = self.root.with_suffix(".log")

    def kill_one(self, point: str = "", nth: int = 0) -> None:
        """One child until it is killed, at a point or after a random delay."""
        order = Order(
            root=str(self.root),
            log=str(self.log),
            job=self.seed,
            seed=self.chosen.randrange(1 << 30),
            point=point,
            nth=nth,
        )
        self.log.write_text("")
        assert self.pipe.stdin is not None and self.pipe.stdout is not None
        self.pipe.stdin.write(crash_program.written(order))
        self.pipe.stdin.flush()
        pid = int(self.pipe.stdout.readline())
        lines = 1 << 30 if point else self.chosen.randrange(1, 12)
        delay_s = self.chosen.random() * 0.12
        self.wait_for(lines)
        if self.said()[-1][0] != "dies":
            time.sleep(delay_s)
            os.kill(pid, signal.SIGKILL)
        status = int(self.pipe.stdout.readline())
        assert status == -signal.SIGKILL, self.log.read_text()
        self.kills += 1
        last = self.said()[-1][0]
        self.moments[last] = self.moments.get(last, 0) + 1

    def wait_for(self, lines: int) -> None:
        """Until the child has said so much, or that it dies, or does no more."""
        until, heard = time.monotonic() + 60, 0
        while time.monotonic() < until:
            said = self.said()
            assert not said or said[-1][0] != "failed", " ".join(said[-1])
            if len(said) >= lines or (said and said[-1][0] in ("dies", "idle")):
                return
            if len(said) > heard:
                until, heard = time.monotonic() + 60, len(said)
            time.sleep(0.003)
        raise AssertionError(f"the child hangs after {self.log.read_text()}")

    def said(self) -> list[list[str]]:
        text = self.log.read_text()
        return [line.split() for line in text[: text.rfind("\n") + 1].splitlines()]

    def check(self) -> None:
        """What the killed child left."""
        for words in self.said():
            if words[0] == "committed":
                self.reported = max(self.reported, int(words[1]))
            if words[0] == "begun":
                assert words[2:] == [], "leftovers that the next save did not clean"
        store = CheckpointStore(self.root)
        entries = store.list()
        newest = store.latest()
        if newest is None:
            assert self.reported == 0
            return
        assert newest.step >= self.reported
        for entry in entries:
            links = store.chain(entry.name)  # a delta has its parents
            assert links[-1].step == entry.step
            report = verify(self.root / entry.name, chain=False)
            assert report.ok, report.problems
            assert not report.unlisted
        assert verify(self.root).ok
        job = CrashingJob(self.seed)
        loaded = load(self.root, job.contents())
        job.steps = loaded.state["steps"]
        assert job.steps == newest.step == loaded.manifest.step
        assert job.digest() == self.replay.digest(newest.step)
        assert loaded.cursors is not None


@contextmanager
def killer(root: Path, seed: int) -> Iterator[Killer]:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, crash_program.__file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environ,
    ) as pipe:
        yield Killer(root, seed, pipe)
        assert pipe.stdin is not None
        pipe.stdin.close()
        assert pipe.wait(120) == 0


def moments(chosen: random.Random, kills: int) -> Iterator[tuple[str, int]]:
    """Half of them random, half at points of a save in turn."""
    for number in range(kills):
        if number % 2:
            yield "", 0
        else:
            point = POINTS[number // 2 % len(POINTS)]
            most = {"half written": 400, "renaming": 6, "renamed": 6, "removing": 24}.get(point, 40)
            yield point, chosen.randrange(1, most)


def run(root: Path, seed: int, kills: int) -> None:
    with killer(root, seed) as one:
        for point, nth in moments(random.Random(seed), kills):
            one.kill_one(point, nth)
            one.check()
        assert one.kills == kills
        assert one.reported > 0
        print(f"{one.kills} kills, after step {one.reported}, last words {one.moments}")


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.timeout(900)
def test_killed_saves_lose_nothing_that_was_committed(tmp_path: Path) -> None:
    run(tmp_path / "store", 1, CI_KILLS)


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(100, 100 + SLOW_STORES))
def test_two_hundred_kills(tmp_path: Path, seed: int) -> None:
    run(tmp_path / "store", seed, share_of(SLOW_KILLS, CI_KILLS))


def test_a_save_beside_a_compaction_leaves_it_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is being compacted is no leftover: both are committed, whole."""
    job = TinyJob()
    for _ in range(2):
        for _ in range(3):
            job.step()
        job.save(tmp_path)
    store, delta = CheckpointStore(tmp_path), "step-000000000006-delta"
    job.step()
    copied = maintenance._copied

    def interrupted(*args: Any) -> Any:
        monkeypatch.setattr(maintenance, "_copied", copied)
        job.save(tmp_path)
        return copied(*args)

    monkeypatch.setattr(maintenance, "_copied", interrupted)
    assert compact(store, delta).kind == "full"
    assert {(entry.step, entry.kind) for entry in store.list()} >= {(6, "delta"), (6, "full")}
    assert max(entry.step for entry in store.list()) == 7
    assert verify(tmp_path).ok and store.clean() == ()
    assert verify(tmp_path / "step-000000000006-full").ok


TIMEOUT_S = 60.0


def saved_by_two(root: str, doomed: int, stage: str, when: str) -> list[str]:
    """A full checkpoint, then a delta in whose stage one rank dies; what the other one hears."""
    mesh = launch.init(device="cpu", timeout_s=TIMEOUT_S)
    ranks = mesh.collectives("checkpoint")
    job = placed_job("row_wise", mesh.world_size, mesh.rank)
    job.step()
    job.step()
    first = begin(root, job.contents(), step=2, position=2, collectives=ranks)
    manifest = first.wait()
    job.step()
    inner = Saving._stage

    def dies(self: Any, what: str, work: Any, **parts: Any) -> Any:
        if what != stage or mesh.rank != doomed:
            return inner(self, what, work, **parts)
        if when == "after":
            work()
        return os.kill(os.getpid(), signal.SIGKILL)

    Saving._stage = dies  # type: ignore[method-assign]
    saving = begin(
        root,
        job.contents(),
        step=3,
        position=3,
        collectives=ranks,
        kind="delta",
        parent=manifest,
        since=first.cursors,
    )
    heard = []
    for attempt in (saving.wait, lambda: begin(root, job.contents(), step=4, position=4,
                                               collectives=ranks)):  # fmt: skip
        try:
            attempt()
        except ShoalError as error:
            heard.append(f"{type(error).__name__}: {error}")
        job.step()  # training of what is here is not hindered
    return heard


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("doomed", "stage", "when", "newest"),
    [
        pytest.param(1, "row files", "before", 2, marks=pytest.mark.slow),
        pytest.param(1, "row files", "after", 2, marks=pytest.mark.slow),
        pytest.param(0, "admission counters", "before", 2, marks=pytest.mark.slow),
        pytest.param(1, "dense part", "before", 2, marks=pytest.mark.slow),
        pytest.param(0, "manifest", "before", 2, marks=pytest.mark.slow),
        pytest.param(0, "manifest", "after", 3, marks=pytest.mark.slow),
        # All that it had to write is durable by then.
        pytest.param(1, "manifest", "before", 3, marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_is_killed(
    tmp_path: Path, doomed: int, stage: str, when: str, newest: int
) -> None:
    found = start_ranks(2, saved_by_two, str(tmp_path), doomed, stage, when).outcomes()
    assert found[doomed] == (False, f"died with {-signal.SIGKILL}")
    good, heard = found[1 - doomed]
    assert good, heard
    assert len(heard) == 2 and heard[0].startswith("CheckpointError: "), heard
    assert f"rank {1 - doomed} of 2" in heard[0] and f"within {TIMEOUT_S} s" in heard[0]
    store = CheckpointStore(tmp_path)
    entries = store.list()
    assert [entry.step for entry in entries] == list(range(2, newest + 1))
    assert verify(tmp_path).ok
    whole, want = Job(), Job()
    load(tmp_path, whole.contents())
    for _ in range(newest):
        want.step()
    one, other = whole.outcome(), want.outcome()
    assert one.admission == other.admission
    for name, rows in other.rows.items():
        for part in ("ids", "weights", "state", "last_seen_s", "counts"):
            assert torch.equal(getattr(one.rows[name], part), getattr(rows, part)), (name, part)
    begin(tmp_path, want.contents(), step=9, position=9).wait()
    assert store.clean() == () and [e.step for e in store.list()] == [*range(2, newest + 1), 9]
