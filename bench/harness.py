"""Shared by all benches: cases and their targets, interleaved timing, JSON rows, machine facts.

Imports neither torch nor the package, so that a bench can list its cases anywhere.
Cases are declared before anything runs. A case that could not be measured stays in the result as a
row without a value, so that it does not look like a case that was not selected.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

__all__ = [
    "Case",
    "Job",
    "Measured",
    "Runner",
    "add_json",
    "add_options",
    "as_row",
    "available_bytes",
    "conclude",
    "interleave",
    "machine_facts",
    "measured_json",
    "median",
    "percentile",
    "ratio",
    "red_rows",
    "run_job",
    "run_jobs",
    "table_lines",
    "versions",
    "write_json",
]

Better = Literal["higher", "lower"]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of a result, as declared.

    Args:
        name: unique in its bench.
        unit: of `ours` and `peer_value`.
        peer: the baseline; a requested floor or ceiling is a baseline too.
        better: the good direction of `ours`; a larger `ratio` is always better.
        bar, stretch: target ratio, and stretch target. None: an informational row.
        peer_value: set if the baseline is a figure instead of a program.
    """

    name: str
    unit: str
    peer: str
    better: Better = "higher"
    bar: float | None = None
    stretch: float | None = None
    peer_value: float | None = None


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The result of a run for one case; None if there was nothing to measure.

    limit_fraction: ours as a fraction of the machine's limit (copy bandwidth), 0..1.
    device_ms, host_ms: time of a call on the device, launches not counted, and until it returned.
    """

    ours: float | None = None
    peer_value: float | None = None
    limit_fraction: float | None = None
    note: str = ""
    device_ms: float | None = None
    host_ms: float | None = None


@dataclass(frozen=True, kw_only=True)
class Job:
    """Cases measured together in one separate process.

    Args:
        task: name of the worker function.
        params: its keyword arguments (JSON values).
        cases: the cases that it must measure.
        need_bytes: free memory that it needs; otherwise the job is not started.
        env: extra environment of the process.
        timeout_s: longer than this counts as not measured.
    """

    task: str
    params: Mapping[str, Any]
    cases: tuple[Case, ...]
    need_bytes: int = 0
    env: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = 600.0


@dataclass(frozen=True, kw_only=True)
class Runner:
    """One contender of an interleaved timing: `run(i)` handles batch i.

    before: called untimed ahead of each run (sets thread counts).
    """

    name: str
    run: Callable[[int], object]
    before: Callable[[], object] | None = None


def ratio(ours: float | None, peer_value: float | None, better: Better) -> float | None:
    """Ours against the baseline, larger is better; None if either is missing or not positive."""
    if not ours or not peer_value or ours <= 0 or peer_value <= 0:
        return None
    return ours / peer_value if better == "higher" else peer_value / ours


def as_row(case: Case, measured: Measured | None) -> dict[str, Any]:
    """The JSON row of a case; `ok` is None for informational rows, False when not measured."""
    found = measured or Measured(note="not measured")
    peer_value = found.peer_value if case.peer_value is None else case.peer_value
    value = ratio(found.ours, peer_value, case.better)
    ok = None if case.bar is None else value is not None and value >= case.bar
    return {
        "case": case.name,
        "unit": case.unit,
        "ours": found.ours,
        "peer": case.peer,
        "peer_value": peer_value,
        "ratio": value,
        "bar": case.bar,
        "stretch": case.stretch,
        "limit_fraction": found.limit_fraction,
        "device_ms": found.device_ms,
        "host_ms": found.host_ms,
        "ok": ok,
        "note": found.note,
    }


def interleave(
    runners: Sequence[Runner], *, batches: int, passes: int, warmup: int = 3
) -> dict[str, list[float]]:
    """Seconds of each run by runner name, contenders taking turns on every batch.

    The order reverses from batch to batch, so no contender always follows the same other one.
    """
    for runner in runners:
        if runner.before is not None:
            runner.before()
        for index in range(warmup):
            runner.run(index % batches)
    seconds: dict[str, list[float]] = {runner.name: [] for runner in runners}
    turn = 0
    for _ in range(passes):
        for index in range(batches):
            for runner in runners if turn % 2 == 0 else reversed(runners):
                if runner.before is not None:
                    runner.before()
                start = time.perf_counter()
                runner.run(index)
                seconds[runner.name].append(time.perf_counter() - start)
            turn += 1
    return seconds


def percentile(values: Sequence[float], percent: float) -> float:
    """Nearest-rank percentile: the smallest value that `percent` % of the values do not exceed."""
    ordered = sorted(values)
    rank = -(-len(ordered) * percent // 100)
    return ordered[max(0, int(rank) - 1)]


def available_bytes() -> int:
    """Memory that can be had without swapping; a very large number where it cannot be read."""
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return 1 << 62
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 1 << 62


def run_job(job: Job, script: Path) -> dict[str, Measured]:
    """Run a job as `script --worker IN OUT` and read its measurements, by case name.

    A job that cannot start, fails or takes too long gives every case a note instead of a value.
    """
    if available_bytes() < job.need_bytes:
        free = available_bytes() / 1e9
        return _failed(job, f"needs {job.need_bytes / 1e9:.1f} GB free, {free:.1f} GB are")
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        source, target = Path(folder) / "in.json", Path(folder) / "out.json"
        source.write_text(json.dumps({"task": job.task, "params": dict(job.params)}))
        command = [sys.executable, str(script), "--worker", str(source), str(target)]
        elsewhere = _BusyElsewhere()
        try:
            done = subprocess.run(
                command,
                env={**os.environ, **job.env},
                timeout=job.timeout_s,
                capture_output=True,
                text=True,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return _failed(job, f"took longer than {job.timeout_s:.0f} s")
        if done.returncode != 0 or not target.exists():
            return _failed(job, _last_words(done.returncode, done.stderr))
        found = json.loads(target.read_text())
    busy = elsewhere.fraction()
    if busy > 0.05:
        for value in found.values():
            parts = (value["note"], f"cores {busy:.0%} busy elsewhere")
            value["note"] = "; ".join(part for part in parts if part)
    return {name: Measured(**value) for name, value in found.items()}


class _BusyElsewhere:
    """The part of all cores that other processes took since this was made (Linux; else 0)."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._busy_s, self._cores = self._machine()
        self._own_s = self._own()

    def fraction(self) -> float:
        wall = (time.monotonic() - self._start) * self._cores
        others = (self._machine()[0] - self._busy_s) - (self._own() - self._own_s)
        return min(1.0, max(0.0, others / wall)) if self._cores else 0.0

    @staticmethod
    def _own() -> float:
        used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        return sum(usage.ru_utime + usage.ru_stime for usage in used)

    @staticmethod
    def _machine() -> tuple[float, int]:
        stat = Path("/proc/stat")
        if not stat.exists():
            return 0.0, 0
        lines = [line.split() for line in stat.read_text().splitlines() if line.startswith("cpu")]
        user, nice, system, _idle, _wait, irq, softirq, steal = (int(x) for x in lines[0][1:9])
        ticks = user + nice + system + irq + softirq + steal
        return ticks / os.sysconf("SC_CLK_TCK"), len(lines) - 1


def _last_words(status: int, errors: str) -> str:
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    lines = errors.strip().splitlines()
    return lines[-1][:200] if lines else f"exit status {status}"


def _failed(job: Job, note: str) -> dict[str, Measured]:
    return {case.name: Measured(note=note) for case in job.cases}


def machine_facts() -> dict[str, Any]:
    """What the numbers depend on: processor, cores, memory, huge pages, load, kernel."""
    model = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [x for x in cpuinfo.read_text().splitlines() if x.startswith("model name")]
        model = names[0].split(":", 1)[1].strip() if names else model
    huge = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "processor": model,
        "cores": cores,
        "available_bytes": available_bytes(),
        "huge_pages": huge.read_text().strip() if huge.exists() else "",
        "load_1m": os.getloadavg()[0],
        "system": platform.platform(),
    }


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Installed versions of Python and of the named distributions; "" for those not installed."""
    installed = {name: "" for name in packages}
    for distribution in metadata.distributions():
        name = distribution.name.replace("_", "-").lower()
        if name in installed:
            installed[name] = distribution.version
    return {"python": platform.python_version(), **installed}


def red_rows(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names of the rows that have a target and miss it."""
    return [row["case"] for row in rows if row["ok"] is False]


def add_options(parser: argparse.ArgumentParser, name: str) -> None:
    """The options of a bench whose jobs run in processes of their own (`run_jobs`)."""
    add_json(parser, name)
    parser.add_argument("--quick", action="store_true", help="few repetitions")
    parser.add_argument("--case", default="", metavar="SUBSTR", help="only cases with this in it")
    parser.add_argument("--list", action="store_true", help="name the cases and stop")
    parser.add_argument("--worker", nargs=2, type=Path, help=argparse.SUPPRESS)


def run_jobs(
    parser: argparse.ArgumentParser,
    options: argparse.Namespace,
    jobs: Sequence[Job],
    script: Path,
    packages: Sequence[str],
) -> None:
    """Run the jobs that have cases, or name the cases, and print and write their rows."""
    planned = [job for job in jobs if job.cases]
    if not planned:
        parser.error(f"no case has {options.case!r} in its name; --list names them")
    if options.list:
        print("\n".join(case.name for job in planned for case in job.cases))
        return
    rows = []
    for job in planned:
        print(f"{job.task} {job.params} ...", file=sys.stderr, flush=True)
        found = run_job(job, script)
        rows += [as_row(case, found.get(case.name)) for case in job.cases]
    conclude(rows, options.json, packages)


def add_json(parser: argparse.ArgumentParser, name: str) -> None:
    """The option that names the file of rows."""
    parser.add_argument(
        "--json",
        type=Path,
        nargs="?",
        const=Path(f"out-{name}.json"),
        metavar="FILE",
        help=f"write the rows here; to out-{name}.json if no file is named",
    )


def write_json(path: Path, rows: Sequence[Mapping[str, Any]], packages: Sequence[str]) -> None:
    """Write `{"machine", "versions", "rows"}`."""
    content = {"machine": machine_facts(), "versions": versions(packages), "rows": list(rows)}
    path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")


def conclude(rows: Sequence[Mapping[str, Any]], file: Path | None, packages: Sequence[str]) -> None:
    """Print the rows and which are red; write them where a file is named."""
    print("\n" + "\n".join(table_lines(rows)))
    red = red_rows(rows)
    print("\n" + "\n  ".join([f"{len(red)} red:", *red]) if red else "\nno bar missed")
    if file:
        write_json(file, rows, packages)


def table_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The rows as aligned text, one line each under a heading."""
    timed = [key for key in ("device_ms", "host_ms") if any(row.get(key) for row in rows)]
    times = [key.replace("_", " ") for key in timed]
    head = ("case", "ours", "peer", "unit", *times, "ratio", "bar", "of limit", "ok")
    cells = [(*head, "compared with")]
    for row in rows:
        verdict = {None: "-", False: "RED", True: "ok"}[row["ok"]]
        if row["ok"] and row["stretch"] is not None and row["ratio"] >= row["stretch"]:
            verdict = "stretch"
        peer = row["peer"] + (f"  [{row['note']}]" if row["note"] else "")
        ours, value = _figure(row["ours"]), _figure(row["peer_value"])
        keys = (*timed, "ratio", "bar", "limit_fraction")
        others = [_figure(row.get(key)) for key in keys]
        cells.append((row["case"], ours, value, row["unit"], *others, verdict, peer))
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    left = {0, 3, len(head) - 1, len(head)}
    return [
        "  ".join(
            text.ljust(width) if i in left else text.rjust(width)
            for i, (text, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    ]


def _figure(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"


def median(values: Sequence[float]) -> float:
    """Median of seconds or rates."""
    return statistics.median(values)


def measured_json(found: Mapping[str, Measured]) -> str:
    """What a worker writes for `run_job`."""
    return json.dumps({name: asdict(value) for name, value in found.items()})
