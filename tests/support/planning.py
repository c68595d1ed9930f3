"""Planning problems of tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shoal.planner.calibrate import measured_file
from shoal.planner.cost import CostModel, Workload
from shoal.planner.options import Constraint, TableInput, options_of
from shoal.planner.problem import PlacementProblem, problem_of
from shoal.planner.statistics import zipf
from shoal.planner.topology import Topology


def table(name: str = "t", rows: float = 1e6, **settings: Any) -> TableInput:
    """A table of 64 columns with one Zipf id per example."""
    per_sample = settings.pop("ids_per_sample", 1.0)
    own = {"dim": 64, "state_width": 64.0, "statistics": zipf(rows, ids_per_sample=per_sample)}
    return TableInput(name=name, rows=rows, **{**own, **settings})


def problem(tables: list[TableInput], topology: Topology, **work: Any) -> PlacementProblem:
    """Every option of some tables, unconstrained."""
    model = CostModel(topology, Workload(**{"batch_size": 4096, "dense_s": 1e-3, **work}))
    return problem_of(tables, [options_of(t, Constraint(), topology) for t in tables], model)


def kept(folder: Path, topology: Topology) -> Path:
    """A file of measured speeds in a folder."""
    path, text = measured_file(folder, topology)
    path.write_text(text)
    return path
