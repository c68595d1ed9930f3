"""Find or claim the rows of ids in the index of a shard, for all its tables in one launch."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.kernels.table_layout import BUCKET_BYTES, BUCKET_SLOTS, EMPTY_KEY

__all__ = ["new_entries"]


def new_entries(slots: int, device: torch.device | str) -> Tensor:
    """An index without ids: int64 [slots / 8 + 1, 12], keys empty, handles -1.

    slots: a power of two from 8 on; the last bucket is the side bucket.
    """
    entries = torch.full(
        (slots // BUCKET_SLOTS + 1, BUCKET_BYTES // 8), -1, dtype=torch.int64, device=device
    )
    entries[:, :BUCKET_SLOTS] = EMPTY_KEY
    return entries
