"""All-to-all of two ranks on one host: `python bench/comm_cpu.py --json out.json`.

Prints our value, the baseline (peer), the ratio and the target (bar) of every case, and marks rows
that miss their target red. It exits 0 even then. bench/README.md explains the
cases.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

from harness import (
    Case,
    Job,
    Measured,
    Runner,
    add_options,
    interleave,
    measured_json,
    median,
    run_jobs,
)

__all__ = ["main"]

SCRIPT = Path(__file__).resolve()
PACKAGES = ("torch", "numpy", "mpi4py", "shoal")
RANKS = 2
SIZES = tuple(1 << power for power in (10, 14, 18, 20, 22, 24, 26))
BAR_FROM_BYTES = 1 << 20
# Ours, its baseline, and the target from 1 MiB on.
PAIRS: tuple[tuple[str, str, float | None], ...] = (
    ("shared memory", "Gloo", 3.0),
    ("shared memory", "mpi4py", None),
    ("ours over Gloo", "Gloo", None),
    ("ours over MPI", "mpi4py", None),
)
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    # Results of a call use memory that is touched already, as those of the baselines do.
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 32),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser, "comm")
    parser.add_argument("--rank", nargs=2, type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        _start_ranks(*options.worker)
        return
    if options.rank:
        _rank(*options.rank)
        return
    jobs = [_job(size, options.quick, options.case) for size in SIZES]
    run_jobs(parser, options, jobs, SCRIPT, PACKAGES)


def _text(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


def _name(size: int, ours: str, peer: str) -> str:
    return f"all-to-all of {_text(size)}, {ours} vs {peer}"


def _job(size: int, quick: bool, substring: str) -> Job:
    cases = tuple(
        Case(
            name=_name(size, ours, peer),
            unit="GB/s",
            peer=peer,
            bar=bar if size >= BAR_FROM_BYTES else None,
        )
        for ours, peer, bar in PAIRS
        if substring in _name(size, ours, peer)
    )
    runs = 5 if quick else max(15, min(300, (256 << 20) // size))
    params = {"size": size, "runs": runs}
    return Job(task="goodput", params=params, cases=cases, need_bytes=20 * size, env=ENVIRONMENT)


def _start_ranks(source: Path, target: Path) -> None:
    """Two ranks, under mpirun where there is one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        environ = {**os.environ, "MASTER_PORT": str(probe.getsockname()[1])}
    command = [sys.executable, str(SCRIPT), "--rank", str(source), str(target)]
    mpirun = shutil.which("mpirun")
    if mpirun and importlib.util.find_spec("mpi4py"):
        through = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
        subprocess.run([mpirun, *through, "-np", str(RANKS), *command], env=environ, check=True)
        return
    ranks = [subprocess.Popen(command, env={**environ, "RANK": str(rank)}) for rank in range(RANKS)]
    if any([process.wait() for process in ranks]):
        raise SystemExit("a rank failed")


def _rank(source: Path, target: Path) -> None:
    import torch
    import torch.distributed as dist

    from shoal.comm import TorchCollectives

    torch.set_num_threads(1)
    params = json.loads(source.read_text())["params"]
    rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("RANK", "0")))
    address = f"tcp://127.0.0.1:{os.environ['MASTER_PORT']}"
    dist.init_process_group(
        "gloo", address, timeout=timedelta(seconds=60), rank=rank, world_size=RANKS
    )
    gloo = TorchCollectives(dist.group.WORLD, torch.device("cpu"), 60.0)
    bytes_N = torch.randint(256, (params["size"],), dtype=torch.uint8)
    contenders = dict(_contenders(gloo, bytes_N))
    wanted = contenders["Gloo"]()
    for name, run in contenders.items():
        if not torch.equal(torch.as_tensor(run()), torch.as_tensor(wanted)):
            raise SystemExit(f"{name} receives something else")
    # Ranks start each call together: what the one before left them apart is not its time.
    together = _together(gloo)
    runners = [
        Runner(name=name, run=lambda _, run=run: run(), before=together)
        for name, run in contenders.items()
    ]
    seconds = interleave(runners, batches=1, passes=params["runs"])
    # A call is over when both ranks have theirs.
    ranks = gloo.gather_objects(seconds, what="seconds")
    rates = {
        name: params["size"]
        / 1e9
        / median([max(turn) for turn in zip(*(x[name] for x in ranks), strict=True)])
        for name in contenders
    }
    if rank == 0:
        target.write_text(measured_json(_measured(params["size"], rates)))
    dist.destroy_process_group()


def _together(gloo: Any) -> Callable[[], object]:
    if not importlib.util.find_spec("shoal.comm.backends.shared_memory"):
        return lambda: gloo.barrier(what="turn")
    from shoal.comm.backends.shared_memory import SharedMemoryCollectives

    ranks = SharedMemoryCollectives(gloo, timeout_s=60.0)
    return lambda: ranks.barrier(what="turn")


def _measured(size: int, rates: dict[str, float]) -> dict[str, Measured]:
    found = {}
    for ours, peer, _ in PAIRS:
        lacking = [name for name in (ours, peer) if name not in rates]
        found[_name(size, ours, peer)] = Measured(
            ours=rates.get(ours),
            peer_value=rates.get(peer),
            note=f"not installed: {', '.join(lacking)}" if lacking else "",
        )
    return found


def _contenders(gloo: Any, bytes_N: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Each sends half of the bytes to each rank and returns what it received."""
    import torch
    import torch.distributed as dist

    from shoal.comm import Part

    half = bytes_N.numel() // RANKS
    part = Part(bytes_N, (half,) * RANKS, (half,) * RANKS)
    received_N = torch.empty_like(bytes_N)

    def raw_gloo() -> Any:
        dist.all_to_all_single(received_N, bytes_N, [half] * RANKS, [half] * RANKS)
        return received_N

    def ours(collectives: Any) -> Callable[[], Any]:
        return lambda: collectives.all_to_all([part], what="rows").wait()[0]

    yield "Gloo", raw_gloo
    yield "ours over Gloo", ours(gloo)
    if importlib.util.find_spec("shoal.comm.backends.shared_memory"):
        from shoal.comm.backends.shared_memory import SharedMemoryCollectives

        yield "shared memory", ours(SharedMemoryCollectives(gloo, timeout_s=60.0))
    if "OMPI_COMM_WORLD_RANK" in os.environ:
        from mpi4py import MPI

        from shoal.comm.backends.mpi import MpiCollectives

        sent, received = bytes_N.numpy(), torch.empty_like(bytes_N).numpy()

        def raw_mpi() -> Any:
            MPI.COMM_WORLD.Alltoall(sent, received)
            return received

        yield "mpi4py", raw_mpi
        yield "ours over MPI", ours(MpiCollectives(MPI.COMM_WORLD, 60.0))


if __name__ == "__main__":
    main()
