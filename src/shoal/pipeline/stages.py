"""The stages of a batch, as a model with embedding collections does them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shoal.distributed.batch_norm import resting
from shoal.embedding.collection import EmbeddingCollection
from shoal.errors import ConfigError, ShapeError, of_kind
from shoal.pipeline.batches import detached, event_time_of, ids_of, weight_of
from shoal.ragged import KeyedRagged
from shoal.table.shard import Shard

Losses = Tensor | Mapping[str, Tensor]


class Step(NamedTuple):
    """What one batch gave.

    losses: as the model gave them, before weighing; without a graph.
    predictions: the rest of what the model gave; None on a rank whose data has ended while
        others still have some.
    """

    losses: Any
    predictions: Any


@dataclass(eq=False)
class Stages:
    """What an executor calls, in the scheduler's order, all from one thread.

    Args:
        model: called with the batch; holds the collections, which see the very `KeyedRagged` that
            `ids_of` gives.
        optimizer: steps dense and sparse parameters; see `shoal.optim.JointOptimizer`. None: the
            model predicts; nothing runs ahead of forward, which inserts nothing.
        loss_of: losses from (what the model gave, batch); None: the model gives (losses,
            predictions, ...). A loss is a mean over the batch; several by name add up.
        scaler: of the losses, under mixed precision.
        ids_of: what the collections read of a batch, by the collection's name in the model, or
            one for all.
        weight_of: what a batch's mean loss weighs.
        event_time_of: a batch's event time, whole seconds.
        step: does the optimizer's step instead, clipping for example; zeroes gradients too.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer | None = None
    _: KW_ONLY
    loss_of: Callable[[Any, Any], Losses] | None = None
    scaler: torch.amp.GradScaler | None = None
    ids_of: Callable[[Any], KeyedRagged | Mapping[str, KeyedRagged]] = ids_of
    weight_of: Callable[[Any], float] = weight_of
    event_time_of: Callable[[Any], int] = event_time_of
    step: Callable[[], None] | None = None

    def __post_init__(self) -> None:
        self._collections = {
            # As in the model itself, however it is wrapped.
            name.removeprefix("module."): part
            for name, part in of_kind("model", self.model, nn.Module).named_modules()
            if isinstance(part, EmbeddingCollection) and self.optimizer is not None
        }
        self._total: Tensor | None = None

    def begin(self, batch: Any) -> None:
        """Dedup and partition ids; send them on their way."""
        event_time_s = self.event_time_of(batch)
        for collection, ids in self._lookups(batch):
            collection.begin(ids, event_time_s=event_time_s)

    def probe(self, batch: Any) -> None:
        """Owners find or insert the ids that arrive."""
        for collection, ids in self._lookups(batch):
            collection.probe(ids)

    def fetch(self, batch: Any) -> None:
        """Begin reading rows and sending them back."""
        for collection, ids in self._lookups(batch):
            collection.fetch(ids)

    def drop(self, batch: Any) -> None:
        """Forget a batch that has begun and will not be trained; its tickets end."""
        for collection, ids in self._lookups(batch):
            collection.drop_begun(ids)

    def forward(self, batch: Any, *, last: bool, idle: bool) -> Step:
        """Run the model.

        last: the batch ends its window.
        idle: it stands for none; running statistics stay as they are.
        """
        if self.optimizer is None:
            with torch.inference_mode():
                return Step(None, self.model(batch))
        with self._reducing(last), resting(self.model) if idle else nullcontext():
            given = self.model(batch)
        if self.loss_of is not None:
            losses, predictions = self.loss_of(given, batch), given
        elif isinstance(given, tuple) and len(given) > 1:
            losses, predictions = given[0], given[1]
        else:
            raise ConfigError(
                "output of a model in a training pipeline",
                got=type(given).__name__,
                allowed="(losses, predictions)",
                remedy="Return both, or pass loss_of=lambda outputs, batch: loss.",
            )
        self.drop(batch)  # where a collection was not called
        values = list(losses.values()) if isinstance(losses, Mapping) else [losses]
        if any(getattr(value, "numel", int)() != 1 for value in values):
            got, remedy = [getattr(value, "shape", value) for value in values], "Call loss.mean()."
            raise ShapeError("loss of a training pipeline", got, "tensors of one number", remedy)
        self._total = torch.stack([value.reshape(()) for value in values]).sum()
        return Step(detached(losses), detached(predictions))

    def backward(self, share: float, *, last: bool) -> None:
        """Send back the gradients of the last forward's losses, times `share`."""
        total, self._total = self._total, None
        if self.optimizer is None:
            return
        assert total is not None, "forward comes first"
        loss = total * share
        # In this thread: a GPU's backward thread costs the host more than what it launches.
        with self._reducing(last), torch.autograd.set_multithreading_enabled(False):
            if self.scaler is not None:
                loss = self.scaler.scale(loss)
            loss.backward()  # type: ignore[no-untyped-call]

    def apply(self) -> None:
        """One optimizer step over what backward recorded."""
        if self.step is not None:
            self.step()
        elif self.optimizer is not None:
            if self.scaler is None:
                self.optimizer.step()
            else:
                self.scaler.step(self.optimizer)
                self.scaler.update()
            self.optimizer.zero_grad()

    def evict(self, now_s: int) -> None:
        """Drop rows expired at this event time."""
        for shard in {id(part.shard): part.shard for part in self._collections.values()}.values():
            shard.evict(now_s)

    def incoming(self, batch: Any) -> tuple[int, ...]:
        """Ids of the batch that look up each limited table."""
        counts = dict.fromkeys(self._limited(), 0)
        for collection, ids in self._lookups(batch) if counts else ():
            for feature in collection.features:
                key = (id(collection.shard), feature.table)
                if key in counts and feature.name in ids.keys:
                    at = ids.keys.index(feature.name)
                    splits = ids.host_splits
                    counts[key] += int(splits[at + 1] - splits[at])
        return tuple(counts.values())

    def room(self) -> tuple[int, ...]:
        """Rows each limited table may still take on this rank; the same tables on all ranks."""
        limited = self._limited().items()
        return tuple(_room(collection.shard, table) for (_, table), collection in limited)

    def _limited(self) -> dict[tuple[int, str], EmbeddingCollection]:
        """Tables with a row budget, as (shard, table); in the same order on all ranks."""
        return {
            (id(part.shard), table): part
            for part in self._collections.values()
            for table, spec in part.tables.items()
            if spec.capacity_rows is not None
        }

    def _lookups(self, batch: Any) -> list[tuple[EmbeddingCollection, KeyedRagged]]:
        given = self.ids_of(batch) if self._collections else {}
        return [
            (collection, given[name] if isinstance(given, Mapping) else given)
            for name, collection in self._collections.items()
        ]

    def _reducing(self, last: bool) -> AbstractContextManager[Any]:
        """Dense gradients are reduced over ranks once a window."""
        pause = None if last else getattr(self.model, "no_sync", None)
        return nullcontext() if pause is None else pause()


def _room(shard: Shard, table: str) -> int:
    """Rows that this rank's share of a table may still take; no end of them where it has none."""
    left = [
        spec.capacity_rows - shard.size(k)
        for k, spec in enumerate(shard.specs)
        # Column slices are named "table[start:stop]".
        if spec.capacity_rows is not None and spec.name.partition("[")[0] == table
    ]
    return min(left, default=1 << 50)
