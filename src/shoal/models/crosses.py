"""Crosses: DCN-v2 (Wang et al. 2021), DLRM (Naumov et al. 2019), DLRM-DCNv2 (MLPerf)."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral
from typing import ClassVar

import torch
from torch import Tensor, nn

from shoal.errors import ConfigError, all_of_kind
from shoal.models.mlp import MLP, Deep, Inputs, Widths, in_autocast

LowRank = int | tuple[int, int] | None
"""Of crosses: rank, or (rank, experts) of a mixture, or None for full matrices."""


class CrossNetwork(nn.Module):
    """Full-matrix crosses: x' = x0 * (W x + b) + x, [B, X] -> [B, X].

    Args:
        width: X.
        layers: crosses, one degree each.

    Raises:
        ConfigError: either is below 1.
    """

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        _require_positive("(width, layers)", (width, layers))
        self.layers = nn.ModuleList(_linear(width, width) for _ in range(layers))

    def forward(self, inputs_BX: Tensor) -> Tensor:
        """Crossed inputs [B, X]."""
        x_BX = inputs_BX = in_autocast(inputs_BX)
        for layer in self.layers:
            x_BX = inputs_BX * layer(x_BX) + x_BX
        return x_BX


class LowRankCrossNetwork(nn.Module):
    """Low-rank crosses: x' = x0 * (U (V x) + b) + x, [B, X] -> [B, X]; those of MLPerf.

    Args:
        width: X.
        layers: crosses, one degree each.
        rank: rows of V.

    Raises:
        ConfigError: any is below 1.
    """

    def __init__(self, width: int, layers: int, rank: int) -> None:
        super().__init__()
        _require_positive("(width, layers, rank)", (width, layers, rank))
        self.down = nn.ModuleList(_linear(width, rank, bias=False) for _ in range(layers))
        self.up = nn.ModuleList(_linear(rank, width) for _ in range(layers))

    def forward(self, inputs_BX: Tensor) -> Tensor:
        """Crossed inputs [B, X]."""
        x_BX = inputs_BX = in_autocast(inputs_BX)
        for down, up in zip(self.down, self.up, strict=True):
            x_BX = inputs_BX * up(down(x_BX)) + x_BX
        return x_BX


class CrossMixture(nn.Module):
    """Low-rank crosses, mixed over experts E: x' = sum_e g_e(x) E_e(x) + x, [B, X] -> [B, X].

    E_e(x) = x0 * (U_e tanh(C_e tanh(V_e^T x)) + b), and g is a softmax over a linear gate.

    Args:
        width: X.
        layers: crosses, one degree each.
        rank: width R of the low-rank space.
        experts: E.

    Raises:
        ConfigError: any is below 1.
    """

    def __init__(self, width: int, layers: int, *, rank: int, experts: int = 4) -> None:
        super().__init__()
        _require_positive("(width, layers, rank, experts)", (width, layers, rank, experts))
        self.down = _weights(layers, experts, rank, width)
        self.core = _weights(layers, experts, rank, rank)
        self.up = _weights(layers, experts, width, rank)
        self.bias = nn.Parameter(torch.zeros(layers, width))
        self.gates = nn.ModuleList(nn.Linear(width, experts, bias=False) for _ in range(layers))

    def forward(self, inputs_BX: Tensor) -> Tensor:
        """Crossed inputs [B, X]."""
        x_BX = inputs_BX = in_autocast(inputs_BX)
        for index, gate in enumerate(self.gates):
            low_BER = torch.einsum("bx,erx->ber", x_BX, self.down[index]).tanh()
            low_BER = torch.einsum("ber,eqr->beq", low_BER, self.core[index]).tanh()
            gate_BE = gate(x_BX).softmax(dim=1)
            # the gates sum to 1, so the experts' shared bias stays outside the mixture
            mixed_BX = torch.einsum("be,ber,exr->bx", gate_BE, low_BER, self.up[index])
            bias_X = self.bias[index].to(mixed_BX.dtype)
            x_BX = inputs_BX * (mixed_BX + bias_X) + x_BX
        return x_BX


def cross_network(width: int, layers: int, low_rank: LowRank) -> nn.Module:
    """Crosses with full matrices, of a rank, or of (rank, experts).

    Args:
        width: columns in and out.
        layers: crosses, one after the other.
        low_rank: None, a rank, or (rank, experts).

    Raises:
        ConfigError: a number below 1.
    """
    if low_rank is None:
        return CrossNetwork(width, layers)
    if isinstance(low_rank, int):
        return LowRankCrossNetwork(width, layers, low_rank)
    rank, experts = low_rank
    return CrossMixture(width, layers, rank=rank, experts=experts)


class DCN(nn.Module):
    """Crosses and an MLP in parallel over dense features and embeddings, joined linearly.

    Args:
        inputs: (num_dense, num_features, dim).
        cross_layers: crosses.
        low_rank: rank, or (rank, experts) of a `CrossMixture`; None is a `CrossNetwork`.
        hidden: widths of the deep part; () leaves it out.
        dropout, batch_norm: as `MLP`.
    """

    def __init__(
        self,
        inputs: Widths,
        *,
        cross_layers: int = 3,
        low_rank: LowRank = None,
        hidden: tuple[int, ...] = (512, 256),
        dropout: float = 0.0,
        batch_norm: bool = False,
    ) -> None:
        super().__init__()
        self._inputs = Inputs(*inputs).require()
        width = self._inputs.width
        self.cross = cross_network(width, cross_layers, low_rank)
        self.deep = MLP(width, hidden, dropout=dropout, batch_norm=batch_norm) if hidden else None
        self.head = MLP(width + (hidden[-1] if hidden else 0), (), out_features=1)

    def forward(
        self, dense_B: Tensor | None, embeddings_BFD: Tensor, first_order_BF: Tensor | None = None
    ) -> Tensor:
        """Logits [B]; first-order weights [B, F], if any, are added.

        Raises:
            ShapeError: a shape differs.
        """
        self._inputs.check(dense_B, embeddings_BFD, first_order_BF)
        flat_BX = self._inputs.flatten(dense_B, embeddings_BFD)
        features_BY = self.cross(flat_BX)
        if self.deep is not None:
            features_BY = torch.cat([features_BY, self.deep(flat_BX)], dim=1)
        logits_B: Tensor = self.head(features_BY).squeeze(1)
        return logits_B if first_order_BF is None else logits_B + first_order_BF.sum(dim=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class DcnSettings(Deep):
    """Cross network (DCN-v2) next to a deep part; `low_rank` is a rank, or (rank, experts)."""

    kind: ClassVar[str] = "dcn"
    cross_layers: int = 3
    low_rank: LowRank = None

    def build(self, inputs: Inputs) -> nn.Module:
        """A `DCN`."""
        return DCN(
            inputs,
            cross_layers=self.cross_layers,
            low_rank=self.low_rank,
            hidden=self.hidden,
            **self.layers,
        )


def dot_interaction(vectors_BFD: Tensor) -> Tensor:
    """Dot product of each pair of vectors, [B, F(F-1)/2]; pair order (1,0), (2,0), (2,1), ..."""
    count = vectors_BFD.shape[1]
    dots_BFF = vectors_BFD @ vectors_BFD.transpose(1, 2)
    rows, columns = torch.tril_indices(count, count, offset=-1, device=vectors_BFD.device)
    return dots_BFF[:, rows, columns]


class DLRM(nn.Module):
    """A bottom MLP maps dense features to a vector; a top MLP reads it and all dot products.

    With `cross_layers` the top reads crosses of the vector and all embeddings instead, as in
    MLPerf's DLRM-DCNv2.

    Args:
        inputs: (num_dense, num_features, dim). Without dense features there is no bottom, and
            the top reads dot products only (then F is 2 or more).
        bottom: widths before the bottom's last layer, which is D wide.
        top: hidden widths of the top.
        cross_layers: crosses; 0: dot products.
        low_rank: of the crosses, as `cross_network` takes it.
        dropout, batch_norm: as `MLP`, in both.
    """

    def __init__(
        self,
        inputs: Widths,
        *,
        bottom: tuple[int, ...] = (512, 256),
        top: tuple[int, ...] = (1024, 1024, 512, 256),
        cross_layers: int = 0,
        low_rank: LowRank = None,
        dropout: float = 0.0,
        batch_norm: bool = False,
    ) -> None:
        super().__init__()
        self._inputs = Inputs(*inputs).require()
        num_dense, num_features, dim = self._inputs[:3]
        self.bottom = None
        width, vectors = 0, num_features
        if num_dense:
            widths = (*bottom, dim)
            self.bottom = MLP(num_dense, widths, dropout=dropout, batch_norm=batch_norm)
            width, vectors = dim, num_features + 1
        self.cross = None
        if cross_layers:
            width = vectors * dim
            self.cross = cross_network(width, cross_layers, low_rank)
        else:
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
        vectors_BFD, known = embeddings_BFD, []
        if self.bottom is not None:
            known = [self.bottom(dense_B)]
            vectors_BFD = torch.cat([known[0].unsqueeze(1), in_autocast(embeddings_BFD)], dim=1)
        if self.cross is None:
            features_BX = torch.cat([*known, dot_interaction(vectors_BFD)], dim=1)
        else:
            features_BX = self.cross(vectors_BFD.flatten(1))
        logits_B: Tensor = self.top(features_BX).squeeze(1)
        return logits_B if first_order_BF is None else logits_B + first_order_BF.sum(dim=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class DlrmSettings(Deep):
    """Dots of embeddings and of a dense vector, which `bottom` makes; `hidden` are on top.

    With `cross_layers` crosses of `low_rank` take the place of dots: DLRM-DCNv2.
    """

    kind: ClassVar[str] = "dlrm"
    bottom: tuple[int, ...] = (64,)
    cross_layers: int = 0
    low_rank: LowRank = None

    def build(self, inputs: Inputs) -> nn.Module:
        """A `DLRM`."""
        return DLRM(
            inputs,
            bottom=self.bottom,
            top=self.hidden,
            cross_layers=self.cross_layers,
            low_rank=self.low_rank,
            **self.layers,
        )


def _linear(width: int, out: int, *, bias: bool = True) -> nn.Linear:
    layer = nn.Linear(width, out, bias=bias)
    nn.init.xavier_normal_(layer.weight)
    if bias:
        nn.init.zeros_(layer.bias)
    return layer


def _weights(layers: int, experts: int, rows: int, columns: int) -> nn.Parameter:
    weights = torch.empty(layers, experts, rows, columns)
    for matrix in weights.view(-1, rows, columns):
        nn.init.xavier_normal_(matrix)
    return nn.Parameter(weights)


def _require_positive(what: str, values: tuple[int, ...]) -> None:
    if min(all_of_kind(what, values, Integral)) < 1:
        remedy = "Leave crosses out by using an MLP alone."
        raise ConfigError(what, got=values, allowed="1 or more each", remedy=remedy)
