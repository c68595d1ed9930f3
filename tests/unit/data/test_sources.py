"""Sources: memory, Parquet, CSV, subsets, made-up clicks."""

from __future__ import annotations

import weakref
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
    Quarantine,
    Recipe,
    Source,
    Subset,
    SyntheticClicks,
    TensorSource,
    sources,
    split_by_time,
)
from shoal.errors import ConfigError, DataError, DTypeError, InputError, ShapeError
from shoal.ids import hash_strings
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


ONE = Recipe(ids=(IdFeature(name="u"),), label="y")
MANY = Recipe(ids=(IdFeature(name="u", is_list=True),), label="y")
PARTS = Recipe(ids=(IdFeature(name="u", columns=("u", "u")),), label="y")


def csv_of(folder: Path, cells: list[str], name: str = "rows.csv") -> Path:
    path = folder / name
    path.write_text("u,y\n" + "".join(f"{cell},0\n" for cell in cells))
    return path


def parquet_of(folder: Path, values: pa.Array, name: str = "rows.parquet") -> Path:
    pq.write_table(pa.table({"u": values, "y": [0.0] * len(values)}), folder / name)
    return folder / name


def ids_in(path: Path, recipe: Recipe = ONE) -> list[list[int]]:
    make = CsvSource if path.suffix == ".csv" else ParquetSource
    source = make((path,), recipe)
    return source.take(torch.arange(len(source))).ids.to_lists()["u"]


@pytest.mark.parametrize(
    ("cells", "values"),
    [
        (["12", "13"], pa.array([12, 13], pa.int8())),
        (["12", "13"], pa.array(["12", "13"])),
        (["12", "A7"], pa.array(["12", "A7"]).dictionary_encode()),
        (['"12"', "13"], pa.array([12, 13], pa.uint64())),
        (["12", "18446744073709551615"], pa.array([12, (1 << 64) - 1], pa.uint64())),
        (["12", "true"], pa.array(["12", "true"])),
        (["True", "false"], pa.array([True, False])),
        (["5.5", "2013-01-01"], pa.array(["5.5", "2013-01-01"])),
        (["NA", "null"], pa.array(["NA", "null"], pa.large_string())),
        (["nan", "N/A"], pa.array([b"nan", b"N/A"])),
    ],
    ids=str,
)
def test_an_id_depends_on_its_value_and_not_on_its_file(
    cells: list[str], values: pa.Array, tmp_path: Path
):
    want = ids_in(parquet_of(tmp_path, values))
    assert ids_in(csv_of(tmp_path, cells)) == want
    # Each by itself, among other text, as a list and crossed.
    for cell, own in zip(cells, want, strict=True):
        assert ids_in(csv_of(tmp_path, [cell])) == [own]
        assert ids_in(csv_of(tmp_path, ["x1", cell]))[1] == own
        assert ids_in(csv_of(tmp_path, [cell]), MANY) == [own]
        assert ids_in(csv_of(tmp_path, [f"{cell} x1"]), MANY)[0][:1] == own
    lists = pa.ListArray.from_arrays(list(range(len(values) + 1)), values)
    assert ids_in(parquet_of(tmp_path, lists), MANY) == want
    assert ids_in(csv_of(tmp_path, cells), PARTS) == ids_in(parquet_of(tmp_path, values), PARTS)


def test_files_of_one_source_may_differ_in_type(tmp_path: Path):
    paths = [
        parquet_of(tmp_path, pa.array([12, 13]), "a.parquet"),
        parquet_of(tmp_path, pa.array(["13", "A7"]), "b.parquet"),
    ]
    lists = ParquetSource(paths, ONE).take(torch.arange(4)).ids.to_lists()["u"]
    assert lists[:3] == [[12], [13], [13]]
    texts = (csv_of(tmp_path, ["12", "13"], "a.csv"), csv_of(tmp_path, ["13", "A7"], "b.csv"))
    assert CsvSource(texts, ONE).take(torch.arange(4)).ids.to_lists()["u"] == lists


def test_empty_csv_cells_are_missing_and_others_are_not(tmp_path: Path):
    lists = ids_in(csv_of(tmp_path, ["US NA", "NA", "null", "", '""', "  "]), MANY)
    assert [len(own) for own in lists] == [2, 1, 1, 0, 0, 0]
    assert lists[0][1:] == lists[1]
    for cell in ("", '""'):
        with pytest.raises(DataError, match=r"id column 'u' in row 1 of .*rows\.csv.*got null"):
            ids_in(csv_of(tmp_path, ["NA", cell]))


NUMBERS = Recipe(ids=(IdFeature(name="u"),), label="y", dense=("x",), weight="w", dense_fill=-1.0)
HEADER = "u,y,x,w\n"


def test_csv_numbers_do_not_depend_on_the_rest_of_the_column(tmp_path: Path):
    path = tmp_path / "rows.csv"
    # Integers fill the first block that a reader could guess types from.
    path.write_text(
        HEADER + "7,0,1,1\n" * 200_000 + "7,true, 0.5 ,2.5\n7,1,NA,1\n7,0,nan,1\n7,1,,1\n"
    )
    batch = CsvSource((path,), NUMBERS).take(torch.arange(199_999, 200_004))
    assert batch.dense is not None
    assert batch.weights is not None
    assert batch.dense[:, 0].tolist() == [1, 0.5, -1, -1, -1]
    assert batch.labels.tolist() == [0, 1, 1, 0, 1]
    assert batch.weights.tolist() == [1, 2.5, 1, 1, 1]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("7,0,abc,1\n7,0,zzz,1", "'x' in row 2.*got 'abc'.*a number"),
        ("7,0,inf,1", "'x' in row 2.*got inf"),
        ("7,0,1,", "'w' in row 2.*got null"),
        ("7,0,1,-1", "'w' in row 2.*got -1"),
        ("7,0,1,inf", "'w' in row 2.*got inf"),
        ("7,,1,1", "'y' in row 2.*got null"),
        ("7,nan,1,1", "'y' in row 2.*got n"),
        ("7,2,1,1", "'y' in row 2.*got 2"),
    ],
)
def test_csv_errors_name_file_column_and_row(line: str, words: str, tmp_path: Path):
    path = tmp_path / "rows.csv"
    path.write_text(f"{HEADER}7,0,1,1\n7,0,1,1\n{line}\n")
    with pytest.raises(DataError, match=words) as raised:
        CsvSource((path,), NUMBERS)
    assert "rows.csv" in str(raised.value)


@pytest.mark.parametrize(
    ("cells", "seconds"),
    [
        (["7", " 8 "], [7, 8]),
        (["1970-01-02", "1970-01-01 00:00:09.5"], [86_400, 9]),
        (["1970-01-01T00:00:09Z", "1970-01-01 01:00:00+01:00"], [9, 0]),
    ],
)
def test_csv_times(cells: list[str], seconds: list[int], tmp_path: Path):
    path = tmp_path / "rows.csv"
    path.write_text("u,y,at\n" + "".join(f"1,0,{cell}\n" for cell in cells))
    recipe = Recipe(ids=(IdFeature(name="u"),), label="y", time="at")
    assert CsvSource((path,), recipe).times().tolist() == seconds


@pytest.mark.parametrize(
    ("cell", "got"),
    [
        ("", "null"),
        ("NA", "null"),
        ("soon", "'soon'"),
        ("1970-01-01", "'1970-01-01'"),
        ("-1", "-1"),
    ],
)
def test_csv_times_that_are_none(cell: str, got: str, tmp_path: Path):
    path = tmp_path / "rows.csv"
    path.write_text(f"u,y,at\n1,0,7\n1,0,{cell}\n")
    recipe = Recipe(ids=(IdFeature(name="u"),), label="y", time="at")
    with pytest.raises(DataError, match=rf"column 'at' in row 1 of .*rows\.csv: got {got}"):
        CsvSource((path,), recipe)


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_time_may_be_a_number_and_an_id(kind: str, tmp_path: Path):
    path = tmp_path / f"rows.{kind}"
    if kind == "csv":
        path.write_text("y,at\n0,7\n1,8\n")
    else:
        pq.write_table(pa.table({"y": [0.0, 1], "at": [7, 8]}), path)
    ids = (IdFeature(name="u", columns=("at",)),)
    recipe = Recipe(ids=ids, label="y", time="at", dense=("at",))
    source = (CsvSource if kind == "csv" else ParquetSource)((path,), recipe)
    batch = source.take(torch.arange(2))
    assert batch.ids.to_lists()["u"] == [[7], [8]]
    assert batch.dense is not None
    assert batch.dense.tolist() == [[7], [8]]
    assert source.times().tolist() == [7, 8]


def test_other_columns_of_a_csv_do_not_matter(tmp_path: Path):
    path = tmp_path / "rows.csv"
    path.write_text("note,u,y,note\n" + "1,7,0,1\n" * 300_000 + "text,8,1,text\n")
    assert len(CsvSource((path,), ONE)) == 300_001


def test_a_row_is_numbered_within_its_file(tmp_path: Path):
    recipe = Recipe(ids=(IdFeature(name="u"),), label="y", dense=("x",))
    values = [0.0] * 8 + [float("nan")]
    paths = [tmp_path / name for name in ("a.parquet", "b.parquet")]
    for path in paths:
        columns = {"u": range(9), "y": [0.0] * 9, "x": values if path == paths[1] else range(9)}
        pq.write_table(pa.table(columns), path, row_group_size=3)
    source = ParquetSource(paths, recipe)
    with pytest.raises(DataError, match=r"'x' in row 8 of .*b\.parquet"):
        source.take(torch.tensor([1, 17]))


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_header_that_names_a_column_twice_is_refused(kind: str, tmp_path: Path):
    good, bad = tmp_path / f"good.{kind}", tmp_path / f"bad.{kind}"
    if kind == "csv":
        good.write_text("y,u\n0,1\n")
        bad.write_text("u,v,u,y\n1,2,3,0\n")
    else:
        pq.write_table(pa.table([[0.0], [1]], names=["y", "u"]), good)
        pq.write_table(pa.table([[1], [2], [3], [0.0]], names=["u", "v", "u", "y"]), bad)
    make = CsvSource if kind == "csv" else ParquetSource
    with pytest.raises(DataError, match=rf"columns of .*bad\.{kind}.*'u' at places 0, 2"):
        make((good, bad), ONE)


def test_types_of_all_parquet_files_are_checked_at_opening(tmp_path: Path):
    good = parquet_of(tmp_path, pa.array([1]), "good.parquet")
    bad = parquet_of(tmp_path, pa.array([1.5]), "bad.parquet")
    with pytest.raises(DataError, match=r"type of column 'u' of .*bad\.parquet.*double"):
        ParquetSource([good, bad], ONE)


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


LISTS: list[list[int]] = [[1, 2], [], [3], [], [-4, 5, 6], []]
REPEATED = [row % 6 for row in range(0, 200, 5)]


@pytest.mark.parametrize("rows", [[], [1], [4, 0, 0, 5, 2], [3, 1, 5], REPEATED])
@pytest.mark.parametrize("default", [torch.float32, torch.float64, torch.bfloat16])
def test_a_batch_has_the_lists_of_its_examples_in_any_order_of_features(
    rows: list[int], default: torch.dtype
):
    strided = Ragged.from_lists(LISTS)
    values, offsets = (
        torch.stack([one, one], 1)[:, 0] for one in (strided.values, strided.offsets_B1)
    )
    ids = {
        "first": Ragged(values, offsets),
        "a": torch.arange(10, 16),
        "b": torch.arange(20, 32)[::2],
        "weighted": Ragged.from_lists(LISTS[::-1]),
        "last": torch.arange(30, 36),
    }
    weights = torch.arange(1.0, 13.0, dtype=torch.float32)[::2]
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        source = TensorSource(ids, torch.zeros(6), id_weights={"weighted": weights})
        taken = source.take(torch.tensor(rows, dtype=torch.int64)).ids
    finally:
        torch.set_default_dtype(before)
    assert taken.to_lists() == {
        "first": [LISTS[row] for row in rows],
        "a": [[10 + row] for row in rows],
        "b": [[20 + 2 * row] for row in rows],
        "weighted": [LISTS[5 - row] for row in rows],
        "last": [[30 + row] for row in rows],
    }
    of_row = [[], [1.0, 3.0, 5.0], [], [7.0], [], [9.0, 11.0]]
    assert taken.weights_of("weighted").tolist() == [one for row in rows for one in of_row[row]]
    plain = [taken.weights_of(name) for name in ("first", "a", "b", "last")]
    assert all(one is not None and one.dtype == torch.float32 and (one == 1).all() for one in plain)


@pytest.mark.parametrize("offsets", [[0, 2, 10], [0, 50_000, 3], [1, 2, 3], [0, 2, 2]])
def test_offsets_that_are_none_are_refused(offsets: list[int]):
    lists = Ragged(torch.arange(3), torch.tensor(offsets))
    with pytest.raises(ShapeError, match="offset"):
        TensorSource({"id": lists}, torch.zeros(2))


@pytest.mark.parametrize("offsets", [[0, 2, 10], [0, 50_000, 3], [-1, 2, 3]])
def test_offsets_that_change_later_reach_no_other_memory(offsets: list[int]):
    lists = Ragged(torch.arange(3), torch.tensor([0, 1, 3]))
    source = TensorSource({"id": lists}, torch.zeros(2))
    lists.offsets_B1.copy_(torch.tensor(offsets))
    with pytest.raises(InputError, match="lists of an example"):
        source.take(torch.arange(2))


def quoted_csv(path: Path, monkeypatch: pytest.MonkeyPatch, lines: list[str]) -> Path:
    """A CSV that is read in blocks of 4 KiB."""
    monkeypatch.setattr(sources, "_CSV_BLOCK", 1 << 12)
    path.write_text("u,y\n" + "\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize("quarantined", [False, True])
def test_quoted_text_has_line_ends_wherever_blocks_end(
    quarantined: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    texts = [f"line {n}\nof two" for n in range(2000)]
    path = quoted_csv(tmp_path / "a.csv", monkeypatch, [f'"{text}",1' for text in texts])
    source = CsvSource((path,), ONE, Quarantine(tmp_path / "bad") if quarantined else None)
    taken = source.take(torch.arange(2000)).ids
    assert torch.equal(taken.values_N, hash_strings(texts))


def test_a_quote_that_never_closes_loses_no_rows_silently(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    lines = [f"u{n},{n % 2}" for n in range(2000)]
    lines[5] = '"u5,1'
    path = quoted_csv(tmp_path / "a.csv", monkeypatch, lines)
    with pytest.raises(DataError, match="its quotes"):
        CsvSource((path,), ONE)
    source = CsvSource((path,), ONE, Quarantine(tmp_path / "bad", most_rows=2000))
    assert len(source) == 5
    assert '"rows": [5, 2000]' in (tmp_path / "bad").read_text()


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16"])
def test_names_of_columns_that_are_no_utf8(encoding: str, tmp_path: Path):
    path = tmp_path / "a.csv"
    path.write_text("u,y,gr\u00f6\u00dfe\n1,0,2\n", encoding=encoding)
    with pytest.raises(DataError, match=r"a\.csv.*it is UTF-8"):
        CsvSource((path,), ONE)


def one_source(kind: str, folder: Path) -> Source:
    """Six examples, in two row groups where they are of a file."""
    ids = {"u": torch.arange(6)}
    if kind == "parquet":
        pq.write_table(pa.table({"u": range(6), "y": [0.0] * 6}), folder / "six", row_group_size=3)
        quarantine = Quarantine(folder / "bad.jsonl")
        return ParquetSource([folder / "six"], ONE, quarantine=quarantine)
    if kind == "synthetic":
        return SyntheticClicks(examples=6, num_features=1)
    source = TensorSource(ids, torch.zeros(6))
    return Subset(source, torch.arange(6)) if kind == "subset" else source


@pytest.mark.parametrize("kind", ["tensors", "subset", "parquet", "synthetic"])
@pytest.mark.parametrize(
    ("rows", "error", "words"),
    [
        (torch.tensor([0, -1, 2]), InputError, r"number of an example.*got -1.*0\.\.5"),
        (torch.tensor([0, 6, 2]), InputError, r"number of an example.*got 6.*0\.\.5"),
        (torch.tensor([1 << 40]), InputError, r"number of an example.*got 1099511627776.*0\.\.5"),
        (torch.tensor([1, 2], dtype=torch.int32), ShapeError, r"got torch.int32 \[2\].*int64"),
        (torch.ones(6, dtype=torch.bool), ShapeError, r"got torch.bool \[6\].*int64"),
        (torch.tensor([[1, 2]]), ShapeError, r"got torch.int64 \[1, 2\].*int64"),
    ],
)
def test_numbers_of_no_example_are_refused(
    kind: str, rows: torch.Tensor, error: type[Exception], words: str, tmp_path: Path
):
    source = one_source(kind, tmp_path)
    with pytest.raises(error, match=words):
        source.take(rows)
    if isinstance(source, TensorSource):
        with pytest.raises(error, match=words):
            source.select(rows)


def test_ids_are_in_memory_once():
    ids = {name: torch.arange(6) for name in "ab"}
    given = [weakref.ref(one) for one in ids.values()]
    source = TensorSource(ids, torch.zeros(6))
    del ids
    assert [ref() for ref in given] == [None, None]
    chosen = source.select(torch.tensor([4, 2]))
    assert chosen.take(torch.tensor([1, 0])).ids.to_lists() == {"a": [[2], [4]], "b": [[2], [4]]}


def test_every_other_number_of_a_tensor_is_taken():
    source = TensorSource({"id": torch.arange(6)}, torch.zeros(6))
    assert source.take(torch.arange(6)[::2]).ids.to_lists()["id"] == [[0], [2], [4]]


INFINITE = torch.tensor([0.0, 1.0, float("inf"), 2.0])


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
        ({"a": torch.arange(4)}, {"dense": INFINITE[:, None]}, InputError, r"dense\[2, 0\].*inf"),
        ({"a": torch.arange(4)}, {"weights": INFINITE}, InputError, r"weights\[2\].*inf"),
        ({"a": torch.arange(4)}, {"weights": -torch.ones(4)}, InputError, r"weights\[0\].*-1"),
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


def test_labels_that_are_no_chances_are_refused():
    for label in (float("nan"), 2.0, -1.0):
        with pytest.raises(InputError, match=r"labels\[1\]"):
            TensorSource({"a": torch.arange(2)}, torch.tensor([0.0, label]))


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
