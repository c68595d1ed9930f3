"""HRM's sparse step on 1, 2 and 4 ranks, with rows on every rank or spread over them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hrm.puzzle_table import TABLE, PuzzleTable
from shoal import DistributedModelParallel, SparseOptimizer, comm
from support.hrm_oracle import sparse_step
from support.ranks import run_ranks
from support.spread_model import on_mesh

pytestmark = [pytest.mark.multiproc, pytest.mark.slow]

ROWS, DIM, LR, DECAY, STEPS, EACH = 20, 6, 0.125, 0.5, 12, 8


def batch_of(step: int, world_size: int) -> tuple[list[Tensor], list[Tensor]]:
    """Ids and gradients of each rank, exact in any order of sums; some cancel over ranks."""
    generator = torch.Generator().manual_seed(100 * world_size + step)
    total = EACH * world_size
    ids = torch.randint(0, ROWS - 2, (total,), generator=generator)
    grads = torch.randint(-3, 4, (total, DIM), generator=generator).float()
    ids[ids == 7] = 8
    ids[0] = ids[-1] = 7  # on the first and the last rank
    grads[-1] = -grads[0]
    return list(ids.split(EACH)), list(grads.split(EACH))


def trained(mesh: comm.Mesh | None, world_size: int, placing: str) -> Tensor:
    table = PuzzleTable(DIM, lr=LR, weight_decay=DECAY)
    model: nn.Module = table
    if mesh is not None:
        model = DistributedModelParallel(table, placement={TABLE: placing}, mesh=mesh)
    optimizer = SparseOptimizer(model)
    rank = 0 if mesh is None else mesh.rank
    for step in range(STEPS):
        ids, grads = batch_of(step, world_size)
        (model(ids[rank]) * grads[rank]).sum().backward()
        optimizer.step()
    return table.rows.table(TABLE).find(torch.arange(ROWS))[0]


@pytest.mark.parametrize("placing", ["data_parallel", "row_wise"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_steps_are_hrms(world_size: int, placing: str) -> None:
    found = (
        [trained(None, 1, placing)]
        if world_size == 1
        else run_ranks(world_size, on_mesh, trained, world_size, placing)
    )
    want = torch.zeros(ROWS, DIM)
    for step in range(STEPS):
        want = sparse_step(want, *batch_of(step, world_size), LR, DECAY)
    assert len(found) == world_size
    for rows in found:
        assert torch.equal(rows, want)
    assert bool((want[ROWS - 2 :] == 0).all()) and bool((want[7] == 0).all())
