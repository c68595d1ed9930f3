"""Build ARC from its JSON files.

python build_arc.py --output-dir data/arc-aug-1000 \\
    --train-tasks training_challenges.json training_solutions.json \\
    --train-tasks concept_challenges.json concept_solutions.json \\
    --test-tasks evaluation_challenges.json evaluation_solutions.json

All pairs of training tasks are training data. Of a test task, the shown pairs are training data
and the asked pairs are the test. Every task and every augmentation is a puzzle with its own id.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np

from hrm.arc import SIDE, VOCAB, Pair, Task, augmentations, read_tasks, to_pages
from hrm.dataset import BLANK, write_split
from hrm.ranks import program
from hrm.set_builder import SetBuilder
from shoal.errors import DataError

__all__ = ["main"]


class _Builder:
    def __init__(self, seed: int, spool: Path) -> None:
        self.rng = np.random.default_rng(seed)
        self.names = [BLANK]
        self.sets = {
            split: SetBuilder(SIDE * SIDE, spool=spool / split) for split in ("train", "test")
        }

    def add(self, task: Task, count: int, *, held_out: bool) -> None:
        """A task with its augmentations: a group in each split that it has pairs for."""
        family = augmentations(task, count, self.rng)
        first = len(self.names)
        self.names += [made.name for made in family]
        parts = {"train": [made.shown for made in family]}
        if held_out:
            parts["test"] = [made.asked for made in family]
        else:
            parts["train"] = [made.shown + made.asked for made in family]
        for split, puzzles in parts.items():
            for puzzle_id, pairs in enumerate(puzzles, first):
                self._write(split, puzzle_id, pairs)
            self.sets[split].end_group()

    def close(self) -> None:
        for built in self.sets.values():
            built.close()

    def _write(self, split: str, puzzle_id: int, pairs: tuple[Pair, ...]) -> None:
        # One training pair of each puzzle stays in the corner, where test pairs are.
        still = int(self.rng.integers(len(pairs))) if pairs else 0
        pages = [
            to_pages(pair, self._place if split == "train" and k != still else None)
            for k, pair in enumerate(pairs)
        ]
        shape = (len(pages), SIDE * SIDE)
        questions = np.array([question for question, _ in pages], dtype=np.uint8).reshape(shape)
        answers = np.array([answer for _, answer in pages], dtype=np.uint8).reshape(shape)
        self.sets[split].add_puzzle(puzzle_id, questions, answers)

    def _place(self, room: int) -> int:
        return int(self.rng.integers(room + 1))


def main(arguments: Sequence[str] | None = None) -> None:
    """Build what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output-dir", required=True)
    for name in ("--train-tasks", "--test-tasks"):
        parser.add_argument(name, nargs="+", action="append", default=[], metavar="FILE")
    parser.add_argument("--num-aug", type=int, default=1000, help="augmentations of a task")
    parser.add_argument("--limit", type=int, help="tasks of each pair of files")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args(arguments)
    if not asked.train_tasks and not asked.test_tasks:
        parser.error("no tasks: give --train-tasks, --test-tasks or both")
    for files in (*asked.train_tasks, *asked.test_tasks):
        if len(files) > 2:
            parser.error(f"one file of challenges and one of solutions each, got {files}")
    Path(asked.output_dir).mkdir(parents=True, exist_ok=True)
    # In the folder of the data: pages take gigabytes, and are moved from there.
    with (
        tempfile.TemporaryDirectory(prefix=".building-", dir=asked.output_dir) as spool,
        closing(_Builder(asked.seed, Path(spool))) as builder,
    ):
        _build(asked, builder)


def _build(asked: argparse.Namespace, builder: _Builder) -> None:
    known: dict[str, str] = {}
    for held_out, files in ((False, asked.train_tasks), (True, asked.test_tasks)):
        for pair in files:
            for task in read_tasks(pair[0], pair[1] if len(pair) > 1 else None)[: asked.limit]:
                _only_once(known, task.name, pair[0])
                builder.add(task, asked.num_aug, held_out=held_out)
    for split, found in builder.sets.items():
        built = found.build()
        write_split(
            asked.output_dir,
            split,
            {"all": built},
            vocab_size=VOCAB,
            seq_len=SIDE * SIDE,
            names=builder.names,
        )
        puzzles = len(built.puzzle_identifiers)
        print(f"{split}: {built.groups} tasks, {puzzles} puzzles, {built.examples} examples")


def _only_once(known: dict[str, str], name: str, path: str) -> None:
    if name in known:
        raise DataError(
            f"task {name!r}",
            got=f"in {known[name]} and {path}",
            allowed="a unique name for each task",
            remedy="Give each file once; a task may not be trained on and tested, too.",
        )
    known[name] = path


if __name__ == "__main__":
    sys.exit(program(main))
