"""The training and evaluation loops, over whatever yields batches."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import dataclass, replace
from itertools import islice

from torch import Tensor, nn

from shoal.data import Batch, Loader
from shoal.data.catalog import Catalog
from shoal.errors import DataError
from shoal.metrics import BinaryMetrics, BinaryResult
from shoal.models.tasks import columns_of, split_all
from shoal.pipeline import create_train_pipeline
from shoal.table.hosting import HostedTables, hosted_spec
from shoal.telemetry import ProgressLine, ProgressState, ScalarSink
from shoal.train.course import Course
from shoal.train.learner import Learner
from shoal.train.observing import RunObserver
from shoal.train.ranks import Ranks
from shoal.train.retrieval import Retrieval
from shoal.train.run_state import RunState

CALIBRATION_BINS = 20


def counted_rows(tables: HostedTables, rank: int) -> dict[str, int]:
    """Rows of each whole table that count on this rank; over all ranks they add up to all rows.

    Of columns in slices the first one's rows count, of replicas and of rows that all ranks share
    (on parameter servers) the first rank's.
    """
    shard, placement = tables.shard, tables.placement
    local = {spec.name: k for k, spec in enumerate(shard.specs)}
    rows = {}
    for spec in tables.specs:
        name, counts = spec.name, rank == 0
        if placement is not None:
            first = placement.of(spec.name)[0]
            name = hosted_spec(spec, first).name
            counts = rank in (first.ranks[:1] if first.replicated else first.ranks)
        rows[spec.name] = shard.size(local[name]) if counts else 0
    return rows


@dataclass(frozen=True, slots=True)
class Trained:
    """A window that an optimizer step was made of.

    Args:
        logits: by model, of each batch, from before the step; detached, on the run's device.
        paused: nothing of later batches has begun, and `run_state.evict_due_s` is of now.
    """

    window: Sequence[Batch]
    logits: Mapping[str, Sequence[Tensor]]
    paused: bool = False


@dataclass(frozen=True, slots=True)
class _Windows:
    """How batches are trained, window by window; arguments as of `train`."""

    run_state: RunState
    accumulation: int
    pauses: Course
    evict_every_s: int | None

    def plain(self, batches: Iterable[Batch]) -> Generator[Trained]:
        """One after the other; for one rank."""
        run_state, source = self.run_state, iter(batches)
        while window := list(islice(source, self.accumulation)):
            logits = {one.name: one.train_step(window) for one in run_state.learners}
            if self.evict_every_s is not None:
                now_s, due_s = max(batch.event_time_s for batch in window), run_state.evict_due_s
                if due_s is not None and now_s >= due_s:
                    for one in run_state.learners:
                        one.tables.shard.evict(now_s)
                if due_s is None or now_s >= due_s:
                    run_state.evict_due_s = now_s + self.evict_every_s
            paused = self.pauses.due_after(run_state.steps) or self.pauses.wants_pause()
            # Rows are counted after an eviction, as a pipeline has it.
            yield Trained(window, logits, paused)

    def in_parts(self, batches: Iterable[Batch], staleness: int) -> Generator[Trained]:
        """`overlapping`, and nothing under way where a stream pauses between two windows.

        Batches of a stream wait for their whole window, so that none is under way half.
        """
        source = iter(batches)
        pauses = True
        window: list[Batch] = []

        def part() -> Iterator[Batch]:
            nonlocal pauses
            pauses = False
            for batch in source:
                if batch.pauses:
                    pauses = True
                    return
                window.append(batch)
                if batch.places is None or len(window) == self.accumulation:
                    yield from window
                    window.clear()
            yield from window

        while pauses:
            yield from self.overlapping(part(), staleness)
            if pauses:
                yield Trained((), {}, True)

    def overlapping(self, batches: Iterable[Batch], staleness: int) -> Generator[Trained]:
        """Train while the next batches load and their ids travel; the same windows as `plain`."""
        run_state, size, pauses = self.run_state, self.accumulation, self.pauses
        learners, control, first = run_state.learners, run_state.ranks.control, run_state.steps
        every = _Every(learners).train()
        pipeline = create_train_pipeline(
            every,
            learners[0].joint,
            staleness=staleness,
            accumulation=size,
            evict_every_s=self.evict_every_s,
            evict_due_s=run_state.evict_due_s,
            step=every.step,
            device=learners[0].tables.shard.device,
            control=control,
            # Where windows end and the next begin; not before the first one.
            snapshot_before=lambda i: (
                i > 0 and i % size == 0 and pauses.due_after(first + i // size)
            ),
        )
        snapshots: list[int] = []
        pipeline.on_snapshot = snapshots.append
        source = iter(batches)
        window: list[Batch] = []
        logits: dict[str, list[Tensor]] = {one.name: [] for one in learners}
        try:
            while True:
                control.step = run_state.steps
                if pauses.wants_pause():
                    pipeline.request_snapshot()
                try:
                    given = pipeline.progress(source)
                except StopIteration:
                    break
                finally:
                    run_state.evict_due_s = pipeline.evict_due_s
                done = pipeline.last
                assert done is not None
                # A loader gives every rank as many batches: none is ever without.
                window.append(done.batch)
                for name, logits_B in given.predictions.items():
                    logits[name].append(logits_B)
                if done.applied:
                    # After a snapshot point, stages of later batches wait for the next call.
                    yield Trained(window, logits, snapshots[-1:] == [done.index + 1])
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
        self._learners[0].begin_step()  # one for all: one backward is of all of them
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


def train(
    run_state: RunState,
    batches: Iterable[Batch],
    accumulation: int,
    course: Course,
    observer: RunObserver,
    progress: ProgressLine,
    sink: ScalarSink,
    *,
    staleness: int | None = None,
    evict_every_s: int | None = None,
) -> None:
    """Train all learners on the same batches, one pass.

    The first learner is the one that progress and table growth are about. Over several ranks
    points of the curves are collective calls; where they are depends on examples alone.

    Args:
        run_state: what to continue from, and to keep current; `batches` begin at its position.
        batches: in the order to train on; over several ranks this rank's shares of them, which
            know their position.
        accumulation: batches per optimizer step.
        course: when training pauses, what is done then, and whether it stops early.
        observer: sees every step, and has scalars of its own for each point.
        progress: the bar.
        sink: where points of the curves go.
        staleness: go through a pipeline, where looked-up rows may be stale by so many updates;
            None: window by window, on one rank.
        evict_every_s: event seconds between two evictions of expired rows; None evicts never.

    Raises:
        CheckpointError: a save failed.
        DataError: no batches.
        InputError: a model diverged.
        NonFiniteGradient: under nan_policy "raise"; tables on a GPU report it at the next point of
            the curves, or when training ends.
    """
    recorder, ranks, saver = run_state.recorder, run_state.ranks, course.saver
    done = run_state.position if ranks.many else recorder.examples
    trained_by = _Windows(run_state, accumulation, course, evict_every_s)
    if staleness is None:
        windows = trained_by.plain(batches)
    else:
        windows = trained_by.in_parts(batches, staleness)

    def point() -> None:
        main = run_state.learners[0]
        rows = counted_rows(main.tables.hosted, ranks.rank)
        row_bytes = main.row_bytes if ranks.leads or not main.served else 0
        scalars = recorder.point(rows, row_bytes, observer.scalars())
        sink.write(run_state.steps, observer.completed(scalars))

    predicted = [one.predicted for one in run_state.learners]
    fresh = False  # steps since the last point
    run_state.started()
    with progress, observer, closing(windows):
        # A run that had stopped early takes no step when it resumes.
        for trained in () if course.stops else windows:
            if not trained.window:
                saver.silent()
                continue
            recorder.add(trained.window, split_all(predicted, trained.logits))
            observer.stepped()
            fresh = True
            run_state.position = trained.window[-1].position
            run_state.places = trained.window[-1].places
            done = run_state.position if ranks.many else recorder.examples
            if done >= run_state.next_point:
                run_state.check()
                point()
                fresh = False
                run_state.next_point = done + run_state.stride
            if trained.paused:
                run_state.check()
                course.on_pause()
            if course.stops:
                break
            saver.check()
            if ranks.leads and progress.due():
                progress.show(_progress_state(run_state, done, saver.status()))
        if not done:
            raise _no_examples("training")
        run_state.check()
        run_state.ended()
        if fresh or not recorder.curves.examples or recorder.curves.examples[-1] < done:
            point()
        if ranks.leads:
            progress.show(_progress_state(run_state, done), final=True)


def evaluate_all(
    learners: Sequence[Learner],
    batches: Loader,
    progress: ProgressLine,
    ranks: Ranks,
    catalog: Catalog | None = None,
) -> dict[str, BinaryResult]:
    """Evaluate all learners on the same batches, by output; nothing is inserted or changed.

    Over several ranks each evaluates its shares; the figures are those of all examples, exactly.
    With a catalog the first learner also ranks the items of positive examples.

    Raises:
        DataError: no batches.
    """
    predicted = [one.predicted for one in learners]
    columns = columns_of(predicted)
    metrics = {name: BinaryMetrics(bins=CALIBRATION_BINS) for name in columns}
    examples = done = 0
    most = -(-batches.batch_size // batches.share.world_size)
    retrieval = None if catalog is None else Retrieval(learners[0], catalog, most, ranks)
    with progress, ExitStack() as held:
        for one in learners:
            held.enter_context(one.averaged())
        for batch in batches:
            found = {one.name: [one.predict(batch)] for one in learners}
            for name, (own_B,) in split_all(predicted, found).items():
                labels_B = batch.labels_BT[:, columns[name]]
                metrics[name].update(own_B, labels_B, batch.weights, batch.groups_B)
            if retrieval is not None:
                retrieval.add(batch)
            examples += batch.labels.numel()
            done = batch.position if ranks.many else examples
            if ranks.leads and progress.due():
                progress.show(ProgressState(examples=done))
        if not done:
            raise _no_examples("evaluation")
        if ranks.leads:
            progress.show(ProgressState(examples=done), final=True)
    if ranks.many:
        metrics, *others = ranks.gathered(metrics, what="metrics of an evaluation")
        for other in others:
            for name, sheet in metrics.items():
                sheet.merge(other[name])
    results = {name: sheet.compute() for name, sheet in metrics.items()}
    if retrieval is not None:
        main = next(iter(results))
        results[main] = replace(results[main], ranking=retrieval.figures())
    return results


def _progress_state(run_state: RunState, examples: int, saving: str | None = None) -> ProgressState:
    recorder, main = run_state.recorder, run_state.learners[0]
    loss, auc = recorder.figures()
    shown = next(iter(main.predicted.columns))
    if run_state.ranks.many:  # those of the last point: asking the others takes all of them
        ids, row_bytes = recorder.total_ids, recorder.row_bytes
        rows = sum(counts[-1] for counts in recorder.curves.rows.values() if counts)
    else:
        ids, rows, row_bytes = recorder.ids, main.rows, main.row_bytes
    return ProgressState(
        examples=examples,
        ids=ids,
        loss=loss[shown] if math.isfinite(loss[shown]) else None,
        auc=auc[shown],
        rows=rows,
        row_bytes=row_bytes,
        saving=saving,
    )


def _no_examples(what: str) -> DataError:
    return DataError(
        f"{what} examples",
        got=0,
        allowed="at least one",
        remedy="Check data.split and the files of data.source.",
    )
