"""What of the models of a run a checkpoint holds, and what stands in the way of loading it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shoal.checkpoint import Contents
from shoal.table.hosting import HostedTables, hosted_spec
from shoal.train.learner import Learner

__all__ = ["contents_of", "skipped_in_slices"]


def contents_of(
    learners: Sequence[Learner],
    state: Mapping[str, Any] | None = None,
    rank_state: Mapping[str, Any] | None = None,
    *,
    trains: bool = True,
) -> Contents:
    """Tables, dense weights and optimizers by the names of models; a collective call over ranks.

    Args:
        learners: the models.
        state, rank_state: what else is saved.
        trains: with the optimizers.
    """
    return Contents(
        tables={one.name: one.tables.hosted for one in learners},
        modules={one.name: one.module for one in learners},
        optimizers={one.name: one.optimizer for one in learners} if trains else {},
        state=state or {},
        rank_state=rank_state or {},
    )


def skipped_in_slices(tables: HostedTables) -> int | None:
    """Rows that column slices on this rank have left as they were for their gradient's sake.

    Their other slices have changed, so that slices differ in which rows a delta has. None: no
    table lies in column slices.
    """
    placed = [] if tables.placement is None else [
        (spec, tables.placement.of(spec.name)) for spec in tables.specs
    ]  # fmt: skip
    names = {
        hosted_spec(spec, one).name for spec, slices in placed if len(slices) > 1 for one in slices
    }
    if not names:
        return None
    return sum(one.nonfinite_skipped for one in tables.shard.stats() if one.name in names)
