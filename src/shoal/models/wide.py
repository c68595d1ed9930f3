"""The linear model: logistic regression over first-order weights and dense features."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shoal.errors import ShapeError
from shoal.models.mlp import Inputs


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

    def __init__(self, inputs: tuple[int, int, int]) -> None:
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
