"""Collectives over NCCL, on machines with two GPUs or more."""

from __future__ import annotations

import gc
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from shoal.comm import Part, TorchCollectives, init, shutdown
from shoal.distributed import DistributedModelParallel
from shoal.errors import CollectiveFailed
from shoal.optim import SparseOptimizer
from support.collective_checks import check_collectives
from support.ranks import run_ranks
from support.spread_model import SpreadModel, batches, part_of, specs

GPUS = torch.cuda.device_count()

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.multiproc,
    pytest.mark.skipif(GPUS < 2, reason=f"needs 2 GPUs, {GPUS} here"),
]


def nccl(timeout_s: float) -> TorchCollectives:
    dist.init_process_group("nccl", timeout=timedelta(seconds=timeout_s + 30))
    group = dist.group.WORLD
    assert group is not None
    device = torch.device("cuda", dist.get_rank())
    torch.cuda.set_device(device)
    return TorchCollectives(group, device, timeout_s)


def all_checks() -> None:
    check_collectives(nccl(60.0))
    dist.destroy_process_group()


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_all_collectives(world_size: int) -> None:
    if world_size > GPUS:
        pytest.skip(f"needs {world_size} GPUs, {GPUS} here")
    run_ranks(world_size, all_checks, timeout_s=120, reuse=True)


def in_turn() -> list[int]:
    """Groups under one mesh with each of three models, used and dropped."""
    mesh, counted = init(device="cuda", timeout_s=60), []
    for _ in range(3):
        bare = SpreadModel(specs(), device=str(mesh.device))
        model = DistributedModelParallel(bare, mesh=mesh)
        own = part_of(batches(1)[0], mesh.rank, mesh.world_size)
        sparse = SparseOptimizer(model)
        model(own.batch(), own.tensors()[0].to(mesh.device)).sum().backward()
        sparse.step()
        counted.append(len(mesh._groups))
        del bare, model, sparse
        gc.collect()
    shutdown()
    return counted


def test_models_in_turn_under_one_mesh_keep_no_groups() -> None:
    for counted in run_ranks(2, in_turn, timeout_s=120, reuse=True):
        assert counted[-1] == counted[0]


def on_another_stream() -> list[float]:
    """Waits on a stream of its own, drops what was sent, and fills freed memory meanwhile."""
    collectives = nccl(60.0)
    rows, world_size = 1 << 20, collectives.world_size
    splits = (rows,) * world_size
    side = torch.cuda.Stream()
    sums = []
    for _ in range(20):
        data = torch.full((rows * world_size,), float(collectives.rank + 1), device="cuda")
        pending = collectives.all_to_all([Part(data, splits, splits)], what="rows")
        del data
        with torch.cuda.stream(side):
            (got,) = pending.wait()
            sums.append(got.sum())
        del pending, got
        torch.full((rows * world_size,), -1.0, device="cuda")
    torch.cuda.synchronize()
    dist.destroy_process_group()
    return [float(value) / rows for value in sums]


def test_buffers_outlive_other_streams() -> None:
    assert run_ranks(2, on_another_stream, timeout_s=120, reuse=True) == [[3.0] * 20] * 2


def late() -> str:
    collectives = nccl(15.0)
    sizes_W1 = torch.ones(2, 1, dtype=torch.int64)
    collectives.exchange_sizes(sizes_W1, what="first").wait()
    if collectives.rank == 1:
        return ""
    collectives.step = 7
    with pytest.raises(CollectiveFailed) as caught:
        collectives.exchange_sizes(sizes_W1, what="sizes of ids").wait()
    return str(caught.value)


def test_a_rank_that_stays_away_ends_the_wait() -> None:
    text = run_ranks(2, late, timeout_s=120)[0]
    for part in ("'sizes of ids'", "step 7", "rank 0 of 2", "within 15.0 s"):
        assert part in text
