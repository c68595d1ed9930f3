"""A save while training continues gives way and pauses, until somebody waits for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shoal import _core
from shoal.checkpoint import saving
from shoal.checkpoint.saving import Saving, begin, save
from shoal.checkpoint.store import CheckpointStore
from shoal.checkpoint.writing import Throttle
from shoal.errors import CheckpointError
from support.saved_jobs import Job, small_files


class Told(Throttle):
    """Counts what it is told, and never sleeps."""

    last: Told

    def __init__(self) -> None:
        super().__init__()
        self.started = self.pauses = 0
        Told.last = self

    def start(self) -> None:
        self.started += 1

    def pause(self) -> None:
        self.pauses += 1

    @property
    def stopped(self) -> bool:
        return self._stopped.is_set()


@pytest.fixture(autouse=True)
def _told(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(saving, "Throttle", Told)
    with small_files():
        yield


def job() -> Job:
    made = Job()
    made.step()
    return made


WAYS: dict[str, Callable[[Saving], object]] = {
    "wait": lambda saving: saving.wait(),
    "join": lambda saving: saving.join(),
    "cursors": lambda saving: saving.cursors,
    "stop_throttling": lambda saving: saving.stop_throttling(),
    "abort": lambda saving: saving.abort(),
}


@pytest.mark.parametrize("way", WAYS)
def test_it_pauses_until_somebody_waits(tmp_path: Path, way: str) -> None:
    saving = begin(tmp_path, job().contents(), step=1, position=1)
    throttle = Told.last
    assert not throttle.stopped
    while not saving.done:
        time.sleep(0.001)
    assert throttle.started == 1
    assert throttle.pauses > 1  # for each piece of rows
    assert not throttle.stopped
    WAYS[way](saving)
    assert throttle.stopped


def test_one_that_is_waited_for_anyway_does_not_pause(tmp_path: Path) -> None:
    save(tmp_path, job().contents(), step=1, position=1)
    assert Told.last.started == 0


def test_threads_that_cannot_give_way_fail_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = job()

    def refused() -> None:
        raise RuntimeError("niceness is refused")

    with monkeypatch.context() as patch:
        patch.setattr(_core, "give_way", refused)
        with pytest.raises(CheckpointError, match="niceness is refused"):
            begin(tmp_path, made.contents(), step=1, position=1).wait(60)
    begin(tmp_path, made.contents(), step=1, position=1).wait(60)  # nothing is held
    assert len(CheckpointStore(tmp_path).list()) == 1
