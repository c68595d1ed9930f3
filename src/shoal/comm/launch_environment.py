"""Who this process is among how many: the only reader of the variables that launchers set."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from shoal.errors import ConfigError, LaunchError

SWITCH = (0, 1)
_WORDS = (("false", "no", "off", "n", "f"), ("true", "yes", "on", "y", "t"))


def choice(
    environ: Mapping[str, str], name: str, default: int, allowed: Sequence[int] = SWITCH
) -> int:
    """One of a few numbers; where 0 and 1 are among them, also said as words in any case.

    Raises:
        ConfigError: another value.
    """
    text = environ.get(name, "").strip()
    known = {str(value): value for value in allowed}
    if set(SWITCH) <= set(allowed):
        known |= {word: value for value in SWITCH for word in _WORDS[value]}
    if text and text.lower() not in known:
        raise ConfigError(
            name,
            got=repr(environ[name][:100]),
            allowed=", ".join(known),
            remedy=f"Unset it to get {default}.",
        )
    return known[text.lower()] if text else default


def whole(
    environ: Mapping[str, str], name: str, default: int, *, least: int = 0, most: int = 2**63 - 1
) -> int:
    """A whole number in a range.

    Raises:
        ConfigError: no whole number, or one out of range.
    """
    text = environ.get(name, "").strip()
    if not text:
        return default
    # Not `isdigit`, which takes digits that `int` refuses; and no more digits than `int` reads.
    value = int(text) if text.isdecimal() and len(text) < 20 else -1
    if not least <= value <= most:
        raise ConfigError(
            name,
            got=repr(environ[name][:100]),
            allowed=f"a whole number from {least} to {most}",
            remedy="Unset it, or set it to one.",
        )
    return value


_REPEATED = re.compile(r"(\d+)(?:\(x(\d+)\))?")
_BRACKETS = re.compile(r"\[([^\]]*)\]")


def first_host(nodelist: str) -> str:
    """The first host of a list like "gpu[003-005,9],login1": gpu003.

    Raises:
        LaunchError: the list names no host.
    """
    first = _BRACKETS.sub(lambda match: re.split("[,-]", match[1])[0].strip(), nodelist)
    first = first.split(",")[0].strip()
    if not first or "[" in first:
        raise LaunchError(
            "Slurm's list of nodes",
            got=repr(nodelist),
            allowed="names like node1,gpu[003-005,9]",
            remedy="Set MASTER_ADDR to the host of rank 0.",
        )
    return first


def tasks_of_node(counts: str, node: int) -> int:
    """Tasks on node number `node` of a text like "4(x2),3": 4, 4, 3.

    Raises:
        LaunchError: not such a text, or it has fewer nodes.
    """
    tasks: list[int] = []
    for part in counts.split(","):
        match = _REPEATED.fullmatch(part.strip())
        if match is None:
            break
        tasks += [int(match[1])] * int(match[2] or 1)
    else:
        if 0 <= node < len(tasks):
            return tasks[node]
    raise LaunchError(
        "Slurm's tasks per node (SLURM_STEP_TASKS_PER_NODE or SLURM_TASKS_PER_NODE)",
        got=f"{counts!r} on node {node} (SLURM_NODEID)",
        allowed="counts like 4(x2),3 for every node of the step",
        remedy="Start the processes with srun, and do not set these variables by hand.",
    )


DEFAULT_PORT = 29500
PORTS = 1 << 16  # all are below it
MAX_TIMEOUT_S = 10**8  # three years; larger ones overflow the clocks of Gloo and NCCL
LOOPBACK = "127.0.0.1"
Launcher = Literal["torchrun", "mpi", "slurm", "single"]
Default = TypeVar("Default", int, None)

# What holds rank, world size, local rank and local world size, for messages.
_VARIABLES: Mapping[str, tuple[str, str, str, str]] = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "mpi": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "slurm": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_TASKS_PER_NODE"),
    "single": ("rank", "world_size", "local_rank", "local_world_size"),
}


@dataclass(frozen=True, slots=True)
class Launch:
    """A rank's place among all ranks.

    Args:
        launcher: whose variables were read.
        rank: 0 to world_size - 1.
        world_size: all ranks.
        local_rank: number among the ranks of this host; picks the device.
        local_world_size: ranks of this host.
        master_addr, master_port: where rank 0 (or torchrun's agent) listens.
        restarts: how often torchrun started the ranks again.

    Raises:
        LaunchError: numbers that contradict each other.
    """

    launcher: Launcher
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str = LOOPBACK
    master_port: int = DEFAULT_PORT
    restarts: int = 0

    def __post_init__(self) -> None:
        rank, world, local_rank, local_world = _VARIABLES[self.launcher]
        _check(world, self.world_size, 1, None)
        _check(rank, self.rank, 0, (world, self.world_size))
        _check(local_world, self.local_world_size, 1, (world, self.world_size + 1))
        _check(local_rank, self.local_rank, 0, (local_world, self.local_world_size))
        _check("MASTER_PORT", self.master_port, 1, ("the ports", PORTS))

    @property
    def one_host(self) -> bool:
        """Whether every rank is on this host."""
        return self.local_world_size == self.world_size


def _check(name: str, value: int, least: int, below: tuple[str, int] | None) -> None:
    if value >= least and (below is None or value < below[1]):
        return
    allowed = (
        f"{least} or more" if below is None else f"{least} to {below[1] - 1}, given {below[0]}"
    )
    raise _refused(name, value, allowed)


@dataclass(frozen=True, slots=True)
class OpenMpi:
    """What Open MPI says of this process; None where it says nothing."""

    rank: int | None
    size: int | None
    local_rank: int | None
    local_size: int | None


def open_mpi(environ: Mapping[str, str] | None = None) -> OpenMpi:
    """The four OMPI_COMM_WORLD_* numbers.

    Raises:
        LaunchError: one of them is no number.
    """
    environ = os.environ if environ is None else environ
    return OpenMpi(*(_optional(environ, name, None) for name in _VARIABLES["mpi"]))


def detect(environ: Mapping[str, str] | None = None) -> Launch:
    """Find the launcher and this process's place. Reads `environ` only; starts nothing.

    RANK and WORLD_SIZE go first. Where Open MPI's or Slurm's numbers stand next to them they must
    agree, unless torchrun itself set them (one torchrun per node, started by mpirun or srun).

    Raises:
        LaunchError: variables contradict each other, are incomplete, or do not say where rank 0
            listens.
    """
    environ = os.environ if environ is None else environ
    of_torchrun = bool(environ.get("RANK") and environ.get("TORCHELASTIC_RUN_ID"))
    other = None if of_torchrun else _mpi(environ) or _slurm(environ)
    if environ.get("RANK"):
        return _torchrun(environ, other)
    if other is None:
        for name, alone in (("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")):
            if environ.get(name, alone) not in ("", alone):
                raise _incomplete("RANK", f"{name} without RANK")
        return Launch("single", 0, 1, 0, 1, master_port=_port(environ))
    if environ.get("WORLD_SIZE") and _number(environ, "WORLD_SIZE") != other.world_size:
        raise _contradiction(f"WORLD_SIZE={environ['WORLD_SIZE']}", other)
    return other


def _torchrun(environ: Mapping[str, str], other: Launch | None) -> Launch:
    rank, world_size = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
    local_rank, local_world_size = 0, 1
    if other is not None:
        if (rank, world_size) != (other.rank, other.world_size):
            raise _contradiction(f"RANK={rank} WORLD_SIZE={world_size}", other)
        local_rank, local_world_size = other.local_rank, other.local_world_size
    local_rank = _optional(environ, "LOCAL_RANK", local_rank)
    local_world_size = _optional(environ, "LOCAL_WORLD_SIZE", max(local_world_size, local_rank + 1))
    # Checked before the address, so that what contradicts is named first.
    placed = Launch("torchrun", rank, world_size, local_rank, local_world_size)
    address = environ.get("MASTER_ADDR") or _address_on_one_host(placed, "torchrun sets it")
    restarts = _optional(environ, "TORCHELASTIC_RESTART_COUNT", 0)
    port = _port(environ)
    return replace(placed, master_addr=address, master_port=port, restarts=restarts)


def _mpi(environ: Mapping[str, str]) -> Launch | None:
    found = open_mpi(environ)
    if found.rank is None and found.size is None:
        return None
    if found.rank is None or found.size is None:
        missing = _VARIABLES["mpi"][0 if found.rank is None else 1]
        raise _incomplete(missing, "some OMPI_COMM_WORLD_* variables, not all")
    local_rank = 0 if found.local_rank is None else found.local_rank
    local_size = local_rank + 1 if found.local_size is None else found.local_size
    placed = Launch("mpi", found.rank, found.size, local_rank, local_size)
    if environ.get("RANK"):
        return placed  # RANK's launcher says where the master is.
    remedy = "mpirun -x MASTER_ADDR=<host of rank 0> -x MASTER_PORT=29500 ..."
    address = (
        environ.get("MASTER_ADDR")
        or environ.get("DMLC_PS_ROOT_URI")
        or _address_on_one_host(placed, remedy)
    )
    return replace(placed, master_addr=address, master_port=_port(environ))


def _slurm(environ: Mapping[str, str]) -> Launch | None:
    if not (environ.get("SLURM_PROCID") and environ.get("SLURM_NTASKS")):
        return None
    started = environ.get("SLURM_STEP_ID") or environ.get("SLURM_LAUNCH_NODE_IPADDR")
    if not started and environ.get("SLURM_JOB_ID") and environ["SLURM_PROCID"] == "0":
        return None  # A batch script itself, outside srun: it describes the job, not a rank.
    rank, world_size = _number(environ, "SLURM_PROCID"), _number(environ, "SLURM_NTASKS")
    local_rank = _optional(environ, "SLURM_LOCALID", 0)
    here = _slurm_tasks_here(environ, world_size)
    placed = Launch("slurm", rank, world_size, local_rank, here)
    if environ.get("RANK"):
        return placed
    nodes = (
        environ.get("SLURM_STEP_NODELIST")
        or environ.get("SLURM_JOB_NODELIST")
        or environ.get("SLURM_NODELIST")
    )
    address = environ.get("MASTER_ADDR")
    if not address and not placed.one_host:
        # The node srun ran on need not hold rank 0; the list of nodes is the better witness.
        address = first_host(nodes) if nodes else environ.get("SLURM_LAUNCH_NODE_IPADDR")
    address = address or _address_on_one_host(placed, "export MASTER_ADDR=<host of rank 0>")
    # Jobs that share a node need ports of their own.
    job = _optional(environ, "SLURM_JOB_ID", 0) + _optional(environ, "SLURM_STEP_ID", 0)
    port = _port(environ, DEFAULT_PORT + job % 10_000)
    return replace(placed, master_addr=address, master_port=port)


def _slurm_tasks_here(environ: Mapping[str, str], world_size: int) -> int:
    counts = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE")
    if counts:
        return tasks_of_node(counts, _optional(environ, "SLURM_NODEID", 0))
    nodes = _optional(environ, "SLURM_NNODES", 1)
    return _optional(environ, "SLURM_NTASKS_PER_NODE", -(-world_size // nodes))


def _address_on_one_host(placed: Launch, remedy: str) -> str:
    if placed.one_host:
        return LOOPBACK
    raise LaunchError(
        f"MASTER_ADDR of {placed.world_size} ranks, {placed.local_world_size} on this host",
        got="nothing",
        allowed="a host name or address that every rank reaches",
        remedy=f"Say where rank 0 listens: {remedy}.",
    )


def _port(environ: Mapping[str, str], default: int = DEFAULT_PORT) -> int:
    return _optional(environ, "MASTER_PORT", default)


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    if not text:
        raise _incomplete(name, "nothing")
    try:
        return int(text)
    except ValueError:
        raise _refused(name, repr(text), "a whole number") from None


def _optional(environ: Mapping[str, str], name: str, default: Default) -> int | Default:
    return _number(environ, name) if environ.get(name) else default


def _incomplete(name: str, got: str) -> LaunchError:
    return _refused(name, got, "rank and world size together")


def _refused(name: str, got: object, allowed: str) -> LaunchError:
    remedy = "Launch with torchrun, mpirun or srun, or unset all of them; do not set some by hand."
    return LaunchError(f"launcher variable {name}", got=got, allowed=allowed, remedy=remedy)


def _contradiction(said: str, other: Launch) -> LaunchError:
    rank, world, *_ = _VARIABLES[other.launcher]
    return LaunchError(
        "launcher variables",
        got=f"{said} next to {rank}={other.rank} {world}={other.world_size}",
        allowed="launchers that agree",
        remedy="Unset RANK and WORLD_SIZE, or start the ranks with torchrun.",
    )


def process_group_timeout_s(environ: Mapping[str, str] | None = None) -> float | None:
    """PROCESS_GROUP_TIMEOUT_SECONDS; None where it is not set.

    Raises:
        ConfigError: not a whole number above zero.
    """
    environ = os.environ if environ is None else environ
    seconds = whole(environ, "PROCESS_GROUP_TIMEOUT_SECONDS", 0, least=1, most=MAX_TIMEOUT_S)
    return float(seconds) if seconds else None


@dataclass(frozen=True, slots=True)
class Attempt:
    """Which start of a job this is, under a launcher that restarts jobs.

    Args:
        job: the same for all starts of a job on this host, and no other's.
        restarts: how often it was started again; 0 the first time.
    """

    job: str
    restarts: int


def attempt(environ: Mapping[str, str] | None = None) -> Attempt | None:
    """The present start of torchrun's job; None under other launchers.

    Raises:
        LaunchError: a count that is no number.
    """
    environ = os.environ if environ is None else environ
    run_id = environ.get("TORCHELASTIC_RUN_ID")
    if not run_id:
        return None
    # Runs without an id are all called "none"; the agent, which starts ranks again, outlives them.
    job = f"{run_id} of agent {os.getppid()}"
    return Attempt(job, _optional(environ, "TORCHELASTIC_RESTART_COUNT", 0))
