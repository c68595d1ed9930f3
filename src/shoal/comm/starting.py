"""How ranks find each other: the store they meet at, torch's default group, the mesh on it."""

from __future__ import annotations

import datetime
import logging
import os
import time
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from shoal.comm.collectives import Collectives
from shoal.comm.devices import pick_backend, pick_device, seed_all
from shoal.comm.launchers import Launch
from shoal.comm.mesh import Mesh, not_started
from shoal.comm.torch_collectives import TorchCollectives
from shoal.errors import LaunchError, ShoalError, describe

__all__ = ["effective_settings", "start", "start_world"]

_log = logging.getLogger("shoal.comm")

_TIMEOUT_S: Mapping[str, float] = {"nccl": 600.0, "gloo": 1800.0, "local": 1800.0}
_LOGGED_PREFIXES = ("NCCL_", "TORCH_NCCL_", "GLOO_", "UCX_")
_LOGGED_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_PROC_BIND", "CUDA_VISIBLE_DEVICES")


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
        raise not_started(what, launch, began, timeout_s, error) from error


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
