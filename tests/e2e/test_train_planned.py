"""Runs whose tables go where a plan says: planned at the start, or read from a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

from shoal import config, train
from shoal.comm.launch import init
from shoal.distributed import DistributedModelParallel
from shoal.embedding.collection import EmbeddingCollection
from shoal.embedding.layouts import Feature
from shoal.errors import ConfigError
from shoal.planner import Topology, create_planner, read_plan
from shoal.ragged import KeyedRagged
from shoal.rules.optimizers import Adagrad
from shoal.table.spec import Segment, TableSpec
from support.ranks import run_ranks

pytestmark = pytest.mark.multiproc

BASE: dict[str, Any] = {
    "name": "tiny",
    "seed": 3,
    "threads": 1,
    "device": "cpu",
    "data": {
        "source": {"kind": "synthetic", "examples": 512, "eval_examples": 128, "num_features": 3,
                   "vocabulary": 50, "num_dense": 2},
        "batch_size": 64,
    },
    "tables": {"default": {"dim": 8}},
    "model": {"kind": "deepfm", "hidden": [4]},
    "logging": {"points": 2, "tensorboard": False},
}  # fmt: skip


def trained(settings: dict[str, Any]) -> dict[str, float]:
    result = train.run(config.from_mapping(settings), console=Console(quiet=True))
    return dict(result.metrics["deepfm"])


def with_(folder: Path, **distributed: Any) -> dict[str, Any]:
    return {**BASE, "output": {"dir": str(folder)}, "distributed": distributed}


def test_a_planned_run_is_the_run_and_its_plan_can_be_read(tmp_path: Path) -> None:
    alone = trained(with_(tmp_path / "alone"))
    limits = {"default": "auto", "tables": {"f0": "column_wise"},
              "constraints": {"f1": {"ranks": [1]}}}  # fmt: skip
    auto = run_ranks(2, trained, with_(tmp_path / "auto", placement=limits), timeout_s=120)
    assert auto[0] == auto[1] and auto[0]["auc"] == pytest.approx(alone["auc"], abs=1e-6)
    (folder,) = (tmp_path / "auto").iterdir()
    plan = read_plan(folder)
    kinds = {one.name: (one.sharding, tuple(one.ranks())) for one in plan.tables}
    assert kinds["f0"] == ("column_wise", (0, 1)) and kinds["f1"] == ("table_wise", (1,))
    read = run_ranks(2, trained, with_(tmp_path / "read", plan=str(folder)), timeout_s=120)
    assert read[0]["auc"] == pytest.approx(alone["auc"], abs=1e-6)


def refused(settings: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        trained(settings)
    return str(caught.value)


def test_a_plan_that_fails_ends_every_rank(tmp_path: Path) -> None:
    bad = with_(tmp_path / "a", placement={"default": "auto", "constraints": {"f9": {}}})
    for text in run_ranks(2, refused, bad, timeout_s=120):
        assert "unknown table of a constraint" in text
    file = tmp_path / "plan.json"
    file.write_text(json.dumps({"format": "shoal-plan"}))
    for text in run_ranks(2, refused, with_(tmp_path / "b", plan=str(file)), timeout_s=120):
        assert "shoal plan" in text


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        segments = (Segment(dim=8, optimizer=Adagrad(lr=0.1)),)
        self.tables = EmbeddingCollection(
            [TableSpec(name=name, segments=segments, expected_rows=100) for name in ("a", "b")],
            [Feature("x", "a"), Feature("y", "b")],
        )

    def forward(self, batch: KeyedRagged) -> torch.Tensor:
        return sum(one.sum() for one in self.tables(batch).values())  # type: ignore[return-value]


def collective() -> tuple[str, str, list[str]]:
    mesh = init(device="cpu")
    planner = create_planner("cpu", 16, constraints={"a": {"ranks": [1]}})
    model = Model()
    plan = planner.collective_plan(model)
    wrapped = DistributedModelParallel(model, plan, mesh=mesh)
    wrapped(KeyedRagged.from_lists({"x": [[1, 2]], "y": [[3]]})).backward()
    # Rank 1's own planner would fail otherwise; only rank 0 plans.
    bad = create_planner("cpu", 16, constraints={"c": {}} if mesh.rank == 0 else None)
    with pytest.raises(ConfigError) as caught:
        bad.collective_plan(model)
    names = [spec.name for spec in model.tables.shard.specs]
    return plan.to_json(), str(caught.value), names


def test_rank_0_plans_for_all() -> None:
    first, second = run_ranks(2, collective, timeout_s=60)
    assert first[0] == second[0]
    assert "unknown table" in first[1] and "unknown table" in second[1]
    assert "a" not in first[2] and "a" in second[2]


def test_a_plan_of_another_job_is_refused() -> None:
    plan = create_planner("cpu", 16, topology=Topology(nodes=1, local_size=4)).plan(Model())
    with pytest.raises(ConfigError, match="world size"):
        DistributedModelParallel(Model(), plan)
