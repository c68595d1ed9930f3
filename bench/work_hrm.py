"""What the HRM bench runs: small tasks on a CPU by processor seconds, and GPU ranks' shares."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from harness import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "hrm"))

import build_sudoku
from hrm.carry import Batch
from hrm.dataset import read_split, write_split
from hrm.learner import Learner, LearnerConfig
from hrm.model_config import ModelConfig
from hrm.puzzle_table import PuzzleTable
from hrm.ranks import joined
from hrm.rule_task import RuleTask, build_rule_task
from hrm.running import Run, train
from hrm.sampler import Share, TestBatches
from hrm.set_builder import SetBuilder
from hrm.settings import read_pretrain
from shoal import SparseOptimizer, comm
from shoal.checkpoint import Contents, save

__all__ = ["rule_task", "speed", "speed_data", "sudoku", "table_scale"]

SMALL = ("arch=small", "lr=1e-3", "lr_warmup_steps=100", "device=cpu", "tensorboard=false")


def rule_task(folder: str, *, seed: int, cpu_s: float, frozen: bool) -> dict[str, float]:
    """Held-out figures of the per-id rule task after so many processor seconds of training."""
    build_rule_task(folder, RuleTask(colours=4, seed=seed))
    settings = ("global_batch_size=64", "puzzle_emb_lr=1e-2", f"puzzle_emb_frozen={frozen}")
    return _small_run(folder, settings, seed, cpu_s)


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
        return {**found, "steps": float(run.learner.step)}


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
        recipe = ("lr=1e-4", "puzzle_emb_lr=1e-4", "weight_decay=1", "puzzle_emb_weight_decay=1")
        size = a_rank * mesh.world_size
        epochs = -(-(warmup + steps) * size // 1000) + 1
        config = read_pretrain(
            [
                *(*recipe, *arch, f"data_path={folder}", f"global_batch_size={size}"),
                *(f"epochs={epochs}", "eval_interval=null", f"max_steps={warmup + steps}"),
                *(f"log_every={warmup}", "save_checkpoints=false", f"log_path={folder}/log"),
                *("tensorboard=false", f"device={device}", "eval_examples=8"),
            ]
        )
        result = train(config, mesh=mesh)
        return {"samples_per_s": result.samples_per_s, "steps_per_s": result.steps_per_s}


def table_scale(
    *, folder: str, rows: int, dim: int, a_rank: int, steps: int, chunk: int, device: str
) -> dict[str, float]:
    """A sharded table of many rows under a model of their width: filling, steps, checkpoint."""
    with joined(device, 1 if device == "cpu" else None) as mesh:
        found = {"filled_rows_per_s": 0.0}
        share = Share(a_rank * mesh.world_size, mesh.rank, mesh.world_size)
        dense_s = _step_seconds(_learner(0, dim, rows, share, mesh), rows, steps)
        learner = _learner(dim, dim, rows, share, mesh)
        assert learner.table is not None and learner.sparse is not None
        _step_seconds(learner, rows, 2)  # the exchange is made by the first batch
        found["filled_rows_per_s"] = _fill(learner.table, learner.sparse, rows, chunk, mesh)
        sparse_s = _step_seconds(learner, rows, steps)
        found |= {"dense_step_s": dense_s, "step_s": sparse_s}
        found["rows_per_s"] = share.global_batch / sparse_s
        _meet(mesh)
        began_s = time.perf_counter()
        contents = Contents(
            tables={"hrm": learner.table.rows.hosted},
            modules={"model": learner.model},
            optimizers={"model": learner.dense},
        )
        ranks = mesh.collectives("checkpoints", path="torch", device=torch.device("cpu"))
        at = learner.step
        manifest = save(folder, contents, step=at, position=at, collectives=ranks)
        found["save_s"] = time.perf_counter() - began_s
        found["saved_bytes"] = float(sum(one.bytes for one in manifest.files))
        if mesh.device.type == "cuda":
            found["peak_bytes"] = float(torch.cuda.max_memory_allocated())
        return found


def _learner(puzzle_dim: int, width: int, rows: int, share: Share, mesh: comm.Mesh) -> Learner:
    """HRM of the rows' width on the 4 x 4 rule task; without a table its prefix is zeros."""
    cuda = mesh.device.type == "cuda"
    model = ModelConfig(
        vocab_size=11,
        seq_len=81,
        hidden_size=width,
        puzzle_dim=puzzle_dim,
        puzzle_tokens=1,
        bootstrap=False,
        num_heads=8 if cuda else 2,
        H_layers=4 if cuda else 1,
        L_layers=4 if cuda else 1,
        forward_dtype="bfloat16" if cuda else "float32",
    )
    config = LearnerConfig(total_steps=10_000, placement="row_wise", lr_warmup_steps=10)
    return Learner(model, config, share, mesh)


def _fill(
    table: PuzzleTable, sparse: SparseOptimizer, rows: int, chunk: int, mesh: comm.Mesh
) -> float:
    """Give every id a row, each rank its part of them, by steps; rows a second."""
    share = -(-rows // mesh.world_size)
    _meet(mesh)
    began_s = time.perf_counter()
    for start in range(0, share, chunk):
        first = 1 + mesh.rank * share + start
        ids = torch.arange(first, first + min(chunk, share - start), device=mesh.device)
        table(ids.clamp(max=rows)).sum().backward()
        sparse.step()
    _meet(mesh)
    return rows / (time.perf_counter() - began_s)


def _step_seconds(learner: Learner, rows: int, steps: int) -> float:
    """Median seconds of a step with ids drawn from all rows, after a few that do not count."""
    share, mesh = learner.share, learner.mesh
    rng = np.random.default_rng([7, mesh.rank])
    batches = [_random_batch(rng, rows, share.count) for _ in range(8)]
    took = []
    for turn in range(min(5, steps) + steps):
        _meet(mesh)
        began_s = time.perf_counter()
        learner.learn(batches[turn % len(batches)])
        _wait(mesh.device)
        took.append(time.perf_counter() - began_s)
    return median(took[-steps:])


def _random_batch(rng: np.random.Generator, rows: int, count: int) -> Batch:
    def tokens() -> Tensor:
        return torch.from_numpy(rng.integers(1, 11, (count, 81), dtype=np.int32))

    ids = torch.from_numpy(rng.integers(1, rows + 1, count))
    return Batch(tokens(), tokens(), ids)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _meet(mesh: comm.Mesh) -> None:
    _wait(mesh.device)
    mesh.votes.barrier(what="turn of a bench")
