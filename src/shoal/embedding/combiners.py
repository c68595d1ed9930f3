"""How the rows of one feature become one model input per example."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from shoal.lookup import Pooling
from shoal.ops import segment_first_n, segment_mean, segment_sum
from shoal.ragged import Ragged
from shoal.rules.rule import Checked, whole


@runtime_checkable
class Combiner(Protocol):
    """What a feature's rows are pooled with.

    Shards know those of `COMBINERS` by their `pooling`, a name of `shoal.lookup.Pooling`. Any other
    class is a combiner of one's own, whose `combine` is called on the rows.
    """

    @property
    def max_seq_length(self) -> int:
        """Rows kept per example; 0 when all are reduced to one."""

    def output_shape(self, dim: int) -> tuple[int | None, ...]:
        """Static shape of `combine`'s result for row dim D; None is the batch."""

    def combine(self, ragged: Ragged, embeddings_ND: Tensor) -> Tensor:
        """Pool rows [N, D], one per id of `ragged`; differentiable.

        Raises:
            ShapeError: not one row per id.
        """


@dataclass(frozen=True, slots=True)
class _Reduced:
    """All of an example's rows as one, [B, D]; zeros without ids."""

    pooling: ClassVar[Pooling] = "sum"

    @property
    def max_seq_length(self) -> int:
        """0: all rows are reduced to one."""
        return 0

    def output_shape(self, dim: int) -> tuple[int | None, ...]:
        """(None, D)."""
        return (None, dim)

    def combine(self, ragged: Ragged, embeddings_ND: Tensor) -> Tensor:
        """Pool rows [N, D] to [B, D].

        Raises:
            ShapeError: not one row per id.
        """
        reduce = segment_mean if self.pooling == "mean" else segment_sum
        return reduce(embeddings_ND, ragged.offsets_B1)


class ReduceSum(_Reduced):
    """Sum of an example's rows, [B, D]; zeros without ids."""

    __slots__ = ()


class ReduceMean(_Reduced):
    """Mean of an example's rows, [B, D]; zeros without ids."""

    __slots__ = ()
    pooling: ClassVar[Pooling] = "mean"


@dataclass(frozen=True, slots=True)
class FirstN(Checked):
    """First `length` rows of an example as a sequence, [B, length, D], zero padded.

    Raises:
        ConfigError: length below 1.
    """

    length: Annotated[int, whole(1, remedy="Use ReduceSum to pool all rows into one.")]
    pooling: ClassVar[Pooling] = "first_n"

    @property
    def max_seq_length(self) -> int:
        """`length`."""
        return self.length

    def output_shape(self, dim: int) -> tuple[int | None, ...]:
        """(None, L, D)."""
        return (None, self.length, dim)

    def combine(self, ragged: Ragged, embeddings_ND: Tensor) -> Tensor:
        """Take rows [N, D] to [B, L, D]; rows may be nested lists.

        Raises:
            ShapeError: not one row per id.
        """
        rows_ND = torch.as_tensor(embeddings_ND, device=ragged.values.device)
        return segment_first_n(rows_ND, ragged.offsets_B1, self.length)


COMBINERS = (ReduceSum, ReduceMean, FirstN)
"""What shards can pool with."""
