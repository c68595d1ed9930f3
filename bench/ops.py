"""Operations against torch alone and against a copy: `python bench/ops.py --json out.json`.

Prints our value, the baseline (peer), the ratio and the target (bar) of every case, and marks rows
that miss their target red. It exits 0 even then. bench/README.md explains the
cases.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness import Measured, add_json, as_row, conclude, measured_json, run_job
from ops_plan import FAMILIES, THREADS, DeviceName, Op, Scale, cases_of, jobs, operations, time_name

__all__ = ["main"]

SCRIPT = Path(__file__).resolve()
PACKAGES = ("torch", "triton", "numpy", "shoal")
# Torch then keeps and reuses the memory of large results, as ours does: its best on the whole.
ENVIRONMENT = {
    "THP_MEM_ALLOC_ENABLE": "1",
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 32),
}


def main() -> None:
    parser = _parser()
    options = parser.parse_args()
    if options.worker:
        _work(*options.worker)
        return
    device: DeviceName = options.device or ("cuda" if _has_cuda() else "cpu")
    if options.device == "cuda" and not _has_cuda():
        parser.error("torch finds no CUDA device; --device cpu needs none")
    scale = Scale(device=device, quick=options.quick)
    threads: Sequence[Any] = options.threads if device == "cpu" else [None]
    wanted = [
        op
        for op in operations(scale)
        if any(options.case in case.name for count in threads for case in cases_of(op, count))
    ]
    if not wanted:
        parser.error(f"no case has {options.case!r} in its name; --list names them")
    if options.list:
        names = (case.name for op in wanted for count in threads for case in cases_of(op, count))
        print("\n".join(name for name in names if options.case in name))
        return
    if device == "cuda":
        title, found = _on_cuda(scale, wanted, options.profile)
    else:
        title, found = _on_cpu(scale, wanted, threads, options.profile)
    rows = [
        {**as_row(case, found.get(case.name)), "device": title}
        for op in wanted
        for count in threads
        for case in cases_of(op, count)
        if options.case in case.name
    ]
    conclude(rows, options.json, PACKAGES)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_json(parser, "ops")
    parser.add_argument("--quick", action="store_true", help="small inputs, few repetitions")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="where; cuda when there is one, if not given"
    )
    parser.add_argument(
        "--threads",
        type=int,
        nargs="+",
        default=list(THREADS),
        metavar="N",
        help="thread counts on the CPU (1 2)",
    )
    parser.add_argument("--case", default="", metavar="SUBSTR", help="only cases with this in it")
    parser.add_argument(
        "--profile", type=Path, metavar="DIR", help="write a chrome trace per family here"
    )
    parser.add_argument("--list", action="store_true", help="name the cases and stop")
    parser.add_argument("--worker", nargs=2, type=Path, help=argparse.SUPPRESS)
    return parser


Found = dict[str, Measured]


def _on_cpu(
    scale: Scale, wanted: Sequence[Op], threads: Sequence[int], folder: Path | None
) -> tuple[str, Found]:
    """In separate processes, so that a crash costs only one family's rows."""
    found: Found = {}
    planned = jobs(scale, threads, wanted, folder, ENVIRONMENT)
    for number, job in enumerate(planned, 1):
        print(f"[{number}/{len(planned)}] {job.task}", file=sys.stderr, end="", flush=True)
        start = time.monotonic()
        found.update(run_job(job, SCRIPT))
        print(f" {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
    return "cpu", found


def _on_cuda(scale: Scale, wanted: Sequence[Op], folder: Path | None) -> tuple[str, Found]:
    """In this process: starting one for each family would take longer than measuring it."""
    device = importlib.import_module("ops_devices").device_of(scale)
    return device.title(), _measured(wanted, device, [None], folder)


def _measured(
    wanted: Sequence[Op], device: Any, threads: Sequence[int | None], folder: Path | None
) -> Found:
    worker = importlib.import_module("ops_measure")
    found: Found = {}
    for family in FAMILIES:
        ops = [op for op in wanted if op.family == family]
        if not ops:
            continue
        found.update(worker.measure(ops, device, threads))
        if folder is not None:
            ran = [op for op in ops if found[time_name(op, threads[0])].ours]
            worker.trace(ran, device, folder / f"ops-{family}-{device.name}.json")
    return found


def _work(source: Path, target: Path) -> None:
    """A process of `_on_cpu`."""
    params = json.loads(source.read_text())["params"]
    scale = Scale(device="cpu", quick=params["quick"])
    wanted = [op for op in operations(scale) if op.name in params["ops"]]
    device = importlib.import_module("ops_devices").device_of(scale)
    folder = Path(params["profile"]) if params["profile"] else None
    target.write_text(measured_json(_measured(wanted, device, params["threads"], folder)))


def _has_cuda() -> bool:
    return bool(importlib.import_module("torch").cuda.is_available())


if __name__ == "__main__":
    main()
