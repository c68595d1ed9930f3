"""HRM's bench: no case goes missing, and rows that need GPUs are left open without them."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

FILE = Path(__file__).resolve().parents[2] / "bench" / "hrm.py"


def bench() -> Any:
    """bench/hrm.py; `import hrm` is the example's package."""
    spec = importlib.util.spec_from_file_location("bench_of_hrm", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def floor(case: Any) -> float:
    return float(case.bar * case.peer_value)


def test_every_row_that_was_asked_for() -> None:
    module = bench()
    cases = {case.name: case for case in module.cases(module.Scale(gpus=4))}
    for seed in range(3):
        rules = f"per-id rules, seed {seed}"
        assert floor(cases[f"{rules}, solved"]) == 0.9
        assert floor(cases[f"{rules}, not solved with frozen rows"]) == 0.95
        assert floor(cases[f"4 x 4 Sudoku, seed {seed}, solved"]) == 0.6
    for name in ("Sudoku recipe, one GPU", "Sudoku recipe, 4 GPUs"):
        assert round(floor(cases[name]), 6) == 6000
    assert cases["Sudoku recipe, 1 to 4 GPUs"].bar == 0.9
    table = [name for name in cases if name.startswith("table of 10,000,000 x 512 over 4 GPUs")]
    assert len(table) == 4


def test_without_gpus_their_rows_have_a_note() -> None:
    module = bench()
    for declared, run in module._jobs(module.Scale(gpus=0), None)[-2:]:
        assert {found.note for found in run().values()} == {"needs GPUs"}
        assert set(run()) == {case.name for case in declared}


def test_a_learning_job_runs_from_the_command_line(tmp_path: Path) -> None:
    command = [sys.executable, str(FILE), "--quick", "--case", "Sudoku, seed 1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    (row,) = [line for line in done.stdout.splitlines() if line.startswith("4 x 4 Sudoku, seed 1,")]
    assert "1 CPU s" in row and "steps, cells 0." in row
