"""Runs a function on W ranks, each a process with a launcher's variables, and gathers results."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import secrets
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

__all__ = ["RankFailure", "Ranks", "free_port", "launcher_variables", "run_ranks", "start_ranks"]

TESTS = str(Path(__file__).parents[1])


class RankFailure(AssertionError):
    """Some ranks raised, died or hung; `failures` maps each to its traceback or the reason."""

    def __init__(self, failures: Mapping[int, str]) -> None:
        self.failures = dict(failures)
        super().__init__("\n".join(f"rank {rank}: {text}" for rank, text in failures.items()))


@dataclass
class Ranks:
    """Running ranks: `processes[r]` may be killed; `finish` gathers."""

    processes: list[Any]
    pipes: list[Connection]
    deadline: float

    def outcomes(self) -> dict[int, tuple[bool, Any]]:
        """For each rank (True, result) or (False, traceback or reason); kills what hangs."""
        found: dict[int, tuple[bool, Any]] = {}
        open_pipes = dict(enumerate(self.pipes))
        while open_pipes and time.monotonic() < self.deadline:
            ready = wait(list(open_pipes.values()), timeout=0.2)
            for rank in [rank for rank, pipe in open_pipes.items() if pipe in ready]:
                try:
                    found[rank] = pickle.loads(open_pipes[rank].recv_bytes())
                except EOFError:
                    self.processes[rank].join(5)
                    found[rank] = (False, f"died with {self.processes[rank].exitcode}")
                del open_pipes[rank]
        for rank in open_pipes:
            found[rank] = (False, "hung")
        for process in self.processes:
            process.join(0 if open_pipes else 10)
            if process.is_alive():
                process.kill()
                process.join()
        return found

    def finish(self) -> list[Any]:
        """Results by rank.

        Raises:
            RankFailure: a rank raised, died or hung.
        """
        found = self.outcomes()
        failures = {rank: value for rank, (good, value) in sorted(found.items()) if not good}
        if failures:
            raise RankFailure(failures)
        return [found[rank][1] for rank in range(len(self.processes))]


def start_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    timeout_s: float = 60,
    environ: Mapping[str, str] | None = None,
) -> Ranks:
    """Start `function(*args)` on each of `world_size` ranks.

    Each process has torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE,
    MASTER_ADDR, MASTER_PORT) and one thread. `function` is found by name: define it at the top of
    a module. `environ` adds variables for all ranks.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "shoal"])
    port = free_port()
    processes, pipes = [], []
    for rank in range(world_size):
        ours, theirs = context.Pipe(duplex=False)
        variables = {**launcher_variables(rank, world_size, port), **(environ or {})}
        process = context.Process(
            target=_work, args=(theirs, variables, sys.path[:], function, args), daemon=True
        )
        process.start()
        theirs.close()
        processes.append(process)
        pipes.append(ours)
    return Ranks(processes, pipes, time.monotonic() + timeout_s)


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    timeout_s: float = 60,
    environ: Mapping[str, str] | None = None,
) -> list[Any]:
    """Results of `function(*args)` on each rank, as `start_ranks` starts them.

    Raises:
        RankFailure: a rank raised, died or hung.
    """
    return start_ranks(world_size, function, *args, timeout_s=timeout_s, environ=environ).finish()


def launcher_variables(rank: int, world_size: int, port: int) -> dict[str, str]:
    """What torchrun would set on one host."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }


def free_port() -> int:
    """A loopback port that nobody uses; not one that the system may give away meanwhile."""
    while True:
        port = secrets.SystemRandom().randrange(15_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _work(
    pipe: Connection,
    variables: Mapping[str, str],
    path: list[str],
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    import torch

    os.environ.update(variables)
    sys.path[:] = path
    torch.set_num_threads(1)
    try:
        outcome: tuple[bool, Any] = (True, function(*args))
    except BaseException:  # noqa: BLE001 - sent to the parent
        outcome = (False, traceback.format_exc())
    pipe.send_bytes(pickle.dumps(outcome))
    pipe.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if outcome[0] else 1)
