"""GPU tables against baselines and a copy, in one run: `python bench/table_gpu.py --json out.json`.

Prints our value, the baseline (peer), the ratio and the target (bar) of every case, and marks rows
that miss their target red. It exits 0 even then. bench/README.md explains the
cases.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path

import torch

from harness import (
    Job,
    Measured,
    add_json,
    as_row,
    measured_json,
    red_rows,
    run_job,
    table_lines,
    versions,
    write_json,
)
from plan_gpu import Scale, jobs

__all__ = ["main"]

SCRIPT = Path(__file__).resolve()
TRACES = "BENCH_TRACES"
PACKAGES = ("torch", "triton", "numpy", "shoal")
TASKS = {
    "work_gpu": ("copy", "find", "insert", "step", "tier", "pooled"),
    "work_gpu_life": ("budget", "churned", "growth"),
}


def main() -> None:
    parser = _parser()
    options = parser.parse_args()
    if options.worker:
        _work(*options.worker)
        return
    cuda = torch.cuda.is_available()
    device = options.device or ("cuda" if cuda else "cpu")
    if device == "cuda" and not cuda:
        parser.error("torch finds no CUDA device; --quick --device cpu runs on the interpreter")
    if device == "cpu" and not options.quick:
        parser.error("the interpreter shows that everything runs, not how fast: add --quick")
    planned = jobs(Scale.of(device, options.quick))
    wanted = [job for job in planned if any(options.case in case.name for case in job.cases)]
    if not wanted:
        parser.error(f"no case has {options.case!r} in its name; --list names them")
    if options.list:
        print("\n".join(case.name for job in wanted for case in job.cases))
        return
    title = torch.cuda.get_device_name() if device == "cuda" else "cpu, interpreted"
    installed = " ".join(f"{name} {version}" for name, version in versions(PACKAGES).items())
    print(f"{title}; {installed}", flush=True)
    rows = []
    for count, job in enumerate(wanted, 1):
        print(f"[{count}/{len(wanted)}] {job.task}", file=sys.stderr, end="", flush=True)
        start = time.monotonic()
        environment = {"TRITON_INTERPRET": "1"} if device == "cpu" else {}
        if options.traces:
            environment[TRACES] = str(options.traces.resolve())
        found = run_job(_with_environment(job, environment), SCRIPT)
        print(f" {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
        rows += [
            {**as_row(case, found.get(case.name, Measured(note="not measured"))), "device": title}
            for case in job.cases
            if options.case in case.name
        ]
        if options.json:
            # After each job: an interrupted run keeps its rows.
            write_json(options.json, rows, PACKAGES)
    print("\n" + "\n".join(table_lines(rows)))
    red = red_rows(rows)
    print("\n" + "\n  ".join([f"{len(red)} red:", *red]) if red else "\nno bar missed")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_json(parser, "table-gpu")
    parser.add_argument("--quick", action="store_true", help="small tables, few repetitions")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), help="cuda, or cpu for the interpreter"
    )
    parser.add_argument(
        "--traces", type=Path, metavar="FILE", help="append the traceback of each failed job here"
    )
    parser.add_argument("--case", default="", metavar="SUBSTR", help="only cases with this in it")
    parser.add_argument("--list", action="store_true", help="name the cases and stop")
    parser.add_argument("--worker", nargs=2, type=Path, help=argparse.SUPPRESS)
    return parser


def _with_environment(job: Job, environment: Mapping[str, str]) -> Job:
    return dataclasses.replace(job, env={**job.env, **environment})


def _work(source: Path, target: Path) -> None:
    """A separate process for each job, so that a fault costs only its rows."""
    request = json.loads(source.read_text())
    module = next(name for name, tasks in TASKS.items() if request["task"] in tasks)
    torch.manual_seed(0)
    params = request["params"]
    params["scale"] = Scale(**params["scale"])
    try:
        task = getattr(importlib.import_module(module), request["task"])
        found = task(**params)
    except Exception:
        if os.environ.get(TRACES):
            with Path(os.environ[TRACES]).open("a") as traces:
                traces.write(f"{request['task']}\n{traceback.format_exc()}\n")
        raise
    target.write_text(measured_json(found))


if __name__ == "__main__":
    main()
