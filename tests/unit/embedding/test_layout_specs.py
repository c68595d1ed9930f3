from __future__ import annotations

import copy
import pickle
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch

from shoal.errors import ConfigError, InputError, ShapeError, UnknownName
from shoal.ops import FeatureConfig, FeatureConfigs, LayoutIndex, OutConfig, SliceConfig
from shoal.ragged import KeyedRagged

A = FeatureConfig("t", (1, 4))
SEQUENCE = FeatureConfig("s", (1, 4), "firstn", 3)
WHOLE = OutConfig((SliceConfig("a", 0, 5),))


def test_orders_follow_names() -> None:
    configs = FeatureConfigs(
        {"b": A, "a": SEQUENCE, "c": FeatureConfig("t", (7,), "mean")},
        {
            "z": OutConfig((SliceConfig("c", 0, 2), SliceConfig("b", 1, 3)), "none"),
            "y": OutConfig((SliceConfig("b", 0, 2), SliceConfig("b", 2, 5)), "concat"),
            "x": OutConfig((SliceConfig("a", 0, 2), SliceConfig("a", 3, 5)), "stack"),
        },
    )
    assert configs.features == ("a", "b", "c")
    assert configs.tables == ("s", "t")
    assert configs.features_of("t") == ("b", "c")
    assert configs.outputs == ("x", "y", "z:0", "z:1")
    assert configs.plan.shapes == (2, 3, 2, 0, 0, 5, 0, 0, 2, 0, 0, 2)
    assert configs.plan.widest == 5
    assert configs.plan.features_F[:, :2].tolist() == [[0, 2], [2, 5], [5, 6]]


def test_specs_are_frozen() -> None:
    configs = FeatureConfigs({"a": A}, {"x": WHOLE})
    with pytest.raises(FrozenInstanceError):
        A.table = "other"  # type: ignore[misc]
    with pytest.raises(TypeError):
        configs.feature_configs["b"] = A  # type: ignore[index]


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: FeatureConfig("t", ()), ConfigError, "slice_dims: got"),
        (lambda: FeatureConfig("t", (1, 0)), ConfigError, "slice_dims: got"),
        (lambda: FeatureConfig("t", (1,), "max"), UnknownName, "pooling_type"),  # type: ignore[arg-type]
        (lambda: FeatureConfig("t", (1,), "firstn"), ConfigError, "max_sequence_length"),
        (lambda: FeatureConfig("t", (1,), "sum", -1), ConfigError, "max_sequence_length"),
        (lambda: SliceConfig("a", 2, 2), ConfigError, "columns of a slice"),
        (lambda: SliceConfig("a", -1, 2), ConfigError, "columns of a slice"),
        (lambda: OutConfig(()), ConfigError, "slice_configs: got none"),
        (lambda: OutConfig(WHOLE.slice_configs, "sum"), UnknownName, "out_type"),  # type: ignore[arg-type]
        (lambda: FeatureConfigs({}, {"x": WHOLE}), ConfigError, "feature_configs: got none"),
        (lambda: FeatureConfigs({"a": A}, {}), ConfigError, "out_configs: got none"),
        (lambda: FeatureConfigs({"b": A}, {"x": WHOLE}), UnknownName, "feature in layout 'x'"),
    ],
)
def test_wrong_specs_are_refused(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    ("slices", "kind", "message"),
    [
        ([("a", 0, 6)], "concat", "end of a slice of 'a' in layout 'x': got 6; allowed: at most 5"),
        ([("a", 0, 5), ("q", 0, 5)], "concat", "lengths of the slices"),
        ([("a", 0, 2), ("a", 0, 3)], "stack", "shapes of the slices of stack layout 'x'"),
        ([("a", 0, 2), ("q", 0, 2)], "stack", "shapes of the slices of stack layout 'x'"),
        ([("a", 0, 2), ("a", 0, 3)], "addn", "shapes of the slices of addn layout 'x'"),
        ([("q", 0, 2)], "addn", "pooling of the slices of addn layout 'x': got sequences"),
    ],
)
def test_layouts_refuse_slices_they_cannot_join(slices: Any, kind: Any, message: str) -> None:
    out = OutConfig(tuple(SliceConfig(*piece) for piece in slices), kind)
    with pytest.raises(ConfigError, match=message):
        FeatureConfigs({"a": A, "q": SEQUENCE}, {"x": out})


def test_configs_travel_to_other_processes() -> None:
    configs = FeatureConfigs({"a": A, "q": SEQUENCE}, {"x": WHOLE})
    for other in (pickle.loads(pickle.dumps(configs)), copy.deepcopy(configs)):
        assert dict(other.feature_configs) == dict(configs.feature_configs)
        assert dict(other.out_configs) == dict(configs.out_configs)
        assert torch.equal(other.plan.slices_S, configs.plan.slices_S)


def test_plan_moves_once() -> None:
    plan = FeatureConfigs({"a": A}, {"x": WHOLE}).plan
    assert plan.on(torch.device("cpu")) is plan
    moved = plan.on(torch.device("meta"))
    assert moved.features_F.device.type == "meta"
    assert plan.on(torch.device("meta")) is moved


def test_index_of_a_batch_is_checked() -> None:
    configs = FeatureConfigs({"a": A}, {"x": WHOLE})
    batch = KeyedRagged.from_lists({"a": [[1], [2, 3]]})
    for inverse, widths, shared, error, message in (
        (batch.values_N.int(), {"t": 5}, (), InputError, "dtype of inverse_N: got torch.int32"),
        (batch.values_N[:2], {"t": 5}, (), ShapeError, "shape of inverse_N"),
        (batch.values_N, {}, (), UnknownName, "table without a width"),
        (batch.values_N, {"t": 4}, (), ShapeError, "width of feature 'a': got 5; allowed: at most"),
        (batch.values_N, {"t": 5}, ("b",), UnknownName, "shared feature"),
        (batch.values_N, {"t": 5}, ("a",), InputError, "beyond the first example: got 2"),
    ):
        with pytest.raises(error, match=message):
            LayoutIndex.from_keyed(batch, inverse, widths, configs, shared=shared)
    index = LayoutIndex.from_keyed(batch, batch.values_N, {"t": 8}, configs)
    assert index.rows_N.tolist() == [8, 16, 24]
    assert index.cells_RF.tolist() == [[[0, 2, 0]]]
    assert index.batch_size == 2
