"""The planner's bench: its cases, its figures in a short form, and the planners it compares."""

from __future__ import annotations

import pytest

pytest.importorskip("scipy")

import plan
import plan_measured
from harness import as_row
from plan_cases import greedy_plan, random_problem, seed_plan


def test_every_case_has_a_name_of_its_own() -> None:
    names = [case.name for job in plan.jobs(quick=False) for case in job.cases]
    assert len(names) == len(set(names)) == 17
    tasks = [job.task for job in plan.jobs(quick=True)]
    assert all(callable(getattr(plan, task)) for task in tasks)


@pytest.mark.slow
def test_a_short_form_meets_the_bars_of_quality() -> None:
    found = plan.gaps(count=6) | plan.against(count=2)
    cases = {case.name: case for job in plan.jobs(quick=True) for case in job.cases}
    rows = {name: as_row(cases[name], value) for name, value in found.items()}
    for case in (plan.GAP, plan.WORST, *plan.BETTER["seed_plan"]):
        assert rows[case.name]["ok"], rows[case.name]
    for name in ("greedy_by_sum", "greedy_by_piece"):
        assert rows[plan.BETTER[name][0].name]["ok"], name


def test_sizes_are_planned() -> None:
    found = plan.sized(tables=12, devices=16, which="large")
    assert found[plan.LARGE.name].ours and found[plan.LARGE_MEMORY.name].ours


@pytest.mark.parametrize(
    ("pairs", "noise", "tau"),
    [([(1, 1), (2, 2), (3, 3)], 0.0, 1.0), ([(1, 3), (2, 2), (3, 1)], 0.0, -1.0),
     ([(1, 1), (2, 3), (3, 2)], 0.0, 1 / 3), ([(1, 1), (2, 3), (3, 2.9)], 0.2, (2 / 3) ** 0.5)],
)  # fmt: skip
def test_kendalls_tau(pairs: list[tuple[float, float]], noise: float, tau: float) -> None:
    assert plan_measured.kendall_tau(pairs, noise=noise) == pytest.approx(tau)


def test_figures_of_steps() -> None:
    found = {"rank": 0, "ranks": 2, "device": "one CPU", "rates": ["copy 1 GB/s"], "noise_s": 0.1,
             "measured": {"a": 1.0, "b": 2.0, "c": 3.0},
             "predicted": {"a": 1.1, "b": 1.6, "c": 3.0}}  # fmt: skip
    figures = plan_measured.measured_of(found)
    rows = {case.name: as_row(case, figures[case.name]) for case in plan_measured.CASES}
    assert all(row["ok"] for row in rows.values())
    assert rows[plan_measured.ERROR.name]["ours"] == pytest.approx(1.25)
    worse = {**found, "predicted": {"a": 3.0, "b": 2.0, "c": 1.0}}
    figures = plan_measured.measured_of(worse)
    assert figures[plan_measured.TAU.name].ours is None  # the opposite order
    assert not as_row(plan_measured.TAU, figures[plan_measured.TAU.name])["ok"]


def test_the_seeds_objective_is_the_sum() -> None:
    problem = random_problem(10_000, 30, 16)
    seed, greedy = seed_plan(problem), greedy_plan(problem, by_piece=False)
    assert seed is not None and greedy is not None

    def work(state: object) -> float:
        return sum(c.work_O[o] for c, o in zip(problem.choices, state.chosen, strict=True))

    assert work(seed) <= work(greedy) * (1 + 1e-6)  # memory does not matter here
