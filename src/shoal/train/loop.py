"""The training loop and the evaluation loop, over whatever yields batches."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from shoal.data import Batch
from shoal.errors import DataError, describe
from shoal.metrics import BinaryMetrics, BinaryResult
from shoal.telemetry import Progress, ProgressState, ScalarSink, Telemetry
from shoal.train.counting import counted_rows
from shoal.train.course import Course
from shoal.train.driving import Clock, NeverRests, Overlap, Rests, overlapping, plainly
from shoal.train.learner import Learner
from shoal.train.observing import Observer, Unobserved
from shoal.train.ranks import ALONE, Ranks
from shoal.train.recorder import Recorder

__all__ = ["CALIBRATION_BINS", "NeverSaves", "Saves", "Watch", "judge", "train"]

CALIBRATION_BINS = 20


class Saves(Rests, Protocol):
    """What saves while a loop goes on."""

    def at_rest(self) -> None:
        """Training is at rest: all ranks are, after the same step."""
        ...

    def look(self) -> None:
        """After each step: raise what went wrong beside."""
        ...

    def beside(self) -> str | None:
        """What goes on beside, for the progress line."""
        ...


class NeverSaves(NeverRests):
    """Saves nothing."""

    def at_rest(self) -> None:
        """See `Saves`."""

    def look(self) -> None:
        """See `Saves`."""

    def beside(self) -> str | None:
        """See `Saves`."""
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """How a loop is watched.

    Args:
        progress: the bar; telemetry: counters of examples, ids and steps of this rank.
        sink: where points of the curves go.
        stride: examples, over all ranks, between two points.
        evict_every_s: event seconds between two evictions of expired rows; None evicts never.
        saves: when training rests, and what is done then.
        observer: sees every step, and has scalars of its own for each point.
    """

    progress: Progress
    telemetry: Telemetry
    sink: ScalarSink
    stride: int
    evict_every_s: int | None = None
    observer: Observer = field(default_factory=Unobserved)
    saves: Saves = field(default_factory=NeverSaves)


def train(
    learners: Sequence[Learner],
    batches: Iterable[Batch],
    accumulation: int,
    watch: Watch,
    overlap: Overlap | None = None,
    course: Course | None = None,
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
        course: what to go on from, and to keep current; `batches` begin at its position.

    Raises:
        CheckpointError: a save failed.
        DataError: no batches.
        InputError: a model diverged.
        NonFiniteGradient: under nan_policy "raise"; tables on a GPU tell at the next point of
            the curves, or when training ends.
    """
    main, ranks = learners[0], ALONE if overlap is None else overlap.ranks
    if course is None:
        course = Course(learners, watch.telemetry, stride=watch.stride, ranks=ranks)
    recorder, saves = course.recorder, watch.saves
    steps, examples, ids = (watch.telemetry.counter(n) for n in ("steps", "examples", "ids"))
    done = course.position if ranks.many else recorder.examples
    clock = Clock(rests=saves, evict_every_s=watch.evict_every_s, evict_due_s=course.evict_due_s)
    if overlap is None:
        windows = plainly(learners, batches, accumulation, clock)
    else:
        windows = overlapping(learners, batches, accumulation, clock, overlap)
    course.started()
    with watch.progress as progress, watch.observer:
        for trained in windows:
            recorder.add(trained.window, trained.logits)
            steps.add()
            examples.add(sum(batch.labels.numel() for batch in trained.window))
            ids.add(sum(batch.ids.values_N.numel() for batch in trained.window))
            watch.observer.stepped()
            course.position = trained.window[-1].position
            done = course.position if ranks.many else recorder.examples
            if done >= course.next_point:
                _check(learners)
                _point(recorder, main, watch, ranks)
                course.next_point = done + watch.stride
            if trained.at_rest:
                _check(learners)
                course.evict_due_s = trained.evict_due_s
                saves.at_rest()
            saves.look()
            if ranks.leads and progress.due():
                progress.show(_state(recorder, main, ids.value, done, ranks, saves.beside()))
        if not done:
            raise _no_examples("training")
        _check(learners)
        course.ended()
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
    rows = counted_rows(main.tables.hosted, ranks.rank)
    scalars = recorder.point(rows, main.row_bytes, watch.observer.scalars())
    watch.sink.write(watch.telemetry.counter("steps").value, watch.observer.completed(scalars))


def _state(
    recorder: Recorder,
    main: Learner,
    ids: int,
    examples: int,
    ranks: Ranks,
    beside: str | None = None,
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
        beside=beside,
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
