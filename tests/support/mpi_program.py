"""What each rank of an MPI job of the tests runs: the checks, or a loop in which rank 1 stops."""

from __future__ import annotations

import os
import signal
import sys
import time

import torch
from mpi4py import MPI

from shoal.comm import Part
from shoal.comm.backends.mpi import MpiCollectives

TIMEOUT_S = 10.0


def loop(how: str) -> None:
    """Exchanges until rank 1 stops at step 3."""
    collectives = MpiCollectives(MPI.COMM_WORLD, TIMEOUT_S)
    for step in range(6):
        collectives.step = step
        if step == 3 and collectives.rank == 1:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "raises":
                raise ValueError("a batch is wrong")
            time.sleep(1.5 * TIMEOUT_S)
        part = Part(torch.arange(4), (2, 2), (2, 2))
        collectives.all_to_all([part], what="rows").wait()


def checks() -> None:
    """Every check, on this rank."""
    from support.collective_checks import check_collectives

    torch.set_num_threads(1)
    collectives = MpiCollectives(MPI.COMM_WORLD, 60.0)
    check_collectives(collectives)
    collectives.close()
    collectives.close()
    print("all good", flush=True)


if __name__ == "__main__":
    checks() if sys.argv[1] == "checks" else loop(sys.argv[1])
