"""What the machine could do at most: copy bandwidth, and the bytes a case has to move."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from harness import median

__all__ = [
    "copy_bytes_per_s",
    "find_bytes",
    "insert_bytes",
    "resident_bytes",
    "resident_peak_bytes",
    "step_bytes",
]

ID_BYTES = 8
METADATA_BYTES = 24


def copy_bytes_per_s(threads: int) -> float:
    """Bytes read plus bytes written a second, copying 256 MiB with `threads` threads."""
    torch.set_num_threads(threads)
    source = torch.ones(1 << 26)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(6):
        start = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - start)
    return 2 * source.numel() * source.element_size() / median(seconds[1:])


def find_bytes(dim: int) -> float:
    """Bytes an id must move in a lookup: the id and its row read, the row written."""
    return ID_BYTES + 2 * 4 * dim


def step_bytes(dim: int, state_width: int, unique_fraction: float) -> float:
    """Bytes an id must move in a training step.

    Lookup, its gradient read once, and for each unique id weights and state read and written.
    """
    return find_bytes(dim) + 4 * dim + unique_fraction * 2 * 4 * (dim + state_width)


def insert_bytes(dim: int, state_width: int) -> float:
    """Bytes a new id must move: the id read, weights, state and metadata written."""
    return ID_BYTES + 4 * (dim + state_width) + METADATA_BYTES


def resident_bytes() -> int:
    """Resident memory of this process now (Linux)."""
    return _status_bytes("VmRSS:")


def resident_peak_bytes() -> int:
    """Most memory this process ever had resident (Linux)."""
    return _status_bytes("VmHWM:")


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")
