"""Monolith's `distribution_ops` by its own arguments, with the numbers of its tests."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from shoal import Ragged
from shoal.compat.monolith.native_training import distribution_ops as there
from shoal.errors import ConfigError, DTypeError, InputError, MissingPackage

T = torch.tensor


def lists(tensors: Any) -> list[Any]:
    return [one.tolist() for one in tensors]


@pytest.mark.parametrize(
    ("ids", "shards", "dims", "fids", "shard_sizes", "slot_sizes", "offsets"),
    [
        ([[0, 1, 2, 2, 3, 5]], 3, None, [0, 3, 1, 2, 5], [2, 1, 2], [2, 1, 2], None),
        ([[0, 1, 4, 5], [2, 3, 6, 7]], 2, None, [0, 4, 2, 6, 1, 5, 3, 7], [4, 4], [2] * 4, None),
        (
            [[0, 1, 0], [3, 2, 3], [5, 6, 7]],
            2,
            [1, 2, 3],
            [0, 2, 6, 1, 3, 5, 7],
            [3, 4],
            [1, 1, 1, 1, 1, 2],
            [0, 6, 0, 7, 1, 7, 9, 3, 12],
        ),
    ],
)
def test_five_results_of_a_fused_reorder(
    ids: Any, shards: int, dims: Any, fids: Any, shard_sizes: Any, slot_sizes: Any, offsets: Any
) -> None:
    tensors = [T(one) for one in ids]
    found = there.fused_reorder_by_indices(inputs=tensors, num_of_shards=shards, dim_sizes=dims)
    assert lists(found[:4]) == [fids, shard_sizes, slot_sizes, [len(one) for one in ids]]
    assert [one.dtype for one in found] == [
        torch.int64,
        *[torch.int32] * 3,
        torch.int64,
    ]
    if offsets is not None:
        assert found[4].tolist() == offsets


def test_a_shard_without_ids() -> None:
    found = there.fused_reorder_by_indices([T([0, 1, 2, 9])], 5, [1], rank0_empty_shard=True)
    assert found[0].tolist() == [0, 1, 9, 2]  # id % 4 + 1
    assert found[1].tolist() == [0, 1, 2, 1, 0]
    with pytest.raises(InputError, match="num_of_shards with rank0_empty_shard"):
        there.fused_reorder_by_indices([T([0, 1])], 1, rank0_empty_shard=True)


def test_rows_of_floats_are_reordered() -> None:
    found, sizes = there.reorder_by_indices(
        input=T([0, 1, 2, 2, 3, 5]), shard_ids=T([0, 1, 2, 2, 0, 2]).int(), num_of_shards=3
    )
    assert lists((found, sizes)) == [[3, 0, 1, 5, 2], [2, 1, 2]]
    for dtype in (torch.float32, torch.float64, torch.float16):
        rows = T([[1.0, -0.5], [2.0, 0.25], [1.0, 0.5], [1.0, -0.5]], dtype=dtype)
        found, sizes = there.reorder_by_indices(rows, T([1, 0, 1, 1]).int(), 2)
        assert found.dtype == dtype
        assert lists((found, sizes)) == [[[2.0, 0.25], [1.0, 0.5], [1.0, -0.5]], [1, 2]]
    with pytest.raises(DTypeError, match="bfloat16"):
        there.reorder_by_indices(rows.bfloat16(), T([1, 0, 1, 1]).int(), 2)


def test_an_offset_map_and_its_gradient() -> None:
    key = Ragged.from_lists([[], [0, 1, 2, 1, 0], [0, 1, 0], []])
    made = there.unique_key_with_value_and_offset(key, dims=[1, 2, 3, 4])
    pos = Ragged.from_lists([[], [0, 1, 2], [3, 4], []])
    buffer = made.value_buffer
    assert buffer is not None
    filled = there.fill_with_offset_map(
        pos=pos,
        value=torch.arange(12.0),
        value_offset_map=made.value_offset,
        value_buffer=buffer,
        dims=[1, 2, 3, 4],
    )
    assert filled.tolist() == [0, 1, 2, 3, 4, 5, 2, 3, 0, 1, 6, 7, 8, 9, 10, 11, 6, 7, 8]
    found = there.fill_with_offset_map_gradient(
        pos=pos, grad=torch.arange(19.0), value_offset_map=made.value_offset, dims=[1, 2, 3, 4]
    )
    assert found.tolist() == [8, 10, 8, 10, 4, 5, 26, 28, 30, 13, 14, 15]
    with pytest.raises(InputError, match="dims"):
        there.fill_with_offset_map_gradient(pos, torch.arange(19.0), made.value_offset, [1, 2])


def test_splits() -> None:
    parts = there.split_by_indices(
        indices=T([0, 1, 2, 2, 0]), tensor=T([0, 1, 2, 2, 3]), num_splits=3
    )
    assert lists(parts) == [[0, 3], [1], [2, 2]]
    num = Ragged.from_lists([[], [], [4, 3, 2], [1], [], []])
    values, positions = there.ragged_split_by_indices(
        indices=T([0, 1, 0, 1]), num=num, num_splits=2
    )
    assert [one.to_lists() for one in values] == [
        [[], [], [4, 2], [], [], []],
        [[], [], [3], [1], [], []],
    ]
    assert [one.to_lists() for one in positions] == [
        [[], [], [0, 2], [], [], []],
        [[], [], [1], [3], [], []],
    ]
    joined = there.normalize_merged_split(
        row_split=T([0, 2, 5, 5, 9, 0, 0, 3, 4]).int(), size=T([5, 4]).int()
    )
    assert joined.tolist() == [0, 2, 5, 5, 9, 9, 12, 13]


@pytest.mark.parametrize("length", [2, [2], T(2), T([2]), T([2]).int()])
def test_lengths_are_numbers_lists_or_tensors(length: Any) -> None:
    indices, rows = T([[0], [0], [1]]), T([[4.0, 4], [2, 2], [1, 1]])
    given = {"id_indices": indices, "id_values": rows, "id_length": length}
    assert there.reduce_mean(**given).tolist() == [[3, 3], [1, 1]]
    assert there.reduce_sum(**given, name="x").tolist() == [[6, 6], [1, 1]]
    squares = {**given, "id_values": T([[3.0, 3], [4, 4], [4, 4]])}
    assert there.reduce_sqrtn(**squares).tolist() == [[5, 5], [4, 4]]
    values = {
        **given,
        "id_indices": T([0, 0, 1]),
        "id_values": T([[1.0, 1, 1], [2, 2, 1], [4, 4, 2]]),
    }
    split = there.fused_reduce_sum_and_split(**values, split_dims=[2, 1])
    assert lists(split) == [[[3, 3], [4, 4]], [[2], [2]]]


def test_fused_sums() -> None:
    rows = T([[1.0, 1, 1], [2, 2, 1], [4, 4, 2]])
    found = there.fused_sorted_segment_sum(
        indices=[T([0, 0, 1]).int()] * 2, values=[rows] * 2, shapes=[T([2, 3]), (4, 3)]
    )
    assert lists(found) == [[[3, 3, 2], [4, 4, 2]], [[3, 3, 2], [4, 4, 2], [0] * 3, [0] * 3]]
    found = there.fused_reduce_and_split_gpu(
        splits=[T([0, 2, 3]).int()], embeddings=[rows], slice_dims=[[2, 1]], name=None
    )
    assert lists(found) == [[[3, 3], [4, 4]], [[2], [2]]]
    flat = there.fused_gather_embeddings_by_input_gradient(
        fused_embeddings=torch.zeros(4), grads=[rows[:, :2]], embedding_offsets=[T([0, 2, 0])],
        embedding_dims=[2], scale=2,
    )  # fmt: skip
    assert flat.tolist() == [10, 10, 4, 4]


def test_lists_for_first_n() -> None:
    key = Ragged.from_lists([[1], [2, 3], [4, 5, 6]])
    rows = [[1.0], [2.0], [3.0], [4.0], [5.0], [6.0]]
    found = there.FirstN(seq_length=2).combine(key, rows)  # type: ignore[arg-type]
    assert found.tolist() == [[[1], [0]], [[2], [3]], [[4], [5]]]


def text(number: int, value: bytes) -> bytes:
    return bytes([number << 3 | 2, len(value)]) + value


def whole(number: int, value: int) -> bytes:
    return bytes([number << 3, value])


# By hand, as protobuf writes them.
FEATURE = text(1, b"t") + whole(2, 3) + text(3, bytes([1, 2])) + whole(4, 5)
SLICE = text(1, b"f") + whole(2, 1) + whole(3, 3) + whole(4, 7) + whole(10, 3)
LAYOUT = text(1, SLICE) + whole(2, 1) + text(3, text(1, bytes([2, 2])))
SERIALIZED = text(1, text(1, b"f") + text(2, FEATURE)) + text(2, text(1, b"out") + text(2, LAYOUT))


class Message:
    """Whatever can serialize itself."""

    def SerializeToString(self) -> bytes:
        return SERIALIZED


@pytest.mark.parametrize("given", [SERIALIZED, Message()])
def test_serialized_feature_configs_are_read(given: Any) -> None:
    found = there.feature_configs(given)
    feature = found.feature_configs["f"]
    assert (feature.table, feature.slice_dims) == ("t", (1, 2))
    assert (feature.pooling_type, feature.max_sequence_length) == ("firstn", 5)
    layout = found.out_configs["out"]
    assert layout.out_type == "stack"
    assert [(one.feature_name, one.start, one.end) for one in layout.slice_configs] == [("f", 1, 3)]
    assert there.feature_configs(found) is found


def test_bytes_of_something_else_are_refused() -> None:
    with pytest.raises(InputError, match="serialized FeatureConfigs"):
        there.feature_configs(b"\xff\xff\xff")
    with pytest.raises(ConfigError, match="feature_configs"):
        there.feature_configs(b"")
    for value in (bytearray(SERIALIZED), {}, "text", None):
        with pytest.raises(InputError, match=f"FeatureConfigs: got {type(value).__name__}"):
            there.feature_configs(value)
    odd = SERIALIZED.replace(
        whole(2, 3) + text(3, bytes([1, 2])), whole(2, 2) + text(3, bytes([1, 2]))
    )
    with pytest.raises(InputError, match="pooling_type"):
        there.feature_configs(odd)


@pytest.mark.parametrize("version", [1, 3])
def test_layouts_by_monolith_s_arguments(version: int) -> None:
    configs = text(1, text(1, b"f") + text(2, text(1, b"t") + text(3, bytes([2]))))
    part = text(1, b"f") + whole(3, 2)
    configs += text(2, text(1, b"out") + text(2, text(1, part)))
    rows = T([[1.0, 2], [3, 4]])
    given = {
        "embeddings_list": [rows if version == 1 else rows.flatten()],
        "fid_list_row_split": None,
        "fid_offset": T([0, 1 if version == 1 else 2, 0]),
        "feature_offset": T([0, 2, 3]).int(),
        "nfl_offset": T([0, 2]).int(),
        "batch_size": T(2),
        "variant_type": "example",
        "feature_cfgs": configs,
        "ps_num": 1,
        "version": version,
    }
    (out,) = there.fused_embedding_to_layout(**given)
    assert out.tolist() == [[4, 6], [1, 2]]
    (grad,) = there.fused_embedding_to_layout_grad(
        **given, layout_tensors_grad=[torch.ones(2, 2)], layout_tensors_grad_scale=0.5
    )
    assert grad.flatten().tolist() == [1, 1, 0.5, 0.5]


def test_serialized_feature_configs_need_protobuf(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "google.protobuf.message", None)
    with pytest.raises(MissingPackage, match=r"no package protobuf;.*shoal\[serve\]"):
        there.feature_configs(b"")
