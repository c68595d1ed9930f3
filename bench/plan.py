"""The planner: seconds and memory of a search, gaps to the optimum, simpler planners, predictions:
`python bench/plan.py --json`.

Everything is planned on one core. Gaps are to the optimum of a mixed-integer program (HiGHS, in
scipy). Measured steps are of two processes of this machine, or of its GPUs; they need cores that
nobody else uses. Exits 0 even if a target is missed. bench/README.md explains the cases.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from harness import Case, Job, Measured, add_json, as_row, conclude, measured_json, run_job
from plan_measured import CASES, measured_of

__all__ = ["main"]

SCRIPT = Path(__file__).resolve()
PACKAGES = ("torch", "numpy", "scipy", "shoal", "torchrec")
CEILING, FLOOR = "the requested ceiling", "the requested floor"
ONE_CORE = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def _ceiling(name: str, value: float, unit: str, stretch: float | None = None) -> Case:
    return Case(name=name, unit=unit, peer=CEILING, better="lower", bar=1.0, peer_value=value,
                stretch=None if stretch is None else value / stretch)  # fmt: skip


def _floor(name: str, value: float, unit: str = "x") -> Case:
    return Case(name=name, unit=unit, peer=FLOOR, bar=1.0, peer_value=value)


LARGE = _ceiling("plan of 1,000 tables on 1,024 devices", 20.0, "s", 8.0)
LARGE_MEMORY = _ceiling("memory of it", 2.0, "GiB")
MIDDLE = _ceiling("plan of 100 tables on 64 devices", 2.0, "s")
GAP = _ceiling("slowest rank over the optimum, median", 1.02, "x")
WORST = _ceiling("slowest rank over the optimum, worst", 1.10, "x")
PLANNERS = {
    "seed_plan": "the seed's objective",
    "greedy_by_sum": "greedy by the sum of a table's pieces",
    "greedy_by_piece": "greedy by a table's slowest piece",
    "lower_bound": "what no plan can beat",
}
BETTER = {
    name: (
        Case(name=f"{text} over ours, worst", unit="x", peer=FLOOR,
             bar=None if name == "lower_bound" else 1.0, peer_value=1.0),
        Case(name=f"{text} over ours, median", unit="x", peer=FLOOR,
             bar=None if name == "lower_bound" else 1.0, peer_value=1.15),
    )
    for name, text in PLANNERS.items()
}  # fmt: skip
TORCHREC = _floor("torchrec's plan over ours under our cost model, worst of 50", 1.0)
UNDER_THEIRS = _floor("torchrec's plan over ours under its cost model, median of 50", 0.95)


def jobs(quick: bool, count: int = 200) -> list[Job]:
    """All cases. quick: sizes that show that everything runs; count: random problems."""
    every = [case for pair in BETTER.values() for case in pair]
    return [
        Job(task="sized", params={"tables": 50 if quick else 1000, "devices": 64 if quick else 1024,
                                  "which": "large"}, cases=(LARGE, LARGE_MEMORY), env=ONE_CORE),
        Job(task="sized", params={"tables": 20 if quick else 100, "devices": 16 if quick else 64,
                                  "which": "middle"}, cases=(MIDDLE,), env=ONE_CORE),
        Job(task="gaps", params={"count": 4 if quick else count}, cases=(GAP, WORST), env=ONE_CORE,
            timeout_s=3000),
        Job(task="against", params={"count": 2 if quick else count}, cases=tuple(every),
            env=ONE_CORE, timeout_s=3000),
        Job(task="steps", params={"quick": quick}, cases=CASES, timeout_s=900),
        Job(task="torchrec", params={"count": 2 if quick else 50}, cases=(TORCHREC, UNDER_THEIRS),
            env=ONE_CORE, timeout_s=3000),
    ]  # fmt: skip


def sized(*, tables: int, devices: int, which: str) -> dict[str, Measured]:
    """Seconds from tables to a plan, prices and search, and memory that it added."""
    from plan_cases import tables_of, topology_of
    from shoal.planner import Workload, make_plan

    own = tables_of(np.random.default_rng(0), tables)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begun = time.process_time()
    plan = make_plan(own, topology_of(devices), Workload(batch_size=2048, dense_s=1e-3))
    seconds = time.process_time() - begun
    added = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / (1 << 20)
    note = f"slowest rank {plan.step_s / plan.lower_bound_s:.3f} x the lower bound"
    if which == "middle":
        return {MIDDLE.name: Measured(ours=seconds, note=note)}
    return {
        LARGE.name: Measured(ours=seconds, note=note + "; seconds of the processor"),
        LARGE_MEMORY.name: Measured(ours=max(added, 0.001)),
    }


def gaps(*, count: int) -> dict[str, Measured]:
    """Ours over the optimum, on problems of up to 12 tables and 8 devices, half of them tight."""
    from plan_cases import random_problem
    from shoal.planner.exact import solve_exactly
    from shoal.planner.search import search

    found, proved, infeasible = [], 0, 0
    for seed in range(count):
        rng = np.random.default_rng(1000 + seed)
        tables, devices = int(rng.integers(3, 13)), int(rng.choice([2, 4, 8]))
        problem = random_problem(seed, tables, devices, tight=seed % 2 == 1)
        ours, exactly = search(problem), solve_exactly(problem, time_limit_s=10)
        if exactly is None:
            infeasible += ours is None
            continue
        best = exactly[0].peak
        proved += exactly[1] >= best * (1 - 1e-3)
        found.append(np.inf if ours is None else ours.state.peak / best)
    note = f"{len(found)} with a plan, {proved} proved within 0.1 %, {infeasible} without any plan"
    return {
        GAP.name: Measured(ours=float(np.median(found)), note=note),
        WORST.name: Measured(ours=float(np.max(found))),
    }


def against(*, count: int) -> dict[str, Measured]:
    """Slowest ranks of other planners over ours: 30 to 120 tables, 16 to 64 devices."""
    from plan_cases import greedy_plan, random_problem, seed_plan
    from shoal.planner.search import search

    ratios: dict[str, list[float]] = {name: [] for name in PLANNERS}
    failed = dict.fromkeys(PLANNERS, 0)
    for seed in range(count):
        rng = np.random.default_rng(5000 + seed)
        tables, devices = int(rng.integers(30, 120)), int(rng.choice([16, 32, 64]))
        problem = random_problem(10_000 + seed, tables, devices, tight=seed % 2 == 1)
        ours = search(problem)
        others = {
            "seed_plan": seed_plan(problem),
            "greedy_by_sum": greedy_plan(problem, by_piece=False),
            "greedy_by_piece": greedy_plan(problem, by_piece=True),
        }
        if ours is None:
            for name, state in others.items():
                if state is not None:
                    ratios[name].append(0.0)
            continue
        ratios["lower_bound"].append(ours.lower_bound_s / ours.state.peak)
        for name, state in others.items():
            failed[name] += state is None
            if state is not None:
                ratios[name].append(state.peak / ours.state.peak)
    result = {}
    for name, pair in BETTER.items():
        note = f"{len(ratios[name])} problems"
        if failed[name]:
            note += f", {failed[name]} more where it finds no plan and ours does"
        for case, value in zip(pair, (np.min, np.median), strict=True):
            result[case.name] = Measured(ours=float(value(ratios[name])), note=note)
    return result


def steps(*, quick: bool) -> dict[str, Measured]:
    """Predicted and measured steps under six plans, on two processes or all GPUs."""
    import torch

    from rank_main import on_ranks

    gpus = torch.cuda.device_count()
    params = {"device": "cuda" if gpus > 1 else "cpu", "quick": quick}
    ranks = gpus if gpus > 1 else 2
    found = on_ranks(ranks, "five_plans", params, timeout_s=800, module="work_plan")[0]
    return measured_of(found)


def torchrec(*, count: int) -> dict[str, Measured]:
    """Torchrec's own planner on the same problems, where it installs."""
    import importlib.util

    if importlib.util.find_spec("torchrec") is None:
        note = "torchrec is not installed here"
        return {case.name: Measured(note=note) for case in (TORCHREC, UNDER_THEIRS)}
    from work_torchrec import compare

    pairs = [compare(seed) for seed in range(count)]
    ours, theirs = zip(*pairs, strict=True)
    return {
        TORCHREC.name: Measured(ours=min(ours), note=f"median {np.median(ours):.2f}"),
        UNDER_THEIRS.name: Measured(ours=float(np.median(theirs)), note=f"worst {min(theirs):.2f}"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("`")[0].strip())
    add_json(parser, "plan")
    parser.add_argument("--quick", action="store_true", help="small sizes: shows that all runs")
    parser.add_argument("--count", type=int, default=200, metavar="N", help="random problems")
    parser.add_argument("--case", default="", metavar="SUBSTR", help="only cases with this in it")
    parser.add_argument("--list", action="store_true", help="name the cases and stop")
    parser.add_argument("--worker", nargs=2, metavar=("IN", "OUT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        _work(*map(Path, options.worker))
        return
    wanted = [
        job
        for job in jobs(options.quick, options.count)
        if any(options.case in case.name for case in job.cases)
    ]
    if options.list:
        print("\n".join(case.name for job in wanted for case in job.cases))
        return
    rows: list[dict[str, Any]] = []
    for job in wanted:
        print(f"{job.cases[0].name} ...", file=sys.stderr, flush=True)
        found = run_job(job, SCRIPT)
        rows += [as_row(case, found.get(case.name)) for case in job.cases]
    conclude(rows, options.json, PACKAGES)


def _work(source: Path, target: Path) -> None:
    job = json.loads(source.read_text())
    task: Callable[..., dict[str, Measured]] = globals()[job["task"]]
    os.environ.pop("RANK", None)
    target.write_text(measured_json(task(**job["params"])))


if __name__ == "__main__":
    main()
