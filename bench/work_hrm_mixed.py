"""HRM's Sudoku recipe on puzzles of several lists, trained in parts; and a step of its size."""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from harness import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "hrm"))

from hrm.carry import Batch
from hrm.drawing import PALETTE, Line, chart, svg
from hrm.learner import Learner, LearnerConfig
from hrm.model_config import ModelConfig
from hrm.ranks import joined
from hrm.sampler import Share

__all__ = ["curve", "draw", "mixed_data", "part", "step_ms"]

_BLOCK = 20


def mixed_data(folder: Path, puzzles: Sequence[str], *, most: int, **sizes: int) -> None:
    """Data of an equal number of each list's puzzles, `most` in all; kept if it is there.

    sizes: of `train`, `test` and the `images` of a training puzzle.
    """
    if (folder / "statistics.json").exists():
        return
    import build_sudoku
    from hrm.sudoku_source import read_list

    rng = random.Random(0)
    lists = [read_list(path) for path in puzzles]
    mix = [one for many in lists for one in rng.sample(many, min(len(many), most // len(lists)))]
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "puzzles.txt"
    file.write_text("".join("".join(map(str, puzzle)) + "\n" for puzzle in mix))
    given = {"train": sizes["train"], "test": sizes["test"], "num-aug": sizes["images"]}
    given["workers"] = min(16, os.cpu_count() or 1)
    options = [text for name, value in given.items() for text in (f"--{name}", str(value))]
    build_sudoku.main(["--output-dir", str(folder), "--puzzles", str(file), *options])


def part(
    *, data: str, run: str, batch: int, epochs: int, seconds: float, device: str, arch: list[str]
) -> dict[str, float]:
    """The recipe for so long, from where the run in folder `run` stopped; what it has reached."""
    from hrm.running import train
    from hrm.settings import read_pretrain
    from work_hrm import RECIPE

    with joined(device, 1 if device == "cpu" else None) as mesh:
        config = read_pretrain(
            [
                *(*RECIPE, *arch, f"data_path={data}", f"global_batch_size={batch}"),
                *(f"epochs={epochs}", f"eval_interval={epochs // _BLOCK}", "log_every=50"),
                *(f"max_seconds={seconds}", f"checkpoint_path={run}", "keep_checkpoints=1"),
                *("tensorboard=false", f"device={device}"),
            ]
        )
        result = train(config, mesh=mesh)
        return {
            **result.figures["all"],
            "steps": float(result.steps),
            "total_steps": float(result.total_steps),
            "finished": float(result.finished),
            "steps_per_s": result.steps_per_s,
        }


def curve(run: Path) -> list[tuple[float, float]]:
    """Step and share of held-out puzzles solved, of each evaluation of a run."""
    file = run / "log.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    solved = "eval/all/exact_accuracy"
    return [(float(row["step"]), row[solved]) for row in rows if solved in row]


def draw(file: Path, curves: Mapping[str, Sequence[tuple[float, float]]]) -> None:
    """A picture of curves by name; those without a point are left out."""
    inks = zip(curves.items(), PALETTE, strict=False)
    lines = [Line(name, points, ink) for (name, points), ink in inks if points]
    title = "Share of held-out Sudoku puzzles solved, by step"
    picture = chart(50, 30, lines, width=560, height=260, across="steps")
    file.write_text(svg(640, 330, [picture], title=title))


def step_ms(
    *, a_rank: int, steps: int, warmup: int, device: str, small: bool, **options: Any
) -> dict[str, float]:
    """Milliseconds of a step of random tokens, the median of blocks that only end with a wait.

    small: a tiny model. options: of `LearnerConfig`, how steps are run.
    """
    with joined(device, 1 if device == "cpu" else None) as mesh:
        sizes: dict[str, Any] = {"vocab_size": 11, "seq_len": 81, "bootstrap": False}
        if small:
            sizes |= {"hidden_size": 32, "puzzle_dim": 32, "num_heads": 2, "H_layers": 1}
            sizes |= {"L_layers": 1, "forward_dtype": "float32"}
        config = LearnerConfig(total_steps=10_000, **options)
        share = Share(a_rank * mesh.world_size, mesh.rank, mesh.world_size)
        learner = Learner(ModelConfig(**sizes), config, share, mesh)
        rng = np.random.default_rng(mesh.rank)
        tokens = torch.from_numpy(rng.integers(1, 11, (2, 8, a_rank, 81), dtype=np.int32))
        ids_B = torch.zeros(a_rank, dtype=torch.int64)
        batches = [Batch(*pair, ids_B) for pair in zip(*tokens, strict=True)]
        if mesh.device.type == "cuda":
            batches = [batch.to(mesh.device) for batch in batches]
        took = []
        for turn in range(warmup + steps):
            if turn >= warmup and (turn - warmup) % _BLOCK == 0:
                took.append(_now_s(mesh.device))
            learner.learn(batches[turn % len(batches)])
        took.append(_now_s(mesh.device))
        blocks = np.diff(took) / min(_BLOCK, steps)
        return {"step_ms": 1e3 * median(blocks.tolist())}


def _now_s(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
