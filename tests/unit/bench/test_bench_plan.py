"""The planner's bench: its cases, its figures in a short form, and the planners it compares."""

from __future__ import annotations

import pytest

pytest.importorskip("scipy")

import plan
from harness import as_row
from plan_cases import greedy_plan, random_problem, seed_plan


def test_every_case_has_a_name_of_its_own() -> None:
    names = [case.name for job in plan.jobs(quick=False) for case in job.cases]
    assert len(names) == len(set(names)) == 17
    tasks = [job.task for job in plan.jobs(quick=True)]
    assert all(callable(getattr(plan, task)) for task in tasks)


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
    ("pairs", "tau"),
    [([(1, 1), (2, 2), (3, 3)], 1.0), ([(1, 3), (2, 2), (3, 1)], -1.0),
     ([(1, 1), (2, 3), (3, 2)], 1 / 3)],
)  # fmt: skip
def test_kendalls_tau(pairs: list[tuple[float, float]], tau: float) -> None:
    assert plan.kendall_tau(pairs) == pytest.approx(tau)


def test_the_seeds_objective_is_the_sum() -> None:
    problem = random_problem(10_000, 30, 16)
    seed, greedy = seed_plan(problem), greedy_plan(problem, by_piece=False)
    assert seed is not None and greedy is not None

    def work(state: object) -> float:
        return sum(c.work_O[o] for c, o in zip(problem.choices, state.chosen, strict=True))

    assert work(seed) == pytest.approx(work(greedy))  # memory does not matter here
