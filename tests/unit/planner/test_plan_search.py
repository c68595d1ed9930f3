"""The search against the optimum, against itself, and under limits of memory."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from plan_cases import greedy_plan, random_problem, seed_plan
from shoal.errors import ConfigError, DeviceUnavailable
from shoal.planner import exact
from shoal.planner.problem import ALL, NODE, PartialPlan, PlacementProblem
from shoal.planner.proposer import DynamicProgrammingProposer
from shoal.planner.search import search
from shoal.planner.topology import Topology
from support.planning import problem, table

scipy = pytest.importorskip("scipy")


def loads_of(made: PlacementProblem, state: PartialPlan) -> np.ndarray:
    """Loads of each rank, added up here."""
    loads = np.repeat(made.base_4[:, None], made.ranks, axis=1)
    for choices, option, at in zip(made.choices, state.chosen, state.at, strict=True):
        for ranks in choices.where(option, at, made.local_size):
            for rank in ranks:
                loads[:, rank] += choices.loads_4O[:, option]
        loads[1] += choices.every_O[option]
    return loads


def best_by_hand(made: PlacementProblem) -> float:
    """The slowest rank of the best plan, by trying all."""
    ways = []
    for choices in made.choices:
        own = []
        for o, scope in enumerate(choices.scopes_O):
            if scope == ALL:
                own.append((o, np.arange(made.ranks)))
                continue
            places = made.ranks // made.local_size if scope == NODE else made.ranks
            pieces = int(choices.pieces_O[o])
            own += [(o, np.array(at)) for at in itertools.combinations(range(places), pieces)]
        ways.append(own)
    best = np.inf
    for chosen in itertools.product(*ways):
        state = PartialPlan(made)
        for t, (o, at) in enumerate(chosen):
            state.put(t, o, at)
        if state.loads_4W[2].max() <= made.limits[0] and state.loads_4W[3].max() <= made.limits[1]:
            best = min(best, state.peak)
    return best


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_small_problems_are_solved_and_the_yardstick_is_right(seed: int) -> None:
    made = random_problem(seed, 3, 2, tight=seed % 2 == 1)
    optimum = best_by_hand(made)
    exactly, found = exact.solve_exactly(made), search(made)
    if not np.isfinite(optimum):
        assert exactly is None and found is None
        return
    assert exactly is not None and found is not None
    assert exactly[0].peak == pytest.approx(optimum, rel=2e-4)
    assert exactly[1] <= optimum * (1 + 1e-9)
    assert found.state.peak == pytest.approx(optimum, rel=2e-4)
    assert found.lower_bound_s <= optimum * (1 + 1e-9)


@pytest.mark.parametrize(
    "seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 8))]
)
def test_the_gap_to_the_optimum_is_small(seed: int) -> None:
    made = random_problem(200 + seed, 4 + seed, (2, 4, 8)[seed % 3], tight=seed % 2 == 1)
    exactly, found = exact.solve_exactly(made, time_limit_s=20), search(made)
    assert exactly is not None and found is not None
    assert found.state.peak <= exactly[0].peak * 1.02


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_never_worse_than_simpler_planners(seed: int) -> None:
    made = random_problem(300 + seed, 40, 16, tight=seed % 2 == 1)
    found = search(made)
    assert found is not None
    np.testing.assert_allclose(found.state.loads_4W, loads_of(made, found.state), rtol=1e-9)
    assert (found.state.loads_4W[2] <= made.limits[0] * (1 + 1e-9)).all()
    greedy = [greedy_plan(made, by_piece=by_piece) for by_piece in (True, False)]
    for other in (*greedy, seed_plan(made)):
        assert other is None or found.state.peak <= other.peak * (1 + 1e-9)


def test_the_same_plan_every_time() -> None:
    made = random_problem(7, 30, 16)
    first, second = search(made), search(made)
    assert first is not None and second is not None
    assert first.state.chosen == second.state.chosen
    assert all((a == b).all() for a, b in zip(first.state.at, second.state.at, strict=True))


def test_a_time_limit_ends_the_search() -> None:
    found = search(random_problem(8, 60, 64), time_limit_s=0.0)
    assert found is not None and "time limit" in found.notes[-1]


def test_dynamic_programming_proposes_the_least_sum_that_fits() -> None:
    made = random_problem(11, 3, 2, tight=True)
    proposer = DynamicProgrammingProposer(device_bins=4096, host_bins=512)
    proposer.load(made)
    proposal = proposer.propose()
    assert proposal is not None
    best = np.inf
    for options in itertools.product(*(range(len(c.options)) for c in made.choices)):
        chosen = list(zip(made.choices, options, strict=True))
        device = sum(c.device_O[o] for c, o in chosen)
        host = sum(c.host_O[o] for c, o in chosen)
        alone = all((c.loads_4O[2:, o] <= np.array(made.limits)).all() for c, o in chosen)
        room = (made.limits[0] - made.base_4[2]) * made.ranks
        if alone and device <= room and host <= made.limits[1] * made.ranks:
            best = min(best, sum(c.work_O[o] for c, o in chosen))
    assert proposal.work_s == pytest.approx(best, rel=0.02)
    assert proposal.work_s == pytest.approx(
        sum(c.work_O[o] for c, o in zip(made.choices, proposal.options, strict=True))
    )


def test_proposals_take_less_memory_after_a_refusal() -> None:
    made = random_problem(13, 20, 8, tight=True)
    proposer = DynamicProgrammingProposer()
    proposer.load(made)
    sizes, times = [], []
    while (proposal := proposer.propose()) is not None:
        sizes.append(proposal.device_bytes + proposal.host_bytes)
        times.append(proposal.work_s)
        proposer.feedback(False)
    assert len(sizes) > 1 and times == sorted(times)
    proposer.load(made)
    assert proposer.propose() is not None
    proposer.feedback(True, 1.0)
    assert proposer.propose() is None  # one ceiling, and it is placed


def test_hidden_phases_are_free_during_the_dense_part() -> None:
    tables, topology = [table("a", ids_per_sample=20.0)], Topology(nodes=1, local_size=2)
    waits = problem(tables, topology, pipelined=False, dense_s=1.0)
    hides = problem(tables, topology, dense_s=1.0)
    found = [search(one) for one in (waits, hides)]
    assert found[0] is not None and found[1] is not None
    assert found[1].state.peak < found[0].state.peak
    spread = found[1].state.loads_4W
    assert found[1].state.peak == pytest.approx(1.0 + spread[1].max())


def test_one_rank_and_no_room() -> None:
    alone = search(problem([table()], Topology(nodes=1, local_size=1)))
    assert alone is not None and alone.state.chosen[0] >= 0
    full = Topology(nodes=1, local_size=2, device_bytes=10**6)
    assert search(problem([table()], full)) is None
    assert exact.solve_exactly(problem([table()], full)) is None


def test_without_scipy(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(DeviceUnavailable, match=r"shoal\[plan\]"):
        exact.solve_exactly(random_problem(0, 2, 2))


def test_too_large_to_be_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "_MOST", 3)
    with pytest.raises(ConfigError, match="variables"):
        exact.solve_exactly(random_problem(0, 3, 4))


@pytest.mark.parametrize(
    ("more", "rows"),
    [({"ids_per_sample": 2.0}, 1e6), ({"dim": 128}, 1e6), ({"state_width": 256.0}, 1e6)],
)
def test_more_work_costs_more(more: dict[str, Any], rows: float) -> None:
    topology = Topology(nodes=1, local_size=4)
    less, larger = (problem([table("a", rows, **own)], topology).choices[0] for own in ({}, more))
    assert (larger.seconds_O >= less.seconds_O).all() and larger.work_O.sum() > less.work_O.sum()


def test_slower_links_cost_more() -> None:
    fast = Topology(nodes=2, local_size=2)
    slow = replace(fast, rates=replace(fast.rates, cross=fast.rates.cross / 10))
    a, b = (problem([table("a")], one).choices[0] for one in (fast, slow))
    assert (b.seconds_O > a.seconds_O).all()
