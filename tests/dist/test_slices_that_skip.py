"""Column slices that skip a gradient on one rank only: what a delta and a run make of them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shoal.checkpoint import CheckpointStore, LoadOptions, verify
from shoal.checkpoint.loading import load
from shoal.checkpoint.saving import begin, save
from shoal.comm import launch
from shoal.config.tree import CheckpointSettings
from shoal.errors import CheckpointError
from shoal.table.shard import StepContext
from shoal.train.saving import Saver
from support.ranks import run_ranks
from support.saved_jobs import SPECS, Job, group_of, placed_job

pytestmark = pytest.mark.multiproc


@pytest.mark.slow
def test_slices_that_skip_alone(tmp_path: Path) -> None:
    told = run_ranks(2, skip_on_one, str(tmp_path))
    assert all("column slices of table" in one and "nan_policy" in one for one in told), told
    store = CheckpointStore(tmp_path / "run")
    # After the third step a slice had skipped a row, after the fourth none had any more.
    assert [(one.step, one.kind) for one in store.list()] == [
        (1, "full"), (2, "delta"), (3, "full"), (4, "delta"),
    ]  # fmt: skip
    assert verify(tmp_path / "run").ok
    loaded = load(tmp_path / "run", Job().contents(), options=LoadOptions(dense=False))
    assert loaded.rows["main/users"] == 10


def skip_on_one(root: str) -> str:
    mesh = launch.init(device="cpu", timeout_s=120)
    collectives, votes = mesh.collectives("checkpoints"), mesh.collectives("votes")
    job = placed_job("column_wise", mesh.world_size, mesh.rank)
    rows = range(10)
    step(job, rows, skips=False)
    first = begin(f"{root}/alone", job.contents(), step=1, position=1, collectives=collectives)
    parent = first.wait()
    step(job, rows, skips=mesh.rank == 1)
    with pytest.raises(CheckpointError) as caught:
        save(
            f"{root}/alone", job.contents(), step=2, position=2, kind="delta",
            parent=parent, since=first.cursors, collectives=collectives,
        )  # fmt: skip
    first.release()

    def anywhere(here: bool, *, what: str) -> bool:
        return bool(votes.all_reduce(torch.tensor([float(here)]), "sum", what=what).wait()[0] > 0)

    ranks: Any = SimpleNamespace(
        leads=mesh.rank == 0, background=lambda _: collectives, any=anywhere
    )
    learner: Any = SimpleNamespace(
        name="main", nan_policy="skip", served=False, tables=SimpleNamespace(hosted=job.tables),
        module=job.net, optimizer=job.optimizer,
    )  # fmt: skip
    run_state: Any = SimpleNamespace(
        learners=(learner,), steps=0, position=0, ranks=ranks, state=lambda: ({}, {})
    )
    settings = CheckpointSettings(every_steps=1, background=False)
    with Saver(f"{root}/run", settings, run_state, job={}) as saver:
        for skips in (False, False, mesh.rank == 1, False):
            step(job, rows, skips=skips)
            run_state.steps += 1
            saver.on_pause()
    return str(caught.value)


def step(job: Job, ids: range, *, skips: bool) -> None:
    """Of the first table; one that skips has NaN in its columns of the first row."""
    ids_U = torch.tensor(ids) * 7919
    ctx = StepContext(global_step=job.steps, event_time_s=1, nan_policy="skip")
    for table, mine_U, _ in job._parts(SPECS[0], ids_U):
        grads = torch.ones(len(ids), job.shard.specs[table].dim)
        grads[0] = float("nan") if skips else 1.0
        job.shard.apply_ids(group_of(table, ids_U[mine_U]), [grads], ctx=ctx)
    job.steps += 1
