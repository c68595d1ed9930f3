"""The training loop and the evaluation loop, over whatever yields batches."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from shoal.data import Batch
from shoal.errors import DataError, describe
from shoal.metrics import BinaryMetrics, BinaryResult
from shoal.telemetry import Progress, ProgressState, ScalarSink, Telemetry
from shoal.train.driving import Overlap, overlapping, plainly
from shoal.train.gathering import counted_rows
from shoal.train.learner import Learner
from shoal.train.observing import Observer, Unobserved
from shoal.train.ranks import ALONE, Ranks
from shoal.train.recorder import Recorder

__all__ = ["CALIBRATION_BINS", "Watch", "judge", "train"]

CALIBRATION_BINS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """How a loop is watched.

    Args:
        progress: the bar; telemetry: counters of examples, ids and steps of this rank.
        sink: where points of the curves go.
        stride: examples, over all ranks, between two points.
        evict_every_s: event seconds between two evictions of expired rows; None evicts never.
        observer: sees every step, and has scalars of its own for each point.
    """

    progress: Progress
    telemetry: Telemetry
    sink: ScalarSink
    stride: int
    evict_every_s: int | None = None
    observer: Observer = field(default_factory=Unobserved)


def train(
    learners: Sequence[Learner],
    batches: Iterable[Batch],
    accumulation: int,
    watch: Watch,
    overlap: Overlap | None = None,
) -> Recorder:
    """Train all learners on the same batches, one pass.

    The first learner is the one that progress and table growth are about. Over several ranks
    points of the curves are collective calls; where they are depends on examples alone.

    Args:
        learners: one or more.
        batches: in the order to train on; over several ranks this rank's shares of them, which
            know their position.
        accumulation: batches per optimizer step.
        watch: what happens beside.
        overlap: go through a pipeline; None: window by window, on one rank.

    Raises:
        DataError: no batches.
        InputError: a model diverged.
        NonFiniteGradient: under nan_policy "raise"; tables on a GPU tell at the next point of
            the curves, or when training ends.
    """
    main, ranks = learners[0], ALONE if overlap is None else overlap.ranks
    recorder = Recorder([learner.name for learner in learners], ranks)
    steps, examples, ids = (watch.telemetry.counter(n) for n in ("steps", "examples", "ids"))
    next_point, done = watch.stride, 0
    if overlap is None:
        windows = plainly(learners, batches, accumulation, watch.evict_every_s)
    else:
        windows = overlapping(learners, batches, accumulation, watch.evict_every_s, overlap)
    with watch.progress as progress, watch.observer:
        for trained in windows:
            recorder.add(trained.window, trained.logits)
            steps.add()
            examples.add(sum(batch.labels.numel() for batch in trained.window))
            ids.add(sum(batch.ids.values_N.numel() for batch in trained.window))
            watch.observer.stepped()
            done = trained.window[-1].position if ranks.many else recorder.examples
            if done >= next_point:
                _check(learners)
                _point(recorder, main, watch, ranks)
                next_point = done + watch.stride
            if ranks.leads and progress.due():
                progress.show(_state(recorder, main, ids.value, done, ranks))
        if not done:
            raise _no_examples("training")
        _check(learners)
        if not recorder.curves.examples or recorder.curves.examples[-1] < done:
            _point(recorder, main, watch, ranks)
        if ranks.leads:
            progress.show(_state(recorder, main, ids.value, done, ranks), final=True)
    return recorder


def judge(
    learners: Sequence[Learner], batches: Iterable[Batch], progress: Progress, ranks: Ranks = ALONE
) -> dict[str, BinaryResult]:
    """Evaluate all learners on the same batches, by name; nothing is inserted or changed.

    Over several ranks each judges its shares; the figures are those of all examples, exactly.

    Raises:
        DataError: no batches.
    """
    metrics = {one.name: BinaryMetrics(bins=CALIBRATION_BINS) for one in learners}
    examples = done = 0
    with progress:
        for batch in batches:
            for one in learners:
                metrics[one.name].update(one.predict(batch), batch.labels, batch.weights)
            examples += batch.labels.numel()
            done = batch.position if ranks.many else examples
            if ranks.leads and progress.due():
                progress.show(ProgressState(examples=done))
        if not done:
            raise _no_examples("evaluation")
        if ranks.leads:
            progress.show(ProgressState(examples=done), final=True)
    if ranks.many:
        metrics = _merged(ranks.gathered(metrics, what="metrics of an evaluation"))
    return {name: sheet.compute() for name, sheet in metrics.items()}


def _merged(every: Sequence[dict[str, BinaryMetrics]]) -> dict[str, BinaryMetrics]:
    first, *others = every
    for other in others:
        for name, sheet in first.items():
            sheet.merge(other[name])
    return first


def _check(learners: Sequence[Learner]) -> None:
    for one in learners:
        one.check()


def _point(recorder: Recorder, main: Learner, watch: Watch, ranks: Ranks) -> None:
    rows = counted_rows(main.tables, ranks.rank)
    scalars = recorder.point(rows, main.row_bytes, watch.observer.scalars())
    watch.sink.write(watch.telemetry.counter("steps").value, watch.observer.completed(scalars))


def _state(
    recorder: Recorder, main: Learner, ids: int, examples: int, ranks: Ranks
) -> ProgressState:
    loss, auc = recorder.figures()
    rows, row_bytes = main.rows, 0
    if ranks.many:  # those of the last point: asking the others takes all of them
        ids, row_bytes = recorder.total_ids, recorder.row_bytes
        rows = sum(counts[-1] for counts in recorder.curves.rows.values() if counts)
    else:
        row_bytes = main.row_bytes
    return ProgressState(
        examples=examples,
        ids=ids,
        loss=loss[main.name] if math.isfinite(loss[main.name]) else None,
        auc=auc[main.name],
        rows=rows,
        row_bytes=row_bytes,
    )


def _no_examples(what: str) -> DataError:
    return DataError(
        describe(
            f"{what} examples",
            got=0,
            allowed="at least one",
            remedy="Check data.split and the files of data.source.",
        )
    )
