"""Loops that are not Shoal's: torch's DataLoader with workers, a trainer that steps by closure."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from shoal import (
    EmbeddingCollection,
    Feature,
    JointOptimizer,
    KeyedRagged,
    Segment,
    SparseOptimizer,
    TableSpec,
    optimizers,
)

Example = tuple[int, list[int], float]
ROWS = 96


class Clicks(Dataset[Example]):
    """A user clicks where the user's number is odd; next to it any items."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> Example:
        user = (row * 7) % 12
        return user, [row % 5] * (row % 3), float(user % 2)


def collated(examples: list[Example]) -> tuple[KeyedRagged, Tensor]:
    """In a worker process: ids travel as they are."""
    users, items, labels = zip(*examples, strict=True)
    ids = KeyedRagged.from_dict({"user": [[one] for one in users], "items": list(items)})
    return ids, torch.tensor(labels)


class Model(nn.Module):
    """Two pooled features and a linear map."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        adagrad = optimizers.Adagrad(lr=0.5)
        specs = [
            TableSpec(name=name, segments=(Segment(dim=4, optimizer=adagrad),))
            for name in ("user", "items")
        ]
        self.tables = EmbeddingCollection(
            specs, [Feature("user", "user"), Feature("items", "items")]
        )
        self.head = nn.Linear(8, 1)

    def forward(self, ids: KeyedRagged) -> Tensor:
        found = self.tables(ids)
        logits_B: Tensor = self.head(torch.cat([found["user"], found["items"]], 1)).squeeze(1)
        return logits_B


def trained(workers: int) -> list[float]:
    model = Model()
    dense = torch.optim.Adam(model.parameters(), lr=0.05)
    optimizer = JointOptimizer([SparseOptimizer(model), dense])
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    batches = DataLoader(
        Clicks(),
        batch_size=8,
        num_workers=workers,
        collate_fn=collated,
        multiprocessing_context="forkserver" if workers else None,
        persistent_workers=workers > 0,
    )
    losses = []
    for _ in range(3):
        for ids, labels in batches:

            def closure(ids: KeyedRagged = ids, labels: Tensor = labels) -> Tensor:
                optimizer.zero_grad()
                loss = nn.functional.binary_cross_entropy_with_logits(model(ids), labels)
                loss.backward()
                return loss

            losses.append(optimizer.step(closure).item())
        schedule.step()
    return losses


def test_a_trainer_that_steps_by_closure_learns() -> None:
    losses = trained(workers=0)
    assert sum(losses[-12:]) < 0.5 * sum(losses[:12])


@pytest.mark.slow
@pytest.mark.multiproc
def test_workers_of_a_data_loader_change_nothing() -> None:
    assert trained(workers=2) == trained(workers=0)
