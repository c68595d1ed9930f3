"""What of the models of a run a checkpoint holds, and what stands in the way of loading it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shoal.checkpoint import Contents
from shoal.train.learner import Learner

__all__ = ["contents_of"]


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
