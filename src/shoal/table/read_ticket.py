"""`ReadTicket`: stands for a training lookup that only read."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.table.shard import IdGroups

__all__ = ["ReadTicket"]


@dataclass(frozen=True, slots=True, eq=False)
class ReadTicket:
    """A lookup that holds no rows; its ids, and how often each occurs, are needed later.

    Args:
        groups: the ids.
        counts_N: int64 [N], occurrences each position stands for; None: 1 each.
    """

    groups: IdGroups
    counts_N: Tensor | None = None

    @property
    def admitted_N(self) -> Tensor:
        """bool [N]: the id has a row; none is held."""
        return torch.zeros_like(self.groups.ids_N, dtype=torch.bool)

    @property
    def found_N(self) -> Tensor:
        """bool [N]: the id had a row; none is held."""
        return torch.zeros_like(self.groups.ids_N, dtype=torch.bool)

    def end(self) -> None:
        """Nothing is held."""
