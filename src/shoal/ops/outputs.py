"""Memory of what an operator returns on the CPU."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shoal import _core

__all__ = ["fresh"]

# From here on memory is kept for the next output of its size: fresh pages cost more than filling
# them.
_KEPT_BYTES = 1 << 19


def fresh(*shape: int, dtype: torch.dtype) -> Tensor:
    """An uninitialised CPU tensor; a large one reuses memory."""
    size = math.prod(shape)
    if size * dtype.itemsize < _KEPT_BYTES:
        return torch.empty(shape, dtype=dtype, device="cpu")
    words = -(-size * dtype.itemsize // 8)
    kept: Tensor = _core.pooled64(1, words)
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    # No view: autograd lets nobody change a view that a custom operator returned.
    return torch.empty(0, dtype=dtype, device="cpu").set_(kept.untyped_storage(), 0, shape, strides)
