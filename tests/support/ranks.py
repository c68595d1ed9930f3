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
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

__all__ = ["RankFailure", "Ranks", "free_port", "launcher_variables", "run_ranks", "start_ranks"]

TESTS = str(Path(__file__).parents[1])
LIMIT_S = 200.0  # a rank that takes longer hangs, also on a slow machine that does much else


class RankFailure(AssertionError):
    """Some ranks raised, died or hung; `failures` maps each to its traceback or the reason."""

    def __init__(self, failures: Mapping[int, str]) -> None:
        self.failures = dict(failures)
        super().__init__("\n".join(f"rank {rank}: {text}" for rank, text in failures.items()))


@dataclass
class Ranks:
    """Running ranks: `processes[r]` may be killed; `finish` gathers.

    Those whose work is not their last go on if all of them are well.
    """

    processes: list[Any]
    pipes: list[Connection]
    deadline: float
    last: bool

    def outcomes(self) -> dict[int, tuple[bool, Any]]:
        """For each rank (True, result) or (False, traceback or reason); kills what hangs."""
        found: dict[int, tuple[bool, Any]] = {}
        open_pipes = dict(enumerate(self.pipes))
        while open_pipes:
            ready = wait(list(open_pipes.values()), timeout=0.2)
            if not ready and time.monotonic() > self.deadline:
                break
            for rank in [rank for rank, pipe in open_pipes.items() if pipe in ready]:
                try:
                    found[rank] = pickle.loads(open_pipes[rank].recv_bytes())
                except (EOFError, ConnectionResetError):
                    self.processes[rank].join(60)
                    found[rank] = (False, f"died with {self.processes[rank].exitcode}")
                del open_pipes[rank]
        for rank in open_pipes:
            found[rank] = (False, "hung")
        if not self.last and all(good for good, _ in found.values()):
            return found
        self.end(0 if open_pipes else 10)
        return found

    def end(self, timeout_s: float) -> None:
        """Let ranks without work end; kill those that have not by then."""
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(timeout_s)
            if process.is_alive():
                process.kill()
                process.join()

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
    timeout_s: float = LIMIT_S,
    environ: Mapping[str, str] | None = None,
) -> Ranks:
    """Start `function(*args)` on each of `world_size` ranks.

    Each process has torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE,
    MASTER_ADDR, MASTER_PORT) and one thread. `function` is found by name: define it at the top of
    a module. `environ` adds variables for all ranks.
    """
    return _give(_processes(world_size), (function, args), timeout_s, environ, last=True)


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    timeout_s: float = LIMIT_S,
    environ: Mapping[str, str] | None = None,
    reuse: bool = False,
) -> list[Any]:
    """Results of `function(*args)` on each rank, as `start_ranks` starts them.

    Args:
        reuse: take the processes that an earlier call left, with their devices and compiled
            kernels, and leave them to the next; `function` ends the groups that it starts.

    Raises:
        RankFailure: a rank raised, died or hung.
    """
    if not reuse:
        return start_ranks(
            world_size, function, *args, timeout_s=timeout_s, environ=environ
        ).finish()
    ranks = _IDLE.pop(world_size, None)
    if ranks is not None and not all(process.is_alive() for process in ranks.processes):
        ranks.end(10)  # one died between calls
        ranks = None
    ranks = ranks or _processes(world_size)
    results = _give(ranks, (function, args), timeout_s, environ, last=False).finish()
    _IDLE[world_size] = ranks
    return results


_IDLE: dict[int, Ranks] = {}  # by world size; they end with this process


def _processes(world_size: int) -> Ranks:
    """Ranks without work."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "shoal"])
    processes, pipes = [], []
    for _ in range(world_size):
        ours, theirs = context.Pipe()
        process = context.Process(target=_work, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        processes.append(process)
        pipes.append(ours)
    return Ranks(processes, pipes, 0.0, last=False)


def _give(
    ranks: Ranks, work: Any, timeout_s: float, environ: Mapping[str, str] | None, *, last: bool
) -> Ranks:
    """Send all ranks the same work, after which the last end."""
    port, size = free_port(), len(ranks.processes)
    for rank, pipe in enumerate(ranks.pipes):
        variables = {**launcher_variables(rank, size, port), **(environ or {})}
        pipe.send_bytes(pickle.dumps((variables, sys.path[:], last, pickle.dumps(work))))
    return replace(ranks, deadline=time.monotonic() + timeout_s, last=last)


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
    """A loopback port that nobody uses, and three behind it; none that may be given away meanwhile,
    by the system or another process of the tests."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    while True:
        port = 4 * secrets.SystemRandom().randrange(3_750, 8_000)
        if port // 4 % workers != worker or port in _GIVEN:
            continue
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            _GIVEN.append(port)
            return port


_GIVEN: deque[int] = deque(maxlen=200)  # to this process, lately


def _work(pipe: Connection) -> None:
    """Do what comes, until something fails, the last is done or nobody is there."""
    import torch

    torch.set_num_threads(1)
    environ = dict(os.environ)
    good = last = True
    with contextlib.suppress(EOFError):
        while True:
            variables, path, last, work = pickle.loads(pipe.recv_bytes())
            os.environ.clear()
            os.environ.update({**environ, **variables})
            sys.path[:] = path
            outcome = _outcome(work)
            pipe.send_bytes(pickle.dumps(outcome))
            good = outcome[0]
            if last or not good:
                break
    pipe.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if good else 1)


def _outcome(work: bytes) -> tuple[bool, Any]:
    try:
        function, args = pickle.loads(work)
        return True, function(*args)
    except BaseException:  # noqa: BLE001 - sent to the parent
        return False, traceback.format_exc()
