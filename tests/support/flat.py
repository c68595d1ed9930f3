"""The flat buffer and the offset map of Monolith's tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shoal.ragged import Ragged

__all__ = ["DIMS", "FILLED", "MAP", "OFFSETS", "POS", "offset_map"]

T = torch.tensor

# Where rows start in a buffer of 22, those 3 wide and those 2 wide.
OFFSETS = ([13, 0, 5, 13, 8, 13], [16, 18, 11, 11, 16, 20, 3])
# keys [[], [0, 1, 2, 1, 0], [0, 1, 0], []]
MAP = ([0, 8, 2, 6, 4, 10, 16, 13], [0, 2, 4, 5, 7, 8])
DIMS = [1, 2, 3, 4]
POS = ([0, 1, 2, 3, 4], [0, 0, 3, 5, 5])
FILLED = [0, 1, 2, 3, 4, 5, 2, 3, 0, 1, 6, 7, 8, 9, 10, 11, 6, 7, 8]


def offset_map(device: str, pos: Any = POS) -> tuple[Ragged, tuple[Tensor, Tensor]]:
    ragged = Ragged(T(pos[0], dtype=torch.int64), T(pos[1])).to(device)
    return ragged, (T(MAP[0], device=device), T(MAP[1], device=device))
