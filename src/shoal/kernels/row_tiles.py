"""How items, and rows and columns, are cut into blocks, one program each.

`blocks_of` and `triton.next_power_of_2` are made for kernels too, and cost a launcher 2.5 us a
call; these cost 0.1.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl  # type: ignore[import-untyped]

__all__ = [
    "blocks_of",
    "columns_of",
    "columns_per_program",
    "grid_of",
    "power_of_2",
    "rows_of_tile",
    "step_of",
    "wide_of",
]

TILE = 1024  # elements of a program's block
MOST_COLUMNS = 128


def blocks_of(items: int, block: int) -> int:
    """Blocks that hold all items, the last maybe not full."""
    return (items + block - 1) // block


def power_of_2(least: int) -> int:
    """The smallest power of two of at least `least` >= 1."""
    return 1 << (least - 1).bit_length()


def step_of(dim: int) -> int:
    """Columns that rows are a multiple of, up to 16: what lets loads be as wide as they can."""
    step = 1
    while step < 16 and dim % (2 * step) == 0:
        step *= 2
    return step


def columns_per_program(dim: int) -> int:
    """Width of a block of columns."""
    return min(power_of_2(dim), MOST_COLUMNS)


def wide_of(dtype: torch.dtype) -> Any:
    return tl.float64 if dtype == torch.float64 else tl.float32


def columns_of(dim: int) -> dict[str, int]:
    step = step_of(dim)
    return {"steps": dim // step, "step": step, "block_d": columns_per_program(dim)}


def grid_of(items: int, block: int, dim: int) -> tuple[int, int]:
    return blocks_of(items, block), blocks_of(dim, columns_per_program(dim))


def rows_of_tile(dim: int) -> int:
    return max(TILE // columns_per_program(dim), 1)
