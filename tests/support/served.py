"""`shoal ps` in processes that are forked from one that has imported everything."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path


def start_server(folder: Path, log: Path, arguments: Sequence[str]) -> BaseProcess:
    """Start `shoal ps` in a folder; what it prints goes to `log`."""
    forks = multiprocessing.get_context("forkserver")
    # What the command imports when it runs.
    forks.set_forkserver_preload(
        ["shoal.cli", "shoal.config.build", "shoal.ps.saving", "kazoo.client"]
    )
    process = forks.Process(target=_serve, args=(folder, log, list(arguments)), daemon=True)
    process.start()
    return process


def _serve(folder: Path, log: Path, arguments: list[str]) -> None:
    import torch

    from shoal.cli import app

    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(folder)
    torch.set_num_threads(1)
    app(["ps", *arguments])
