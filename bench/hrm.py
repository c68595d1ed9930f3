"""HRM: what small models learn on a CPU, and how fast large ones train on GPUs:
`python bench/hrm.py --json out-hrm.json`.

Prints our value, the baseline (peer), the ratio and the target (bar) of every case, and marks rows
that miss their target red. It exits 0 even then. Without GPUs, their rows have no value.
bench/README.md explains the cases.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from harness import (
    Case,
    Job,
    Measured,
    add_json,
    as_row,
    conclude,
    measured_json,
    run_job,
    table_lines,
    write_json,
)
from rank_main import on_ranks

__all__ = ["Scale", "cases", "main"]

SCRIPT = Path(__file__).resolve()
PACKAGES = ("torch", "triton", "numpy", "shoal")
SEEDS = (0, 1, 2)
MIXED = {
    "HRM without the bootstrap forward": ("arch.bootstrap=false",),
    "HRM": ("arch.bootstrap=true",),
    "TRM": ("arch=trm",),
}
PUBLIC = "public logs: 4,000 to 5,600 a GPU"

Found = dict[str, Measured]
Declared = tuple[tuple[Case, ...], Callable[[], Found]]


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Sizes: of a full run on GPUs, or of one that shows that all runs.

    Args:
        rules_epochs: of the demo's runs.
        sudoku_s: processor seconds of training.
        gpus: ranks of the rows that need GPUs; 0 leaves them out.
        a_rank: samples of a rank and step.
        steps, warmup: timed, and not.
        rows, dim, chunk: of the large table; rows that a rank fills in one step.
        compiled: the model of the large table is.
        arch: settings of the model whose speed is measured.
        puzzles: lists for the real recipe; none leaves it out.
        recipe_s: seconds of it, compiling included.
        train, test, images, batch: of the real recipe.
        mixed, epochs: puzzles of the mix of lists, and epochs of a whole run of it.
        least_s: a part of such a run is not begun with less time.
    """

    rules_epochs: int = 120
    sudoku_s: float = 120.0
    gpus: int = 0
    device: str = "cuda"
    a_rank: int = 768
    steps: int = 200
    warmup: int = 60
    rows: int = 10_000_000
    dim: int = 512
    chunk: int = 131_072
    compiled: bool = True
    arch: tuple[str, ...] = ("compile=true", "cuda_graphs=true")
    puzzles: tuple[str, ...] = ()
    recipe_s: float = 480.0
    train: int = 1000
    test: int = 2048
    images: int = 1000
    batch: int = 768
    mixed: int = 8000
    epochs: int = 20_000
    least_s: float = 90.0

    @classmethod
    def quick(cls, gpus: int, device: str, puzzles: tuple[str, ...]) -> Scale:
        """Tiny sizes."""
        small = ("arch=small", "arch.halt_max_steps=16")
        return cls(
            rules_epochs=1,
            sudoku_s=1.0,
            gpus=gpus,
            device=device,
            a_rank=4,
            steps=3,
            warmup=2,
            rows=2000,
            dim=32,
            chunk=256,
            compiled=False,
            arch=small,
            puzzles=puzzles,
            recipe_s=6.0,
            train=8,
            test=4,
            images=3,
            batch=8,
            mixed=60,
            epochs=40,
            least_s=1.0,
        )


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.split("`")[0].strip())
    add_json(parser, "hrm")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: shows that all runs")
    parser.add_argument("--case", default="", metavar="SUBSTR", help="only cases with this in it")
    parser.add_argument("--list", action="store_true", help="name the cases and stop")
    parser.add_argument("--dir", type=Path, help="where the large table's checkpoint is written")
    parser.add_argument("--ranks", type=int, help="with --quick: that many CPU processes for GPUs")
    parser.add_argument(
        "--puzzles", nargs="+", default=[], metavar="FILE", help="lists for the real recipe"
    )
    parser.add_argument("--recipe-s", type=float, help="seconds of a real recipe")
    parser.add_argument(
        "--state", type=Path, help="folder of the runs of mixed puzzles, which later calls continue"
    )
    parser.add_argument("--worker", nargs=2, type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        _work(*options.worker)
        return
    gpus, puzzles = _gpus(), tuple(options.puzzles)
    scale = Scale(gpus=gpus, puzzles=puzzles)
    if options.quick:
        device = "cpu" if options.ranks else "cuda"
        scale = Scale.quick(options.ranks or gpus, device, puzzles)
    if options.recipe_s is not None:
        scale = replace(scale, recipe_s=options.recipe_s)
    jobs = [
        (found, run)
        for found, run in _jobs(scale, options.dir, options.state)
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
            found = _failed(declared, error)
        rows += [as_row(case, found.get(case.name)) for case in declared]
        print("\n".join(table_lines(rows[-len(declared) :])), file=sys.stderr, flush=True)
        if options.json:  # an interrupted run keeps its rows
            write_json(options.json, rows, PACKAGES)
    conclude(rows, options.json, PACKAGES)


def cases(scale: Scale) -> list[Case]:
    """All rows, in order."""
    return [case for declared, _ in _jobs(scale) for case in declared]


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _jobs(scale: Scale, folder: Path | None = None, state: Path | None = None) -> list[Declared]:
    learning = [
        *(_learning("rules", seed, scale.rules_epochs) for seed in SEEDS),
        *(_learning("sudoku", seed, scale.sudoku_s) for seed in SEEDS),
    ]
    jobs: list[Declared] = [(job.cases, partial(run_job, job, SCRIPT)) for job in learning]
    jobs += [*_speed(scale), _step(scale), _table(scale, folder), _recipe(scale)]
    return [*jobs, *_mixed(scale, state)]


def _asked(name: str, unit: str, floor: float) -> Case:
    return Case(name=name, unit=unit, peer="the requested floor", bar=1.0, peer_value=floor)


def _learning(task: str, seed: int, length: float) -> Job:
    """`length`: epochs of the rules, processor seconds of Sudoku."""
    if task == "rules":
        found = (
            _asked(f"per-id rules, seed {seed}, solved", "of held out", 0.9),
            _asked(f"per-id rules, seed {seed}, not solved with frozen rows", "of held out", 0.95),
        )
    else:
        found = (_asked(f"4 x 4 Sudoku, seed {seed}, solved", "of held out", 0.6),)
    params = {"seed": seed, "length": length, "names": [case.name for case in found]}
    return Job(task=task, params=params, cases=found, timeout_s=300 + 8 * length)


def _speed(scale: Scale) -> list[Declared]:
    """Rates on one GPU and on all; each is measured once, and alone, so that none loses others."""
    gpus = max(scale.gpus, 1)
    one, all_ = "Sudoku recipe, one GPU", f"Sudoku recipe, {gpus} GPUs"
    unit = "sample-steps/s a GPU"
    bar = {"unit": unit, "peer": PUBLIC, "bar": 6000 / 5600, "peer_value": 5600.0}
    alone = Case(name=one, **bar)
    forward = Case(
        name=f"{one}, with the bootstrap forward", unit=unit, peer=PUBLIC, peer_value=5600.0
    )
    each = Case(name=all_, **bar)
    weak = Case(name=f"Sudoku recipe, 1 to {gpus} GPUs", unit=unit, peer="one GPU", bar=0.9)
    strong = Case(name=f"{all_}, 768 samples in all", unit=unit, peer=PUBLIC, peer_value=5600.0)

    @cache
    def measure(ranks: int, a_rank: int, bootstrap: bool = False) -> Measured:
        import work_hrm

        with tempfile.TemporaryDirectory(prefix="bench-hrm-") as data:
            work_hrm.speed_data(data)
            params = {
                "folder": data,
                "a_rank": a_rank,
                "steps": scale.steps,
                "warmup": scale.warmup,
                "device": scale.device,
                "arch": [*scale.arch, f"arch.bootstrap={bootstrap}"],
            }
            found = on_ranks(ranks, "speed", params, timeout_s=300, module="work_hrm")
        note = f"{found[0]['steps_per_s']:.2f} steps/s of {ranks} x {a_rank}"
        return Measured(ours=found[0]["samples_per_s"] / ranks, note=note)

    def scaled() -> Found:
        found = measure(gpus, scale.a_rank)
        if gpus == 1:
            return {each.name: found, weak.name: Measured(note="needs several GPUs")}
        single = measure(1, scale.a_rank).ours
        note = f"{found.note}; in all {(found.ours or 0) * gpus:,.0f} sample-steps/s"
        return {
            each.name: Measured(ours=found.ours, note=note),
            weak.name: Measured(ours=found.ours, peer_value=single),
        }

    cut = max(1, scale.a_rank // gpus)
    jobs: list[Declared] = [
        ((alone,), lambda: {alone.name: measure(1, scale.a_rank)}),
        ((forward,), lambda: {forward.name: measure(1, scale.a_rank, True)}),
        ((each, weak), scaled),
        ((strong,), lambda: {strong.name: measure(gpus, cut)}),
    ]
    if scale.gpus:
        return jobs
    return [(declared, partial(_without, declared)) for declared, _ in jobs]


def _step(scale: Scale) -> Declared:
    gpus = max(scale.gpus, 1)
    a_rank = min(scale.a_rank, 192)
    case = Case(
        name=f"Sudoku recipe, {gpus} GPUs, {a_rank} samples a GPU, step",
        unit="ms",
        peer="the requested ceiling",
        better="lower",
        bar=1.0,
        stretch=25 / 18,
        peer_value=25.0,
    )

    def run() -> Found:
        if not scale.gpus:
            return _without((case,))
        cuda = scale.device == "cuda"
        params = {
            "a_rank": a_rank,
            "steps": scale.steps,
            "warmup": scale.warmup,
            "device": scale.device,
            "small": not scale.compiled,
            "compiled": scale.compiled,
            "graphed": scale.compiled and cuda,
        }
        found = on_ranks(gpus, "step_ms", params, timeout_s=300, module="work_hrm_mixed")
        return {case.name: Measured(ours=max(one["step_ms"] for one in found))}

    return (case,), run


def _mixed(scale: Scale, state: Path | None) -> list[Declared]:
    """One run a model; those that are not finished share the time of a call, in this order."""
    began_s: list[float] = []

    def declared(name: str) -> tuple[Case, ...]:
        peer: dict[str, Any] = {"peer": "none"}
        if name != "TRM":
            peer = {"peer": "HRM's paper, other puzzles", "peer_value": 0.55}
        return (Case(name=f"mixed puzzles, {name}, solved", unit="of held out", **peer),)

    def run(name: str) -> Found:
        (case,) = declared(name)
        if not scale.gpus or not scale.puzzles or state is None:
            return _without((case,), "needs GPUs, --puzzles and --state")
        began_s[:] = began_s or [time.monotonic()]
        reached = _continued(scale, state, name, began_s[0])
        return {case.name: reached}

    return [(declared(name), partial(run, name)) for name in MIXED]


def _continued(scale: Scale, state: Path, name: str, began_s: float) -> Measured:
    """What a run has reached, after another part of it if it is not finished and time is left."""
    import work_hrm_mixed as work

    data, place = state / "data", state / name.replace(" ", "-")
    sizes = {"train": scale.train, "test": scale.test, "images": scale.images}
    work.mixed_data(data, scale.puzzles, most=scale.mixed, **sizes)
    told = place / "reached.json"
    found = json.loads(told.read_text()) if told.exists() else dict[str, float]()
    left_s = began_s + scale.recipe_s - time.monotonic()
    own = [one for one in MIXED[name] if scale.compiled or not one.startswith("arch=")]
    if not found.get("finished") and left_s > scale.least_s:
        params = {
            "data": str(data),
            "run": str(place),
            "batch": scale.batch // scale.gpus * scale.gpus,
            "epochs": scale.epochs,
            "seconds": left_s,
            "device": scale.device,
            "arch": [*scale.arch, *own],
        }
        late_s = left_s + 200
        ranks = on_ranks(scale.gpus, "part", params, timeout_s=late_s, module="work_hrm_mixed")
        found = ranks[0]
        told.write_text(json.dumps(found))
    if not told.exists():
        return Measured(note="not begun: call again")
    curves = {one: work.curve(state / one.replace(" ", "-")) for one in MIXED}
    work.draw(state / "curve.svg", curves)
    ended = "" if found.get("finished") else "; not finished: call again"
    return Measured(
        ours=found["exact_accuracy"],
        note=f"{found['steps']:,.0f} of {found['total_steps']:,.0f} steps, "
        f"{found['steps_per_s']:.1f} steps/s, blanks {found['blank_accuracy']:.3f}, "
        f"{found['count']:,.0f} puzzles, seed 0{ended}",
    )


def _recipe(scale: Scale) -> Declared:
    gpus = max(scale.gpus, 1)
    name = f"{scale.train:,} listed puzzles x {scale.images:,}, {gpus} GPUs, {scale.recipe_s:.0f} s"
    solved = Case(name=f"{name}, solved", unit="of held out", peer="none")
    blanks = Case(name=f"{name}, blanks right", unit="of held out", peer="none")
    rate = Case(name=f"{name}, rate", unit="sample-steps/s a GPU", peer=PUBLIC, peer_value=5600.0)
    declared = (solved, blanks, rate)

    def run() -> Found:
        if not scale.gpus or not scale.puzzles:
            return _without(declared, "needs GPUs and --puzzles")
        import work_hrm

        with tempfile.TemporaryDirectory(prefix="bench-hrm-") as data:
            sizes = {"train": scale.train, "test": scale.test, "images": scale.images}
            work_hrm.recipe_data(data, scale.puzzles, **sizes)
            params = {
                "folder": data,
                "batch": scale.batch // gpus * gpus,
                "seconds": scale.recipe_s,
                "device": scale.device,
                "arch": [*scale.arch, "arch.bootstrap=False"],
            }
            timeout_s = scale.recipe_s + 200
            found = on_ranks(gpus, "recipe", params, timeout_s=timeout_s, module="work_hrm")[0]
        steps = f"{found['steps']:.0f} of {found['total_steps']:.0f} steps, seed 0"
        cells = f"cells {found['accuracy']:.3f}, {found['count']:.0f} puzzles"
        return {
            solved.name: Measured(ours=found["exact_accuracy"], note=f"{steps}, {cells}"),
            blanks.name: Measured(ours=found["blank_accuracy"]),
            rate.name: Measured(
                ours=found["samples_per_s"] / gpus, note=f"{found['steps_per_s']:.2f} steps/s"
            ),
        }

    return declared, run


def _table(scale: Scale, folder: Path | None) -> Declared:
    gpus = max(scale.gpus, 1)
    size = f"table of {scale.rows:,} x {scale.dim} over {gpus} GPUs"
    filled = Case(name=f"{size}, filling", unit="k rows/s", peer="none")
    rows = Case(name=f"{size}, rows trained", unit="k rows/s", peer="none")
    step = Case(name=f"{size}, step", unit="ms", peer="dense-only step", better="lower")
    saved = Case(name=f"{size}, checkpoint", unit="s", peer="none", better="lower")
    declared = (filled, rows, step, saved)

    def run() -> Found:
        if not scale.gpus:
            return _without(declared)
        bytes_ = scale.rows * scale.dim * 4
        with (
            tempfile.TemporaryDirectory(prefix="bench-hrm-", dir=folder) as place,
            tempfile.TemporaryDirectory(prefix="bench-hrm-") as notes,
        ):
            free = shutil.disk_usage(place).free
            params = {
                "folder": place,
                "notes": notes,
                "saves": free > 1.1 * bytes_,
                "rows": scale.rows,
                "dim": scale.dim,
                "a_rank": scale.a_rank,
                "steps": scale.steps,
                "chunk": scale.chunk,
                "compiled": scale.compiled,
                "device": scale.device,
            }
            late = f"{1.1 * bytes_ / 1e9:.0f} GB free are needed (--dir), {free / 1e9:.0f} are"
            try:
                on_ranks(gpus, "table_scale", params, timeout_s=540, module="work_hrm_table")
            except RuntimeError as error:
                late = str(error)
            ranks = [json.loads(file.read_text()) for file in sorted(Path(notes).glob("*.json"))]
        worst = {key: max(one.get(key, 0.0) for one in ranks) for one in ranks for key in one}
        return _table_rows(declared, worst, ranks[0] if ranks else {}, gpus, late)

    return declared, run


def _table_rows(
    declared: tuple[Case, ...],
    worst: dict[str, float],
    first: dict[str, float],
    gpus: int,
    late: str,
) -> Found:
    """Rows of the measurements, by the slowest rank and rank 0; `late`: why others are missing."""
    filled, rows, step, saved = (case.name for case in declared)
    found = {name: Measured(note=late) for name in (filled, rows, step, saved)}
    for name, key in ((filled, "filled_rows_per_s"), (rows, "rows_per_s")):
        if key in first:
            note = f"{first[key] / gpus / 1e3:,.1f} k a GPU"
            found[name] = Measured(ours=first[key] / 1e3, note=note)
    if "step_s" in worst:
        found[step] = Measured(
            ours=worst["step_s"] * 1e3,
            peer_value=worst["dense_step_s"] * 1e3,
            note=f"peak {worst['peak_bytes'] / 1e9:.1f} GB a GPU",
        )
    if "save_s" in worst:
        size, spent_s = worst["saved_bytes"] / 1e9, worst["save_s"]
        note = f"{size:.2f} GB, {size / spent_s:.2f} GB/s, {size / spent_s / gpus:.2f} a GPU"
        found[saved] = Measured(ours=spent_s, note=note)
    return found


def _without(declared: tuple[Case, ...], note: str = "needs GPUs") -> Found:
    return {case.name: Measured(note=note) for case in declared}


def _failed(declared: tuple[Case, ...], error: Exception) -> Found:
    return _without(declared, f"{type(error).__name__}: {error}"[:200])


def _work(source: Path, target: Path) -> None:
    """The learning jobs, in a separate process."""
    import work_hrm

    job = json.loads(source.read_text())
    params = job["params"]
    names, seed, length = params["names"], params["seed"], params["length"]
    with tempfile.TemporaryDirectory(prefix="bench-hrm-") as folder:
        if job["task"] == "sudoku":
            runs = [work_hrm.sudoku(folder, seed=seed, cpu_s=length)]
            figures = [runs[0]["exact_accuracy"]]
        else:
            runs = work_hrm.rule_task(folder, seed=seed, epochs=length)
            figures = [runs[0]["exact_accuracy"], 1 - runs[1]["exact_accuracy"]]
    found = {
        name: Measured(
            ours=figure,
            note=f"{one['cpu_s']:.0f} CPU s, {one['steps']:.0f} steps, cells {one['accuracy']:.3f}",
        )
        for name, figure, one in zip(names, figures, runs, strict=True)
    }
    target.write_text(measured_json(found))


if __name__ == "__main__":
    main()
