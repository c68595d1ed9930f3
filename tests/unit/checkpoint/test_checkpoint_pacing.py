"""Rests of a save beside training: as long as the processors ask for, and none in a hurry."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from shoal.checkpoint import writing
from shoal.checkpoint.writing import Pace, processors


class Rests:
    """A thread that is busy for a tenth of a second between rests, on so many processors."""

    def __init__(self, patch: pytest.MonkeyPatch, processors: int) -> None:
        self.busy_s, self.slept_s = 0.0, []
        patch.setattr(time, "thread_time", lambda: self.busy_s)
        patch.setattr(writing, "processors", lambda: float(processors))
        self.pace = Pace()
        wait = self.pace._hurried.wait

        def sleep(timeout: Any) -> bool:
            self.slept_s.append(timeout)
            return wait(0)

        patch.setattr(self.pace._hurried, "wait", sleep)

    def work(self, times: int) -> list[float]:
        for _ in range(times):
            self.busy_s += 0.1
            self.pace.rest()
        return self.slept_s


@pytest.mark.parametrize(("processors", "rest_s"), [(1, 1.1), (2, 0.5), (6, 0.1)])
def test_a_twelfth_of_the_processors_is_taken(
    monkeypatch: pytest.MonkeyPatch, processors: int, rest_s: float
):
    rests = Rests(monkeypatch, processors)
    rests.pace.begin()
    assert rests.work(3) == pytest.approx([rest_s] * 3)


@pytest.mark.parametrize("processors", [12, 64])
def test_many_processors_need_no_rest(monkeypatch: pytest.MonkeyPatch, processors: int):
    rests = Rests(monkeypatch, processors)
    rests.pace.begin()
    assert rests.work(3) == []


def test_nobody_rests_before_training_goes_on_or_in_a_hurry(monkeypatch: pytest.MonkeyPatch):
    rests = Rests(monkeypatch, 1)
    assert rests.work(2) == []
    rests.pace.begin()
    rests.pace.hurry()
    assert rests.work(2) == []


def test_a_hurry_ends_a_rest(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(writing, "processors", lambda: 1.0)
    pace, busy_s = Pace(), [0.0]
    monkeypatch.setattr(time, "thread_time", lambda: busy_s[0])
    pace.begin()
    busy_s[0] = 1e6
    resting = threading.Thread(target=pace.rest)
    resting.start()
    pace.hurry()
    resting.join(60)
    assert not resting.is_alive()


@pytest.mark.parametrize(
    ("bound", "environ", "quota", "want"),
    [
        (16, {}, None, 16),
        (16, {"LOCAL_WORLD_SIZE": "8"}, None, 2),
        (16, {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, None, 4),
        (2, {"LOCAL_WORLD_SIZE": "8"}, None, 2),  # bound to its share already
        (16, {"LOCAL_WORLD_SIZE": ""}, "max 100000", 16),
        (16, {}, "150000 100000", 1.5),
        (16, {"LOCAL_WORLD_SIZE": "16"}, "200000 100000", 1),
    ],
)
def test_processors_of_a_rank(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    bound: int,
    environ: dict[str, str],
    quota: str | None,
    want: float,
):
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(bound))
    monkeypatch.setattr(writing, "_QUOTA", str(tmp_path / "cpu.max"))
    if quota is not None:
        (tmp_path / "cpu.max").write_text(quota)
    assert processors(environ) == pytest.approx(want)


def test_processors_where_the_system_binds_nobody(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(writing, "_QUOTA", "/nowhere")
    assert processors({}) == 6
