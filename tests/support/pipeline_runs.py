"""A small model, its batches, and plain loops with the expected results of pipelines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shoal.data.batch import Batch
from shoal.embedding.collection import EmbeddingCollection
from shoal.embedding.layouts import Feature
from shoal.optim import JointOptimizer, SparseOptimizer
from shoal.ragged import KeyedRagged
from shoal.rules.admission import Admission
from shoal.rules.expiry import Expiry
from shoal.rules.optimizers import Adagrad, Optimizer
from shoal.table.spec import Segment, TableSpec

__all__ = [
    "Made",
    "Toy",
    "batches_of",
    "late_losses",
    "loss_of",
    "plain_losses",
    "rows_of",
    "spec",
    "toy",
    "windows",
]


def spec(
    name: str = "t",
    *,
    optimizer: Optimizer | None = None,
    admission: Admission | None = None,
    capacity_rows: int | None = None,
    on_full: Any = "raise",
    ttl_s: int | None = None,
    dtype: Any = "float32",
) -> TableSpec:
    return TableSpec(
        name=name,
        segments=(Segment(dim=4, optimizer=optimizer or Adagrad(lr=0.1)),),
        dtype=dtype,
        admission=admission,
        capacity_rows=capacity_rows,
        on_full=on_full,
        expiry=None if ttl_s is None else Expiry(ttl_s=ttl_s),
    )


class Toy(nn.Module):
    """Two features of one table (or two), and a linear layer: logits [B]."""

    def __init__(self, tables: Sequence[TableSpec], device: str = "cpu") -> None:
        super().__init__()
        first, last = tables[0].name, tables[-1].name
        features = [Feature("a", first), Feature("b", last)]
        self.tables = EmbeddingCollection(tables, features, device=device)
        self.linear = nn.Linear(8, 1)
        with torch.no_grad():
            self.linear.weight.copy_(torch.linspace(-1, 1, 8)[None])
            self.linear.bias.fill_(0.25)
        self.linear.to(device)

    def forward(self, batch: Batch) -> Tensor:
        inputs = self.tables(batch.ids, event_time_s=batch.event_time_s)
        logits_B1: Tensor = self.linear(torch.cat([inputs["a"], inputs["b"]], dim=1).float())
        return logits_B1[:, 0]


def loss_of(logits_B: Tensor, batch: Batch) -> Tensor:
    return nn.functional.binary_cross_entropy_with_logits(logits_B, batch.labels)


@dataclass(frozen=True)
class Made:
    model: Toy
    optimizer: JointOptimizer
    wrapped: Any = None


def toy(
    tables: Sequence[TableSpec],
    wrap: Callable[[Toy], nn.Module] | None = None,
    *,
    device: str = "cpu",
) -> Made:
    model = Toy(tables, device)
    if wrap is not None:
        wrapped = wrap(model)
        dense = torch.optim.SGD(model.linear.parameters(), lr=0.1)
        return Made(model, JointOptimizer([SparseOptimizer(wrapped), dense]), wrapped)
    dense = torch.optim.SGD(model.linear.parameters(), lr=0.1)
    return Made(model, JointOptimizer([SparseOptimizer(model.tables), dense]))


def batches_of(
    count: int, *, seed: int = 0, examples: int = 4, ids: int = 30, step_s: int = 10
) -> list[Batch]:
    """Batches whose ids repeat within and between them."""
    source = torch.Generator().manual_seed(seed)
    made = []
    for i in range(count):
        lengths_FB = torch.randint(0, 3, (2, examples), generator=source)
        total = int(lengths_FB.sum())
        ids_N = torch.randint(0, ids, (total,), generator=source) * (1 << 40) + 7
        labels_B = torch.randint(0, 2, (examples,), generator=source).float()
        keyed = KeyedRagged.from_lengths(["a", "b"], ids_N, lengths_FB)
        made.append(Batch(ids=keyed, labels=labels_B, event_time_s=1000 + i * step_s))
    return made


def windows(batches: Sequence[Batch], size: int) -> Iterator[Sequence[Batch]]:
    for start in range(0, len(batches), size):
        yield batches[start : start + size]


def plain_losses(
    made: Made,
    batches: Sequence[Batch],
    *,
    accumulation: int = 1,
    evict_every_s: int | None = None,
) -> list[Tensor]:
    """The loop that a pipeline at staleness 0 must equal."""
    losses, due_s = [], None
    for window in windows(batches, accumulation):
        total = sum(batch.labels.numel() for batch in window)
        for batch in window:
            loss = loss_of(made.model(batch), batch)
            (loss * (batch.labels.numel() / total)).backward()
            losses.append(loss.detach())
        made.optimizer.step()
        made.optimizer.zero_grad()
        if evict_every_s is not None:
            now_s = max(batch.event_time_s for batch in window)
            if due_s is not None and now_s >= due_s:
                made.model.tables.shard.evict(now_s)
            if due_s is None or now_s >= due_s:
                due_s = now_s + evict_every_s
    return losses


def late_losses(
    made: Any, batches: Sequence[Batch], staleness: int, accumulation: int, every_s: int
) -> list[Tensor]:
    """Staleness k written out: rows are read once window w-1-k is applied, then w trains."""
    tables = made.model.tables
    all_windows = list(windows(batches, accumulation))
    read: dict[int, list[Any]] = {}
    losses, due_s = [], None

    def read_window(w: int) -> None:
        """Look the window up now; its forward sees the current rows."""
        read[w] = []
        for batch in all_windows[w] if w < len(all_windows) else ():
            outputs = tables(batch.ids, event_time_s=batch.event_time_s)
            read[w].append((batch, outputs))

    for w in range(staleness):
        read_window(w)
    for w, window in enumerate(all_windows):
        read_window(w + staleness)
        total = sum(batch.labels.numel() for batch in window)
        for batch, inputs in read.pop(w):
            joined = torch.cat([inputs["a"], inputs["b"]], dim=1).float()
            loss = loss_of(made.model.linear(joined)[:, 0], batch)
            (loss * (batch.labels.numel() / total)).backward()
            losses.append(loss.detach())
        made.optimizer.step()
        made.optimizer.zero_grad()
        now_s = max(batch.event_time_s for batch in window)
        if due_s is not None and now_s >= due_s:
            tables.shard.evict(now_s)
        if due_s is None or now_s >= due_s:
            due_s = now_s + every_s
    return losses


def rows_of(model: Toy) -> list[dict[str, Tensor]]:
    """All that each table holds, by column of its chunk."""
    shard = model.tables.shard
    found = []
    for k in range(len(shard.specs)):
        chunk = shard.export(k)
        names = ("ids", "weights", "state", "last_seen_s", "counts")
        found.append({name: getattr(chunk, name) for name in names})
    return found
