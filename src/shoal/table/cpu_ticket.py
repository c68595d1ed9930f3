"""`CpuTicket`: rows of one training lookup in a CPU shard."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shoal.address import address
from shoal.table.shard import IdGroups

__all__ = ["CpuTicket"]


class CpuTicket:
    """See `shoal.table.shard.Ticket`; ends with this object at the latest."""

    __slots__ = ("core", "groups", "native", "shard")

    def __init__(self, shard: object, core: Any, groups: IdGroups, native: Any) -> None:
        self.shard = shard
        self.core = core
        self.groups = groups
        self.native = native

    @property
    def admitted_N(self) -> Tensor:
        """bool [N]: the id has a row."""
        flags_N = torch.empty(self.groups.ids_N.numel(), dtype=torch.bool, device="cpu")
        self.core.admitted(address(flags_N))
        return flags_N

    @property
    def found_N(self) -> Tensor:
        """bool [N]: the id had a row before this lookup."""
        flags_N = torch.empty(self.groups.ids_N.numel(), dtype=torch.bool, device="cpu")
        self.core.found(address(flags_N))
        return flags_N

    def end(self) -> None:
        """Release the rows; a second call does nothing."""
        self.core.end()
