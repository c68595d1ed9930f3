"""A tree of items (TDM, Zhu et al. 2018): training nodes of its layers, beam search down it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from shoal.data.batch import Batch, TensorSource, places_of
from shoal.data.features import Recipe
from shoal.data.samplers import (
    IdPlaces,
    Key,
    followed,
    one_each,
    ranges,
    read_ids,
    read_items,
    source_of,
)
from shoal.errors import ConfigError, DataError, InputError
from shoal.ragged import KeyedRagged

_Ints = np.ndarray[Any, np.dtype[np.int64]]
_Floats = np.ndarray[Any, np.dtype[np.float32]]

_SECTION = "data.tree"


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeSettings:
    """How nodes of a tree's layers are drawn; the root is layer 0, items are leaves.

    Args:
        id: the feature whose ids identify nodes.
        counts: negatives of an example in each layer, from the root's, which has none.
        remain_ratio: share of the layers between root and leaves that a batch trains; leaves always
            do.
        layers: how these are chosen: "uniform", or with chances in proportion to the layer's number
            ("arithmetic") or to 1 / layers from it to the leaves ("reciprocal").
        nodes: file of a tree with a row for each node, and a column of its parent.
        parent: that column.
        items: file with a row for each item, of which a tree is made: items in order, `branch` to a
            node, and so up to the root. The last of `counts` is that of all layers below it, and a
            layer with fewer nodes has all others as negatives.
        order: column that items are sorted by first: near ones share ancestors; None: as they are.
        branch: children of a node of such a tree.
        attributes: other features of a node.

    Raises:
        ConfigError: fewer than two layers, negatives of the root, a number out of range, or two
            files.
    """

    id: str
    counts: tuple[int, ...]
    remain_ratio: float = 1.0
    layers: Literal["uniform", "arithmetic", "reciprocal"] = "uniform"
    nodes: str | None = None
    parent: str = "parent"
    items: str | None = None
    order: str | None = None
    branch: int = 2
    attributes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        remedy = "Change the setting."
        if not 2 <= self.branch <= 1 << 16:
            raise ConfigError("branch of a tree", self.branch, f"2..{1 << 16}", remedy)
        if self.nodes is not None and self.items is not None:
            got = f"{self.nodes} and {self.items}"
            raise ConfigError("nodes and items of a tree", got, "one of them", remedy)
        if len(self.counts) < 2 or self.counts[0] != 0 or min(self.counts) < 0:
            allowed = "0 for the root, then 0 or more for each layer below"
            raise ConfigError("counts of a tree", list(self.counts), allowed, remedy)
        if not 0 <= self.remain_ratio <= 1:
            raise ConfigError("remain_ratio of a tree", self.remain_ratio, "0..1", remedy)
        if self.layers not in ("uniform", "arithmetic", "reciprocal"):
            allowed = "uniform, arithmetic, reciprocal"
            raise ConfigError("layers of a tree", self.layers, allowed, remedy)

    @property
    def chances(self) -> _Floats:
        """Of the layers between root and leaves to be chosen first."""
        between = len(self.counts) - 2
        own = {
            "uniform": np.ones(between),
            "arithmetic": np.arange(1.0, between + 1),
            "reciprocal": 1.0 / np.arange(between, 0, -1),
        }[self.layers]
        chances: _Floats = own / own.sum()
        return chances


class TreeNodes(NamedTuple):
    """M nodes: of which example each is, int64 [M], ascending, ids [M], labels 1 or 0, layers."""

    rows_M: _Ints
    ids_M: _Ints
    labels_M: _Floats
    layers_M: _Ints


class Leaves(NamedTuple):
    """Leaves that a search found: of which example, ids and scores, best first in each example."""

    rows_M: _Ints
    ids_M: _Ints
    scores_M: _Floats


class ItemTree:
    """Nodes of a tree, each with the features that items have.

    Args:
        nodes: one example for each node; inner nodes have ids of their own.
        parents: int64 [nodes], ids of their parents; the root's is its own.
        settings: what is drawn.
        seed: of all draws.

    Raises:
        DataError: an id twice, an unknown parent, no root or several, nodes in a circle, a leaf
            that is not in the last layer.
        ConfigError: counts of other layers, or of more nodes than a layer has.
    """

    def __init__(
        self, nodes: TensorSource, parents: _Ints, settings: TreeSettings, *, seed: int = 0
    ) -> None:
        self._nodes, self._settings, self._seed = nodes, settings, seed
        every = nodes.take(torch.arange(len(nodes), device="cpu")).ids
        self._ids = one_each(every, settings.id, _SECTION)
        self._places = IdPlaces(self._ids, "tree")
        self._parents = self._places.of(parents)
        if (self._parents < 0).any():
            at = np.flatnonzero(self._parents < 0)[0]
            got = f"no node {parents[at]}"
            raise DataError(f"parent of node {self._ids[at]}", got, "a node", "Add the node.")
        roots = np.flatnonzero(self._parents == np.arange(self._ids.size))
        if roots.size != 1:
            what, allowed = "nodes that are their own parents", "one, the root"
            raise DataError(what, self._ids[roots].tolist(), allowed, "Correct the parents.")
        self._root = roots[0]
        children = np.setdiff1d(np.argsort(self._parents, kind="stable"), roots)
        self._children = children[np.argsort(self._parents[children], kind="stable")]
        counts = np.bincount(self._parents[children], minlength=self._ids.size)
        self._counts: _Ints = counts
        self._starts: _Ints = np.cumsum(counts) - counts
        self._layers = self._found_layers()
        self._check_layers()

    @classmethod
    def open(cls, settings: TreeSettings, recipe: Recipe, *, seed: int = 0) -> ItemTree:
        """Read a file of nodes, or make a tree of one of items; Parquet or CSV.

        The parents' column becomes ids as nodes do. Inner nodes of a tree that is made have the
        ids -1, -2, ... from the root on, and no attributes.

        Raises:
            DataError: a file that is missing, damaged, lacks a column, or as above; fewer than two
                items.
            ConfigError: ids of nodes that are made of several columns, or no file.
        """
        names = (settings.id, *settings.attributes)
        if settings.nodes is not None:
            nodes, _, _ = read_items(settings.nodes, recipe, names, None, _SECTION)
            parents = read_ids(settings.nodes, recipe, settings.id, settings.parent, _SECTION)
            return cls(nodes, parents, settings, seed=seed)
        if settings.items is None:
            remedy = "Name the file."
            raise ConfigError("file of a tree", "none", "nodes or items", remedy)
        items, column, _ = read_items(settings.items, recipe, names, settings.order, _SECTION)
        rows = list(range(len(items)))
        if column is not None:
            keys = column.to_pylist()
            try:
                rows.sort(key=lambda row: (keys[row] is not None, keys[row]))
            except TypeError as error:
                what = f"column {settings.order!r} of {settings.items}"
                got, remedy = f"{column.type} ({error})", f"Set {_SECTION}.order to another column."
                allowed = "numbers, times, text, lists of them without nulls inside"
                raise DataError(what, got, allowed, remedy) from error
        return cls.of_items(items, settings, rows=torch.tensor(rows, device="cpu"), seed=seed)

    @classmethod
    def of_items(
        cls, items: TensorSource, settings: TreeSettings, *, rows: torch.Tensor, seed: int = 0
    ) -> ItemTree:
        """Make a tree of items.

        Args:
            items: one example for each.
            settings: as they say; all leaves are in the last layer.
            rows: int64 [items], their numbers in the order of the leaves.
            seed: of all draws.

        Raises:
            DataError: fewer than two items, an id twice, or one that an inner node has.
            ConfigError: more counts than layers.
        """
        if len(items) < 2:
            remedy = "Check what wrote the file."
            raise DataError("items of a tree", len(items), "two or more", remedy)
        sizes = [len(items)]
        while sizes[-1] > 1:
            sizes.append(-(-sizes[-1] // settings.branch))
        sizes.reverse()
        if len(settings.counts) > len(sizes):
            allowed = f"{len(sizes)} at most, for layers of {sizes} nodes"
            remedy = f"Leave the last out of {_SECTION}.counts."
            raise ConfigError("counts of a tree", list(settings.counts), allowed, remedy)
        starts = np.cumsum([0, *sizes[:-1]])
        parents = [
            -1 - (start + np.arange(below) // settings.branch)
            for start, below in zip(starts, sizes[1:], strict=False)
        ]
        leaves = items.take(rows).ids
        ids = one_each(leaves, settings.id, _SECTION)
        taken = ids[(ids < 0) & (ids >= -starts[-1])]
        if taken.size:
            allowed = f"none of {-starts[-1]}..-1, which inner nodes have"
            remedy = f"Number items from 0 on, or name a file of {_SECTION}.nodes."
            raise DataError("id of an item of a tree", taken[0], allowed, remedy)
        inner = torch.arange(-1, -1 - int(starts[-1]), -1, device="cpu")
        more = KeyedRagged.from_lengths((settings.id,), inner, torch.ones_like(inner).view(1, -1))
        nodes = followed(leaves, more)
        counts = [
            min(settings.counts[min(layer, len(settings.counts) - 1)], size - 1)
            for layer, size in enumerate(sizes)
        ]
        return cls(
            source_of(nodes),
            np.concatenate([parents[-1], [-1], *parents[:-1]]),
            replace(settings, counts=tuple(counts)),
            seed=seed,
        )

    @property
    def id(self) -> str:
        """The feature whose ids identify nodes."""
        return self._settings.id

    @property
    def branch(self) -> int:
        """Children of a node, at most."""
        return int(self._counts.max())

    def _found_layers(self) -> list[_Ints]:
        """Places of the nodes of each layer, ascending."""
        layers = [np.array([self._root])]
        while (below := self._below(layers[-1])[1]).size:
            layers.append(np.sort(below))
        reached = np.concatenate(layers)
        if reached.size < self._ids.size:
            lost = np.setdiff1d(np.arange(self._ids.size), reached)
            got = f"{lost.size} in circles, {self._ids[lost[0]]} first"
            raise DataError("nodes below the root", got, "all", "Correct the parents.")
        return layers

    def _check_layers(self) -> None:
        counts, sizes = self._settings.counts, [layer.size for layer in self._layers]
        if len(counts) != len(sizes) or (np.array(counts) >= sizes).any():
            allowed = f"for layers of {sizes} nodes, fewer than these"
            remedy = "Change counts, or the tree."
            raise ConfigError("counts of a tree", list(counts), allowed, remedy)
        for number, layer in enumerate(self._layers[:-1]):
            leaves = layer[self._counts[layer] == 0]
            if leaves.size:
                got = f"{self._ids[leaves[0]]} in layer {number}"
                remedy = "Give it a line of inner nodes down to the last layer."
                raise DataError("leaf of a tree", got, f"layer {len(sizes) - 1}", remedy)

    def _below(self, places_M: _Ints) -> tuple[_Ints, _Ints]:
        counts_M = self._counts[places_M]
        at = ranges(self._starts[places_M], counts_M)
        return np.repeat(np.arange(places_M.size), counts_M), self._children[at]

    def children(self, ids_M: _Ints) -> tuple[_Ints, _Ints]:
        """(Place among `ids_M`, id) of each child of nodes; leaves have none.

        Raises:
            InputError: an id of no node.
        """
        parents, below = self._below(self._known(ids_M))
        return parents, self._ids[below]

    def sample(self, items_B: _Ints, key: Key) -> TreeNodes:
        """Nodes to train with: an item's ancestor in each layer is positive, others are negative.

        An example's negatives of a layer are distinct, and all others of the layer alike likely.

        Raises:
            InputError: an item that is no leaf.
        """
        rng = np.random.Generator(np.random.PCG64([self._seed, *key]))
        last, settings = len(self._layers) - 1, self._settings
        own_B = self._known(items_B)
        if (self._counts[own_B] > 0).any():
            got = self._ids[own_B[self._counts[own_B] > 0][0]]
            raise InputError("item of a tree", got, "a leaf", "Leave the example out.")
        between = round(settings.remain_ratio * (last - 1))
        kept = np.arange(1, last)
        if between < last - 1:
            kept = rng.choice(kept, between, replace=False, p=settings.chances)
        found: list[tuple[_Ints, _Floats, int]] = []
        rows: list[_Ints] = []
        for layer in range(last, 0, -1):
            if layer == last or layer in kept:
                nodes, count = self._layers[layer], settings.counts[layer]
                at_B1 = np.searchsorted(nodes, own_B)[:, None]
                others_BC = _distinct(own_B.size, count, nodes.size - 1, rng)
                drawn_BC = np.concatenate([at_B1, others_BC + (others_BC >= at_B1)], axis=1)
                labels = np.zeros(drawn_BC.shape, np.float32)
                labels[:, 0] = 1.0
                found.append((nodes[drawn_BC].reshape(-1), labels.reshape(-1), layer))
                rows.append(np.repeat(np.arange(own_B.size), count + 1))
            own_B = self._parents[own_B]
        layers = [np.full(places.size, layer) for places, _, layer in reversed(found)]
        rows_M = np.concatenate(rows[::-1])
        order = np.argsort(rows_M, kind="stable")
        places_M, labels_M = (np.concatenate([one[k] for one in reversed(found)]) for k in (0, 1))
        return TreeNodes(
            rows_M[order],
            self._ids[places_M.astype(np.int64)[order]],
            labels_M.astype(np.float32)[order],
            np.concatenate(layers)[order],
        )

    def expanded(self, batch: Batch, key: Key) -> Batch:
        """Examples of the nodes of a batch's positives: features of a node, and of whose it is.

        An example with label 0 leaves none. Labels are a node's times the example's, of all tasks.

        Raises:
            InputError: a batch that has items of a sampler, or an item that is no leaf.
        """
        if batch.negatives is not None:
            allowed, remedy = "examples alone", "Leave the sampler out."
            raise InputError("batch for a tree", "items of a sampler", allowed, remedy)
        positive = torch.nonzero(batch.labels > 0).squeeze(1).numpy()
        found = self.sample(one_each(batch.ids, self._settings.id, _SECTION)[positive], key)
        made = self.with_nodes(batch, positive[found.rows_M], found.ids_M)
        labels_M = torch.from_numpy(found.labels_M)
        more = made.more_labels
        return replace(
            made,
            labels=made.labels * labels_M,
            more_labels=None if more is None else more * labels_M.unsqueeze(1),
        )

    def with_nodes(self, batch: Batch, rows_M: _Ints, ids_M: _Ints) -> Batch:
        """Examples of a batch by number, each with the features of a node in place of its item's.

        Raises:
            InputError: an id of no node.
        """
        nodes = self._nodes.take(torch.from_numpy(self._known(ids_M))).ids
        ids, taken = batch.ids, {}
        for name in ids.keys:
            source, rows = (nodes, np.arange(rows_M.size)) if name in nodes.keys else (ids, rows_M)
            at_N, lengths_M = places_of(source[name], rows)
            weights = source.weights_of(name)
            weights_N = np.ones(at_N.size, np.float32)
            taken[name] = (
                source[name].values.numpy()[at_N],
                lengths_M,
                weights_N if weights is None else weights.numpy()[at_N],
            )
        values, lengths, weights_of = (
            torch.from_numpy(np.concatenate(parts)) for parts in zip(*taken.values(), strict=True)
        )
        weighted = ids.weights_N is not None or nodes.weights_N is not None
        weights_M = weights_of if weighted else None
        whole = KeyedRagged.from_lengths(ids.keys, values, lengths, weights_M)
        at = torch.from_numpy(rows_M)
        return batch._with(whole, lambda tensor: tensor[at])

    def beam_search(
        self, score: Callable[[_Ints, _Ints], _Floats], examples: int, width: int
    ) -> Leaves:
        """Search for the best leaves of each example, layer by layer.

        Args:
            score: (examples [M], ids of nodes [M]) -> scores [M], larger is better.
            examples: how many.
            width: nodes of a layer that are kept for each.
        """
        if width < 1:
            raise InputError("width of a beam search", width, "1 or more", "Change it.")
        rows_M = np.arange(examples)
        places_M = np.full(examples, self._root)
        scores_M = np.zeros(examples, np.float32)
        for _ in self._layers[1:]:
            parents, places_M = self._below(places_M)
            rows_M = rows_M[parents]
            scores_M = np.asarray(score(rows_M, self._ids[places_M]), np.float32)
            order = np.lexsort((-scores_M, rows_M))
            number = np.arange(order.size) - np.searchsorted(rows_M[order], rows_M[order])
            best = order[number < width]
            rows_M, places_M, scores_M = rows_M[best], places_M[best], scores_M[best]
        return Leaves(rows_M, self._ids[places_M], scores_M)

    def _known(self, ids_M: _Ints) -> _Ints:
        places_M = self._places.of(ids_M)
        if (places_M < 0).any():
            got = ids_M[places_M < 0][0]
            raise InputError("node of a tree", got, "ids of its nodes", "Add it to the tree.")
        return places_M


def _distinct(rows: int, count: int, size: int, rng: np.random.Generator) -> _Ints:
    """int64 [rows, count]: distinct numbers below `size` in each row, each set alike likely."""
    # Floyd's sampling, for all rows at once.
    found = np.empty((rows, count), np.int64)
    for number, top in enumerate(range(size - count, size)):
        drawn = rng.integers(0, top + 1, size=rows)
        again = (found[:, :number] == drawn[:, None]).any(axis=1)
        found[:, number] = np.where(again, top, drawn)
    return found
