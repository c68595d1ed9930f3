from __future__ import annotations

import io
import json
import math
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed.checkpoint as dcp
import yaml
from rich.console import Console

from shoal import config, train
from shoal.checkpoint import read_manifest
from shoal.config.build import open_data
from shoal.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    InputError,
    NonFiniteGradient,
)
from shoal.train.learner import Learner

BATCH = 32
TRAIN, EVAL = 1600, 320
TABLE = {
    "dim": 2,
    "initializer": {"kind": "uniform", "minval": -0.5, "maxval": 0.5},
    "optimizer": {"kind": "adagrad", "lr": 0.3},
}
SOURCE = {
    "kind": "synthetic",
    "examples": TRAIN,
    "eval_examples": EVAL,
    "num_features": 3,
    "vocabulary": 20,
    "fresh_share": 0.1,
    "num_dense": 2,
    "signal": 3.0,
}


def settings(folder: Path, **changes: object) -> config.RunConfig:
    base = {
        "name": "tiny",
        "seed": 3,
        "threads": 1,
        "data": {"source": SOURCE, "batch_size": BATCH},
        "tables": {"default": TABLE},
        "model": {"kind": "deepfm", "hidden": [4]},
        "dense_optimizer": {"lr": 0.05},
        "logging": {"points": 5},
        "output": {"dir": str(folder)},
    }
    return config.from_mapping({**base, **changes})


def labels_of(folder: Path, side: str) -> torch.Tensor:
    return torch.cat([batch.labels for batch in getattr(open_data(settings(folder)), side)])


def run(folder: Path, **changes: object) -> tuple[train.RunResult, str]:
    out = io.StringIO()
    console = Console(file=out, width=100)
    return train.run(settings(folder, **changes), console=console), out.getvalue()


def test_a_run_leaves_its_folder(tmp_path: Path):
    result, out = run(tmp_path)
    names = {path.name for path in result.folder.iterdir()}
    assert names == {"config.yaml", "metrics.json", "report.html", "logs", "checkpoints"}
    assert result.folder.name.startswith("tiny-")
    assert str(result.report) in out.splitlines()[-1]
    assert "\x1b" not in out


@pytest.mark.slow
def test_metrics_hold_the_model_and_its_baselines(tmp_path: Path):
    result, out = run(tmp_path)
    written = json.loads((result.folder / "metrics.json").read_text())
    assert list(written["models"]) == ["deepfm", "logistic", "base_rate"]
    assert written["models"]["deepfm"]["auc"] > 0.65
    assert written["models"]["deepfm"]["ne"] < 1
    assert written["models"]["base_rate"]["auc"] == 0.5
    assert written["models"]["deepfm"]["examples"] == EVAL
    assert written["rows"] == sum(written["rows_by_table"].values()) == result.total_rows
    assert (written["train_examples"], written["steps"]) == (TRAIN, TRAIN // BATCH)
    assert f"{written['models']['deepfm']['auc']:.4f}" in out


def test_base_rate_is_that_of_training_judged_on_evaluation(tmp_path: Path):
    result, _ = run(tmp_path)
    rate = labels_of(tmp_path, "train").mean().item()
    labels = labels_of(tmp_path, "evaluation")
    expected = -(labels * math.log(rate) + (1 - labels) * math.log(1 - rate)).mean().item()
    sheet = result.metrics["base_rate"]
    assert sheet["mean_prediction"] == pytest.approx(rate)
    assert sheet["log_loss"] == pytest.approx(expected, rel=1e-6)
    assert sheet["calibration"] == pytest.approx(rate / labels.mean().item())


def test_logs_hold_the_points_and_the_final_figures(tmp_path: Path):
    result, _ = run(tmp_path)
    log = (result.folder / "logs" / "log.jsonl").read_text()
    lines = [json.loads(line) for line in log.splitlines()]
    points = [line for line in lines if "loss/deepfm" in line]
    assert [point["examples"] for point in points] == [320, 640, 960, 1280, 1600]
    assert points[-1]["rows/f0"] == result.rows["f0"] >= points[0]["rows/f0"]
    assert lines[-1]["eval/auc/deepfm"] == pytest.approx(result.metrics["deepfm"]["auc"])


@pytest.mark.slow
def test_event_files_are_written_when_they_can_be(tmp_path: Path):
    pytest.importorskip("tensorboard")
    result, _ = run(tmp_path)
    assert list((result.folder / "logs").glob("events*"))
    without, _ = run(tmp_path, logging={"tensorboard": False, "jsonl": False})
    assert list((without.folder / "logs").iterdir()) == []


def test_asking_for_event_files_without_the_package_fails_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("shoal.telemetry.has_tensorboard", lambda: False)
    with pytest.raises(ConfigError, match=r"shoal\[tensorboard\]"):
        run(tmp_path, logging={"tensorboard": True})


@pytest.mark.slow
def test_the_resolved_config_repeats_the_run(tmp_path: Path):
    first, _ = run(tmp_path)
    resolved = yaml.safe_load((first.folder / "config.yaml").read_text())
    again, _ = run(tmp_path, **resolved)
    assert again.folder != first.folder
    assert again.metrics == first.metrics


@pytest.mark.slow
def test_eval_of_the_folder_repeats_the_metrics(tmp_path: Path):
    result, _ = run(tmp_path)
    again = train.evaluate(str(result.folder), console=Console(file=io.StringIO()))
    assert again == {
        name: pytest.approx(dict(sheet), rel=1e-6) for name, sheet in result.metrics.items()
    }


@pytest.mark.slow
def test_eval_of_a_config_takes_its_latest_run(tmp_path: Path):
    result, _ = run(tmp_path)
    file = tmp_path / "tiny.yaml"
    file.write_text(config.to_yaml(settings(tmp_path)))
    again = train.evaluate(str(file), console=Console(file=io.StringIO()))
    assert again["deepfm"]["auc"] == pytest.approx(result.metrics["deepfm"]["auc"])


@pytest.mark.slow
def test_predict_writes_a_row_per_example(tmp_path: Path):
    result, _ = run(tmp_path)
    out = tmp_path / "p.parquet"
    train.predict(str(result.folder), out=out, console=Console(file=io.StringIO()))
    rows = pq.read_table(out).to_pydict()
    assert len(rows["prediction"]) == EVAL
    assert rows["label"] == labels_of(tmp_path, "evaluation").tolist()
    mean = sum(rows["prediction"]) / EVAL
    assert mean == pytest.approx(result.metrics["deepfm"]["mean_prediction"], rel=1e-5)


@pytest.mark.slow
def test_predict_to_where_no_file_can_be_says_so_before_it_predicts(tmp_path: Path):
    result, _ = run(tmp_path)
    shown = io.StringIO()
    for out in (tmp_path / "no" / "p.parquet", tmp_path):
        with pytest.raises(DataError, match="--out"):
            train.predict(str(result.folder), out=out, console=Console(file=shown))
    assert "examples" not in shown.getvalue()


@pytest.mark.slow
def test_a_run_that_was_not_saved_cannot_be_judged_again(tmp_path: Path):
    result, _ = run(tmp_path, output={"dir": str(tmp_path), "save_model": False})
    with pytest.raises(CheckpointError, match="save_model"):
        train.evaluate(str(result.folder), console=Console(quiet=True))


@pytest.mark.slow
@pytest.mark.parametrize("model", ["logistic", "dlrm", "dcn"])
def test_each_kind_of_model_trains(tmp_path: Path, model: str):
    result, _ = run(tmp_path, model=model)
    assert next(iter(result.metrics)) == model
    assert 0 < result.metrics[model]["log_loss"] < 1.5


@pytest.mark.slow
def test_accumulated_batches_make_the_step_of_one_large_batch(tmp_path: Path):
    """Uneven on purpose: the last window has 48 examples in batches of 32 and 16."""
    source = {**SOURCE, "examples": 112}
    few, _ = run(tmp_path, data={"source": source, "batch_size": 32}, accumulation=2)
    whole, _ = run(tmp_path, data={"source": source, "batch_size": 64})
    assert few.steps == whole.steps == 2
    for name in ("deepfm", "logistic"):
        assert few.metrics[name] == pytest.approx(dict(whole.metrics[name]), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("amp", ["bfloat16", "float16"])
def test_mixed_precision_and_clipping_train(tmp_path: Path, amp: str):
    result, _ = run(tmp_path, amp=amp, clip_norm=1.0)
    assert result.metrics["deepfm"]["auc"] > 0.6


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_tables_of_every_dtype_train(tmp_path: Path, dtype: str):
    result, _ = run(tmp_path, tables={"default": {**TABLE, "dtype": dtype}})
    assert result.metrics["deepfm"]["auc"] > 0.6


@pytest.mark.slow
def test_learning_rate_schedules_reach_the_dense_weights(tmp_path: Path):
    frozen = {"kind": "sgd", "lr": {"kind": "piecewise", "boundaries": [1], "values": [0, 0]}}
    moving = {"kind": "sgd", "lr": {"kind": "piecewise", "boundaries": [1], "values": [0, 0.1]}}
    weights = []
    for dense in (frozen, moving):
        result, _ = run(tmp_path, dense_optimizer=dense, baselines=[])
        (model,) = (result.folder / "checkpoints").iterdir()
        bias = {"module/deepfm/wide.bias": torch.ones(1)}
        with pytest.warns(UserWarning, match="single process"):
            dcp.load(bias, storage_reader=dcp.FileSystemReader(model / "dense"))
        weights.append(bias["module/deepfm/wide.bias"].item())
    assert weights[0] == 0
    assert weights[1] != 0


@pytest.mark.slow
def test_rows_expire_by_event_time(tmp_path: Path):
    source = {**SOURCE, "examples": 4000, "vocabulary": 3000}
    data = {"source": source, "batch_size": 400}
    lasting, _ = run(tmp_path, data=data, baselines=[])
    tables = {"default": {**TABLE, "expiry": {"ttl_s": 1}}}
    fading, _ = run(tmp_path, data=data, tables=tables, evict_every_s=1, baselines=[])
    assert fading.total_rows < lasting.total_rows


def test_rows_are_counted_after_the_last_eviction(tmp_path: Path):
    source = {**SOURCE, "examples": 1200, "vocabulary": 3000}
    data = {"source": source, "batch_size": 400}
    tables = {"default": {**TABLE, "expiry": {"ttl_s": 1}}}
    result, _ = run(tmp_path, data=data, tables=tables, evict_every_s=1, baselines=[])
    (model,) = (result.folder / "checkpoints").iterdir()
    assert result.total_rows == sum(table.rows for table in read_manifest(model).tables)


@pytest.mark.slow
def test_a_window_without_weight_changes_no_weights(tmp_path: Path):
    file = tmp_path / "clicks.csv"
    lines = [f"{k % 5},{k % 2},{int(k >= 8)}" for k in range(16)]
    file.write_text("\n".join(["user,label,weight", *lines]) + "\n")
    columns = {"paths": [str(file)], "eval_paths": [str(file)], "label": "label"}
    source = {"kind": "csv", **columns, "ids": {"user": {}}, "weight": "weight"}
    result, _ = run(tmp_path, data={"source": source, "batch_size": 8}, baselines=[])
    assert math.isfinite(result.metrics["deepfm"]["log_loss"])


def test_examples_that_weigh_nothing_have_a_report_without_figures(tmp_path: Path):
    file = tmp_path / "rows.csv"
    file.write_text("user,label,weight\n" + "u1,1,0\nu2,0,0\n" * 10)
    columns = {"paths": (str(file),), "eval_paths": (str(file),), "label": "label"}
    source = {"kind": "csv", **columns, "ids": {"user": {}}, "weight": "weight"}
    result, _ = run(tmp_path, data={"source": source, "batch_size": 5})
    assert all(math.isnan(sheet["auc"]) for sheet in result.metrics.values())
    assert "NaN" not in (result.folder / "report.html").read_text()


def test_no_examples_to_judge_are_an_error(tmp_path: Path):
    file = tmp_path / "clicks.csv"
    file.write_text("user,label,second\n1,0,10\n2,1,20\n")
    source = {
        "kind": "csv",
        "paths": [str(file)],
        "ids": {"user": {}},
        "label": "label",
        "time": "second",
    }
    with pytest.raises(DataError):
        run(tmp_path, data={"source": source, "split": "2013-11-01"})


def test_a_diverging_model_is_an_error(tmp_path: Path):
    dense = {"kind": "sgd", "lr": 1e30}
    with pytest.raises(InputError):
        run(tmp_path, dense_optimizer=dense, nan_policy="skip")


def test_a_folder_that_cannot_be_made_is_a_config_error(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"output\.dir"):
        run(tmp_path, output={"dir": str(tmp_path / "file")})


@pytest.mark.slow
def test_curves_and_report_cover_the_run(tmp_path: Path):
    result, _ = run(tmp_path)
    page = result.report.read_text()
    assert page.count("<svg") == 4
    for text in ("deepfm", "logistic", "all tables", "Calibration", "hidden:"):
        assert text in page


@pytest.mark.slow
def test_auto_is_the_device_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result, _ = run(tmp_path, device="auto")
    assert "device: auto" in (result.folder / "config.yaml").read_text()
    console = Console(file=io.StringIO(), width=100)
    again = train.evaluate(str(result.folder), ["device=cpu"], console=console)
    assert again["deepfm"]["auc"] == pytest.approx(result.metrics["deepfm"]["auc"])


def test_what_a_gpu_found_ends_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked = []

    def found(learner: Learner) -> None:
        asked.append(learner.steps)
        if learner.steps > 20:
            raise NonFiniteGradient("gradient: got NaN")

    monkeypatch.setattr(Learner, "check", found)
    with pytest.raises(NonFiniteGradient):
        run(tmp_path)
    assert asked == [10, 10, 20, 20, 30]


NORMED = {"kind": "deepfm", "hidden": [4], "batch_norm": True}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("last_batch", "examples", "words"),
    [
        ("merge", 2 * (TRAIN + 1), "the last 1 of 1,601 examples of an epoch joins"),
        ("drop", 2 * TRAIN, "the last 1 of 1,601 examples of an epoch is left out, 2 in all"),
    ],
)
def test_a_last_batch_of_one_does_not_end_batch_normalisation(
    last_batch: str, examples: int, words: str, tmp_path: Path
):
    source = {**SOURCE, "examples": TRAIN + 1}
    data = {"source": source, "batch_size": BATCH, "epochs": 2, "last_batch": last_batch}
    result, out = run(tmp_path, data=data, model=NORMED)
    assert (result.examples, result.steps) == (examples, 2 * TRAIN // BATCH)
    assert out.index(words) < out.index("train ")


def file_settings(folder: Path) -> dict[str, object]:
    """A table whose ids alone tell the label, as integers and as text."""
    numbers = [row % 40 for row in range(400)]
    labels = [float(number % 2) for number in numbers]
    good = [1.0] * 400
    for name, ids in (("integers", numbers), ("text", [str(number) for number in numbers])):
        table = pa.table({"u": ids, "y": labels, "x": good, "w": good})
        pq.write_table(table, folder / f"{name}.parquet")
    bad = {"x": [*good[:-1], math.nan], "w": [*good[:-1], math.inf]}
    for column, values in bad.items():
        table = pa.table({"u": numbers, "y": labels, "x": good, "w": good, column: values})
        pq.write_table(table, folder / f"bad_{column}.parquet")
    integers = str(folder / "integers.parquet")
    source = {"kind": "parquet", "paths": [integers], "eval_paths": [integers], "ids": {"u": {}}}
    source |= {"label": "y", "dense": ["x"], "weight": "w"}
    return {"source": source, "batch_size": BATCH, "epochs": 3}


@pytest.mark.slow
def test_a_model_of_integers_knows_their_text(tmp_path: Path):
    result, _ = run(tmp_path, data=file_settings(tmp_path))
    changed = [f"data.source.eval_paths=[{tmp_path / 'text.parquet'}]"]
    again = train.evaluate(str(result.folder), changed, console=Console(quiet=True))
    assert again["deepfm"]["log_loss"] == result.metrics["deepfm"]["log_loss"] < 0.5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("column", "got", "verb"),
    [
        *(("x", "nan", verb) for verb in ("train", "evaluate", "predict")),
        *(("w", "inf", verb) for verb in ("train", "evaluate")),  # predictions have no weights
    ],
)
def test_numbers_that_are_not_finite_are_blamed_on_their_file(
    column: str, got: str, verb: str, tmp_path: Path
):
    data = file_settings(tmp_path)
    path = tmp_path / f"bad_{column}.parquet"
    words = rf"column '{column}' in row 399 of .*{path.name}: got {got}"
    if verb == "train":
        source = {**data["source"], "paths": [str(path)]}  # type: ignore[dict-item]
        with pytest.raises(DataError, match=words):
            run(tmp_path, data={**data, "source": source})
        return
    result, _ = run(tmp_path, data={**data, "epochs": 1})
    changed = [f"data.source.eval_paths=[{path}]"]
    with pytest.raises(DataError, match=words):
        getattr(train, verb)(str(result.folder), changed, console=Console(quiet=True))
