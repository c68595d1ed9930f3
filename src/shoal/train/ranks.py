"""This process among the ranks of a run, one rank or many."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from shoal.comm.alarm import Alarm, Ending
from shoal.comm.collectives import Collectives, LocalCollectives
from shoal.comm.devices import pick_device, pin_cores
from shoal.comm.launch import current, init
from shoal.comm.launchers import detect
from shoal.comm.mesh import Mesh
from shoal.comm.timed import Waiting
from shoal.config import RunConfig
from shoal.data import RankShare
from shoal.distributed.dense import lost_in_backward
from shoal.errors import CollectiveFailed, ShoalError
from shoal.table.factory import resolve_device

__all__ = ["ALONE", "Ranks", "gather_ranks", "seed_rank"]

_PATIENCE_S = 3.0


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
        self.votes: Collectives = LocalCollectives() if mesh is None else mesh.votes
        self.waiting: Waiting | None = None if mesh is None else mesh.time_waits()
        self.step: Callable[[], int] = lambda: 0
        self._alarm = None if mesh is None else Alarm(mesh, "run")

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
        """Collectives between hosts for work beside training; None for one rank."""
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
        self.votes.step = self.step()
        (summed,) = self.votes.all_reduce(values, "sum", what=what).wait()
        return summed

    def gathered(self, value: Any, *, what: str) -> list[Any]:
        """Every rank's value, by rank; a collective call."""
        self.votes.step = self.step()
        return self.votes.gather_objects(value, what=what)

    @contextmanager
    def together(self) -> Iterator[None]:
        """End all ranks when one raises, soon, each with the error of the rank that began it.

        Raises:
            ShoalError: this rank's own error, with rank and step in front.
            CollectiveFailed: this rank waited for one that stopped; it tells why that one did.
        """
        try:
            yield
        except ShoalError as error:
            if self._alarm is None:
                raise
            # Errors with further `args` keep their kind, not their parts: the text has them.
            raise type(error)(self._ended(error, self._alarm)) from error
        except Exception as error:
            if self._alarm is None:
                raise
            lost = lost_in_backward(error)
            ended = self._ended(error if lost is None else lost, self._alarm)
            if lost is None:
                raise
            raise CollectiveFailed(ended) from error

    def _ended(self, error: Exception, alarm: Alarm) -> str:
        """Tell the others, hear them, and say it all."""
        assert self.mesh is not None
        kind = "" if isinstance(error, ShoalError) else f"{type(error).__name__}: "
        own = f"rank {self.rank} of {self.world_size}, step {self.step()}: {kind}{error}"
        alarm.ring(Ending(own, cause=not isinstance(error, CollectiveFailed)))
        self.mesh.abandon()
        heard = alarm.listen(_PATIENCE_S)
        causes = [
            ending.text for rank, ending in heard.items() if ending.cause and rank != self.rank
        ]
        return "\n".join([own, *causes])


ALONE = Ranks(None)


def gather_ranks(config: RunConfig) -> tuple[Ranks, RunConfig]:
    """Meet the other ranks of the launcher, if there are any; the config with its device settled.

    Raises:
        LaunchError: launcher variables that contradict each other.
        DeviceUnavailable: no such device here.
        CollectiveFailed: the other ranks did not come in time.
    """
    if current() is None and detect().world_size == 1:
        device = resolve_device(config.device)
        return ALONE, config.model_copy(update={"device": device})
    launch = detect()
    on_cpu = pick_device(config.device, launch.local_rank).type == "cpu"
    if on_cpu and config.distributed.pin_cores:
        pin_cores(launch.local_rank, launch.local_world_size)
    mesh = init(device=config.device, timeout_s=config.distributed.timeout_s)
    if mesh.world_size == 1:
        device = resolve_device(config.device)
        return ALONE, config.model_copy(update={"device": device})
    return Ranks(mesh), config.model_copy(update={"device": str(mesh.device)})


def seed_rank(config: RunConfig, ranks: Ranks) -> None:
    """After the models are built alike, let ranks draw different numbers, for dropout say."""
    if ranks.many:
        torch.manual_seed(config.seed + ranks.rank)
