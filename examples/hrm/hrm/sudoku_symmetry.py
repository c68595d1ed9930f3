"""Which Sudoku puzzles are the same puzzle: the symmetry group, and a canonical form.

Digits may be renamed, the grid transposed, bands and stacks swapped, and rows and columns within
them: 2 * 6^8 * 9! ways for 9 x 9. A filled grid's form is the smallest of all its images, row by
row. Its first row is 1..n for any order of rows and columns. So every row (or column, transposed)
is tried as the first, with every order of columns that keeps stacks. Only those with the smallest
second row are written out.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from hrm.sudoku import Grid

__all__ = ["CanonicalForm", "canonical_form", "random_images"]

Cells = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class CanonicalForm:
    """Equal for two puzzles exactly if a symmetry takes one to the other.

    Args:
        solution: the least image of the filled grid.
        puzzle: the least image of the puzzle among the symmetries that give `solution`.
    """

    solution: bytes
    puzzle: bytes


@lru_cache
def _line_orders(box: int) -> Cells:
    """All orders of n lines that keep bands together, [(box!)^(box + 1), n]."""
    within = list(itertools.permutations(range(box)))
    orders = [
        [band * box + line for band, lines in zip(bands, inner, strict=True) for line in lines]
        for bands in within
        for inner in itertools.product(within, repeat=box)
    ]
    return np.array(orders, dtype=np.int64)


@lru_cache
def _inverse_orders(box: int) -> Cells:
    return np.argsort(_line_orders(box), axis=1)


def canonical_form(puzzle: Grid, solution: Grid, box: int = 3) -> CanonicalForm:
    """The form of a puzzle with one solution, and of that solution; about 2 ms for 9 x 9."""
    n = box * box
    filled = np.array(solution, dtype=np.int64).reshape(n, n)
    given = np.array(puzzle, dtype=np.int64).reshape(n, n)
    sides = np.stack([filled, filled.T])
    masks = np.stack([given, given.T]) != 0
    images, masked = _images(sides, masks, *_least_starts(sides, box), box)
    flat = images.reshape(len(images), n * n).astype(np.uint8)
    keys = [image.tobytes() for image in flat]
    least = min(keys)
    puzzles = [
        (image * mask).tobytes()
        for image, mask, key in zip(flat, masked, keys, strict=True)
        if key == least
    ]
    return CanonicalForm(least, min(puzzles))


def _least_starts(sides: Cells, box: int) -> tuple[Cells, Cells, Cells]:
    """Sides, first rows and column orders whose second row, in the first's names, is least."""
    n = box * box
    orders, inverses = _line_orders(box), _inverse_orders(box)
    pairs = [
        (r, s) for r in range(n) for s in range(r // box * box, r // box * box + box) if r != s
    ]
    first = np.array([r for r, _ in pairs] * 2)
    second = np.array([s for _, s in pairs] * 2)
    side = np.repeat([0, 1], len(pairs))
    where = np.argsort(sides, axis=2)  # column of each digit in each row
    # Under columns' order c the second row reads, by position in the first: c^-1 (q (c (j))).
    q = np.take_along_axis(where[side, first], sides[side, second] - 1, axis=1)
    which, order = np.divmod(np.arange(len(q) * len(orders)), len(orders))
    for j in range(n):
        value = inverses[order, q[which, orders[order, j]]]
        keep = value == value.min()
        which, order = which[keep], order[keep]
    return side[which], first[which], order


def _images(
    sides: Cells, masks: NDArray[np.bool_], side: Cells, first: Cells, order: Cells, box: int
) -> tuple[Cells, NDArray[np.bool_]]:
    """The images of the grid under these starts, rows in their least order; and of its clues."""
    n = box * box
    columns = _line_orders(box)[order]
    count = np.arange(len(side))
    grids = sides[side[:, None, None], np.arange(n)[None, :, None], columns[:, None, :]]
    shown = masks[side[:, None, None], np.arange(n)[None, :, None], columns[:, None, :]]
    names = np.argsort(grids[count, first], axis=1)  # digit d is called names[d - 1] + 1
    grids = names[count[:, None, None], grids - 1] + 1
    # A column has each digit once, so first cells sort rows within bands, and then bands.
    heads = grids[:, :, 0].reshape(len(side), box, box)
    inner = np.argsort(heads, axis=2)
    bands = np.argsort(heads.min(axis=2), axis=1)
    rows = bands[:, :, None] * box + inner[count[:, None], bands]
    rows = rows.reshape(len(side), n)
    return grids[count[:, None], rows], shown[count[:, None], rows].reshape(len(side), n * n)


def random_images(
    puzzle: Grid, solution: Grid, rng: np.random.Generator, count: int, box: int = 3
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """A puzzle and its solution under `count` random symmetries, [count, n * n] each."""
    n = box * box
    names = np.zeros((count, n + 1), dtype=np.uint8)
    names[:, 1:] = rng.permuted(np.tile(np.arange(1, n + 1, dtype=np.uint8), (count, 1)), axis=1)
    orders = _line_orders(box)
    rows = orders[rng.integers(len(orders), size=count)][:, :, None]
    columns = orders[rng.integers(len(orders), size=count)][:, None, :]
    turned = rng.integers(2, size=count)[:, None, None]
    cells = np.where(turned == 1, columns * n + rows, rows * n + columns).reshape(count, n * n)

    def images(grid: Grid) -> NDArray[np.uint8]:
        return np.take_along_axis(names, np.array(grid, dtype=np.int64)[cells], axis=1)

    return images(puzzle), images(solution)
