"""Times operations and traces them: one operation's inputs are alive at a time."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from harness import Measured, Runner, median
from ops_devices import Device
from ops_plan import Op, ceiling_name, copy_name, time_name
from ops_work import Work

__all__ = ["measure", "trace"]

TRACED_RUNS = 3


def measure(
    ops: Sequence[Op], device: Device, threads: Sequence[int | None]
) -> dict[str, Measured]:
    """Measured rows by name. An operation that fails leaves a note in its rows, and the next runs.

    threads: what `torch.set_num_threads` is given; None leaves it alone.
    """
    found: dict[str, Measured] = {}
    for op in ops:
        start = time.monotonic()
        try:
            device.tidy()
            found.update(_measure(op, device, threads))
        except Exception as error:  # noqa: BLE001 - the other cases' rows must not go missing
            note = _reason(error)
            for count in threads:
                for name in (time_name, copy_name, ceiling_name):
                    found.setdefault(name(op, count), Measured(note=note))
            print(f"  {op.name}: {note}", file=sys.stderr, flush=True)
        print(f"  {op.name} {time.monotonic() - start:.1f} s", file=sys.stderr, flush=True)
    return found


def trace(ops: Sequence[Op], device: Device, path: Path) -> None:
    """Write a chrome trace of a few runs of each operation and its baselines; print failures."""
    activities = [ProfilerActivity.CPU]
    if device.name == "cuda":
        activities.append(ProfilerActivity.CUDA)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with profile(activities=activities) as profiler:
            for op in ops:
                _run_traced(op, device)
        profiler.export_chrome_trace(str(path))
    except (RuntimeError, OSError) as error:  # earlier measurements must not be lost
        print(f"no trace {path}: {_reason(error)}", file=sys.stderr, flush=True)


def _run_traced(op: Op, device: Device) -> None:
    device.tidy()
    with record_function(f"{op.name}: inputs"):
        work = build(op, device)
    for name, run in _contenders(work).items():
        with record_function(f"{op.name}: {name}"):
            for _ in range(TRACED_RUNS):
                run()
            device.wait()


def build(op: Op, device: Device) -> Work:
    """Inputs and contenders of an operation."""
    module, function = op.build.split(":")
    torch.manual_seed(0)
    work: Work = getattr(importlib.import_module(module), function)(device=device.name, **op.params)
    return work


def _measure(op: Op, device: Device, threads: Sequence[int | None]) -> dict[str, Measured]:
    work = build(op, device)
    runs = {**_contenders(work), "copy": device.copy}
    runners = [Runner(name=name, run=_ignoring_batch(run)) for name, run in runs.items()]
    found: dict[str, Measured] = {}
    for count in threads:
        if count is not None:
            torch.set_num_threads(count)
        work.verify()
        seconds = {name: median(values) for name, values in device.seconds(runners).items()}
        found.update(_rows(op, count, seconds, work, device.copied_bytes))
    work.verify()
    return found


def _contenders(work: Work) -> dict[str, Callable[[], object]]:
    return {"ours": work.ours, **work.peers}


def _ignoring_batch(run: Callable[[], object]) -> Callable[[int], object]:
    return lambda _: run()


def _rows(
    op: Op, threads: int | None, seconds: Mapping[str, float], work: Work, copied_bytes: int
) -> dict[str, Measured]:
    ours = seconds["ours"]
    best = min(work.peers, key=lambda name: seconds[name])
    copy_rate, our_rate = copied_bytes / seconds["copy"], work.moved / ours
    fraction = our_rate / copy_rate
    others = (f"{name} {seconds[name] * 1e3:.3g} ms" for name in work.peers if name != best)
    note = f"fastest: {best}; {'; '.join(others)}" if len(work.peers) > 1 else ""
    return {
        time_name(op, threads): Measured(
            ours=ours * 1e3, peer_value=seconds[best] * 1e3, limit_fraction=fraction, note=note
        ),
        copy_name(op, threads): Measured(
            ours=our_rate / 1e9, peer_value=copy_rate / 1e9, limit_fraction=fraction
        ),
        ceiling_name(op, threads): Measured(ours=ours * 1e3, limit_fraction=fraction),
    }


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200] if lines else ''}"
