"""Collectives over MPI, in jobs of mpirun."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[1] / "support" / "mpi_program.py"
MPIRUN = shutil.which("mpirun")
LACKING = [
    name
    for name, found in (
        ("mpi4py", importlib.util.find_spec("mpi4py") is not None),
        ("mpirun", MPIRUN is not None),
    )
    if not found
]

pytestmark = [
    pytest.mark.multiproc,
    pytest.mark.skipif(bool(LACKING), reason=f"not installed: {', '.join(LACKING)}"),
    pytest.mark.slow,
]


def job(what: str, *, through_mpi4py: bool = False) -> subprocess.CompletedProcess[str]:
    """Two ranks of the program; a job that hangs is an error."""
    command = [str(MPIRUN), "--allow-run-as-root", "--oversubscribe", "-np", "2"]
    command += ["--mca", "btl", "self,vader", sys.executable]
    command += ["-m", "mpi4py"] if through_mpi4py else []
    path = os.pathsep.join(sys.path)
    return subprocess.run(
        [*command, str(PROGRAM), what],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_all_collectives() -> None:
    done = job("checks")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("all good") == 2


@pytest.mark.parametrize("how", ["raises", "late"])
def test_a_rank_that_stops_ends_the_other(how: str) -> None:
    done = job(how)
    assert done.returncode != 0
    for part in ("CollectiveFailed", "'rows'", "step 3", "rank 0 of 2", "within 10.0 s"):
        assert part in done.stderr, done.stderr


def test_a_rank_that_raises_ends_the_job_at_once_under_mpi4py() -> None:
    done = job("raises", through_mpi4py=True)
    assert done.returncode != 0
    assert "a batch is wrong" in done.stderr


def test_a_killed_rank_ends_the_job() -> None:
    assert job("killed").returncode != 0
