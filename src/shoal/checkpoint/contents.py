"""What a job hands in to be saved, and gets filled when it is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.optim import Optimizer

from shoal.errors import InputError, describe
from shoal.table.hosting import HostedTables

__all__ = ["Contents"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Contents:
    """The parts of a job, by names that a load asks for again; the same on every rank.

    Args:
        tables: collections of tables.
        modules: dense modules; replicated, or split over ranks by FSDP2 (as DTensors).
        optimizers: name of a module -> the optimizer of its parameters. A `SparseOptimizer` or a
            `JointOptimizer` may have any name.
        state: what else the job needs to go on: nested dicts, lists, tuples, numbers, strings and
            tensors; the same on every rank.
        rank_state: the same, of this rank only (its random generators, say).
    """

    tables: Mapping[str, HostedTables] = field(default_factory=dict)
    modules: Mapping[str, nn.Module] = field(default_factory=dict)
    optimizers: Mapping[str, Optimizer] = field(default_factory=dict)
    state: Mapping[str, Any] = field(default_factory=dict)
    rank_state: Mapping[str, Any] = field(default_factory=dict)

    def check_placed(self, world_size: int) -> None:
        """Check that tables are placed on as many ranks as save or load them.

        Raises:
            InputError: they are not.
        """
        for name, tables in self.tables.items():
            placed = 1 if tables.placement is None else tables.placement.world_size
            if placed != world_size:
                raise InputError(
                    describe(
                        f"placement of collection {name!r}",
                        got=f"one on {placed} ranks",
                        allowed=f"one on {world_size}, as collectives has",
                        remedy="Pass the collectives of all ranks of the job.",
                    )
                )
