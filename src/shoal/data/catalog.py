"""Known items, which the items of examples are ranked among: a table of them, or a tree."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shoal.data.batch import Batch, TensorSource
from shoal.data.item_tree import ItemTree
from shoal.data.samplers import IdPlaces, filled, one_each
from shoal.errors import ConfigError

SECTION = "eval.retrieval"


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrievalSettings:
    """How examples' items are ranked in an evaluation.

    Args:
        k: of hit rate at k and NDCG at k.
        items: file with a row for each known item; None: that of the sampler. Of a tree, its
            leaves are the items.
        width: nodes of a layer that a search of a tree keeps for an example; None: the largest k.

    Raises:
        ConfigError: no k, one below 1, or a width below one.
    """

    k: tuple[int, ...] = (10, 100)
    items: str | None = None
    width: int | None = None

    def __post_init__(self) -> None:
        what, remedy = f"of {SECTION}", "Change the setting."
        if not self.k or min(self.k) < 1 or max(self.k) > 1 << 20:
            raise ConfigError(f"k {what}", list(self.k), f"1..{1 << 20}, one or more", remedy)
        if self.width is not None and not max(self.k) <= self.width <= 1 << 20:
            allowed = f"{max(self.k)} (the largest k) to {1 << 20}"
            raise ConfigError(f"width {what}", self.width, allowed, remedy)

    @property
    def beam(self) -> int:
        """Nodes of a layer that a search keeps."""
        return self.width or max(self.k)


class Catalog:
    """Known items.

    Args:
        settings: how they are ranked.
        known: one example for each item, or a tree with items as leaves.
        id: the feature that identifies items.

    Attributes:
        tree: of items; None: they are a table.

    Raises:
        DataError: an id twice.
        InputError: an item without one id.
    """

    def __init__(
        self, settings: RetrievalSettings, known: TensorSource | ItemTree, id: str
    ) -> None:
        self.settings, self.id = settings, id
        self.tree = known if isinstance(known, ItemTree) else None
        self._items = None if isinstance(known, ItemTree) else known
        if self._items is not None:
            every = self._items.take(torch.arange(len(self._items), device="cpu")).ids
            self._places = IdPlaces(one_each(every, id, SECTION), "known items")

    def __len__(self) -> int:
        """Items of a table."""
        return 0 if self._items is None else len(self._items)

    def places(self, batch: Batch) -> torch.Tensor:
        """int64 [B]: where the items of examples are in the table; -1: nowhere."""
        return torch.from_numpy(self._places.of(one_each(batch.ids, self.id, SECTION)))

    def batch(self, start: int, stop: int, like: Batch) -> Batch:
        """Items of the table as examples with the features of others; what they lack is empty."""
        assert self._items is not None, "a table"
        stop = min(stop, len(self))
        found = self._items.take(torch.arange(start, stop, device="cpu"))
        dense = (
            None if like.dense is None else like.dense.new_zeros(stop - start, like.dense.shape[1])
        )
        return Batch(ids=filled(found.ids, like.ids.keys), labels=found.labels, dense=dense)
