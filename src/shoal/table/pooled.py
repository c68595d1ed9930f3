"""Memory for what a lookup returns."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal import _core

__all__ = ["empty"]

# Below this the allocator's own free lists are warm and cheaper than a pooled buffer.
_POOLED_BYTES = 1 << 19


def empty(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """An uninitialised [rows, columns] float32 or float64 tensor; a large one reuses memory."""
    if rows * columns * dtype.itemsize < _POOLED_BYTES:
        return torch.empty(rows, columns, dtype=dtype, device="cpu")
    make = _core.pooled64 if dtype is torch.float64 else _core.pooled32
    tensor: Tensor = make(rows, columns)
    return tensor
