"""Tensors as the frames of a message, and back: over the same memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.errors import ShapeError


def memory(values: Tensor) -> memoryview:
    """A tensor's memory, to be sent."""
    flat = values.detach().contiguous().reshape(-1)
    flat = flat.view(torch.uint8) if flat.numel() else flat.to(torch.uint8)
    shown: Any = flat.numpy()
    return memoryview(shown)


def tensor(frame: memoryview, dtype: torch.dtype, count: int, what: str) -> Tensor:
    """A frame as a tensor over its memory; nobody may write to it.

    Raises:
        ShapeError: the frame is not `count` elements long.
    """
    if frame.nbytes != count * dtype.itemsize:
        raise ShapeError(
            f"{what} of a message",
            got=f"{frame.nbytes} bytes",
            allowed=f"{count} times {dtype.itemsize}",
            remedy="Run one version of Shoal on workers and servers.",
        )
    if not count:
        return torch.empty(0, dtype=dtype, device="cpu")
    bytes_N = np.frombuffer(frame, dtype=np.uint8)
    if frame.readonly or bytes_N.ctypes.data % dtype.itemsize:  # small frames lie anywhere
        bytes_N = bytes_N.copy()
    return torch.from_numpy(bytes_N).view(dtype)
