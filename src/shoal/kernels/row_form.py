"""What kernels must know of a row at compile time; tables of one form share launches."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shoal.rules.compressors import Compressor
from shoal.rules.initializers import Initializer
from shoal.rules.optimizers import Optimizer

__all__ = ["RowForm", "SegmentForm"]


@dataclass(frozen=True, slots=True)
class SegmentForm:
    """Columns [column, column + dim) of a row and [state_column, + state_width) of its state.

    `rate` is the segment's place among its table's learning rates. Rules that differ in `lr`
    alone are equal here: rates come with each step.
    """

    column: int
    dim: int
    state_column: int
    state_width: int
    rate: int
    initializer: Initializer
    optimizer: Optimizer
    compressor: Compressor


@dataclass(frozen=True, slots=True)
class RowForm:
    """Row dim D, optimizer-state width S, storage dtype, segments from left to right.

    shift: the tables' first column modulo 4, 0..3: where their rows start in a block of random
    words.
    """

    dim: int
    state_width: int
    dtype: torch.dtype
    segments: tuple[SegmentForm, ...]
    shift: int = 0

    @property
    def real(self) -> torch.dtype:
        """Dtype of arithmetic, optimizer state and gradients: float32, float64 for float64 rows."""
        return torch.float64 if self.dtype is torch.float64 else torch.float32

    @property
    def weight_bytes(self) -> int:
        """Bytes from one row's weights to the next's, a multiple of 16."""
        return _padded(self.dim * self.dtype.itemsize)

    @property
    def state_bytes(self) -> int:
        """Bytes from one row's state to the next's, a multiple of 16; 0 without state."""
        return _padded(self.state_width * self.real.itemsize)


def _padded(size: int) -> int:
    return (size + 15) // 16 * 16
