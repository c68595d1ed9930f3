"""From the data settings of a run to its training and evaluation batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from shoal.config.tree import RunConfig
from shoal.data import Batch

__all__ = ["RunData", "open_data"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunData:
    """The data of a run.

    Args:
        features: names of the id features, in batch order.
        num_dense: dense columns.
        train, evaluation: each call starts one pass over the batches.
        train_examples, eval_examples: how many there will be; None when not known.
    """

    features: tuple[str, ...]
    num_dense: int
    train: Callable[[], Iterable[Batch]]
    evaluation: Callable[[], Iterable[Batch]]
    train_examples: int | None = None
    eval_examples: int | None = None


def open_data(config: RunConfig) -> RunData:
    raise NotImplementedError
