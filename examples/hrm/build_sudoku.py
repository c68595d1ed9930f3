"""Build Sudoku data: python build_sudoku.py --output-dir data/sudoku-1k-aug-1000 --num-aug 1000

Puzzles are generated, each with one solution, or read from lists (--puzzles FILE). No test puzzle
is a training puzzle under any symmetry; by default this holds for their solutions too. The guesses
of a plain solver are printed and written to statistics.json: generated puzzles are easier than
collected ones.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from hrm.dataset import PuzzleSet, write_split
from hrm.ranks import program
from hrm.set_builder import SetBuilder
from hrm.sudoku_source import Rated, generated, listed, read_list
from hrm.sudoku_symmetry import random_images
from shoal.errors import DataError

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Build what the command line asks for."""
    asked = _parse(arguments)
    if asked.puzzles:
        puzzles = [puzzle for path in asked.puzzles for puzzle in read_list(path, asked.box)]
        found = listed(puzzles, asked.box, seed=asked.seed, workers=asked.workers)
    else:
        found = generated(asked.box, clues=asked.clues, seed=asked.seed, workers=asked.workers)
        # Small boards have few classes: past this, no new ones come.
        found = islice(found, 100 * (asked.train + asked.test))
    by = asked.disjoint or ("solution" if asked.box > 2 else "puzzle")
    parts, left_out = _split(found, asked, by)
    rng = np.random.default_rng(asked.seed)
    report: dict[str, Any] = {"left_out": left_out, "disjoint": by}
    for split, part in parts.items():
        images = asked.num_aug if split == "train" else 0
        n = asked.box**2
        data = {"all": _set(part, images, rng, asked.box)}
        write_split(asked.output_dir, split, data, vocab_size=n + 2, seq_len=n * n)
        report[split] = _figures(part)
        print(f"{split}: {report[split]}")
    print(f"left out: {left_out}; classes are kept apart by {by}")
    (Path(asked.output_dir) / "statistics.json").write_text(json.dumps(report, indent=1))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output-dir", required=True)
    parser.add_argument("--puzzles", nargs="+", metavar="FILE", help="lists, .txt or .txt.gz")
    parser.add_argument("--train", type=int, default=1000, help="training puzzles")
    parser.add_argument("--test", type=int, default=1000, help="test puzzles")
    parser.add_argument("--num-aug", type=int, default=0, help="images of each training puzzle")
    parser.add_argument("--box", type=int, default=3, choices=(2, 3), help="2 makes 4 x 4 grids")
    parser.add_argument("--clues", type=int, help="clues of generated puzzles; default: minimal")
    parser.add_argument("--min-guesses", type=int, default=0, help="leave easier puzzles out")
    parser.add_argument(
        "--disjoint",
        choices=("solution", "puzzle"),
        help="classes that only one split has; default: solution, of 4 x 4 grids puzzle",
    )
    parser.add_argument("--workers", type=int, default=1, help="processes; changes no result")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def _split(
    found: Iterator[Rated | None], asked: argparse.Namespace, by: str
) -> tuple[dict[str, list[Rated]], dict[str, int]]:
    """Fill training, then the test with other classes; count rejected puzzles by reason."""
    wanted = {"train": asked.train, "test": asked.test}
    parts: dict[str, list[Rated]] = {"train": [], "test": []}
    left_out = {"not_unique": 0, "easy": 0, "same_class": 0}
    seen: set[bytes] = set()
    trained: set[bytes] = set()
    for rated in found:
        split = "train" if len(parts["train"]) < asked.train else "test"
        if len(parts[split]) == wanted[split]:
            break
        if rated is None:
            left_out["not_unique"] += 1
            continue
        kind = rated.form.solution if by == "solution" else rated.form.puzzle
        if rated.guesses < asked.min_guesses:
            left_out["easy"] += 1
        elif _twin(rated) in seen or (split == "test" and kind in trained):
            left_out["same_class"] += 1
        else:
            seen.add(_twin(rated))
            parts[split].append(rated)
            if split == "train":
                trained.add(kind)
    short = {split: len(part) for split, part in parts.items() if len(part) < wanted[split]}
    if short:
        raise DataError(
            "puzzles of different classes",
            got=f"{short}; left out {left_out}",
            allowed=f"{wanted}",
            remedy="Ask for fewer (--train, --test), give longer lists, or on small boards "
            "more clues to choose from (--clues) and --disjoint puzzle.",
        )
    return parts, left_out


def _twin(rated: Rated) -> bytes:
    return rated.form.solution + rated.form.puzzle


def _set(part: Sequence[Rated], images: int, rng: np.random.Generator, box: int) -> PuzzleSet:
    """A group for each puzzle with its images; digit d is token d + 1, blanks are 1."""
    built = SetBuilder(box**4)
    for rated in part:
        questions, answers = random_images(rated.puzzle, rated.solution, rng, images, box)
        own = (np.array([grid], dtype=np.uint8) for grid in (rated.puzzle, rated.solution))
        question, answer = own
        inputs = np.concatenate([question, questions]) + 1
        labels = np.concatenate([answer, answers]) + 1
        built.add_puzzles([0] * len(inputs), inputs, labels)
        built.end_group()
    return built.build()


def _figures(part: Sequence[Rated]) -> dict[str, float]:
    guesses = [rated.guesses for rated in part] or [0]
    return {
        "puzzles": len(part),
        "solution_classes": len({rated.form.solution for rated in part}),
        "mean_clues": statistics.fmean(rated.clues for rated in part) if part else 0,
        "mean_guesses": statistics.fmean(guesses),
        "median_guesses": statistics.median(guesses),
        "most_guesses": max(guesses),
    }


if __name__ == "__main__":
    sys.exit(program(main))
