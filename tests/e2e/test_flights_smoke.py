"""The quickstart from the command line, on its first weeks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SMALL = [
    "data.split=2013-02-01",
    "eval.max_examples=6000",
    "tables.default.dim=4",
    "model.hidden=[16]",
    "threads=1",
    "logging.plain_interval_s=0.5",
]


def shoal(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SHOAL_")}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    return subprocess.run(
        [sys.executable, "-m", "shoal.cli", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    runs = tmp_path_factory.mktemp("runs")
    done = shoal("train", "examples/flights.yaml", f"output.dir={runs}", *SMALL)
    assert done.returncode == 0, done.stderr
    (folder,) = runs.iterdir()
    return folder, done.stdout


def test_training_beats_guessing(trained: tuple[Path, str]):
    folder, _ = trained
    models = json.loads((folder / "metrics.json").read_text())["models"]
    assert list(models) == ["deepfm", "logistic", "base_rate"]
    assert models["deepfm"]["auc"] > 0.55
    assert models["deepfm"]["examples"] == models["base_rate"]["examples"] > 0


def test_output_is_readable_without_a_terminal(trained: tuple[Path, str]):
    folder, out = trained
    assert "\x1b" not in out
    assert "\r" not in out
    assert "examples/s" in out
    assert "base rate" in out
    assert out.splitlines()[-1] == f"report: {folder / 'report.html'}"


def test_eval_repeats_the_metrics(trained: tuple[Path, str]):
    folder, _ = trained
    again = shoal("eval", str(folder))
    assert again.returncode == 0, again.stderr
    figures = json.loads((folder / "metrics.json").read_text())["models"]["deepfm"]
    assert f"{figures['auc']:.4f}" in again.stdout
    assert f"{figures['log_loss']:.4f}" in again.stdout


def test_predict_writes_parquet(trained: tuple[Path, str], tmp_path: Path):
    folder, _ = trained
    out = tmp_path / "predictions.parquet"
    done = shoal("predict", str(folder), "--out", str(out))
    assert done.returncode == 0, done.stderr
    rows = pq.read_table(out)
    figures = json.loads((folder / "metrics.json").read_text())["models"]["deepfm"]
    assert rows.num_rows == figures["examples"]
    mean = sum(rows["prediction"].to_pylist()) / rows.num_rows
    assert mean == pytest.approx(figures["mean_prediction"], rel=1e-5)
