"""The course of a run: bad input, evaluations on the way, the best model, early stops, rates."""

from __future__ import annotations

import io
import json
import math
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from rich.console import Console

from shoal import EmbeddingCollection, config, train
from shoal.checkpoint import Contents, LoadOptions, load
from shoal.comm import get_sync_run_hooks
from shoal.config.build import build_parts, build_tables
from shoal.errors import ConfigError, DataError
from shoal.metrics import grouped_auc, log_loss
from shoal.sync.checkpoints import load_module
from shoal.train.folder import RunFolder, checkpoint_of

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


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("left", [0, 1, 2])
def test_a_batch_that_quarantine_leaves_one_row_does_not_end_batch_normalisation(
    left: int, data: Path
):
    spoil(data, list(range(32 - left)))
    normed = {"kind": "deepfm", "hidden": [4], "batch_norm": True}
    result, out = run(settings(data, data={"quarantine": str(data / "bad")}, model=normed))
    assert (result.examples, result.steps) == (ROWS - 32 + left * (left > 1), ROWS // 32)
    assert ("left out: 1 more example of training" in out) == (left == 1)
    assert math.isfinite(result.metrics["deepfm"]["log_loss"])


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


def test_evaluations_on_the_way_show_every_task(data: Path):
    path = data / "rows.parquet"
    table = pq.read_table(path)
    pq.write_table(table.append_column("z", pa.array(1 - table["y"].to_numpy())), path)
    shared = {"model": {"kind": "mmoe"}, "source": {"label": ["y", "z"]}}
    result, out = run(settings(data, **shared, eval={"every_steps": 20}))
    shown = re.findall(r"^step 20 (\w+): auc ([\d.]+)", out, flags=re.MULTILINE)
    assert [(task, float(auc)) for task, auc in shown] == [
        (task, pytest.approx(result.metrics[f"mmoe/{task}"]["auc"], abs=1e-4)) for task in "yz"
    ]
    points = (result.folder / "logs" / "log.jsonl").read_text()
    assert all(f"eval/auc/mmoe/{task}" in points for task in "yz")


def steps_of(out: str) -> dict[int, float]:
    """Step -> AUC of the evaluations that a run printed."""
    found = re.findall(r"^step (\d+): auc ([\d.]+)", out, flags=re.MULTILINE)
    return {int(step): float(value) for step, value in found}


def dense_of(result: train.RunResult) -> bytes:
    return b"".join(
        path.read_bytes() for path in sorted((result.folder / "checkpoints").rglob("*.distcp"))
    )


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 1])
def test_evaluations_on_the_way_change_no_bit_of_training(data: Path, staleness: int):
    model = {"kind": "deepfm", "hidden": [4], "dropout": 0.2}
    more = {"model": model, "distributed": {"staleness": staleness}}
    plain, _ = run(settings(data, **more))
    watched, out = run(settings(data, **more, eval={"every_steps": 6}))
    assert list(steps_of(out)) == [6, 12, 18]
    assert watched.metrics == plain.metrics
    assert dense_of(watched) == dense_of(plain)
    lines = (watched.folder / "logs" / "log.jsonl").read_text().splitlines()
    log = [json.loads(line) for line in lines]
    assert [line["step"] for line in log if "eval/auc/deepfm" in line] == [6, 12, 18, 20]


DIVERGES = {"kind": "sgd", "lr": {"kind": "piecewise", "boundaries": [30], "values": [0.1, 60]}}


@pytest.mark.slow
@pytest.mark.parametrize("metric", ["auc", "log_loss"])
def test_the_best_checkpoint_stays_and_training_stops_early(data: Path, metric: str):
    made = settings(
        data,
        data={"epochs": 9},
        dense_optimizer=DIVERGES,
        eval={"every_steps": 10, "early_stop": {"metric": metric, "patience": 3}},
        checkpoint={"keep_best": metric, "keep_full": 1, "every_steps": 5, "full_every": 1},
    )
    result, out = run(made)
    evaluated = steps_of(out)
    stopped = max(evaluated)
    assert f"stopped early after step {stopped}" in out
    assert (result.steps, stopped % 10) == (stopped, 0)
    assert stopped < 180
    best = json.loads((result.folder / "best.json").read_text())
    assert best["step"] == stopped - 30
    assert best["metric"] == metric
    if metric == "auc":
        assert best["value"] == pytest.approx(max(evaluated.values()), abs=1e-4)
    names = {path.name for path in (result.folder / "checkpoints").glob("step-*")}
    assert names == {best["checkpoint"], f"step-{stopped:012d}-full"}
    # The best is what is evaluated and predicted with; training continues from the newest.
    again = train.evaluate(str(result.folder), console=Console(quiet=True))
    assert again["deepfm"][metric] == pytest.approx(best["value"], abs=1e-9)
    assert result.metrics["deepfm"][metric] != again["deepfm"][metric]


@pytest.mark.slow
def test_a_run_that_resumes_remembers_its_best(data: Path):
    def made(epochs: int) -> config.RunConfig:
        return settings(
            data,
            data={"epochs": epochs},
            dense_optimizer=DIVERGES,
            eval={"every_steps": 10, "early_stop": {"metric": "auc", "patience": 4}},
            checkpoint={"keep_best": "auc", "keep_full": 1},
        )

    whole, out = run(made(9))
    part, first = run(made(2))
    resumed, second = run(made(9), resume=str(part.folder))
    assert steps_of(first) | steps_of(second) == steps_of(out)
    assert resumed.steps == whole.steps
    one, other = (json.loads((own.folder / "best.json").read_text()) for own in (whole, resumed))
    assert one == other
    assert (resumed.folder / "checkpoints" / one["checkpoint"]).is_dir()


@pytest.mark.slow
def test_a_run_that_stopped_early_takes_no_step_when_it_resumes(data: Path):
    early = {"every_steps": 5, "early_stop": {"metric": "auc", "patience": 2, "least": 1.0}}
    made = settings(data, eval=early, checkpoint={"keep_best": "auc"})
    stopped, _ = run(made)
    best = (stopped.folder / "best.json").read_text()
    resumed, out = run(made, resume=str(stopped.folder))
    assert (stopped.steps, resumed.steps) == (15, 15)
    assert "stopped early after step 15" in out
    assert resumed.metrics == stopped.metrics
    assert (stopped.folder / "best.json").read_text() == best


@pytest.mark.slow
def test_a_run_that_resumes_keeps_a_best_that_its_checkpoint_does_not_know(data: Path):
    """The last model was saved before it was found to be the best; then the run diverges."""

    def made(epochs: int) -> config.RunConfig:
        return settings(
            data,
            data={"epochs": epochs},
            dense_optimizer={**DIVERGES, "lr": {**DIVERGES["lr"], "boundaries": [20]}},
            eval={"every_steps": 11},
            checkpoint={"keep_best": "log_loss", "every_steps": 20, "full_every": 1}
            | {"background": False, "keep_full": 1},
        )

    part, _ = run(made(1))
    best = json.loads((part.folder / "best.json").read_text())
    assert best["step"] == 20
    run(made(3), resume=str(part.folder))
    assert json.loads((part.folder / "best.json").read_text()) == best
    assert (part.folder / "checkpoints" / best["checkpoint"]).is_dir()


@pytest.mark.slow
def test_a_run_that_resumes_names_the_best_again(data: Path):
    made = settings(data, eval={"every_steps": 20}, checkpoint={"keep_best": "log_loss"})
    part, _ = run(made)
    best = (part.folder / "best.json").read_text()
    (part.folder / "best.json").unlink()
    run(made, resume=str(part.folder))
    assert (part.folder / "best.json").read_text() == best


@pytest.mark.slow
def test_another_metric_begins_another_record(data: Path):
    def made(epochs: int, metric: str) -> config.RunConfig:
        early = {"metric": metric, "patience": 9}
        return settings(
            data,
            data={"epochs": epochs},
            eval={"every_steps": 10, "early_stop": early},
            checkpoint={"keep_best": metric},
        )

    part, _ = run(made(1, "ne"))
    run(made(2, "auc"), resume=str(part.folder))
    best = json.loads((part.folder / "best.json").read_text())
    assert best["metric"] == "auc"
    assert best["step"] > 20


def test_a_last_model_that_is_the_best_is_kept(data: Path):
    made = settings(data, eval={"every_steps": 1000}, checkpoint={"keep_best": "log_loss"})
    result, _ = run(made)
    best = json.loads((result.folder / "best.json").read_text())
    assert (best["step"], best["value"]) == (20, result.metrics["deepfm"]["log_loss"])
    assert len(list((result.folder / "checkpoints").glob("step-*"))) == 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"eval": {"early_stop": "auc"}}, "eval.every_steps with"),
        ({"checkpoint": {"keep_best": "auc"}}, "eval.every_steps with"),
        ({"eval": {"every_steps": 1, "early_stop": "gauc"}}, "data.source.group"),
        ({"eval": {"every_steps": 1, "early_stop": "f1"}}, "early_stop"),
        (
            {
                "eval": {"every_steps": 1},
                "checkpoint": {"keep_best": "auc"},
                "distributed": {"path": "ps"},
            },
            "rows are on servers",
        ),
    ],
)
def test_what_early_stops_and_best_models_need(data: Path, changes: dict[str, Any], words: str):
    with pytest.raises(ConfigError, match=words):
        settings(data, **changes)


EPOCHS = {"kind": "by_epoch", "rate": {"kind": "exponential", "initial": 0.2, "gamma": 0.1}}
STEPS = {"kind": "piecewise", "boundaries": [20, 40], "values": [0.2, 0.02, 0.002]}


@pytest.mark.slow
def test_rates_by_epoch_are_those_of_its_steps(data: Path):
    found = []
    for lr in (EPOCHS, STEPS):
        table = {"dim": 2, "optimizer": {"kind": "adagrad", "lr": lr}}
        made = settings(
            data,
            data={"epochs": 3},
            tables={"default": table},
            dense_optimizer={"lr": lr},
        )
        found.append(run(made)[0].metrics["deepfm"])
    assert found[0] == pytest.approx(found[1], rel=1e-6)


def test_patterns_of_tables_give_their_settings(data: Path):
    def specs(**tables: Any) -> list[tuple[str, int, str]]:
        made = settings(data, tables=tables)
        return [
            (spec.name, spec.dim, spec.segments[-1].optimizer.kind) for spec in build_tables(made)
        ]

    sgd = {"optimizer": {"kind": "sgd", "lr": 0.1}}
    assert specs(default={"dim": 2}, **{"i*": sgd}) == [("item", 3, "sgd"), ("user", 3, "adagrad")]
    both = specs(**{"u*": {"dim": 3}, "*": {"dim": 3, **sgd}, "item": {"dim": 3}})
    assert both == [("item", 4, "adagrad"), ("user", 4, "adagrad")]
    with pytest.raises(ConfigError, match="x\\*"):
        specs(**{"x*": sgd})


class Switches:
    """A hook that looks at torch's switch for deterministic algorithms."""

    def __init__(self) -> None:
        self.seen: set[bool] = set()

    def begin(self, module: torch.nn.Module) -> None:
        self.after_step(0)

    def after_step(self, step: int) -> None:
        self.seen.add(torch.are_deterministic_algorithms_enabled())


def test_deterministic_and_tf32_reach_torch(data: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    hook = Switches()
    try:
        run(settings(data, deterministic=True, tf32=True), hooks=[hook])
        assert torch.backends.cuda.matmul.allow_tf32
        assert torch.backends.cudnn.allow_tf32
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
    assert hook.seen == {True}
    assert not torch.are_deterministic_algorithms_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


@pytest.mark.slow
def test_an_average_of_dense_weights_is_what_predicts(data: Path):
    lr = {"kind": "sgd", "lr": 0.5}
    plain, _ = run(settings(data, dense_optimizer=lr))
    last, _ = run(settings(data, dense_optimizer={**lr, "ema": 0.0}))
    assert last.metrics == plain.metrics  # a decay of 0 is the last weights
    averaged, _ = run(settings(data, dense_optimizer={**lr, "ema": 0.9}))
    assert dense_of(averaged) == dense_of(plain)  # training is as it was
    assert averaged.metrics["deepfm"]["log_loss"] != plain.metrics["deepfm"]["log_loss"]
    again = train.evaluate(str(averaged.folder), console=Console(quiet=True))
    assert again["deepfm"] == averaged.metrics["deepfm"]
    found = train.predict(str(averaged.folder), console=Console(quiet=True))
    labels, shown = (pq.read_table(found)[name].to_numpy() for name in ("label", "prediction"))
    assert log_loss(torch.tensor(shown), torch.tensor(labels)) == pytest.approx(
        averaged.metrics["deepfm"]["log_loss"], rel=1e-6
    )


@pytest.mark.slow
def test_a_run_that_resumes_continues_its_average(data: Path):
    def made(epochs: int, **more: Any) -> config.RunConfig:
        return settings(data, data={"epochs": epochs}, dense_optimizer={"ema": 0.95}, **more)

    whole, _ = run(made(2))
    part, _ = run(made(1))
    resumed, _ = run(made(2), resume=str(part.folder))
    assert resumed.metrics == whole.metrics
    warm, _ = run(made(1, checkpoint={"warm_start": str(part.folder)}))
    assert warm.metrics["deepfm"]["auc"] > 0.6


def test_servers_and_exports_take_the_average(data: Path):
    result, _ = run(settings(data, dense_optimizer={"kind": "sgd", "lr": 0.5, "ema": 0.9}))
    made = settings(data)
    url = checkpoint_of(RunFolder(result.folder))
    assert url is not None
    parts = [build_parts(made) for _ in range(2)]
    load_module(url, "deepfm", parts[0].module)
    names = frozenset({"optimizer:deepfm"})
    options = LoadOptions(tables=(), state=False, allow_unknown=names)
    found = load(url, Contents(modules={"deepfm": parts[1].module}), options=options)
    average = found.state["run_state"]["learners"]["deepfm"]["average"]
    raw = dict(parts[1].module.named_parameters())
    for name, parameter in parts[0].module.named_parameters():
        assert torch.equal(parameter, average[name])
        assert not torch.equal(parameter, raw[name])


class Steps:
    """A hook that counts."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.tables = 0

    def begin(self, module: torch.nn.Module) -> None:
        assert not self.seen
        self.tables += sum(isinstance(part, EmbeddingCollection) for part in module.modules())

    def after_step(self, step: int) -> None:
        self.seen.append(step)


@pytest.mark.slow
def test_hooks_of_a_run_are_called(data: Path):
    hook = Steps()
    run(settings(data), hooks=[hook, *get_sync_run_hooks()])
    assert (hook.seen, hook.tables) == (list(range(1, 21)), 1)
    part, _ = run(settings(data, checkpoint={"every_steps": 15, "full_every": 1}))
    more = Steps()
    run(settings(data, data={"epochs": 2}), resume=str(part.folder), hooks=[more])
    assert more.seen == list(range(21, 41))
