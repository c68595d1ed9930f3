"""Sources: memory, Parquet, CSV, subsets, made-up clicks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from shoal.data import (
    Batch,
    CsvSource,
    IdFeature,
    ParquetSource,
    Recipe,
    Source,
    Subset,
    SyntheticClicks,
    TensorSource,
    split_by_time,
)
from shoal.errors import ConfigError, DataError, DTypeError, InputError, ShapeError
from shoal.metrics import auc
from shoal.ragged import Ragged

RECIPE = Recipe(
    ids=(
        IdFeature(name="item"),
        IdFeature(name="pair", columns=("item", "place")),
        IdFeature(name="seen", is_list=True, max_length=3),
    ),
    label="click",
    dense=("price", "age"),
    time="at",
    weight="weight",
)
ROWS = 10


def table() -> pa.Table:
    return pa.table(
        {
            "item": pa.array(range(100, 100 + ROWS)),
            "place": pa.array(["home", "away"] * (ROWS // 2)),
            "seen": pa.array([list(range(row % 4)) for row in range(ROWS)], pa.list_(pa.int64())),
            "click": pa.array([row % 2 for row in range(ROWS)]),
            "price": pa.array([row / 2 for row in range(ROWS)]),
            "age": pa.array(range(ROWS)),
            "at": pa.array([1000 + row for row in range(ROWS)]),
            "weight": pa.array([1.0 + row for row in range(ROWS)]),
        }
    )


def same(left: Batch, right: Batch) -> None:
    assert left.ids.to_lists() == right.ids.to_lists()
    for name in ("labels", "dense", "weights", "times_B"):
        assert torch.equal(getattr(left, name), getattr(right, name)), name
    assert left.event_time_s == right.event_time_s


@pytest.fixture
def parquet(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / "first.parquet", tmp_path / "second.parquet"]
    pq.write_table(table().slice(0, 7), paths[0], row_group_size=3)
    pq.write_table(table().slice(7), paths[1], row_group_size=3)
    return paths


def test_parquet_examples_are_the_rows_of_all_files_by_number(parquet: list[Path]):
    source = ParquetSource(parquet, RECIPE, cached_groups=1)
    assert isinstance(source, Source)
    assert (len(source), source.num_dense) == (ROWS, 2)
    assert source.features == ("item", "pair", "seen")
    assert source.times().tolist() == list(range(1000, 1000 + ROWS))
    batch = source.take(torch.tensor([8, 1, 7, 1, 6]))
    assert batch.ids.to_lists()["item"] == [[108], [101], [107], [101], [106]]
    assert batch.ids.to_lists()["seen"] == [[], [0], [0, 1, 2], [0], [0, 1]]
    assert batch.labels.tolist() == [0, 1, 1, 1, 0]
    assert batch.dense is not None
    assert batch.dense.tolist() == [[4, 8], [0.5, 1], [3.5, 7], [0.5, 1], [3, 6]]
    assert batch.event_times_B.tolist() == [1008, 1001, 1007, 1001, 1006]
    assert batch.event_time_s == 1008
    assert batch.weights is not None
    assert batch.weights.tolist() == [9, 2, 8, 2, 7]
    assert source.take(torch.empty(0, dtype=torch.int64)).labels.numel() == 0


def test_parquet_does_not_depend_on_row_groups_or_cache(parquet: list[Path], tmp_path: Path):
    whole = tmp_path / "whole.parquet"
    pq.write_table(table(), whole)
    rows = torch.tensor([9, 0, 3, 4, 2, 8])
    one = ParquetSource([whole], RECIPE).take(rows)
    same(ParquetSource(parquet, RECIPE, cached_groups=1).take(rows), one)
    same(ParquetSource(parquet, RECIPE, cached_groups=9).take(rows), one)


def test_csv_reads_what_parquet_reads(tmp_path: Path, parquet: list[Path]):
    path = tmp_path / "rows.csv"
    names = table().column_names
    lines = [",".join(names)]
    for row in table().to_pylist():
        row["seen"] = " ".join(map(str, row["seen"]))
        lines.append(",".join(str(row[name]) for name in names))
    path.write_text("\n".join(lines) + "\n")
    rows = torch.arange(ROWS)
    csv = CsvSource((path,), RECIPE)
    assert (len(csv), csv.num_dense, csv.features) == (ROWS, 2, RECIPE.features)
    same(csv.take(rows), ParquetSource(parquet, RECIPE).take(rows))
    assert csv.times().tolist() == list(range(1000, 1000 + ROWS))


def test_csv_lists_of_text_are_hashed_words(tmp_path: Path):
    path = tmp_path / "rows.csv"
    path.write_text("tags,y\na b,1\n,0\nb,1\n")
    recipe = Recipe(ids=(IdFeature(name="tags", is_list=True),), label="y")
    first, none, last = CsvSource((path,), recipe).take(torch.arange(3)).ids.to_lists()["tags"]
    assert (len(first), none, last) == (2, [], [first[1]])


def test_split_by_time_sorts_and_divides():
    times = torch.tensor([5, 1, 9, 3, 7, 3])
    ids = {"id": torch.arange(6)}
    source = TensorSource(ids, torch.zeros(6), times_s=times)
    before, after = split_by_time(source, 5)
    assert before.take(torch.arange(len(before))).ids.to_lists()["id"] == [[1], [3], [5]]
    assert after.take(torch.arange(len(after))).ids.to_lists()["id"] == [[0], [4], [2]]
    assert after.times().tolist() == [5, 7, 9]
    assert (after.features, after.num_dense) == (("id",), 0)


@pytest.mark.parametrize(
    ("rows", "error"),
    [
        (torch.tensor([0, 6]), InputError),
        (torch.tensor([-1]), InputError),
        (torch.tensor([0.0]), ShapeError),
    ],
)
def test_a_subset_refuses_rows_that_are_not_there(rows: torch.Tensor, error: type[Exception]):
    source = TensorSource({"id": torch.arange(6)}, torch.zeros(6))
    with pytest.raises(error, match="rows of a subset"):
        Subset(source, rows)


@pytest.mark.parametrize(
    ("ids", "more", "error", "words"),
    [
        ({}, {}, InputError, "id features"),
        ({"a": torch.arange(3)}, {}, ShapeError, "ids of 'a'"),
        ({"a": torch.zeros(4)}, {}, DTypeError, "ids of 'a'"),
        ({"a": Ragged.from_lists([[1]] * 3)}, {}, ShapeError, "lists of 'a'"),
        ({"a": torch.arange(4)}, {"dense": torch.zeros(4)}, ShapeError, "dense"),
        ({"a": torch.arange(4)}, {"weights": torch.zeros(3)}, ShapeError, "weights"),
        ({"a": torch.arange(4)}, {"times_s": torch.zeros(4)}, DTypeError, "times_s"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    ids: Mapping[str, torch.Tensor | Ragged],
    more: Mapping[str, torch.Tensor],
    error: type[Exception],
    words: str,
):
    with pytest.raises(error, match=words):
        TensorSource(ids, torch.zeros(4), **more)


def test_bad_files_name_themselves(tmp_path: Path):
    good, text = tmp_path / "good.parquet", tmp_path / "text.parquet"
    none, nothing = tmp_path / "none.parquet", tmp_path / "empty.parquet"
    pq.write_table(table(), good)
    pq.write_table(table().slice(0, 0), none)
    text.write_text("not parquet")
    nothing.touch()
    (tmp_path / "empty.csv").touch()
    (tmp_path / "header.csv").write_text(",".join(RECIPE.columns) + "\n")
    for path in (text, none, nothing, tmp_path / "absent.parquet"):
        with pytest.raises(DataError, match=path.name):
            ParquetSource([good, path], RECIPE)
    for name in ("empty.csv", "header.csv", "absent.csv"):
        with pytest.raises(DataError, match=name):
            CsvSource((tmp_path / name,), RECIPE)
    for paths in ([], "good.parquet"):
        with pytest.raises(DataError, match="paths"):
            ParquetSource(paths, RECIPE)


def test_a_missing_column_is_named_with_its_nearest(tmp_path: Path):
    path = tmp_path / "rows.parquet"
    pq.write_table(table().rename_columns({"price": "prize"}), path)
    with pytest.raises(DataError, match=r"'price'.*rows\.parquet.*prize"):
        ParquetSource([path], RECIPE)


def test_a_damaged_row_group_is_a_data_error(tmp_path: Path):
    path = tmp_path / "rows.parquet"
    pq.write_table(table(), path, compression="zstd")
    content = bytearray(path.read_bytes())
    content[4:200] = bytes(196)
    path.write_bytes(content)
    source = ParquetSource([path], RECIPE)
    with pytest.raises(DataError, match=r"rows\.parquet"):
        source.take(torch.arange(3))


CLICKS = SyntheticClicks(examples=20_000, num_features=3, vocabulary=1000, seed=7)


def test_clicks_are_a_function_of_seed_and_number():
    whole = CLICKS.take(torch.arange(1000))
    rows = torch.tensor([999, 3, 500])
    part = CLICKS.take(rows)
    assert torch.equal(part.labels, whole.labels[rows])
    assert whole.dense is not None
    assert part.dense is not None
    assert torch.equal(part.dense, whole.dense[rows])
    lists = whole.ids.to_lists()
    assert part.ids.to_lists() == {name: [lists[name][row] for row in rows] for name in lists}
    other = SyntheticClicks(examples=20_000, num_features=3, vocabulary=1000, seed=8)
    assert other.take(torch.arange(1000)).ids.to_lists() != lists
    later = SyntheticClicks(examples=10, num_features=3, vocabulary=1000, seed=7, first=990)
    assert later.take(torch.arange(10)).ids.to_lists()["f0"] == lists["f0"][990:]


def test_clicks_have_golden_ids():
    ids = SyntheticClicks(examples=4, num_features=2).take(torch.arange(4)).ids.to_lists()
    assert ids == GOLDEN


def test_zipf_ids_have_their_shares():
    clicks = SyntheticClicks(
        examples=200_000, num_features=1, vocabulary=10_000, exponent=1.2, fresh_share=0.0
    )
    ids = clicks.take(torch.arange(200_000)).ids["f0"].values
    _, counts = torch.unique(ids, return_counts=True)
    share = counts.sort(descending=True).values / 200_000
    # The share of floored rank r is (r^-.2 - (r+1)^-.2) / (1 - 10001^-.2), r from 1.
    ranks = torch.arange(1, 6, dtype=torch.float64)
    expected = (ranks**-0.2 - (ranks + 1) ** -0.2) / (1 - 10_001**-0.2)
    assert torch.allclose(share[:5].double(), expected, rtol=0.05)
    assert counts.numel() > 4000


def test_new_ids_keep_arriving():
    clicks = SyntheticClicks(
        examples=100_000, num_features=1, vocabulary=1000, fresh_share=0.25, fresh_per_example=0.1
    )
    seen = np.array([], dtype=np.int64)
    for start in range(0, 100_000, 20_000):
        ids = clicks.take(torch.arange(start, start + 20_000)).ids["f0"].values.numpy()
        fresh = np.setdiff1d(ids, seen)
        assert fresh.size > 700
        seen = np.union1d(seen, ids)


def test_the_signal_is_there_and_chances_bound_it():
    rows = torch.arange(20_000)
    batch, chances = CLICKS.take(rows), CLICKS.chances(rows)
    assert auc(chances, batch.labels) > 0.68
    assert float(batch.labels.mean()) == pytest.approx(float(chances.mean()), abs=0.01)
    assert batch.dense is not None
    assert float(batch.dense.mean()) == pytest.approx(0, abs=0.02)
    assert float(batch.dense.std()) == pytest.approx(1, abs=0.02)


def test_times_of_clicks_advance():
    clicks = SyntheticClicks(examples=5000, examples_per_s=1000, start_s=50, num_features=1)
    assert clicks.times().tolist() == [50 + row // 1000 for row in range(5000)]
    assert clicks.take(torch.tensor([4999, 0])).event_time_s == 54


@pytest.mark.parametrize("setting", [{"vocabulary": 0}, {"fresh_share": 1.5}, {"exponent": 0.0}])
def test_clicks_refuse_wrong_settings(setting: Mapping[str, float]):
    (name,) = setting
    with pytest.raises(ConfigError, match=name):
        SyntheticClicks(examples=10, **setting)


def test_a_vocabulary_of_hundreds_of_millions_takes_no_memory():
    clicks = SyntheticClicks(
        examples=100_000, vocabulary=500_000_000, exponent=0.5, num_features=1, fresh_share=0.0
    )
    ids = clicks.take(torch.arange(100_000)).ids.values_N
    assert torch.unique(ids).numel() > 99_900


GOLDEN = {
    "f0": [
        [-1553256635884057498],
        [-5921673374102979802],
        [-2960836687051489901],
        [-1383546595747735393],
    ],
    "f1": [
        [8512272905218513655],
        [3427822977328617995],
        [-17459890748657294],
        [-3660020529200759405],
    ],
}
