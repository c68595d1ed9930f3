"""Ranks find each other, agree, and stop in time, whatever launched them."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from operator import le
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from shoal import comm
from shoal.comm.benchmarks import benchmark_settings
from shoal.errors import CollectiveFailed, ConfigError
from support.launched import place
from support.ranks import free_port, run_ranks

pytestmark = pytest.mark.multiproc

TESTS = Path(__file__).parents[1]
PROGRAM = TESTS / "support" / "launched.py"


def joined() -> dict[str, Any]:
    mesh = comm.init(device="cpu", seed=7)
    drawn = (random.random(), float(np.random.rand()), torch.rand(1).item())
    again = comm.init(device="cpu", seed=8, timeout_s=1)
    unmoved = random.getstate()
    comm.init(seed=9)
    groups = [mesh.new_group("a"), mesh.new_group("b", timeout_s=50)]
    carriers = {
        path: type(mesh.collectives(path, path=path)).__name__
        for path in ("auto", "torch", "shared_memory")
    }
    told = {
        "same": again is mesh and comm.current() is mesh,
        "unseeded": unmoved == random.getstate(),
        "backend": mesh.backend,
        "timeout_s": mesh.timeout_s,
        "drawn": drawn,
        "groups": [dist.get_world_size(group) for group in groups],
        "carriers": carriers,
        "votes": mesh.control.gather_objects(mesh.rank * 10, what="votes"),
    }
    comm.shutdown()
    told["ended"] = comm.current() is None and not dist.is_initialized()
    comm.shutdown()
    return told


def test_two_ranks_join_once() -> None:
    first, second = run_ranks(2, joined, environ={"PROCESS_GROUP_TIMEOUT_SECONDS": "33"})
    for told in (first, second):
        assert told["same"] and told["unseeded"] and told["ended"]
        assert told["backend"] == "gloo"
        assert told["timeout_s"] == 33.0
        assert told["groups"] == [2, 2]
        assert told["votes"] == [0, 10]
        assert told["carriers"] == {
            "auto": "SharedMemoryCollectives",
            "torch": "TorchCollectives",
            "shared_memory": "SharedMemoryCollectives",
        }
    assert all(a != b for a, b in zip(first["drawn"], second["drawn"], strict=True))
    random.seed(8)  # seed 7 + rank 1
    assert second["drawn"][0] == random.random()
    assert second["drawn"][1] == np.random.RandomState(8).rand()
    assert second["drawn"][2] == torch.rand(1, generator=torch.Generator().manual_seed(8)).item()


def disagreeing() -> str:
    mesh = comm.init(device="cpu")
    with pytest.raises(ConfigError) as error:
        mesh.new_group(f"of rank {mesh.rank}")
    comm.shutdown()
    return str(error.value)


def test_ranks_that_ask_for_different_groups_are_told() -> None:
    for said in run_ranks(2, disagreeing):
        assert "'of rank 1' on rank 1, 'of rank 0' on rank 0" in said


def waiting_alone(path: Any) -> str:
    mesh = comm.init(device="cpu")
    collectives = mesh.collectives("late", path=path, timeout_s=5.0)
    said = ""
    if mesh.rank == 0:
        collectives.step = 12
        with pytest.raises(CollectiveFailed) as error:
            collectives.barrier(what="nobody comes")  # in the mesh's 1800 s
        said = str(error.value)
    dist.barrier()  # of torch: a call of the other's would be told before the time is over
    comm.shutdown()
    return said


@pytest.mark.slow
@pytest.mark.parametrize("path", ["torch", "shared_memory"])
def test_a_groups_own_timeout_is_kept(path: str) -> None:
    said, _ = run_ranks(2, waiting_alone, path)
    assert "'nobody comes' at step 12 on rank 0 of 2" in said


def held() -> tuple[int, int]:
    """Threads and open files."""
    return tuple(len(list(Path(f"/proc/self/{what}").iterdir())) for what in ("task", "fd"))


def closing_what_was_made() -> bool:
    """Whether no more is held after more was made; threads may take a while to end."""
    mesh = comm.init(device="cpu", timeout_s=60)
    first = held()
    for number in range(4):
        carrier = mesh.collectives(f"a {number}", path="torch")
        carrier.barrier(what="all here")
        mesh.control.barrier(what="all done")
        carrier.close()
        carrier.close()
        hook = comm.get_sync_run_hooks(
            flags=comm.SyncFlags(enable_sync_training=True),
            environ={"OMPI_COMM_WORLD_LOCAL_RANK": "0"},
        )[0]
        hook.begin(torch.nn.Linear(2, 2))
        first = first if number else held()
    ends = time.monotonic() + 60
    while not (back := all(map(le, held(), first))) and time.monotonic() < ends:
        time.sleep(0.05)
    comm.shutdown()
    return back


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads in /proc")
def test_closed_collectives_give_their_threads_and_sockets_back() -> None:
    assert run_ranks(2, closing_what_was_made) == [True, True]


def no_group() -> str:
    def gone(**_: Any) -> None:
        raise RuntimeError("Connection closed by peer")

    whole, dist.new_group = dist.new_group, gone
    try:
        with pytest.raises(CollectiveFailed) as error:
            comm.init(device="cpu", timeout_s=60)
    finally:
        dist.new_group = whole
    assert comm.current() is None and not dist.is_initialized()
    return str(error.value)


def test_a_rank_that_is_gone_when_groups_are_made_is_an_error() -> None:
    for rank, said in enumerate(run_ranks(2, no_group)):
        assert f"'group control' at step 0 on rank {rank} of 2" in said


def missing() -> str:
    if comm.detect().rank == 1:
        return ""
    with pytest.raises(CollectiveFailed) as error:
        comm.init(device="cpu", timeout_s=1)
    assert comm.current() is None
    return str(error.value)


@pytest.mark.slow
def test_a_rank_that_never_starts_is_an_error() -> None:
    said, _ = run_ranks(2, missing)
    assert "start of the process groups" in said


def logged() -> list[str]:
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger = logging.getLogger("shoal.comm")
    logger.addHandler(Keep())
    logger.setLevel(logging.INFO)
    comm.init(device="cpu")
    comm.shutdown()
    return lines


def test_rank_0_tells_what_is_in_effect() -> None:
    first, second = run_ranks(2, logged, environ={"NCCL_DEBUG": "WARN"})
    assert second == []
    (said,) = first
    for part in ("torchrun: 2 ranks, 2 on this host", "backend gloo", "NCCL_DEBUG=WARN"):
        assert part in said
    assert "threads 1 (" in said
    assert "OMP_NUM_THREADS=1" in said


def synced() -> list[float]:
    torch.manual_seed(comm.detect().rank)
    module = torch.nn.BatchNorm1d(2)
    torch.nn.init.uniform_(module.weight)
    environ = {"OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    flags = comm.SyncFlags(enable_sync_training=True)
    comm.init(device="cpu")
    for hook in comm.get_sync_run_hooks(flags=flags, environ=environ):
        hook.begin(module)
    comm.shutdown()
    return list(module.weight.tolist())


@pytest.mark.slow
def test_run_hooks_give_all_the_state_of_rank_0() -> None:
    first, second = run_ranks(2, synced)
    assert first == second


def on_cards() -> dict[str, Any]:
    mesh = comm.init()
    own = mesh.collectives("on the card")
    host = mesh.collectives("on the host", device=torch.device("cpu"))
    ones = torch.ones(3, device=mesh.device)
    (summed,) = own.all_reduce(ones, "sum", what="sum").wait()
    (host_summed,) = host.all_reduce(torch.ones(3), "sum", what="sum on the host").wait()
    told = {
        "device": str(mesh.device),
        "backend": mesh.backend,
        "sums": summed.tolist() + host_summed.tolist(),
        "votes": mesh.control.gather_objects(mesh.rank, what="votes"),
    }
    comm.shutdown()
    return told


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two cards")
def test_two_ranks_on_two_cards() -> None:
    for rank, told in enumerate(run_ranks(2, on_cards, timeout_s=180, reuse=True)):
        assert told["device"] == f"cuda:{rank}"
        assert told["backend"] == "nccl"
        assert told["sums"] == [2.0] * 6
        assert told["votes"] == [0, 1]


def environment(**more: str) -> dict[str, str]:
    launchers = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "OMPI_", "SLURM_", "TORCHELASTIC")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(launchers)}
    path = os.pathsep.join([str(TESTS), *sys.path])
    alone = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return {**kept, **alone, **more}


def told(commands: Sequence[Sequence[str]], **more: str) -> list[dict[str, Any]]:
    """Run the programs side by side; what their ranks told, by rank."""
    processes = [
        subprocess.Popen(
            command,
            env=environment(**more),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for command in commands
    ]
    lines: list[str] = []
    try:
        for process in processes:
            out, errors = process.communicate(timeout=200)
            assert process.returncode == 0, errors
            lines += out.splitlines()
    finally:
        for process in processes:
            process.kill()
            process.wait()
    found = [json.loads(line.split("told ", 1)[1]) for line in lines if "told " in line]
    return sorted(found, key=lambda place: place["rank"])


@pytest.mark.slow
def test_two_agents_of_torchrun_on_loopback() -> None:
    port = free_port()
    commands = [
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"),
            *(f"--node-rank={node}", "--master-addr=127.0.0.1", f"--master-port={port}"),
            str(PROGRAM),
        ]
        for node in range(2)
    ]
    places = told(commands)
    assert [place["rank"] for place in places] == [0, 1]
    for one in places:
        assert one["launcher"] == "torchrun"
        assert (one["world_size"], one["local_world_size"]) == (2, 1)
        assert one["carrier"] == "TorchCollectives"  # two hosts, as far as ranks know
        assert one["total"] == 3.0
        assert one["every"] == [0, 1]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun on this machine")
@pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="no mpi4py")
def test_mpirun_needs_no_address_on_one_host() -> None:
    command = ["mpirun", "--oversubscribe", "--allow-run-as-root", "-n", "2"]
    command += [sys.executable, str(PROGRAM), "mpi"]
    places = told([command], MASTER_PORT=str(free_port()))
    assert [place["rank"] for place in places] == [0, 1]
    assert {place["launcher"] for place in places} == {"mpi"}
    assert {place["carrier"] for place in places} == {"MpiCollectives"}
    assert {place["total"] for place in places} == {3.0}


def placed_by_slurm() -> dict[str, Any]:
    rank = os.environ["RANK"]
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
        del os.environ[name]
    os.environ |= {"SLURM_PROCID": rank, "SLURM_LOCALID": rank, "SLURM_NTASKS": "2"}
    return place()


def test_variables_of_slurm_join_as_well() -> None:
    places = run_ranks(2, placed_by_slurm)
    assert {place["launcher"] for place in places} == {"slurm"}
    assert [place["every"] for place in places] == [[0, 1], [0, 1]]


def benchmarked() -> tuple[list[str], dict[str, list[tuple[int, float]]]]:
    lines: list[str] = []
    settings = benchmark_settings({}, which="all", iterations=40, all_reduce_length=64)
    settings = replace(settings, all_to_all_length=640)
    mesh = comm.init(device="cpu")
    found = comm.bps_comm_benchmark(settings, mesh=mesh, write_line=lines.append)
    comm.shutdown()
    return lines, found


def test_benchmarks_run_on_the_cpu() -> None:
    (lines, found), (silent, _) = run_ranks(2, benchmarked)
    assert silent == []
    assert [length for length, _ in found["c2c"]] == [640, 320, 160]
    assert [length for length, _ in found["ar"]] == [64]
    assert all(goodput > 0 for results in found.values() for _, goodput in results)
    assert f"c2c_summary: {found['c2c']}" in lines
    assert set(found) == {"c2c", "ar"}
    assert sum("no GPU on this machine" in line for line in lines) == 4
