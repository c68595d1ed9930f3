"""Programs of the ranks in launch tests: join, exchange, and report rank and size."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from shoal import comm


def place(path: Any = "auto") -> dict[str, Any]:
    """Join, compute a sum over the ranks, and report this rank's position."""
    mesh = comm.init(device="cpu")
    collectives = mesh.collectives("sum", path=path)
    (total,) = collectives.all_reduce(torch.tensor([mesh.rank + 1.0]), "sum", what="sum").wait()
    every = mesh.control.gather_objects(mesh.rank, what="ranks")
    told = {
        "launcher": mesh.launch.launcher,
        "rank": mesh.rank,
        "world_size": mesh.world_size,
        "local_world_size": mesh.launch.local_world_size,
        "carrier": type(collectives).__name__,
        "total": total.item(),
        "every": every,
    }
    comm.shutdown()
    return told


if __name__ == "__main__":
    print("told " + json.dumps(place(*sys.argv[1:])), flush=True)
    sys.exit(0)
