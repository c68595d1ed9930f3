"""This process among the ranks of a run, and how ranks learn why another one stopped."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor

from shoal.comm.collectives import Collectives, LocalCollectives, WaitClock
from shoal.comm.launch import current, init, pick_device, pin_cores
from shoal.comm.launchers import detect
from shoal.comm.mesh import Mesh
from shoal.config import RunConfig
from shoal.data import RankShare
from shoal.distributed.model import lost_in_backward
from shoal.errors import CollectiveFailed, ShoalError
from shoal.table.factory import resolve_device

_POLL_S = 0.05
_LAST_READERS_S = 0.3


@dataclass(frozen=True, slots=True)
class Ending:
    """Why a rank ended.

    Args:
        text: its error.
        cause: it is the rank's own error, no other rank's absence.
    """

    text: str
    cause: bool


class Alarm:
    """One run's place for last words.

    Args:
        mesh: the ranks.
        name: of the run among those of a process; alike on all ranks.
    """

    def __init__(self, mesh: Mesh, name: str) -> None:
        self._rank, self._world_size = mesh.rank, mesh.world_size
        # A store of its own connection: another call that waits does not keep this one waiting.
        store = dist.distributed_c10d._get_default_store()
        self._store = store.clone() if hasattr(store, "clone") else store
        self._name = name

    def ring(self, ending: Ending) -> None:
        """Write down why this rank ends. A store that is gone with its rank is no further error."""
        with contextlib.suppress(RuntimeError):
            self._store.set(self._key(self._rank), json.dumps([ending.text, ending.cause]))

    def listen(self, patience_s: float) -> Mapping[int, Ending]:
        """Endings by rank, once all ranks have written theirs or `patience_s` have passed."""
        until = time.monotonic() + patience_s
        found: dict[int, Ending] = {}
        # The store may be gone with the rank that kept it.
        with contextlib.suppress(RuntimeError, ValueError):
            while len(found) < self._world_size and time.monotonic() < until:
                for rank in range(self._world_size):
                    if rank not in found and self._store.check([self._key(rank)]):
                        text, cause = json.loads(self._store.get(self._key(rank)))
                        found[rank] = Ending(text, cause)
                time.sleep(_POLL_S)
        if self._rank == 0:
            time.sleep(_LAST_READERS_S)  # this rank may be the one that keeps the store
        return found

    def _key(self, rank: int) -> str:
        return f"shoal/{self._name}/ending/{rank}"


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
        self.votes: Collectives = LocalCollectives() if mesh is None else mesh.control
        self.waiting: WaitClock | None = None if mesh is None else mesh.time_waits()
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
