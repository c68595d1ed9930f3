"""A save beside training gives way and rests, until somebody waits for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shoal import _core
from shoal.checkpoint import writing
from shoal.checkpoint.saving import Saving, begin, save
from shoal.checkpoint.store import CheckpointStore
from shoal.checkpoint.writing import Pace
from shoal.errors import CheckpointError
from support.saved_jobs import Job, small_files


class Told(Pace):
    """Counts what it is told, and sleeps for nothing."""

    last: Told

    def __init__(self) -> None:
        super().__init__()
        self.begun = self.rests = 0
        Told.last = self

    def begin(self) -> None:
        self.begun += 1

    def rest(self) -> None:
        self.rests += 1

    @property
    def hurried(self) -> bool:
        return self._hurried.is_set()


@pytest.fixture(autouse=True)
def _told(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(writing, "Pace", Told)
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
    "hurry": lambda saving: saving.hurry(),
    "abort": lambda saving: saving.abort(),
}


@pytest.mark.parametrize("way", WAYS)
def test_it_rests_until_somebody_waits(tmp_path: Path, way: str) -> None:
    saving = begin(tmp_path, job().contents(), step=1, position=1)
    pace = Told.last
    assert not pace.hurried
    while not saving.done:
        time.sleep(0.001)
    assert pace.begun == 1
    assert pace.rests > 1  # for each piece of rows
    assert not pace.hurried
    WAYS[way](saving)
    assert pace.hurried


def test_one_that_is_waited_for_anyway_does_not_rest(tmp_path: Path) -> None:
    save(tmp_path, job().contents(), step=1, position=1)
    assert Told.last.begun == 0


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
