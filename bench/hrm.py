"""HRM: what small models learn on a CPU, and how fast large ones train on GPUs:
`python bench/hrm.py --json out-hrm.json`.

Prints ours, peer, ratio and bar of every case, and which are red. Exits 0 either way: a bar that
is missed is a result. Rows of GPUs are left without a value where there are none. See
bench/README.md for what each case measures.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from harness import Case, Job, Measured, as_row, conclude, measured_json, run_job
from rank_main import on_ranks

__all__ = ["Scale", "cases", "main"]

SCRIPT = Path(__file__).resolve()
PACKAGES = ("torch", "triton", "numpy", "shoal")
SEEDS = (0, 1, 2)
PUBLIC = "public logs: 4,000 to 5,600 a GPU"

Found = dict[str, Measured]


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Sizes: of a full run on GPUs, or of one that shows that all runs.

    Args:
        rules_s, sudoku_s: processor seconds of training.
        gpus: ranks of the rows that need GPUs; 0 leaves them out.
        a_rank: samples of a rank and step.
        steps, warmup: timed, and not.
        rows, dim, chunk: of the large table; rows that a rank fills in one step.
        arch: settings of the model whose speed is measured.
    """

    rules_s: float = 60.0
    sudoku_s: float = 120.0
    gpus: int = 0
    device: str = "cuda"
    a_rank: int = 768
    steps: int = 60
    warmup: int = 60
    rows: int = 10_000_000
    dim: int = 512
    chunk: int = 131_072
    arch: tuple[str, ...] = ("compile=true",)

    @classmethod
    def quick(cls, gpus: int, device: str) -> Scale:
        """Tiny sizes."""
        small = ("arch=small", "arch.halt_max_steps=16")
        return cls(
            rules_s=1.0,
            sudoku_s=1.0,
            gpus=gpus,
            device=device,
            a_rank=4,
            steps=3,
            warmup=2,
            rows=2000,
            dim=32,
            chunk=256,
            arch=small,
        )


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.split("`")[0].strip())
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: shows that all runs")
    parser.add_argument("--case", default="", metavar="SUBSTR", help="only cases with this in it")
    parser.add_argument("--list", action="store_true", help="name the cases and stop")
    parser.add_argument("--dir", type=Path, help="where the large table's checkpoint is written")
    parser.add_argument("--ranks", type=int, help="with --quick: that many CPU processes for GPUs")
    parser.add_argument("--worker", nargs=2, type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        _work(*options.worker)
        return
    gpus = _gpus()
    scale = Scale(gpus=gpus)
    if options.quick:
        scale = Scale.quick(options.ranks or gpus, "cpu" if options.ranks else "cuda")
    jobs = [
        (found, run)
        for found, run in _jobs(scale, options.dir)
        if any(options.case in case.name for case in found)
    ]
    if not jobs:
        parser.error(f"no case has {options.case!r} in its name; --list names them")
    if options.list:
        print("\n".join(case.name for found, _ in jobs for case in found))
        return
    rows: list[dict[str, Any]] = []
    for declared, run in jobs:
        print(f"{declared[0].name} ...", file=sys.stderr, flush=True)
        try:
            found = run()
        except (RuntimeError, subprocess.SubprocessError, OSError) as error:
            note = f"{type(error).__name__}: {error}"[:200]
            found = {case.name: Measured(note=note) for case in declared}
        rows += [as_row(case, found.get(case.name)) for case in declared]
    conclude(rows, options.json, PACKAGES)


def cases(scale: Scale) -> list[Case]:
    """All rows, in order."""
    return [case for declared, _ in _jobs(scale, None) for case in declared]


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _jobs(scale: Scale, folder: Path | None) -> list[tuple[tuple[Case, ...], Callable[[], Found]]]:
    learning = [
        *(_learning("rules", seed, scale.rules_s) for seed in SEEDS),
        *(_learning("sudoku", seed, scale.sudoku_s) for seed in SEEDS),
    ]
    jobs = [(job.cases, partial(run_job, job, SCRIPT)) for job in learning]
    return [*jobs, _speed(scale), _table(scale, folder)]


def _asked(name: str, unit: str, floor: float) -> Case:
    return Case(name=name, unit=unit, peer="the floor asked for", bar=1.0, peer_value=floor)


def _learning(task: str, seed: int, cpu_s: float) -> Job:
    if task == "rules":
        found = (
            _asked(f"per-id rules, seed {seed}, solved", "of held out", 0.9),
            _asked(f"per-id rules, seed {seed}, not solved with frozen rows", "of held out", 0.95),
        )
    else:
        found = (_asked(f"4 x 4 Sudoku, seed {seed}, solved", "of held out", 0.6),)
    params = {"seed": seed, "cpu_s": cpu_s, "names": [case.name for case in found]}
    return Job(task=task, params=params, cases=found, timeout_s=60 + 8 * cpu_s)


def _speed(scale: Scale) -> tuple[tuple[Case, ...], Callable[[], Found]]:
    gpus = max(scale.gpus, 1)
    one, all_ = "Sudoku recipe, one GPU", f"Sudoku recipe, {gpus} GPUs"
    forward, weak = f"{one}, with the bootstrap forward", f"Sudoku recipe, 1 to {gpus} GPUs"
    strong = f"{all_}, 768 samples in all"
    unit = "sample-steps/s a GPU"
    declared = (
        Case(name=one, unit=unit, peer=PUBLIC, bar=6000 / 5600, peer_value=5600.0),
        Case(name=forward, unit=unit, peer=PUBLIC, peer_value=5600.0),
        Case(name=all_, unit=unit, peer=PUBLIC, bar=6000 / 5600, peer_value=5600.0),
        Case(name=strong, unit=unit, peer=PUBLIC, peer_value=5600.0),
        Case(name=weak, unit=unit, peer="one GPU", bar=0.9),
    )

    def run() -> Found:
        if not scale.gpus:
            return _without(declared)
        import work_hrm

        with tempfile.TemporaryDirectory(prefix="bench-hrm-") as data:
            work_hrm.speed_data(data)

            def measure(ranks: int, a_rank: int, bootstrap: bool) -> tuple[float, str]:
                params = {
                    "folder": data,
                    "a_rank": a_rank,
                    "steps": scale.steps,
                    "warmup": scale.warmup,
                    "device": scale.device,
                    "arch": [*scale.arch, f"arch.bootstrap={bootstrap}"],
                }
                found = on_ranks(ranks, "speed", params, timeout_s=400, module="work_hrm")
                note = f"{found[0]['steps_per_s']:.2f} steps/s of {ranks} x {a_rank}"
                return found[0]["samples_per_s"] / ranks, note

            alone, alone_note = measure(1, scale.a_rank, False)
            booted, booted_note = measure(1, scale.a_rank, True)
            each, note = (alone, alone_note) if gpus == 1 else measure(gpus, scale.a_rank, False)
            cut, cut_note = measure(gpus, max(1, scale.a_rank // gpus), False)
        return {
            one: Measured(ours=alone, note=alone_note),
            forward: Measured(ours=booted, note=booted_note),
            all_: Measured(ours=each, note=note),
            strong: Measured(ours=cut, note=cut_note),
            weak: Measured(ours=each, peer_value=alone),
        }

    return declared, run


def _table(scale: Scale, folder: Path | None) -> tuple[tuple[Case, ...], Callable[[], Found]]:
    size = f"table of {scale.rows:,} x {scale.dim} over {max(scale.gpus, 1)} GPUs"
    filled, rows = f"{size}, filling", f"{size}, rows trained"
    step, saved = f"{size}, step", f"{size}, checkpoint"
    declared = (
        Case(name=filled, unit="k rows/s", peer="none"),
        Case(name=rows, unit="k rows/s", peer="none"),
        Case(name=step, unit="ms", peer="dense-only step", better="lower"),
        Case(name=saved, unit="s", peer="none", better="lower"),
    )

    def run() -> Found:
        if not scale.gpus:
            return _without(declared)
        with tempfile.TemporaryDirectory(prefix="bench-hrm-", dir=folder) as place:
            params = {
                "folder": place,
                "rows": scale.rows,
                "dim": scale.dim,
                "a_rank": scale.a_rank,
                "steps": scale.steps,
                "chunk": scale.chunk,
                "device": scale.device,
            }
            ranks = on_ranks(scale.gpus, "table_scale", params, timeout_s=400, module="work_hrm")
        worst = {key: max(one[key] for one in ranks) for key in ranks[0]}
        size_b = worst["saved_bytes"]
        return {
            filled: Measured(ours=ranks[0]["filled_rows_per_s"] / 1e3),
            rows: Measured(ours=ranks[0]["rows_per_s"] / 1e3),
            step: Measured(
                ours=worst["step_s"] * 1e3,
                peer_value=worst["dense_step_s"] * 1e3,
                note=f"peak {worst.get('peak_bytes', 0) / 1e9:.1f} GB a GPU",
            ),
            saved: Measured(
                ours=worst["save_s"],
                note=f"{size_b / 1e9:.2f} GB, {size_b / worst['save_s'] / 1e9:.2f} GB/s",
            ),
        }

    return declared, run


def _without(declared: tuple[Case, ...]) -> Found:
    return {case.name: Measured(note="needs GPUs") for case in declared}


def _work(source: Path, target: Path) -> None:
    """The learning jobs, in a process of their own."""
    import work_hrm

    job = json.loads(source.read_text())
    params = job["params"]
    names, seed, cpu_s = params["names"], params["seed"], params["cpu_s"]
    with tempfile.TemporaryDirectory(prefix="bench-hrm-") as folder:
        if job["task"] == "sudoku":
            runs = [work_hrm.sudoku(folder, seed=seed, cpu_s=cpu_s)]
            figures = [runs[0]["exact_accuracy"]]
        else:
            runs = [
                work_hrm.rule_task(folder, seed=seed, cpu_s=cpu_s, frozen=frozen)
                for frozen in (False, True)
            ]
            figures = [runs[0]["exact_accuracy"], 1 - runs[1]["exact_accuracy"]]
    found = {
        name: Measured(
            ours=figure,
            note=f"{cpu_s:g} CPU s, {one['steps']:.0f} steps, cells {one['accuracy']:.3f}",
        )
        for name, figure, one in zip(names, figures, runs, strict=True)
    }
    target.write_text(measured_json(found))


if __name__ == "__main__":
    main()
