"""The training loop and the evaluation loop, over whatever yields batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from shoal.data import Batch
from shoal.errors import DataError, describe
from shoal.metrics import BinaryMetrics, BinaryResult
from shoal.telemetry import Progress, ProgressState, ScalarSink, Telemetry
from shoal.train.learner import Learner
from shoal.train.recorder import Recorder

__all__ = ["CALIBRATION_BINS", "Watch", "judge", "train"]

CALIBRATION_BINS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """How a loop is watched.

    Args:
        progress: the bar; telemetry: counters of examples, ids and steps.
        sink: where points of the curves go.
        stride: examples between two points.
        evict_every_s: event seconds between two evictions of expired rows; None evicts never.
    """

    progress: Progress
    telemetry: Telemetry
    sink: ScalarSink
    stride: int
    evict_every_s: int | None = None


def train(
    learners: Sequence[Learner], batches: Iterable[Batch], accumulation: int, watch: Watch
) -> Recorder:
    """Train all learners on the same batches, one pass.

    The first learner is the one that progress and table growth are about.

    Args:
        learners: one or more.
        batches: in the order to train on.
        accumulation: batches per optimizer step.
        watch: what happens beside.

    Raises:
        DataError: no batches.
        InputError: a model diverged.
        NonFiniteGradient: under nan_policy "raise"; tables on a GPU tell at the next point of
            the curves, or when training ends.
    """
    main = learners[0]
    recorder = Recorder([learner.name for learner in learners])
    steps, examples, ids = (watch.telemetry.counter(n) for n in ("steps", "examples", "ids"))
    next_point, evict_at = watch.stride, None
    with watch.progress as progress:
        for window in _windows(batches, accumulation):
            recorder.add(window, {one.name: one.train_step(window) for one in learners})
            steps.add()
            examples.add(sum(batch.labels.numel() for batch in window))
            ids.add(sum(batch.ids.values_N.numel() for batch in window))
            if watch.evict_every_s is not None:
                evict_at = _evict(learners, window, evict_at, watch.evict_every_s)
            if recorder.examples >= next_point:
                _check(learners)
                watch.sink.write(steps.value, _point(recorder, main))
                next_point = recorder.examples + watch.stride
            if progress.due():
                progress.show(_state(recorder, main, ids.value))
        if not recorder.examples:
            raise _no_examples("training")
        _check(learners)
        if not recorder.curves.examples or recorder.curves.examples[-1] < recorder.examples:
            watch.sink.write(steps.value, _point(recorder, main))
        progress.show(_state(recorder, main, ids.value), final=True)
    return recorder


def judge(
    learners: Sequence[Learner], batches: Iterable[Batch], progress: Progress
) -> dict[str, BinaryResult]:
    """Evaluate all learners on the same batches, by name; nothing is inserted or changed.

    Raises:
        DataError: no batches.
    """
    metrics = {one.name: BinaryMetrics(bins=CALIBRATION_BINS) for one in learners}
    examples = 0
    with progress:
        for batch in batches:
            for one in learners:
                metrics[one.name].update(one.predict(batch), batch.labels, batch.weights)
            examples += batch.labels.numel()
            if progress.due():
                progress.show(ProgressState(examples=examples))
        if not examples:
            raise _no_examples("evaluation")
        progress.show(ProgressState(examples=examples), final=True)
    return {name: sheet.compute() for name, sheet in metrics.items()}


def _windows(batches: Iterable[Batch], size: int) -> Iterator[list[Batch]]:
    source = iter(batches)
    while window := list(islice(source, size)):
        yield window


def _check(learners: Sequence[Learner]) -> None:
    for one in learners:
        one.check()


def _point(recorder: Recorder, main: Learner) -> dict[str, float]:
    return recorder.point(main.rows_by_table())


def _state(recorder: Recorder, main: Learner, ids: int) -> ProgressState:
    loss, auc = recorder.figures()
    return ProgressState(
        examples=recorder.examples,
        ids=ids,
        loss=loss[main.name],
        auc=auc[main.name],
        rows=main.rows,
        row_bytes=main.row_bytes,
    )


def _evict(
    learners: Sequence[Learner], window: Sequence[Batch], due_s: int | None, every_s: int
) -> int:
    now_s = max(batch.event_time_s for batch in window)
    if due_s is not None and now_s >= due_s:
        for one in learners:
            one.tables.shard.evict(now_s)
    return now_s + every_s if due_s is None or now_s >= due_s else due_s


def _no_examples(what: str) -> DataError:
    return DataError(
        describe(
            f"{what} examples",
            got=0,
            allowed="at least one",
            remedy="Check data.split and the files of data.source.",
        )
    )
