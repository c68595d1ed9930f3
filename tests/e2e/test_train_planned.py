"""Runs whose tables go where a plan says: planned at the start, or read from a file."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
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
from shoal.train import resuming
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


def on_two(work: Callable[..., Any], *args: Any) -> list[Any]:
    """Results of two ranks, on a machine that has measured no speeds."""
    return run_ranks(2, work, *args, environ={"XDG_CACHE_HOME": "/nowhere"})


def trained(settings: dict[str, Any]) -> dict[str, float]:
    result = train.run(config.from_mapping(settings), console=Console(quiet=True))
    return dict(result.metrics["deepfm"])


def with_(folder: Path, **distributed: Any) -> dict[str, Any]:
    return {**BASE, "output": {"dir": str(folder)}, "distributed": distributed}


@pytest.mark.slow
def test_a_planned_run_is_the_run_and_its_plan_can_be_read(tmp_path: Path) -> None:
    alone = trained(with_(tmp_path / "alone"))
    limits = {"default": "auto", "tables": {"f0": "column_wise"},
              "constraints": {"f1": {"ranks": [1]}}}  # fmt: skip
    auto = on_two(trained, with_(tmp_path / "auto", placement=limits))
    assert auto[0] == auto[1] and auto[0]["auc"] == pytest.approx(alone["auc"], abs=1e-6)
    (folder,) = (tmp_path / "auto").iterdir()
    plan = read_plan(folder)
    kinds = {one.name: (one.sharding, tuple(one.ranks())) for one in plan.tables}
    assert kinds["f0"] == ("column_wise", (0, 1)) and kinds["f1"] == ("table_wise", (1,))
    read = on_two(trained, with_(tmp_path / "read", plan=str(folder)))
    assert read[0]["auc"] == pytest.approx(alone["auc"], abs=1e-6)


def refused(settings: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        trained(settings)
    return str(caught.value)


@pytest.mark.slow
def test_a_plan_that_fails_ends_every_rank(tmp_path: Path) -> None:
    bad = with_(tmp_path / "a", placement={"default": "auto", "constraints": {"f9": {}}})
    for text in on_two(refused, bad):
        assert "unknown table of a constraint" in text
    file = tmp_path / "plan.json"
    file.write_text(json.dumps({"format": "shoal-plan"}))
    for text in on_two(refused, with_(tmp_path / "b", plan=str(file))):
        assert "shoal plan" in text


@pytest.mark.slow
def test_a_topology_of_other_devices_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("device: cpu\nnodes: 2\ndevices_per_node: 2\n")
    bad = with_(tmp_path / "a", placement="auto", topology=str(file))
    for text in on_two(refused, bad):
        assert "4 on nodes of 2" in text and "2 on nodes of 2, the ranks of the launcher" in text


@pytest.mark.slow
def test_a_plan_of_rows_elsewhere_is_refused(tmp_path: Path) -> None:
    auto = on_two(trained, with_(tmp_path / "auto", placement="auto"))
    (folder,) = (tmp_path / "auto").iterdir()
    plan = read_plan(folder)
    moved = replace(plan, tables=(replace(plan.tables[0], tier="host"), *plan.tables[1:]))
    file = tmp_path / "plan.json"
    file.write_text(moved.to_json())
    for text in on_two(refused, with_(tmp_path / "read", plan=str(file))):
        assert "where a plan keeps rows: got f0: host; allowed: device" in text
    assert not (tmp_path / "read").exists() and auto[0] == auto[1]


def continued(settings: dict[str, Any], force: str | None) -> dict[str, float]:
    """On rank 1 the variable is another one: what rank 0 has counts."""
    if force is not None:
        os.environ["FORCE_LOAD_SHARDING_PLAN"] = force if os.environ["RANK"] == "0" else "0"
    return trained(settings)


@pytest.mark.slow
def test_the_plan_of_a_checkpoint_is_kept_if_that_is_asked(tmp_path: Path) -> None:
    def of_run(name: str, constraints: Any) -> dict[str, Any]:
        placement = {"default": "auto", "constraints": constraints}
        settings = with_(tmp_path / name, placement=placement)
        return {**settings, "checkpoint": {"dir": str(tmp_path / "saved"), "resume": "auto"}}

    def where(name: str) -> dict[str, tuple[str, tuple[int, ...]]]:
        (folder,) = (tmp_path / name).iterdir()
        return {t.name: (t.sharding, tuple(t.ranks())) for t in read_plan(folder).tables}

    first = of_run("first", {"f0": {"sharding": "column_wise"}, "f1": {"ranks": [1]}})
    on_two(trained, first)
    begun = where("first")
    assert begun["f0"][0] == "column_wise" and begun["f1"] == ("table_wise", (1,))
    # What a later plan would have otherwise.
    other = of_run("first", {"*": {"sharding": "row_wise"}})
    on_two(continued, other, None)
    free = where("first")
    assert free["f1"] == ("row_wise", (0, 1))
    # The newest checkpoint is of the first run still: nothing was left to train.
    on_two(continued, other, "1")
    assert where("first") == begun


@pytest.mark.slow
def test_a_plan_in_a_checkpoint_that_is_damaged_ends_every_rank(tmp_path: Path) -> None:
    settings = with_(tmp_path / "run", placement="auto")
    saved = {**settings, "checkpoint": {"dir": str(tmp_path / "saved"), "resume": "auto"}}
    on_two(trained, saved)
    for text in on_two(spoiled, saved):
        assert "shoal plan" in text and "no plan at all" in text


def spoiled(settings: dict[str, Any]) -> str:
    os.environ["FORCE_LOAD_SHARDING_PLAN"] = "1"
    read = resuming._job_in
    resuming._job_in = lambda *at: {**read(*at), "plan": "no plan at all"}
    return refused(settings)


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


@pytest.mark.slow
def test_rank_0_plans_for_all() -> None:
    first, second = on_two(collective)
    assert first[0] == second[0]
    assert "unknown table" in first[1] and "unknown table" in second[1]
    assert "a" not in first[2] and "a" in second[2]


def test_a_plan_of_another_job_is_refused() -> None:
    plan = create_planner("cpu", 16, topology=Topology(nodes=1, local_size=4)).plan(Model())
    with pytest.raises(ConfigError, match="world size"):
        DistributedModelParallel(Model(), plan)
