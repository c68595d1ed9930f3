"""Groups of ids for calls into a shard, from plain lists."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from shoal.table.shard import IdGroups

__all__ = ["groups_of"]


def groups_of(*parts: tuple[int, Sequence[int]], device: str | torch.device = "cpu") -> IdGroups:
    """One group per (table, ids)."""
    flat = [id_ for _, ids in parts for id_ in ids]
    return IdGroups(
        torch.tensor(flat, dtype=torch.int64, device=device),
        torch.tensor(list(accumulate((len(ids) for _, ids in parts), initial=0))),
        torch.tensor([table for table, _ in parts], dtype=torch.int32),
    )
