"""The demo: what a thousand ids mean is learned by their rows, and by nothing else.

Every id has a hidden permutation of colours; its grids are coloured by it. A small HRM trains on
eight grids of each id and is asked about two others, once with rows that learn and once with
rows that stay zero. `make demo-hrm` runs it; see README.md in this folder.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from hrm.dataset import PuzzleData, read_split
from hrm.drawing import INK, MUTED, PALETTE, Cell, Line, chart, grid, svg, text
from hrm.kept_outputs import KeptOutputs
from hrm.ranks import joined
from hrm.rule_task import RuleTask, build_rule_task
from hrm.running import train
from hrm.sampler import Share, TestBatches
from hrm.settings import read_pretrain
from shoal import comm

__all__ = ["RULES", "Course", "demonstrate", "main", "trained"]

TASK = RuleTask(colours=4)
RULES = (
    "arch=small",
    "global_batch_size=64",
    "lr=1e-3",
    "lr_warmup_steps=100",
    "lr_min_ratio=0.1",
    "puzzle_emb_lr=1e-2",
    "puzzle_emb_weight_decay=0.1",
)
"""Settings of pretrain.py for the per-id rule task."""
_SHOWN = 500
"""Held-out grids on the way; all of them in the end."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Course:
    """A training run.

    Args:
        points: (steps, exact) on the way, over a part of the held-out grids.
        exact, cells: parts of all held-out grids, and of their cells, that are right in the end.
        steps: of training.
        cpu_s: processor seconds of the process, evaluations on the way included.
        kept: inputs, labels, puzzle_identifiers and predictions of all held-out grids.
    """

    points: tuple[tuple[float, float], ...]
    exact: float
    cells: float
    steps: int
    cpu_s: float
    kept: dict[str, torch.Tensor]


def trained(folder: Path, mesh: comm.Mesh, settings: Sequence[str], name: str) -> Course:
    """Train by pretrain.py's own loop on the data in `folder`; logs go to `folder/name`."""
    own = (
        f"data_path={folder / 'data'}",
        f"log_path={folder / name}",
        f"run_name={name}",
        f"eval_examples={_SHOWN}",
        "save_checkpoints=false",
        "log_every=100",
        "device=cpu",
    )
    config = read_pretrain([*settings, *own])
    began_s = time.process_time()
    result = train(config, mesh=mesh)
    spent_s = time.process_time() - began_s
    share = Share(config.global_batch_size)
    kept = KeptOutputs(("inputs", "labels", "puzzle_identifiers", "predictions"), share)
    windows = TestBatches(read_split(config.data_path, "test"), share)
    figures = result.learner.evaluate(windows, kept)["all"]
    points = [(float(step), found["all"]["exact_accuracy"]) for step, found in result.evaluations]
    return Course(
        points=((0.0, 0.0), *points),
        exact=figures["exact_accuracy"],
        cells=figures["accuracy"],
        steps=result.steps,
        cpu_s=spent_s,
        kept=kept.tensors(),
    )


def demonstrate(
    folder: Path, *, task: RuleTask = TASK, settings: Sequence[str] = (), seed: int = 0
) -> tuple[Course, Course]:
    """The runs with learning and with frozen rows: same data, settings, steps and seed."""
    build_rule_task(str(folder / "data"), task)
    settings = (*RULES, f"seed={seed}", *settings)
    with joined("cpu", 1) as mesh:
        print("1. Rows learn.")
        learned = trained(folder, mesh, settings, "learned")
        print("2. The same with rows that stay zero.")
        frozen = trained(folder, mesh, (*settings, "puzzle_emb_frozen=true"), "frozen")
    return learned, frozen


def _picture(learned: Course, frozen: Course, test: PuzzleData, task: RuleTask) -> str:
    """Both curves, and held-out grids of four ids with questions and answers."""
    lines = [
        Line("rows learn", learned.points, PALETTE[0]),
        Line("rows frozen", frozen.points, PALETTE[3]),
    ]
    parts = [
        text(16, 24, "Held-out grids solved, of ids whose rule only their row knows", size=15),
        chart(46, 44, lines, width=330, height=200, across="steps"),
    ]
    heads = ("asked", "rows learn", "rows frozen")
    for k, head in enumerate(heads):
        parts.append(text(470 + 80 * k, 48, head, ink=MUTED))
    first = sorted(set(learned.kept["puzzle_identifiers"].tolist()))[:4]
    for line, puzzle_id in enumerate(first):
        at = int((learned.kept["puzzle_identifiers"] == puzzle_id).nonzero()[0])
        top = 56 + 52 * line
        parts.append(text(424, top + 26, f"id {puzzle_id}", ink=INK))
        right = learned.kept["labels"][at]
        asked = learned.kept["inputs"][at]
        tokens = (asked, learned.kept["predictions"][at], frozen.kept["predictions"][at])
        for k, said in enumerate(tokens):
            wrong = torch.zeros_like(said, dtype=torch.bool) if not k else said != right
            cells = [
                [
                    Cell("x" if bad else "", "#ffffff", PALETTE[(token - 1) % len(PALETTE)])
                    for token, bad in zip(tokens_of, bads, strict=True)
                ]
                for tokens_of, bads in zip(
                    said.view(task.side, task.side).tolist(),
                    wrong.view(task.side, task.side).tolist(),
                    strict=True,
                )
            ]
            parts.append(grid(470 + 80 * k, top, cells, side=44 / task.side))
    parts.append(text(470, 56 + 52 * 4 + 8, "x: wrong", ink=MUTED))
    return svg(720, 285, parts, title="The per-id rule task")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run it, print the table, write the picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path("runs/demo-hrm"))
    parser.add_argument("--ids", type=int, default=TASK.ids)
    parser.add_argument("--epochs", type=int, default=120, help="passes over every id")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args(arguments)
    task = RuleTask(ids=asked.ids, colours=TASK.colours, seed=asked.seed)
    length = (f"epochs={asked.epochs}", f"eval_interval={max(1, asked.epochs // 12)}")
    learned, frozen = demonstrate(asked.folder, task=task, settings=length, seed=asked.seed)
    print(f"\n{'':14}{'exact':>8}{'cells':>8}{'steps':>8}{'CPU s':>8}   (held-out grids)")
    found = {"rows learn": learned, "rows frozen": frozen}
    for name, one in found.items():
        print(f"{name:14}{one.exact:8.3f}{one.cells:8.3f}{one.steps:8}{one.cpu_s:8.0f}")
    test = read_split(asked.folder / "data", "test")
    picture = asked.folder / "demo.svg"
    picture.write_text(_picture(learned, frozen, test, task))
    figures = {
        name: {"exact": one.exact, "cells": one.cells, "steps": one.steps, "cpu_s": one.cpu_s}
        for name, one in found.items()
    }
    (asked.folder / "figures.json").write_text(json.dumps(figures, indent=1))
    print(f"\npicture: {picture}")


if __name__ == "__main__":
    main()
