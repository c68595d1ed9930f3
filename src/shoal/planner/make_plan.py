"""From tables, machines and constraints to a plan, or to why there is none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from shoal.errors import ConfigError
from shoal.planner.cost import CostModel, Workload
from shoal.planner.options import (
    Constraint,
    Option,
    TableInput,
    constraints_by_table,
    options_of,
)
from shoal.planner.plan import Plan, TablePlan
from shoal.planner.problem import DEVICE, HOST, PlacementProblem, problem_of
from shoal.planner.search import SearchResult, fits, search
from shoal.planner.topology import Topology, show_bytes

_FROM_DEVICES = 64  # from this number of devices up several groups are tried
_GROUPS = (2, 4, 8)
_NAMED = 5  # tables that an error names
_ANY = 1e12  # times the memory: more than any plan needs
_SMALL = 100  # tables up to which missing bytes are found to 0.1 %; to 2 % of more


def make_plan(
    tables: Sequence[TableInput],
    topology: Topology,
    work: Workload,
    *,
    constraints: Mapping[str, Any] | None = None,
    features: Mapping[str, str] | None = None,
    groups: bool = False,
    time_limit_s: float = 60.0,
    moves: int | None = None,
    seed: int = 0,
) -> Plan:
    """The plan whose slowest rank is fastest, as far as the search finds it.

    Args:
        tables: what to place.
        topology: the machines.
        work: what else a rank does.
        constraints: see `constraints_by_table`; features: feature -> its table.
        groups: also try several groups that hold all tables each, from 64 devices up; pinned ranks
            are those of every group.
        time_limit_s, moves, seed: of the search.

    Raises:
        UnknownName: a constraint of what there is not.
        ConfigError: no plan fits; says by how much, which tables, which constraint, and what would.
    """
    names = [table.name for table in tables]
    if len(set(names)) < len(names) or not names:
        raise ConfigError(
            "tables of a plan",
            got=", ".join(names) or "none",
            allowed="one or more, each of a name of its own",
            remedy="Name each table once.",
        )
    limits = constraints_by_table(constraints or {}, names, features)
    best: Plan | None = None
    outside: list[int] = []  # numbers of groups that lack pinned ranks
    last = max((rank for one in limits.values() for rank in one.ranks or ()), default=0)
    for count in (1, *(_GROUPS if groups and topology.world_size >= _FROM_DEVICES else ())):
        if topology.nodes % count:
            continue
        part = replace(topology, nodes=topology.nodes // count)
        if count > 1 and last >= part.world_size:
            outside.append(count)
            continue
        model = CostModel(part, replace(work, replicas=count))
        options = [options_of(table, limits[table.name], part) for table in tables]
        problem = problem_of(tables, options, model) if all(options) else None
        found = None
        if problem is not None:
            found = search(problem, time_limit_s=time_limit_s, moves=moves, seed=seed)
        if problem is None or found is None:
            if count == 1:
                raise _failure(tables, options, model, limits)
            continue
        plan = _plan_of(problem, found, model)
        if best is None or plan.step_s < best.step_s:
            best = plan
    assert best is not None, "the first number of groups raises otherwise"
    if outside:
        text = f"{', '.join(map(str, outside))} groups were not tried: constraints pin tables to"
        best = replace(best, notes=(*best.notes, f"{text} rank {last}, which no group has then"))
    return best


def _plan_of(problem: PlacementProblem, found: SearchResult, model: CostModel) -> Plan:
    state, topology = found.state, model.topology
    tables, pooling = [], 0.0
    for choices, option, at in zip(problem.choices, state.chosen, state.at, strict=True):
        taken, price = choices.options[option], choices.prices[option]
        groups = choices.where(option, at, problem.local_size)
        pooling += model.shared_phases(choices.table) + price.every_s
        tables.append(
            TablePlan(
                name=choices.table.name,
                dim=choices.table.dim,
                rows=choices.table.row_count,
                sharding=taken.sharding,
                tier=taken.tier,
                cache=taken.cache,
                dtype=taken.dtype,
                hosted=taken.hosted(choices.table, groups),
                phases=price.phases,
                device_bytes=price.device_bytes,
                host_bytes=price.host_bytes,
            )
        )
    base = {"dense": model.work.dense_s, "pooling": pooling, "fixed": model.fixed_s()}
    return Plan(
        world_size=problem.ranks,
        local_size=problem.local_size,
        replicas=model.work.replicas,
        tables=tuple(sorted(tables, key=lambda one: one.name)),
        step_s=state.peak,
        lower_bound_s=found.lower_bound_s,
        rank_seconds=tuple(problem.times(state.loads_4W).tolist()),
        rank_device_bytes=tuple(state.loads_4W[DEVICE].tolist()),
        rank_host_bytes=tuple(np.maximum(state.loads_4W[HOST], 0.0).tolist()),
        base_phases=base,
        limits=problem.limits,
        topology=topology.summary(),
        notes=(*topology.notes, *found.notes),
    )


def _failure(
    tables: Sequence[TableInput],
    options: Sequence[Sequence[Option]],
    model: CostModel,
    limits: Mapping[str, Constraint],
) -> ConfigError:
    """Why nothing fits, and the nearest change that does."""
    topology = model.topology
    without = [t.name for t, own in zip(tables, options, strict=True) if not own]
    if without:
        name = without[0]
        open_options = options_of(next(t for t in tables if t.name == name), Constraint(), topology)
        allowed = sorted({one.sharding for one in open_options})
        return ConfigError(
            f"options of table {name!r} on {topology.world_size} ranks",
            got=f"none under its constraint ({limits[name].summary()})",
            allowed=", ".join(allowed),
            remedy="Loosen the constraint.",
        )
    problem = problem_of(tables, options, model)
    row, missing = _missing(problem)
    kind, limit = ("device", problem.limits[0]) if row == DEVICE else ("host", problem.limits[1])
    room = limit - problem.base_4[row]
    least = [float(choices.loads_4O[row].min()) for choices in problem.choices]
    total = [
        float((choices.device_O if row == DEVICE else choices.host_O).min())
        for choices in problem.choices
    ]
    blocked = [k for k, size in enumerate(least) if size > room]
    named = sorted(blocked or range(len(tables)), key=lambda k: -total[k])[:_NAMED]
    which = ", ".join(f"{tables[k].name!r} ({show_bytes(total[k])})" for k in named)
    said = [
        f"{tables[k].name!r}: {limits[tables[k].name].summary()}"
        for k in named
        if limits[tables[k].name] != Constraint()
    ]
    why = "tables with a piece larger than it" if blocked else "the largest tables"
    got = f"{missing:,.0f} bytes too many on a {kind}; {why}: {which}"
    if problem.base_4[row] > limit / 2:
        got += f"; buffers of the batch and the dense part take {show_bytes(problem.base_4[row])}"
    got += f"; constraints: {'; '.join(said)}" if said else "; no constraint is in the way"
    return ConfigError(
        f"plan for {topology.world_size} ranks",
        got=got,
        allowed=f"{limit:,.0f} bytes of a {kind}, {topology.reserve:.0%} left free",
        remedy=_remedy(tables, limits, model, [tables[k].name for k in named]),
    )


def _missing(problem: PlacementProblem) -> tuple[int, float]:
    """(DEVICE or HOST, bytes by which the limit of a rank is too small) for large tables first."""

    def enough(device: float, host: float) -> bool:
        limits = (problem.limits[0] * device, problem.limits[1] * host)
        return fits(replace(problem, limits=limits))

    row = DEVICE if enough(_ANY, 1.0) else HOST
    low = high = 1.0
    while high < _ANY and not enough(*((high, 1.0) if row == DEVICE else (_ANY, high))):
        low, high = high, 2 * high
    while high / low > (1.001 if len(problem.choices) <= _SMALL else 1.02):
        middle = (low * high) ** 0.5
        scales = (middle, 1.0) if row == DEVICE else (_ANY, middle)
        low, high = (low, middle) if enough(*scales) else (middle, high)
    return row, problem.limits[row - DEVICE] * (high - 1)


def _remedy(
    tables: Sequence[TableInput],
    limits: Mapping[str, Constraint],
    model: CostModel,
    named: Sequence[str],
) -> str:
    """The first of some changes under which all tables fit."""
    topology, open_limits = model.topology, dict(limits)
    changes: list[tuple[str, Sequence[TableInput], Mapping[str, Constraint], Topology]] = []
    dropped: list[str] = []
    for name in named:
        if limits[name] != Constraint():
            open_limits = {**open_limits, name: Constraint()}
            dropped.append(name)
            text = f"Drop the constraints of {', '.join(dropped)}"
            changes.append((text, tables, dict(open_limits), topology))
    if topology.device == "cuda":
        for some in range(1, len(named) + 1):
            hosts = {
                name: replace(one, tiers=("cache", "host")) if name in named[:some] else one
                for name, one in limits.items()
            }
            text = f"Keep rows of {', '.join(named[:some])} on the host (tiers: cache, host)"
            changes.append((text, tables, hosts, topology))
        every = {n: replace(one, tiers=("device", "cache", "host")) for n, one in limits.items()}
        changes.append(("Let rows of all tables live on the host", tables, every, topology))
    half = {n: replace(one, dtypes=("bfloat16",)) for n, one in limits.items()}
    changes.append(("Store rows as bfloat16", tables, half, topology))
    less = [replace(one, rows_later=0.0) for one in tables]
    if any(one.rows_later > one.rows for one in tables):
        changes.append(("Plan for a nearer horizon", less, limits, topology))
    tight = replace(topology, reserve=0.02)
    changes.append(("Reserve less (STORAGE_RESERVE_PERCENT=0.02)", tables, limits, tight))
    for factor in (2, 4, 8, 16, 32, 64):
        more = replace(topology, nodes=topology.nodes * factor)
        if more.world_size <= 1 << 14:
            changes.append((f"Use {more.world_size} devices", tables, limits, more))
    for text, own, constraints, machines in changes:
        if _feasible(own, constraints, machines, model.work):
            return f"Nearest change that fits: {text}."
    return "Nothing that was tried fits: use more devices, with more memory each."


def _feasible(
    tables: Sequence[TableInput],
    limits: Mapping[str, Constraint],
    topology: Topology,
    work: Workload,
) -> bool:
    options = [options_of(table, limits[table.name], topology) for table in tables]
    if not all(options):
        return False
    return fits(problem_of(tables, options, CostModel(topology, work)))
