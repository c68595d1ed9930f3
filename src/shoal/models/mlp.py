"""The common parts of all models: the widths of the inputs, and a stack of dense layers."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from shoal.errors import ConfigError, ShapeError


class Inputs(NamedTuple):
    """Widths of a model's inputs; a plain (num_dense, num_features, dim) tuple works too.

    num_dense: dense features, 0 for none; num_features F: pooled embeddings of one example; dim
    D: their width.
    """

    num_dense: int
    num_features: int
    dim: int

    @property
    def width(self) -> int:
        """num_dense + F * D."""
        return self.num_dense + self.num_features * self.dim

    def require(self) -> Inputs:
        """Return self if the widths are valid.

        Raises:
            ConfigError: a negative num_dense, or F or D below 1.
        """
        if self.num_dense < 0 or self.num_features < 1 or self.dim < 1:
            raise ConfigError(
                "(num_dense, num_features, dim)",
                got=tuple(self),
                allowed="at least (0, 1, 1)",
                remedy="Count the dense columns and the pooled embeddings of the data.",
            )
        return self

    def check(
        self, dense_B: Tensor | None, embeddings_BFD: Tensor, first_order_BF: Tensor | None
    ) -> None:
        """Check a batch against the widths; dense_B is None exactly if num_dense is 0.

        Raises:
            ShapeError: a shape differs.
        """
        shape = tuple(embeddings_BFD.shape)
        if embeddings_BFD.ndim != 3 or shape[1:] != (self.num_features, self.dim):
            raise _shape_error("embeddings", shape, f"[B, {self.num_features}, {self.dim}]")
        batch = shape[0]
        dense = None if dense_B is None else tuple(dense_B.shape)
        if dense != ((batch, self.num_dense) if self.num_dense else None):
            allowed = f"[{batch}, {self.num_dense}]" if self.num_dense else "None"
            raise _shape_error("dense features", dense, allowed)
        if first_order_BF is not None and first_order_BF.shape[:-1] != (batch,):
            got = tuple(first_order_BF.shape)
            raise _shape_error("first-order weights", got, f"[{batch}, F]")

    def flatten(self, dense_B: Tensor | None, embeddings_BFD: Tensor) -> Tensor:
        """Dense features and embeddings, concatenated, [B, width]."""
        flat_BX = embeddings_BFD.flatten(1)
        return flat_BX if dense_B is None else torch.cat([dense_B, flat_BX], dim=1)


class MLP(nn.Sequential):
    """Dense layers with ReLU, He-initialised: [B, in_features] -> [B, out_features].

    Args:
        in_features: input width.
        hidden: widths of the ReLU layers; () leaves a linear layer, or nothing.
        out_features: width of a last linear layer; 0 ends after the last ReLU.
        dropout: share of each hidden layer dropped in training.
        batch_norm: normalise before each ReLU.

    Raises:
        ConfigError: a width below 1, or dropout outside [0, 1).
    """

    def __init__(
        self,
        in_features: int,
        hidden: tuple[int, ...],
        *,
        out_features: int = 0,
        dropout: float = 0.0,
        batch_norm: bool = False,
    ) -> None:
        if min((in_features, *hidden)) < 1 or out_features < 0 or not 0 <= dropout < 1:
            raise ConfigError(
                "(in_features, hidden, out_features, dropout) of an MLP",
                got=(in_features, hidden, out_features, dropout),
                allowed="widths of at least 1 (out_features 0 or more), dropout in [0, 1)",
                remedy="Leave a layer out rather than giving it no width.",
            )
        super().__init__()
        width = in_features
        for size in hidden:
            self.append(_linear(width, size, "relu"))
            if batch_norm:
                self.append(nn.BatchNorm1d(size))
            self.append(nn.ReLU())
            if dropout:
                self.append(nn.Dropout(dropout))
            width = size
        if out_features:
            self.append(_linear(width, out_features, "linear"))
            width = out_features
        self.out_features = width


def _linear(in_features: int, out_features: int, then: str) -> nn.Linear:
    layer = nn.Linear(in_features, out_features)
    nn.init.kaiming_normal_(layer.weight, nonlinearity=then)  # type: ignore[arg-type]
    nn.init.zeros_(layer.bias)
    return layer


def _shape_error(what: str, got: object, allowed: str) -> ShapeError:
    remedy = "Build the model with the widths of its data."
    return ShapeError(f"shape of {what}", got=got, allowed=allowed, remedy=remedy)
