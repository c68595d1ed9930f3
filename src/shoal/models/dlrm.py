"""DLRM (Naumov et al. 2019): dot products between embeddings and a dense vector."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shoal.models.mlp import MLP, Inputs


def dot_interaction(vectors_BFD: Tensor) -> Tensor:
    """Dot product of each pair of vectors, [B, F(F-1)/2]; pair order (1,0), (2,0), (2,1), ..."""
    count = vectors_BFD.shape[1]
    dots_BFF = vectors_BFD @ vectors_BFD.transpose(1, 2)
    rows, columns = torch.tril_indices(count, count, offset=-1, device=vectors_BFD.device)
    return dots_BFF[:, rows, columns]


class DLRM(nn.Module):
    """A bottom MLP maps dense features to a vector; a top MLP reads it and all dot products.

    Args:
        inputs: (num_dense, num_features, dim). Without dense features there is no bottom, and
            the top reads dot products only (then F is 2 or more).
        bottom: widths before the bottom's last layer, which is D wide.
        top: hidden widths of the top.
        dropout, batch_norm: as `MLP`, in both.
    """

    def __init__(
        self,
        inputs: tuple[int, int, int],
        *,
        bottom: tuple[int, ...] = (512, 256),
        top: tuple[int, ...] = (1024, 1024, 512, 256),
        dropout: float = 0.0,
        batch_norm: bool = False,
    ) -> None:
        super().__init__()
        self._inputs = Inputs(*inputs).require()
        num_dense, num_features, dim = self._inputs
        self.bottom = None
        width, vectors = 0, num_features
        if num_dense:
            widths = (*bottom, dim)
            self.bottom = MLP(num_dense, widths, dropout=dropout, batch_norm=batch_norm)
            width, vectors = dim, num_features + 1
        width += vectors * (vectors - 1) // 2
        self.top = MLP(width, top, out_features=1, dropout=dropout, batch_norm=batch_norm)

    def forward(
        self, dense_B: Tensor | None, embeddings_BFD: Tensor, first_order_BF: Tensor | None = None
    ) -> Tensor:
        """Logits [B]; first-order weights [B, F], if any, are added.

        Raises:
            ShapeError: a shape differs.
        """
        self._inputs.check(dense_B, embeddings_BFD, first_order_BF)
        if self.bottom is None:
            features_BX = dot_interaction(embeddings_BFD)
        else:
            vector_BD = self.bottom(dense_B)
            vectors_BFD = torch.cat([vector_BD.unsqueeze(1), embeddings_BFD], dim=1)
            features_BX = torch.cat([vector_BD, dot_interaction(vectors_BFD)], dim=1)
        logits_B: Tensor = self.top(features_BX).squeeze(1)
        return logits_B if first_order_BF is None else logits_B + first_order_BF.sum(dim=1)
