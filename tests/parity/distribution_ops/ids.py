"""Operations on ids: Monolith's published pairs, on every implementation."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shoal.ragged import Ragged
from support.backends import BACKENDS
from support.ids import int64, lists, moved

pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.mark.parametrize("impl", BACKENDS)
@pytest.mark.parametrize(
    ("indices", "values", "num", "want"),
    [
        pytest.param([0, 1, 2, 2, 0], [0, 1, 2, 2, 3], 3, [[0, 3], [1], [2, 2]], id="mod-3"),
        pytest.param([], [], 2, [[], []], id="empty"),
    ],
)
def test_split_by_indices_pair(impl: Any, indices: Any, values: Any, num: int, want: Any) -> None:
    got = impl.split_by_indices(*moved(impl, int64(*indices), int64(*values)), num)
    assert [part.tolist() for part in got] == want


@pytest.mark.parametrize("impl", BACKENDS)
def test_split_by_indices_gradient_pair(impl: Any) -> None:
    values = torch.ones(3, 2, dtype=torch.float32, device=impl.device, requires_grad=True)
    parts = impl.split_by_indices(moved(impl, int64(0, 1, 0)), values, 3)
    with impl.chosen():
        sum(part.sum() for part in parts).backward()
    assert values.grad is not None
    assert values.grad.tolist() == [[1, 1]] * 3


@pytest.mark.parametrize("impl", BACKENDS)
def test_reorder_by_indices_pair(impl: Any) -> None:
    ids = moved(impl, int64(0, 1, 2, 2, 3, 5))
    got = impl.reorder_by_indices(ids, (ids % 3).int(), 3)
    assert got.ids_U.tolist() == [3, 0, 1, 5, 2]
    assert got.sizes_W.tolist() == [2, 1, 2]


FUSED = [
    pytest.param(
        [[0, 1, 2, 2, 3, 5]], 3, None, [0, 3, 1, 2, 5], [2, 1, 2], [2, 1, 2], None, id="one-slot"
    ),
    pytest.param(
        [[0, 1, 2, 2, 3, 5], []],
        3,
        None,
        [0, 3, 1, 2, 5],
        [2, 1, 2],
        [2, 0, 1, 0, 2, 0],
        None,
        id="empty-second-slot",
    ),
    pytest.param(
        [[0, 1, 2, 2, 3, 5], [6, 7, 8, 8, 9, 11]],
        3,
        None,
        [0, 3, 6, 9, 1, 7, 2, 5, 8, 11],
        [4, 2, 4],
        [2, 2, 1, 1, 2, 2],
        None,
        id="two-slots-three-shards",
    ),
    pytest.param([[], []], 2, None, [], [0, 0], [0, 0, 0, 0], [], id="all-empty"),
    pytest.param(
        [[0, 1, 4, 5], [2, 3, 6, 7]],
        2,
        None,
        [0, 4, 2, 6, 1, 5, 3, 7],
        [4, 4],
        [2, 2, 2, 2],
        None,
        id="two-slots-two-shards",
    ),
    pytest.param(
        [[0, 1, 0], [3, 2, 3], [5, 6, 7]],
        2,
        [1, 2, 3],
        [0, 2, 6, 1, 3, 5, 7],
        [3, 4],
        [1, 1, 1, 1, 1, 2],
        [0, 6, 0, 7, 1, 7, 9, 3, 12],
        id="three-widths",
    ),
    pytest.param(
        [[2, 3, 1, 2, 7, 2], [5, 8, 4, 4, 5, 11, 6]],
        3,
        [3, 2],
        [3, 6, 1, 7, 4, 2, 5, 8, 11],
        [2, 3, 4],
        [1, 1, 2, 1, 1, 3],
        [13, 0, 5, 13, 8, 13, 16, 18, 11, 11, 16, 20, 3],
        id="two-widths",
    ),
]


@pytest.mark.parametrize("form", ["list", "ragged"])
@pytest.mark.parametrize("impl", BACKENDS)
@pytest.mark.parametrize(("ids", "num", "dims", "want", "shards", "slots", "offsets"), FUSED)
def test_fused_reorder_by_indices_pair(
    impl: Any,
    form: str,
    ids: Any,
    num: int,
    dims: Any,
    want: Any,
    shards: Any,
    slots: Any,
    offsets: Any,
) -> None:
    tables = Ragged.from_lists(ids).to(impl.device)
    if form == "list":
        tables = list(tables.values.split([len(part) for part in ids]))
    got = impl.fused_reorder_by_indices(tables, num, dims)
    assert got.ids_U.tolist() == want
    assert got.shard_sizes_W.tolist() == shards
    assert got.slot_sizes_WK.tolist() == slots
    assert got.offset_sizes_K.tolist() == [len(part) for part in ids]
    if offsets is not None:
        assert got.offsets_N.tolist() == offsets


@pytest.mark.parametrize("impl", BACKENDS)
def test_ragged_split_by_indices_pair(impl: Any) -> None:
    ragged = Ragged.from_lists([[], [], [4, 3, 2], [1], [], []]).to(impl.device)
    values, positions = impl.ragged_split_by_indices(moved(impl, int64(0, 1, 0, 1)), ragged, 2)
    assert lists(values[0]) == [[], [], [4, 2], [], [], []]
    assert lists(values[1]) == [[], [], [3], [1], [], []]
    assert lists(positions[0]) == [[], [], [0, 2], [], [], []]
    assert lists(positions[1]) == [[], [], [1], [3], [], []]


@pytest.mark.parametrize("impl", BACKENDS)
@pytest.mark.parametrize(
    ("key", "dims", "unique", "offsets", "buffer"),
    [
        pytest.param(
            [[], [0, 1, 2, 1, 0], [0, 1, 0], []],
            [1, 2, 3, 4],
            [[], [0, 1, 2], [0, 1], []],
            [[], [[0, 8], [2, 6], [4]], [[10, 16], [13]], []],
            19,
            id="four-slots",
        ),
        pytest.param(
            [[0, 1, 0], [0]],
            [2, 3],
            [[0, 1], [0]],
            [[[0, 4], [2]], [[6]]],
            9,
            id="documentation",
        ),
    ],
)
def test_unique_key_with_value_and_offset_pair(
    impl: Any, key: Any, dims: Any, unique: Any, offsets: Any, buffer: int
) -> None:
    ragged = Ragged.from_lists(key).to(impl.device)
    got = impl.unique_key_with_value_and_offset(ragged, dims)
    assert lists(got.unique_key) == unique
    found, splits, slots = (part.tolist() for part in got.value_offset)
    nested = [
        [found[splits[u] : splits[u + 1]] for u in range(slots[k], slots[k + 1])]
        for k in range(len(key))
    ]
    assert nested == offsets
    assert got.value_buffer.shape == (buffer,)
    assert got.value_buffer.dtype == torch.float32
    assert impl.unique_key_with_value_and_offset(ragged, dims, False).value_buffer is None


@pytest.mark.parametrize("impl", BACKENDS)
@pytest.mark.parametrize(
    ("splits", "sizes", "want"),
    [
        pytest.param(
            [0, 2, 5, 5, 9, 0, 0, 3, 4], [5, 4], [0, 2, 5, 5, 9, 9, 12, 13], id="monolith"
        ),
        pytest.param([0, 0, 2, 0], [1, 2, 1], [0, 2], id="parts-without-rows"),
        pytest.param([0], [1], [0], id="nothing"),
    ],
)
def test_normalize_merged_split_pair(impl: Any, splits: Any, sizes: Any, want: Any) -> None:
    got = impl.normalize_merged_split(*moved(impl, int64(*splits), int64(*sizes)))
    assert got.tolist() == want
    assert got.numel() == len(splits) + 1 - len(sizes)


@pytest.mark.parametrize("impl", BACKENDS)
@pytest.mark.parametrize(
    ("rows", "want"),
    [
        pytest.param([[], [7, 8], [], [9], []], [1, 1, 3], id="empties"),
        pytest.param([[]], [], id="nothing"),
        pytest.param([[1, 2]], [0, 0], id="one-row"),
    ],
)
def test_fused_value_rowids_pair(impl: Any, rows: Any, want: Any) -> None:
    ragged = Ragged.from_lists(rows).to(impl.device)
    assert impl.fused_value_rowids(ragged).tolist() == want
