"""The rows of puzzles: one Shoal table that grows as ids come, moved by the sign of gradients."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shoal import (
    EmbeddingCollection,
    Feature,
    KeyedRagged,
    Ragged,
    Segment,
    TableSpec,
    initializers,
    optimizers,
)

__all__ = ["TABLE", "PuzzleTable"]

TABLE = "puzzle"
"""Name of the table: learning rates and placements bind to it."""


class PuzzleTable(nn.Module):
    """Rows of width R, zero at first; a step changes only the rows that were looked up.

    w = w (1 - lr weight_decay) - lr sign(g), g the sum over all lookups of the id on all ranks.
    A placement decides where rows live: on every rank, or spread over ranks.

    Args:
        dim: width of a row, R.
        lr: rate of the rule, unless a `SparseOptimizer` binds another to `TABLE`.
        weight_decay: of rows that a step changes.
        expected_rows: rows to reserve memory for at the start.
        device: "cpu", "cuda" or "cuda:N".
    """

    def __init__(
        self,
        dim: int,
        *,
        lr: float = 1e-2,
        weight_decay: float = 0.1,
        expected_rows: int = 0,
        device: str = "cpu",
    ) -> None:
        super().__init__()
        segment = Segment(
            dim=dim,
            initializer=initializers.Zeros(),
            optimizer=optimizers.SignSGD(lr=lr, weight_decay=weight_decay),
        )
        spec = TableSpec(name=TABLE, segments=(segment,), expected_rows=expected_rows)
        self.rows = EmbeddingCollection([spec], [Feature(TABLE, TABLE)], device=device)

    def forward(self, puzzle_ids_B: Tensor) -> Tensor:
        """Rows of the puzzles at work, float32 [B, R]; ids without a row read as zeros."""
        edges = torch.arange(len(puzzle_ids_B) + 1, device=puzzle_ids_B.device)
        batch = KeyedRagged.from_dict({TABLE: Ragged(puzzle_ids_B, edges)})
        rows_BR: Tensor = self.rows(batch)[TABLE]
        return rows_BR
