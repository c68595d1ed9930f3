"""Hit rates of items, by hand: of vectors, and of leaves that a search finds."""

from __future__ import annotations

import math
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from shoal.data import Batch, TensorSource
from shoal.data.catalog import Catalog, RetrievalSettings
from shoal.data.item_tree import ItemTree, TreeSettings
from shoal.errors import ConfigError, DataError
from shoal.train import retrieval
from shoal.train.learner import Learner
from shoal.train.ranks import ALONE
from shoal.train.retrieval import Retrieval

# Products with user 1 are 1, 2, 3, 4; with user 2 they are 4, 3, 2, 1.
ITEMS = {10: (1.0, 4.0), 11: (2.0, 3.0), 12: (3.0, 2.0), 13: (4.0, 1.0)}
USERS = {1: (1.0, 0.0), 2: (0.0, 1.0)}
KNOWN = TensorSource({"item": torch.tensor(list(ITEMS))}, torch.zeros(len(ITEMS)))


def examples(users: list[int], items: list[int], labels: list[float]) -> Batch:
    source = TensorSource(
        {"user": torch.tensor(users), "item": torch.tensor(items)}, torch.tensor(labels)
    )
    return source.take(torch.arange(len(users)))


class Model:
    """Vectors by id, and scores that are products of them."""

    def vectors(self, batch: Batch) -> Tensor:
        users = [
            USERS.get(own[0] if own else 0, (0.0, 0.0)) for own in batch.ids["user"].to_lists()
        ]
        items = [ITEMS.get(own[0], (9.0, 9.0)) for own in batch.ids["item"].to_lists()]
        return torch.tensor([users, items])

    def logits(self, batch: Batch) -> Tensor:
        """Of an inner node the best of the items below it."""
        below = {-1: [10, 11, 12, 13], -2: [10, 11], -3: [12, 13]}
        users = batch.ids["user"].values.tolist()
        nodes = batch.ids["item"].values.tolist()
        return torch.tensor(
            [
                max(np.dot(USERS[user], ITEMS[one]) for one in below.get(node, [node])) / 10
                for user, node in zip(users, nodes, strict=True)
            ],
            dtype=torch.float32,
        )


class Constant(Model):
    def logits(self, batch: Batch) -> Tensor:
        return torch.zeros(batch.labels.numel())


def figures(catalog: Catalog, *batches: Batch, model: Any = None) -> dict[str, float]:
    made = Retrieval(cast(Learner, model or Model()), catalog, 3, ALONE)
    for batch in batches:
        made.add(batch)
    return made.figures()


# Ranks: 12 of user 1 is second, 13 first; 13 of user 2 fourth; 99 is unknown; label 0 is no item.
BATCHES = (
    examples([1, 1, 2], [12, 13, 13], [1.0, 1.0, 1.0]),
    examples([2, 1], [99, 10], [1.0, 0.0]),
)
WANTED = {
    "hit_rate@1": 1 / 4,
    "ndcg@1": 1 / 4,
    "hit_rate@2": 2 / 4,
    "ndcg@2": (1 + 1 / math.log2(3)) / 4,
}


@pytest.mark.parametrize("most_scores", [1, 1 << 24])
def test_items_are_ranked_by_vectors(monkeypatch: Any, most_scores: int) -> None:
    monkeypatch.setattr(retrieval, "_MOST_SCORES", most_scores)
    catalog = Catalog(RetrievalSettings(k=(1, 2)), KNOWN, "item")
    assert figures(catalog, *BATCHES) == pytest.approx(WANTED)


@pytest.mark.parametrize("most_nodes", [1, 1 << 16])
def test_items_are_found_down_a_tree(monkeypatch: Any, most_nodes: int) -> None:
    monkeypatch.setattr(retrieval, "_MOST_NODES", most_nodes)
    settings = TreeSettings(id="item", counts=(0, 1))
    tree = ItemTree.of_items(KNOWN, settings, rows=torch.arange(4))
    # Wide enough to find all.
    catalog = Catalog(RetrievalSettings(k=(1, 2), width=4), tree, "item")
    assert figures(catalog, *BATCHES) == pytest.approx(WANTED)
    # A beam of one node goes down to 12 and 13 for user 1, and then keeps 13.
    narrow = Catalog(RetrievalSettings(k=(1,)), tree, "item")
    assert figures(narrow, *BATCHES)["hit_rate@1"] == 1 / 4


def test_of_equal_scores_the_own_item_is_the_last() -> None:
    tree = ItemTree.of_items(KNOWN, TreeSettings(id="item", counts=(0, 1)), rows=torch.arange(4))
    settings = RetrievalSettings(k=(1, 3, 4), width=4)
    found = figures(Catalog(settings, tree, "item"), *BATCHES, model=Constant())
    assert [found[f"hit_rate@{k}"] for k in (1, 3, 4)] == [0, 0, 3 / 4]


def test_what_does_not_fit_is_named() -> None:
    for k in ((), (0,), (1 << 21,)):
        with pytest.raises(ConfigError, match=r"k of eval\.retrieval"):
            RetrievalSettings(k=k)
    with pytest.raises(ConfigError, match=r"width of eval\.retrieval: got 5"):
        RetrievalSettings(k=(10,), width=5)
    twice = TensorSource({"item": torch.tensor([1, 1])}, torch.zeros(2))
    with pytest.raises(DataError, match="id 1 of known items"):
        Catalog(RetrievalSettings(), twice, "item")
