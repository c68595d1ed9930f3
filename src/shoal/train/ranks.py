"""This process among the ranks of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from shoal.comm.collectives import Collectives, LocalCollectives, WaitClock
from shoal.comm.launch import current, init, pick_device, pin_cores
from shoal.comm.launch_environment import detect
from shoal.comm.mesh import Mesh
from shoal.config import RunConfig
from shoal.config.tree import Scaling
from shoal.data import RankShare
from shoal.table.factory import resolve_device
from shoal.train.rank_failure import end_together


class Ranks:
    """The ranks of a run.

    Args:
        mesh: None for one rank.

    Attributes:
        waiting: counts the time that goes into collectives.
    """

    def __init__(self, mesh: Mesh | None) -> None:
        self.mesh = mesh
        self.control: Collectives = LocalCollectives() if mesh is None else mesh.control
        self.rank, self.world_size = self.control.rank, self.control.world_size
        self.waiting: WaitClock | None = None if mesh is None else mesh.time_waits()
        self.step: Callable[[], int] = lambda: 0

    @property
    def many(self) -> bool:
        """Whether there is more than one."""
        return self.world_size > 1

    @property
    def leads(self) -> bool:
        """Whether this rank writes and prints: rank 0."""
        return self.rank == 0

    @property
    def share(self) -> RankShare:
        """This rank's part of every batch."""
        return RankShare(self.rank, self.world_size)

    def background(self, name: str) -> Collectives | None:
        """Collectives between hosts for work during training; None for one rank."""
        if self.mesh is None:
            return None
        # Gloo: waiting for the others takes no core from those that train.
        return self.mesh.collectives(name, path="torch", device=torch.device("cpu"), timed=False)

    def total(self, values: Tensor | Sequence[float], *, what: str) -> Tensor:
        """Numbers added up over ranks, float64 on the CPU; a collective call."""
        numbers = torch.as_tensor(values, dtype=torch.float64, device="cpu")
        if not self.many:
            return numbers
        self.control.step = self.step()
        (summed,) = self.control.all_reduce(numbers, "sum", what=what).wait()
        return summed

    def any(self, here: bool, *, what: str) -> bool:
        """Whether it is so on any rank; a collective call."""
        return bool(self.total([here], what=what) > 0)

    def gathered(self, value: Any, *, what: str) -> list[Any]:
        """Every rank's value, by rank; a collective call."""
        self.control.step = self.step()
        return self.control.gather_objects(value, what=what)

    def together(self) -> AbstractContextManager[None]:
        """End all ranks when one raises: see `end_together`."""
        # A run sets `step` later.
        return end_together(self.mesh, lambda: self.step()) if self.mesh else nullcontext()


ALONE = Ranks(None)


def gather_ranks(config: RunConfig) -> tuple[Ranks, RunConfig]:
    """Meet the other ranks of the launcher, if there are any; the config with its device settled.

    Raises:
        LaunchError: launcher variables that contradict each other.
        DeviceUnavailable: no such device here.
        CollectiveFailed: the other ranks did not come in time.
    """
    launch = detect()
    if current() is None and launch.world_size == 1:
        return ALONE, _on(config, resolve_device(config.device))
    on_cpu = pick_device(config.device, launch.local_rank).type == "cpu"
    if on_cpu and config.distributed.pin_cores:
        pin_cores(launch.local_rank, launch.local_world_size)
    mesh = init(device=config.device, timeout_s=config.distributed.timeout_s)
    if mesh.world_size == 1:
        return ALONE, _on(config, resolve_device(config.device))
    return Ranks(mesh), _on(config, str(mesh.device), mesh.world_size)


def _on(config: RunConfig, device: str, world_size: int = 1) -> RunConfig:
    size = round(config.data.batch_size * scaled_by(config.distributed.batch_scaling, world_size))
    data = config.data.model_copy(update={"batch_size": size})
    return config.model_copy(update={"device": device, "data": data})


def scaled_by(how: Scaling, world_size: int) -> float:
    """What a number of one rank is multiplied by for more."""
    exponent: float = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}[how]
    return float(world_size**exponent)
