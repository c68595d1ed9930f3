"""How much of the machine a save beside training takes."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping

__all__ = ["Pace", "processors"]

# Of a rank's processors, to read rows. Measured on two: rows read at the full speed of one core
# lengthen steps by a fourth, through memory and caches that both share; at a sixth of one core by
# three to eight hundredths.
_PART = 1 / 12

_QUOTA = "/sys/fs/cgroup/cpu.max"
# By torchrun, Open MPI, Slurm.
_RANKS_HERE = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE")


def processors(environ: Mapping[str, str] | None = None) -> float:
    """How many of the machine's processors are this rank's.

    Those it is bound to, at most its container's quota; where it is bound to none, it shares with
    the ranks that its launcher says are here.
    """
    every = os.cpu_count() or 1
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else every
    share = float(bound)
    if bound == every:
        said = os.environ if environ is None else environ
        ranks = next((said[name] for name in _RANKS_HERE if said.get(name, "").isdecimal()), "1")
        share = every / max(int(ranks), 1)
    try:
        with open(_QUOTA, encoding="ascii") as file:
            quota, period = file.read().split()
    except (OSError, ValueError):  # other systems, or an older hierarchy
        return share
    return share if quota == "max" else min(share, int(quota) / int(period))


class Pace:
    """Rests of the thread that reads rows, so that it is busy for a part of the time only.

    A rank with twelve processors or more takes none. For one thread; `hurry` comes from any.
    """

    def __init__(self) -> None:
        self._share = 1.0
        self._hurried = threading.Event()
        self._since_s = 0.0

    def begin(self) -> None:
        """Rest from now on; the thread that rests calls it."""
        self._share = min(1.0, processors() * _PART)
        self._since_s = time.thread_time()

    def rest(self) -> None:
        """Sleep as long as the work since the last rest asks for."""
        if self._share < 1 and not self._hurried.is_set():
            busy_s = time.thread_time() - self._since_s
            self._hurried.wait(busy_s * (1 / self._share - 1))
            self._since_s = time.thread_time()

    def hurry(self) -> None:
        """Rest no more: somebody waits for the end."""
        self._hurried.set()
