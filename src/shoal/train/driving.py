"""How windows of batches become optimizer steps: one after the other, or with stages that overlap.

Both train all models on the same batches, and evict. One rank that wants exact rows has nothing
to overlap; several ranks, or rows that may lack updates, go through a pipeline.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from itertools import islice

from torch import Tensor, nn

from shoal.data import Batch
from shoal.pipeline import create_train_pipeline
from shoal.train.learner import Learner, window_weight
from shoal.train.ranks import Ranks

__all__ = ["Overlap", "Trained", "overlapping", "plainly"]


@dataclass(frozen=True, slots=True)
class Trained:
    """A window that an optimizer step was made of.

    logits: by model, of each batch, from before the step; detached, on the run's device.
    """

    window: Sequence[Batch]
    logits: Mapping[str, Sequence[Tensor]]


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
    evict_every_s: int | None,
) -> Iterator[Trained]:
    """Train window by window; for one rank."""
    due_s: int | None = None
    source = iter(batches)
    while window := list(islice(source, accumulation)):
        trained = Trained(window, {one.name: one.train_step(window) for one in learners})
        if evict_every_s is not None:
            now_s = max(batch.event_time_s for batch in window)
            if due_s is not None and now_s >= due_s:
                for one in learners:
                    one.tables.shard.evict(now_s)
            if due_s is None or now_s >= due_s:
                due_s = now_s + evict_every_s
        yield trained  # rows are counted after an eviction, as a pipeline has it


def overlapping(
    learners: Sequence[Learner],
    batches: Iterable[Batch],
    accumulation: int,
    evict_every_s: int | None,
    overlap: Overlap,
) -> Iterator[Trained]:
    """Train while the next batches load and their ids travel; the same windows as `plainly`."""
    every = _Every(learners).train()
    pipeline = create_train_pipeline(
        every,
        learners[0].joint,
        staleness=overlap.staleness,
        accumulation=accumulation,
        evict_every_s=evict_every_s,
        weight_of=window_weight,
        step=every.step,
        device=learners[0].tables.shard.device,
        votes=overlap.ranks.votes,
    )
    source = iter(batches)
    window: list[Batch] = []
    logits: dict[str, list[Tensor]] = {one.name: [] for one in learners}
    try:
        while True:
            overlap.ranks.votes.step = learners[0].steps
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
                yield Trained(window, logits)
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
