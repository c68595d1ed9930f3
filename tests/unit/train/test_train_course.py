"""The course of a run: bad input, evaluations on the way, the best model, early stops, rates."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from rich.console import Console

from shoal import config, train
from shoal.errors import DataError
from shoal.metrics import grouped_auc

ROWS = 640


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Clicks of users on items that the item and a number explain, a user's group next to them."""
    draw = np.random.default_rng(5)
    item, user, x = draw.integers(0, 9, ROWS), draw.integers(0, 40, ROWS), draw.normal(size=ROWS)
    logit = np.where(item % 2 == 0, 1.5, -1.5) + x
    table = pa.table(
        {
            "item": item,
            "user": user,
            "x": x,
            "y": (draw.random(ROWS) < 1 / (1 + np.exp(-logit))).astype(np.float32),
        }
    )
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=100)
    return tmp_path


def settings(folder: Path, **changes: Any) -> config.RunConfig:
    path = str(folder / "rows.parquet")
    source = {
        "kind": "parquet",
        "paths": [path],
        "eval_paths": [path],
        "ids": {"item": {}, "user": {}},
        "label": "y",
        "dense": ["x"],
        **changes.pop("source", {}),
    }
    base = {
        "name": "course",
        "seed": 3,
        "threads": 1,
        "data": {"source": source, "batch_size": 32, **changes.pop("data", {})},
        "tables": {"default": {"dim": 2, "optimizer": {"kind": "adagrad", "lr": 0.1}}},
        "model": {"kind": "deepfm", "hidden": [4]},
        "baselines": ["base_rate"],
        "logging": {"points": 5, "tensorboard": False},
        "output": {"dir": str(folder / "runs")},
        **changes,
    }
    return config.from_mapping(base)


def run(made: config.RunConfig, **more: Any) -> tuple[train.RunResult, str]:
    out = io.StringIO()
    return train.run(made, console=Console(file=out, width=200), **more), out.getvalue()


def spoil(folder: Path, rows: list[int]) -> None:
    path = folder / "rows.parquet"
    table = pq.read_table(path)
    x = table["x"].to_pylist()
    for row in rows:
        x[row] = float("nan")
    pq.write_table(table.set_column(2, "x", pa.array(x)), path, row_group_size=100)


def test_bad_rows_of_a_run_are_left_out_or_end_it(data: Path):
    bad = [5, 70, 71, 639]
    spoil(data, bad)
    with pytest.raises(DataError, match=r"'x' in row 5 of"):
        run(settings(data))
    file = data / "bad.jsonl"
    result, out = run(settings(data, data={"quarantine": str(file)}))
    assert f"left out: 4 rows and 0 files, named in {file}" in out
    assert [json.loads(line)["row"] for line in file.read_text().splitlines()] == bad
    assert (result.examples, result.metrics["deepfm"]["examples"]) == (ROWS - 4, ROWS - 4)
    few = {"quarantine": {"path": str(file), "most_rows": 3}}
    with pytest.raises(DataError, match=r"bad rows of the data: got 4"):
        run(settings(data, data=few))


def test_auc_by_group_is_an_evaluation_s(data: Path):
    result, out = run(settings(data, source={"group": "user"}))
    sheet = result.metrics["deepfm"]
    assert "GAUC" in out
    assert 0.5 < sheet["gauc"] <= 1
    assert sheet["gauc"] != sheet["auc"]
    assert "gauc" not in result.metrics["base_rate"]
    predictions = train.predict(str(result.folder), console=Console(quiet=True))
    rows = pq.read_table(predictions).to_pydict()
    users = pq.read_table(data / "rows.parquet")["user"].to_numpy()
    found = grouped_auc(
        torch.tensor(rows["prediction"]), torch.tensor(rows["label"]), torch.tensor(users)
    )
    assert sheet["gauc"] == pytest.approx(found.auc, abs=1e-12)
