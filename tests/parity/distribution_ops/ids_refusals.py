"""What operations on ids refuse, and what they say."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shoal.ops as ops
from shoal.errors import DTypeError, InputError, ShapeError
from shoal.ops.dispatch import bounds_checks
from shoal.ragged import Ragged
from support.backends import forced
from support.ids import int64

IDS = int64(3, 4, 3)
CHECKED = ["reference", "core", "triton"]
RAGGED = Ragged(int64(1, 2, 3), int64(0, 1, 3))
BAD_VALUES = [
    pytest.param(
        lambda: ops.partition(int64(0, 3), 3), InputError, "partition.* at 1: got 3", id="shard"
    ),
    pytest.param(
        lambda: ops.partition(int64(0, -1).int(), 3), InputError, "got -1.*0..2", id="negative"
    ),
    pytest.param(
        lambda: ops.split_by_indices(int64(0, 2), torch.rand(2), 2), InputError, "got 2", id="split"
    ),
    pytest.param(
        lambda: ops.permute_rows(torch.rand(2), int64(0, 2)),
        InputError,
        r"order_N\[1\]",
        id="order",
    ),
    pytest.param(
        lambda: ops.unpermute_rows(torch.rand(2), int64(-1, 0)), InputError, "got -1", id="unorder"
    ),
    pytest.param(
        lambda: ops.reorder_by_indices(IDS, int64(0, 1, 2), 2),
        InputError,
        "at 2: got 2",
        id="reorder",
    ),
    pytest.param(
        lambda: ops.fused_reorder_by_indices([IDS], 2, shard_by=lambda ids, num: ids),
        InputError,
        "at 0: got 3",
        id="rule",
    ),
    pytest.param(
        lambda: ops.fused_value_rowids(Ragged(IDS, int64(0, 2, 1, 3))),
        ShapeError,
        "offset 2: got 1; allowed: 2",
        id="falling-offsets",
    ),
    pytest.param(
        lambda: ops.fused_value_rowids(Ragged(IDS, int64(-1, 3))),
        ShapeError,
        "first offset: got -1",
        id="negative-offsets",
    ),
    pytest.param(
        lambda: ops.fused_value_rowids(Ragged(IDS, int64(0, 2))),
        ShapeError,
        "got 3; allowed: 2, the last offset",
        id="short-offsets",
    ),
    pytest.param(
        lambda: ops.fused_reorder_by_indices(Ragged(IDS, int64(0, 4)), 2),
        ShapeError,
        "got 3; allowed: 4, the last offset",
        id="long-offsets",
    ),
    pytest.param(
        lambda: ops.ragged_split_by_indices(int64(0, 0, 0), Ragged(IDS, int64(0, 2, 1, 3)), 1),
        ShapeError,
        "offset 2: got 1",
        id="ragged-offsets",
    ),
    pytest.param(
        lambda: ops.unique_key_with_value_and_offset(Ragged(IDS, int64(1, 3)), [1]),
        ShapeError,
        "first offset: got 1",
        id="key-offsets",
    ),
    pytest.param(
        lambda: ops.normalize_merged_split(int64(0, 2, 1), int64(3)),
        ShapeError,
        r"row_splits_T\[2\]: got 1",
        id="falling-splits",
    ),
    pytest.param(
        lambda: ops.normalize_merged_split(int64(0, 2, 1), int64(2, 1)),
        ShapeError,
        r"row_splits_T\[2\]: got 1.*0 at the start",
        id="splits-start",
    ),
    pytest.param(
        lambda: ops.normalize_merged_split(int64(0, 2, 0), int64(2, 2)),
        ShapeError,
        "sizes_P at 1",
        id="sizes-sum",
    ),
    pytest.param(
        lambda: ops.normalize_merged_split(int64(0, 2, 0), int64(0, 3)),
        ShapeError,
        "sizes_P at 0",
        id="sizes-zero",
    ),
]


@pytest.mark.parametrize("backend", CHECKED)
@pytest.mark.parametrize(("call", "error", "match"), BAD_VALUES)
def test_bad_values_of_ids(call: Any, error: Any, match: str, backend: Any) -> None:
    with bounds_checks(), forced(backend), pytest.raises(error, match=match):
        call()


META = torch.zeros(3, dtype=torch.int64, device="meta")
OUTS: dict[str, Any] = {
    "ids_out_N": IDS.clone(),
    "counts_out_N": IDS.clone(),
    "inverse_out_N": IDS.clone(),
    "size_out_1": int64(0),
}
FUSED_OUTS: dict[str, Any] = {
    "ids_out_N": IDS.clone(),
    "counts_out_N": IDS.clone(),
    "slot_sizes_out_WK": int64(0, 0),
    "offsets_out_N": IDS.clone(),
    "size_out_1": int64(0),
}
BAD_SHAPES = [
    (lambda: ops.dedup(IDS.int()), DTypeError, "dedup: dtype of ids_N: got torch.int32.*int64"),
    (lambda: ops.dedup(IDS[None]), ShapeError, "dedup: shape of ids_N"),
    (lambda: ops.dedup_into(IDS, **(OUTS | {"size_out_1": IDS})), ShapeError, "size_out_1"),
    (lambda: ops.dedup_into(IDS, **(OUTS | {"ids_out_N": IDS[:2]})), ShapeError, "ids_out_N"),
    (lambda: ops.dedup_into(IDS, **(OUTS | {"ids_out_N": META})), InputError, "devices.*meta"),
    (lambda: ops.partition(IDS.float(), 4), DTypeError, "int32 or int64"),
    (lambda: ops.partition(IDS[None], 4), ShapeError, "shape of shards_N"),
    (lambda: ops.partition(IDS, 0), InputError, "number of shards: got 0"),
    (lambda: ops.split_by_indices(IDS, torch.rand(2), 5), ShapeError, "lengths of indices_N"),
    (lambda: ops.split_by_indices(IDS, META, 5), InputError, "devices"),
    (lambda: ops.split_by_indices(IDS, torch.tensor(1.0), 5), ShapeError, "lengths"),
    (lambda: ops.permute_rows(torch.rand(3), IDS.int()), DTypeError, "order_N"),
    (lambda: ops.permute_rows(torch.rand(2), IDS), ShapeError, "order_N and rows_N"),
    (lambda: ops.ragged_split_by_indices(IDS[:2], RAGGED, 5), ShapeError, "ragged.values"),
    (lambda: ops.reorder_by_indices(IDS.int(), IDS, 5), DTypeError, "reorder_by_indices"),
    (lambda: ops.reorder_by_indices(IDS, IDS[:2], 5), ShapeError, "shards_N and ids_N"),
    (lambda: ops.reorder_by_indices(IDS[:, None][:, :0], IDS, 5), ShapeError, "1 column"),
    (lambda: ops.reorder_by_indices(IDS[None, None], IDS, 5), ShapeError, "1 dimension or 2"),
    (lambda: ops.fused_reorder_by_indices([], 2), InputError, "number of tables"),
    (lambda: ops.fused_reorder_by_indices([IDS.int()], 2), DTypeError, r"ids\[0\]"),
    (lambda: ops.fused_reorder_by_indices([IDS, META], 2), InputError, "devices"),
    (lambda: ops.fused_reorder_by_indices([IDS], 0), InputError, "num_of_shards: got 0"),
    (lambda: ops.fused_reorder_by_indices([IDS], 2, [1, 2]), ShapeError, "row widths: got 2"),
    (lambda: ops.fused_reorder_by_indices([IDS], 2, [0]), InputError, "row widths"),
    (
        lambda: ops.fused_reorder_by_indices([IDS], 2, shard_by=lambda ids, num: ids[:1]),
        ShapeError,
        "ids and shards",
    ),
    (
        lambda: ops.fused_reorder_by_indices_into([IDS], 3, **FUSED_OUTS),
        ShapeError,
        "slot_sizes_out_WK",
    ),
    (lambda: ops.unique_key_with_value_and_offset(RAGGED, [1]), ShapeError, "got 1.*2, one per"),
    (lambda: ops.normalize_merged_split(IDS, int64()), ShapeError, "3 splits in 0 parts"),
    (lambda: ops.normalize_merged_split(IDS.int(), IDS), DTypeError, "row_splits_T"),
    (lambda: ops.normalize_merged_split(IDS, META), InputError, "devices"),
]


@pytest.mark.parametrize(("call", "error", "match"), BAD_SHAPES)
def test_bad_metadata_of_ids(call: Any, error: Any, match: str) -> None:
    with pytest.raises(error, match=match):
        call()
