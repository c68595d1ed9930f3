"""Rows of two collections with tables of equal names, as of a run with a baseline: out and in."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from shoal import checkpoint
from shoal.checkpoint import Contents
from shoal.cli import app
from shoal.rules.optimizers import Adagrad, Adam
from shoal.table.factory import make_shard
from shoal.table.hosting import HostedTables
from shoal.table.shard import IdGroups, StepContext
from shoal.table.spec import Segment, TableSpec

SPECS = {
    "deepfm": TableSpec(name="tail", segments=(Segment(dim=3, optimizer=Adam()),)),
    "logistic": TableSpec(name="tail", segments=(Segment(dim=1, optimizer=Adagrad()),)),
}


def invoke(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["ckpt", *map(str, arguments)], prog_name="shoal")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, " ".join(result.output.split())


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Exported rows of a job of two collections."""
    tables = {}
    for name, spec in SPECS.items():
        shard = make_shard((spec,), seed=3)
        groups = IdGroups(
            torch.arange(50) * 7, torch.tensor([0, 50]), torch.tensor([0], dtype=torch.int32)
        )
        ctx = StepContext(global_step=1, event_time_s=100)
        shard.apply_ids(groups, [torch.ones(50, spec.dim)], ctx=ctx)
        tables[name] = HostedTables(specs=(spec,), shard=shard)
    checkpoint.save(tmp_path / "saved", Contents(tables=tables), step=1, position=10)
    assert invoke("export", tmp_path / "saved", "--out", tmp_path / "rows")[0] == 0
    return tmp_path / "rows"


def test_all_of_them_come_back(tmp_path: Path, rows: Path) -> None:
    code, told = invoke("import", rows, "--format", "parquet", "--out", tmp_path / "back")
    assert code == 0, told
    assert checkpoint.diff(tmp_path / "saved", tmp_path / "back").same


def test_one_is_picked_by_its_whole_name(tmp_path: Path, rows: Path) -> None:
    source = (rows, "--format", "parquet", "--table", "logistic/tail")
    code, told = invoke("import", *source, "--out", tmp_path / "one")
    assert code == 0
    assert "logistic/tail: 50 rows of 1 columns" in told
    code, told = invoke("import", *source[:-1], "tail", "--out", tmp_path / "two")
    assert code == 2
    assert "deepfm/tail" in told
    assert not (tmp_path / "two").exists()


def test_two_do_not_become_one(tmp_path: Path, rows: Path) -> None:
    into = ("--collection", "main", "--out", tmp_path / "one")
    code, told = invoke("import", rows, "--format", "parquet", *into)
    assert code == 2
    assert "deepfm/tail and logistic/tail as main/tail" in told
    assert not (tmp_path / "one").exists()
