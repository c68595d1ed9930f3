"""A run that goes on from any of its checkpoints is the run that was never interrupted."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow.ipc as ipc
import pytest
from rich.console import Console

from shoal import config, train
from shoal.checkpoint import CheckpointStore, read_manifest
from support.ranks import run_ranks

pytestmark = pytest.mark.multiproc

SILENT = Console(quiet=True)
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


def test_two_ranks_go_on_from_any_step(tmp_path: Path) -> None:
    """Through a pipeline: ids of later batches have been sent when a save is due."""
    stale = {"distributed": {"staleness": 1}}
    never = {"checkpoint": {"every_steps": None}}
    jobs = [
        (tmp_path / "whole", PLACED, None),
        (tmp_path / "unsaved", {**PLACED, **never}, None),
        (tmp_path / "stale", stale, None),
    ]
    ((whole, unsaved, late), _) = run_ranks(2, run_all, jobs, timeout_s=100)
    assert rows_of(unsaved) == rows_of(whole)
    left = {step: cut_short(whole, tmp_path / str(step) / "run", step) for step in (1, 6)}
    lag = cut_short(late, tmp_path / "lag" / "run", 5)
    again = [(tmp_path / "other", PLACED, str(path)) for path in left.values()]
    run_ranks(2, run_all, [*again, (tmp_path / "other", stale, str(lag))], timeout_s=100)
    for path in left.values():
        assert_same_run(path, whole)
    assert_same_run(lag, late)
