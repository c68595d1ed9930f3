"""Rests of a save beside training: as long as the processors ask for, and none in a hurry."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import pytest

from shoal.checkpoint.pacing import Pace


class Rests:
    """A thread that is busy for a tenth of a second between rests, on so many processors."""

    def __init__(self, patch: pytest.MonkeyPatch, processors: int) -> None:
        self.busy_s, self.slept_s = 0.0, []
        patch.setattr(time, "thread_time", lambda: self.busy_s)
        patch.setattr(os, "sched_getaffinity", lambda _: range(processors))
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
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(1))
    pace, busy_s = Pace(), [0.0]
    monkeypatch.setattr(time, "thread_time", lambda: busy_s[0])
    pace.begin()
    busy_s[0] = 1e6
    resting = threading.Thread(target=pace.rest)
    resting.start()
    pace.hurry()
    resting.join(60)
    assert not resting.is_alive()
