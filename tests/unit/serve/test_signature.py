"""Requests read as examples: ids, texts, lists and dense columns, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shoal import config as settings
from shoal.config.build import SourceInputs, build_parts, build_tables, open_data, source_inputs
from shoal.errors import ConfigError, DTypeError, InputError, ShapeError, UnknownName
from shoal.ids import ids_of_text
from shoal.serve.loading import FolderSource
from shoal.serve.signature import ExampleReader
from support.served_models import TINY, trained


def reader(lists: tuple[str, ...] = ("f2",), **features: dict) -> ExampleReader:
    named = {name: features.get(name, {}) for name in ("f0", "f1", "f2")}
    config = settings.from_mapping({**TINY, "features": named})
    source = SourceInputs(("f0", "f1", "f2"), frozenset(lists), 2, ("label",))
    return ExampleReader(build_parts(config, source=source))


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


def test_ids_of_lists_one_after_another() -> None:
    read = reader().read(inputs(f2=[5, 6, 7], f2_lengths=[3, 0]))
    assert (read.values[2].tolist(), read.lengths[2].tolist()) == ([5, 6, 7], [3, 0])
    with pytest.raises(ShapeError, match="f2"):
        reader().read(inputs(f2=[5, 6, 7], f2_lengths=[2, 0]))
    wraps = np.array([1 << 62, 1 << 62, 1 << 62, 1 << 62, 3])
    with pytest.raises(ShapeError, match="f2"):
        reader().read(inputs(f2=[5, 6, 7], f2_lengths=wraps))


def test_no_examples_take_no_memory() -> None:
    wide = np.empty((0, 1 << 40), np.int64)
    none = {"f0": [], "f1": [], "f2": wide, "f2_lengths": [], "dense": np.empty((0, 2))}
    typed = {
        name: np.asarray(one, dtype=np.float32 if name == "dense" else np.int64)
        for name, one in none.items()
    }
    assert reader().read(typed).size == 0


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
    source = SourceInputs(("dense", "f1"), frozenset(), 2, ("label",))
    with pytest.raises(ConfigError, match="dense"):
        ExampleReader(build_parts(config, source=source))


@pytest.mark.parametrize("kind", ["synthetic", "flights"])
def test_inputs_of_a_source_are_those_of_its_data(kind: str) -> None:
    source = {"kind": kind} if kind == "flights" else TINY["data"]["source"]
    config = settings.from_mapping({**TINY, "data": {"source": source}})
    found = source_inputs(config.data.source)
    if kind == "flights":
        assert (len(found.features), found.num_dense) == (12, 40)
        return
    read = open_data(config).evaluation.source
    assert (found.features, found.num_dense) == (read.features, read.num_dense)


COMPUTED = {
    "user_city": {"kind": "combo", "columns": ["user", "city"]},
    "ratio": {"kind": "expression", "expression": "price / 2"},
    "age": {"kind": "raw", "ids": {"kind": "boundaries", "edges": [18, 35]}},
}


@pytest.mark.slow
def test_computed_features_are_inputs(tmp_path: Path) -> None:
    rows = [
        "user,city,price,age,y",
        *(f"{k % 7},{k % 3},{k}.5,{k % 60},{k % 2}" for k in range(80)),
    ]
    (tmp_path / "a.csv").write_text("\n".join(rows))
    path = str(tmp_path / "a.csv")
    source = {
        "kind": "csv",
        "paths": [path],
        "eval_paths": [path],
        "ids": {"user": {}},
        "features": COMPUTED,
        "label": "y",
    }
    run = trained(tmp_path / "runs", data={"source": source, "batch_size": 16})
    config = settings.load(run / "config.yaml", environment={})
    found, data = source_inputs(config.data.source), open_data(config)
    assert (found.features, found.num_dense) == (("user", "user_city", "age"), 1)
    read = data.evaluation.source
    assert (found.features, found.num_dense) == (read.features, read.num_dense)
    parts = build_parts(config)
    assert build_tables(config) == parts.tables
    model = FolderSource(run).load(FolderSource(run).newest() or 0)
    batch = next(iter(data.evaluation))
    ids = {name: np.array(lists, np.int64) for name, lists in batch.ids.to_lists().items()}
    assert batch.dense is not None
    inputs = {**ids, "dense": batch.dense.numpy()}
    (outputs,) = model.run([model.read(inputs)])
    assert np.unique(outputs["prediction"]).size > 1
