"""Sudoku of any box size: solving by bit boards, and making puzzles with one solution.

A grid is a tuple of n * n cells, row by row; 0 is blank, n = box * box. For each digit, one int
has a bit for every cell that may still hold it: single candidates of all cells come out of a few
operations on whole boards.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from shoal.errors import ConfigError, DataError

__all__ = ["Grid", "Solved", "full_grid", "make_puzzle", "solve"]

Grid = tuple[int, ...]
Boards = list[int]


@dataclass(frozen=True, slots=True)
class Solved:
    """The result of a search.

    Args:
        solutions: as many as requested, or all.
        guesses: values tried at cells that logic of single candidates left open. Of a search for
            two solutions it measures the puzzle: the whole tree was seen.
    """

    solutions: tuple[Grid, ...]
    guesses: int

    @property
    def unique(self) -> bool:
        """Whether there is one solution; the search must have looked for two."""
        return len(self.solutions) == 1


@dataclass(frozen=True, slots=True)
class _Geometry:
    n: int
    full: int
    units: tuple[int, ...]
    others: tuple[int, ...]  # of each cell: all cells that it does not share a unit with


@lru_cache
def _geometry(box: int) -> _Geometry:
    n = box * box
    cells = range(n * n)
    keys = [(c // n, n + c % n, 2 * n + c // n // box * box + c % n // box) for c in cells]
    units = [sum(1 << c for c in cells if unit in keys[c]) for unit in range(3 * n)]
    full = (1 << n * n) - 1
    seen = [(units[a] | units[b] | units[d]) & ~(1 << c) for c, (a, b, d) in enumerate(keys)]
    return _Geometry(n, full, tuple(units), tuple(full & ~peers for peers in seen))


def solve(
    grid: Sequence[int], box: int = 3, *, limit: int = 2, rng: random.Random | None = None
) -> Solved:
    """Search for up to `limit` solutions.

    Args:
        grid: n * n digits, 0 for blank.
        rng: shuffles the order of attempts; None tries small digits first.

    Raises:
        DataError: not a grid of this box size.
    """
    geometry = _geometry(box)
    _check(grid, geometry.n)
    boards = [geometry.full] * geometry.n
    for cell, digit in enumerate(grid):
        if digit:
            bit = 1 << cell
            boards = [board & ~bit for board in boards]
            boards[digit - 1] |= bit
    search = _Search(geometry, limit, rng)
    search.run(boards, 0)
    return Solved(tuple(search.found), search.guesses)


def _check(grid: Sequence[int], n: int) -> None:
    if len(grid) != n * n or not all(0 <= digit <= n for digit in grid):
        raise DataError(
            "Sudoku grid",
            got=f"{len(grid)} cells of {sorted(set(grid))}",
            allowed=f"{n * n} cells of 0..{n}",
            remedy="Write blanks as 0 or a dot, and check the box size.",
        )


class _Search:
    """Depth first, over boards of which every level has its own copy."""

    def __init__(self, geometry: _Geometry, limit: int, rng: random.Random | None) -> None:
        self.geometry, self.limit, self.rng = geometry, limit, rng
        self.found: list[Grid] = []
        self.guesses = 0

    def run(self, boards: Boards, placed: int) -> None:
        """Search the boards; `placed` are cells whose constraints are already applied."""
        narrowed = self._narrow(boards, placed)
        if narrowed is None:
            return
        placed, two, three = narrowed
        if placed == self.geometry.full:
            self.found.append(_read(boards, self.geometry.n))
            return
        bit = self._branch(two or three or (self.geometry.full & ~placed))
        digits = [k for k, board in enumerate(boards) if board & bit]
        if self.rng is not None:
            self.rng.shuffle(digits)
        for digit in digits:
            self.guesses += 1
            tried = [board & ~bit for board in boards]
            tried[digit] |= bit
            self.run(tried, placed)
            if len(self.found) >= self.limit:
                return

    def _branch(self, cells: int) -> int:
        if self.rng is None:
            return cells & -cells
        bits = [1 << c for c in range(self.geometry.full.bit_length()) if cells >> c & 1]
        return self.rng.choice(bits)

    def _narrow(self, boards: Boards, placed: int) -> tuple[int, int, int] | None:
        """Place single candidates until none is left: (placed, cells of two, of three), or None."""
        full, others = self.geometry.full, self.geometry.others
        while True:
            one = two = three = four = 0
            for board in boards:
                four |= three & board
                three |= two & board
                two |= one & board
                one |= board
            if one != full:
                return None
            singles = one & ~two & ~placed
            if singles:
                placed |= singles
                for digit, board in enumerate(boards):
                    new = board & singles
                    while new:
                        bit = new & -new
                        board &= others[bit.bit_length() - 1]
                        new ^= bit
                    boards[digit] = board
                continue
            hidden = self._hidden(boards, placed)
            if hidden is None:
                return None
            if not hidden:
                return placed, two & ~three, three & ~four

    def _hidden(self, boards: Boards, placed: int) -> bool | None:
        """Keep only the digit in cells that are the last of a unit for it; None: none is left."""
        changed = False
        for digit, board in enumerate(boards):
            for unit in self.geometry.units:
                left = board & unit
                if not left & (left - 1) and not left & placed:
                    if not left:
                        return None
                    for other, theirs in enumerate(boards):
                        if other != digit:
                            boards[other] = theirs & ~left
                    changed = True
        return changed


def _read(boards: Boards, n: int) -> Grid:
    grid = [0] * (n * n)
    for digit, board in enumerate(boards, 1):
        while board:
            bit = board & -board
            grid[bit.bit_length() - 1] = digit
            board ^= bit
    return tuple(grid)


def full_grid(rng: random.Random, box: int = 3) -> Grid:
    """A filled grid, found by a search that tries things in random order."""
    n = box * box
    first = list(range(1, n + 1))
    rng.shuffle(first)
    return solve([*first, *[0] * (n * n - n)], box, limit=1, rng=rng).solutions[0]


def make_puzzle(
    rng: random.Random, box: int = 3, *, clues: int | None = None, tries: int = 200
) -> tuple[Grid, Grid]:
    """A puzzle with one solution, and that solution.

    Args:
        clues: how many cells are given; None: a minimal puzzle, no clue of which can be spared.
        tries: grids to start from until one leaves so few clues.

    Raises:
        ConfigError: no grid did.
    """
    n = box * box
    wanted = 0 if clues is None else clues
    for _ in range(tries):
        solution = full_grid(rng, box)
        puzzle = _thin(solution, wanted, rng, box)
        if clues is None or n * n - puzzle.count(0) == clues:
            return puzzle, solution
    raise ConfigError(
        "clues of a Sudoku puzzle",
        got=clues,
        allowed=f"up to {n * n} that a random grid can be thinned to, in {tries} tries",
        remedy="Ask for another number of clues, or for minimal puzzles.",
    )


def _thin(solution: Grid, wanted: int, rng: random.Random, box: int) -> Grid:
    """Take away clues in random order, down to `wanted`, those that are not missed."""
    puzzle = list(solution)
    order = list(range(len(solution)))
    rng.shuffle(order)
    left = len(order)
    for cell in order:
        if left <= wanted:
            break
        puzzle[cell] = 0
        if solve(puzzle, box).unique:
            left -= 1
        else:
            puzzle[cell] = solution[cell]
    return tuple(puzzle)
