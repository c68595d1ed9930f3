"""Which launcher an environment speaks of, and what it says."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from shoal.comm.launch_environment import (
    Launch,
    detect,
    first_host,
    open_mpi,
    process_group_timeout_s,
    tasks_of_node,
)
from shoal.errors import ConfigError, LaunchError

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "1234",
}
MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
MPI_TWO_HOSTS = {**MPI, "OMPI_COMM_WORLD_SIZE": "4"}
SLURM = {
    "SLURM_JOB_ID": "70003",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "7",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_TASKS_PER_NODE": "4,3",
    "SLURM_JOB_NODELIST": "gpu[007,009-011]",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1",
}
LOCAL = "127.0.0.1"
FOUND: dict[str, tuple[Mapping[str, str], Launch]] = {
    "nothing": ({}, Launch("single", 0, 1, 0, 1, LOCAL, 29500)),
    "torchrun": (TORCHRUN, Launch("torchrun", 5, 8, 1, 4, "node0", 1234)),
    "rank and size alone": (
        {"RANK": "0", "WORLD_SIZE": "1"},
        Launch("torchrun", 0, 1, 0, 1, LOCAL, 29500),
    ),
    "one process a pod": (
        {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "job-0", "MASTER_PORT": "23456"},
        Launch("torchrun", 3, 4, 0, 1, "job-0", 23456),
    ),
    "mpi": (MPI, Launch("mpi", 1, 2, 1, 2, LOCAL, 29500)),
    "mpi on two hosts": (
        {**MPI_TWO_HOSTS, "MASTER_ADDR": "node0"},
        Launch("mpi", 1, 4, 1, 2, "node0", 29500),
    ),
    "mpi with a scheduler of BytePS": (
        {**MPI_TWO_HOSTS, "DMLC_PS_ROOT_URI": "10.0.0.9"},
        Launch("mpi", 1, 4, 1, 2, "10.0.0.9", 29500),
    ),
    "slurm": (SLURM, Launch("slurm", 5, 7, 1, 3, "gpu007", 29503)),
    "slurm on one host": (
        {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "1", "MASTER_PORT": "99"},
        Launch("slurm", 1, 2, 1, 2, LOCAL, 99),
    ),
    "slurm without a list of nodes": (
        {k: v for k, v in SLURM.items() if k != "SLURM_JOB_NODELIST"},
        Launch("slurm", 5, 7, 1, 3, "10.0.0.1", 29503),
    ),
    "slurm with a number of tasks per node": (
        {**SLURM, "SLURM_TASKS_PER_NODE": "", "SLURM_NTASKS_PER_NODE": "4"},
        Launch("slurm", 5, 7, 1, 4, "gpu007", 29503),
    ),
    "a batch script of Slurm": (
        {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0"},
        Launch("single", 0, 1, 0, 1, LOCAL, 29500),
    ),
    "torchrun under mpirun": (
        {**TORCHRUN, **MPI, "TORCHELASTIC_RUN_ID": "x"},
        Launch("torchrun", 5, 8, 1, 4, "node0", 1234),
    ),
    "variables by hand under srun": (
        {**SLURM, "RANK": "5", "WORLD_SIZE": "7", "MASTER_ADDR": "a"},
        Launch("torchrun", 5, 7, 1, 3, "a", 29500),
    ),
    "the size by hand under srun": (
        {**SLURM, "WORLD_SIZE": "7", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
        Launch("slurm", 5, 7, 1, 3, "a", 1),
    ),
    "mpirun in a Slurm job": ({**SLURM, **MPI}, Launch("mpi", 1, 2, 1, 2, LOCAL, 29500)),
}


@pytest.mark.parametrize("case", FOUND)
def test_detects(case: str) -> None:
    environ, expected = FOUND[case]
    assert detect(environ) == expected


REFUSED: dict[str, tuple[Mapping[str, str], str]] = {
    "rank past the size": ({**TORCHRUN, "RANK": "8"}, "RANK: got 8; allowed: 0 to 7"),
    "negative rank": ({**TORCHRUN, "RANK": "-1"}, "RANK: got -1"),
    "no size": ({**TORCHRUN, "WORLD_SIZE": ""}, "WORLD_SIZE: got nothing"),
    "a size without a rank": ({"WORLD_SIZE": "4"}, "WORLD_SIZE without RANK"),
    "a local rank without a rank": ({"LOCAL_RANK": "1"}, "LOCAL_RANK without RANK"),
    "no ranks": ({**TORCHRUN, "RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE: got 0"),
    "no number": ({**TORCHRUN, "RANK": "two"}, "RANK: got 'two'"),
    "local rank past its size": ({**TORCHRUN, "LOCAL_RANK": "4"}, "LOCAL_RANK: got 4"),
    "more local ranks than ranks": (
        {**TORCHRUN, "LOCAL_WORLD_SIZE": "9"},
        "LOCAL_WORLD_SIZE: got 9; allowed: 1 to 8",
    ),
    "no port": ({**TORCHRUN, "MASTER_PORT": "70000"}, "MASTER_PORT: got 70000"),
    "no address": ({**TORCHRUN, "MASTER_ADDR": ""}, "MASTER_ADDR of 8 ranks"),
    "mpi rank past the size": ({**MPI, "OMPI_COMM_WORLD_RANK": "7"}, "OMPI_COMM_WORLD_RANK: got 7"),
    "half of mpi": ({"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_SIZE"),
    "mpi on two hosts without an address": (MPI_TWO_HOSTS, "mpirun -x MASTER_ADDR"),
    "mpi beside other ranks": ({**TORCHRUN, **MPI}, "RANK=5 WORLD_SIZE=8 next to"),
    "slurm beside another size": ({**SLURM, "WORLD_SIZE": "4"}, "WORLD_SIZE=4 next to"),
    "slurm with too few nodes": ({**SLURM, "SLURM_NODEID": "2"}, "'4,3' on node 2"),
    "slurm with odd counts": ({**SLURM, "SLURM_TASKS_PER_NODE": "4x2"}, "'4x2'"),
    "slurm with odd nodes": ({**SLURM, "SLURM_JOB_NODELIST": ","}, "list of nodes"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_contradictions_are_errors(case: str) -> None:
    environ, said = REFUSED[case]
    with pytest.raises(LaunchError) as error:
        detect(environ)
    assert said in str(error.value)


@pytest.mark.parametrize(
    "other",
    [
        {"OMPI_COMM_WORLD_SIZE": "8"},
        {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "2"},
        {**SLURM, "SLURM_NODEID": "2"},
    ],
)
def test_beside_torchrun_others_are_not_asked(other: dict[str, str]) -> None:
    environ = {**TORCHRUN, "TORCHELASTIC_RUN_ID": "none"}
    assert detect({**other, **environ}) == detect(environ)


def test_open_mpi_tells_what_is_there() -> None:
    assert open_mpi({"OMPI_COMM_WORLD_LOCAL_RANK": "3"}).local_rank == 3
    assert open_mpi({}).rank is None


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("gpu[003-005,9],login1", "gpu003"),
        ("rack[1-2]node[07,08]", "rack1node07"),
    ],
)
def test_first_host(nodelist: str, host: str) -> None:
    assert first_host(nodelist) == host


def test_tasks_of_node() -> None:
    assert [tasks_of_node("4(x2),3", node) for node in range(3)] == [4, 4, 3]


@pytest.mark.parametrize(("text", "seconds"), [(None, None), ("", None), ("90", 90.0)])
def test_timeout_variable(text: str | None, seconds: float | None) -> None:
    environ = {} if text is None else {"PROCESS_GROUP_TIMEOUT_SECONDS": text}
    assert process_group_timeout_s(environ) == seconds


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "soon"])
def test_timeout_must_be_whole_seconds(text: str) -> None:
    with pytest.raises(ConfigError, match="PROCESS_GROUP_TIMEOUT_SECONDS"):
        process_group_timeout_s({"PROCESS_GROUP_TIMEOUT_SECONDS": text})
