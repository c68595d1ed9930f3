"""A new run starts from what another one, or an import, knows; and goes on from its own."""

from __future__ import annotations

import functools
import json
import logging
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow.ipc as ipc
import pytest
from rich.console import Console

from shoal import config, train
from shoal.checkpoint import CheckpointStore, Manifest
from shoal.data import flights
from shoal.errors import CheckpointError
from support.ranks import run_ranks

pytestmark = pytest.mark.slow

SILENT = Console(quiet=True)
READ_ONCE = cache(flights.load)
STEPS = 6
RULE = {"kind": "adagrad", "initial_accumulator": 1e-6}
TABLE = {"dim": 4, "optimizer": {**RULE, "lr": 0.1}}
BASE: dict[str, Any] = {
    "name": "tiny",
    "seed": 3,
    "threads": 1,
    "data": {"source": "flights", "max_examples": 300, "batch_size": 50},
    "eval": {"max_examples": 200},
    "tables": {"default": TABLE},
    "model": {"kind": "deepfm", "hidden": [4]},
    "dense_optimizer": {"kind": "adam", "lr": 0.01},
    "logging": {"tensorboard": False},
}
# Nothing that was loaded changes.
STILL = {
    "tables": {"default": {"dim": 4, "optimizer": {"kind": "sgd", "lr": 0.0}}},
    "dense_optimizer": {"kind": "sgd", "lr": 0.0},
}


def run(folder: Path, warm: Any = None, **changes: Any) -> Path:
    flights.load = READ_ONCE
    checkpoint = {"warm_start": warm, **changes.pop("checkpoint", {})}
    output = {"dir": str(folder)}
    chosen = config.from_mapping({**BASE, **changes, "checkpoint": checkpoint, "output": output})
    return train.run(chosen, console=SILENT).folder


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("first"))


def figures(folder: Path) -> dict[str, Any]:
    sheet: dict[str, Any] = json.loads((folder / "metrics.json").read_text())
    return sheet


def newest(folder: Path | str) -> Manifest:
    store = CheckpointStore(folder)
    found = store.latest()
    assert found is not None
    return store.manifest(found.name)


def state_sum(folder: Path) -> float:
    """Of all accumulators of rows."""
    total = 0.0
    for path in folder.glob("checkpoints/*/rows/*.arrow"):
        with ipc.open_file(path) as file:
            total += float(file.read_all()["state"].combine_chunks().values.to_numpy().sum())
    return total


def renamed(first: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Features of which the first looks up a table "port", and what that was saved as."""
    tables = [one.name for one in newest(first / "checkpoints").tables]
    features: dict[str, Any] = {name: {} for name in tables}
    return {**features, tables[0]: {"table": "port"}}, {"port": tables[0]}


def test_weights_are_taken_over(first: Path, tmp_path: Path):
    before = figures(first)["models"]
    after = run(tmp_path, {"path": str(first), "state": False}, **STILL)
    assert figures(after)["models"] == before
    assert figures(after)["steps"] == STEPS and newest(after / "checkpoints").step == STEPS
    assert set(newest(after / "checkpoints").last_steps.values()) == {STEPS - 1}
    cold = run(tmp_path / "cold", **STILL)
    assert figures(cold)["models"] != before


def test_state_is_taken_over_if_it_is_wanted(first: Path, tmp_path: Path):
    warm = run(tmp_path / "warm", str(first))
    weights_only = run(tmp_path / "weights", {"path": str(first), "state": False})
    assert state_sum(warm) > 1.2 * max(state_sum(first), state_sum(weights_only))


def test_dense_weights_may_stay_as_they_are(first: Path, tmp_path: Path):
    folder = first / "checkpoints"  # a store, too
    rows = run(tmp_path / "rows", {"path": str(folder), "dense": False, "state": False}, **STILL)
    assert figures(rows)["models"] != figures(first)["models"]
    assert figures(rows)["rows"] == figures(first)["rows"]


def test_settings_of_optimizers_are_the_new_ones(first: Path, tmp_path: Path):
    dense = {"kind": "adam", "lr": 0.0, "weight_decay": 0.0}
    tables = {"default": {"dim": 4, "optimizer": {**RULE, "lr": 0.0}}}
    after = run(tmp_path, str(first), tables=tables, dense_optimizer=dense)
    assert figures(after)["models"] == figures(first)["models"]


def test_a_run_goes_on_from_its_own_checkpoints(
    first: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    saves = {"dir": str(tmp_path / "own"), "every_steps": 2, "background": False}
    with caplog.at_level(logging.INFO, "shoal.train"):
        run(tmp_path, str(first), checkpoint=saves)
        assert "starting warm from" in caplog.text and "continuing" not in caplog.text
        caplog.clear()
        data = {**BASE["data"], "epochs": 2}
        after = run(tmp_path, str(first), checkpoint=saves, data=data)
    assert "continuing from" in caplog.text and "warm" not in caplog.text
    assert figures(after)["steps"] == 2 * STEPS


def test_another_seed_is_said(first: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    run(tmp_path, str(first), seed=4)
    assert "saved with seed 3, these tables have 4" in caplog.text


def test_tables_by_other_names(first: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    features, of_tables = renamed(first)
    names = {f"{m}/{k}": f"{m}/{v}" for m in ("deepfm", "logistic") for k, v in of_tables.items()}
    warm = {"path": str(first), "renames": names, "state": False}
    after = run(tmp_path, warm, features=features, **STILL)
    for model, sheet in figures(first)["models"].items():
        assert figures(after)["models"][model] == pytest.approx(sheet)
    with pytest.raises(CheckpointError, match="'deepfm/port' is not in it"):
        run(tmp_path / "refused", str(first), features=features)
    own = {"deepfm/port": names["deepfm/port"]}
    some = {"path": str(first), "tables": list(own), "renames": own}
    with caplog.at_level(logging.INFO, "shoal.train"):
        run(tmp_path / "some", {**some, "dense": False}, features=features, baselines=[])
    (line,) = [one.message for one in caplog.records if "starting warm" in one.message]
    assert line.count("deepfm/") == 1


def test_baselines_come_and_go(first: Path, tmp_path: Path):
    bare = run(tmp_path / "bare", str(first), baselines=[])
    with_one = run(tmp_path / "with", str(bare))
    assert set(figures(with_one)["models"]) == {"deepfm", "logistic", "base_rate"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tables": {"default": {"dim": 8}}}, "has dim 4 in it, 8 in the model"),
        ({"tables": {"default": {"dim": 4, "optimizer": "adam"}}}, "of adagrad with 4 floats"),
        ({"model": {"kind": "deepfm", "hidden": [5]}}, "has shape"),
        ({"model": {"kind": "dcn"}}, "table 'dcn/.*is not in it"),
    ],
)
def test_what_differs_is_an_error(first: Path, tmp_path: Path, changes: Any, words: str):
    with pytest.raises(CheckpointError, match=words):
        run(tmp_path, str(first), **changes)


def test_a_wrong_path_leaves_no_run_folder(tmp_path: Path):
    with pytest.raises(CheckpointError, match="nowhere, which neither is one nor holds one"):
        run(tmp_path / "runs", str(tmp_path / "nowhere"))
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "config.yaml").write_text("name: x\ndata: {source: flights}\n")
    with pytest.raises(CheckpointError, match="a run without checkpoints"):
        run(tmp_path / "runs", str(empty))
    assert not (tmp_path / "runs").exists()


@pytest.mark.multiproc
def test_on_more_ranks(first: Path, tmp_path: Path):
    warm = {"path": str(first), "state": False}
    run_ranks(2, functools.partial(run, **STILL), tmp_path, warm, timeout_s=240)
    (folder,) = tmp_path.iterdir()
    mine, its = figures(folder)["models"]["deepfm"], figures(first)["models"]["deepfm"]
    assert mine["log_loss"] == pytest.approx(its["log_loss"], rel=1e-6)
