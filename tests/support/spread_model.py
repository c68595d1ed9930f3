"""A small model of two tables, its batches, and the result of a run: losses, rows, parameters."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from shoal.comm import launch
from shoal.embedding.collection import EmbeddingCollection
from shoal.embedding.combiners import ReduceMean
from shoal.embedding.layouts import Feature
from shoal.ragged import KeyedRagged
from shoal.rules.initializers import Uniform, Zeros
from shoal.rules.optimizers import Adagrad, Adam, Optimizer
from shoal.table.spec import Segment, TableSpec

__all__ = [
    "Data",
    "Outcome",
    "SpreadModel",
    "batches",
    "check_equal",
    "loss_of",
    "on_mesh",
    "outcome_of",
    "part_of",
    "rows_of",
    "specs",
    "whole_rows",
]

DENSE = 3


def specs(rule: Optimizer | None = None, *, zeros: bool = False) -> tuple[TableSpec, ...]:
    """Two float64 tables, 4 and 8 wide."""
    start = Zeros() if zeros else Uniform(-0.5, 0.5)
    rules = {"users": rule or Adam(lr=0.05), "items": rule or Adagrad(lr=0.1)}
    return tuple(
        TableSpec(
            name=name,
            segments=(Segment(name="s", dim=dim, optimizer=rules[name], initializer=start),),
            dtype="float64",
        )
        for name, dim in (("users", 4), ("items", 8))
    )


class SpreadModel(nn.Module):
    """DeepFM in small: pooled rows and dense numbers through an MLP with batch statistics."""

    def __init__(
        self,
        tables: Sequence[TableSpec],
        *,
        norm: bool = False,
        seed: int = 3,
        device: str = "cpu",
    ) -> None:
        super().__init__()
        features = [
            Feature("user", "users"),
            Feature("item", "items", ReduceMean()),
            Feature("history", "items"),
        ]
        self.tables = EmbeddingCollection(tables, features, seed=5, device=device)
        torch.manual_seed(seed)
        width = 4 + 8 + 8 + DENSE
        middle = nn.BatchNorm1d(8) if norm else nn.Tanh()
        self.mlp = nn.Sequential(nn.Linear(width, 8), middle, nn.Linear(8, 1)).double().to(device)

    def forward(self, batch: KeyedRagged, dense_BD: Tensor) -> Tensor:
        out = self.tables(batch)
        parts = [out["user"], out["item"], out["history"], dense_BD]
        return self.mlp(torch.cat(parts, dim=1))[:, 0]


@dataclass
class Data:
    """One batch of the whole job."""

    lists: dict[str, list[list[int]]]
    dense: list[list[float]]
    labels: list[float]

    def batch(self) -> KeyedRagged:
        return KeyedRagged.from_lists(self.lists)

    def tensors(self) -> tuple[Tensor, Tensor]:
        dense = torch.tensor(self.dense, dtype=torch.float64).reshape(-1, DENSE)
        return dense, torch.tensor(self.labels, dtype=torch.float64)


def batches(count: int, size: int = 8, seed: int = 11) -> list[Data]:
    rng = random.Random(seed)
    made = []
    for _ in range(count):
        lists = {
            name: [[rng.randrange(-20, 20) for _ in range(rng.randrange(4))] for _ in range(size)]
            for name in ("user", "item", "history")
        }
        dense = [[rng.uniform(-1, 1) for _ in range(DENSE)] for _ in range(size)]
        made.append(Data(lists, dense, [float(rng.randrange(2)) for _ in range(size)]))
    return made


def part_of(data: Data, rank: int, world_size: int) -> Data:
    """A rank's examples: every W-th."""
    return Data(
        {name: lists[rank::world_size] for name, lists in data.lists.items()},
        data.dense[rank::world_size],
        data.labels[rank::world_size],
    )


@dataclass
class Outcome:
    """What a rank has in the end; `rows` by hosted table and id."""

    losses: list[float] = field(default_factory=list)
    rows: dict[str, dict[int, list[float]]] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)


def rows_of(model: nn.Module) -> dict[str, dict[int, list[float]]]:
    """Rows of this process's shards."""
    found: dict[str, dict[int, list[float]]] = {}
    for part in model.modules():
        if isinstance(part, EmbeddingCollection):
            for k, spec in enumerate(part.shard.specs):
                chunk = part.shard.export(k)
                found[spec.name] = dict(
                    zip(chunk.ids.tolist(), chunk.weights.tolist(), strict=True)
                )
    return found


def whole_rows(parts: Sequence[dict[str, dict[int, list[float]]]]) -> dict[str, dict[int, Any]]:
    """Rows of whole tables out of the ranks' rows; replicas must be equal."""
    slices: dict[str, dict[int, dict[int, list[float]]]] = {}
    for part in parts:
        for name, rows in part.items():
            if name == "(no table)":
                continue
            table, _, columns = name.partition("[")
            start = int(columns.split(":")[0]) if columns else 0
            for id_, row in rows.items():
                kept = slices.setdefault(table, {}).setdefault(id_, {}).setdefault(start, row)
                assert kept == row
    return {
        table: {
            id_: [value for start in sorted(parts) for value in parts[start]]
            for id_, parts in rows.items()
        }
        for table, rows in slices.items()
    }


def loss_of(model: nn.Module, data: Data, total: int, world_size: int) -> Tensor:
    """A rank's part of the mean loss of the whole batch, for gradients that are averaged."""
    dense, labels = (part.to(next(model.parameters()).device) for part in data.tensors())
    logits = model(data.batch(), dense)
    loss = binary_cross_entropy_with_logits(logits, labels, reduction="sum")
    return loss * world_size / total


def outcome_of(model: nn.Module, losses: Sequence[float]) -> Outcome:
    """What this rank has now."""
    state = {name: value.tolist() for name, value in model.state_dict().items()}
    return Outcome(list(losses), rows_of(model), state)


def check_equal(outcomes: Sequence[Outcome], expected: Outcome, *, exactly: bool = False) -> None:
    """Ranks together have the losses, rows and parameters of one process."""
    rows = whole_rows([outcome.rows for outcome in outcomes])
    assert {name: set(ids) for name, ids in rows.items()} == {
        name: set(ids) for name, ids in expected.rows.items()
    }
    if exactly:
        assert rows == expected.rows
    losses = [sum(parts) for parts in zip(*[o.losses for o in outcomes], strict=True)]
    assert losses == pytest.approx(expected.losses, rel=1e-9)
    for table, by_id in expected.rows.items():
        for id_, row in by_id.items():
            assert rows[table][id_] == pytest.approx(row, rel=1e-9, abs=1e-11)
    for outcome in outcomes:
        assert outcome.state == outcomes[0].state
        assert list(outcome.state) == list(expected.state)
        for name, value in expected.state.items():
            got, want = torch.tensor(outcome.state[name]), torch.tensor(value)
            torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7)


def on_mesh(act: Callable[..., Any], *args: Any) -> Any:
    """`act(mesh, *args)` on this rank."""
    mesh = launch.init(device="cpu", timeout_s=120)
    try:
        return act(mesh, *args)
    finally:
        launch.shutdown()
