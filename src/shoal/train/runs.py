"""Whole runs: train with baselines, evaluate again, predict."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from rich.console import Console

from shoal import telemetry
from shoal.checkpoint.job_state import average_in
from shoal.checkpoint.loading import load
from shoal.checkpoint.table_match import LoadOptions
from shoal.comm.launch import early_control
from shoal.comm.launch_environment import attempt
from shoal.config import RunConfig, as_first_rank, require_same
from shoal.config.build import RunData, build_parts, open_data
from shoal.data import Batch, Loader
from shoal.errors import ConfigError, DataError
from shoal.metrics import BinaryResult
from shoal.models import LogisticSettings
from shoal.pipeline import RunHook
from shoal.planner import Plan
from shoal.planner.report import limiting
from shoal.planner.topology import show_seconds
from shoal.rules.schedules import settled
from shoal.table.spec import MAX_THREADS
from shoal.telemetry import FanOut, ProgressLine, ProgressState, ScalarSink
from shoal.train import folder as folders
from shoal.train import summary
from shoal.train.course import Course
from shoal.train.folder import RunFolder
from shoal.train.learner import Learner, contents_of
from shoal.train.loop import evaluate_all, train
from shoal.train.observing import RunObserver
from shoal.train.publishing import Publishing, check_publishing, publishing
from shoal.train.ranks import ALONE, Ranks, gather_ranks, scaled_by
from shoal.train.resuming import LOGISTIC, find_beginning, job_of, plan_to_keep, restore
from shoal.train.run_state import RunState
from shoal.train.saving import Saver
from shoal.train.streaming import streaming
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


def write_predictions(
    path: Path,
    learner: Learner,
    batches: Iterable[Batch],
    progress: ProgressLine,
    ranks: Ranks = ALONE,
) -> int:
    """Write one row an example, in the order of the batches; returns how many.

    Columns are the batches' keys, then prediction, label (null where there is none) and
    event_time_s; of several tasks prediction_TASK, label_TASK.

    The file appears under its name when it is whole. Over several ranks rank 0 writes, batch by
    batch, what all have predicted of their shares.

    Raises:
        DataError: the file cannot be written.
    """
    found = (_of_all(_rows(learner, batch), ranks) for batch in batches)
    if not ranks.leads:
        for _ in found:
            pass
        return 0
    partial, examples = Path(f"{path}.partial"), 0
    writer: Any = None
    try:
        with _writing(path):
            if path.is_dir():
                raise ValueError("a folder")
            partial.open("wb").close()
        with progress:
            for every in found:
                with _writing(path):
                    if writer is None:
                        writer = pq.ParquetWriter(partial, every[0].schema, compression="zstd")
                    for rows in every:
                        writer.write_table(rows)
                        examples += rows.num_rows
                if progress.due():
                    progress.show(ProgressState(examples=examples))
            progress.show(ProgressState(examples=examples), final=True)
        with _writing(path):
            if writer is not None:
                writer.close()
            partial.replace(path)
    finally:
        with suppress(OSError, ValueError):
            if writer is not None:
                writer.close()
        with suppress(OSError, ValueError):
            partial.unlink()
    return examples


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:  # also a path that no file can have
        raise DataError(
            "file of predictions",
            got=f"{path} ({getattr(error, 'strerror', None) or error})",
            allowed="a path in a folder that exists and can be written",
            remedy="Choose another with --out.",
        ) from error


def _of_all(rows: pa.Table, ranks: Ranks) -> list[pa.Table]:
    if not ranks.many:
        return [rows]
    # Pickled, a slice of keys would bring all of its row group.
    sent = pa.BufferOutputStream()
    with pa.ipc.new_stream(sent, rows.schema) as stream:
        stream.write_table(rows)
    every = ranks.gathered(sent.getvalue().to_pybytes(), what="predictions of a batch")
    return [pa.ipc.open_stream(one).read_all() for one in every]


def _rows(learner: Learner, batch: Batch) -> pa.Table:
    found = learner.predicted.table(learner.predict(batch).cpu(), batch.labels_BT.cpu())
    found["event_time_s"] = batch.event_times_B.cpu()
    columns: dict[str, Any] = {}
    if batch.keys is not None:
        columns = dict(zip(batch.keys.column_names, batch.keys.columns, strict=True))
    for name, one_B in found.items():  # of predictions NaN stays: the model has diverged
        columns[name] = pa.array(one_B.numpy(), from_pandas=name.startswith("label"))
    return pa.table(columns)


Metrics = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True, slots=True)
class _Opened:
    """A run's data and models on this rank: the run's own, then the baseline that learns.

    config: with the device settled.
    console: where the leading rank prints; a silent one elsewhere.
    """

    config: RunConfig
    ranks: Ranks
    console: Console
    data: RunData
    learners: list[Learner]

    @property
    def stride(self) -> int:
        """Examples between two points of the curves."""
        points = self.config.logging.points
        examples = self.data.train.examples or 100 * points * self.config.data.batch_size
        return max(1, examples // points)

    def progress(self, title: str, examples: int | None) -> ProgressLine:
        """A progress line for so many examples."""
        interval_s = self.config.logging.plain_interval_s
        return ProgressLine(self.console, title, examples, plain_interval_s=interval_s)

    def print(self, line: str) -> None:
        """Print one line as it is."""
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def _deterministic(config: RunConfig) -> Iterator[None]:
    """Have torch's deterministic algorithms, if the run wants them; around all that uses a GPU."""
    before = torch.get_deterministic_debug_mode()
    if config.deterministic:
        # cuBLAS reads it when it starts.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


@contextmanager
def _opened(
    config: RunConfig,
    console: Console,
    previous: Callable[[], Plan | None] = lambda: None,
    *,
    trains: bool = True,
    keys: Sequence[str] | None = None,
) -> Iterator[_Opened]:
    """The data, opened as `open_data` does, and the models, on all ranks, which end together.

    previous: of `Learner`.
    """
    with _deterministic(config), ExitStack() as held:
        ranks, placed = gather_ranks(config)
        held.enter_context(ranks.together())
        require_same(ranks.control, config)
        _set_up(placed)
        data = open_data(placed, ranks.share, ranks.control, samples=trains, keys=keys)
        if isinstance(data.train, Loader):
            held.callback(data.train.close)
        rate_of = partial(
            settled,
            epoch_steps=-(-data.train.most_batches // config.data.epochs // config.accumulation),
            factor=scaled_by(config.distributed.lr_scaling, ranks.world_size),
        )
        models = [config.model]
        if LOGISTIC in config.baselines and config.model.kind != LOGISTIC:
            models.append(LogisticSettings())
        learners = []
        for parts in [build_parts(placed, one, examples=data.train.size) for one in models]:
            learners.append(Learner(parts, placed, ranks, previous, rate_of))
            held.callback(learners[-1].close)
        ranks.step = lambda: learners[0].steps
        if ranks.many:  # models are built alike, but ranks draw different numbers, for dropout say
            torch.manual_seed(config.seed + ranks.rank)
        shown = console if ranks.leads else Console(quiet=True)
        yield _Opened(placed, ranks, shown, data, learners)


def _set_up(config: RunConfig) -> None:
    """Give torch a run's threads, seed and precision."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    elif torch.get_num_threads() > MAX_THREADS:
        what, remedy = "OMP_NUM_THREADS or MKL_NUM_THREADS", "Unset it, or set threads."
        raise ConfigError(what, torch.get_num_threads(), f"1..{MAX_THREADS}", remedy)
    torch.manual_seed(config.seed)
    if config.tf32 is not None:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = config.tf32


def run(
    config: RunConfig, *, console: Console, resume: str | None = None, hooks: Sequence[RunHook] = ()
) -> RunResult:
    """Train a model and its baselines, evaluate them, and write the run folder.

    Under a launcher of several ranks (torchrun, mpirun, srun) all of them train one model. Rank 0
    prints and writes; every rank gets the result.

    Args:
        config: the settings; the same on every rank.
        console: where progress, the table of metrics and the report's path are printed.
        resume: the folder of a run to continue, or "latest"; None: `config.checkpoint` decides.
        hooks: called with the model before the first step, and after each step.

    Raises:
        ShoalError: wrong settings or data, a model that diverged, a table that is full, a save
            that failed; over several ranks on all of them, with the rank and the step where it
            happened.
    """
    with _opened(config, console, lambda: plan_to_keep(config, resume, attempt())) as opened:
        return _run(config, opened, resume, hooks)


def _run(
    config: RunConfig, opened: _Opened, resume: str | None, hooks: Sequence[RunHook]
) -> RunResult:
    """config: as it was given, which the run folder keeps."""
    data, ranks = opened.data, opened.ranks
    check_publishing(config, opened.learners[0])
    _report_short(opened)
    has_events = _has_events(opened)
    examples = data.train.size
    beginning = as_first_rank(
        ranks.control,
        lambda: find_beginning(config, resume, attempt(), examples),
        what="beginning of the run",
    )
    folder = beginning.folder
    run_state = RunState(opened.learners, stride=opened.stride, ranks=ranks, seed=config.seed)
    chain = restore(config, beginning, run_state)
    for learner in opened.learners:
        learner.join()
    after = None
    if beginning.checkpoint is not None:
        after = run_state.steps
        opened.print(f"continuing {folder.path}, step {after}")
    elif beginning.warm is not None:
        opened.print(f"starting warm from {beginning.warm}")
    plan = opened.learners[0].plan
    if plan is not None:
        opened.print(f"plan: {show_seconds(plan.step_s)} a step; {limiting(plan)}")
        if ranks.leads:
            telemetry.replace_text(folder.plan, plan.to_json())
    job = job_of(config, folder, examples, plan)
    saver = Saver(beginning.url, config.checkpoint, run_state, job=job, chain=chain)
    with ExitStack() as held:
        as_first_rank(
            ranks.control, lambda: folders.hold(folder, held), what="hold of a run folder"
        )
        sinks = FanOut()
        if ranks.leads and has_events:
            sinks.open(
                lambda: telemetry.TensorBoard(folder.logs, continue_after=after), "TensorBoard logs"
            )
        if ranks.leads and config.logging.jsonl:
            path = folder.logs / "log.jsonl"
            sinks.open(lambda: telemetry.JsonLines(path, continue_after=after), "log.jsonl")
        held.enter_context(closing(sinks))
        main = opened.learners[0]
        published = held.enter_context(publishing(config, ranks, main, opened.print, chain))
        saver.on_begin = published.saved
        _train(opened, run_state, saver, sinks, published, folder, hooks)
        result = _evaluate_run(opened, folder, run_state, sinks)
    _report_left_out(opened)
    if folder.report.is_file():
        opened.print(f"report: {folder.report}")
    return result


def evaluate(run: str, overrides: Sequence[str] = (), *, console: Console) -> Metrics:
    """Evaluate the models of a trained run again and print the table of metrics.

    The run may have been trained by another number of ranks.

    Args:
        run: a run folder, or a config file: then its latest run.
        overrides: changes to the run's settings, say to evaluate on other data.
        console: where the table is printed.

    Raises:
        ShoalError: no trained run there, or wrong settings or data.
    """
    with _trained(run, overrides, console) as (folder, opened):
        figures = folder.read_metrics()["models"]
        base_rate = figures.get(BASE_RATE, {}).get("mean_prediction", 0.0)
        _, metrics = _evaluate(opened, base_rate)
        return metrics


def predict(
    run: str,
    overrides: Sequence[str] = (),
    *,
    out: Path | None = None,
    keys: Sequence[str] = (),
    console: Console,
) -> Path:
    """Write the predictions of a trained run's model for its evaluation examples as Parquet.

    They need no labels.

    Args:
        run: a run folder, or a config file: then its latest run.
        overrides: changes to the run's settings, say to predict other data.
        out: the file to write; None puts it into the run folder. Rank 0 writes it.
        keys: columns of the data that the file has as they are, before its own.
        console: where progress and the path are printed.

    Returns:
        the file's path.

    Raises:
        ShoalError: no trained run there, wrong settings or data, or a file that cannot be written.
    """
    no_items = [*overrides, "eval.retrieval=null"]
    trained = _trained(run, no_items, console, tuple(dict.fromkeys(keys)))
    with trained as (folder, opened), opened.learners[0].averaged():
        file = folder.predictions if out is None else out
        own = [*opened.learners[0].predicted.names, "event_time_s"]
        for name in keys:
            if name in own:
                allowed = f"other names than {', '.join(own)}, which the file has"
                raise ConfigError("--key", name, allowed, "Leave it out, or rename the column.")
        batches = opened.data.evaluation
        progress = opened.progress("predict", batches.examples)
        write_predictions(file, opened.learners[0], batches, progress, opened.ranks)
        opened.print(f"predictions: {file}")
        return file


@contextmanager
def _trained(
    run: str, overrides: Sequence[str], console: Console, keys: Sequence[str] | None = None
) -> Iterator[tuple[RunFolder, _Opened]]:
    """A trained run with its models as the newest checkpoint has them; keys: of `open_data`."""
    # As rank 0 finds it: the latest may change meanwhile.
    folder, settings = as_first_rank(
        early_control(), lambda: folders.find(run, overrides), what="trained run"
    )
    with _opened(settings, console, trains=False, keys=keys) as opened:
        control, learners = opened.ranks.control, opened.learners
        there = partial(folders.checkpoint_of, folder)
        where = as_first_rank(control, there, what="checkpoint of the run")
        assert where is not None, "found before"
        # What trained the models stays there.
        left = frozenset(f"optimizer:{name}" for one in learners for name in one.optimizer_names)
        contents, options = contents_of(learners, trains=False), LoadOptions(allow_unknown=left)
        found = load(where, contents, options=options, collectives=control)
        for one in learners:
            one.loaded(average_in(found.state, one.name))
        yield folder, opened


def _train(
    opened: _Opened,
    run_state: RunState,
    saver: Saver,
    sink: ScalarSink,
    published: Publishing,
    folder: RunFolder,
    hooks: Sequence[RunHook],
) -> None:
    """Train from where the run_state is to the end, and save."""
    config, data, ranks = opened.config, opened.data, opened.ranks
    staleness = config.distributed.staleness if ranks.many or config.distributed.staleness else None

    def stepped() -> None:
        published.stepped()
        for hook in hooks:
            hook.after_step(run_state.steps)

    def waits() -> None:
        saver.silent()
        published.waits()

    observer = RunObserver(config, ranks, opened.learners[0], on_step=stepped)
    for hook in hooks:
        hook.begin(opened.learners[0].model)
    evaluate = partial(_evaluate_on_the_way, opened, run_state, sink)
    course = Course(config, run_state, saver, evaluate, folder)
    # A pipeline has begun with later batches, and waits for them in a thread of its own.
    told = waits if staleness is None else None
    streamed = streaming(data.train, run_state, ranks, told, saver.overdue)
    with old_objects_set_aside(), saver, streamed:
        train(
            run_state,
            data.train.batches(run_state.position),
            config.accumulation,
            course,
            observer,
            opened.progress("train", data.train.examples or None),
            sink,
            staleness=staleness,
            evict_every_s=config.evict_every_s if opened.learners[0].expires else None,
        )
        if course.stops:
            opened.print(f"stopped early after step {run_state.steps}")
        course.finish()
        saver.finish(model=config.output.save_model)
        published.finish()


def _evaluate_on_the_way(
    opened: _Opened, run_state: RunState, sink: ScalarSink
) -> Mapping[str, float]:
    """Evaluate the model between two steps, which is no time of training."""
    main, batches = opened.learners[0], opened.data.evaluation
    run_state.ended()
    silent = ProgressLine(Console(quiet=True), "evaluate", batches.examples)
    results = evaluate_all([main], batches, silent, opened.ranks, opened.data.catalog)
    main.model.train()
    sheets = {name: summary.shown(summary.figures(one)) for name, one in results.items()}
    sink.write(run_state.steps, _scalars(sheets))
    for name, sheet in sheets.items():
        shown = ", ".join(f"{figure} {value:.4f}" for figure, value in sheet.items())
        task = f" {name.partition('/')[2]}" if len(sheets) > 1 else ""
        opened.print(f"step {run_state.steps}{task}: {shown}")
    run_state.started()
    return next(iter(sheets.values()))


def _scalars(metrics: Metrics) -> dict[str, float]:
    """What is logged of evaluations, by name."""
    return {
        f"eval/{figure}/{name}": value
        for name, sheet in metrics.items()
        for figure, value in summary.shown(sheet).items()
    }


def _evaluate(
    opened: _Opened, base_rate: float
) -> tuple[Mapping[str, BinaryResult], dict[str, dict[str, float]]]:
    """Evaluate the models and print the table of metrics; (results, figures) by model."""
    batches = opened.data.evaluation
    progress = opened.progress("evaluate", batches.examples)
    results = evaluate_all(opened.learners, batches, progress, opened.ranks, opened.data.catalog)
    metrics = {name: summary.figures(result) for name, result in results.items()}
    first = next(iter(results.values()))
    if BASE_RATE in opened.config.baselines:
        metrics[BASE_RATE] = summary.base_rate_figures(base_rate, first)
    title = f"on {first.examples:,} evaluation examples"
    opened.console.print(summary.metric_table(metrics, title))
    return results, metrics


def _evaluate_run(
    opened: _Opened, folder: RunFolder, run_state: RunState, sinks: FanOut
) -> RunResult:
    """Evaluate the trained models, and write and print what the run amounts to."""
    config, recorder = opened.config, run_state.recorder
    results, metrics = _evaluate(opened, recorder.base_rate)
    sinks.write(run_state.steps, _scalars(metrics))
    result = RunResult(
        folder=folder.path,
        report=folder.report,
        metrics=metrics,
        rows={table: counts[-1] for table, counts in recorder.curves.rows.items()},
        bytes_total=recorder.row_bytes,
        examples=recorder.total_examples,
        ids=recorder.total_ids,
        steps=run_state.steps,
        train_s=run_state.trained_s,
    )
    if opened.ranks.leads:
        page = summary.report_of(config, result, recorder.curves, results)
        with sinks.giving_way("report.html"):
            telemetry.replace_text(folder.report, page)
        with sinks.giving_way("metrics.json"):
            folder.write_metrics({"name": config.name, **result.as_json()})
    opened.console.print(summary.closing_line(result), highlight=False)
    return result


def _report_left_out(opened: _Opened) -> None:
    """Print what could not be used, over all ranks."""
    bad, ranks = opened.data.quarantine, opened.ranks
    if bad is None:
        return
    # What all ranks found alike counts once.
    counts = [bad.rows - bad.rows_alike * (not ranks.leads), opened.data.train.emptied]
    rows, emptied = map(int, ranks.total(counts, what="examples left out").tolist())
    if rows or bad.files:
        also = " and in those of other ranks next to it" if ranks.many else ""
        opened.print(f"left out: {rows:,} rows and {bad.files:,} files, named in {bad.path}{also}")
    if emptied:
        what = "example" if emptied == 1 else "examples"
        why = "batch normalisation takes no batch of one"
        opened.print(f"left out: {emptied:,} more {what} of training: {why}")


def _report_short(opened: _Opened) -> None:
    """Print what becomes of a last batch that is too short for the model."""
    train = opened.data.train
    if not train.short_examples:
        return
    each = f"the last {train.short_examples} of {train.size:,} examples of an epoch"
    becomes = "joins the batch before"
    if train.short == "drop":
        becomes = f"is left out, {train.dropped:,} in all epochs"
    why = "batch normalisation takes no batch of one (data.last_batch)"
    opened.print(f"{each} {becomes}: {why}")


def _has_events(opened: _Opened) -> bool:
    wanted = opened.config.logging.tensorboard
    if wanted == "auto" and not telemetry.has_tensorboard():
        hint = "no TensorBoard logs: pip install 'shoal\\[tensorboard]' to get them"
        opened.console.print(hint)
        return False
    return bool(wanted)
