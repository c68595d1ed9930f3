"""All ranks of a job, their device, and the process groups: who owns them and how they start."""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, get_args

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from shoal.comm.collectives import Collectives, LocalCollectives
from shoal.comm.devices import pick_backend, pick_device, seed_all
from shoal.comm.shared_memory import SharedMemoryCollectives
from shoal.comm.timed import TimedCollectives, Waiting
from shoal.comm.torch_collectives import TorchCollectives
from shoal.errors import (
    CollectiveFailed,
    ConfigError,
    DeviceUnavailable,
    LaunchError,
    ShoalError,
    collective_failed,
    describe,
)

if TYPE_CHECKING:
    from shoal.comm.launch import Launch

__all__ = ["Mesh", "Path", "effective_settings", "path_named", "start", "start_world"]

_log = logging.getLogger("shoal.comm")

Path = Literal["auto", "torch", "shared_memory", "mpi"]

_TIMEOUT_S: Mapping[str, float] = {"nccl": 600.0, "gloo": 1800.0, "local": 1800.0}
_LOGGED_PREFIXES = ("NCCL_", "TORCH_NCCL_", "GLOO_", "UCX_")
_LOGGED_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_PROC_BIND", "CUDA_VISIBLE_DEVICES")


class Mesh:
    """All ranks of a job: this rank's place, its device and the groups that it talks in.

    Made by `shoal.comm.init`. One rank alone has no process groups; its backend is "local".

    Args:
        launch: place of this rank.
        device: where this rank's tensors are.
        backend: "nccl", "gloo" or "local": of the groups that `new_group` makes.
        timeout_s: of every collective unless a group is told another.
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
        self._open: list[Collectives] = []
        self._waiting: Waiting | None = None
        self.votes: Collectives = self._host_votes()

    def new_group(
        self, name: str, *, timeout_s: float | None = None, device: torch.device | None = None
    ) -> dist.ProcessGroup | None:
        """A group of all ranks, say for one collection's exchange; None for one rank alone.

        Every rank calls this, with the same names in the same order. The mesh ends the group.

        Args:
            name: what the group is for, in logs and in torch's messages.
            timeout_s: of its collectives; the mesh's when left out.
            device: what the group serves; the mesh's device when left out.

        Raises:
            ConfigError: ranks ask for different groups.
            CollectiveFailed: a rank did not take part.
        """
        if self.world_size == 1:
            return None
        self._agree(f"group {name!r}", name)
        return self._make_group(name, timeout_s or self.timeout_s, device or self.device)

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
            timed: whether `time_waits` counts them; not those of a thread beside training.

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
            self._agree(f"collectives {name!r}", (name, carrier))
            made = self._over(carrier, name, device, timeout_s, given=path != "auto")
        if timed and self._waiting is not None and self.world_size > 1:
            made = TimedCollectives(made, self._waiting)
        self._open.append(made)
        if self.rank == 0:
            _log.info("collectives %r: %s on %s", name, carrier, device.type)
        return made

    def time_waits(self) -> Waiting:
        """Count the time of all collectives made from now on; the same clock at each call."""
        if self._waiting is None:
            self._waiting = Waiting()
        return self._waiting

    def abandon(self) -> None:
        """Let go of all connections: ranks that wait for this one fail. No call may follow."""
        for made in self._open:
            made.close()
        for group in self._groups:
            with contextlib.suppress(RuntimeError):  # gone already, with its other ranks
                group.abort()

    def close(self) -> None:
        """Close all collectives and end the groups that this mesh made. Not a collective call."""
        for made in (*self._open, self.votes):
            made.close()
        self._open.clear()
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
            return self._over_mpi(timeout_s)
        if carrier == "shared_memory":
            try:
                return SharedMemoryCollectives(self.votes, timeout_s=timeout_s, device=device)
            except ConfigError as error:  # on every rank alike
                if given:
                    raise
                _log.warning("collectives %r go over Gloo: %s", name, error)
        group = self._make_group(name, timeout_s, device)
        # The end of an NCCL group may wait for the other ranks; the mesh ends those.
        release = self._end_group if device.type == "cpu" else None
        return TorchCollectives(group, device, timeout_s, release=release)

    def _over_mpi(self, timeout_s: float) -> Collectives:
        try:
            # Optional, and importing it starts MPI.
            from mpi4py import MPI

            from shoal.comm.mpi import MpiCollectives
        except ImportError as error:
            raise DeviceUnavailable(
                describe(
                    "collectives over mpi",
                    got=str(error),
                    allowed="an installed mpi4py and an MPI library",
                    remedy="pip install mpi4py, or use path='auto'.",
                )
            ) from error
        found = (MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size())
        if found != (self.rank, self.world_size):
            raise _cannot(
                "mpi",
                f"rank {found[0]} of {found[1]} in MPI, rank {self.rank} of {self.world_size} here",
                "ranks that mpirun started",
            )
        return MpiCollectives(MPI.COMM_WORLD, timeout_s)

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
            raise _not_started(f"group {name}", self.launch, began, timeout_s, error) from error
        self._groups.append(group)
        return group

    def _end_group(self, group: dist.ProcessGroup) -> None:
        if group in self._groups:
            self._groups.remove(group)
            dist.destroy_process_group(group)

    def _host_votes(self) -> Collectives:
        host = torch.device("cpu")
        if self.world_size == 1:
            return LocalCollectives(host)
        group = self._make_group("votes", self.timeout_s, host, backend="gloo")
        return TorchCollectives(group, host, self.timeout_s)

    def _agree(self, what: str, wanted: object) -> None:
        every = self.votes.gather_objects(wanted, what=f"agreement on {what}")
        if any(other != wanted for other in every):
            raise ConfigError(
                describe(
                    f"{what} on rank {self.rank}",
                    got=", ".join(f"rank {rank}: {said!r}" for rank, said in enumerate(every)),
                    allowed="the same on every rank",
                    remedy="Make groups and collectives in the same order on every rank.",
                )
            )


def path_named(name: str) -> Path:
    """The path of that name.

    Raises:
        ConfigError: there is none.
    """
    for path in get_args(Path):
        if path == name:
            found: Path = path
            return found
    raise ConfigError(
        describe(
            "path of collectives",
            got=repr(name),
            allowed=", ".join(get_args(Path)),
            remedy='"auto" picks the fastest that serves the device.',
        )
    )


def _cannot(path: str, got: str, allowed: str) -> ConfigError:
    return ConfigError(
        describe(f"collectives over {path}", got=got, allowed=allowed, remedy='Use path="auto".')
    )


def start(
    launch: Launch,
    *,
    device: str = "auto",
    backend: str | None = None,
    seed: int | None = None,
    timeout_s: float | None = None,
    owns_world: bool = False,
) -> Mesh:
    """Start the process groups of one rank; `shoal.comm.init` says what the arguments mean.

    owns_world: `start_world` was called before, for this mesh.

    Raises:
        DeviceUnavailable, ConfigError: a device or backend that is not here or do not go together.
        LaunchError: torch.distributed was started before, with other ranks than `launch` says.
        CollectiveFailed: the other ranks did not come within the timeout.
    """
    place = pick_device(device, launch.local_rank)
    chosen = pick_backend(backend, place) if launch.world_size > 1 else "local"
    timeout_s = _TIMEOUT_S[chosen] if timeout_s is None else timeout_s
    if place.type == "cuda":
        torch.cuda.set_device(place)
    owns = launch.world_size > 1 and (owns_world or not dist.is_initialized())
    if dist.is_initialized():
        _check_world(launch)
    elif owns:
        _start_world(launch, place, chosen, timeout_s)
    if seed is not None:
        seed_all(seed + launch.rank)
    try:
        mesh = Mesh(launch, place, chosen, timeout_s, owns_world=owns)
    except ShoalError:
        if owns:
            dist.destroy_process_group()
        raise
    if launch.rank == 0:
        _log.info("%s", effective_settings(mesh, os.environ))
    return mesh


def start_world(launch: Launch, timeout_s: float | None) -> Collectives:
    """Start torch's default process group before it is known which device the ranks use.

    Returns:
        collectives between the hosts of all ranks.

    Raises:
        LaunchError: torch.distributed was started before, with other ranks than `launch` says.
        CollectiveFailed: the other ranks did not come within the timeout.
    """
    timeout_s = _TIMEOUT_S["gloo"] if timeout_s is None else timeout_s
    host = torch.device("cpu")
    if dist.is_initialized():
        _check_world(launch)
    else:
        both = torch.cuda.is_available() and dist.is_nccl_available()
        _start_world(launch, host, "cpu:gloo,cuda:nccl" if both else "gloo", timeout_s)
    group = dist.group.WORLD
    assert group is not None
    return TorchCollectives(group, host, timeout_s)


def _start_world(launch: Launch, device: torch.device, backend: str, timeout_s: float) -> None:
    host = f"[{launch.master_addr}]" if ":" in launch.master_addr else launch.master_addr
    began = time.monotonic()
    timeout = datetime.timedelta(seconds=timeout_s)
    try:
        meeting = rendezvous(
            f"tcp://{host}:{launch.master_port}",
            rank=launch.rank,
            world_size=launch.world_size,
            timeout=timeout,
        )
        store = next(meeting)[0]
        store.set_timeout(timeout)
        dist.init_process_group(
            backend,
            # Where torchrun's agent keeps one store for all starts of a job, addresses of the
            # ranks of an earlier start are in it.
            store=PrefixStore(f"start {launch.restarts}", store),
            rank=launch.rank,
            world_size=launch.world_size,
            timeout=timeout,
            device_id=device if backend == "nccl" else None,
        )
    except RuntimeError as error:
        what = f"start of the process groups at {host}:{launch.master_port}"
        raise _not_started(what, launch, began, timeout_s, error) from error


def _not_started(
    what: str, launch: Launch, began: float, timeout_s: float, error: RuntimeError
) -> CollectiveFailed:
    return collective_failed(
        what,
        rank=launch.rank,
        world_size=launch.world_size,
        step=0,
        elapsed_s=time.monotonic() - began,
        timeout_s=timeout_s,
        reason=str(error).partition("\n")[0],
    )


def _check_world(launch: Launch) -> None:
    found = (dist.get_rank(), dist.get_world_size())
    if found != (launch.rank, launch.world_size):
        raise LaunchError(
            describe(
                "torch.distributed, started before shoal.comm.init",
                got=f"rank {found[0]} of {found[1]}",
                allowed=f"rank {launch.rank} of {launch.world_size}, as the {launch.launcher} "
                "variables say",
                remedy="Let shoal.comm.init start it, or set RANK, WORLD_SIZE and LOCAL_RANK.",
            )
        )


def effective_settings(mesh: Mesh, environ: Mapping[str, str]) -> str:
    """What a mesh runs with, on one line: launcher, device, backend, NCCL and thread settings."""
    launch = mesh.launch
    said = [
        f"{launch.launcher}: {launch.world_size} ranks, {launch.local_world_size} on this host",
        f"device {mesh.device.type}",
        f"backend {mesh.backend}",
        f"timeout {mesh.timeout_s:g} s",
        f"threads {torch.get_num_threads()} (interop {torch.get_num_interop_threads()})",
    ]
    if mesh.backend == "nccl":
        said.append("NCCL " + ".".join(str(part) for part in torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    named = [
        name
        for name in sorted(environ)
        if name.startswith(_LOGGED_PREFIXES) or name in _LOGGED_THREADS
    ]
    said += [f"{name}={environ[name]}" for name in named]
    return ", ".join(said)
