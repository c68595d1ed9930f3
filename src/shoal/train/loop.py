"""The training and evaluation loops, over whatever yields batches."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

from torch import Tensor, nn

from shoal.data import Batch
from shoal.errors import DataError
from shoal.metrics import BinaryMetrics, BinaryResult
from shoal.pipeline import create_train_pipeline
from shoal.table.hosting import HostedTables, hosted_spec
from shoal.telemetry import Progress, ProgressState, ScalarSink, Telemetry
from shoal.train.course import Course
from shoal.train.learner import Learner, window_weight
from shoal.train.observing import Observer, Unobserved
from shoal.train.ranks import ALONE, Ranks
from shoal.train.summary import Recorder


def counted_rows(tables: HostedTables, rank: int) -> dict[str, int]:
    """Rows of each whole table that count on this rank; over all ranks they add up to all rows.

    Of columns in slices the first one's rows count, of replicas the first rank's.
    """
    shard = tables.shard
    local = {spec.name: k for k, spec in enumerate(shard.specs)}
    if tables.placement is None:
        return {spec.name: shard.size(local[spec.name]) for spec in tables.specs}
    rows = dict.fromkeys((spec.name for spec in tables.specs), 0)
    for spec in tables.specs:
        first = tables.placement.of(spec.name)[0]
        ranks = first.ranks[:1] if first.replicated else first.ranks
        if rank in ranks:
            rows[spec.name] += shard.size(local[hosted_spec(spec, first).name])
    return rows


@dataclass(frozen=True, slots=True)
class Trained:
    """A window that an optimizer step was made of.

    Args:
        logits: by model, of each batch, from before the step; detached, on the run's device.
        at_rest: nothing of later batches has begun.
        evict_due_s: then, the event time at which the next eviction is due; None: the first
            batches settle it.
    """

    window: Sequence[Batch]
    logits: Mapping[str, Sequence[Tensor]]
    at_rest: bool = False
    evict_due_s: int | None = None


class Rests(Protocol):
    """After which steps training comes to rest. A step's number is how many are done."""

    def due_after(self, step: int) -> bool:
        """Whether it does after this one; the same on every rank. Asked some steps ahead."""
        ...

    def asked(self) -> bool:
        """Whether this rank wants it to soon; one that does is enough."""
        ...


class NeverRests:
    """On and on."""

    def due_after(self, step: int) -> bool:
        """See `Rests`."""
        return False

    def asked(self) -> bool:
        """See `Rests`."""
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """When things beside steps happen.

    Args:
        rests: where training comes to rest.
        evict_every_s: event time between evictions; None: never.
        evict_due_s: event time of the first; None: `evict_every_s` after the first batches.
    """

    rests: Rests
    evict_every_s: int | None = None
    evict_due_s: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """What a pipeline may do ahead.

    Args:
        ranks: who trains together.
        staleness: updates that a looked-up row may lack.
    """

    ranks: Ranks
    staleness: int = 0


def plainly(
    learners: Sequence[Learner],
    batches: Iterable[Batch],
    accumulation: int,
    clock: Clock,
) -> Iterator[Trained]:
    """Train window by window; for one rank."""
    evict_every_s, due_s = clock.evict_every_s, clock.evict_due_s
    source = iter(batches)
    while window := list(islice(source, accumulation)):
        logits = {one.name: one.train_step(window) for one in learners}
        if evict_every_s is not None:
            now_s = max(batch.event_time_s for batch in window)
            if due_s is not None and now_s >= due_s:
                for one in learners:
                    one.tables.shard.evict(now_s)
            if due_s is None or now_s >= due_s:
                due_s = now_s + evict_every_s
        rests = clock.rests.due_after(learners[0].steps) or clock.rests.asked()
        # Rows are counted after an eviction, as a pipeline has it.
        yield Trained(window, logits, rests, due_s if rests else None)


def overlapping(
    learners: Sequence[Learner],
    batches: Iterable[Batch],
    accumulation: int,
    clock: Clock,
    overlap: Overlap,
) -> Iterator[Trained]:
    """Train while the next batches load and their ids travel; the same windows as `plainly`."""
    every = _Every(learners).train()
    first, rests = learners[0].steps, clock.rests
    pipeline = create_train_pipeline(
        every,
        learners[0].joint,
        staleness=overlap.staleness,
        accumulation=accumulation,
        evict_every_s=clock.evict_every_s,
        evict_due_s=clock.evict_due_s,
        weight_of=window_weight,
        step=every.step,
        device=learners[0].tables.shard.device,
        votes=overlap.ranks.votes,
        # Where windows end and the next begin; not before the first one.
        cut_before=lambda i: (
            i > 0 and i % accumulation == 0 and rests.due_after(first + i // accumulation)
        ),
    )
    cuts: list[int] = []
    pipeline.on_cut = cuts.append
    source = iter(batches)
    window: list[Batch] = []
    logits: dict[str, list[Tensor]] = {one.name: [] for one in learners}
    try:
        while True:
            overlap.ranks.votes.step = learners[0].steps
            if rests.asked():
                pipeline.request_cut()
            try:
                given = pipeline.progress(source)
            except StopIteration:
                break
            done = pipeline.last
            assert done is not None
            # A loader gives every rank as many batches: none is ever without.
            window.append(done.batch)
            for name, logits_B in given.predictions.items():
                logits[name].append(logits_B)
            if done.applied:
                # After a cut, stages of later batches wait for the next call.
                at_rest = cuts[-1:] == [done.index + 1]
                yield Trained(window, logits, at_rest, pipeline.evict_due_s if at_rest else None)
                window, logits = [], {one.name: [] for one in learners}
        if window:
            yield Trained(window, logits)
    finally:
        pipeline.close()


class _Every(nn.Module):
    """All models as one that a pipeline trains: batch -> (losses, logits) by name."""

    def __init__(self, learners: Sequence[Learner]) -> None:
        super().__init__()
        self._learners = tuple(learners)
        self.models = nn.ModuleList([one.model for one in learners])

    def forward(self, batch: Batch) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        given = {one.name: one.losses(batch) for one in self._learners}
        losses = {name: loss for name, (loss, _) in given.items()}
        return losses, {name: logits_B for name, (_, logits_B) in given.items()}

    def no_sync(self) -> AbstractContextManager[object]:
        """Within it dense gradients of no model are reduced over ranks."""
        stack = ExitStack()
        for model in self.models:
            pause = getattr(model, "no_sync", None)
            if pause is not None:
                stack.enter_context(pause())
        return stack

    def step(self) -> None:
        """One optimizer step of each model."""
        for one in self._learners:
            one.apply()


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
        f"{what} examples",
        got=0,
        allowed="at least one",
        remedy="Check data.split and the files of data.source.",
    )
