"""Tables beside a dense part that FSDP2 splits: saved while training goes on, and gone on from.

Over Gloo on the CPU, and over NCCL on two GPUs.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shoal.checkpoint.job_state import Contents
from shoal.checkpoint.loading import load
from shoal.checkpoint.saving import begin
from shoal.comm import launch
from shoal.comm.mesh import Mesh
from shoal.distributed import DistributedModelParallel
from shoal.optim import JointOptimizer, SparseOptimizer
from support.rank_devices import DEVICES
from support.ranks import run_ranks
from support.spread_model import Data, SpreadModel, batches, loss_of, part_of, specs

pytestmark = [pytest.mark.multiproc, pytest.mark.slow]

BEFORE, AFTER = 3, 4  # steps until a save, and from it to the end
LIMIT_S = {"cpu": 200, "cuda": 240}


class Training:
    """A model over the ranks of a mesh and its optimizers, at the step it is told of."""

    def __init__(self, mesh: Mesh, seed: int) -> None:
        self.mesh = mesh
        # The checkpoint's values count, whatever a rank begins with.
        model = SpreadModel(specs(), seed=seed, device=str(mesh.device))
        placing = {"users": "row_wise", "items": "column_wise"}
        self.model = DistributedModelParallel(model, placing, mesh=mesh, dense="fsdp2")
        self.dense = torch.optim.Adam(self.model.dense_parameters(), lr=0.05)
        self.joint = JointOptimizer([SparseOptimizer(self.model), self.dense])
        self.ranks = mesh.collectives("saves", path="torch", device=torch.device("cpu"))

    def contents(self) -> Contents:
        (tables,) = self.model.collections().values()
        return Contents(
            tables={"main": tables.hosted},
            modules={"net": self.model.module},
            optimizers={"net": self.dense},
        )

    def train(self, data: list[Data]) -> list[float]:
        """This rank's part of the losses."""
        losses, (rank, size) = [], (self.mesh.rank, self.mesh.world_size)
        for whole in data:
            loss = loss_of(self.model, part_of(whole, rank, size), len(whole.labels), size)
            loss.backward()  # type: ignore[no-untyped-call]
            self.joint.step()
            self.joint.zero_grad()
            losses.append(float(loss.detach()) / size)
        return losses


def run_state(folder: str, device: str, *, resumes: bool) -> list[float]:
    """Losses after the save, on this rank."""
    mesh = launch.init(device=device, timeout_s=LIMIT_S[device] / 2)
    data = batches(BEFORE + AFTER)
    try:
        training = Training(mesh, seed=4 if resumes else 3)
        if resumes:
            load(folder, training.contents(), collectives=training.ranks)
            return training.train(data[BEFORE:])
        training.train(data[:BEFORE])
        saving = begin(
            folder,
            training.contents(),
            step=BEFORE,
            position=BEFORE,
            collectives=training.ranks,
        )
        losses = training.train(data[BEFORE:])
        saving.wait()
        saving.release()
        return losses
    finally:
        launch.shutdown()


def save_on(folder: str, device: str) -> list[float]:
    return run_state(folder, device, resumes=False)


def go_on(folder: str, device: str) -> list[float]:
    return run_state(folder, device, resumes=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("savers", "others"), [(2, 1), (1, 2)])
def test_losses_after_a_resume(tmp_path: Path, device: str, savers: int, others: int) -> None:
    """The same bits on as many ranks, the same numbers on others."""
    folder, limit_s = str(tmp_path), LIMIT_S[device]
    want = run_ranks(savers, save_on, folder, device, timeout_s=limit_s, reuse=True)
    assert len(set(want[0])) == AFTER
    assert run_ranks(savers, go_on, folder, device, timeout_s=limit_s, reuse=True) == want
    found = run_ranks(others, go_on, folder, device, timeout_s=limit_s, reuse=True)
    sums = [[sum(parts) for parts in zip(*by_rank, strict=True)] for by_rank in (found, want)]
    assert sums[0] == pytest.approx(sums[1], rel=1e-9)
