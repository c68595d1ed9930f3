"""The exact optimum of small problems, by mixed-integer programming: the search's yardstick."""

from __future__ import annotations

import numpy as np

from shoal.errors import ConfigError, DeviceUnavailable
from shoal.planner.problem import ALL, NODE, PINNED, PartialPlan, PlacementProblem

_MOST = 20_000  # columns: beyond, nothing ends in time


def solve_exactly(
    problem: PlacementProblem, *, time_limit_s: float = 60.0, gap: float = 1e-4
) -> tuple[PartialPlan, float] | None:
    """The fastest plan that there is, and what it is proved to be within; None: nothing fits.

    Args:
        problem: a small one.
        time_limit_s: then the best plan so far is returned.
        gap: relative difference to the optimum at which it ends.

    Returns:
        The plan, and seconds of its slowest rank that no plan can beat.

    Raises:
        DeviceUnavailable: scipy is not installed.
        ConfigError: the problem is too large.
    """
    try:
        from scipy.optimize import Bounds, LinearConstraint, milp  # the extra "plan"
        from scipy.sparse import csr_array
    except ImportError as error:
        raise DeviceUnavailable(
            "exact plans",
            got=str(error),
            allowed="an installed scipy",
            remedy="pip install 'shoal[plan]'.",
        ) from error
    ranks, local = problem.ranks, problem.local_size
    nodes = ranks // local
    # Columns: the peak, then for each table and option its pieces by place.
    columns: list[tuple[int, int, int]] = []  # table, option, place; -1: all of its ranks
    for t, choices in enumerate(problem.choices):
        for o, scope in enumerate(choices.scopes_O.tolist()):
            if scope in (ALL, PINNED):
                columns.append((t, o, -1))
                continue
            own = set(choices.ranks.tolist()) or set(range(ranks))
            for place in range(nodes if scope == NODE else ranks):
                covered = range(place * local, (place + 1) * local) if scope == NODE else (place,)
                if own >= set(covered):
                    columns.append((t, o, place))
    # A column for each option of several pieces: whether it is chosen.
    several = [
        (t, o)
        for t, choices in enumerate(problem.choices)
        for o, pieces in enumerate(choices.pieces_O.tolist())
        if pieces > 1
    ]
    if len(columns) > _MOST:
        got = f"{len(columns):,} variables"
        remedy = "Use the search; it needs no proof."
        raise ConfigError("exact plan", got=got, allowed=f"{_MOST:,}", remedy=remedy)
    first_several = 1 + len(columns)
    size = first_several + len(several)
    # Seconds in the unit of the bound, bytes in that of the limits: HiGHS is at ease near 1.
    unit = max(problem.lower_bound(), 1e-12)
    entries: list[tuple[int, int, float]] = []
    lower: list[float] = []
    upper: list[float] = []

    def row(low: float, high: float, values: list[tuple[int, float]]) -> None:
        entries.extend((len(lower), column, value) for column, value in values)
        lower.append(low)
        upper.append(high)

    by_rank: list[list[tuple[int, int, int]]] = [[] for _ in range(ranks)]
    by_option: dict[tuple[int, int], list[int]] = {}
    for c, (t, o, place) in enumerate(columns):
        choices, scope = problem.choices[t], problem.choices[t].scopes_O[o]
        by_option.setdefault((t, o), []).append(1 + c)
        covered = range(ranks)
        if scope == NODE:
            covered = range(place * local, (place + 1) * local)
        elif place >= 0:
            covered = range(place, place + 1)
        for r in choices.ranks.tolist() if scope == PINNED else covered:
            by_rank[r].append((1 + c, t, o))
    base = problem.base_4
    chosen = {pair: first_several + k for k, pair in enumerate(several)}
    # Column slices cost ranks without a piece as well.
    every = [(c, float(problem.choices[t].every_O[o]) / unit) for (t, o), c in chosen.items()]
    for r in range(ranks):
        loads = [(c, problem.choices[t].loads_4O[:, o]) for c, t, o in by_rank[r]]
        rest = [*every, *((c, float(load[1]) / unit) for c, load in loads)]
        both = [*every, *((c, float(load[0] + load[1]) / unit) for c, load in loads)]
        row(-np.inf, -float(base[1] + problem.dense_s) / unit, [(0, -1.0), *rest])
        row(-np.inf, -float(base[1] + base[0]) / unit, [(0, -1.0), *both])
        for k, limit in zip((2, 3), problem.limits, strict=True):
            sizes = [(c, float(load[k]) / limit) for c, load in loads if load[k]]
            row(-np.inf, 1 - float(base[k]) / limit, sizes)
    for t, choices in enumerate(problem.choices):
        one_of: list[tuple[int, float]] = []
        for o, pieces in enumerate(choices.pieces_O.tolist()):
            own_columns = by_option.get((t, o), [])
            if pieces == 1:
                one_of.extend((c, 1.0) for c in own_columns)
            else:
                one_of.append((chosen[t, o], 1.0))
                row(0, 0, [(chosen[t, o], -float(pieces)), *((c, 1.0) for c in own_columns)])
        row(1, 1, one_of)
    at, column, value = zip(*entries, strict=True)
    matrix = csr_array((value, (at, column)), shape=(len(lower), size))
    integral = np.ones(size)
    integral[0] = 0
    found = milp(
        np.eye(1, size)[0],
        constraints=LinearConstraint(matrix, np.array(lower), np.array(upper)),
        integrality=integral,
        bounds=Bounds(np.zeros(size), np.concatenate([[np.inf], np.ones(size - 1)])),
        options={"time_limit": time_limit_s, "mip_rel_gap": gap},
    )
    if found.x is None:
        return None
    state = PartialPlan(problem)
    places: dict[tuple[int, int], list[int]] = {}
    for (t, o, place), value in zip(columns, found.x[1:first_several], strict=True):
        if value > 0.5:
            places.setdefault((t, o), []).append(place)
    for (t, o), held in places.items():
        choices = problem.choices[t]
        spread = np.arange(ranks) if choices.scopes_O[o] == ALL else choices.ranks
        state.put(t, o, spread if held == [-1] else np.array(sorted(held), dtype=np.int64))
    return state, float(found.mip_dual_bound or 0.0) * unit
