"""Items that positives are compared with: negatives by weight, hard ones, those of a tree's layers.

A draw is a pure function of the seed, a key (a loader's: pass, place, rank) and the batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, cast, get_args

import numpy as np
import torch
from torch import Tensor

from shoal.data import columns
from shoal.data.batch import Batch, TensorSource
from shoal.data.columns import Rows
from shoal.data.features import Recipe, model_inputs
from shoal.errors import ConfigError, DataError, InputError
from shoal.ids import mix64
from shoal.models.tasks import Negatives
from shoal.ragged import KeyedRagged

if TYPE_CHECKING:
    import pyarrow as pa

_Ints = np.ndarray[Any, np.dtype[np.int64]]
_Floats = np.ndarray[Any, np.dtype[np.float64]]
Key = tuple[int, ...]

_SECTION = "data.sampler"


Kind = Literal["negative", "no_edge"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerSettings:
    """Where items are and how many come; files are Parquet, or CSV if they end in .csv.

    Args:
        kind: "negative" draws items that are not in the batch; "no_edge" draws of all items, and
            those that a user has an edge to are no negatives of that user.
        items: file with a row for each item: its id, weight and attributes.
        id: the feature whose ids identify items.
        weight: column that items are drawn in proportion to; None: all alike.
        attributes: other features of an item, made of columns as those of examples are.
        count: items drawn for a batch of a rank; all its examples share them.
        user: the feature whose ids identify users; for edges.
        edges: file with columns of `user` and `id`: what is no negative of whom.
        hard_edges: file with such columns: hard negatives, where they are no `edges`.
        hard_count: hard negatives of an example, at most.
        shared: one process on each node has the items, for all its ranks.
        spread: that process has a part of the items, by hash of their ids, of which nodes have one
            each; needs `shared`.

    Raises:
        ConfigError: an unknown kind, a number out of range, or edges without `user` or a use.
    """

    kind: Kind = "negative"
    items: str
    id: str
    weight: str | None = None
    attributes: tuple[str, ...] = ()
    count: int
    user: str | None = None
    edges: str | None = None
    hard_edges: str | None = None
    hard_count: int = 0
    shared: bool = False
    spread: bool = False

    def __post_init__(self) -> None:
        remedy = "Change the setting."
        if self.spread and not self.shared:
            raise ConfigError(f"spread of {_SECTION}", "not shared", "shared: true, too", remedy)
        if self.kind not in get_args(Kind):
            raise ConfigError(
                f"kind of {_SECTION}", repr(self.kind), " or ".join(get_args(Kind)), remedy
            )
        for name, value, least in (("count", self.count, 1), ("hard_count", self.hard_count, 0)):
            if not least <= value <= 1 << 24:
                raise ConfigError(f"{name} of {_SECTION}", value, f"{least}..{1 << 24}", remedy)
        for name, given, wanted in (
            ("edges", self.edges, self.kind == "no_edge"),
            ("hard_edges", self.hard_edges, self.hard_count > 0),
            ("user", self.user, self.edges is not None or self.hard_edges is not None),
        ):
            if (given is not None) != wanted:
                allowed = "edges with kind no_edge, hard_edges with hard_count, user with either"
                raise ConfigError(f"{name} of {_SECTION}", repr(given), allowed, remedy)


class Sampled(NamedTuple):
    """Features of drawn items, and what a model needs to know of them.

    order_H: float64 [H], by which hard ones of an example were chosen, the least first.
    """

    ids: KeyedRagged
    negatives: Negatives
    order_H: Tensor


class ItemPart(NamedTuple):
    """What a draw has to know of a part of the items.

    left: sum of the weights that may be drawn; draws, most_hard: counts of the settings; seed: of
    all draws.
    """

    left: float
    draws: int
    most_hard: int
    seed: int


class Sampling(Protocol):
    """Draws items, here or at a server.

    Attributes:
        id, user: features that identify items and users; user may be None.
    """

    id: str
    user: str | None

    def sample(self, items_B: _Ints, users_B: _Ints | None, key: Key) -> Sampled:
        """Items for the examples of a batch."""
        ...

    def close(self) -> None:
        """Disconnect from servers, and end those of this process."""
        ...


def extended(batch: Batch, sampler: Sampling, key: Key) -> Batch:
    """A batch with drawn items after its examples; features that items do not have are empty.

    Raises:
        InputError: not one item, or user, an example; or all items are in the batch.
    """
    users_B = None if sampler.user is None else one_each(batch.ids, sampler.user)
    sampled = sampler.sample(one_each(batch.ids, sampler.id), users_B, key)
    return replace(batch, ids=followed(batch.ids, sampled.ids), negatives=sampled.negatives)


def followed(ids: KeyedRagged, more: KeyedRagged) -> KeyedRagged:
    """Examples and more of them, which may lack features and weights; then these are 1."""
    parts = [ids, filled(more, ids.keys)]
    if (ids.weights_N is None) != (more.weights_N is None):
        parts = [
            replace(one, weights_N=torch.ones(one.values_N.numel(), device="cpu"))
            if one.weights_N is None
            else one
            for one in parts
        ]
    return KeyedRagged.cat(parts)


def source_of(ids: KeyedRagged) -> TensorSource:
    """Items with these features, to take rows of; a feature with one id each becomes a column."""
    parts: dict[str, Any] = {name: ids[name] for name in ids.keys}
    weights: dict[str, Tensor] = {}
    for name, part in parts.items():
        weights_N = ids.weights_of(name)
        if weights_N is not None:
            weights[name] = weights_N
        elif bool((part.lengths == 1).all()):
            parts[name] = part.values
    return TensorSource(parts, torch.zeros(ids.batch_size, device="cpu"), id_weights=weights)


def filled(ids: KeyedRagged, keys: Sequence[str]) -> KeyedRagged:
    """Features of these names; those that are not there are empty, others are left out."""
    own = ids.select([name for name in keys if name in ids.keys])
    lengths_FB = torch.zeros((len(keys), own.batch_size), dtype=torch.int64, device="cpu")
    lengths_FB[[keys.index(name) for name in own.keys]] = own.lengths
    return KeyedRagged.from_lengths(keys, own.values_N, lengths_FB, own.weights_N)


class Sampler:
    """Items drawn for batches; `SamplerSettings` says how.

    Args:
        items: one example for each item, with the features that items have.
        weights: float64 [items], above 0 and finite; None: all 1.
        settings: counts, and features that identify items and users.
        edges, hard_edges: int64 ([E], [E]): ids of users and of items; as `settings` has them.
        seed: of all draws, 0 or more.
        where: names the items in messages.
        share: (k, n): keep the k-th of n parts of the items and edges, by hash of items' ids.

    Raises:
        ConfigError: a seed below 0, edges that are missing.
        DataError: an id twice, a weight that is not so, or a sum of them that is not finite, an
            edge to an unknown item, no items, no edges.
        InputError: an item without one id.
    """

    def __init__(
        self,
        items: TensorSource,
        settings: SamplerSettings,
        *,
        weights: _Floats | None = None,
        edges: tuple[_Ints, _Ints] | None = None,
        hard_edges: tuple[_Ints, _Ints] | None = None,
        seed: int = 0,
        where: str = "items",
        share: tuple[int, int] = (0, 1),
    ) -> None:
        self.id, self.user = settings.id, settings.user
        self._items, self._settings, self._seed = items, settings, seed
        if seed < 0:
            raise ConfigError("seed of a sampler", seed, "0 or more", "Choose another.")
        if not len(items):
            raise DataError(where, "no items", "one or more", "Check what wrote the file.")
        every = items.take(torch.arange(len(items), device="cpu")).ids
        self._share, ids = share, one_each(every, settings.id)
        own = np.ones(len(items)) if weights is None else weights.astype(np.float64)
        bad = np.flatnonzero(~((own > 0) & np.isfinite(own)))
        if bad.size:
            what, allowed = f"weight in row {bad[0]} of {where}", "above 0, and finite"
            raise DataError(what, own[bad[0]], allowed, "Leave the item out, or correct it.")
        if share[1] > 1:
            kept = self._has(ids)
            if not kept.any():
                allowed, remedy = "one or more", "Use fewer servers."
                raise DataError(f"items of server {share[0]} of {where}", "none", allowed, remedy)
            self._items = items.select(torch.from_numpy(np.flatnonzero(kept)))
            ids, own = ids[kept], own[kept]
        self._places = IdPlaces(ids, where)
        self._weights = own
        with np.errstate(over="ignore"):  # refused below
            self._sums = np.cumsum(own)
        if not np.isfinite(self._sums[-1]):
            what, remedy = f"sum of the weights of {where}", "Scale them down."
            raise DataError(what, self._sums[-1], "a finite number", remedy)
        self._edges = self._known("edges", settings.edges, edges, where)
        self._hard = self._known("hard_edges", settings.hard_edges, hard_edges, where)

    @classmethod
    def open(
        cls,
        settings: SamplerSettings,
        recipe: Recipe,
        *,
        seed: int = 0,
        share: tuple[int, int] = (0, 1),
    ) -> Sampler:
        """Read the files; ids and attributes are made as `recipe` makes them of examples.

        Args:
            settings: files and counts.
            recipe: of examples.
            seed, share: as of the class.

        Raises:
            DataError: a file that is missing, damaged, empty, lacks a column, or as above.
            ConfigError: a feature that the recipe does not have, or that is dense.
        """
        names = (settings.id, *settings.attributes)
        items, column, rows = read_items(settings.items, recipe, names, settings.weight)
        weights = None
        if settings.weight is not None:
            weights = columns.numbers(column, settings.weight, rows).numpy().astype(np.float64)
        edges, hard_edges = (
            None if file is None else _read_edges(file, recipe, settings)
            for file in (settings.edges, settings.hard_edges)
        )
        return cls(
            items,
            settings,
            weights=weights,
            edges=edges,
            hard_edges=hard_edges,
            seed=seed,
            where=settings.items,
            share=share,
        )

    def close(self) -> None:
        """Nothing to end."""

    def part(self, items_B: _Ints) -> ItemPart:
        """What `split_counts` needs to know of these items, for a batch of such own items."""
        left_out, settings = self._left_out(self._places.of(items_B)), self._settings
        left = 0.0
        if left_out.size < self._weights.size:
            left = float(self._sums[-1] - self._weights[left_out].sum())
        return ItemPart(left, settings.count, settings.hard_count, self._seed)

    def sample(
        self, items_B: _Ints, users_B: _Ints | None, key: Key, count: int | None = None
    ) -> Sampled:
        """Items for the examples of a batch, whose own items and users are given by id.

        Hard negatives follow those that all share, by example.

        Args:
            items_B, users_B: of the examples.
            key: of the draw.
            count: how many all share; None: as the settings have it, of a batch with examples.

        Raises:
            InputError: all items are in the batch.
        """
        number, parts = self._share
        own_key = [number, *key] if parts > 1 else key
        rng = np.random.Generator(np.random.PCG64([self._seed, *own_key]))
        own_B = self._places.of(items_B)
        if count is None:
            count = self._settings.count if own_B.size else 0
        drawn_N, log_counts_N = self._drawn(own_B, count, rng)
        hard_H, rows_H = np.empty(0, np.int64), np.empty(0, np.int64)
        order_H = np.empty(0)
        if self._hard is not None and users_B is not None:
            rows_H, hard_H, order_H = self._hard_of(users_B, own_B, rng)
        known_K2 = np.empty((0, 2), np.int64)
        if self._edges is not None and users_B is not None:
            known_K2 = self._known_of(users_B, np.concatenate([own_B, drawn_N]))
        picked = torch.from_numpy(np.concatenate([drawn_N, hard_H]))
        return Sampled(
            self._items.take(picked).ids,
            Negatives(
                log_counts_N=torch.from_numpy(log_counts_N.astype(np.float32)),
                hard_H=torch.from_numpy(rows_H),
                known=torch.from_numpy(known_K2),
                most_hard=self._settings.hard_count,
            ),
            torch.from_numpy(order_H),
        )

    def _has(self, ids_N: _Ints) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Which items belong to this share."""
        number, parts = self._share
        mixed_N = mix64(torch.from_numpy(ids_N)).numpy()
        return cast(np.ndarray[Any, np.dtype[np.bool_]], mixed_N % parts == number)

    def _left_out(self, own_B: _Ints) -> _Ints:
        """Places of items that are not drawn."""
        if self._settings.kind == "no_edge":
            return own_B[:0]
        return np.unique(own_B[own_B >= 0])

    def _drawn(self, own_B: _Ints, count: int, rng: np.random.Generator) -> tuple[_Ints, _Floats]:
        """Places of items [N], and log of how often each is expected among them."""
        left_out = self._left_out(own_B)
        if not count:
            return left_out[:0], np.empty(0)
        if left_out.size == self._weights.size:
            allowed = "at least one that is not"
            remedy = "Use smaller batches, or more items."
            got = f"all {left_out.size} are in the batch"
            raise InputError("items to draw negatives of", got, allowed, remedy)
        total, left = self._sums[-1], self._sums[-1] - self._weights[left_out].sum()
        if left < 1e-6 * total or count * total > left * self._weights.size:
            # Differences lose digits; and more draws would cost more than to sum what is left.
            weights = self._weights.copy()
            weights[left_out] = 0.0
            sums = np.cumsum(weights)
            found, left = _by_weight(sums, count, rng), sums[-1]
        else:
            found = np.empty(0, np.int64)
            while found.size < count:
                draws = math.ceil((count - found.size) * total / left * 1.2)
                more = _by_weight(self._sums, draws, rng)
                found = np.concatenate([found, more[~_among(more, left_out)]])
            found = found[:count]
        return found, math.log(max(count, 1)) + np.log(self._weights[found] / left)

    def _hard_of(
        self, users_B: _Ints, own_B: _Ints, rng: np.random.Generator
    ) -> tuple[_Ints, _Ints, _Floats]:
        """(Examples, places of items, order) of hard negatives, by example; of too many those that
        are first in a random order."""
        assert self._hard is not None
        rows_M, items_M = self._hard.of(users_B)
        others = items_M != own_B[rows_M]
        if self._edges is not None:
            rows_K, edges_K = self._edges.of(users_B)
            size = self._weights.size
            others &= ~np.isin(rows_M * size + items_M, rows_K * size + edges_K)
        rows_M, items_M = rows_M[others], items_M[others]
        order_M = rng.random(rows_M.size)
        kept = _first_of_each(rows_M, order_M, self._settings.hard_count)
        return rows_M[kept], items_M[kept], order_M[kept]

    def _known_of(self, users_B: _Ints, items_I: _Ints) -> _Ints:
        """int64 [K, 2]: (example, place among `items_I`) of edges, without examples' own items."""
        assert self._edges is not None
        rows_M, edges_M = self._edges.of(users_B)
        order = np.argsort(items_I, kind="stable")
        there = items_I[order]
        first_M = np.searchsorted(there, edges_M)
        repeats_M = np.searchsorted(there, edges_M, side="right") - first_M
        at_K = order[ranges(first_M, repeats_M)]
        pairs_K2 = np.stack([np.repeat(rows_M, repeats_M), at_K], axis=1)
        return cast(_Ints, pairs_K2[pairs_K2[:, 0] != at_K])

    def _known(
        self, name: str, file: str | None, edges: tuple[_Ints, _Ints] | None, where: str
    ) -> _Edges | None:
        if (edges is None) != (file is None):
            given = "none" if edges is None else "some"
            allowed = "edges if the settings name them, else none"
            raise ConfigError(f"{name} of a sampler", given, allowed, f"Give or leave out {name}.")
        if edges is None:
            return None
        users_E, ids_E = edges
        if not users_E.size:
            remedy = "Check what wrote the file, or leave it out."
            raise DataError(f"{name} in {file}", "none", "one or more", remedy)
        kept = self._has(ids_E)
        users_E, ids_E = users_E[kept], ids_E[kept]
        items_E = self._places.of(ids_E)
        unknown = np.flatnonzero(items_E < 0)
        if unknown.size:
            got, allowed = f"no item {ids_E[unknown[0]]}", f"ids of {where}"
            remedy = "Add the item, or leave the edge out."
            raise DataError(f"item in row {unknown[0]} of {file}", got, allowed, remedy)
        return _Edges(users_E, items_E)


def split_counts(parts: Sequence[ItemPart], key: Key, size: int) -> list[int]:
    """How many items each part of all draws for a batch of so many examples, by chance.

    Raises:
        InputError: all items are in the batch.
    """
    if not size:
        return [0] * len(parts)
    left = np.array([part.left for part in parts])
    if not left.sum() > 0:
        what, remedy = "items to draw negatives of", "Use smaller batches, or more items."
        raise InputError(what, "all are in the batch", "at least one that is not", remedy)
    rng = np.random.Generator(np.random.PCG64([parts[0].seed, *key]))
    return cast(list[int], rng.multinomial(parts[0].draws, left / left.sum()).tolist())


def joined(found: Sequence[Sampled], parts: Sequence[ItemPart], size: int) -> Sampled:
    """One draw of those that parts of all items gave for a batch of so many examples."""
    counts = [one.negatives.log_counts_N.numel() for one in found]
    total, left = sum(counts), sum(part.left for part in parts)
    logs, known, rows, orders, before = [], [], [], [], 0
    for one, part, count in zip(found, parts, counts, strict=True):
        # Of `count` draws of a part, expected counts are those of all draws of all items.
        share = math.log(total * part.left / (left * count)) if count else 0.0
        logs.append(one.negatives.log_counts_N + share)
        drawn = (one.negatives.known[:, 1:] >= size).long()
        known.append(
            torch.cat([one.negatives.known[:, :1], one.negatives.known[:, 1:] + before * drawn], 1)
        )
        rows.append(one.negatives.hard_H)
        orders.append(one.order_H)
        before += count
    rows_H, order_H = torch.cat(rows), torch.cat(orders)
    most_hard = parts[0].most_hard
    kept = _first_of_each(rows_H.numpy(), order_H.numpy(), most_hard)
    starts = np.cumsum([0, *(one.ids.batch_size for one in found)])
    shared = [start + np.arange(count) for start, count in zip(starts, counts, strict=False)]
    hard = [
        np.arange(start + count, stop)
        for start, count, stop in zip(starts, counts, starts[1:], strict=False)
    ]
    picked = np.concatenate([*shared, np.concatenate(hard)[kept]])
    every = KeyedRagged.cat([one.ids for one in found])
    at = torch.from_numpy(kept)
    return Sampled(
        source_of(every).take(torch.from_numpy(picked)).ids,
        Negatives(torch.cat(logs), rows_H[at], torch.cat(known), most_hard),
        order_H[at],
    )


def _first_of_each(rows_M: _Ints, order_M: _Floats, most: int) -> _Ints:
    """Places, by row, of those of each row that are first in an order, at most so many."""
    at_M = np.lexsort((order_M, rows_M))
    sorted_M = rows_M[at_M]
    number_M = np.arange(sorted_M.size) - np.searchsorted(sorted_M, sorted_M)
    return cast(_Ints, at_M[number_M < most])


class IdPlaces:
    """Where ids are in a table; -1: nowhere."""

    def __init__(self, ids_N: _Ints, where: str) -> None:
        self._order = np.argsort(ids_N, kind="stable")
        self._sorted = ids_N[self._order]
        twice = np.flatnonzero(self._sorted[1:] == self._sorted[:-1])
        if twice.size:
            one, other = self._order[twice[0]], self._order[twice[0] + 1]
            got, remedy = f"in rows {one} and {other}", "Leave one of them out."
            what = f"id {self._sorted[twice[0]]} of {where}"
            raise DataError(what, got, "each id once", remedy)

    def of(self, ids_M: _Ints) -> _Ints:
        at_M = np.searchsorted(self._sorted, ids_M).clip(max=self._sorted.size - 1)
        return np.where(self._sorted[at_M] == ids_M, self._order[at_M], -1)


class _Edges:
    """Items of users, by user; each pair once."""

    def __init__(self, users_E: _Ints, items_E: _Ints) -> None:
        order = np.lexsort((items_E, users_E))
        users_E, items_E = users_E[order], items_E[order]
        once = np.ones(users_E.size, dtype=np.bool_)
        once[1:] = (np.diff(users_E) != 0) | (np.diff(items_E) != 0)
        self._items = items_E[once]
        self._users, starts = np.unique(users_E[once], return_index=True)
        self._starts = np.append(starts, self._items.size)

    def of(self, users_B: _Ints) -> tuple[_Ints, _Ints]:
        """(Example, item) of each edge of some users, by example."""
        at_B = np.searchsorted(self._users, users_B)
        next_B = np.minimum(at_B + 1, self._users.size)
        counts_B = self._starts[next_B] - self._starts[at_B]
        counts_B = np.where(_among(users_B, self._users), counts_B, 0)
        edges_M = ranges(self._starts[at_B], counts_B)
        return np.repeat(np.arange(users_B.size), counts_B), self._items[edges_M]


def ranges(starts_B: _Ints, counts_B: _Ints) -> _Ints:
    """The numbers from each start on, as many as counted."""
    before_B = np.cumsum(counts_B) - counts_B
    return cast(_Ints, np.arange(counts_B.sum()) + np.repeat(starts_B - before_B, counts_B))


def _among(values_M: _Ints, sorted_N: _Ints) -> np.ndarray[Any, np.dtype[np.bool_]]:
    at_M = np.searchsorted(sorted_N, values_M)
    inside = at_M < sorted_N.size
    inside[inside] = sorted_N[at_M[inside]] == values_M[inside]
    return inside


def _by_weight(sums_N: _Floats, count: int, rng: np.random.Generator) -> _Ints:
    """Places, each with a chance in proportion to its weight, of running sums of the weights."""
    # The largest product may round up to the sum of all: the last place with a weight.
    last = int(np.searchsorted(sums_N, sums_N[-1]))
    at = np.searchsorted(sums_N, rng.random(count) * sums_N[-1], side="right")
    return cast(_Ints, np.minimum(at, last).astype(np.int64))


def one_each(ids: KeyedRagged, name: str, section: str = _SECTION) -> _Ints:
    own = ids[name]
    if not bool((own.lengths == 1).all()):
        at = int((own.lengths != 1).nonzero()[0])
        got = f"{int(own.lengths[at])} in row {at}"
        remedy = "Name a feature with one id."
        raise InputError(f"ids of {name!r} for {section}", got, "one each", remedy)
    return cast(_Ints, own.values.numpy())


def _of_features(recipe: Recipe, names: tuple[str, ...], section: str = _SECTION) -> Recipe:
    """The part of a recipe that makes some of its features.

    Raises:
        ConfigError: a name that is none of its features.
    """
    for name in names:
        if name not in recipe.features:
            allowed = f"features with ids: {list(recipe.features)}"
            raise ConfigError(f"feature of {section}", repr(name), allowed, "Name one of them.")
    needed, inputs = set(names), {spec.name: spec.inputs for spec in recipe.computed.features}
    for _ in inputs:
        needed |= {
            one.removeprefix("feature:")
            for name in needed & inputs.keys()
            for one in inputs[name]
            if one.startswith("feature:")
        }
    computed = [
        spec if spec.name in names else replace(spec, stub=True)
        for spec in recipe.computed.features
        if spec.name in needed
    ]
    return replace(
        recipe,
        ids=tuple(one for one in recipe.ids if one.name in names),
        computed=replace(recipe.computed, features=tuple(computed)),
        dense=(),
        time=None,
        weight=None,
        group=None,
    )


def _read(
    path: str, recipe: Recipe, more: str | None = None, section: str = _SECTION
) -> tuple[pa.Table, Rows]:
    """The columns of a recipe's features, and one more, of a file.

    Raises:
        DataError: it is missing, damaged or empty, or lacks one.
    """
    import pyarrow as pa
    import pyarrow.csv as csv
    import pyarrow.parquet as pq

    names = [*recipe.input_columns, *([more] if more else [])]
    spelled = Path(path).suffix == ".csv"
    try:
        if spelled:
            text = csv.ConvertOptions(column_types=dict.fromkeys(names, pa.large_string()))
            lines = csv.ParseOptions(newlines_in_values=True)
            table = csv.read_csv(path, parse_options=lines, convert_options=text)
            present = table.schema.names
        else:
            file = pq.ParquetFile(path)
            present = file.schema_arrow.names
            table = file.read([name for name in dict.fromkeys(names) if name in present])
    except (OSError, UnicodeError, pa.ArrowException) as error:
        got = str(error).strip() or type(error).__name__
        what, allowed = f"file {path} of {section}", "a file that exists and is whole"
        raise DataError(what, got, allowed, "Check the path.") from error
    columns.check_present(names, present, path)
    return table, Rows(path, 0, spelled)


def read_items(
    path: str,
    recipe: Recipe,
    names: tuple[str, ...],
    more: str | None,
    section: str = _SECTION,
) -> tuple[TensorSource, Any, Rows]:
    """Features of the rows of a file, as a recipe makes them; another column, and who they are.

    section: of the settings, in messages.

    Raises:
        DataError: the file is missing, damaged or empty, or lacks a column.
        ConfigError: a feature that the recipe does not have, or that is dense.
    """
    own = _of_features(recipe, names, section)
    table, rows = _read(path, own, more, section)
    ids = model_inputs(table, own, path, spelled=rows.spelled).ids
    found = source_of(ids)
    return found, None if more is None else columns.decoded(table.column(more)), rows


def read_ids(path: str, recipe: Recipe, name: str, column: str, section: str) -> _Ints:
    """Ids that a recipe would make for feature `name` of another column of a file, one a row.

    Raises:
        DataError: the file is missing, damaged or empty, or lacks the column.
        ConfigError: a feature that is none of the recipe's, or made of several columns.
        InputError: a row without one id.
    """
    own = _of_features(recipe, (name,), section)
    if len(own.input_columns) != 1:
        allowed, remedy = "one column", "Name a feature of one column."
        raise ConfigError(f"columns of {name!r}", list(own.input_columns), allowed, remedy)
    table, rows = _read(path, own, column, section)
    table = table.select([column]).rename_columns(list(own.input_columns))
    where = f"column {column!r} of {path}"
    return one_each(model_inputs(table, own, where, spelled=rows.spelled).ids, name, section)


def _read_edges(path: str, recipe: Recipe, settings: SamplerSettings) -> tuple[_Ints, _Ints]:
    assert settings.user is not None, "checked by the settings"
    own = _of_features(recipe, (settings.user, settings.id))
    table, rows = _read(path, own)
    ids = model_inputs(table, own, path, spelled=rows.spelled).ids
    return one_each(ids, settings.user), one_each(ids, settings.id)
