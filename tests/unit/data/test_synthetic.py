"""Twins of public data sets: their columns, skew, and labels that can be learned."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shoal.data import write_like
from shoal.errors import ConfigError, DataError

ROWS = 4000


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> dict[str, pa.Table]:
    folder = tmp_path_factory.mktemp("data")
    made = {}
    for like in ("criteo", "taobao", "movielens"):
        files = write_like(like, ROWS, folder / like)  # type: ignore[arg-type]
        parts = [pq.read_table(file) for file in files]
        assert [part.num_rows for part in parts] == [3600, 400]
        made[like] = pa.concat_tables(parts)
    return made


def test_columns_are_those_of_the_data_sets(tables: dict[str, pa.Table]) -> None:
    counts, ids = [f"I{k}" for k in range(1, 14)], [f"C{k}" for k in range(1, 27)]
    assert tables["criteo"].column_names == ["label", *counts, *ids]
    assert {"user_id", "cms_segid", "pid", "price", "adgroup_id", "cate_id", "brand"} <= set(
        tables["taobao"].column_names
    )
    assert {"user_id", "movie_id", "rating", "genres", "timestamp", "zip_code"} <= set(
        tables["movielens"].column_names
    )


def test_ids_are_skewed_and_some_values_missing(tables: dict[str, pa.Table]) -> None:
    for like, name in (("criteo", "C3"), ("taobao", "user_id"), ("movielens", "movie_id")):
        counts = [n for _, n in Counter(tables[like][name].drop_null().to_pylist()).most_common()]
        assert counts[0] > 5 * counts[len(counts) // 2]
        assert 50 < len(counts) <= ROWS // 20
    assert 0.05 < tables["criteo"]["I1"].null_count / ROWS < 0.15
    assert 0.02 < tables["criteo"]["C3"].null_count / ROWS < 0.08
    assert all(len(text) == 8 for text in tables["criteo"]["C1"].to_pylist())


def test_histories_have_one_length_and_an_ads_own_values(tables: dict[str, pa.Table]) -> None:
    table = tables["taobao"]
    ads, cates = (table[f"click_50_seq__{n}"].to_pylist() for n in ("adgroup_id", "cate_id"))
    lengths = [len(own) for own in ads]
    assert [len(own) for own in cates] == lengths
    assert (min(lengths), max(lengths) <= 50) == (0, True)
    cate_of = dict(zip(table["adgroup_id"].to_pylist(), table["cate_id"].to_pylist(), strict=True))
    for own, its in zip(ads[:200], cates[:200], strict=True):
        assert all(cate_of.get(ad, cate) == cate for ad, cate in zip(own, its, strict=True))


def test_labels_follow_what_models_are_to_find(tables: dict[str, pa.Table]) -> None:
    table = tables["taobao"]
    click, buy = table["clk"].to_numpy(), table["buy"].to_numpy()
    assert (buy <= click).all()
    assert 0.1 < click.mean() < 0.6
    seen = table["click_50_seq__cate_id"].to_pylist()
    alike = np.array([c in own for c, own in zip(table["cate_id"].to_pylist(), seen, strict=True)])
    assert click[alike].mean() > click[~alike].mean() + 0.2
    movies = tables["movielens"]
    assert ((movies["rating"].to_numpy() >= 4) == movies["label"].to_numpy()).all()
    assert set(movies["rating"].to_pylist()) == {1, 2, 3, 4, 5}


def test_a_seed_makes_the_same_rows_again(tmp_path: Path) -> None:
    made = [
        pq.read_table(write_like("taobao", 500, tmp_path / str(k), seed=seed)[0])
        for k, seed in enumerate((3, 3, 4))
    ]
    assert made[0] == made[1]
    assert made[0] != made[2]


def test_wrong_requests_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="criteo, taobao, movielens"):
        write_like("avazu", 1000, tmp_path)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="rows of a data set"):
        write_like("criteo", 5, tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="folder"):
        write_like("movielens", 1000, tmp_path / "file")
