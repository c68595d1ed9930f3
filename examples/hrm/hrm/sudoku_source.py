"""Sudoku puzzles to build data of: generated ones, or those of a list; solved, rated, classed."""

from __future__ import annotations

import gzip
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import TypeVar

from hrm.sudoku import Grid, make_puzzle, solve
from hrm.sudoku_symmetry import CanonicalForm, canonical_form
from shoal.errors import DataError

__all__ = ["Rated", "generated", "listed", "read_list"]

T = TypeVar("T")

_CHUNK = 16
_DIGITS = {".": 0, **{str(digit): digit for digit in range(10)}}


@dataclass(frozen=True, slots=True)
class Rated:
    """A puzzle, its only solution, the guesses that proving it took, and its class."""

    puzzle: Grid
    solution: Grid
    guesses: int
    form: CanonicalForm

    @property
    def clues(self) -> int:
        """Cells that are given."""
        return len(self.puzzle) - self.puzzle.count(0)


def read_list(path: str | Path, box: int = 3) -> list[Grid]:
    """Puzzles of a text file, gzipped or not: n * n cells a line, blanks as dots or zeros.

    Empty lines and lines that begin with # are left out, and so is what follows the cells after
    a space or comma.

    Raises:
        DataError: no such file, or a line that is no puzzle.
    """
    try:
        raw = Path(path).read_bytes()
        text = (gzip.decompress(raw) if str(path).endswith(".gz") else raw).decode()
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise _malformed(str(path), str(error), box) from error
    puzzles = []
    for number, line in enumerate(text.splitlines(), 1):
        cells = line.replace(",", " ").split()[:1]
        if not cells or line.startswith("#"):
            continue
        digits = [_DIGITS.get(character, -1) for character in cells[0]]
        if len(digits) != box**4 or not all(0 <= digit <= box * box for digit in digits):
            raise _malformed(f"{path}, line {number}", f"{line[:90]!r}", box)
        puzzles.append(tuple(digits))
    return puzzles


def _malformed(where: str, got: str, box: int) -> DataError:
    allowed = f"text with {box**4} cells a line: digits to {box * box}, blanks as dots or zeros"
    return DataError(where, got=got, allowed=allowed, remedy="Check the list.")


def listed(
    puzzles: Sequence[Grid], box: int = 3, *, seed: int = 0, workers: int = 1
) -> Iterator[Rated | None]:
    """Puzzles of a list in random order; None for one without exactly one solution."""
    order = list(puzzles)
    random.Random(seed).shuffle(order)
    return _spread(iter(order), partial(_rated, box=box), workers)


def generated(
    box: int = 3, *, clues: int | None = None, seed: int = 0, workers: int = 1
) -> Iterator[Rated | None]:
    """Endless new puzzles; each from its own number, so workers change nothing."""
    return _spread(count(), partial(_made, box=box, clues=clues, seed=seed), workers)


def _rated(puzzle: Grid, box: int) -> Rated | None:
    found = solve(puzzle, box)
    if not found.unique:
        return None
    solution = found.solutions[0]
    return Rated(puzzle, solution, found.guesses, canonical_form(puzzle, solution, box))


def _made(number: int, box: int, clues: int | None, seed: int) -> Rated | None:
    rng = random.Random(f"{seed}/{number}")
    return _rated(make_puzzle(rng, box, clues=clues)[0], box)


def _spread(
    items: Iterator[T], work: Callable[[T], Rated | None], workers: int
) -> Iterator[Rated | None]:
    """`map`, in order, on several processes; stays close to the consumer."""
    if workers == 1:
        yield from map(work, items)
        return
    with ProcessPoolExecutor(workers) as pool:
        while chunk := list(islice(items, _CHUNK * workers)):
            yield from pool.map(work, chunk, chunksize=_CHUNK)
