"""The mesh of this process: how ranks find each other, their devices, started once."""

from __future__ import annotations

import datetime
import logging
import os
import random
import re
import time
from collections.abc import Mapping

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from shoal.comm.backends.torch import TorchCollectives
from shoal.comm.collectives import Collectives, LocalCollectives
from shoal.comm.launch_environment import Launch, detect, process_group_timeout_s
from shoal.comm.mesh import Mesh, not_started
from shoal.errors import ConfigError, DeviceUnavailable, LaunchError, ShoalError

_BACKENDS = ("nccl", "gloo")


def pick_device(device: str, local_rank: int) -> torch.device:
    """The device of a rank: the CPU, or the GPU of its local rank.

    A process that was shown one GPU only (CUDA_VISIBLE_DEVICES) takes that one.

    Raises:
        DeviceUnavailable: CUDA is not here, or has fewer GPUs than local ranks.
        ConfigError: no such kind of device.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "cpu" or (device == "auto" and count == 0):
        return torch.device("cpu")
    if device != "auto" and not re.fullmatch(r"cuda(:\d+)?", device):
        raise ConfigError(
            "device",
            got=repr(device),
            allowed="auto, cpu, cuda, cuda:0 and so on",
            remedy='"auto" takes the GPU of the local rank where there is one.',
        )
    index = int(device[5:]) if device.startswith("cuda:") else local_rank
    only = os.environ.get("CUDA_VISIBLE_DEVICES", "").strip(",")
    if device in ("auto", "cuda") and count == 1 and only and "," not in only:
        index = 0
    if index >= count:
        raise DeviceUnavailable(
            f"device {device!r} of local rank {local_rank}",
            got=f"{count} CUDA devices",
            allowed="a GPU for every rank of this host",
            remedy="Start one rank per GPU, or pass device='cpu'.",
        )
    return torch.device("cuda", index)


def pin_cores(local_rank: int, local_world_size: int) -> frozenset[int]:
    """Keep this process, and the threads it will start, on its share of the host's cores.

    Ranks that wander over each other's cores lose some percent. Nothing happens where this process
    is bound already, where there are fewer cores than ranks, or where the system cannot bind.

    Returns:
        the cores it keeps to; empty where nothing happened.
    """
    if not hasattr(os, "sched_setaffinity") or local_world_size < 2:
        return frozenset()
    cores = sorted(os.sched_getaffinity(0))
    share = len(cores) // local_world_size
    if share == 0 or len(cores) < (os.cpu_count() or 1):
        return frozenset()
    kept = frozenset(cores[local_rank * share : (local_rank + 1) * share])
    os.sched_setaffinity(0, kept)
    return kept


def pick_backend(backend: str | None, device: torch.device) -> str:
    """The backend of a device's groups: what was asked for, or NCCL on CUDA and Gloo on the CPU.

    Raises:
        ConfigError: an unknown backend, or NCCL without CUDA.
        DeviceUnavailable: this torch was built without it.
    """
    backend = backend or ("nccl" if device.type == "cuda" else "gloo")
    error: type[ShoalError] | None = None
    if backend not in _BACKENDS or (backend == "nccl" and device.type != "cuda"):
        error, allowed = ConfigError, "nccl with CUDA, gloo"
    elif not dist.is_available() or not getattr(dist, f"is_{backend}_available")():
        error, allowed = DeviceUnavailable, "a backend that this torch was built with"
    if error is None:
        return backend
    raise error(
        "backend of the process groups",
        got=f"{backend!r} on {device}",
        allowed=allowed,
        remedy="Leave it out: NCCL with CUDA, Gloo otherwise.",
    )


def seed_all(seed: int) -> None:
    """Seed Python's `random`, NumPy's global generator and torch (CPU and CUDA)."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


_log = logging.getLogger("shoal.comm")

_TIMEOUT_S: Mapping[str, float] = {"nccl": 600.0, "gloo": 1800.0, "local": 1800.0}
_LOGGED_PREFIXES = ("NCCL_", "TORCH_NCCL_", "GLOO_", "UCX_")
_LOGGED_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_PROC_BIND", "CUDA_VISIBLE_DEVICES")


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
            "torch.distributed, started before shoal.comm.init",
            got=f"rank {found[0]} of {found[1]}",
            allowed=f"rank {launch.rank} of {launch.world_size}, as the {launch.launcher} "
            "variables say",
            remedy="Let shoal.comm.init start it, or set RANK, WORLD_SIZE and LOCAL_RANK.",
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


class _Current:
    """The mesh of this process, if one was started, and whether it will own torch's groups."""

    mesh: Mesh | None = None
    owns_world: bool = False


def early_control() -> Collectives:
    """Collectives between the hosts of all ranks, before `init` says on which device they work.

    For what ranks settle first, their settings say. Every rank calls this, or none.

    Raises:
        LaunchError: launcher variables that contradict each other, or torch.distributed was started
            before, with other ranks than they say.
        CollectiveFailed: the other ranks did not come within the timeout.
    """
    if _Current.mesh is not None:
        return _Current.mesh.control
    launch = detect()
    if launch.world_size == 1:
        return LocalCollectives()
    timeout_s = process_group_timeout_s() or _TIMEOUT_S["gloo"]
    host = torch.device("cpu")
    if dist.is_initialized():
        _check_world(launch)
    else:
        both = torch.cuda.is_available() and dist.is_nccl_available()
        _start_world(launch, host, "cpu:gloo,cuda:nccl" if both else "gloo", timeout_s)
        _Current.owns_world = True
    group = dist.group.WORLD
    assert group is not None
    return TorchCollectives(group, host, timeout_s)


def init(
    *,
    device: str = "auto",
    backend: str | None = None,
    seed: int | None = None,
    timeout_s: float | None = None,
) -> Mesh:
    """Start this process's mesh; a second call returns the same mesh and changes nothing.

    Args:
        device: "auto" (CUDA where there is any), "cpu", "cuda" (the GPU of the local rank), or
            one GPU, "cuda:1".
        backend: "nccl" or "gloo"; NCCL with CUDA and Gloo otherwise when left out. The control
            group between hosts always is Gloo's.
        seed: seeds Python's `random`, NumPy and torch (CPU and CUDA) with seed + rank, so that
            ranks draw different numbers and a run repeats. None leaves the generators alone.
        timeout_s: of every collective; PROCESS_GROUP_TIMEOUT_SECONDS when left out, then
            torch's default (NCCL 600, Gloo 1800).

    Raises:
        LaunchError: launcher variables that contradict each other, or torch.distributed was started
            before, with other ranks than they say.
        DeviceUnavailable, ConfigError: a device or backend that is not here or do not go together.
        CollectiveFailed: the other ranks did not come within the timeout.
    """
    if _Current.mesh is not None:
        return _Current.mesh
    launch = detect()
    place = pick_device(device, launch.local_rank)
    chosen = pick_backend(backend, place) if launch.world_size > 1 else "local"
    if timeout_s is None:
        timeout_s = process_group_timeout_s() or _TIMEOUT_S[chosen]
    if place.type == "cuda":
        torch.cuda.set_device(place)
    owns = launch.world_size > 1 and (_Current.owns_world or not dist.is_initialized())
    if dist.is_initialized():
        _check_world(launch)
    elif owns:
        _start_world(launch, place, chosen, timeout_s)
    if seed is not None:
        seed_all(seed + launch.rank)
    try:
        mesh = _Current.mesh = Mesh(launch, place, chosen, timeout_s, owns_world=owns)
    except ShoalError:
        if owns:
            dist.destroy_process_group()
        raise
    if launch.rank == 0:
        _log.info("%s", effective_settings(mesh, os.environ))
    return mesh


def current() -> Mesh | None:
    """The mesh that `init` started, None before that."""
    return _Current.mesh


def shutdown() -> None:
    """Close the mesh and its groups, if there is one. A later `init` starts from scratch."""
    mesh, _Current.mesh = _Current.mesh, None
    owned, _Current.owns_world = _Current.owns_world, False
    if mesh is not None:
        mesh.close()
    elif owned:
        dist.destroy_process_group()
