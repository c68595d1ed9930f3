"""CPU tables against named baselines, in one run: `python bench/table_cpu.py --json out.json`.

Prints our value, the baseline (peer), the ratio and the target (bar) of every case, and marks rows
that miss their target red. It exits 0 even then. bench/README.md explains the
cases.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import torch

from harness import Job, Measured, add_json, as_row, conclude, measured_json, run_job
from plan_cpu import DIMS, STEP_PEERS, Scale, jobs

__all__ = ["main"]

SCRIPT = Path(__file__).resolve()
PACKAGES = ("torch", "numpy", "fbgemm-gpu-cpu", "torchrec", "shoal")
TASKS = {
    "work_throughput": ("find", "step", "insert", "scaling", "probe"),
    "work_growth": ("overhead", "growth", "resident", "many_tables"),
    "work_beside": ("evicting", "saving", "given_back", "half_missing", "churned"),
}
WITH_PEERS = ("find", "step")
MALLOC_KEEPS = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 32),
}
PEER_ENVIRONMENTS: tuple[Mapping[str, str], ...] = (
    {"THP_MEM_ALLOC_ENABLE": "0"},
    {"THP_MEM_ALLOC_ENABLE": "1"},
    {"THP_MEM_ALLOC_ENABLE": "1", **MALLOC_KEEPS},
)
PROBE_ROWS = 2_000_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_json(parser, "table-cpu")
    parser.add_argument("--quick", action="store_true", help="small tables, few repetitions")
    parser.add_argument("--case", default="", metavar="SUBSTR", help="only cases with this in it")
    parser.add_argument("--rows", type=int, metavar="N", help="rows preloaded (10 M; 200 k quick)")
    parser.add_argument("--peers-only", action="store_true", help="measure only the baselines")
    parser.add_argument("--list", action="store_true", help="name the cases and stop")
    parser.add_argument("--worker", nargs=2, type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        _work(*options.worker)
        return
    scale = Scale.of(options.rows, options.quick)
    wanted = _matching(jobs(scale, {}), options.case)
    if not wanted:
        parser.error(f"no case has {options.case!r} in its name; --list names them")
    if options.list:
        print("\n".join(case.name for job in wanted for case in job.cases))
        return
    if any(job.task in WITH_PEERS for job in wanted):
        wanted = _matching(jobs(scale, _best_environments(scale)), options.case)
    rows = _measure(wanted, options.case, options.peers_only)
    conclude(rows, options.json, PACKAGES)


def _measure(wanted: list[Job], substring: str, peers_only: bool) -> list[dict]:
    rows = []
    for count, job in enumerate(wanted, 1):
        shown = ((name, value) for name, value in job.params.items() if name != "scale")
        detail = " ".join(f"{name}={value}" for name, value in shown)
        print(f"[{count}/{len(wanted)}] {job.task} {detail}", file=sys.stderr, end="", flush=True)
        start = time.monotonic()
        found: Mapping[str, Measured] = {}
        if not peers_only:
            found = run_job(job, SCRIPT)
        elif job.task in WITH_PEERS:
            params = {**job.params, "peers_only": True}
            found = run_job(dataclasses.replace(job, params=params), SCRIPT)
        print(f" {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
        rows += [as_row(x, found.get(x.name)) for x in job.cases if substring in x.name]
    return rows


def _matching(planned: list[Job], substring: str) -> list[Job]:
    return [job for job in planned if any(substring in case.name for case in job.cases)]


def _best_environments(scale: Scale) -> dict[tuple[str, int], Mapping[str, str]]:
    """Per baseline and dim, the memory settings under which it ran fastest in this run.

    Ours runs in the same process, under the same settings.
    """
    best: dict[tuple[str, int], tuple[float, Mapping[str, str]]] = {}
    small = dataclasses.replace(scale, rows=min(scale.rows, PROBE_ROWS), passes=1)
    for env in PEER_ENVIRONMENTS:
        print(f"[probe] peers under {dict(env)}", file=sys.stderr, flush=True)
        job = Job(
            task="probe", params=small.params(), cases=(), env={"OMP_NUM_THREADS": "1", **env}
        )
        found = run_job(job, SCRIPT)
        for peer in ("index_select", *STEP_PEERS):
            for dim in DIMS:
                measured = found.get(f"{peer} {dim}")
                rate = measured.peer_value if measured and measured.peer_value else 0.0
                if rate > best.get((peer, dim), (0.0, {}))[0]:
                    best[peer, dim] = (rate, env)
    return {key: env for key, (_, env) in best.items()}


def _work(source: Path, target: Path) -> None:
    request = json.loads(source.read_text())
    module = next(name for name, tasks in TASKS.items() if request["task"] in tasks)
    task = getattr(importlib.import_module(module), request["task"])
    torch.manual_seed(0)
    params = request["params"]
    if "scale" in params:
        params["scale"] = Scale(**params["scale"])
    target.write_text(measured_json(task(**params)))


if __name__ == "__main__":
    main()
