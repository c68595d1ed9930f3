"""From Arrow columns to ids, dense features and labels."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
import torch

from shoal.data import IdFeature, Recipe, TensorSource, cross, encode
from shoal.errors import ConfigError, DataError
from shoal.ids import hash_strings

ONE = Recipe(ids=(IdFeature(name="id"),), label="y")
LISTS = Recipe(ids=(IdFeature(name="id", is_list=True, max_length=2),), label="y")
DENSE = Recipe(ids=(IdFeature(name="id"),), label="y", dense=("p",))
FILLED = Recipe(ids=(IdFeature(name="id"),), label="y", dense=("p",), dense_fill=0.0)
NAN, INF = float("nan"), float("inf")
NULL_IN_DICTIONARY = pa.DictionaryArray.from_arrays([0, 1], pa.array(["a", None]))


def encoded(recipe: Recipe = ONE, **columns: Any) -> TensorSource:
    columns.setdefault("y", [0, 1])
    return encode(pa.table(columns), recipe, "the table")


def ids_of(column: Any) -> list[int]:
    return encoded(id=column).take(torch.arange(2)).ids["id"].values.tolist()


def test_integers_are_ids_as_they_are():
    assert ids_of([-5, 7]) == [-5, 7]
    assert ids_of(pa.array([1, 255], pa.uint8())) == [1, 255]
    assert ids_of(pa.array([(1 << 64) - 1, 1], pa.uint64())) == [-1, 1]
    assert ids_of(pa.array([7, -9]).dictionary_encode()) == [7, -9]
    assert ids_of([True, False]) == [1, 0]


@pytest.mark.parametrize(
    "kind",
    [
        pa.string(),
        pa.large_string(),
        pa.binary(),
        pa.large_binary(),
        pa.binary(2),
        pa.dictionary(pa.int8(), pa.string()),
        pa.dictionary(pa.int32(), pa.binary()),
    ],
    ids=str,
)
def test_text_gives_the_same_ids_in_every_encoding(kind: pa.DataType):
    column = pa.array([b"NA", b"12"], pa.binary(2) if kind == pa.binary(2) else pa.binary())
    column = column if column.type == kind else column.cast(pa.string()).cast(kind)
    assert ids_of(column) == [hash_strings(["NA"]).item(), 12]
    recipe = Recipe(ids=(IdFeature(name="id", is_list=True),), label="y")
    values = pa.ListArray.from_arrays([0, 1, 2], column)
    lists = encoded(recipe, id=values).take(torch.arange(2)).ids.to_lists()["id"]
    assert lists == [[hash_strings(["NA"]).item()], [12]]


def test_crosses_keep_order_and_do_not_collide():
    recipe = Recipe(ids=(IdFeature(name="ab", columns=("a", "b")),), label="y")
    source = encoded(recipe, a=[1, 2], b=["x", "y"])
    want = cross([torch.tensor([1, 2]), hash_strings(["x", "y"])])
    assert torch.equal(source.take(torch.arange(2)).ids["ab"].values, want)
    grid = torch.cartesian_prod(torch.arange(300), torch.arange(300))
    assert torch.unique(cross([grid[:, 0], grid[:, 1]])).numel() == 90_000


def test_golden_cross():
    assert cross([torch.tensor([1]), torch.tensor([2]), torch.tensor([3])]).item() == GOLDEN_CROSS


def test_lists_become_jagged_features_also_in_slices():
    recipe = Recipe(ids=(IdFeature(name="tags", is_list=True, max_length=2),), label="y")
    table = pa.table({"tags": [["zz"], ["a", "b"], [], ["b"]], "y": [1, 1, 0, 1]}).slice(1)
    lists = encode(table, recipe, "here").take(torch.arange(3)).ids.to_lists()["tags"]
    a, b = hash_strings(["a", "b"]).tolist()
    assert lists == [[a, b], [], [b]]


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (pa.list_(pa.int64()), [None, [1, 2]]),
        (pa.large_list(pa.string()), [None, ["1", "2"]]),
        (pa.list_(pa.uint8(), 2), [None, [1, 2]]),
        (pa.list_(pa.dictionary(pa.int32(), pa.string())), [[], ["1", "2"]]),
    ],
    ids=str,
)
def test_a_missing_list_is_empty(kind: pa.DataType, values: list[Any]):
    batch = encoded(LISTS, id=pa.array(values, kind)).take(torch.arange(2))
    assert batch.ids.to_lists()["id"] == [[], [1, 2]]


@pytest.mark.parametrize("values", [[None, None], [[], []], [None, []]])
def test_columns_without_any_list_are_empty_lists(values: list[Any]):
    batch = encoded(LISTS, id=values).take(torch.arange(2))
    assert batch.ids.to_lists()["id"] == [[], []]


@pytest.mark.parametrize("values", [[None, None], [NAN, None], pa.array([NAN, None], pa.float16())])
def test_dense_fill_fills_what_is_missing(values: Any):
    batch = encoded(FILLED, id=[1, 2], p=values).take(torch.arange(2))
    assert batch.dense is not None
    assert batch.dense.tolist() == [[0], [0]]


def test_dense_labels_and_weights():
    recipe = Recipe(
        ids=(IdFeature(name="id"),), label="y", dense=("p", "q"), dense_fill=-1.0, weight="w"
    )
    source = encoded(recipe, id=[1, 2], p=[0.5, None], q=[True, False], y=[True, False], w=[2, 0])
    batch = source.take(torch.arange(2))
    assert batch.dense is not None
    assert batch.dense.tolist() == [[0.5, 1], [-1, 0]]
    assert batch.dense.dtype == batch.labels.dtype == torch.float32
    assert batch.labels.tolist() == [1, 0]
    assert batch.weights is not None
    assert batch.weights.tolist() == [2, 0]
    assert batch.event_times_B.tolist() == [0, 0]


@pytest.mark.parametrize(
    "times",
    [
        pa.array([1_000, 2_000]),
        pa.array([1_000_999, 2_000_000], pa.timestamp("ms")),
        pa.array([1_000, 2_000], pa.timestamp("s", tz="Asia/Tokyo")),
    ],
)
def test_times_are_whole_seconds(times: pa.Array):
    recipe = Recipe(ids=(IdFeature(name="id"),), label="y", time="at")
    assert encoded(recipe, id=[1, 2], at=times).times().tolist() == [1000, 2000]


TIMED = Recipe(ids=(IdFeature(name="id"),), label="y", time="at", weight="w")
FINE: dict[str, Any] = {"id": [1, 2], "at": [1, 2], "w": [1, 1], "p": [1, 2]}


@pytest.mark.parametrize(
    ("recipe", "columns", "words"),
    [
        (ONE, {"ids": [1, 2]}, "column 'id' of the table.*no such column.*ids"),
        (ONE, {"id": [1, None]}, "'id' in row 1 of the table.*got null"),
        (ONE, {"id": [None, "x"]}, "'id' in row 0"),
        (ONE, {"id": [None, None]}, "'id' in row 0.*got null"),
        (ONE, {"id": NULL_IN_DICTIONARY}, "'id' in row 1.*got null"),
        (ONE, {"id": [1.5, 2.5]}, "type of column 'id'.*double"),
        (ONE, {"id": [[1], [2]]}, "type of column 'id'.*list"),
        (ONE, {"id": [1, 2], "y": [0, None]}, "'y' in row 1.*got null"),
        (ONE, {"id": [1, 2], "y": [0, 2]}, r"'y' in row 1.*got 2.*0\.\.1"),
        (ONE, {"id": [1, 2], "y": [0, float("nan")]}, "'y' in row 1.*got nan"),
        (ONE, {"id": [1, 2], "y": ["0", "1"]}, "type of column 'y'"),
        (LISTS, {"id": [[1], [1, 2, 3]]}, "'id' in row 1.*got 3.*at most 2.*max_length"),
        (LISTS, {"id": [[1, 2], [3, None]]}, "'id' in row 1.*null at place 1 of the list"),
        (LISTS, {"id": [None, [None]]}, "'id' in row 1.*null at place 0"),
        (LISTS, {"id": [["a", None], ["b"]]}, "'id' in row 0.*null at place 1"),
        (LISTS, {"id": [[1.5], [2.5]]}, "type of column 'id'.*double"),
        (LISTS, {"id": [1, 2]}, "type of column 'id'.*lists"),
        (DENSE, {**FINE, "p": [0.5, None]}, "'p' in row 1.*got null.*dense_fill"),
        (DENSE, {**FINE, "p": [None, None]}, "'p' in row 0.*got null.*dense_fill"),
        (DENSE, {**FINE, "p": [0.5, NAN]}, "'p' in row 1.*got nan.*finite.*dense_fill"),
        (DENSE, {**FINE, "p": [0.5, -INF]}, "'p' in row 1.*got -inf.*Correct the file"),
        (
            DENSE,
            {**FINE, "p": [0.5, 1e300]},
            r"'p' in row 1.*got 1e\+300.*float32.*Correct",
        ),
        (FILLED, {**FINE, "p": [NAN, INF]}, "'p' in row 1.*got inf.*Correct the file"),
        (DENSE, {**FINE, "p": ["a", "b"]}, "type of column 'p'"),
        (TIMED, {**FINE, "at": [0, -1]}, "'at' in row 1.*got -1"),
        (TIMED, {**FINE, "at": [0, 1 << 32]}, "'at' in row 1"),
        (TIMED, {**FINE, "at": [None, 1]}, "'at' in row 0.*got null"),
        (TIMED, {**FINE, "at": ["1", "2"]}, "type of column 'at'"),
        (TIMED, {**FINE, "w": [1, -1]}, "'w' in row 1.*got -1"),
        (TIMED, {**FINE, "w": [1, INF]}, "'w' in row 1.*got inf"),
        (TIMED, {**FINE, "w": [NAN, 1]}, "'w' in row 0.*got nan"),
        (TIMED, {**FINE, "w": [1, None]}, "'w' in row 1.*got null"),
    ],
)
def test_bad_columns_are_named(recipe: Recipe, columns: dict[str, Any], words: str):
    with pytest.raises(DataError, match=words):
        encoded(recipe, **columns)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"columns": ("a", "b"), "is_list": True}, "columns of feature 'f'"),
        ({"max_length": 3}, "max_length of feature 'f'"),
        ({"is_list": True, "max_length": 0}, "max_length of feature 'f'"),
    ],
)
def test_wrong_features_are_refused(arguments: dict[str, Any], words: str):
    with pytest.raises(ConfigError, match=words):
        IdFeature(name="f", **arguments)


def test_a_recipe_needs_distinct_features():
    for ids in ((), (IdFeature(name="f"), IdFeature(name="f"))):
        with pytest.raises(ConfigError, match="id features"):
            Recipe(ids=ids, label="y")


ID = (IdFeature(name="id"),)
BOTH = (*ID, IdFeature(name="all", columns=("id",), is_list=True))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"ids": ID, "label": "id"}, "roles of column 'id'.*label"),
        ({"ids": ID, "dense": ("y",)}, "roles of column 'y'.*label"),
        ({"ids": ID, "weight": "y"}, "roles of column 'y'.*label"),
        ({"ids": ID, "dense": ("p", "p")}, "roles of column 'p'.*dense twice"),
        ({"ids": BOTH}, "roles of column 'id'.*lists and single"),
        ({"ids": BOTH[1:], "dense": ("id",)}, "roles of column 'id'.*lists and single"),
        ({"ids": ID, "dense_fill": float("nan")}, "dense_fill"),
    ],
)
def test_a_column_has_roles_that_fit(arguments: dict[str, Any], words: str):
    with pytest.raises(ConfigError, match=words):
        Recipe(**{"label": "y", **arguments})


def test_a_column_may_be_id_and_number():
    recipe = Recipe(
        ids=(*ID, IdFeature(name="twice", columns=("id", "id"))), label="y", dense=("id",)
    )
    batch = encoded(recipe, id=[3, 4]).take(torch.arange(2))
    assert batch.ids.to_lists()["id"] == [[3], [4]]
    assert batch.dense is not None
    assert batch.dense.tolist() == [[3], [4]]


def test_a_column_that_is_there_twice_is_refused():
    table = pa.table([[1, 2], [3, 4], [0, 1]], names=["id", "id", "y"])
    with pytest.raises(DataError, match=r"columns of here.*'id' at places 0, 1"):
        encode(table, ONE, "here")
    unused = pa.table([[1, 2], [3, 4], [0, 1], [5, 6]], names=["x", "x", "y", "id"])
    assert len(encode(unused, ONE, "here")) == 2


GOLDEN_CROSS = 2728990821737839831
