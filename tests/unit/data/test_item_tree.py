"""A tree of items: nodes to train with, children, beam search, bad trees."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from shoal.data import (
    FeatureSet,
    FeatureSpec,
    IdFeature,
    Recipe,
    Sampler,
    SamplerSettings,
    TensorSource,
)
from shoal.data.feature_set import HashBuckets, Vocabulary
from shoal.data.features import model_inputs
from shoal.data.item_tree import ItemTree, TreeSettings
from shoal.data.kinds import KINDS
from shoal.data.samplers import extended
from shoal.errors import ConfigError, DataError, InputError
from shoal.ragged import Ragged

# Root 1; 2..4; two children each, 21 22 31 32 41 42; two leaves each, of 21: 211 and 212.
INNER = [1, 2, 3, 4, 21, 22, 31, 32, 41, 42]
LEAVES = [10 * node + k for node in INNER[4:] for k in (1, 2)]
IDS = np.array([*LEAVES[::-1], *INNER])
PARENTS = np.where(IDS == 1, 1, np.maximum(IDS // 10, 1))
SETTINGS = TreeSettings(id="item", counts=(0, 1, 3, 4))
SHORT = TreeSettings(id="item", counts=(0, 1))


def nodes(ids: Any = IDS) -> TensorSource:
    kinds = Ragged.from_lists([[int(one)] * (int(one) % 3) for one in ids])
    return TensorSource({"item": torch.from_numpy(ids), "kind": kinds}, torch.zeros(len(ids)))


def tree(settings: TreeSettings = SETTINGS, seed: int = 0) -> ItemTree:
    return ItemTree(nodes(), PARENTS, settings, seed=seed)


def layer_of(node: int) -> int:
    return 0 if node == 1 else len(str(node))


def test_ancestors_are_positive_and_others_of_their_layers_negative() -> None:
    found = tree().sample(np.array([211, 422, 311]), (0, 0, 0))
    ancestors = {0: [2, 21, 211], 1: [4, 42, 422], 2: [3, 31, 311]}
    assert found.rows_M.tolist() == [row for row in range(3) for _ in range(3 + 8)]
    assert [layer_of(node) for node in found.ids_M] == found.layers_M.tolist()
    for row, positive in ancestors.items():
        own = found.rows_M == row
        ids, labels = found.ids_M[own].tolist(), found.labels_M[own].tolist()
        assert [node for node, label in zip(ids, labels, strict=True) if label] == positive
        assert len(set(ids)) == len(ids)
        assert Counter(found.layers_M[own].tolist()) == {1: 2, 2: 4, 3: 5}


def test_each_negative_of_a_layer_is_alike_likely() -> None:
    found = tree().sample(np.full(6000, 211), (0, 0, 0))
    last = (found.layers_M == 3) & (found.labels_M == 0)
    counts = Counter(found.ids_M[last].tolist())
    assert counts.keys() == {*LEAVES} - {211}
    for count in counts.values():
        assert count == pytest.approx(6000 * 4 / 11, abs=4 * (6000 * 4 / 11) ** 0.5)


CHANCES = {
    "uniform": [1 / 3, 1 / 3, 1 / 3],
    "arithmetic": [1 / 6, 2 / 6, 3 / 6],
    "reciprocal": [2 / 11, 3 / 11, 6 / 11],
}


@pytest.mark.parametrize("layers", CHANCES)
def test_a_share_of_the_layers_is_trained(layers: Any) -> None:
    ids = np.array([1, 2, 3, 4, 5])
    settings = TreeSettings(id="item", counts=(0,) * 5, remain_ratio=0.34, layers=layers)
    chain = ItemTree(nodes(ids), np.array([1, 1, 2, 3, 4]), settings)
    seen = [chain.sample(np.array([5]), (0, k, 0)).layers_M.tolist() for k in range(2000)]
    assert all(len(one) == 2 and one[1] == 4 for one in seen)
    counts = Counter(one[0] for one in seen)
    for layer, chance in enumerate(CHANCES[layers], 1):
        assert counts[layer] / 2000 == pytest.approx(chance, abs=0.05)
    none = ItemTree(nodes(ids), np.array([1, 1, 2, 3, 4]), replace(settings, remain_ratio=0.0))
    assert none.sample(np.array([5]), (0, 0, 0)).layers_M.tolist() == [4]


def test_a_draw_depends_on_seed_and_key_alone() -> None:
    def drawn(seed: int, *key: int) -> list[int]:
        one = tree(seed=seed)
        one.sample(np.array([211]), (5, 5, 5))
        return one.sample(np.array([211] * 9), key).ids_M.tolist()

    first = drawn(1, 0, 64, 0)
    assert first == drawn(1, 0, 64, 0)
    assert first not in [drawn(2, 0, 64, 0), drawn(1, 0, 128, 0), drawn(1, 0, 64, 1)]


def test_a_batch_becomes_examples_of_nodes() -> None:
    source = TensorSource(
        {
            "user": Ragged.from_lists([[7], [8, 9], []]),
            "item": torch.tensor([211, 311, 422]),
            "kind": Ragged.from_lists([[1], [1], [1]]),
        },
        torch.tensor([1.0, 0.0, 1.0]),
        dense=torch.tensor([[0.0], [1.0], [2.0]]),
    )
    one = tree()
    batch = one.expanded(source.take(torch.arange(3)), (0, 0, 0))
    found = one.sample(np.array([211, 422]), (0, 0, 0))
    lists = batch.ids.to_lists()
    assert lists["item"] == [[node] for node in found.ids_M.tolist()]
    assert lists["kind"] == [[node] * (node % 3) for node in found.ids_M.tolist()]
    assert lists["user"] == [[7]] * 11 + [[]] * 11
    assert batch.labels.tolist() == found.labels_M.tolist()
    assert batch.dense is not None
    assert batch.dense[:, 0].tolist() == [0.0] * 11 + [2.0] * 11


def test_children() -> None:
    parents, ids = tree().children(np.array([31, 211, 1]))
    assert parents.tolist() == [0, 0, 2, 2, 2]
    assert sorted(ids[:2].tolist()) == [311, 312]
    assert sorted(ids[2:].tolist()) == [2, 3, 4]


@pytest.mark.parametrize("width", [1, 2, 100])
def test_a_beam_finds_the_best_leaves_where_ancestors_score_as_their_best_leaf(width: int) -> None:
    rng = np.random.default_rng(0)
    leaf_scores = {(row, leaf): rng.random() for row in range(4) for leaf in LEAVES}

    def score(rows: Any, ids: Any) -> Any:
        def below(node: int) -> list[int]:
            return [leaf for leaf in LEAVES if str(leaf).startswith(str(node))]

        pairs = zip(rows.tolist(), ids.tolist(), strict=True)
        return np.array(
            [max(leaf_scores[row, leaf] for leaf in below(node)) for row, node in pairs]
        )

    found = tree().beam_search(score, 4, width)
    for row in range(4):
        best = sorted(LEAVES, key=lambda leaf: -leaf_scores[row, leaf])[:width]
        assert found.ids_M[found.rows_M == row].tolist() == best


def test_a_file_of_nodes(tmp_path: Path) -> None:
    names = {1: "root", 2: "a", 3: "b"}
    parents = {"root": "root", "a": "root", "b": "root"}
    path = tmp_path / "tree.parquet"
    table = {"item": list(names.values()), "parent": [parents[one] for one in names.values()]}
    pq.write_table(pa.table(table), path)
    recipe = Recipe(ids=(IdFeature(name="item"), IdFeature(name="user")), label="label")
    made = ItemTree.open(TreeSettings(id="item", counts=(0, 1), nodes=str(path)), recipe)
    from shoal.ids import ids_of_text

    root, one, other = ids_of_text(pa.array(["root", "a", "b"])).tolist()
    assert sorted(made.children(np.array([root]))[1].tolist()) == sorted([one, other])
    assert made.sample(np.array([one]), (0, 0, 0)).ids_M.tolist() == [one, other]


def test_a_tree_is_made_of_items_in_order(tmp_path: Path) -> None:
    """Seven items by year, three to a node: the root -1 over -2, -3, -4."""
    path = tmp_path / "items.parquet"
    years = [3, 1, 2, 7, 6, 5, None]
    pq.write_table(pa.table({"item": range(10, 17), "year": years, "kind": range(7)}), path)
    recipe = Recipe(ids=(IdFeature(name="item"), IdFeature(name="kind")), label="label")
    settings = TreeSettings(
        id="item", counts=(0, 5), items=str(path), order="year", branch=3, attributes=("kind",)
    )
    made = ItemTree.open(settings, recipe)
    parents, ids = made.children(np.array([-1, -2, -3, -4]))
    below = {place: sorted(ids[parents == place].tolist()) for place in range(4)}
    assert below == {0: [-4, -3, -2], 1: [11, 12, 16], 2: [10, 14, 15], 3: [13]}
    found = made.sample(np.array([13]), (0, 0, 0))
    # The root's children are three, so that two of them are all others; five of the leaves.
    assert Counter(found.layers_M.tolist()) == {1: 3, 2: 6}
    batch = TensorSource({"item": torch.tensor([13]), "kind": torch.tensor([9])}, torch.ones(1))
    nodes = made.expanded(batch.take(torch.arange(1)), (0, 0, 0)).ids.to_lists()
    kinds = {node[0]: kind for node, kind in zip(nodes["item"], nodes["kind"], strict=True)}
    assert kinds[13] == [3]
    assert kinds[-4] == []


@pytest.mark.parametrize(
    ("more", "error", "message"),
    [
        ({"order": "lists"}, DataError, r"column 'lists' of .*: got list<.*allowed: numbers"),
        ({"order": "place"}, DataError, r"column 'place' of .*: got struct<.*data\.tree\.order"),
        ({"id": "itm"}, ConfigError, r"feature of data\.tree: got 'itm'"),
        ({"attributes": ("knd",)}, ConfigError, r"feature of data\.tree: got 'knd'"),
        ({"items": "none.parquet"}, DataError, r"none\.parquet of data\.tree"),
    ],
)
def test_what_no_tree_can_be_made_of_is_named(
    tmp_path: Path, more: dict[str, Any], error: type[Exception], message: str
) -> None:
    path = tmp_path / "items.parquet"
    places = [{"x": 1}, {"x": 2}, {"x": 1}]
    pq.write_table(pa.table({"item": range(3), "lists": [[1], [None], [2]], "place": places}), path)
    recipe = Recipe(ids=(IdFeature(name="item"),), label="label")
    with pytest.raises(error, match=message):
        ItemTree.open(replace(SHORT, **{"items": str(path), **more}), recipe)


@pytest.mark.parametrize("branch", [2, 5])
@pytest.mark.parametrize("size", [2, 5, 6, 26])
def test_every_item_is_a_leaf_of_the_last_layer(size: int, branch: int) -> None:
    items = TensorSource({"item": torch.arange(size)}, torch.zeros(size))
    settings = TreeSettings(id="item", counts=(0, 1), branch=branch)
    made = ItemTree.of_items(items, settings, rows=torch.arange(size))
    leaves = made.beam_search(lambda rows, ids: np.zeros(rows.size), 1, size)
    assert sorted(leaves.ids_M.tolist()) == list(range(size))


@pytest.mark.parametrize(
    ("ids", "parents", "message"),
    [
        ([1, 2, 2], [1, 1, 1], "id 2 of tree: got in rows 1 and 2"),
        ([1, 2], [1, 5], "parent of node 2: got no node 5"),
        ([1, 2], [1, 2], r"their own parents: got \[1, 2\]"),
        ([1, 2], [2, 1], r"their own parents: got \[\]"),
        ([1, 2, 3], [1, 3, 2], "nodes below the root: got 2 in circles"),
        ([1, 2, 3, 4], [1, 1, 1, 2], "leaf of a tree: got 3 in layer 1; allowed: layer 2"),
    ],
)
def test_bad_trees_are_named(ids: list[int], parents: list[int], message: str) -> None:
    settings = TreeSettings(id="item", counts=(0, 0, 0) if len(ids) > 3 else (0, 0))
    with pytest.raises(DataError, match=message):
        ItemTree(nodes(np.array(ids)), np.array(parents), settings)


def test_bad_settings_and_items_are_named() -> None:
    for counts in ((0,), (1, 2), (0, -1)):
        with pytest.raises(ConfigError, match="counts of a tree"):
            TreeSettings(id="item", counts=counts)
    with pytest.raises(ConfigError, match="remain_ratio of a tree"):
        replace(SETTINGS, remain_ratio=1.5)
    with pytest.raises(ConfigError, match="layers of a tree"):
        replace(SETTINGS, layers="uniforn")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="branch of a tree: got 1"):
        replace(SETTINGS, branch=1)
    with pytest.raises(ConfigError, match="nodes and items of a tree: got a and b"):
        replace(SETTINGS, nodes="a", items="b")
    with pytest.raises(ConfigError, match="file of a tree: got none"):
        ItemTree.open(SETTINGS, Recipe(ids=(IdFeature(name="item"),), label="y"))
    with pytest.raises(DataError, match="items of a tree: got 1"):
        ItemTree.of_items(nodes(IDS[:1]), SETTINGS, rows=torch.arange(1))
    with pytest.raises(DataError, match=r"id of an item of a tree: got -3; .*-3\.\.-1"):
        ItemTree.of_items(nodes(np.array([-4, -3, 5, 6])), SHORT, rows=torch.arange(4))
    ItemTree.of_items(nodes(np.array([-4, -5, 5, 6])), SHORT, rows=torch.arange(4))
    with pytest.raises(ConfigError, match=r"got \[0, 1, 3, 4\]; allowed: 3 at most"):
        ItemTree.of_items(nodes(np.arange(4)), SETTINGS, rows=torch.arange(4))
    for counts in ((0, 3, 3, 4), (0, 1, 3)):
        with pytest.raises(ConfigError, match=r"counts of a tree: got .* \[1, 3, 6, 12\] nodes"):
            tree(TreeSettings(id="item", counts=counts))
    with pytest.raises(InputError, match="node of a tree: got 999"):
        tree().sample(np.array([999]), (0, 0, 0))
    with pytest.raises(InputError, match="item of a tree: got 21; allowed: a leaf"):
        tree().sample(np.array([211, 21]), (0, 0, 0))


@pytest.mark.parametrize("rule", [HashBuckets(size=1 << 30), Vocabulary(values=tuple("6012345"))])
def test_parents_are_made_ids_as_nodes_are(tmp_path: Path, rule: Any) -> None:
    path = tmp_path / "tree.parquet"
    pq.write_table(pa.table({"item": range(7), "parent": [0, 0, 0, 1, 1, 2, 2]}), path)
    spec = FeatureSpec(name="item", kind=KINDS["id"](), ids=rule)
    recipe = Recipe(ids=(IdFeature(name="user"),), label="y", computed=FeatureSet((spec,)))
    found = ItemTree.open(TreeSettings(id="item", counts=(0, 1, 1), nodes=str(path)), recipe)
    ids = model_inputs(pq.read_table(path), replace(recipe, ids=()), "").ids["item"].values
    parents, children = found.children(ids[:3].numpy())
    assert parents.tolist() == [0, 0, 1, 1, 2, 2]
    assert children.tolist() == ids[1:].tolist()


def test_nodes_have_all_labels_of_their_examples() -> None:
    source = TensorSource(
        {"item": torch.tensor([211, 422])}, torch.ones(2), more_labels=torch.tensor([[1.0], [0.5]])
    )
    batch = source.take(torch.arange(2))
    found = tree().expanded(batch, (0, 0, 0))
    assert found.more_labels is not None
    own = torch.cat(
        [torch.ones(len(found.labels) // 2), torch.full((len(found.labels) // 2,), 0.5)]
    )
    assert torch.equal(found.more_labels.squeeze(1), found.labels * own)
    sampler = Sampler(nodes(), SamplerSettings(items="", id="item", count=2))
    with pytest.raises(InputError, match="batch for a tree: got items of a sampler"):
        tree().expanded(extended(batch, sampler, (0, 0, 0)), (0, 0, 0))
