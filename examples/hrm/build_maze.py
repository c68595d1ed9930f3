"""Build mazes with one shortest path: python build_maze.py --output-dir data/maze-30x30

Training and test mazes stay different when turned or mirrored.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import numpy as np

from hrm.dataset import PuzzleSet, write_split
from hrm.dihedral import COUNT, dihedral
from hrm.maze import CHARSET, Maze, canonical_maze, make_maze, to_tokens
from hrm.ranks import program
from hrm.set_builder import SetBuilder

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Build what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output-dir", required=True)
    parser.add_argument("--train", type=int, default=1000, help="training mazes")
    parser.add_argument("--test", type=int, default=1000, help="test mazes")
    parser.add_argument("--side", type=int, default=30, help="rows and columns")
    parser.add_argument("--loops", type=float, default=0.1, help="walls taken out, over cells")
    parser.add_argument("--min-length", type=int, default=0, help="fewest steps of the path")
    parser.add_argument("--aug", action="store_true", help="train on all turns and mirrors")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args(arguments)
    rng = np.random.default_rng(asked.seed)
    mazes: dict[bytes, Maze] = {}
    while len(mazes) < asked.train + asked.test:
        maze = make_maze(rng, asked.side, loops=asked.loops, min_length=asked.min_length)
        mazes.setdefault(canonical_maze(maze.question), maze)
    made = list(mazes.values())
    parts = {"train": made[: asked.train], "test": made[asked.train :]}
    for split, part in parts.items():
        turns = COUNT if asked.aug and split == "train" else 1
        write_split(
            asked.output_dir,
            split,
            {"all": _set(part, turns)},
            vocab_size=len(CHARSET) + 1,
            seq_len=asked.side**2,
        )
        lengths = [maze.length for maze in part] or [0]
        print(f"{split}: {len(part)} mazes, mean path {sum(lengths) / len(lengths):.1f} steps")


def _set(mazes: Sequence[Maze], turns: int) -> PuzzleSet:
    built = SetBuilder(mazes[0].question.size if mazes else 0)
    for maze in mazes:
        for turn in range(turns):
            tokens = [to_tokens(dihedral(side, turn)) for side in (maze.question, maze.answer)]
            built.add_puzzle(0, tokens[0][None], tokens[1][None])
        built.end_group()
    return built.build()


if __name__ == "__main__":
    sys.exit(program(main))
