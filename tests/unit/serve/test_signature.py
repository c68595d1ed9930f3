"""Requests read as examples: ids, texts, lists and dense columns, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from shoal import config as settings
from shoal.config.build import build_parts, open_data, source_inputs
from shoal.errors import ConfigError, DTypeError, InputError, ShapeError, UnknownName
from shoal.ids import ids_of_text
from shoal.serve.signature import ExampleReader
from support.served_models import TINY


def reader(lists: tuple[str, ...] = ("f2",), **features: dict) -> ExampleReader:
    named = {name: features.get(name, {}) for name in ("f0", "f1", "f2")}
    config = settings.from_mapping({**TINY, "features": named})
    parts = build_parts(config, config.model, offered=("f0", "f1", "f2"), num_dense=2)
    return ExampleReader(parts, lists, 2)


def inputs(**changes: object) -> dict[str, np.ndarray]:
    made = {"f0": [1, 2], "f1": [[3], [4]], "f2": [[5, 6], [7, 8]], "dense": [[0.5, 1], [2, 3]]}
    merged = {**made, **changes}
    return {name: np.asarray(one) for name, one in merged.items() if one is not None}


def test_examples_are_the_ids_by_feature() -> None:
    read = reader().read(inputs(f2_lengths=[1, 0]))
    assert [part.tolist() for part in read.values] == [[1, 2], [3, 4], [5]]
    assert [part.tolist() for part in read.lengths] == [[1, 1], [1, 1], [1, 0]]
    batch, dense = reader().join([read, reader().read(inputs(f0=[9, 9]))])
    assert batch.to_lists() == {
        "f0": [[1], [2], [9], [9]],
        "f1": [[3], [4], [3], [4]],
        "f2": [[5], [], [5, 6], [7, 8]],
    }
    assert dense is not None
    assert dense.tolist() == [[0.5, 1], [2, 3], [0.5, 1], [2, 3]]


def test_texts_become_the_ids_of_training() -> None:
    texts = np.array([b"A7", b"12"], dtype=object)
    (ids, *_) = reader().read(inputs(f0=texts)).values
    assert ids.tolist() == ids_of_text(["A7", "12"]).tolist()
    (ids, *_) = reader().read(inputs(f0=np.array([1 << 63, 5], dtype=np.uint64))).values
    assert ids.tolist() == [-(1 << 63), 5]


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"f9": [1]}, UnknownName, "f9"),
        ({"f0": None}, InputError, "f0"),
        ({"f0": [1]}, ShapeError, "2"),
        ({"f0": [1.5, 2]}, DTypeError, "integers or texts"),
        ({"f0": [[1, 2], [3, 4]]}, ShapeError, r"\[B, 1\]"),
        ({"f2": [[[1]], [[2]]]}, ShapeError, r"\[B, L\]"),
        ({"f2_lengths": [3, 0]}, ShapeError, r"0\.\.2"),
        ({"f2_lengths": [-1, 0]}, ShapeError, r"0\.\.2"),
        ({"f2_lengths": [1]}, ShapeError, r"\[2\]"),
        ({"f2_lengths": [0.5, 1]}, ShapeError, "integers"),
        ({"dense": None}, ShapeError, "none"),
        ({"dense": [[1.0], [2.0]]}, ShapeError, r"\[2, 2\]"),
        ({"dense": [[np.nan, 1], [2, 3]]}, InputError, "finite"),
        ({"dense": np.full((2, 2), b"a", dtype=object)}, DTypeError, "numbers"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict, error: type, match: str) -> None:
    with pytest.raises(error, match=match):
        reader().read(inputs(**changes))


def test_limits_of_features_and_requests() -> None:
    with pytest.raises(ShapeError, match="max_length"):
        reader(f2={"max_length": 1}).read(inputs())
    many = (1 << 16) + 1
    large = inputs(f0=np.zeros(many, np.int64))
    with pytest.raises(ShapeError, match="65536"):
        reader().read(large)


def test_a_feature_named_like_another_input_is_refused() -> None:
    config = settings.from_mapping({**TINY, "features": {"dense": {}, "f1": {}}})
    parts = build_parts(config, config.model, offered=("dense", "f1"), num_dense=2)
    with pytest.raises(ConfigError, match="dense"):
        ExampleReader(parts, (), 2)


@pytest.mark.parametrize("kind", ["synthetic", "flights"])
def test_inputs_of_a_source_are_those_of_its_data(kind: str) -> None:
    source = {"kind": kind} if kind == "flights" else TINY["data"]["source"]
    config = settings.from_mapping({**TINY, "data": {"source": source}})
    ids, num_dense = source_inputs(config.data.source)
    if kind == "flights":
        assert (len(ids), num_dense) == (12, 40)
        return
    data = open_data(config)
    assert (tuple(one.name for one in ids), num_dense) == (data.features, data.num_dense)
