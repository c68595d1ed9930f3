"""All ranks of a job, their device and process groups, and how long a rank waits for others."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import logging
import time
import weakref
from collections.abc import MutableSet
from typing import Literal, cast, get_args

import torch
import torch.distributed as dist

from shoal.comm.backends.shared_memory import SharedMemoryCollectives
from shoal.comm.backends.torch import TorchCollectives
from shoal.comm.collectives import Collectives, LocalCollectives, WaitClock
from shoal.comm.consensus import require_same
from shoal.comm.launch_environment import Launch
from shoal.comm.mismatched_calls import Calls, Watchdog
from shoal.errors import CollectiveFailed, ConfigError, DeviceUnavailable, collective_failed

_made = itertools.count()  # ranks make their meshes in the same order


_log = logging.getLogger("shoal.comm")

Path = Literal["auto", "torch", "shared_memory", "mpi"]


class Mesh:
    """All ranks of a job: this rank's place, its device and the groups that it talks in.

    Made by `shoal.comm.init`. One rank alone has no process groups; its backend is "local".

    Args:
        launch: place of this rank.
        device: where this rank's tensors are.
        backend: "nccl", "gloo" or "local": of the groups that `new_group` makes.
        timeout_s: of every collective unless a group has another.
        owns_world: whether closing ends torch's default process group too.
    """

    def __init__(
        self,
        launch: Launch,
        device: torch.device,
        backend: str,
        timeout_s: float,
        *,
        owns_world: bool = False,
    ) -> None:
        self.launch = launch
        self.device = device
        self.backend = backend
        self.rank = launch.rank
        self.world_size = launch.world_size
        self.timeout_s = timeout_s
        self._owns_world = owns_world
        self._groups: list[dist.ProcessGroup] = []
        self._unused: set[dist.ProcessGroup] = set()
        self._clock: WaitClock | None = None
        several = self.world_size > 1
        # One rank's hold nothing to close; and models with their mesh are copied there.
        self._open: MutableSet[Collectives] = weakref.WeakSet() if several else set()
        self._watch = Watchdog(self.rank, self.world_size, number=next(_made)) if several else None
        host = torch.device("cpu")
        self.control: Collectives = LocalCollectives(host)
        if several:
            group = self._make_group("control", timeout_s, host, backend="gloo")
            watched = self.watched("control")
            self.control = TorchCollectives(group, host, timeout_s, watched=watched)

    def new_group(
        self, name: str, *, timeout_s: float | None = None, device: torch.device | None = None
    ) -> dist.ProcessGroup | None:
        """A group of all ranks, say for one collection's exchange; None for one rank alone.

        Every rank calls this, with the same names in the same order. The mesh ends the group, or
        `end_with` says when.

        Args:
            name: what the group is for, in logs and in torch's messages.
            timeout_s: of its collectives; the mesh's when left out.
            device: where its tensors are; the mesh's device when left out.

        Raises:
            ConfigError: ranks ask for different groups.
            CollectiveFailed: a rank did not take part.
        """
        if self.world_size == 1:
            return None
        device = device or self.device
        wanted = name if device.type == self.device.type else f"{name} on {device.type}"
        self._require_same(f"group {name!r}", wanted)
        return self._make_group(name, timeout_s or self.timeout_s, device)

    def collectives(
        self,
        name: str,
        *,
        path: Path = "auto",
        timeout_s: float | None = None,
        device: torch.device | None = None,
        timed: bool = True,
    ) -> Collectives:
        """Collectives of all ranks over a way of their own. Every rank calls this alike.

        Args:
            name: what they are for.
            path: "auto" picks: one rank talks to itself; NCCL on CUDA; shared memory where all
                ranks are on this host; Gloo otherwise. "torch" is NCCL or Gloo, "mpi" is mpi4py.
            timeout_s: of each collective; the mesh's when left out.
            device: where tensors are; the mesh's device when left out.
            timed: whether `time_waits` counts them; not those of a background thread.

        Raises:
            ConfigError: an unknown path, one that cannot serve the device, or ranks that ask for
                different ones.
            CollectiveFailed: a rank did not take part.
        """
        device = device or self.device
        timeout_s = timeout_s or self.timeout_s
        carrier = self._carrier(path, device)
        if self.world_size == 1:
            made: Collectives = LocalCollectives(device)
        else:
            self._require_same(f"collectives {name!r}", (name, carrier))
            made = self._over(carrier, name, device, timeout_s, given=path != "auto")
        if timed and self.world_size > 1:
            made.clock = self._clock
        self._open.add(made)
        if self.rank == 0:
            _log.info("collectives %r: %s on %s", name, carrier, device.type)
        return made

    def end_with(self, owner: object, group: dist.ProcessGroup) -> None:
        """End a group whose owner is gone on every rank, when these make another one."""
        weakref.finalize(owner, self._unused.add, group).atexit = False

    def watched(self, name: str) -> Calls:
        """Where calls of a group are noted, so that ranks in different calls do not wait for a
        time-out. Every rank calls this alike."""
        return Calls(name) if self._watch is None else self._watch.group(name)

    def time_waits(self) -> WaitClock:
        """Count the time of all collectives made from now on; the same clock at each call."""
        if self._clock is None:
            self._clock = WaitClock()
        return self._clock

    def abandon(self) -> None:
        """Let go of all connections: ranks that wait for this one fail. No call may follow."""
        for made in self._open:
            made.close()
        for group in self._groups:
            with contextlib.suppress(RuntimeError):  # gone already, with its other ranks
                group.abort()

    def close(self) -> None:
        """Close all collectives and end the groups that this mesh made. Not a collective call."""
        for made in (*self._open, self.control):
            made.close()
        if self._watch is not None:
            self._watch.close()
        self._unused.clear()
        groups, self._groups = self._groups, []
        if self._owns_world:
            dist.destroy_process_group()  # with every group of it
            return
        for group in groups:
            dist.destroy_process_group(group)

    def _carrier(self, path: Path, device: torch.device) -> str:
        path_named(path)
        on_cpu = device.type == "cpu"
        if path in ("shared_memory", "mpi") and not on_cpu:
            raise _cannot(path, f"tensors on {device}", "tensors on the CPU")
        if path == "shared_memory" and not self.launch.one_host:
            raise _cannot(
                path,
                f"{self.launch.local_world_size} of {self.world_size} ranks on this host",
                "all ranks on one host",
            )
        if path != "auto":
            return path
        if self.world_size == 1:
            return "local"
        return "shared_memory" if on_cpu and self.launch.one_host else "torch"

    def _over(
        self, carrier: str, name: str, device: torch.device, timeout_s: float, *, given: bool
    ) -> Collectives:
        if carrier == "mpi":
            return self._over_mpi(name, timeout_s)
        if carrier == "shared_memory":
            try:
                return SharedMemoryCollectives(
                    self.control, timeout_s=timeout_s, device=device, watched=self.watched(name)
                )
            except ConfigError as error:  # on every rank alike
                if given:
                    raise
                _log.warning("collectives %r go over Gloo: %s", name, error)
        group = self._make_group(name, timeout_s, device)
        sizes = None
        if device.type == "cpu":
            sizes = self._make_group(f"{name}: sizes", timeout_s, device)
        release, watched = self._unused.update, self.watched(name)
        return TorchCollectives(
            group, device, timeout_s, release=release, watched=watched, sizes_group=sizes
        )

    def _over_mpi(self, name: str, timeout_s: float) -> Collectives:
        try:
            # Optional, and importing it starts MPI.
            from mpi4py import MPI

            from shoal.comm.backends.mpi import MpiCollectives
        except ImportError as error:
            raise DeviceUnavailable(
                "collectives over mpi",
                got=str(error),
                allowed="an installed mpi4py and an MPI library",
                remedy="pip install mpi4py, or use path='auto'.",
            ) from error
        found = (MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size())
        if found != (self.rank, self.world_size):
            raise _cannot(
                "mpi",
                f"rank {found[0]} of {found[1]} in MPI, rank {self.rank} of {self.world_size} here",
                "ranks that mpirun started",
            )
        return MpiCollectives(MPI.COMM_WORLD, timeout_s, watched=self.watched(name))

    def _make_group(
        self, name: str, timeout_s: float, device: torch.device, backend: str | None = None
    ) -> dist.ProcessGroup:
        if backend is None:
            backend = self.backend if device.type == self.device.type else "gloo"
        began = time.monotonic()
        try:
            group: dist.ProcessGroup = dist.new_group(
                timeout=datetime.timedelta(seconds=timeout_s), backend=backend, group_desc=name
            )
        except RuntimeError as error:
            raise not_started(f"group {name}", self.launch, began, timeout_s, error) from error
        self._groups.append(group)
        return group

    def _end_group(self, group: dist.ProcessGroup) -> None:
        if group in self._groups:
            self._groups.remove(group)
            dist.destroy_process_group(group)

    def _require_same(self, what: str, wanted: object) -> None:
        remedy = "Make groups and collectives in the same order on every rank."
        require_same(self.control, f"agreement on {what}", repr(wanted), remedy=remedy)
        unused = {group.group_name: group for group in list(self._unused)}
        of_ranks = self.control.gather_objects(set(unused), what="groups without an owner")
        for group_name in sorted(set.intersection(*of_ranks)):
            self._unused.remove(unused[group_name])
            self._end_group(unused[group_name])


def path_named(name: str) -> Path:
    """The path of that name.

    Raises:
        ConfigError: there is none.
    """
    if name in get_args(Path):
        return cast(Path, name)
    raise ConfigError(
        "path of collectives",
        got=repr(name),
        allowed=", ".join(get_args(Path)),
        remedy='"auto" picks the fastest that serves the device.',
    )


def _cannot(path: str, got: str, allowed: str) -> ConfigError:
    return ConfigError(
        f"collectives over {path}", got=got, allowed=allowed, remedy='Use path="auto".'
    )


def not_started(
    what: str, launch: Launch, began: float, timeout_s: float, error: RuntimeError
) -> CollectiveFailed:
    """The error of groups that ranks could not start together."""
    return collective_failed(
        what,
        rank=launch.rank,
        world_size=launch.world_size,
        step=0,
        elapsed_s=time.monotonic() - began,
        timeout_s=timeout_s,
        reason=str(error).partition("\n")[0],
    )
