"""A process that ends, or forks, while it saves."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.checkpoint import verify
from shoal.checkpoint.store import CheckpointStore
from support.shards import CUDA

pytestmark = pytest.mark.multiproc

PROGRAM = """
import os, sys, threading
import torch
from shoal.checkpoint import Contents, begin
from shoal.checkpoint.saving import Saving
from shoal.rules.optimizers import Adagrad
from shoal import Segment, TableSpec
from shoal.table.cpu.shard import CpuShard
from shoal.table.hosting import HostedTables
from shoal.table.shard import StepContext
from support.id_groups import groups_of

url, how, home = sys.argv[1:]
spec = TableSpec(name="t", segments=(Segment(dim=32, optimizer=Adagrad()),))
ROWS = 200_000
shard = CpuShard([spec], threads=2)
bare = shard
if home == "cuda":
    from support.placed_shard import PlacedCuda
    ROWS = 200_000 if torch.cuda.is_available() else 500
    shard = PlacedCuda([spec])
    bare = shard.inner

def put(rows):
    shard.assign(groups_of((0, list(range(rows)))), (torch.ones(rows, 32),), ctx=StepContext())

put(ROWS)
goes_on, write_all = threading.Event(), Saving._write_all
Saving._write_all = lambda *given: goes_on.wait(60) and write_all(*given)
contents = Contents(tables={"m": HostedTables((spec,), bare)})
saving = begin(url, contents, step=1, position=1)
assert not saving.done
put(9)
if how == "aborted":
    saving.abort()
elif how == "broken":
    import shoal.checkpoint.saving as job_saving
    def commit(*_):
        raise OSError("the disk is gone")
    job_saving.commit = commit
elif how == "forked":
    child = os.fork()
    if child == 0:
        sys.exit(7)  # its own end, which waits for no thread of its parent's
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
goes_on.set()
"""


def left(url: Path, how: str, home: str = "cpu") -> tuple[list[str], str]:
    """Names of checkpoints that a program leaves which ends without waiting, and what it says."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, str(url), how, home],
        capture_output=True,
        text=True,
        env=environ,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [entry.name for entry in CheckpointStore(url).list()], done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("how", ["quiet", "forked"])
def test_a_save_under_way_is_ended_first(tmp_path: Path, how: str) -> None:
    assert left(tmp_path, how) == (["step-000000000001-full"], "")
    assert verify(str(tmp_path)).problems == ()


@pytest.mark.slow
@pytest.mark.parametrize("home", [CUDA])
def test_one_of_a_device_is_ended_first(tmp_path: Path, home: str) -> None:
    assert left(tmp_path, "quiet", home) == (["step-000000000001-full"], "")
    assert verify(str(tmp_path)).problems == ()


@pytest.mark.slow
def test_one_that_was_given_up_is_not_waited_for(tmp_path: Path) -> None:
    assert left(tmp_path, "aborted") == ([], "")


@pytest.mark.slow
def test_one_that_fails_says_so(tmp_path: Path) -> None:
    names, said = left(tmp_path, "broken")
    assert names == []
    assert "the disk is gone" in said
