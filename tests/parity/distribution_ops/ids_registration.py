"""Id operators as citizens of torch: gradients, opcheck, compile, export; row numbers kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import shoal.ops as ops
from shoal.ragged import Ragged
from support import ops_reference as reference
from support.backends import BACKENDS
from support.ids import int64, moved

SHOAL = torch.ops.shoal


def test_gradients_of_grouped_rows_match_finite_differences() -> None:
    indices_N = int64(2, 0, 1, 1, 0)
    order_N = int64(3, 1, 0, 4, 2)
    rows_N = torch.rand(5, 2, dtype=torch.float64, requires_grad=True)
    check = torch.autograd.gradcheck
    assert check(lambda rows: tuple(ops.split_by_indices(indices_N, rows, 3)), (rows_N,))
    for op in (ops.permute_rows, ops.unpermute_rows):
        assert check(lambda rows, op=op: op(rows, order_N), (rows_N,))
        assert torch.autograd.gradgradcheck(lambda rows, op=op: op(rows, order_N), (rows_N,))


@pytest.mark.parametrize("impl", BACKENDS)
def test_gradient_goes_back_where_rows_came_from(impl: Any) -> None:
    indices_N = int64(2, 0, 1, 1, 0)
    rows_N = torch.rand(5, 3, device=impl.device, requires_grad=True)
    weights = torch.rand(5, 3)
    parts = impl.split_by_indices(moved(impl, indices_N), rows_N, 3)
    order_N = reference.partition(indices_N, 3).order_N
    with impl.chosen():
        (torch.cat(parts) * weights[order_N].to(impl.device)).sum().backward()
    assert rows_N.grad is not None
    assert torch.equal(rows_N.grad.cpu(), weights)


def regrouped(shards_N: Tensor, rows_N: Tensor, offsets_B1: Tensor) -> Tensor:
    order_N, sizes_W = ops.partition(shards_N, 3)
    rowids_N = ops.fused_value_rowids(Ragged(shards_N, offsets_B1))
    joined = ops.normalize_merged_split(torch.cat([offsets_B1, offsets_B1]), int64(3, 3))
    return ops.permute_rows(rows_N, order_N).sum() + sizes_W.max() + rowids_N.sum() + joined.sum()


def test_grouping_compiles_whole() -> None:
    shards_N, rows_N = int64(2, 0, 1, 1), torch.rand(4, 2, requires_grad=True)
    offsets_B1 = int64(0, 3, 4)
    compiled = torch.compile(regrouped, fullgraph=True, backend="aot_eager")
    want = regrouped(shards_N, rows_N, offsets_B1)
    got = compiled(shards_N, rows_N, offsets_B1)
    assert torch.equal(got, want)
    got.backward()
    assert rows_N.grad is not None
    assert rows_N.grad.tolist() == [[1, 1]] * 4


def test_dedup_compiles_whole() -> None:
    def spread(ids_N: Tensor) -> Tensor:
        found = ops.dedup(ids_N)
        packed = ops.fused_reorder_by_indices([ids_N, ids_N], 2)
        return found.counts_U[found.inverse_N] + packed.offsets_N[: ids_N.numel()]

    ids_N = int64(4, 4, 7, 4)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(spread, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(ids_N), spread(ids_N))


class Regrouped(torch.nn.Module):
    def forward(self, shards_N: Tensor, rows_N: Tensor, offsets_B1: Tensor) -> Tensor:
        return regrouped(shards_N, rows_N, offsets_B1)


def test_grouping_exports() -> None:
    inputs = (int64(2, 0, 1, 1), torch.rand(4, 2), int64(0, 3, 4))
    program = torch.export.export(Regrouped(), inputs)
    assert torch.equal(program.module()(*inputs), regrouped(*inputs))


IDS = int64(3, 4, 3)
OPERATORS = [
    pytest.param("dedup", (IDS,), id="dedup"),
    pytest.param(
        "normalize_merged_split", (int64(0, 2, 0, 1), int64(2, 2)), id="normalize_merged_split"
    ),
    pytest.param("partition", (int64(1, 0, 1), 2), id="partition"),
    pytest.param(
        "move_rows", (torch.rand(3, 2, requires_grad=True), int64(2, 0, 1), True), id="permute_rows"
    ),
    pytest.param(
        "move_rows",
        (torch.rand(3, 2, requires_grad=True), int64(2, 0, 1), False),
        id="unpermute_rows",
    ),
    pytest.param(
        "fused_reorder", ([IDS, IDS], None, [2, 3], 2, "floormod", None), id="fused_reorder"
    ),
    pytest.param(
        "fused_reorder",
        ([IDS], int64(0, 1, 3), [2, 3], 2, "given", int64(0, 1, 0)),
        id="fused_reorder-given",
    ),
    pytest.param("dedup_into", (IDS, *(IDS.clone() for _ in range(3)), int64(0)), id="dedup_into"),
    pytest.param(
        "fused_reorder_into",
        (
            [IDS],
            None,
            [2],
            1,
            "floormod",
            None,
            IDS.clone(),
            IDS.clone(),
            int64(0),
            IDS.clone(),
            int64(0),
        ),
        id="fused_reorder_into",
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "arguments"), OPERATORS)
def test_opcheck_of_ids(name: str, arguments: Any) -> None:
    torch.library.opcheck(getattr(SHOAL, name).default, arguments)


def test_row_numbers_are_kept_while_the_offsets_live_unwritten() -> None:
    ragged = Ragged.from_lists([[1], [2, 3]])
    kept = ops.fused_value_rowids(ragged)
    assert ops.fused_value_rowids(ragged) is kept
    ragged.offsets_B1[1] = 2
    assert ops.fused_value_rowids(ragged).tolist() == [0, 0, 1]
    again = ops.fused_value_rowids(ragged)
    again.zero_()
    assert ops.fused_value_rowids(ragged).tolist() == [0, 0, 1]
    with torch.inference_mode():
        assert ops.fused_value_rowids(ragged).tolist() == [0, 0, 1]
