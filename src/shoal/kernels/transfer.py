"""Small host data on its way to a device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["sent"]


def sent(values: Tensor | Sequence[int], device: torch.device) -> Tensor:
    """A host tensor, or numbers as int64, on a device.

    Goes to CUDA from page-locked memory, so that the host does not wait. A captured graph would
    replay the copy from memory that is gone: operators that call this say `from_host`.
    """
    made = values if isinstance(values, Tensor) else torch.tensor(values, dtype=torch.int64)
    if made.device.type == "cpu" and device.type == "cuda":
        return made.pin_memory().to(device, non_blocking=True)
    return made.to(device)
