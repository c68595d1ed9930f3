"""DeepFM (Guo et al. 2017), and its parts: factorization machines (Rendle 2010), wide & deep.

Wide & deep (Cheng et al. 2016) is DeepFM without pairs, a factorization machine DeepFM without a
deep part, and logistic regression what remains without both.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from functools import reduce
from typing import ClassVar

import torch
from torch import Tensor, nn

from shoal.address import check_dense
from shoal.errors import ShapeError
from shoal.models.mlp import BIAS, MLP, VEC, Deep, Inputs, ModelSpec, Widths


class Wide(nn.Module):
    """A bias, a linear map of dense features and a sum of first-order weights; starts at zero.

    num_dense: dense features, 0 for none.
    """

    def __init__(self, num_dense: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))
        # a parameter without elements would count as unused in data-parallel training
        self.dense = nn.Parameter(torch.zeros(num_dense)) if num_dense else None

    def forward(self, dense_B: Tensor | None, first_order_BF: Tensor | None) -> Tensor:
        """Logits [B] of dense [B, num_dense] and one weight per feature [B, F].

        An argument that is None adds nothing. With neither, the result is the bias, [1].
        """
        logits_B: Tensor = self.bias
        if dense_B is not None and self.dense is not None:
            logits_B = logits_B + dense_B @ self.dense
        if first_order_BF is not None:
            logits_B = logits_B + first_order_BF.sum(dim=1)
        return logits_B


class LogisticRegression(nn.Module):
    """Logistic regression: a bias, and one weight per feature and dense column.

    inputs: (num_dense, num_features, dim); dim is 1 unless first-order weights are passed.
    """

    def __init__(self, inputs: Widths) -> None:
        super().__init__()
        self._inputs = Inputs(*inputs).require()
        self.wide = Wide(self._inputs.num_dense)

    def forward(
        self, dense_B: Tensor | None, embeddings_BFD: Tensor, first_order_BF: Tensor | None = None
    ) -> Tensor:
        """Logits [B]. Without first-order weights [B, F], embeddings [B, F, 1] are the weights.

        Raises:
            ShapeError: a shape differs, or embeddings wider than 1 without first-order weights.
        """
        self._inputs.check(dense_B, embeddings_BFD, first_order_BF)
        if first_order_BF is None:
            if self._inputs.dim != 1:
                got, remedy = self._inputs.dim, "Pass first_order_BF, or tables of dim 1."
                raise ShapeError("width of weights", got=got, allowed=1, remedy=remedy)
            first_order_BF = embeddings_BFD.squeeze(2)
        logits_B: Tensor = self.wide(dense_B, first_order_BF)
        return logits_B


def fm_second_order(embeddings_BFD: Tensor) -> Tensor:
    """Sum of the dot products of all pairs of features, [B].

    Half of (square of the sum minus sum of the squares): linear in F (Rendle 2010, lemma 3.1).

    Raises:
        DTypeError: no dense tensor.
    """
    check_dense("embeddings", embeddings_BFD)
    sum_BD = embeddings_BFD.sum(dim=1)
    squares_BD = (embeddings_BFD * embeddings_BFD).sum(dim=1)
    return (sum_BD * sum_BD - squares_BD).sum(dim=1) / 2


class DeepFM(nn.Module):
    """Bias + first-order weights + all feature pairs + an MLP over dense and embeddings.

    Args:
        inputs: (num_dense, num_features, dim).
        hidden: widths of the deep part; None leaves it out.
        pairs: with the feature pairs.
        dropout, batch_norm: as `MLP`.
    """

    def __init__(
        self,
        inputs: Widths,
        *,
        hidden: tuple[int, ...] | None = (400, 400, 400),
        pairs: bool = True,
        dropout: float = 0.0,
        batch_norm: bool = False,
    ) -> None:
        super().__init__()
        self._inputs = Inputs(*inputs).require()
        self.wide = Wide(self._inputs.num_dense)
        self._pairs, self.deep = pairs, None
        if hidden is not None:
            self.deep = MLP(
                self._inputs.width, hidden, out_features=1, dropout=dropout, batch_norm=batch_norm
            )

    def forward(
        self, dense_B: Tensor | None, embeddings_BFD: Tensor, first_order_BF: Tensor | None = None
    ) -> Tensor:
        """Logits [B] of dense [B, num_dense], embeddings [B, F, D], first-order weights [B, F].

        Raises:
            ShapeError: a shape differs.
        """
        self._inputs.check(dense_B, embeddings_BFD, first_order_BF)
        parts: list[Tensor] = [self.wide(dense_B, first_order_BF)]
        if self._pairs:
            parts.insert(0, fm_second_order(embeddings_BFD))
        if self.deep is not None:
            flat_BX = self._inputs.flatten(dense_B, embeddings_BFD)
            parts.insert(0, self.deep(flat_BX).squeeze(1))
        return reduce(operator.add, parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class FMSettings(ModelSpec):
    """Factorization machine: one weight per id, and all pairs of embeddings."""

    kind: ClassVar[str] = "fm"
    segments: ClassVar[tuple[str, ...]] = (BIAS, VEC)

    def build(self, inputs: Inputs) -> nn.Module:
        """A `DeepFM` of pairs alone."""
        return DeepFM(inputs, hidden=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepFMSettings(Deep):
    """Factorization machine and a deep part over the same embeddings (Guo et al. 2017).

    Args:
        hidden: widths of the deep part's layers.
        dropout: after each of them, 0 up to below 1.
        batch_norm: normalise each of them.
    """

    kind: ClassVar[str] = "deepfm"
    segments: ClassVar[tuple[str, ...]] = (BIAS, VEC)

    def build(self, inputs: Inputs) -> nn.Module:
        """A `DeepFM`."""
        return DeepFM(inputs, hidden=self.hidden, **self.layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class WideAndDeepSettings(Deep):
    """One weight per id and per dense feature, next to a deep part over embeddings."""

    kind: ClassVar[str] = "wide_and_deep"
    segments: ClassVar[tuple[str, ...]] = (BIAS, VEC)

    def build(self, inputs: Inputs) -> nn.Module:
        """A `DeepFM` without pairs."""
        return DeepFM(inputs, hidden=self.hidden, pairs=False, **self.layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogisticSettings(ModelSpec):
    """One weight per id and per dense feature."""

    kind: ClassVar[str] = "logistic"
    segments: ClassVar[tuple[str, ...]] = (BIAS,)

    def build(self, inputs: Inputs) -> nn.Module:
        """A `LogisticRegression`."""
        return LogisticRegression(inputs)
