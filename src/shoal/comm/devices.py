"""What a rank runs on: its device, the backend of its groups, its random generators."""

from __future__ import annotations

import os
import random

import numpy as np
import torch
import torch.distributed as dist

from shoal.errors import ConfigError, DeviceUnavailable, ShoalError, describe

__all__ = ["pick_backend", "pick_device", "pin_cores", "seed_all"]

_BACKENDS = ("nccl", "gloo")


def pick_device(device: str, local_rank: int) -> torch.device:
    """The device of a rank: the CPU, or the card of its local rank.

    A process that was shown one card only (CUDA_VISIBLE_DEVICES) takes that one.

    Raises:
        DeviceUnavailable: CUDA is not here, or has fewer cards than local ranks.
        ConfigError: no such kind of device.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "cpu" or (device == "auto" and count == 0):
        return torch.device("cpu")
    if device != "auto" and not _names_cuda(device):
        raise ConfigError(
            describe(
                "device",
                got=repr(device),
                allowed="auto, cpu, cuda, cuda:0 and so on",
                remedy='"auto" takes the card of the local rank where there is one.',
            )
        )
    index = int(device[5:]) if device.startswith("cuda:") else local_rank
    only = os.environ.get("CUDA_VISIBLE_DEVICES", "").strip(",")
    if device in ("auto", "cuda") and count == 1 and only and "," not in only:
        index = 0
    if index >= count:
        raise DeviceUnavailable(
            describe(
                f"device {device!r} of local rank {local_rank}",
                got=f"{count} CUDA devices",
                allowed="a card for every rank of this host",
                remedy="Start one rank per card, or pass device='cpu'.",
            )
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


def _names_cuda(device: str) -> bool:
    return device == "cuda" or (device.startswith("cuda:") and device[5:].isdigit())


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
        describe(
            "backend of the process groups",
            got=f"{backend!r} on {device}",
            allowed=allowed,
            remedy="Leave it out: NCCL with CUDA, Gloo otherwise.",
        )
    )


def seed_all(seed: int) -> None:
    """Seed Python's `random`, NumPy's global generator and torch (CPU and CUDA)."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
