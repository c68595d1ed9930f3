"""How windows of batches become optimizer steps: one after the other, or with stages that overlap.

Both train all models on the same batches, and evict. One rank that wants exact rows has nothing
to overlap; several ranks, or rows that may lack updates, go through a pipeline. Both come to rest
where they are told to: then all updates are made, and nothing of later batches has begun.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from torch import Tensor, nn

from shoal.data import Batch
from shoal.pipeline import create_train_pipeline
from shoal.train.learner import Learner, window_weight
from shoal.train.ranks import Ranks

__all__ = ["Clock", "NeverRests", "Overlap", "Rests", "Trained", "overlapping", "plainly"]


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
