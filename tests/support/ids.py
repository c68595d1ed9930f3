"""Inputs of the id operations' tests, and comparison of what comes out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.ragged import Ragged
from support.backends import Implementation

__all__ = ["EXTREMES", "all_equal", "int64", "lists", "moved"]

EXTREMES = [-(2**63), 2**63 - 1, -1, 0, 1, -(2**63), 0, 2**63 - 1, 0]


def int64(*values: int) -> Tensor:
    """int64 values on the CPU."""
    return torch.tensor(values, dtype=torch.int64)


def moved(impl: Implementation, *tensors: Tensor) -> Any:
    """The tensors, or the one, on the implementation's device."""
    sent = [tensor.to(impl.device) for tensor in tensors]
    return sent[0] if len(sent) == 1 else sent


def lists(ragged: Ragged) -> list[list[int]]:
    """Rows as Python lists."""
    return ragged.to("cpu").to_lists()


def all_equal(got: Sequence[Tensor], want: Sequence[Tensor]) -> bool:
    """Whether all are equal, on any device."""
    return all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(got, want, strict=True))
