"""What training and evaluation loops are fed with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shoal._jagged import pinned
from shoal.ragged import KeyedRagged

__all__ = ["Batch"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """B examples.

    Args:
        ids: F features over B examples.
        labels: float32 [B], 0..1.
        dense: float32 [B, num_dense], or None when there are no dense columns.
        event_time_s: latest event time of the examples, whole seconds since 1970.
        weights: float32 [B], or None: every example weighs 1.
        times_B: int64 [B], event time of each example in seconds; None: all at `event_time_s`.
        position: examples of the run consumed once this batch is, over all ranks; where a loader
            goes on after it.
    """

    ids: KeyedRagged
    labels: Tensor
    dense: Tensor | None = None
    event_time_s: int = 0
    weights: Tensor | None = None
    times_B: Tensor | None = None
    position: int = 0

    @property
    def event_times_B(self) -> Tensor:
        """int64 [B]: event time of each example in seconds."""
        if self.times_B is not None:
            return self.times_B
        return torch.full_like(self.labels, self.event_time_s, dtype=torch.int64)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Batch:
        """On a device; what is there already is not copied."""
        ids = self.ids.to(device, non_blocking=non_blocking)
        return self._with(ids, lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        """Copy to page-locked memory, so that a non-blocking `to("cuda")` overlaps.

        What is there, or on a device, is not copied, nor anything where there is no CUDA.
        """
        return self._with(self.ids.pin_memory(), pinned)

    def _with(self, ids: KeyedRagged, move: Callable[[Tensor], Tensor]) -> Batch:
        return replace(
            self,
            ids=ids,
            labels=move(self.labels),
            dense=None if self.dense is None else move(self.dense),
            weights=None if self.weights is None else move(self.weights),
            times_B=None if self.times_B is None else move(self.times_B),
        )
