"""A run that goes on from any of its checkpoints is the run that was never interrupted."""

from __future__ import annotations

import gc
import json
import os
import shutil
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow.ipc as ipc
import pytest
from rich.console import Console

from shoal import config, train
from shoal.checkpoint import CheckpointStore, diff, read_manifest, verify
from shoal.checkpoint.saving import Saving
from shoal.checkpoint.storage import Storage
from shoal.checkpoint.store import claim
from shoal.data import flights
from shoal.errors import CheckpointError, ConfigError
from shoal.train.learner import Learner
from shoal.train.saving import Saver
from support.ranks import run_ranks, start_ranks

pytestmark = [pytest.mark.multiproc, pytest.mark.slow]

SILENT = Console(quiet=True)
READ_ONCE = cache(flights.load)
EXAMPLES, BATCH, EPOCHS, ACCUMULATION = 240, 30, 2, 2
STEPS = EXAMPLES // BATCH * EPOCHS // ACCUMULATION
TABLE = {
    "dim": 4,
    "initializer": {"kind": "uniform", "minval": -0.5, "maxval": 0.5},
    "optimizer": {"kind": "adam", "lr": 0.1},
    "admission": {"threshold": 2},
    "expiry": {"ttl_s": 40_000},
}
BASE: dict[str, Any] = {
    "name": "tiny",
    "seed": 3,
    "threads": 1,
    "data": {
        "source": "flights",
        "max_examples": EXAMPLES,
        "batch_size": BATCH,
        "epochs": EPOCHS,
        "shuffle": "replays",
    },
    "eval": {"max_examples": 100},
    "tables": {"default": TABLE},
    "model": {"kind": "deepfm", "hidden": [4], "dropout": 0.3, "batch_norm": True},
    "dense_optimizer": {"kind": "adam", "lr": 0.01},
    "accumulation": ACCUMULATION,
    "clip_norm": 1.0,
    "evict_every_s": 20_000,
    "logging": {"tensorboard": False},
    "checkpoint": {"every_steps": 1, "full_every": 3, "keep_full": 99, "background": False},
}
# Both drivers, both with rows that are read ahead of updates, and a loss scaler.
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "scaled": {"amp": "float16", "accumulation": 2},
    "stale": {"distributed": {"staleness": 1}},
}


def settings(folder: Path, **changes: Any) -> config.RunConfig:
    checkpoint = {**BASE["checkpoint"], **changes.pop("checkpoint", {})}
    output = {"dir": str(folder), **changes.pop("output", {})}
    return config.from_mapping({**BASE, **changes, "checkpoint": checkpoint, "output": output})


def cut_short(whole: Path, folder: Path, step: int) -> Path:
    """What a run left behind if it was killed a little after a step."""
    shutil.copytree(whole, folder)
    for entry in CheckpointStore(folder / "checkpoints").list():
        if entry.step > step:
            shutil.rmtree(folder / "checkpoints" / entry.name)
    for name in ("metrics.json", "report.html"):
        (folder / name).unlink()
    return folder


def files_of(folder: Path) -> dict[str, Any]:
    """Checksums of all files of all checkpoints, but for those that hold times or random names."""
    return {
        entry.name: [
            (file.path, file.bytes, file.crc32)
            for file in read_manifest(folder / "checkpoints" / entry.name).files
            if file.kind != "state" and not file.path.endswith(".metadata")
        ]
        for entry in CheckpointStore(folder / "checkpoints").list()
    }


def told(folder: Path) -> list[dict[str, Any]]:
    """The log's lines without what time makes of them."""
    lines = (folder / "logs" / "log.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return [{k: v for k, v in row.items() if not k.startswith("time")} for row in rows]


def figures(folder: Path) -> dict[str, Any]:
    sheet = json.loads((folder / "metrics.json").read_text())
    return {k: v for k, v in sheet.items() if not k.endswith("_s") and k != "bytes_per_row"}


def assert_same_run(resumed: Path, whole: Path) -> None:
    assert told(resumed) == told(whole)
    assert figures(resumed) == figures(whole)
    assert files_of(resumed) == files_of(whole)


def rows_of(folder: Path) -> list[Any]:
    """Rows of the newest checkpoint, a full one, without the epochs of their last change."""
    store = CheckpointStore(folder / "checkpoints")
    newest = store.latest()
    assert newest is not None
    assert newest.kind == "full"
    found = []
    for path in sorted((folder / "checkpoints" / newest.name / "rows").iterdir()):
        with ipc.open_file(path) as file:
            found.append(file.read_all().drop_columns(["version"]).to_pydict())
    return found


def run_all(jobs: Sequence[tuple[Path, Mapping[str, Any], str | None]]) -> list[Path]:
    flights.load = READ_ONCE  # most of what such a short run takes
    return [
        train.run(settings(folder, **changes), console=SILENT, resume=resume).folder
        for folder, changes, resume in jobs
    ]


@pytest.mark.parametrize("case", CASES)
def test_one_rank_goes_on_from_any_step(tmp_path: Path, case: str) -> None:
    changes = CASES[case]
    (whole,) = run_all([(tmp_path / "whole", changes, None)])
    kinds = [entry.kind for entry in CheckpointStore(whole / "checkpoints").list()]
    assert kinds.count("full") == -(-STEPS // 3) + (STEPS % 3 != 1)
    assert len(told(whole)) > STEPS
    for step in (1, 4, STEPS - 1) if case == "plain" else (5,):
        left = cut_short(whole, tmp_path / str(step) / "run", step)
        assert run_all([(tmp_path / "other", changes, str(left))]) == [left]
        assert_same_run(left, whole)
    if case == "plain":  # saving changes nothing: where rows lack no updates, also not in pipelines
        never = {**changes, "checkpoint": {"every_steps": None}}
        (unsaved,) = run_all([(tmp_path / "unsaved", never, None)])
        assert rows_of(unsaved) == rows_of(whole)
        assert told(unsaved) == told(whole)


PLACED = {
    "distributed": {"placement": {"default": "row_wise", "tables": {"carrier": "data_parallel"}}}
}
STALE = {"distributed": {"staleness": 1}}
SMOOTH = {"model": {"kind": "deepfm", "hidden": [4]}}
NEVER = {"checkpoint": {"every_steps": None}}
OFTEN = {"checkpoint": {"every_steps": None, "every_s": 1e-6, "background": True}}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs of two ranks, and such that go on from one of their checkpoints or of one rank's."""
    base = tmp_path_factory.mktemp("two")
    every = {
        "whole": PLACED,
        "unsaved": {**PLACED, **NEVER},
        "late": STALE,
        "both": SMOOTH,
        "often": OFTEN,
    }
    jobs = [(base / name, changes, None) for name, changes in every.items()]
    found = dict(zip(every, run_ranks(2, run_all, jobs)[0], strict=True))
    (found["alone"],) = run_all([(base / "alone", SMOOTH, None)])
    again = {
        "whole from 1": (cut_short(found["whole"], base / "1" / "run", 1), PLACED),
        "whole from 6": (cut_short(found["whole"], base / "6" / "run", 6), PLACED),
        "late from 5": (cut_short(found["late"], base / "5" / "run", 5), STALE),
        "more": (cut_short(found["alone"], base / "more" / "run", 5), SMOOTH),
    }
    later = [(base / "other", changes, str(left)) for left, changes in again.values()]
    run_ranks(2, run_all, later)
    found |= {name: left for name, (left, _) in again.items()}
    found["fewer"] = cut_short(found["both"], base / "fewer" / "run", 5)
    run_all([(base / "other", SMOOTH, str(found["fewer"]))])
    return found


def test_two_ranks_go_on_from_any_step(two: dict[str, Path]) -> None:
    """Through a pipeline: ids of later batches have been sent when a save is due."""
    assert rows_of(two["unsaved"]) == rows_of(two["whole"])
    assert_same_run(two["whole from 1"], two["whole"])
    assert_same_run(two["whole from 6"], two["whole"])
    assert_same_run(two["late from 5"], two["late"])


@pytest.mark.parametrize("side", ["fewer", "more"])
def test_other_numbers_of_ranks_go_on_without_loss_or_repeat(
    two: dict[str, Path], side: str
) -> None:
    found, wanted = figures(two[side]), figures(two["alone"])
    for name in ("train_examples", "train_ids", "steps", "rows_by_table"):
        assert found[name] == wanted[name], name
    for model, sheet in wanted["models"].items():
        assert found["models"][model] == pytest.approx(sheet, rel=1e-3), model
    mine, theirs = told(two[side]), told(two["alone"])
    steps = [(row["step"], row.get("examples")) for row in mine]
    assert steps == [(row["step"], row.get("examples")) for row in theirs]
    assert mine[STEPS - 1]["auc/deepfm"] == pytest.approx(theirs[STEPS - 1]["auc/deepfm"], rel=1e-4)
    assert verify(str(two[side] / "checkpoints")).problems == ()


def test_seconds_of_rank_0_decide_for_all(two: dict[str, Path]) -> None:
    entries = CheckpointStore(two["often"] / "checkpoints").list()
    assert len(entries) > 1
    assert (entries[-1].step, entries[-1].kind) == (STEPS, "full")


class Stopped(Exception):
    """What ends a run in its midst."""


def stop_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Learner.apply

    def apply(self: Learner) -> None:
        if self.steps == step:
            raise Stopped
        plain(self)

    monkeypatch.setattr(Learner, "apply", apply)


def test_the_newest_unfinished_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    every_2 = {"checkpoint": {"every_steps": 2, "keep_full": 1}}
    (whole,) = run_all([(tmp_path / "whole", every_2, None)])
    names = [entry.name for entry in CheckpointStore(whole / "checkpoints").list()]
    assert names == ["step-000000000008-full"]  # what was before it is not needed
    with monkeypatch.context() as patch, pytest.raises(Stopped):
        stop_at(5, patch)
        run_all([(tmp_path / "runs", every_2, None)])
    (left,) = (tmp_path / "runs").iterdir()
    leftover = left / "checkpoints" / "step-000000000006-delta"
    leftover.mkdir()
    (leftover / "state.pt").write_text("half")
    assert run_all([(tmp_path / "runs", every_2, "latest")]) == [left]
    assert_same_run(left, whole)
    with pytest.raises(CheckpointError, match="no unfinished run tiny"):
        run_all([(tmp_path / "runs", every_2, "latest")])
    with pytest.raises(CheckpointError, match=r"without config\.yaml"):
        run_all([(tmp_path / "runs", every_2, str(tmp_path))])


def test_a_named_folder_of_checkpoints_is_gone_on_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = {"dir": str(tmp_path / "saved"), "every_steps": 3}
    must = {"checkpoint": {**place, "resume": "must"}}
    with pytest.raises(CheckpointError, match=r"resume=must.*got none in"):
        run_all([(tmp_path / "runs", must, None)])
    assert not (tmp_path / "runs").exists()
    with monkeypatch.context() as patch, pytest.raises(Stopped):
        stop_at(7, patch)
        run_all([(tmp_path / "runs", {"checkpoint": place}, None)])
    (left,) = (tmp_path / "runs").iterdir()
    never = {"checkpoint": {**place, "resume": "never"}}
    with pytest.raises(CheckpointError, match="an empty one"):
        run_all([(tmp_path / "runs", never, None)])
    with pytest.raises(ConfigError) as raised:
        other = {"seed": 4, "data": {**BASE["data"], "batch_size": 20}, "accumulation": 3}
        run_all([(tmp_path / "runs", {"checkpoint": place, **other}, None)])
    for words in ("accumulation=3, not 2", "data.batch_size=20, not 30", "seed=4, not 3"):
        assert words in str(raised.value)
    # Who does the work, and what is told of it, may change.
    free = {**must, "threads": None, "logging": {"tensorboard": False, "points": 3}}
    assert run_all([(tmp_path / "elsewhere", free, None)]) == [left]
    (whole,) = run_all([(tmp_path / "whole", {"checkpoint": {"every_steps": 3}}, None)])
    assert figures(left) == figures(whole)
    judged = train.evaluate(str(left), console=SILENT)
    assert judged["deepfm"]["auc"] == figures(whole)["models"]["deepfm"]["auc"]


def test_a_save_that_is_late_is_throttled_no_more_and_leaves_out_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain, go_on, stopped = Saving._write_all, threading.Event(), threading.Event()
    apply, stop = Learner.apply, Saving.stop_throttling
    set_aside: list[int] = []

    def run(self: Saving, concurrent: bool) -> Any:
        assert go_on.wait(60)
        return plain(self, concurrent)

    def told(self: Saving) -> None:
        stopped.set()
        stop(self)

    def step(self: Learner) -> None:
        set_aside.append(gc.get_freeze_count())
        if self.steps == 5:
            assert stopped.is_set()
            go_on.set()
        apply(self)

    monkeypatch.setattr(Saving, "_write_all", run)
    monkeypatch.setattr(Saving, "stop_throttling", told)
    monkeypatch.setattr(Learner, "apply", step)
    slow = {"checkpoint": {"every_steps": 1, "full_every": 99, "background": True}}
    (folder,) = run_all([(tmp_path, slow, None)])
    names = [entry.name for entry in CheckpointStore(folder / "checkpoints").list()]
    assert names[0] == "step-000000000001-full"
    assert not {f"step-{step:012d}-delta" for step in range(2, 6)} & set(names)
    assert names[-1] == f"step-{STEPS:012d}-full"
    assert "no save after step 5: the one of step-000000000001-full" in caplog.text
    assert "(4 left out so far)" in caplog.text
    assert min(set_aside) > 10_000 > gc.get_freeze_count()  # by the collector, while it trains
    assert verify(str(folder / "checkpoints")).problems == ()


def failing(folder: Path, steps: Sequence[int], allowed: int, background: bool) -> list[Path]:
    """A run in which saves after some steps do not get their rows to the disk of rank 0."""
    plain = Storage.create

    def create(self: Storage, path: str) -> Any:
        late = any(f"step-{step:012d}-" in self.url for step in steps)
        if late and path.startswith("rows/") and os.environ.get("RANK", "0") == "0":
            raise OSError("the disk is gone")
        return plain(self, path)

    Storage.create = create  # type: ignore[method-assign]
    saves = {"every_steps": 2, "background": background, "failures_allowed": allowed}
    try:
        return run_all([(folder, {"checkpoint": {**saves, "full_every": 99}}, None)])
    finally:
        Storage.create = plain  # type: ignore[method-assign]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_continues_after_saves_that_fail(
    tmp_path: Path, ranks: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The next delta goes on top of the one before, and holds what the failed one would have."""

    def saved(name: str, steps: Sequence[int]) -> CheckpointStore:
        if ranks == 1:
            (folder,) = failing(tmp_path / name, steps, 1, False)
        else:
            job = (tmp_path / name, steps, 1, False)
            (folder,) = run_ranks(ranks, failing, *job)[0]
        return CheckpointStore(folder / "checkpoints")

    whole, short = saved("whole", ()), saved("short", (4,))
    assert [entry.step for entry in short.list()] == [2, 6, 8, 8]
    (newest,) = (entry.name for entry in short.list() if entry.step == 6)
    assert short.manifest(newest).parent.folder == "step-000000000002-full"  # type: ignore[union-attr]
    for name in (newest, "step-000000000008-full"):
        found = diff(short.folder(name).url, whole.folder(name).url)
        assert found.same, found
    if ranks == 1:
        assert "a save failed (1 in a row, more than 1 end the run)" in caplog.text
        assert "the disk is gone" in caplog.text


@pytest.mark.parametrize(
    ("steps", "allowed"), [((4, 6, 8), 0), ((4, 6), 1), ((8,), 3)], ids=["first", "second", "last"]
)
def test_too_many_saves_that_fail_end_the_run_and_so_does_the_last(
    tmp_path: Path, steps: Sequence[int], allowed: int
) -> None:
    with pytest.raises(CheckpointError, match="the disk is gone"):
        failing(tmp_path, steps, allowed, False)
    (left,) = tmp_path.iterdir()
    kept = [one.step for one in CheckpointStore(left / "checkpoints").list()]
    assert kept == [step for step in (2, 4, 6) if step < steps[0]]


def test_a_save_that_fails_ends_the_run_on_all_ranks(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="the disk is gone"):
        failing(tmp_path / "one", (4, 6, 8), 0, True)
    outcomes = start_ranks(2, failing, tmp_path / "two", (4, 6, 8), 0, True).outcomes()
    for good, text in outcomes.values():
        assert not good
        assert text != "hung"
        assert "the disk is gone" in text
    for side in ("one", "two"):
        (left,) = (tmp_path / side).iterdir()
        assert [one.step for one in CheckpointStore(left / "checkpoints").list()] == [2]


def test_a_run_goes_on_after_its_chain_lost_a_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain = Saver.on_pause

    def on_pause(self: Saver) -> None:
        if self._run_state.steps == 3:
            shutil.rmtree(next(tmp_path.glob("*/checkpoints/step-000000000001-full")))
        plain(self)

    monkeypatch.setattr(Saver, "on_pause", on_pause)
    (folder,) = run_all([(tmp_path, {"checkpoint": {"full_every": 99}}, None)])
    assert "a full save in place of a delta" in caplog.text
    kinds = {entry.step: entry.kind for entry in CheckpointStore(folder / "checkpoints").list()}
    assert [kinds[step] for step in (2, 3, 4)] == ["delta", "full", "delta"]
    assert verify(folder / "checkpoints" / "step-000000000004-delta").ok


def test_a_run_that_is_being_trained_is_left_alone(tmp_path: Path) -> None:
    (whole,) = run_all([(tmp_path / "whole", {}, None)])
    left = cut_short(whole, tmp_path / "left" / "run", 5)
    log = (left / "logs" / "log.jsonl").read_text()
    other = claim(Storage(left / "logs"))  # as another process has it
    assert other is not None
    with pytest.raises(CheckpointError, match="which another process is training"):
        run_all([(tmp_path / "runs", {}, str(left))])
    assert (left / "logs" / "log.jsonl").read_text() == log
    other.release()
    assert run_all([(tmp_path / "runs", {}, str(left))]) == [left]
    assert_same_run(left, whole)
    assert sorted(one.name for one in (left / "logs").iterdir()) == ["log.jsonl"]
