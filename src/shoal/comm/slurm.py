"""Reads the compact forms in which Slurm writes hosts and counts of tasks."""

from __future__ import annotations

import re

from shoal.errors import LaunchError, describe

__all__ = ["first_host", "tasks_of_node"]

_REPEATED = re.compile(r"(\d+)(?:\(x(\d+)\))?")
_BRACKETS = re.compile(r"\[([^\]]*)\]")


def first_host(nodelist: str) -> str:
    """The first host of a list like "gpu[003-005,9],login1": gpu003.

    Raises:
        LaunchError: the list names no host.
    """
    first = _BRACKETS.sub(_first_of_range, nodelist).split(",")[0].strip()
    if not first or "[" in first:
        raise LaunchError(
            describe(
                "Slurm's list of nodes",
                got=repr(nodelist),
                allowed="names like node1,gpu[003-005,9]",
                remedy="Set MASTER_ADDR to the host of rank 0.",
            )
        )
    return first


def _first_of_range(match: re.Match[str]) -> str:
    return match[1].split(",")[0].split("-")[0].strip()


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
        describe(
            "Slurm's tasks per node (SLURM_STEP_TASKS_PER_NODE or SLURM_TASKS_PER_NODE)",
            got=f"{counts!r} on node {node} (SLURM_NODEID)",
            allowed="counts like 4(x2),3 for every node of the step",
            remedy="Start the processes with srun, and do not set these variables by hand.",
        )
    )
