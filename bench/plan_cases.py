"""Random planning problems, and the planners that ours is compared with, written here."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shoal.planner.cost import CostModel, Workload
from shoal.planner.options import Constraint, TableInput, options_of
from shoal.planner.problem import PartialPlan, PlacementProblem, problem_of
from shoal.planner.proposer import DynamicProgrammingProposer
from shoal.planner.search import greedy
from shoal.planner.statistics import zipf
from shoal.planner.topology import Topology

__all__ = ["greedy_plan", "random_problem", "seed_plan", "tables_of", "topology_of"]


def topology_of(devices: int, device_bytes: int = 80 * 10**9) -> Topology:
    """Nodes of 8 GPUs, or one node of fewer."""
    local = min(8, devices)
    return Topology(nodes=devices // local, local_size=local, device_bytes=device_bytes)


def tables_of(rng: np.random.Generator, count: int, *, tiers: bool = False) -> list[TableInput]:
    """Skewed tables: rows over seven orders of magnitude, Zipf ids, some sequences."""
    found = []
    for k in range(count):
        rows = float(np.exp(rng.uniform(np.log(10), np.log(1e8))))
        dim = int(rng.choice([16, 32, 64, 128]))
        statistics = zipf(
            rows,
            float(rng.uniform(0.6, 1.3)),
            ids_per_sample=float(rng.choice([1, 1, 1, 1, 1, 1, 10, 50])),
        )
        found.append(
            TableInput(
                name=f"t{k}",
                dim=dim,
                rows=rows,
                state_width=float(rng.choice([1, dim])),
                statistics=statistics,
                tiers=("device", "cache", "host") if tiers else ("device",),
            )
        )
    return found


def random_problem(
    seed: int, tables: int, devices: int, *, batch_size: int = 2048, tight: bool = False
) -> PlacementProblem:
    """One problem. tight: devices have a third more memory than rows need, and hosts may serve."""
    rng = np.random.default_rng(seed)
    own = tables_of(rng, tables, tiers=tight)
    memory = 80 * 10**9
    if tight:
        needed = sum(one.rows * (40 + 4 * (one.dim + one.state_width)) for one in own)
        memory = int(needed / devices * rng.uniform(0.5, 1.5) / 0.85 + 4e9)
    topology = topology_of(devices, memory)
    model = CostModel(topology, Workload(batch_size=batch_size, dense_s=1e-3))
    return problem_of(own, [options_of(one, Constraint(), topology) for one in own], model)


def seed_plan(problem: PlacementProblem) -> PartialPlan | None:
    """The seed system's objective: the least sum of seconds that fits the memory of all devices.

    Each of its proposals, from most memory to least, is partitioned; the plan whose slowest rank is
    fastest is taken.
    """
    proposer = DynamicProgrammingProposer(device_bins=100, host_bins=25)
    proposer.load(problem)
    best: PartialPlan | None = None
    while (proposal := proposer.propose()) is not None:
        state = _partitioned(problem, proposal.options)
        if state is not None and (best is None or state.peak < best.peak):
            best = state
        proposer.feedback(False)  # the next one, whatever became of this one
    return best


def greedy_plan(problem: PlacementProblem, *, by_piece: bool) -> PartialPlan | None:
    """TorchRec's greedy proposer: each table's fastest option, by its slowest piece or by the sum
    of its pieces; where it does not fit, the table with most memory takes its next one."""
    ranked = []
    for choices in problem.choices:
        key = choices.seconds_O if by_piece else choices.work_O
        ranked.append(list(key.argsort(kind="stable")))
    at = [0] * len(ranked)
    while True:
        state = _partitioned(problem, [int(row[k]) for row, k in zip(ranked, at, strict=True)])
        if state is not None:
            return state
        sizes = [
            (float(problem.choices[t].device_O[row[at[t]]]), t)
            for t, row in enumerate(ranked)
            if at[t] + 1 < len(row)
        ]
        if not sizes:
            return None
        at[max(sizes)[1]] += 1


def _partitioned(problem: PlacementProblem, options: Sequence[int]) -> PartialPlan | None:
    """Pieces on ranks, largest first, each where the time is least."""
    return greedy(problem, options=options)
