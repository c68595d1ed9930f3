"""Whole runs: train with baselines, judge again, predict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

import torch
from rich.console import Console

from shoal import checkpoint, report
from shoal.config import RunConfig
from shoal.config.build import AnyModel, build_parts
from shoal.config.data import RunData, open_data
from shoal.config.tree import LogisticSettings
from shoal.metrics import BinaryResult
from shoal.table.factory import resolve_device
from shoal.telemetry import (
    FanOut,
    JsonLines,
    Progress,
    ScalarSink,
    Telemetry,
    TensorBoard,
    has_tensorboard,
)
from shoal.train import folder as folders
from shoal.train import summary
from shoal.train.folder import RunFolder
from shoal.train.learner import Learner
from shoal.train.loop import Watch, judge, train
from shoal.train.predictions import write_predictions
from shoal.train.summary import BASE_RATE, RunResult

__all__ = ["evaluate", "predict", "run"]

LOGISTIC = "logistic"

Metrics = Mapping[str, Mapping[str, float]]


def run(config: RunConfig, *, console: Console) -> RunResult:
    """Train a model and its baselines, judge them, and write the run folder.

    Args:
        config: the settings.
        console: where progress, the table of metrics and the report's path are printed.

    Raises:
        ShoalError: wrong settings or data, a model that diverged, a table that is full.
    """
    data, learners = _open(config)
    events = _writes_events(config, console)
    folder = folders.create(config)
    with closing(_sinks(config, folder, events=events)) as sink:
        result = _train_and_judge(config, folder, data, learners, (sink, console))
    if config.output.save_model:
        _save(folder, learners)
    _print_path(console, "report", folder.report)
    return result


def evaluate(run: str, overrides: Sequence[str] = (), *, console: Console) -> Metrics:
    """Judge the models of a trained run again and print the table of metrics.

    Args:
        run: a run folder, or a config file: then its latest run.
        overrides: changes to the run's settings, say to judge on other data.
        console: where the table is printed.

    Raises:
        ShoalError: no trained run there, or wrong settings or data.
    """
    folder, config = folders.find(run, overrides)
    base_rate = folder.read_metrics()["models"].get(BASE_RATE, {}).get("mean_prediction", 0.0)
    data, learners = _open(config)
    _load(folder, learners)
    judged = _judge(config, console, data, learners)
    metrics = _metrics(config, judged, base_rate)
    console.print(summary.metric_table(metrics, summary.table_title(judged)))
    return metrics


def predict(
    run: str, overrides: Sequence[str] = (), *, out: Path | None = None, console: Console
) -> Path:
    """Write the predictions of a trained run's model for its evaluation examples as Parquet.

    Args:
        run: a run folder, or a config file: then its latest run.
        overrides: changes to the run's settings, say to predict other data.
        out: the file to write; None puts it into the run folder.
        console: where progress and the path are printed.

    Returns:
        the file's path.

    Raises:
        ShoalError: no trained run there, wrong settings or data, or a file that cannot be written.
    """
    folder, config = folders.find(run, overrides)
    data, learners = _open(config)
    _load(folder, learners)
    file = folder.predictions if out is None else out
    progress = _progress(config, console, "predict", data.evaluation.examples)
    write_predictions(file, learners[0], data.evaluation, progress)
    _print_path(console, "predictions", file)
    return file


def _open(config: RunConfig) -> tuple[RunData, list[Learner]]:
    """The data, and the run's model with the baseline that learns, if it is asked for."""
    # The folder keeps "auto", so that a run may be judged where there is no GPU.
    config = config.model_copy(update={"device": resolve_device(config.device)})
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)
    data = open_data(config)
    models: dict[str, AnyModel] = {config.model.kind: config.model}
    if LOGISTIC in config.baselines:
        models.setdefault(LOGISTIC, LogisticSettings())
    every = {
        name: build_parts(config, model, offered=data.features, num_dense=data.num_dense)
        for name, model in models.items()
    }
    return data, [Learner(name, parts, config) for name, parts in every.items()]


def _train_and_judge(
    config: RunConfig,
    folder: RunFolder,
    data: RunData,
    learners: Sequence[Learner],
    output: tuple[ScalarSink, Console],
) -> RunResult:
    sink, console = output
    telemetry = Telemetry()
    watch = Watch(
        progress=_progress(config, console, "train", data.train.examples),
        telemetry=telemetry,
        sink=sink,
        stride=_stride(config, data),
        evict_every_s=config.evict_every_s if learners[0].expires else None,
    )
    with telemetry.timer("train"):
        recorder = train(learners, data.train, config.accumulation, watch)
    judged = _judge(config, console, data, learners)
    metrics = _metrics(config, judged, recorder.base_rate)
    sink.write(learners[0].steps, _eval_scalars(metrics))
    result = _result(folder, metrics, learners[0], telemetry)
    folder.write_metrics({"name": config.name, **result.as_json()})
    report.write(folder.report, summary.build_report(config, result, recorder.curves, judged))
    console.print(summary.metric_table(metrics, summary.table_title(judged)))
    console.print(summary.closing_line(result), highlight=False)
    return result


def _judge(
    config: RunConfig, console: Console, data: RunData, learners: Sequence[Learner]
) -> Mapping[str, BinaryResult]:
    progress = _progress(config, console, "judge", data.evaluation.examples)
    return judge(learners, data.evaluation, progress)


def _progress(config: RunConfig, console: Console, title: str, total: int | None) -> Progress:
    return Progress(console, title, total, plain_interval_s=config.logging.plain_interval_s)


def _stride(config: RunConfig, data: RunData) -> int:
    return max(1, data.train.examples // config.logging.points)


def _writes_events(config: RunConfig, console: Console) -> bool:
    wanted = config.logging.tensorboard
    if wanted == "auto" and not has_tensorboard():
        console.print("no TensorBoard logs: pip install 'shoal\\[tensorboard]' to get them")
        return False
    return bool(wanted)


def _sinks(config: RunConfig, folder: RunFolder, *, events: bool) -> ScalarSink:
    sinks: list[ScalarSink] = []
    if events:
        sinks.append(TensorBoard(folder.logs))
    if config.logging.jsonl:
        sinks.append(JsonLines(folder.logs / "log.jsonl"))
    return FanOut(*sinks)


def _metrics(
    config: RunConfig, judged: Mapping[str, BinaryResult], base_rate: float
) -> dict[str, dict[str, float]]:
    metrics = {name: summary.figures(result) for name, result in judged.items()}
    if BASE_RATE in config.baselines:
        any_result = next(iter(judged.values()))
        metrics[BASE_RATE] = summary.base_rate_figures(base_rate, any_result)
    return metrics


def _result(
    folder: RunFolder, metrics: Metrics, learner: Learner, telemetry: Telemetry
) -> RunResult:
    return RunResult(
        folder=folder.path,
        report=folder.report,
        metrics=metrics,
        rows=learner.rows_by_table(),
        bytes_total=learner.row_bytes,
        examples=telemetry.counter("examples").value,
        ids=telemetry.counter("ids").value,
        steps=telemetry.counter("steps").value,
        train_s=telemetry.timer("train").total_s,
    )


def _eval_scalars(metrics: Metrics) -> dict[str, float]:
    return {
        f"eval/{figure}/{name}": sheet[figure]
        for name, sheet in metrics.items()
        for figure in ("auc", "log_loss", "ne", "calibration")
    }


def _save(folder: RunFolder, learners: Sequence[Learner]) -> None:
    checkpoint.save(
        folder.model,
        shards={learner.name: learner.tables.shard for learner in learners},
        modules={learner.name: learner.module for learner in learners},
        step=learners[0].steps,
    )


def _load(folder: RunFolder, learners: Sequence[Learner]) -> None:
    checkpoint.load(
        folder.model,
        shards={learner.name: learner.tables.shard for learner in learners},
        modules={learner.name: learner.module for learner in learners},
    )


def _print_path(console: Console, what: str, path: Path) -> None:
    console.print(f"{what}: {path}", markup=False, highlight=False, soft_wrap=True)
