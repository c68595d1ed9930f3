"""Items drawn for batches: chances, what is left out, hard negatives, files, bad input."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as csv
import pyarrow.parquet as pq
import pytest
import torch

from shoal.data import (
    FeatureSet,
    FeatureSpec,
    IdFeature,
    Loader,
    Order,
    RankShare,
    Recipe,
    Sampler,
    SamplerSettings,
    TensorSource,
)
from shoal.data.feature_set import Boundaries
from shoal.data.kinds import Raw
from shoal.data.samplers import _Edges, extended
from shoal.errors import ConfigError, DataError, InputError
from shoal.ragged import Ragged

IDS = np.array([30, 10, 50, 20, 40])
WEIGHTS = np.array([3.0, 1.0, 5.0, 2.0, 4.0])
SETTINGS = SamplerSettings(items="items", id="item", count=4000)
EDGES = SamplerSettings(
    items="items", id="item", user="user", kind="no_edge", edges="edges", count=400
)
HARD = SamplerSettings(
    items="items", id="item", user="user", hard_edges="hard", hard_count=2, count=3
)


def items() -> TensorSource:
    kinds = Ragged.from_lists([[3, 3], [1], [], [2], [4]])
    return TensorSource({"item": torch.from_numpy(IDS), "kind": kinds}, torch.zeros(5))


def pairs(*edges: tuple[int, int]) -> tuple[Any, Any]:
    users, own = zip(*edges, strict=True)
    return np.array(users), np.array(own)


def shares(ids: Any) -> dict[int, float]:
    known, counts = np.unique(ids, return_counts=True)
    return dict(zip(known.tolist(), (counts / counts.sum()).tolist(), strict=True))


@pytest.mark.parametrize("weights", [WEIGHTS, WEIGHTS * 1e-300, WEIGHTS * 1e300])
def test_items_that_are_not_in_the_batch_come_in_proportion_to_their_weights(weights: Any) -> None:
    sampler = Sampler(items(), SETTINGS, weights=weights)
    found = sampler.sample(np.array([50, 10, 50, 99]), None, (0, 0, 0))
    ids = found.ids["item"].values.numpy()
    assert ids.size == 4000
    want = {20: 2 / 9, 30: 3 / 9, 40: 4 / 9}
    got = shares(ids)
    assert got.keys() == want.keys()
    for one, share in want.items():
        assert got[one] == pytest.approx(share, abs=4 * (share / 4000) ** 0.5)
    logs = found.negatives.log_counts_N.double()
    expected = torch.tensor([want[int(one)] * 4000 for one in ids]).double().log()
    torch.testing.assert_close(logs, expected, rtol=1e-6, atol=1e-6)
    kinds = {30: [3, 3], 20: [2], 40: [4]}
    assert found.ids.to_lists()["kind"] == [kinds[int(one)] for one in ids]


def test_a_batch_that_leaves_out_almost_all_of_the_weight() -> None:
    weights = np.array([1e9, 1.0, 1e9, 2.0, 1e9])
    sampler = Sampler(items(), replace(SETTINGS, count=3000), weights=weights)
    found = sampler.sample(np.array([30, 50, 40]), None, (0, 0, 0))
    got = shares(found.ids["item"].values.numpy())
    assert got.keys() == {10, 20}
    assert got[20] == pytest.approx(2 / 3, abs=0.04)
    assert sorted(set(found.negatives.log_counts_N.exp().round().tolist())) == [1000, 2000]


def test_a_draw_depends_on_seed_and_key_alone() -> None:
    def ids(seed: int, *key: int) -> list[int]:
        one = Sampler(items(), replace(SETTINGS, count=40), seed=seed)
        one.sample(np.array([10]), None, (7, 7, 7))
        found: list[int] = one.sample(np.array([10]), None, key).ids["item"].values.tolist()
        return found

    first = ids(1, 0, 64, 0)
    assert first == ids(1, 0, 64, 0)
    others = [ids(2, 0, 64, 0), ids(1, 1, 64, 0), ids(1, 0, 128, 0), ids(1, 0, 64, 1)]
    assert first not in others


def test_an_item_with_an_edge_to_a_user_is_no_negative_of_that_user() -> None:
    edges = pairs((1, 10), (1, 20), (1, 20), (2, 50), (9, 40))
    sampler = Sampler(items(), EDGES, edges=edges)
    users, own = np.array([2, 1, 7]), np.array([50, 20, 30])
    found = sampler.sample(own, users, (0, 0, 0))
    drawn = found.ids["item"].values.numpy()
    assert set(drawn) == set(IDS)  # of all items, those of the batch among them
    places = np.concatenate([own, drawn])
    known = {tuple(pair) for pair in found.negatives.known.tolist()}
    has = {(0, 50), (1, 10), (1, 20)}
    want = {
        (row, at)
        for row in range(3)
        for at, item in enumerate(places)
        if at != row and (row, item) in has
    }
    assert known == want


def test_draws_without_what_is_in_the_batch_do_not_sum_all_items(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    size, count = 10_000, 64
    weights = np.where(np.arange(size) < 20, 300.0, 1.0)  # these are 38 % of the weight
    source = TensorSource({"item": torch.arange(size)}, torch.zeros(size))
    sampler = Sampler(source, replace(SETTINGS, count=count), weights=weights)
    sums = np.cumsum

    def of_few(values: Any, **how: Any) -> Any:
        assert len(values) < size
        return sums(values, **how)

    monkeypatch.setattr(np, "cumsum", of_few)
    drawn = []
    for batch in range(100):
        found = sampler.sample(np.arange(20), None, (0, batch, 0))
        drawn.append(found.ids["item"].values)
        expected = torch.full((count,), np.log(count / (size - 20)))
        torch.testing.assert_close(found.negatives.log_counts_N.double(), expected.double())
    whole = torch.cat(drawn)
    assert len(whole) == 100 * count
    assert int(whole.min()) >= 20
    assert float(whole.double().mean()) == pytest.approx((size + 19) / 2, rel=0.04)


@pytest.mark.parametrize("users", [100, 100_000])
def test_a_batch_reads_its_own_users_alone(users: int, monkeypatch: pytest.MonkeyPatch) -> None:
    edges = _Edges(np.arange(users) * 2, np.arange(users) % 7)
    monkeypatch.setattr(np, "diff", lambda *_, **__: pytest.fail("of all users"))
    rows, items = edges.of(np.array([2, 3, 2 * users - 2, 2 * users, 0, -1]))
    assert rows.tolist() == [0, 2, 4]
    assert items.tolist() == [1, (users - 1) % 7, 0]


def test_a_hard_negative_is_none_of_the_user_s_edges() -> None:
    settings = replace(EDGES, hard_edges="hard", hard_count=2)
    hard, edges = pairs((1, 10), (1, 20), (1, 30), (2, 10)), pairs((1, 10), (1, 20), (2, 50))
    sampler = Sampler(items(), settings, edges=edges, hard_edges=hard)
    for batch in range(10):
        found = sampler.sample(np.array([50, 50]), np.array([1, 2]), (0, batch, 0))
        assert found.negatives.hard_H.tolist() == [0, 1]
        assert found.ids["item"].values[settings.count :].tolist() == [30, 10]


def test_hard_negatives_are_pairs_of_example_and_item() -> None:
    edges = pairs((1, 10), (1, 20), (1, 30), (1, 40), (2, 50), (3, 10))
    sampler = Sampler(items(), HARD, hard_edges=edges)
    users, own = np.array([3, 1, 5, 2]), np.array([20, 30, 10, 50])
    seen = set()
    for batch in range(40):
        found = sampler.sample(own, users, (0, batch, 0))
        rows = found.negatives.hard_H.tolist()
        hard = found.ids["item"].values[3:].tolist()
        assert rows == [0, 1, 1]  # at most two, not the own item, users without any have none
        assert hard[0] == 10
        assert found.ids.batch_size == 3 + len(rows)
        assert len(set(hard[1:])) == 2
        seen.update(hard[1:])
    assert seen == {10, 20, 40}


def test_a_batch_has_the_items_after_its_examples() -> None:
    source = TensorSource(
        {
            "user": torch.tensor([1, 2]),
            "kind": Ragged.from_lists([[9], [8, 7]]),
            "item": torch.tensor([10, 50]),
        },
        torch.ones(2),
    )
    sampler = Sampler(items(), replace(SETTINGS, count=3))
    batch = extended(source.take(torch.arange(2)), sampler, (0, 0, 0))
    assert batch.ids.keys == ("user", "kind", "item")
    assert batch.labels.numel() == 2
    lists = batch.ids.to_lists()
    assert lists["user"] == [[1], [2], [], [], []]
    kinds = {30: [3, 3], 20: [2], 40: [4]}
    assert lists["kind"] == [[9], [8, 7], *(kinds[item] for (item,) in lists["item"][2:])]
    assert batch.negatives is not None
    assert batch.negatives.size == 3
    empty = extended(source.take(torch.arange(0)), sampler, (0, 0, 0))
    assert empty.ids.batch_size == 0


@pytest.mark.parametrize("side", ["examples", "items"])
def test_weights_of_ids_on_one_side_only(side: str) -> None:
    lists, weights = Ragged.from_lists([[3, 3], [1], [], [2], [4]]), torch.arange(5) / 4
    given = {"kind": weights}
    mine = TensorSource(
        {"item": torch.from_numpy(IDS), "kind": lists},
        torch.ones(5),
        id_weights=given if side == "examples" else None,
    )
    theirs = TensorSource(
        {"item": torch.from_numpy(IDS), "kind": lists},
        torch.ones(5),
        id_weights=given if side == "items" else None,
    )
    sampler = Sampler(theirs, replace(SETTINGS, count=2))
    batch = extended(mine.take(torch.tensor([1, 2])), sampler, (0, 0, 0))
    known = {30: [0.0, 0.25], 10: [0.5], 50: [], 20: [0.75], 40: [1.0]}
    own, drawn = batch.ids["item"].values[:2].tolist(), batch.ids["item"].values[2:].tolist()
    got = batch.ids.weights_of("kind")
    assert got is not None
    want = [
        weight if on == side else 1.0
        for on, ids in (("examples", own), ("items", drawn))
        for one in ids
        for weight in known[one]
    ]
    assert got.tolist() == want


def test_a_loader_continues_with_the_same_items() -> None:
    rows = torch.arange(20) % 5
    source = TensorSource({"item": torch.from_numpy(IDS)[rows]}, torch.ones(20))
    sampler = Sampler(items(), replace(SETTINGS, count=8), seed=3)

    def drawn(position: int, rank: int = 0) -> list[list[int]]:
        order, share = Order(passes=2, shuffle="always"), RankShare(rank, 2)
        loader = Loader(source, 4, order=order, share=share, sampler=sampler)
        return [batch.ids["item"].values.tolist() for batch in loader.batches(position)]

    whole = drawn(0)
    assert len(whole) == 10
    assert {len(batch) for batch in whole} == {2 + 8}
    assert drawn(12) == whole[3:]
    assert drawn(24) == whole[6:]
    assert drawn(0, rank=1) != whole


RECIPE = Recipe(
    ids=(
        IdFeature(name="user"),
        IdFeature(name="item"),
        IdFeature(name="kind", is_list=True),
    ),
    label="label",
    computed=FeatureSet(
        (
            FeatureSpec(name="year", kind=Raw(), ids=Boundaries(edges=(2000.0,))),
            FeatureSpec(name="age", kind=Raw()),
        )
    ),
)
TABLE = {
    "item": ["a", "b", "c"],
    "kind": [["x", "y"], [], ["z"]],
    "year": [1990, 2010, 2020],
    "n": [1, 2, 3],
}


def write(folder: Path, name: str, table: dict[str, list[Any]], suffix: str) -> str:
    path = folder / f"{name}.{suffix}"
    if suffix == "csv":
        text = [" ".join(v) for v in table.pop("kind", [])]
        csv.write_csv(pa.table(table | ({"kind": text} if text else {})), path)
    else:
        pq.write_table(pa.table(table), path)
    return str(path)


@pytest.mark.parametrize("suffix", ["parquet", "csv"])
def test_files_are_read_as_those_of_examples(tmp_path: Path, suffix: str) -> None:
    from shoal.data.features import encode

    examples = {**TABLE, "user": ["u", "v", "v"], "age": [1.0, 2.0, 3.0], "label": [1, 1, 1]}
    batch = encode(pa.table(examples), RECIPE, "examples").take(torch.arange(3))
    settings = SamplerSettings(
        kind="no_edge",
        items=write(tmp_path, "items", {**TABLE}, suffix),
        id="item",
        weight="n",
        attributes=("kind", "year"),
        count=50,
        user="user",
        edges=write(tmp_path, "edges", {"user": ["v"], "item": ["a"]}, suffix),
    )
    sampler = Sampler.open(settings, RECIPE, seed=1)
    found = extended(batch, sampler, (0, 0, 0))
    places = [batch.ids["item"].values.tolist().index(one) for one in found.ids["item"].values]
    lists, own = found.ids.to_lists(), batch.ids.to_lists()
    for name in ("item", "kind", "year"):
        assert lists[name] == [own[name][place] for place in places]
    assert lists["user"][3:] == [[]] * 50
    assert found.negatives is not None
    first = [at for at, place in enumerate(places) if place == 0]
    known = found.negatives.known.tolist()
    assert sorted(known) == [[row, at] for row in (1, 2) for at in first]


def test_bad_items_and_edges_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"id 10 of items: got in rows 1 and 2"):
        twice = TensorSource({"item": torch.tensor([5, 10, 10])}, torch.zeros(3))
        Sampler(twice, SETTINGS)
    for bad in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(DataError, match="weight in row 3 of items"):
            Sampler(items(), SETTINGS, weights=np.array([1, 1, 1, bad, 1]))
    with pytest.raises(DataError, match="item in row 1 of edges: got no item 7"):
        Sampler(items(), EDGES, edges=pairs((1, 10), (1, 7)))
    with pytest.raises(DataError, match="hard_edges in hard: got none"):
        Sampler(items(), HARD, hard_edges=(np.empty(0, np.int64), np.empty(0, np.int64)))
    with pytest.raises(ConfigError, match="edges of a sampler: got none"):
        Sampler(items(), EDGES)
    with pytest.raises(ConfigError, match="hard_edges of a sampler: got some"):
        Sampler(items(), SETTINGS, hard_edges=pairs((1, 10)))
    with pytest.raises(DataError, match="sum of the weights of items: got inf"):
        Sampler(items(), SETTINGS, weights=np.full(5, 1e308))
    with pytest.raises(ConfigError, match="seed of a sampler: got -1"):
        Sampler(items(), SETTINGS, seed=-1)
    with pytest.raises(DataError, match="no items"):
        Sampler(items().select(torch.arange(0)), SETTINGS)
    with pytest.raises(InputError, match="items to draw negatives of: got all 5 are in the batch"):
        Sampler(items(), SETTINGS).sample(IDS, None, (0, 0, 0))
    with pytest.raises(InputError, match=r"ids of 'kind' for data\.sampler: got 2 in row 0"):
        Sampler(items(), replace(SETTINGS, id="kind"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "negativ"}, "kind of data.sampler: got 'negativ'"),
        ({"count": 0}, "count of data.sampler: got 0"),
        ({"hard_count": 3}, "hard_edges of data.sampler: got None"),
        ({"edges": "file"}, "edges of data.sampler: got 'file'"),
        ({"kind": "no_edge"}, "edges of data.sampler: got None"),
        ({"user": "user"}, "user of data.sampler: got 'user'"),
    ],
)
def test_settings_that_do_not_fit_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(SETTINGS, **change)


def test_files_that_do_not_fit_are_named(tmp_path: Path) -> None:
    path = write(tmp_path, "items", TABLE, "parquet")
    settings = SamplerSettings(items=path, id="item", weight="n", count=1)
    with pytest.raises(DataError, match=r"column 'weigt' of.*allowed: item, kind, year, n"):
        Sampler.open(replace(settings, weight="weigt"), RECIPE)
    with pytest.raises(DataError, match=r"none\.parquet of data\.sampler"):
        Sampler.open(replace(settings, items=str(tmp_path / "none.parquet")), RECIPE)
    with pytest.raises(ConfigError, match=r"feature of data\.sampler: got 'age'"):
        Sampler.open(replace(settings, attributes=("age",)), RECIPE)
    (tmp_path / "latin.csv").write_text("item,n,größe\n1,1,2\n", encoding="latin-1")
    with pytest.raises(DataError, match=r"latin\.csv of data\.sampler"):
        Sampler.open(replace(settings, items=str(tmp_path / "latin.csv")), RECIPE)
    (tmp_path / "torn.parquet").write_bytes(Path(path).read_bytes()[:50])
    with pytest.raises(DataError, match=r"torn\.parquet of data\.sampler"):
        Sampler.open(replace(settings, items=str(tmp_path / "torn.parquet")), RECIPE)
