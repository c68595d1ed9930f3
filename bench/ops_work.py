"""What a case hands to the timing, and how results are compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["Work", "agree", "equal"]

SAMPLES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Work:
    """One operation on existing inputs.

    Args:
        ours: runs it and returns its result.
        peers: baselines in plain torch, each way that may be the fastest.
        moved: bytes it must read and write at least.
        check: raises AssertionError unless ours is right; None: compare each baseline.
    """

    ours: Callable[[], Any]
    peers: Mapping[str, Callable[[], Any]]
    moved: float
    check: Callable[[], None] | None = None

    def verify(self) -> None:
        """Raise AssertionError unless ours is right."""
        if self.check is not None:
            self.check()
            return
        found = self.ours()
        for name, peer in self.peers.items():
            agree(found, peer(), name)


def equal(found: Tensor, expected: Tensor, what: str) -> None:
    """Raise AssertionError unless two tensors are the same, bit for bit."""
    if not torch.equal(found, expected):
        raise AssertionError(f"wrong {what}")


def agree(found: Tensor | Sequence[Tensor], expected: Tensor | Sequence[Tensor], what: str) -> None:
    """Raise AssertionError unless tensors are nearly the same, at a million evenly spread places.

    Sums are added in other orders, so bits may differ.
    """
    ours, theirs = _parts(found), _parts(expected)
    if [part.shape for part in ours] != [part.shape for part in theirs]:
        raise AssertionError(f"wrong shapes, compared with {what}")
    for one, other in zip(ours, theirs, strict=True):
        step = one.numel() // SAMPLES | 1  # odd, so that every column is visited
        one, other = one.detach().flatten()[::step], other.detach().flatten()[::step]
        torch.testing.assert_close(
            one, other, rtol=1e-4, atol=1e-5, msg=lambda text: f"unlike {what}: {text}"
        )


def _parts(given: Tensor | Sequence[Tensor]) -> list[Tensor]:
    return [given] if isinstance(given, Tensor) else list(given)
