"""Ranks of evaluation examples' items among all known ones: of vectors, or found down a tree."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.data import Batch
from shoal.data.catalog import SECTION, Catalog
from shoal.data.item_tree import ItemTree
from shoal.data.samplers import one_each
from shoal.metrics import NOT_FOUND, item_ranks, ranking_figures
from shoal.train.learner import Learner
from shoal.train.ranks import Ranks

_MOST_SCORES = 1 << 24
_MOST_NODES = 1 << 16


class Retrieval:
    """Gathers ranks batch by batch; examples with label 0 have no item to find.

    Over several ranks calls are collective: each has the same number of batches.

    Args:
        learner: the model; as it is when the first batch comes.
        catalog: the items.
        most: examples of a batch of this rank, at most.
        ranks: who evaluates together.
    """

    def __init__(self, learner: Learner, catalog: Catalog, most: int, ranks: Ranks) -> None:
        self._learner, self._catalog, self._ranks = learner, catalog, ranks
        self._most = most
        self._items_IE: Tensor | None = None
        self._found: list[Tensor] = []

    def add(self, batch: Batch) -> None:
        """Rank the items of a batch's positive examples."""
        positive_P = torch.nonzero(batch.labels > 0).squeeze(1)
        if self._catalog.tree is None:
            self._found.append(self._ranked(batch, positive_P))
        else:
            self._found.append(self._searched(self._catalog.tree, batch, positive_P.numpy()))

    def figures(self) -> dict[str, float]:
        """`ranking_figures` of all examples so far, over all ranks."""
        found_N = torch.cat(self._found)
        if self._ranks.many:
            found_N = torch.cat(self._ranks.gathered(found_N, what="ranks of items"))
        return ranking_figures(found_N, self._catalog.settings.k)

    def _ranked(self, batch: Batch, positive_P: Tensor) -> Tensor:
        if self._items_IE is None:
            blocks = range(0, len(self._catalog), self._most)
            parts = [self._catalog.batch(at, at + self._most, batch) for at in blocks]
            self._items_IE = torch.cat([self._learner.vectors(part)[1] for part in parts])
        users_PE = self._learner.vectors(batch)[0][positive_P.to(self._items_IE.device)]
        own_P = self._catalog.places(batch)[positive_P]
        size = max(1, _MOST_SCORES // len(self._items_IE))
        return torch.cat(
            [
                item_ranks(users_SE @ self._items_IE.T, own_S.to(users_SE.device)).cpu()
                for users_SE, own_S in zip(
                    torch.split(users_PE, size), torch.split(own_P, size), strict=True
                )
            ]
        )

    def _searched(self, tree: ItemTree, batch: Batch, positive_P: Any) -> Tensor:
        beam = self._catalog.settings.beam
        own_P = one_each(batch.ids, self._catalog.id, SECTION)[positive_P]
        ranks_P = np.full(positive_P.size, NOT_FOUND)
        # Searches are collective calls: as many on every rank.
        size = max(1, _MOST_NODES // (beam * tree.branch))
        for low in range(0, self._most if self._ranks.many else positive_P.size, size):
            rows_S, own_S = positive_P[low : low + size], own_P[low : low + size]

            def score(at_M: Any, ids_M: Any, rows_S: Any = rows_S) -> Any:
                made = tree.with_nodes(batch, rows_S[at_M], ids_M)
                found = self._learner.logits(made).cpu()
                return (found if found.ndim == 1 else found[:, 0]).numpy()

            leaves = tree.beam_search(score, rows_S.size, beam)
            hit_M = leaves.ids_M == own_S[leaves.rows_M]
            hits = leaves.rows_M[hit_M]
            score_S = np.full(rows_S.size, np.nan, np.float32)
            score_S[hits] = leaves.scores_M[hit_M]
            # As in `item_ranks`: also equal scores and NaN are ahead.
            ahead_M = ~(leaves.scores_M < score_S[leaves.rows_M])
            counts_S = np.bincount(leaves.rows_M[ahead_M], minlength=rows_S.size)
            ranks_P[low + hits] = counts_S[hits]
        return torch.from_numpy(ranks_P)
