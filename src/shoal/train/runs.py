"""Whole runs: train with baselines, evaluate again, predict."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from rich.console import Console

from shoal import report
from shoal.checkpoint.loading import load
from shoal.checkpoint.matching import LoadOptions
from shoal.comm.launch import early_control
from shoal.comm.launchers import attempt
from shoal.config import RunConfig, as_first_rank, require_same
from shoal.config.build import AnyModel, RunData, build_parts, open_data
from shoal.config.tree import LogisticSettings
from shoal.data import Batch, Loader
from shoal.errors import ConfigError, DataError
from shoal.metrics import BinaryResult
from shoal.table.spec import MAX_THREADS
from shoal.telemetry import (
    FanOut,
    JsonLines,
    Progress,
    ProgressState,
    ScalarSink,
    Telemetry,
    TensorBoard,
    has_tensorboard,
)
from shoal.train import folder as folders
from shoal.train import summary
from shoal.train.course import Course
from shoal.train.folder import RunFolder
from shoal.train.learner import Learner, contents_of
from shoal.train.loop import Overlap, Watch, judge, train
from shoal.train.observing import RunObserver
from shoal.train.ranks import ALONE, Ranks, gather_ranks, seed_rank
from shoal.train.resuming import LOGISTIC, find_beginning, go_on, job_of
from shoal.train.saving import Saver
from shoal.train.summary import BASE_RATE, RunResult

_PYTHONS_OWN = 10_000  # Python 3.12 begins with some hundred objects set aside


@contextmanager
def old_objects_set_aside() -> Iterator[None]:
    """Leave what exists now out of collections.

    Libraries bring hundreds of thousands of objects that stay for good: to look through them takes
    a tenth of a second, now and then, in the midst of a step. Does nothing where somebody did so
    before.
    """
    if gc.get_freeze_count() > _PYTHONS_OWN:
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


SCHEMA = pa.schema(
    [("prediction", pa.float32()), ("label", pa.float32()), ("event_time_s", pa.int64())]
)


def write_predictions(
    path: Path,
    learner: Learner,
    batches: Iterable[Batch],
    progress: Progress,
    ranks: Ranks = ALONE,
) -> int:
    """Write one row an example, in the order of the batches; returns how many.

    The file appears under its name when it is whole. Over several ranks rank 0 writes, batch by
    batch, what all have predicted of their shares.

    Raises:
        DataError: the file cannot be written.
    """
    if not ranks.leads:
        for batch in batches:
            ranks.gathered(_rows(learner, batch), what="predictions of a batch")
        return 0
    partial, examples = Path(f"{path}.partial"), 0
    try:
        with progress, pq.ParquetWriter(partial, SCHEMA, compression="zstd") as writer:
            for batch in batches:
                mine = _rows(learner, batch)
                every = [mine]
                if ranks.many:
                    every = ranks.gathered(mine, what="predictions of a batch")
                for rows in every:
                    writer.write_batch(rows)
                    examples += rows.num_rows
                if progress.due():
                    progress.show(ProgressState(examples=examples))
            progress.show(ProgressState(examples=examples), final=True)
        partial.replace(path)
    except (OSError, ValueError) as error:  # also a path that no file can have
        raise DataError(
            "file of predictions",
            got=f"{path} ({getattr(error, 'strerror', None) or error})",
            allowed="a path in a folder that exists and can be written",
            remedy="Choose another with --out.",
        ) from error
    finally:
        with suppress(OSError, ValueError):
            partial.unlink()
    return examples


def _rows(learner: Learner, batch: Batch) -> pa.RecordBatch:
    columns = (
        learner.predict(batch).cpu().numpy(),
        batch.labels.float().cpu().numpy(),
        batch.event_times_B.cpu().numpy(),
    )
    arrays = [pa.array(column, field.type) for column, field in zip(columns, SCHEMA, strict=True)]
    return pa.record_batch(arrays, schema=SCHEMA)


Metrics = Mapping[str, Mapping[str, float]]


def run(config: RunConfig, *, console: Console, resume: str | None = None) -> RunResult:
    """Train a model and its baselines, judge them, and write the run folder.

    Under a launcher of several ranks (torchrun, mpirun, srun) all of them train one model. Rank 0
    prints and writes; every rank gets the result.

    Args:
        config: the settings; the same on every rank.
        console: where progress, the table of metrics and the report's path are printed.
        resume: the folder of a run to go on with, or "latest"; None: `config.checkpoint` says.

    Raises:
        ShoalError: wrong settings or data, a model that diverged, a table that is full, a save
            that failed; over several ranks on all of them, with the rank and the step where it
            happened.
    """
    ranks, placed = gather_ranks(config)
    with ranks.together():
        require_same(ranks.votes, config)
        return _run(config, placed, ranks, ranks.console(console), resume)


def _run(
    config: RunConfig, placed: RunConfig, ranks: Ranks, console: Console, resume: str | None
) -> RunResult:
    data, learners = _open(placed, ranks)
    _tell_short(data.train, console)
    events = ranks.leads and _writes_events(config, console)
    examples = len(data.train.source)
    beginning = as_first_rank(
        ranks.votes,
        lambda: find_beginning(config, resume, attempt(), examples),
        what="beginning of the run",
    )
    course = Course(
        learners, Telemetry(), stride=_stride(config, data), ranks=ranks, seed=config.seed
    )
    chain = go_on(config, beginning, learners, course, ranks)
    if chain is not None:
        where = f"{beginning.folder.path}, step {course.steps}"
        console.print(f"going on with {where}", markup=False, highlight=False, soft_wrap=True)
    elif beginning.warm is not None:
        said = f"starting warm from {beginning.warm}"
        console.print(said, markup=False, highlight=False, soft_wrap=True)
    saver = Saver(
        beginning.url,
        config.checkpoint,
        tuple(learners),
        course,
        job=job_of(config, beginning.folder, examples),
        ranks=ranks,
        chain=chain,
    )
    folder, after = beginning.folder, None if chain is None else course.steps
    with ExitStack() as held:
        as_first_rank(ranks.votes, lambda: folders.hold(folder, held), what="hold of a run folder")
        sink = held.enter_context(
            closing(_sinks(config, folder, ranks, events=events, go_on_after=after))
        )
        _train(placed, data, learners, course, saver, (sink, console), ranks)
        result = _judged_run(placed, folder, data, learners, course, (sink, console), ranks)
    if folder.report.is_file():
        _print_path(console, "report", folder.report)
    return result


def evaluate(run: str, overrides: Sequence[str] = (), *, console: Console) -> Metrics:
    """Judge the models of a trained run again and print the table of metrics.

    The run may have been trained by another number of ranks.

    Args:
        run: a run folder, or a config file: then its latest run.
        overrides: changes to the run's settings, say to judge on other data.
        console: where the table is printed.

    Raises:
        ShoalError: no trained run there, or wrong settings or data.
    """
    folder, settings = _found(run, overrides)
    ranks, config = gather_ranks(settings)
    with ranks.together():
        require_same(ranks.votes, settings)
        figures = folder.read_metrics()["models"]
        base_rate = figures.get(BASE_RATE, {}).get("mean_prediction", 0.0)
        data, learners = _open(config, ranks)
        _load(folder, learners, ranks)
        console = ranks.console(console)
        judged = _judge(config, console, data, learners, ranks)
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
        out: the file to write; None puts it into the run folder. Rank 0 writes it.
        console: where progress and the path are printed.

    Returns:
        the file's path.

    Raises:
        ShoalError: no trained run there, wrong settings or data, or a file that cannot be written.
    """
    folder, settings = _found(run, overrides)
    ranks, config = gather_ranks(settings)
    with ranks.together():
        require_same(ranks.votes, settings)
        data, learners = _open(config, ranks)
        _load(folder, learners, ranks)
        console = ranks.console(console)
        file = folder.predictions if out is None else out
        progress = _progress(config, console, "predict", data.evaluation.examples)
        write_predictions(file, learners[0], data.evaluation, progress, ranks)
        _print_path(console, "predictions", file)
        return file


def _found(run: str, overrides: Sequence[str]) -> tuple[RunFolder, RunConfig]:
    """A trained run and its settings, as rank 0 finds them: the latest may change meanwhile."""
    return as_first_rank(early_control(), lambda: folders.find(run, overrides), what="trained run")


def _open(config: RunConfig, ranks: Ranks) -> tuple[RunData, list[Learner]]:
    """The data, and the run's model with the baseline that learns, if it is asked for."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    elif torch.get_num_threads() > MAX_THREADS:
        raise ConfigError(
            "OMP_NUM_THREADS or MKL_NUM_THREADS",
            got=torch.get_num_threads(),
            allowed=f"1..{MAX_THREADS}",
            remedy="Unset it, or set threads.",
        )
    torch.manual_seed(config.seed)
    data = open_data(config, ranks.share)
    models: dict[str, AnyModel] = {config.model.kind: config.model}
    if LOGISTIC in config.baselines:
        models.setdefault(LOGISTIC, LogisticSettings())
    every = {
        name: build_parts(
            config,
            model,
            offered=data.features,
            num_dense=data.num_dense,
            examples=len(data.train.source),
        )
        for name, model in models.items()
    }
    learners = [Learner(name, parts, config, ranks) for name, parts in every.items()]
    ranks.step = lambda: learners[0].steps
    seed_rank(config, ranks)
    return data, learners


def _train(
    config: RunConfig,
    data: RunData,
    learners: Sequence[Learner],
    course: Course,
    saver: Saver,
    output: tuple[ScalarSink, Console],
    ranks: Ranks,
) -> None:
    """Train from where the course is to the end, and save."""
    sink, console = output
    watch = Watch(
        progress=_progress(config, console, "train", data.train.examples),
        telemetry=course.telemetry,
        sink=sink,
        stride=_stride(config, data),
        evict_every_s=config.evict_every_s if learners[0].expires else None,
        observer=RunObserver(config, ranks, learners[0]),
        saves=saver,
    )
    staleness = config.distributed.staleness
    overlap = Overlap(ranks=ranks, staleness=staleness) if ranks.many or staleness else None
    batches = data.train.batches(course.position)
    with old_objects_set_aside(), saver:
        train(learners, batches, config.accumulation, watch, overlap, course)
        saver.finish(model=config.output.save_model)


def _judged_run(
    config: RunConfig,
    folder: RunFolder,
    data: RunData,
    learners: Sequence[Learner],
    course: Course,
    output: tuple[FanOut, Console],
    ranks: Ranks,
) -> RunResult:
    """Judge the trained models, and write and print what the run amounts to."""
    sink, console = output
    recorder = course.recorder
    judged = _judge(config, console, data, learners, ranks)
    metrics = _metrics(config, judged, recorder.base_rate)
    sink.write(learners[0].steps, _eval_scalars(metrics))
    result = _result(folder, metrics, course)
    if ranks.leads:
        page = report.render(summary.build_report(config, result, recorder.curves, judged))
        with sink.giving_way("report.html"):
            folder.write_report(page)
        with sink.giving_way("metrics.json"):
            folder.write_metrics({"name": config.name, **result.as_json()})
    console.print(summary.metric_table(metrics, summary.table_title(judged)))
    console.print(summary.closing_line(result), highlight=False)
    return result


def _tell_short(train: Loader, console: Console) -> None:
    """Say what becomes of a last batch that is too short for the model."""
    if not train.short_examples:
        return
    each = f"the last {train.short_examples} of {len(train.source):,} examples of an epoch"
    becomes = "joins the batch before"
    if train.short == "drop":
        becomes = f"is left out, {train.dropped:,} in all epochs"
    said = f"{each} {becomes}: batch normalisation takes no batch of one (data.last_batch)"
    console.print(said, markup=False, highlight=False, soft_wrap=True)


def _judge(
    config: RunConfig, console: Console, data: RunData, learners: Sequence[Learner], ranks: Ranks
) -> Mapping[str, BinaryResult]:
    progress = _progress(config, console, "judge", data.evaluation.examples)
    return judge(learners, data.evaluation, progress, ranks)


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


def _sinks(
    config: RunConfig, folder: RunFolder, ranks: Ranks, *, events: bool, go_on_after: int | None
) -> FanOut:
    sinks = FanOut()
    if ranks.leads and events:
        sinks.open(lambda: TensorBoard(folder.logs, go_on_after=go_on_after), "TensorBoard logs")
    if ranks.leads and config.logging.jsonl:
        path = folder.logs / "log.jsonl"
        sinks.open(lambda: JsonLines(path, go_on_after=go_on_after), "log.jsonl")
    return sinks


def _metrics(
    config: RunConfig, judged: Mapping[str, BinaryResult], base_rate: float
) -> dict[str, dict[str, float]]:
    metrics = {name: summary.figures(result) for name, result in judged.items()}
    if BASE_RATE in config.baselines:
        any_result = next(iter(judged.values()))
        metrics[BASE_RATE] = summary.base_rate_figures(base_rate, any_result)
    return metrics


def _result(folder: RunFolder, metrics: Metrics, course: Course) -> RunResult:
    recorder = course.recorder
    return RunResult(
        folder=folder.path,
        report=folder.report,
        metrics=metrics,
        rows={table: counts[-1] for table, counts in recorder.curves.rows.items()},
        bytes_total=recorder.row_bytes,
        examples=recorder.total_examples,
        ids=recorder.total_ids,
        steps=course.steps,
        train_s=course.trained_s,
    )


def _eval_scalars(metrics: Metrics) -> dict[str, float]:
    return {
        f"eval/{figure}/{name}": sheet[figure]
        for name, sheet in metrics.items()
        for figure in ("auc", "log_loss", "ne", "calibration")
    }


def _load(folder: RunFolder, learners: Sequence[Learner], ranks: Ranks) -> None:
    """The models as the newest checkpoint has them; what trained them stays there."""
    options = LoadOptions(allow_unknown=frozenset(f"optimizer:{one.name}" for one in learners))
    where = as_first_rank(
        ranks.votes, lambda: folders.checkpoint_of(folder), what="checkpoint of the run"
    )
    assert where is not None, "found before"
    contents = contents_of(learners, trains=False)
    load(where, contents, options=options, collectives=ranks.votes)


def _print_path(console: Console, what: str, path: Path) -> None:
    console.print(f"{what}: {path}", markup=False, highlight=False, soft_wrap=True)
