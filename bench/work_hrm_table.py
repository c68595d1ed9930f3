"""What a rank does for the HRM bench's large table; needs torch, numpy, pyarrow and Shoal only."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from harness import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "hrm"))

from hrm.carry import Batch
from hrm.learner import Learner, LearnerConfig
from hrm.model_config import ModelConfig
from hrm.puzzle_table import PuzzleTable
from hrm.ranks import joined
from hrm.sampler import Share
from shoal import SparseOptimizer, comm
from shoal.checkpoint import Contents, save
from shoal.table.cuda.mapped import mapped_bytes

__all__ = ["Size", "table_scale"]


@dataclass(frozen=True, kw_only=True)
class Size:
    """See `Scale` in hrm.py; `compiled`: whether the model is."""

    rows: int
    dim: int
    a_rank: int
    steps: int
    chunk: int
    compiled: bool


def table_scale(
    *, folder: str, notes: str, saves: bool, device: str, **size: Any
) -> dict[str, float]:
    """A sharded table of many rows under a model of their width: filling, steps, checkpoint.

    Args:
        folder: of the checkpoint.
        notes: a folder; measurements are written there at once, as <rank>.json, in case a later
            part fails or is interrupted.
        saves: whether to save.
        size: of a `Size`.
    """
    asked = Size(**size)
    with joined(device, 1 if device == "cpu" else None) as mesh:
        said = _Said(Path(notes) / f"{mesh.rank}.json", mesh.rank == 0)
        share = Share(asked.a_rank * mesh.world_size, mesh.rank, mesh.world_size)
        dense_s = _step_seconds(_learner(0, asked, share, mesh), asked.rows, asked.steps)
        said.add(dense_step_s=dense_s)
        learner = _learner(asked.dim, asked, share, mesh)
        assert learner.table is not None and learner.sparse is not None
        _step_seconds(learner, asked.rows, 2)  # the exchange is made by the first batch
        filled = _fill(learner.table, learner.sparse, asked.rows, asked.chunk, mesh)
        said.add(filled_rows_per_s=filled, peak_bytes=_peak(mesh.device))
        sparse_s = _step_seconds(learner, asked.rows, asked.steps)
        said.add(step_s=sparse_s, rows_per_s=share.global_batch / sparse_s)
        if saves:
            said.add(**_saved(folder, learner, mesh))
        said.add(peak_bytes=_peak(mesh.device))
        return said.found


class _Said:
    """Report figures at once: in a file of this rank, and on rank 0's screen."""

    def __init__(self, path: Path, leads: bool) -> None:
        self.found: dict[str, float] = {}
        self._path, self._leads = path, leads

    def add(self, **figures: float) -> None:
        self.found |= figures
        self._path.write_text(json.dumps(self.found))
        if self._leads:
            text = ", ".join(f"{name} {value:.6g}" for name, value in figures.items())
            print(f"  table: {text}", file=sys.stderr, flush=True)


def _peak(device: torch.device) -> float:
    if device.type != "cuda":
        return 0.0
    return float(torch.cuda.max_memory_allocated(device) + mapped_bytes(device))


def _saved(folder: str, learner: Learner, mesh: comm.Mesh) -> dict[str, float]:
    """Save all; seconds, and bytes of all ranks."""
    assert learner.table is not None
    contents = Contents(
        tables={"hrm": learner.table.rows.hosted},
        modules={"model": learner.model},
        optimizers={"model": learner.dense},
    )
    ranks = mesh.collectives("checkpoints", path="torch", device=torch.device("cpu"))
    _meet(mesh)
    began_s = time.perf_counter()
    at = learner.step
    manifest = save(folder, contents, step=at, position=at, collectives=ranks)
    spent_s = time.perf_counter() - began_s
    return {"save_s": spent_s, "saved_bytes": float(sum(one.bytes for one in manifest.files))}


def _learner(puzzle_dim: int, asked: Size, share: Share, mesh: comm.Mesh) -> Learner:
    """HRM of the rows' width on 81 tokens; without a table its prefix is zeros."""
    cuda = mesh.device.type == "cuda"
    model = ModelConfig(
        vocab_size=11,
        seq_len=81,
        hidden_size=asked.dim,
        puzzle_dim=puzzle_dim,
        puzzle_tokens=1,
        bootstrap=False,
        num_heads=8 if cuda else 2,
        H_layers=4 if cuda else 1,
        L_layers=4 if cuda else 1,
        forward_dtype="bfloat16" if cuda else "float32",
    )
    config = LearnerConfig(
        total_steps=10_000, placement="row_wise", lr_warmup_steps=10, compiled=asked.compiled
    )
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
    mesh.control.barrier(what="turn of a bench")
