"""Random planning problems, and the planners that ours is compared with, written here."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shoal.planner.cost import CostModel, Workload
from shoal.planner.options import Constraint, TableInput, options_of
from shoal.planner.problem import (
    ALL,
    DEVICE,
    HIDDEN_S,
    HOST,
    NODE,
    REST_S,
    PartialPlan,
    PlacementProblem,
    problem_of,
)
from shoal.planner.proposer import DynamicProgrammingProposer
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

    Each of its proposals, from most memory to least, goes to TorchRec's partitioner; the plan with
    the best rating is taken.
    """
    proposer = DynamicProgrammingProposer(device_bins=100, host_bins=25)
    proposer.load(problem)
    best: tuple[PartialPlan, float] | None = None
    while (proposal := proposer.propose()) is not None:
        found = _partitioned(problem, proposal.options)
        if found is not None and (best is None or found[1] < best[1]):
            best = found
        proposer.feedback(False)  # the next one, whatever became of this one
    return None if best is None else best[0]


def greedy_plan(problem: PlacementProblem, *, by_piece: bool) -> PartialPlan | None:
    """TorchRec's GreedyProposer, with its GreedyPerfPartitioner and its rating.

    The first proposal is each table's fastest option, by its slowest piece (`use_depth`, the
    default) or by the sum of its pieces; each next one takes the following option of the table
    with the largest piece in memory, whatever became of the last. Of the proposals that fit, the
    one with the best rating is taken: seconds of pieces added up by rank, the slowest rank.
    """
    ranked = []
    for choices in problem.choices:
        held_O = choices.loads_4O[HIDDEN_S] + choices.loads_4O[REST_S]
        key_O = held_O if by_piece else held_O * choices.counts_O
        ranked.append(key_O.argsort(kind="stable").tolist())
    at = [0] * len(ranked)
    best, rating = None, np.inf
    while True:
        options = [row[k] for row, k in zip(ranked, at, strict=True)]
        chosen = list(zip(problem.choices, options, strict=True))
        loads_4T = np.array([choices.loads_4O[:, o] for choices, o in chosen]).T
        held_T = loads_4T[HIDDEN_S] + loads_4T[REST_S]
        counts_T = [choices.counts_O[o] for choices, o in chosen]
        # A proposal whose work alone is rated worse need not be partitioned.
        if max(held_T.max(), np.dot(held_T, counts_T) / problem.ranks) < rating:
            found = _partitioned(problem, options)
            if found is not None and found[1] < rating:
                best, rating = found
        sizes = [
            (loads_4T[DEVICE, t], loads_4T[DEVICE, t] * counts_T[t], loads_4T[HOST, t], -t)
            for t, row in enumerate(ranked)
            if at[t] + 1 < len(row)
        ]
        if not sizes:
            return best
        at[-max(sizes)[-1]] += 1


def _partitioned(
    problem: PlacementProblem, options: Sequence[int]
) -> tuple[PartialPlan, float] | None:
    """TorchRec's greedy partitioner: what lies on all ranks first, then tables by falling memory,
    pieces on the ranks (or the node) with least seconds so far that have the memory; with the
    rating. As everywhere here, slices of a table lie on different ranks."""
    ranks, local = problem.ranks, problem.local_size
    seconds_W = np.zeros(ranks)
    free_2W = np.repeat(np.array(problem.limits)[:, None] - problem.base_4[DEVICE:, None], ranks, 1)
    state = PartialPlan(problem)
    pairs = list(zip(problem.choices, options, strict=True))
    scopes = [int(c.scopes_O[o]) for c, o in pairs]
    memory = [float(c.device_O[o] + c.host_O[o]) for c, o in pairs]
    for t in sorted(range(len(pairs)), key=lambda t: (scopes[t] != ALL, -memory[t], t)):
        choices, o = pairs[t]
        load_4, pieces = choices.loads_4O[:, o], int(choices.pieces_O[o])
        fits_W = (free_2W >= load_4[DEVICE:, None]).all(axis=0)
        if scopes[t] == ALL:
            where = at = np.arange(ranks) if fits_W.all() else None
        else:
            size = local if scopes[t] == NODE else 1
            groups_GL = np.arange(ranks).reshape(-1, size)
            fits_G = fits_W[groups_GL].all(axis=1)
            order_G = seconds_W[groups_GL].sum(axis=1).argsort(kind="stable")
            at = order_G[fits_G[order_G]][:pieces] if fits_G.sum() >= pieces else None
            where = None if at is None else groups_GL[at].ravel()
        if at is None:
            return None
        seconds_W[where] += load_4[HIDDEN_S] + load_4[REST_S]
        free_2W[:, where] -= load_4[DEVICE:, None]
        state.put(t, o, np.sort(at))
    return state, float(seconds_W.max())
