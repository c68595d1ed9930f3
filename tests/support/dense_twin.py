"""A dense model that a sparse one must equal: plain matrices, a mask of touched rows, autograd."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from shoal.embedding.layouts import Feature
from shoal.ragged import KeyedRagged
from shoal.rules.optimizers import RuleContext
from shoal.table.spec import TableSpec

__all__ = ["DenseTwin"]


class DenseTwin(nn.Module):
    """One matrix [V, D] per table; row v stands for id `vocabulary[v]`.

    `step` moves the rows of ids seen since the last step by the rules' reference arithmetic and
    leaves the others, with their state, where they are.
    """

    def __init__(
        self,
        specs: Sequence[TableSpec],
        features: Sequence[Feature],
        vocabulary: Sequence[int],
        start: Mapping[str, Tensor],
    ) -> None:
        super().__init__()
        self.specs = {spec.name: spec for spec in specs}
        self.features = features
        self.rows = {id_: v for v, id_ in enumerate(vocabulary)}
        self.weights = nn.ParameterDict({name: rows.clone() for name, rows in start.items()})
        self.state = {
            spec.name: torch.cat(
                [s.optimizer.init_state(s.dim, dtype=torch.float64) for s in spec.segments]
            ).repeat(len(vocabulary), 1)
            for spec in specs
        }
        self.touched = {spec.name: set[int]() for spec in specs}

    def forward(self, batch: KeyedRagged) -> dict[str, Tensor]:
        return {feature.name: self._pooled(feature, batch) for feature in self.features}

    def _pooled(self, feature: Feature, batch: KeyedRagged) -> Tensor:
        weights = batch.weights_of(feature.name)
        scales = torch.ones(0) if weights is None else weights.double()
        matrix, bags, at = self.weights[feature.table], [], 0
        for ids in batch[feature.name].to_lists():
            rows = [self.rows[id_] for id_ in ids]
            self.touched[feature.table].update(rows)
            taken = matrix[torch.tensor(rows, dtype=torch.int64)]
            if weights is not None:
                taken = taken * scales[at : at + len(rows), None]
            at += len(rows)
            bags.append(self._bag(feature, taken))
        return torch.stack(bags)

    def _bag(self, feature: Feature, taken: Tensor) -> Tensor:
        if feature.combiner.pooling == "first_n":
            length = feature.combiner.max_seq_length
            padding = taken.new_zeros(length, taken.shape[1])
            return torch.cat([taken, padding])[:length]
        total = taken.sum(dim=0)
        return total / max(len(taken), 1) if feature.combiner.pooling == "mean" else total

    def forget(self) -> None:
        for name, weight in self.weights.items():
            weight.grad = None
            self.touched[name].clear()

    @torch.no_grad()
    def step(self, global_step: int) -> None:
        for name, weight in self.weights.items():
            rows = torch.tensor(sorted(self.touched[name]), dtype=torch.int64)
            grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
            at = state_at = 0
            for segment in self.specs[name].segments:
                rule = segment.optimizer
                width = rule.state_width(segment.dim)
                columns = slice(at, at + segment.dim)
                own = slice(state_at, state_at + width)
                weight[rows, columns], self.state[name][rows, own] = rule.step(
                    weight[rows, columns],
                    self.state[name][rows, own],
                    grad[rows, columns],
                    rule.rate(global_step),
                    RuleContext(global_step=global_step),
                )
                at, state_at = at + segment.dim, state_at + width
        self.forget()
