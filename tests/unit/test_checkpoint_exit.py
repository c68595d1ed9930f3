"""A process that ends, or forks, while it saves."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.checkpoint import verify
from shoal.checkpoint.store import CheckpointStore

pytestmark = pytest.mark.multiproc

PROGRAM = """
import os, sys
import torch
from shoal.checkpoint import Contents, begin
from shoal.rules.optimizers import Adagrad
from shoal.table import Segment, TableSpec
from shoal.table.cpu import CpuShard
from shoal.table.hosting import HostedTables
from shoal.table.shard import StepContext
from support.id_groups import groups_of

ROWS = 200_000
spec = TableSpec(name="t", segments=(Segment(dim=32, optimizer=Adagrad()),))
shard = CpuShard([spec], threads=2)
shard.assign(groups_of((0, list(range(ROWS)))), (torch.ones(ROWS, 32),), ctx=StepContext())
contents = Contents(tables={"m": HostedTables((spec,), shard)})
url, how = sys.argv[1:]
saving = begin(url, contents, step=1, position=1)
assert not saving.done
if how == "aborted":
    saving.abort()
elif how == "broken":
    import shoal.checkpoint.job_writing as job_writing
    def commit(*_):
        raise OSError("the disk is gone")
    job_writing.commit = commit
elif how == "forked":
    child = os.fork()
    if child == 0:
        sys.exit(7)  # its own end, which waits for no thread of its parent's
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
"""


def left(url: Path, how: str) -> tuple[list[str], str]:
    """Names of checkpoints that a program leaves which ends without waiting, and what it says."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, str(url), how],
        capture_output=True,
        text=True,
        env=environ,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [entry.name for entry in CheckpointStore(url).list()], done.stderr


@pytest.mark.parametrize("how", ["quiet", "forked"])
def test_a_save_under_way_is_ended_first(tmp_path: Path, how: str) -> None:
    assert left(tmp_path, how) == (["step-000000000001-full"], "")
    assert verify(str(tmp_path)).problems == ()


def test_one_that_was_given_up_is_not_waited_for(tmp_path: Path) -> None:
    assert left(tmp_path, "aborted") == ([], "")


def test_one_that_fails_says_so(tmp_path: Path) -> None:
    names, said = left(tmp_path, "broken")
    assert names == []
    assert "the disk is gone" in said
