"""What a review of segments and the layout found: bad input at its edges, and good citizenship."""

from __future__ import annotations

import inspect
import typing
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.errors import InputError, ShapeError
from shoal.ops import (
    FeatureConfig,
    FeatureConfigs,
    LayoutIndex,
    MonolithOffsets,
    OutConfig,
    SliceConfig,
    fused_embedding_to_layout,
    fused_reduce_and_split_gpu,
    fused_reduce_sum_and_split,
    reduce_sum,
    row_ids,
    segment_sum,
    sharding_sparse_fids,
)
from shoal.ops.dispatch import bounds_checks
from shoal.ragged import KeyedRagged
from support import ops_reference as reference
from support.backends import BACKENDS, Implementation, forced

LEAST = -(1 << 63)
CONFIGS = FeatureConfigs(
    {"a": FeatureConfig("t", (2,)), "b": FeatureConfig("t", (2,), "firstn", 2)},
    {"all": OutConfig((SliceConfig("a", 0, 2),)), "seq": OutConfig((SliceConfig("b", 0, 2),))},
)
BATCH = KeyedRagged.from_lists({"a": [[0, 1], [1]], "b": [[2], []]})


@pytest.fixture
def four_threads() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("four_threads")
def test_an_index_far_outside_before_a_part_of_the_work() -> None:
    count = 1 << 18
    index_M = torch.zeros(count, dtype=torch.int64)
    index_M[count // 4 - 1 :: count // 4] = LEAST
    index_M[-1] = 0
    with pytest.raises(InputError, match=f"reduce_sum: index {count // 4 - 1}: got {LEAST}"):
        reduce_sum(index_M, torch.ones(count, 1), 4)


# The difference of neighbours overflows: none of them is negative.
HIDDEN_FALL = [0, 1, LEAST, -1, 4]


@pytest.mark.parametrize("impl", BACKENDS)
def test_a_fall_whose_difference_overflows(impl: Implementation) -> None:
    offsets_B1 = torch.tensor(HIDDEN_FALL, device=impl.device)
    rows_ND = torch.ones(4, 2, device=impl.device)
    for op in (impl.segment_sum, lambda rows, cuts: impl.row_ids(cuts, 4)):
        with bounds_checks(), pytest.raises(ShapeError, match=f"offset 2: got {LEAST}"):
            op(rows_ND, offsets_B1)
    with pytest.raises(ShapeError, match=f"offset 2: got {LEAST}"):
        KeyedRagged(("a",), torch.arange(4), torch.tensor(HIDDEN_FALL)).validate()


@pytest.mark.parametrize("impl", BACKENDS)
@pytest.mark.parametrize("splits, first", [(HIDDEN_FALL, 0), ([0, 1, 2, 3, 4], (1 << 63) - 1)])
def test_layout_offsets_that_overflow(impl: Implementation, splits: list[int], first: int) -> None:
    index = LayoutIndex(
        torch.zeros(4, dtype=torch.int64),
        torch.zeros(4, dtype=torch.int32),
        torch.tensor(splits),
        torch.tensor([[[first, 2, 0], [2, 2, 0]]]),
        (2,),
    ).to(impl.device)
    rows_UD = torch.ones(4, 2, device=impl.device)
    words = "cell_splits_C1: offset 2" if first == 0 else "cells of feature 0"
    with bounds_checks(), pytest.raises(InputError, match=words):
        impl.fused_embedding_to_layout([rows_UD], index, CONFIGS)


@pytest.mark.parametrize("impl", BACKENDS)
def test_gradients_of_features_that_share_cells_add_up(impl: Implementation) -> None:
    """Feature b reads the cells of a, of which it takes two ids; c reads one of them for all."""
    configs = FeatureConfigs(
        {
            "a": FeatureConfig("t", (2,)),
            "b": FeatureConfig("t", (1, 1), "firstn", 2),
            "c": FeatureConfig("t", (2,)),
        },
        {
            "all": OutConfig((SliceConfig("a", 0, 2),)),
            "seq": OutConfig((SliceConfig("b", 1, 2),)),
            "one": OutConfig((SliceConfig("c", 0, 2),)),
        },
    )
    index = LayoutIndex(
        torch.tensor([0, 2, 4, 0, 2]),
        torch.zeros(5, dtype=torch.int32),
        torch.tensor([0, 3, 5]),
        torch.tensor([[[0, 2, 0], [0, 2, 0], [1, 1, 1]]]),
        (2,),
    ).to(impl.device)
    rows_UD = torch.zeros(3, 2, dtype=torch.float64, device=impl.device)
    places = dict(zip(configs.outputs, range(3), strict=True))
    grads: list[Tensor] = [torch.empty(0)] * 3
    grads[places["all"]] = torch.tensor([[1.0, 2.0], [10.0, 20.0]])
    grads[places["seq"]] = torch.tensor([[[100.0], [200.0]], [[1000.0], [2000.0]]])
    grads[places["one"]] = torch.tensor([[0.25, 0.5], [0.25, 0.5]])
    given = [grad.to(impl.device, torch.float64) for grad in grads]
    (found,) = impl.fused_embedding_to_layout_grad(given, [rows_UD], index, configs)
    want = [[11.5, 1123.0], [11.5, 2223.0], [1.0, 2.0]]
    assert found.view(3, 2).tolist() == want


def test_negative_rows_of_row_ids() -> None:
    with pytest.raises(ShapeError, match="row_ids: number of rows: got -1"):
        row_ids(torch.tensor([0, 2]), -1)


@pytest.mark.parametrize("shard", [reference.sharding_sparse_fids, sharding_sparse_fids])
@pytest.mark.parametrize("keys", [("a", "b"), ("b", "a")])
@pytest.mark.parametrize(
    "offsets, words",
    [
        ([0, 2, 1, 3, 4], "offset 2: got 1"),
        ([0, 3, 2, 4, 4], "offset 2: got 2"),
        ([0, 1, 2, 3, 9], "number of rows: got 4"),
        ([1, 1, 2, 3, 4], "first offset: got 1"),
    ],
)
def test_sharding_refuses_bad_offsets(shard: Any, keys: Any, offsets: Any, words: str) -> None:
    batch = KeyedRagged(keys, torch.arange(4), torch.tensor(offsets))
    with pytest.raises(ShapeError, match=f"sharding_sparse_fids: {words}"):
        shard(batch, 2, CONFIGS)


@pytest.mark.parametrize("version, what", [(4, "floats of a buffer"), (5, "emb_size")])
def test_sizes_beyond_31_bits_do_not_wrap(version: Any, what: str) -> None:
    wide = FeatureConfigs(
        {"a": FeatureConfig("t", (1 << 30,))}, {"all": OutConfig((SliceConfig("a", 0, 2),))}
    )
    found = sharding_sparse_fids(KeyedRagged.from_lists({"a": [[1, 2, 3]]}), 1, wide)
    with pytest.raises(InputError, match=f"largest .*{what}: got {3 << 30}"):
        found.monolith(version)
    assert found.monolith(3).fid_offset.view(torch.int64).tolist() == [0, 1 << 30, 2 << 30]


def test_errors_name_where_they_come_from() -> None:
    found = sharding_sparse_fids(BATCH, 1, CONFIGS)
    with pytest.raises(InputError, match="LayoutIndex: length of buffer_N"):
        LayoutIndex(
            found.index.rows_N,
            found.index.buffer_N[1:],
            found.index.cell_splits_C1,
            found.index.cells_RF,
            (2,),
        )
    with pytest.raises(InputError, match="MonolithOffsets: ps_num: got 0"):
        MonolithOffsets(*[torch.zeros(1, dtype=torch.int64)] * 3, 1, 0)
    two = LayoutIndex(
        found.index.rows_N,
        found.index.buffer_N,
        found.index.cell_splits_C1,
        found.index.cells_RF.repeat(2, 1, 1),
        (2, 2),
    )
    rows = torch.ones(8, requires_grad=True)
    laid, _ = fused_embedding_to_layout([rows], two, CONFIGS)
    with pytest.raises(InputError, match="fused_embedding_to_layout: requests: got 2"):
        laid.sum().backward()


@pytest.mark.parametrize("backend", ["reference", "core"])
def test_results_may_be_changed_in_place(backend: Any) -> None:
    rows_ND = torch.ones(3, 2, requires_grad=True)
    offsets_B1, index_M = torch.tensor([0, 2, 3]), torch.tensor([0, 0, 1])
    index = LayoutIndex.from_keyed(BATCH, BATCH.values_N, {"t": 2}, CONFIGS)
    calls = [
        lambda: [segment_sum(rows_ND, offsets_B1)],
        lambda: fused_reduce_sum_and_split(index_M, rows_ND, 2, [2]),
        lambda: fused_reduce_and_split_gpu([offsets_B1], [rows_ND], [[1, 1]]),
        lambda: fused_embedding_to_layout([rows_ND], index, CONFIGS),
    ]
    for call in calls:
        with forced(backend):
            for result in call():
                result.mul_(2)
                (grads_ND,) = torch.autograd.grad(result.sum(), rows_ND, retain_graph=True)
                assert grads_ND.max() in (2, 4)


class _Laid(torch.nn.Module):
    def forward(self, rows_UD: Tensor, *index: Tensor) -> list[Tensor]:
        return fused_embedding_to_layout([rows_UD], LayoutIndex(*index, (2,)), CONFIGS)


@pytest.mark.parametrize("strict", [False, True])
def test_export_leaves_no_stand_ins_in_the_plan(strict: bool) -> None:
    configs = CONFIGS.plan
    index = LayoutIndex.from_keyed(BATCH, BATCH.values_N, {"t": 2}, CONFIGS).to("meta")
    tensors = (index.rows_N, index.buffer_N, index.cell_splits_C1, index.cells_RF)
    torch.export.export(_Laid(), (torch.ones(3, 2, device="meta"), *tensors), strict=strict)
    moved = configs.on(torch.device("meta"))
    assert type(moved.features_F) is Tensor
    assert configs.on(torch.device("meta")) is moved


@pytest.mark.slow
def test_compiles_whole_for_any_batch_size() -> None:
    def laid(rows_UD: Tensor, values_N: Tensor, offsets_FB1: Tensor) -> list[Tensor]:
        batch = KeyedRagged(("a", "b"), values_N, offsets_FB1)
        index = LayoutIndex.from_keyed(batch, values_N, {"t": 2}, CONFIGS)
        return fused_embedding_to_layout([rows_UD], index, CONFIGS)

    compiled = torch.compile(laid, fullgraph=True, backend="aot_eager", dynamic=True)
    rows_UD = torch.rand(3, 2)
    for size in (2, 3, 5):
        batch = KeyedRagged.from_lists({"a": [[0, 1]] * size, "b": [[2]] * size})
        arguments = (rows_UD, batch.values_N, batch.offsets_FB1)
        torch.testing.assert_close(compiled(*arguments), laid(*arguments))


def test_kernel_parameters_have_no_annotation_that_python_3_10_can_call() -> None:
    """There `typing.Any` is callable, and Triton refuses to compile what refers to it."""
    pytest.importorskip("triton")
    from shoal.kernels import ids, layout, segments

    for module in (ids, segments, layout):
        for name, kernel in vars(module).items():
            function = getattr(kernel, "fn", None)
            if inspect.isfunction(function) and function.__module__ == module.__name__:
                hints = typing.get_type_hints(function)
                assert Any not in hints.values(), f"{module.__name__}.{name}"
