"""Dense parts saved by one process, by DDP and by FSDP2; each loads what any of them saved.

Over Gloo on the CPU, and over NCCL on two GPUs.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from shoal.checkpoint.dense import capture, write
from shoal.checkpoint.job_state import Contents
from shoal.checkpoint.loading import load
from shoal.checkpoint.manifest import commit
from shoal.checkpoint.storage import Storage
from shoal.comm import launch
from shoal.comm.collectives import Collectives, LocalCollectives
from shoal.errors import CheckpointError
from support.dense_manifest import manifest_of
from support.rank_devices import DEVICES
from support.ranks import run_ranks

pytestmark = [pytest.mark.multiproc, pytest.mark.slow]

FORMS = ("one", "ddp", "fsdp2")
BATCH = 8
HOST = torch.device("cpu")


class Net(nn.Module):
    """Rows that two ranks cannot halve, a buffer, and a parameter that gets no gradient."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(3, 5)
        self.last = nn.Linear(5, 1)
        self.idle = nn.Parameter(torch.randn(3))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x_BD: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = self.last(self.first(x_BD).tanh())
        return out


class Job:
    def __init__(self, form: str, seed: int, ranks: Collectives, device: torch.device) -> None:
        self.ranks, self.device = ranks, device
        net = Net(seed).to(device)
        self.model: nn.Module = net
        if form == "fsdp2":
            # Left to itself it takes the GPU of a machine that has one.
            fully_shard(net, mesh=init_device_mesh(device.type, (ranks.world_size,)))
        elif form == "ddp":
            self.model = DistributedDataParallel(net, find_unused_parameters=True)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.05 / (1 + seed))

    def train(self, steps: int, seed: int) -> list[float]:
        made = torch.Generator().manual_seed(seed)
        share = BATCH // self.ranks.world_size
        losses = []
        for _ in range(steps):
            x_BD = torch.randn(BATCH, 3, generator=made)
            own = x_BD[self.ranks.rank * share :][:share].to(self.device)
            loss = (self.model(own) - own.sum(1, keepdim=True)).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            losses.append(float(loss.detach()))
        return losses

    def values(self) -> dict[str, Tensor]:
        """Everything that training goes on from, whole."""
        bare = self.model.module if isinstance(self.model, DistributedDataParallel) else self.model
        found = {key: whole(value) for key, value in bare.state_dict().items()}
        for name, parameter in bare.named_parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                found[f"{name}/{key}"] = whole(value)
        found["lr"] = torch.tensor(self.optimizer.param_groups[0]["lr"])
        return found

    def contents(self) -> Contents:
        return Contents(modules={"net": self.model}, optimizers={"net": self.optimizer})


def whole(value: Tensor) -> Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().cpu().clone()


def save(
    folder: str, form: str, ranks: Collectives, device: torch.device = HOST
) -> dict[str, Tensor]:
    job = Job(form, 0, ranks, device)
    job.train(3, seed=1)
    contents = job.contents()
    captured = capture(contents.modules, contents.optimizers, rank=ranks.rank)
    want = job.values()
    job.train(1, seed=9)  # the copies are of the snapshot
    storage = Storage(folder)
    files = write(captured, storage, ranks)
    assert all(other == files for other in ranks.gather_objects(files, what="files"))
    if ranks.rank == 0:
        commit(storage, manifest_of(files, ("net",), ("net",)))
    ranks.barrier(what="committed")
    return want


def load_on(
    folder: str, form: str, ranks: Collectives, device: torch.device = HOST
) -> tuple[dict[str, Tensor], list[float]]:
    job = Job(form, 1, ranks, device)
    load(folder, job.contents(), collectives=ranks)
    return job.values(), job.train(2, seed=4)


def on_ranks(work: str, folder: str, form: str, device: str = "cpu") -> Any:
    mesh = launch.init(device=device, timeout_s=120)
    try:
        ranks = mesh.collectives("checkpoint", device=HOST)
        return globals()[work](folder, form, ranks, mesh.device)
    finally:
        launch.shutdown()


def everywhere(work: str, folder: Path, form: str, device: str = "cpu") -> Any:
    """What the first rank returns."""
    if form == "one":
        return globals()[work](str(folder), form, LocalCollectives(), torch.device(device))
    found = run_ranks(2, on_ranks, work, str(folder), form, device, reuse=True)
    return found[0]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("device", DEVICES)
def test_each_form_loads_what_any_saved(tmp_path: Path, device: str, form: str) -> None:
    want = everywhere("save", tmp_path, form, device)
    parts = [p.name for p in (tmp_path / "dense").iterdir() if p.suffix == ".distcp"]
    assert len(parts) == (2 if form == "fsdp2" else 1)
    for other in FORMS:
        found, losses = everywhere("load_on", tmp_path, other, device)
        assert found.keys() == want.keys()
        for key, value in want.items():
            assert torch.equal(found[key], value), (other, key)
        assert all(loss == loss for loss in losses)


def failing(folder: str, form: str, ranks: Collectives, device: torch.device) -> tuple[str, bool]:
    job = Job(form, 1, ranks, device)
    before = copy.deepcopy(job.values())
    with pytest.raises(CheckpointError) as caught:
        load(folder, job.contents(), collectives=ranks)
    after = job.values()
    same = before.keys() == after.keys() and all(
        torch.equal(value, after[key]) for key, value in before.items()
    )
    return str(caught.value), same


def test_a_damaged_part_of_one_rank_stops_all(tmp_path: Path) -> None:
    everywhere("save", tmp_path, "fsdp2")
    for file in sorted((tmp_path / "dense").iterdir()):
        kept = file.read_bytes()
        data = bytearray(kept)
        data[len(data) // 3] ^= 4
        file.write_bytes(data)
        said = run_ranks(2, on_ranks, "failing", str(tmp_path), "fsdp2")
        for text, same in said:
            assert file.name in text and same
        file.write_bytes(kept)
    assert everywhere("load_on", tmp_path, "fsdp2")
