"""`shoal train examples/flights.yaml distributed.placement=auto` under torchrun: tables lie where
the plan in the run folder has them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.planner import read_plan

pytestmark = [pytest.mark.multiproc, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
SHORT = ("data.epochs=1", "data.split=2013-03-01T00:00:00-05:00", "eval.max_examples=4096",
         "data.batch_size=16384", "model.hidden=[8]", "baselines=[]",
         "logging.tensorboard=false", "output.dir=runs")  # fmt: skip
# The command line, which also writes what this rank's shard holds: table, first column, columns.
PROGRAM = """
import json, os
from pathlib import Path
from shoal.cli import app
from shoal.train import learner

make = learner.DistributedModelParallel

def made(scorer, *given, **named):
    wrapped = make(scorer, *given, **named)
    held = [(one.hashed_as or one.name, one.first_column, one.dim)
            for one in scorer.tables.shard.specs]
    Path(f"held-{os.environ['RANK']}.json").write_text(json.dumps(held))
    return wrapped

learner.DistributedModelParallel = made
app()
"""


def test_flights_train_as_planned(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
        *("program.py", "train", str(ROOT / "examples" / "flights.yaml")),
        *("distributed.placement=auto", *SHORT),
    ]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SHOAL_")}
    environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(
        command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "plan: " in done.stdout and "is the slowest" in done.stdout
    (folder,) = (tmp_path / "runs").iterdir()
    plan = read_plan(folder)
    assert plan.world_size == 2 and len(plan.tables) == 12
    for rank in range(2):
        held = {tuple(one) for one in json.loads((tmp_path / f"held-{rank}.json").read_text())}
        assert held == {
            (one.table, one.start, one.stop - one.start)
            for table in plan.tables
            for one in table.hosted
            if rank in one.ranks
        }
    assert 0 < json.loads((folder / "metrics.json").read_text())["models"]["deepfm"]["auc"] < 1
