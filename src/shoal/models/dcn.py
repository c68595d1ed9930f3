"""DCN-v2 (Wang et al. 2021): explicit crosses of bounded degree, next to a deep part."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shoal.errors import ConfigError
from shoal.models.mlp import MLP, Inputs


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
        self.layers = nn.ModuleList(_square(width) for _ in range(layers))

    def forward(self, inputs_BX: Tensor) -> Tensor:
        """Crossed inputs [B, X]."""
        x_BX = inputs_BX
        for layer in self.layers:
            x_BX = inputs_BX * layer(x_BX) + x_BX
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
        x_BX = inputs_BX
        for index, gate in enumerate(self.gates):
            low_BER = torch.einsum("bx,erx->ber", x_BX, self.down[index]).tanh()
            low_BER = torch.einsum("ber,eqr->beq", low_BER, self.core[index]).tanh()
            gate_BE = gate(x_BX).softmax(dim=1)
            # the gates sum to 1, so the experts' shared bias stays outside the mixture
            mixed_BX = torch.einsum("be,ber,exr->bx", gate_BE, low_BER, self.up[index])
            x_BX = inputs_BX * (mixed_BX + self.bias[index]) + x_BX
        return x_BX


class DCN(nn.Module):
    """Crosses and an MLP in parallel over dense features and embeddings, joined linearly.

    Args:
        inputs: (num_dense, num_features, dim).
        cross_layers: crosses.
        low_rank: (rank, experts) of a `CrossMixture`; None is a `CrossNetwork`.
        hidden: widths of the deep part; () leaves it out.
        dropout, batch_norm: as `MLP`.
    """

    def __init__(
        self,
        inputs: tuple[int, int, int],
        *,
        cross_layers: int = 3,
        low_rank: tuple[int, int] | None = None,
        hidden: tuple[int, ...] = (512, 256),
        dropout: float = 0.0,
        batch_norm: bool = False,
    ) -> None:
        super().__init__()
        self._inputs = Inputs(*inputs).require()
        width = self._inputs.width
        self.cross: nn.Module
        if low_rank is None:
            self.cross = CrossNetwork(width, cross_layers)
        else:
            rank, experts = low_rank
            self.cross = CrossMixture(width, cross_layers, rank=rank, experts=experts)
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


def _square(width: int) -> nn.Linear:
    layer = nn.Linear(width, width)
    nn.init.xavier_normal_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


def _weights(layers: int, experts: int, rows: int, columns: int) -> nn.Parameter:
    weights = torch.empty(layers, experts, rows, columns)
    for matrix in weights.view(-1, rows, columns):
        nn.init.xavier_normal_(matrix)
    return nn.Parameter(weights)


def _require_positive(what: str, values: tuple[int, ...]) -> None:
    if min(values) < 1:
        remedy = "Leave crosses out by using an MLP alone."
        raise ConfigError(what, got=values, allowed="1 or more each", remedy=remedy)
