"""Inputs of the segment operations' tests, and their comparison with plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from support import ops_reference as reference
from support.backends import Implementation

__all__ = [
    "LENGTHS",
    "REDUCES",
    "SEGMENTS",
    "compare",
    "ints",
    "offsets_of",
    "random_rows",
    "rows_of",
]

SEGMENTS = ["segment_sum", "segment_mean", "segment_sqrtn", "segment_l2"]
REDUCES = ["reduce_sum", "reduce_mean", "reduce_mean_sqrtn", "reduce_sqrtn"]
# Lengths of segments: empty ones at both ends and between, one longer than a tile of rows.
LENGTHS = [0, 2, 1, 0, 0, 21, 3, 1, 0]


def rows_of(values: list[list[float]], impl: Implementation) -> Tensor:
    """Rows that ask for a gradient, on the implementation's device."""
    return torch.tensor(values, dtype=torch.float32, device=impl.device, requires_grad=True)


def ints(values: Any, impl: Implementation) -> Tensor:
    """int64 on the implementation's device."""
    return torch.tensor(values, dtype=torch.int64, device=impl.device)


def offsets_of(lengths: list[int], impl: Implementation) -> Tensor:
    """Offsets of segments of these lengths."""
    return ints([0, *lengths], impl).cumsum(0)


def random_rows(count: int, dim: int, impl: Implementation, **kind: Any) -> Tensor:
    """Rows of exactly summable values that ask for a gradient."""
    generator = torch.Generator().manual_seed(count + dim)
    rows = torch.randint(-8, 9, (count, dim), generator=generator).to(**kind) / 4
    return rows.to(impl.device).requires_grad_()


def compare(impl: Implementation, op: str, values: Tensor, call: Callable[[Any], Tensor]) -> None:
    """Result and gradient of `op` equal the reference's; call(fn) applies an op to arguments."""
    got = call(getattr(impl, op))
    want = call(getattr(reference, op))
    weights = torch.linspace(-1, 1, want.numel(), device=impl.device).reshape(want.shape)
    weights = weights.to(want.dtype)
    with impl.chosen():
        (grad,) = torch.autograd.grad((got * weights).sum(), values)
    (expected,) = torch.autograd.grad((want * weights).sum(), values)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(grad, expected)
