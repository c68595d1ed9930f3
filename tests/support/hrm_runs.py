"""Tiny runs of examples/hrm, and all that is left of one, read back from its checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import build_sudoku
from hrm.puzzle_table import TABLE
from hrm.ranks import joined
from hrm.running import Run, train
from hrm.settings import read_pretrain

__all__ = ["STEPS", "TEST", "TINY", "build", "check_equal", "restored", "trained"]

TRAIN, TEST, BATCH = 40, 37, 16
STEPS = 20
"""Of a whole run: 8 epochs of 40 puzzles; an evaluation after 10, in the middle of which is 7."""

TINY = [
    "arch.hidden_size=16",
    "arch.num_heads=2",
    "arch.expansion=1",
    "arch.gated_multiple=16",
    "arch.H_layers=1",
    "arch.L_layers=1",
    "arch.halt_max_steps=3",
    "arch.halt_exploration_prob=0.5",
    "arch.forward_dtype=float64",
    "arch.ema_decay=0.9",
    f"global_batch_size={BATCH}",
    "epochs=8",
    "eval_interval=4",
    "lr=1e-2",
    "puzzle_emb_lr=1e-2",
    "lr_warmup_steps=3",
    "log_every=5",
    "tensorboard=false",
    "device=cpu",
    "threads=1",
]


def build(root: Path) -> str:
    """4 x 4 Sudoku of 8 clues."""
    sizes = ["--train", str(TRAIN), "--test", str(TEST), "--num-aug", "2"]
    build_sudoku.main(["--output-dir", str(root), "--box", "2", "--clues", "8", *sizes])
    return str(root)


def trained(*overrides: str) -> tuple[int, bool, dict[str, float]]:
    """Steps, whether it came to its end, and the last figures, of a tiny run."""
    result = train(read_pretrain([*TINY, *overrides]))
    return result.steps, result.finished, dict(result.figures["all"])


def restored(*overrides: str) -> dict[str, Any]:
    """Everything that a run resumes from, on one rank for any number of saving ranks."""
    with joined("cpu", 1) as mesh:
        run = Run(read_pretrain([*TINY, *overrides, "resume=must"]), mesh)
        run.log.close()
        assert run.learner.table is not None
        rows = run.learner.table.rows.table(TABLE).find(torch.arange(3))
        state = run.learner.state_dict()
        return {"learner": state, "sampler": run.sampler.state_dict(), "rows": list(rows)}


def check_equal(got: Any, want: Any, *, exactly: bool, where: str = "") -> None:
    """Nested states are the same: bit for bit, or floats nearly."""
    if isinstance(want, dict):
        assert got.keys() == want.keys(), where
        for key, value in want.items():
            check_equal(got[key], value, exactly=exactly, where=f"{where}/{key}")
    elif isinstance(want, Sequence) and not isinstance(want, str):
        assert len(got) == len(want), where
        for number, value in enumerate(want):
            check_equal(got[number], value, exactly=exactly, where=f"{where}/{number}")
    elif not isinstance(want, torch.Tensor):
        assert got == want, where
    elif exactly or not want.is_floating_point():
        assert torch.equal(got, want), where
    else:
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3, msg=where)
