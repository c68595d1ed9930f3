"""This process among the ranks of a run, and how ranks learn why another one stopped."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor

from shoal.comm.collectives import Collectives, LocalCollectives, WaitClock
from shoal.comm.launch import current, init, pick_device, pin_cores
from shoal.comm.launch_environment import detect
from shoal.comm.mesh import Mesh
from shoal.config import RunConfig
from shoal.config.tree import Scaling
from shoal.data import RankShare
from shoal.distributed.model import lost_in_backward
from shoal.errors import CollectiveFailed, ShoalError
from shoal.table.factory import resolve_device

_PATIENCE_S = 3.0
_POLL_S = 0.05
_LAST_READERS_S = 0.3
_ENDING = "shoal/run/ending/{}"


class Ranks:
    """The ranks of a run.

    Args:
        mesh: None for one rank.

    Attributes:
        waiting: counts the time that goes into collectives.
    """

    def __init__(self, mesh: Mesh | None) -> None:
        self.mesh = mesh
        self.rank = 0 if mesh is None else mesh.rank
        self.world_size = 1 if mesh is None else mesh.world_size
        self.control: Collectives = LocalCollectives() if mesh is None else mesh.control
        self.waiting: WaitClock | None = None if mesh is None else mesh.time_waits()
        self.step: Callable[[], int] = lambda: 0
        if mesh is not None:
            # A store of its own connection: another call that waits does not keep this one waiting.
            store = dist.distributed_c10d._get_default_store()
            self._store: Any = store.clone() if hasattr(store, "clone") else store

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

    def console(self, console: Console) -> Console:
        """The given one on rank 0, a silent one elsewhere."""
        return console if self.leads else Console(quiet=True)

    def total(self, values: Tensor, *, what: str) -> Tensor:
        """Numbers, float64 on the CPU, added up over ranks; a collective call."""
        if not self.many:
            return values
        self.control.step = self.step()
        (summed,) = self.control.all_reduce(values, "sum", what=what).wait()
        return summed

    def gathered(self, value: Any, *, what: str) -> list[Any]:
        """Every rank's value, by rank; a collective call."""
        self.control.step = self.step()
        return self.control.gather_objects(value, what=what)

    @contextmanager
    def together(self) -> Iterator[None]:
        """End all ranks when one raises, soon, each with the error of the rank that began it.

        Raises:
            ShoalError: this rank's own error, with rank and step in front.
            CollectiveFailed: this rank waited for one that stopped; it reports why that one did.
        """
        try:
            yield
        except ShoalError as error:
            if self.mesh is None:
                raise
            # Errors with further `args` keep their kind, not their parts: the text has them.
            raise type(error)(self._ended(error, self.mesh)) from error
        except Exception as error:
            if self.mesh is None:
                raise
            lost = lost_in_backward(error)
            ended = self._ended(error if lost is None else lost, self.mesh)
            if lost is None:
                raise
            raise CollectiveFailed(ended) from error

    def _ended(self, error: Exception, mesh: Mesh) -> str:
        """Report to the others why this rank ends, and return that with their causes."""
        kind = "" if isinstance(error, ShoalError) else f"{type(error).__name__}: "
        own = f"rank {self.rank} of {self.world_size}, step {self.step()}: {kind}{error}"
        # A store that is gone with the rank that kept it is no further error.
        with contextlib.suppress(RuntimeError):
            # Absence of other ranks is no cause of its own.
            ending = [own, not isinstance(error, CollectiveFailed)]
            self._store.set(_ENDING.format(self.rank), json.dumps(ending))
        mesh.abandon()
        every = self._endings()
        return "\n".join(
            [own, *(text for rank, (text, cause) in every.items() if cause and rank != self.rank)]
        )

    def _endings(self) -> dict[int, tuple[str, bool]]:
        """(error, whether it is a cause) by rank, once all ranks have written theirs or soon."""
        until = time.monotonic() + _PATIENCE_S
        found: dict[int, tuple[str, bool]] = {}
        with contextlib.suppress(RuntimeError, ValueError):
            while len(found) < self.world_size and time.monotonic() < until:
                for rank in range(self.world_size):
                    if rank not in found and self._store.check([_ENDING.format(rank)]):
                        found[rank] = json.loads(self._store.get(_ENDING.format(rank)))
                time.sleep(_POLL_S)
        if self.leads:
            time.sleep(_LAST_READERS_S)  # this rank may be the one that keeps the store
        return found


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
