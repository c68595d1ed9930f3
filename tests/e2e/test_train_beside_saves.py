"""A run beside its saves: a save that is late hurries, and steps meet no old objects."""

from __future__ import annotations

import gc
import io
import sys
from pathlib import Path

import pytest
from rich.console import Console

from shoal import config, train
from shoal.checkpoint import CheckpointStore, job_writing
from shoal.checkpoint.pacing import Pace
from shoal.checkpoint.saving import Saving

EXAMPLE = Path(__file__).parents[2] / "examples" / "flights.yaml"
SMALL = (
    "data.split=2013-02-01",
    "data.max_examples=4000",
    "data.batch_size=200",
    "data.epochs=1",
    "eval.max_examples=500",
    "tables.default.dim=4",
    "model.hidden=[16]",
    "logging.tensorboard=false",
    "checkpoint.every_steps=2",
    "checkpoint.full_every=1",
    "checkpoint.keep_full=99",
    "checkpoint.background=true",
)


def test_a_save_that_is_late_hurries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    frozen: list[int] = []
    hurry, callers = Saving.hurry, set[str]()

    def told(self: Saving) -> None:
        callers.add(sys._getframe(1).f_code.co_name)
        hurry(self)

    monkeypatch.setattr(Saving, "hurry", told)

    class Sleeper(Pace):
        """Rests until it is told to hurry."""

        def rest(self) -> None:
            frozen.append(gc.get_freeze_count())
            assert self._hurried.wait(120)

    monkeypatch.setattr(job_writing, "Pace", Sleeper)
    settings = config.load(EXAMPLE, [*SMALL, f"output.dir={tmp_path}"])
    result = train.run(settings, console=Console(file=io.StringIO(), width=100))
    assert len(CheckpointStore(result.folder / "checkpoints").list()) > 1
    assert "at_rest" in callers  # not only whoever waits at the end
    assert min(frozen) > 10_000
    assert gc.get_freeze_count() < 10_000
