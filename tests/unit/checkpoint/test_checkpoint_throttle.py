"""Pauses of a save during training: as long as the processors ask for, and none once stopped."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from shoal.checkpoint import writing
from shoal.checkpoint.writing import Throttle, processors


class Pauses:
    """A thread that is busy for a tenth of a second between pauses, on so many processors."""

    def __init__(self, patch: pytest.MonkeyPatch, processors: int) -> None:
        self.busy_s, self.slept_s = 0.0, []
        patch.setattr(time, "thread_time", lambda: self.busy_s)
        patch.setattr(writing, "processors", lambda: float(processors))
        self.throttle = Throttle()
        wait = self.throttle._stopped.wait

        def sleep(timeout: Any) -> bool:
            self.slept_s.append(timeout)
            return wait(0)

        patch.setattr(self.throttle._stopped, "wait", sleep)

    def work(self, times: int) -> list[float]:
        for _ in range(times):
            self.busy_s += 0.1
            self.throttle.pause()
        return self.slept_s


@pytest.mark.parametrize(("processors", "pause_s"), [(1, 1.1), (2, 0.5), (6, 0.1)])
def test_a_twelfth_of_the_processors_is_taken(
    monkeypatch: pytest.MonkeyPatch, processors: int, pause_s: float
):
    pauses = Pauses(monkeypatch, processors)
    pauses.throttle.start()
    assert pauses.work(3) == pytest.approx([pause_s] * 3)


@pytest.mark.parametrize("processors", [12, 64])
def test_many_processors_need_no_pause(monkeypatch: pytest.MonkeyPatch, processors: int):
    pauses = Pauses(monkeypatch, processors)
    pauses.throttle.start()
    assert pauses.work(3) == []


def test_nobody_pauses_before_it_starts_or_after_it_stops(monkeypatch: pytest.MonkeyPatch):
    pauses = Pauses(monkeypatch, 1)
    assert pauses.work(2) == []
    pauses.throttle.start()
    pauses.throttle.stop()
    assert pauses.work(2) == []


def test_stop_ends_a_pause(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(writing, "processors", lambda: 1.0)
    throttle, busy_s = Throttle(), [0.0]
    monkeypatch.setattr(time, "thread_time", lambda: busy_s[0])
    throttle.start()
    busy_s[0] = 1e6
    resting = threading.Thread(target=throttle.pause)
    resting.start()
    throttle.stop()
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
