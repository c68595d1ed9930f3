"""One rank of a bench: `rank_main.py MODULE TASK PARAMS_JSON RESULT_FILE`, with a launcher's
variables."""

from __future__ import annotations

import importlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["on_ranks"]

HERE = Path(__file__).resolve()


def on_ranks(
    world_size: int,
    task: str,
    params: Mapping[str, Any],
    *,
    timeout_s: float,
    threads: int = 1,
    module: str = "work_dist",
) -> list[dict[str, Any]]:
    """What `MODULE.TASK(**params)` returns on each rank; raises when one fails or is late."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{rank}.json" for rank in range(world_size)]
        ranks = [
            subprocess.Popen(
                [sys.executable, str(HERE), module, task, json.dumps(params), str(file)],
                env={
                    **os.environ,
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(world_size),
                    "LOCAL_WORLD_SIZE": str(world_size),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                    "OMP_NUM_THREADS": str(threads),
                    "GLOO_SOCKET_IFNAME": "lo",
                },
            )
            for rank, file in enumerate(files)
        ]
        deadline = time.monotonic() + timeout_s
        try:
            while any(one.poll() is None for one in ranks):
                failed = [one.returncode for one in ranks if one.poll()]
                if failed or time.monotonic() > deadline:
                    raise RuntimeError(f"{task} on {world_size} ranks: {failed or 'too late'}")
                time.sleep(0.05)
        finally:
            for one in ranks:
                one.kill()
                one.wait()
        if any(one.returncode for one in ranks):
            raise RuntimeError(f"{task} on {world_size} ranks: a rank failed")
        return [json.loads(file.read_text()) for file in files]


def _main() -> None:
    module, task, params, file = sys.argv[1:5]
    found = getattr(importlib.import_module(module), task)(**json.loads(params))
    Path(file).write_text(json.dumps(found))


if __name__ == "__main__":
    _main()
