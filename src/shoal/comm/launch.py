"""The mesh of this process: started once, by whoever asks first, and closed at the end."""

from __future__ import annotations

import torch.distributed as dist

from shoal.comm.collectives import Collectives, LocalCollectives
from shoal.comm.launchers import detect, process_group_timeout_s
from shoal.comm.mesh import Mesh
from shoal.comm.starting import start, start_world

__all__ = ["current", "early_votes", "init", "shutdown"]


class _Process:
    """The mesh of this process, if one was started, and whether it will own torch's groups."""

    mesh: Mesh | None = None
    owns_world: bool = False


def early_votes() -> Collectives:
    """Collectives between the hosts of all ranks, before `init` says on which device they work.

    For what ranks settle first, their settings say. Every rank calls this, or none.

    Raises:
        LaunchError: launcher variables that contradict each other.
        CollectiveFailed: the other ranks did not come within the timeout.
    """
    if _Process.mesh is not None:
        return _Process.mesh.votes
    launch = detect()
    if launch.world_size == 1:
        return LocalCollectives()
    fresh = not dist.is_initialized()
    votes = start_world(launch, process_group_timeout_s())
    _Process.owns_world = _Process.owns_world or fresh
    return votes


def init(
    *,
    device: str = "auto",
    backend: str | None = None,
    seed: int | None = None,
    timeout_s: float | None = None,
) -> Mesh:
    """Start this process's mesh; a second call returns the same mesh and changes nothing.

    Args:
        device: "auto" (CUDA where there is any), "cpu", "cuda" (the card of the local rank), or
            one card, "cuda:1".
        backend: "nccl" or "gloo"; NCCL with CUDA and Gloo otherwise when left out. Votes between
            hosts always have a Gloo group of their own.
        seed: seeds Python's `random`, NumPy and torch (CPU and CUDA) with seed + rank, so that
            ranks draw different numbers and a run repeats. None leaves the generators alone.
        timeout_s: of every collective; PROCESS_GROUP_TIMEOUT_SECONDS when left out, then
            torch's default (NCCL 600, Gloo 1800).

    Raises:
        LaunchError: launcher variables that contradict each other.
        DeviceUnavailable: a device or backend that is not here.
        CollectiveFailed: the other ranks did not come within the timeout.
    """
    if _Process.mesh is None:
        if timeout_s is None:
            timeout_s = process_group_timeout_s()
        _Process.mesh = start(
            detect(),
            device=device,
            backend=backend,
            seed=seed,
            timeout_s=timeout_s,
            owns_world=_Process.owns_world,
        )
    return _Process.mesh


def current() -> Mesh | None:
    """The mesh that `init` started, None before that."""
    return _Process.mesh


def shutdown() -> None:
    """Close the mesh and its groups. A later `init` starts anew; without a mesh nothing happens."""
    mesh, _Process.mesh = _Process.mesh, None
    owned, _Process.owns_world = _Process.owns_world, False
    if mesh is not None:
        mesh.close()
    elif owned:
        dist.destroy_process_group()
