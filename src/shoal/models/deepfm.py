"""DeepFM (Guo et al. 2017): linear, pairwise and deep parts over the same embeddings."""

from __future__ import annotations

from torch import Tensor, nn

from shoal.address import check_dense
from shoal.models.mlp import MLP, Inputs
from shoal.models.wide import Wide


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
        hidden: widths of the deep part.
        dropout, batch_norm: as `MLP`.
    """

    def __init__(
        self,
        inputs: tuple[int, int, int],
        *,
        hidden: tuple[int, ...] = (400, 400, 400),
        dropout: float = 0.0,
        batch_norm: bool = False,
    ) -> None:
        super().__init__()
        self._inputs = Inputs(*inputs).require()
        self.wide = Wide(self._inputs.num_dense)
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
        deep_B: Tensor = self.deep(self._inputs.flatten(dense_B, embeddings_BFD)).squeeze(1)
        wide_B: Tensor = self.wide(dense_B, first_order_BF)
        return deep_B + fm_second_order(embeddings_BFD) + wide_B
