"""The eight ways to turn and mirror a grid."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["COUNT", "dihedral", "inverse", "undo"]

COUNT = 8
_INVERSE = (0, 3, 2, 1, 4, 5, 6, 7)


def dihedral(grid: NDArray[Any], number: int) -> NDArray[Any]:
    """Number 0..3: quarter turns against the clock; 4: left to right; 5: upside down;
    6: transposed; 7: transposed along the other diagonal."""
    if number < 4:
        return np.rot90(grid, number)
    if number == 4:
        return np.fliplr(grid)
    if number == 5:
        return np.flipud(grid)
    return grid.T if number == 6 else np.rot90(grid, 2).T


def inverse(number: int) -> int:
    """The one that takes it back."""
    return _INVERSE[number]


def undo(grid: NDArray[Any], number: int) -> NDArray[Any]:
    """`dihedral`, taken back."""
    return dihedral(grid, inverse(number))
