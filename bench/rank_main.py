"""One rank of a bench: `rank_main.py TASK PARAMS_JSON RESULT_FILE`, with a launcher's variables."""

from __future__ import annotations

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
    world_size: int, task: str, params: Mapping[str, Any], *, timeout_s: float, threads: int = 1
) -> list[dict[str, Any]]:
    """What `work_dist.TASK(**params)` returns on each rank; raises when one fails or is late."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{rank}.json" for rank in range(world_size)]
        ranks = [
            subprocess.Popen(
                [sys.executable, str(HERE), task, json.dumps(params), str(file)],
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
    import work_dist

    task, params, file = sys.argv[1:4]
    found = getattr(work_dist, task)(**json.loads(params))
    Path(file).write_text(json.dumps(found))


if __name__ == "__main__":
    _main()
