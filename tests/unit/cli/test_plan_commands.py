"""`shoal plan` and its commands: what they print and write."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from shoal.cli import app
from shoal.planner import Topology, read_plan, read_statistics, simulation
from shoal.planner.simulation import Simulated, machines_of, read_tables, simulate, sizes_of

ROOT = Path(__file__).parents[3]
DLRM = str(ROOT / "examples" / "dlrm_dcnv2.yaml")
SMALL = ("data.source.examples=4096", "data.batch_size=256")


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # no speeds that were measured before


def invoke(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), prog_name="shoal")
    assert result.exit_code == 0, result.stderr
    return result.stdout


@pytest.mark.slow
def test_a_plan_is_printed_and_written(tmp_path: Path) -> None:
    out = invoke("plan", DLRM, *SMALL, "--devices", "4")
    assert "26 tables on 4 ranks" in out and "is the slowest" in out
    assert "device memory x2" in out and "assumed, not measured" in out
    plan = read_plan(tmp_path / "dlrm_dcnv2-plan.json")
    assert plan.world_size == 4 and len(plan.tables) == 26
    page = (tmp_path / "dlrm_dcnv2-plan.html").read_text()
    assert (
        "bandwidth in a node x2" in page
        and page.count("<rect") > 8
        and "rank 3" in page
        and "<script" not in page
    )
    assert not re.search(r"(?:src|href)=", page)
    first = str(tmp_path / "dlrm_dcnv2-plan.json")
    assert invoke("plan", "diff", first, first) == "no difference\n"


def test_a_run_on_a_declared_cluster(tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text("nodes: 2\ndevices_per_node: 8\ndevice_memory: 80GB\n")
    limits = "distributed.placement.constraints={f0: {sharding: [table_row_wise, grid]}}"
    out = invoke("plan", "make", DLRM, *SMALL, limits, "--topology", "cluster.yaml", "--no-changes")
    assert "x2" not in out
    assert "26 tables on 16 ranks: 2 x 8 cuda" in out
    plan = read_plan(tmp_path / "dlrm_dcnv2-plan.json")
    assert plan.tables[0].name == "f0" and plan.tables[0].sharding in ("table_row_wise", "grid")


def test_statistics_of_data(tmp_path: Path) -> None:
    out = invoke("plan", "profile-data", DLRM, *SMALL, "--batches", "8")
    assert "wrote statistics.json" in out
    found = read_statistics(tmp_path / "statistics.json")
    assert found["f5"].ids == 3 and found["f0"].ids > 1000
    assert all(one.ids_per_sample == 1 for one in found.values())
    told = "distributed.statistics=statistics.json"
    assert "26 tables" in invoke("plan", DLRM, *SMALL, told, "--devices", "2", "--no-changes")


TABLES = """
batch_size: 1024
dense_weights: 1000000
tables:
  giant: {rows: 1.0e+12, dim: 32, state_width: 1, ids_per_sample: 20, tiers: [device, host]}
  small: {rows: 1000, dim: 64, copies: 5}
"""


@pytest.mark.slow
def test_clusters_that_one_does_not_have(tmp_path: Path) -> None:
    (tmp_path / "tables.yaml").write_text(TABLES)
    out = invoke("plan", "simulate", "tables.yaml", "--devices", "8,2048,4096", "--groups")
    lines = out.splitlines()
    assert "bytes too many" in lines[1] and lines[2].split()[0] == "2048"
    assert "wrote tables-simulation.html" in out
    described = read_tables(tmp_path / "tables.yaml")
    assert described is not None and len(described.tables) == 6
    (point,) = simulate(described, machines_of(None), [4096])
    assert point.step_s > 0 and 1e12 * 100 / 4096 < point.device_bytes + point.host_bytes < 80e9


@pytest.mark.slow
def test_ranks_share_the_batch_of_a_run(tmp_path: Path) -> None:
    out = invoke("plan", "simulate", DLRM, *SMALL, "--devices", "1,2,4")
    rows = [line.split() for line in out.splitlines()[1:4]]
    assert [(row[0], row[2]) for row in rows] == [("1", "256"), ("2", "128"), ("4", "64")]
    out = invoke("plan", "simulate", DLRM, *SMALL, "--devices", "1,4", "--batch-size", "32")
    assert [line.split()[2] for line in out.splitlines()[1:3]] == ["32", "32"]


def test_more_ranks_cache_more_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}

    def simulated(what: Simulated, machines: Topology, sizes: list[int], **_: Any) -> list[Any]:
        asked.update({devices: what.tables_on(devices)[0].cache for devices in sizes})
        return []

    monkeypatch.setattr(simulation, "simulate", simulated)
    cached = ("host_rows.cache_bytes=1000000000", "device=cuda")
    invoke("plan", "simulate", DLRM, *SMALL, *cached, "--devices", "1,4")
    assert asked[4] == pytest.approx(4 * asked[1]) and asked[4] < 0.99


def test_a_rank_has_the_batch_of_a_file_of_tables(tmp_path: Path) -> None:
    (tmp_path / "tables.yaml").write_text("batch_size: 512\ntables: {a: {rows: 100, dim: 8}}\n")
    out = invoke("plan", "simulate", "tables.yaml", "--devices", "8,16")
    assert [line.split()[2] for line in out.splitlines()[1:3]] == ["512", "512"]


@pytest.mark.parametrize("text", ["", "8;16", "0", "8,,9", "many"])
def test_numbers_of_devices_without_sense(text: str) -> None:
    from shoal.errors import ConfigError

    with pytest.raises(ConfigError, match="8,64,512"):
        sizes_of(text)


def test_tables_without_sense(tmp_path: Path) -> None:
    from shoal.errors import ConfigError

    file = tmp_path / "tables.yaml"
    for text in ("tables: {a: {rows: 1}}", "tables: {a: {rowz: 1, dim: 2}}", "tables: [1]", "a: ["):
        file.write_text(text)
        with pytest.raises(ConfigError):
            read_tables(file)
    for text, what in (
        ("tables: {a: {rows: 1, dim: 64.7}}", "dim of table 'a': got 64.7"),
        ("tables: {a: {rows: 1, dim: 4, copies: 0}}", "copies of table 'a': got 0"),
        ("{tables: {a: {rows: 1, dim: 4}}, batch_size: 1.5}", "batch_size: got 1.5"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=f"{what}; allowed: a whole number"):
            read_tables(file)
    file.write_text("{tables: {a: {rows: 1, dim: 4.0}}, batch_size: '512', dense_weights: 3.0e7}")
    found = read_tables(file)
    assert found is not None
    assert (found.tables[0].dim, found.batch_size, found.dense_weights) == (4, 512, 30_000_000)
