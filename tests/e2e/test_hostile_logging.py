"""Disks that are full, read-only or gone while a run logs: it warns once, and ends well."""

from __future__ import annotations

import io
import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rich.console import Console

from shoal import config, train
from shoal.checkpoint import verify
from shoal.errors import DataError
from shoal.train.run_state import RunState
from support.mounts import SmallDisk, small_disk

DISK_BYTES = 4 << 20
OVERRIDES = (
    *("logging.points=4", "baselines=[base_rate]", "eval.max_examples=64"),
    *("data.source.examples=64", "data.source.eval_examples=64", "data.source.num_features=2"),
    *("data.source.vocabulary=50", "data.batch_size=16", "model={kind: deepfm, hidden: [4]}"),
)


def settings(folder: Path, *more: str) -> config.RunConfig:
    file = folder / "run.yaml"
    file.write_text("data: {source: {kind: synthetic}}\ntables: {default: {dim: 2}}\n")
    return config.load(file, (*OVERRIDES, *more), environment={})


def full(disk: SmallDisk) -> None:
    disk.leave(0)


def read_only(disk: SmallDisk) -> None:
    disk.read_only(True)


def gone(disk: SmallDisk) -> None:
    for path in disk.at.iterdir():
        shutil.rmtree(path)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path / "disk", DISK_BYTES) as made:
        yield made


@pytest.mark.slow
@pytest.mark.parametrize("tensorboard", [False, True])
@pytest.mark.parametrize("fault", [full, gone])
def test_a_run_outlives_its_logs(
    tmp_path: Path,
    disk: SmallDisk,
    fault: Callable[[SmallDisk], None],
    tensorboard: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    started = RunState.started

    def start(run_state: RunState) -> None:
        started(run_state)
        fault(disk)

    monkeypatch.setattr(RunState, "started", start)
    ours = settings(
        tmp_path,
        f"output.dir={disk.at}",
        f"checkpoint.dir={tmp_path / 'saved'}",
        f"logging.tensorboard={str(tensorboard).lower()}",
    )
    with caplog.at_level(logging.WARNING):
        result = train.run(ours, console=Console(file=io.StringIO()))
    assert result.steps == 4 and 0 <= result.metrics["deepfm"]["auc"] <= 1
    assert verify(tmp_path / "saved").ok
    (warning,) = [record for record in caplog.records if record.name == "shoal.telemetry"]
    assert "The run continues" in warning.getMessage()
    assert "Traceback" not in capfd.readouterr().err
    assert not list(disk.at.rglob("*.new"))


@pytest.mark.parametrize("fault", [full, read_only])
def test_predictions_that_cannot_be_written(
    tmp_path: Path, disk: SmallDisk, fault: Callable[[SmallDisk], None]
) -> None:
    console = Console(file=io.StringIO())
    run = train.run(
        settings(tmp_path, f"output.dir={tmp_path}", "logging.tensorboard=false"), console=console
    )
    fault(disk)
    out = disk.at / "predictions.parquet"
    with pytest.raises(DataError, match=r"file of predictions.*disk/predictions\.parquet"):
        train.predict(str(run.folder), out=out, console=console)
    if fault is read_only:
        disk.read_only(False)
    assert not list(disk.at.glob("predictions*"))


@pytest.mark.slow
@pytest.mark.parametrize("out", ["", "/", ".", "a\0b", "/nowhere/x.parquet", "x" * 300])
def test_predictions_to_places_that_are_none(tmp_path: Path, out: str) -> None:
    console = Console(file=io.StringIO())
    run = train.run(
        settings(tmp_path, f"output.dir={tmp_path}", "logging.tensorboard=false"), console=console
    )
    with pytest.raises(DataError, match="file of predictions"):
        train.predict(str(run.folder), out=Path(out), console=console)


@pytest.mark.parametrize("damage", ['{"step": 1', "[1]\n", "{}\n", "\x00\n", '{"step": "x"}\n'])
def test_a_damaged_log_is_left_out_on_resume(tmp_path: Path, damage: str) -> None:
    from shoal.telemetry import JsonLines

    path = tmp_path / "log.jsonl"
    good = json.dumps({"step": 1, "time_s": 0.5, "loss": 1.0}) + "\n"
    path.write_text(good + damage)
    sink = JsonLines(path, continue_after=5)
    sink.write(2, {"loss": 0.5})
    sink.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("stdout", ["pipe", "/dev/full"])
def test_output_that_nobody_takes(tmp_path: Path, stdout: str) -> None:
    settings(tmp_path)
    command = [sys.executable, "-m", "shoal.cli", "train", str(tmp_path / "run.yaml"), *OVERRIDES]
    command += [f"output.dir={tmp_path}", "logging.tensorboard=false"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    if stdout == "pipe":
        read, write = os.pipe()
        os.close(read)
    else:
        write = os.open(stdout, os.O_WRONLY)
    try:
        done = subprocess.run(
            command, stdout=write, stderr=subprocess.PIPE, env=environment, text=True
        )
    finally:
        os.close(write)
    assert done.returncode == 0 and "Traceback" not in done.stderr
    assert ("output ends here" in done.stderr) == (stdout == "/dev/full")
    (metrics,) = tmp_path.glob("run-*/metrics.json")
    assert json.loads(metrics.read_text())["models"]
