"""What the HRM bench runs: the demo, a small task by processor seconds, and rates on GPUs."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "hrm"))

import build_sudoku
from demo import demonstrate
from hrm.dataset import read_split, write_split
from hrm.ranks import joined
from hrm.rule_task import RuleTask
from hrm.running import Run, train
from hrm.sampler import Share, TestBatches
from hrm.set_builder import SetBuilder
from hrm.settings import read_pretrain

__all__ = ["recipe", "recipe_data", "rule_task", "speed", "speed_data", "sudoku"]

RECIPE = ("lr=1e-4", "puzzle_emb_lr=1e-4", "weight_decay=1", "puzzle_emb_weight_decay=1")
SMALL = ("arch=small", "lr=1e-3", "lr_warmup_steps=100", "device=cpu", "tensorboard=false")


def rule_task(folder: str, *, seed: int, epochs: int) -> list[dict[str, float]]:
    """What the demo does, with another seed: held-out figures with rows that learn, and frozen."""
    length = (f"epochs={epochs}", f"eval_interval={max(1, epochs // 12)}")
    task = RuleTask(colours=4, seed=seed)
    courses = demonstrate(Path(folder), task=task, settings=length, seed=seed)
    return [
        {
            "exact_accuracy": one.exact,
            "accuracy": one.cells,
            "steps": float(one.steps),
            "cpu_s": one.cpu_s,
        }
        for one in courses
    ]


def sudoku(folder: str, *, seed: int, cpu_s: float) -> dict[str, float]:
    """The same of 4 x 4 Sudoku with 8 clues: 700 puzzles with 50 images each, 300 others."""
    sizes = ["--box", "2", "--clues", "8", "--train", "700", "--test", "300", "--num-aug", "50"]
    build_sudoku.main(["--output-dir", folder, "--seed", str(seed), *sizes])
    return _small_run(folder, ("global_batch_size=32",), seed, cpu_s)


def _small_run(folder: str, settings: tuple[str, ...], seed: int, cpu_s: float) -> dict[str, float]:
    data = (f"data_path={folder}", f"log_path={folder}/log", "save_checkpoints=false")
    length = ("epochs=1000000", "eval_interval=1000")
    config = read_pretrain([*SMALL, *settings, *data, *length, f"seed={seed}"])
    with joined("cpu", 1) as mesh:
        run = Run(config, mesh)
        began_s = time.process_time()
        while time.process_time() - began_s < cpu_s:
            batch = run.sampler.draw()
            if batch is None:
                run.sampler.next_iteration()
                continue
            run.learner.learn(batch)
        share = Share(config.global_batch_size)
        found = run.learner.evaluate(TestBatches(read_split(folder, "test"), share))["all"]
        return {**found, "steps": float(run.learner.step), "cpu_s": cpu_s}


def speed_data(folder: str, *, groups: int = 1000, images: int = 100) -> None:
    """Data of the Sudoku recipe's form with random tokens: steps take what real ones take."""
    rng = np.random.default_rng(0)
    for split, each in (("train", images), ("test", 1)):
        built = SetBuilder(81)
        for _ in range(groups if split == "train" else 8):
            inputs, labels = rng.integers(1, 11, (2, each, 81), dtype=np.uint8)
            built.add_puzzles([0] * each, inputs, labels)
            built.end_group()
        write_split(folder, split, {"all": built.build()}, vocab_size=11, seq_len=81)


def speed(
    *, folder: str, a_rank: int, steps: int, warmup: int, device: str, arch: list[str]
) -> dict[str, float]:
    """Rates of pretrain.py's own loop with the Sudoku recipe, on this launcher's ranks."""
    with joined(device, 1 if device == "cpu" else None) as mesh:
        size = a_rank * mesh.world_size
        epochs = -(-(warmup + steps) * size // 1000) + 1
        config = read_pretrain(
            [
                *(*RECIPE, *arch, f"data_path={folder}", f"global_batch_size={size}"),
                *(f"epochs={epochs}", "eval_interval=null", f"max_steps={warmup + steps}"),
                *(f"log_every={warmup}", "save_checkpoints=false", f"log_path={folder}/log"),
                *("tensorboard=false", f"device={device}"),
            ]
        )
        run = Run(config, mesh)
        run.iterate()  # no evaluation, which would be compiled, too
        run.log.close()
        rate = run.steps_per_s
        return {"samples_per_s": rate * size, "steps_per_s": rate}


def recipe_data(folder: str, puzzles: Sequence[str], *, train: int, test: int, images: int) -> None:
    """Sudoku of lists, seed 0; solutions of the test are of classes that training has not."""
    sizes = ("--train", str(train), "--test", str(test), "--num-aug", str(images))
    workers = ("--workers", str(min(16, os.cpu_count() or 1)))
    build_sudoku.main(["--output-dir", folder, "--puzzles", *puzzles, *sizes, *workers])


def recipe(
    *, folder: str, batch: int, seconds: float, device: str, arch: list[str]
) -> dict[str, float]:
    """The real recipe for so long, compiling included; held-out figures and rates in the end."""
    with joined(device, 1 if device == "cpu" else None) as mesh:
        config = read_pretrain(
            [
                *(*RECIPE, *arch, f"data_path={folder}", f"global_batch_size={batch}"),
                *("epochs=20000", "eval_interval=4000", f"max_seconds={seconds}", "log_every=50"),
                *("save_checkpoints=false", f"log_path={folder}/log", "tensorboard=false"),
                f"device={device}",
            ]
        )
        result = train(config, mesh=mesh)
        rates = {"steps_per_s": result.steps_per_s, "samples_per_s": result.samples_per_s}
        steps = {"steps": float(result.steps), "total_steps": float(result.total_steps)}
        return {**result.figures["all"], **rates, **steps}
