"""Segment operators as citizens of torch: opcheck, gradients, compile and export."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal import ops

OFFSETS = torch.tensor([0, 3, 3, 4, 7])
INDEX = torch.tensor([2, 0, 2, 3, 0, 0, 3])


def rows(count: int = 7, dim: int = 3, *, grad: bool = True) -> Tensor:
    generator = torch.Generator().manual_seed(count)
    values = torch.rand(count, dim, dtype=torch.float64, generator=generator) + 0.5
    return values.requires_grad_(grad)


SHOAL = torch.ops.shoal
BY_OFFSETS = (OFFSETS, None, None)
GROUPED = SHOAL.group_index(INDEX, 4, False, "op")
BY_INDEX = (*GROUPED, INDEX)
SORTED = INDEX.sort().values
BY_SORTED = (SHOAL.group_index(SORTED, 4, True, "op")[0], None, SORTED)
OPERATORS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    **{
        f"segment_reduce-{name}-{mode}": (SHOAL.segment_reduce, (rows(), *segments, mode))
        for name, segments in [("offsets", BY_OFFSETS), ("index", BY_INDEX)]
        for mode in ("sum", "mean", "sqrtn", "l2")
    },
    **{
        f"segment_spread-{name}": (
            SHOAL.segment_spread,
            (rows(4), *segments, None, None, "mean", 7),
        )
        for name, segments in [("offsets", BY_OFFSETS), ("index", BY_INDEX), ("sorted", BY_SORTED)]
    },
    **{
        f"segment_spread-{name}-l2": (
            SHOAL.segment_spread,
            (rows(4), *segments, rows(), rows(4), "l2", 7),
        )
        for name, segments in [("offsets", BY_OFFSETS), ("index", BY_INDEX)]
    },
    "segment_first_n": (SHOAL.segment_first_n, (rows(), OFFSETS, 2, 7, False)),
    "segment_first_n-back": (
        SHOAL.segment_first_n,
        (rows(8).detach().view(4, 2, 3).requires_grad_(), OFFSETS, 2, 7, True),
    ),
    "row_ids": (SHOAL.row_ids, (OFFSETS, 7, "op")),
    **{
        f"index_reduce-{mode}": (SHOAL.index_reduce, (rows(), INDEX, 4, False, mode, "op"))
        for mode in ("sum", "mean", "sqrtn", "l2")
    },
    "group_index": (SHOAL.group_index, (SORTED, 4, True, "op")),
    "sorted_offsets": (SHOAL.sorted_offsets, ([SORTED], [4], "op")),
    "segment_sums": (
        SHOAL.segment_sums,
        ([rows(), rows(7, 2)], [OFFSETS, OFFSETS], None, None, [1, 2, 2], [2, 1], "op"),
    ),
    "segment_sums-index": (
        SHOAL.segment_sums,
        ([rows()], [GROUPED[0]], GROUPED[1], INDEX, [1, 2], [2], "op"),
    ),
    "segment_sums_backward": (
        SHOAL.segment_sums_backward,
        ([rows(4, 1), rows(4, 2), rows(4, 2)], [OFFSETS, OFFSETS], [7, 7], [2, 1], "op"),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_opcheck_of_segments(name: str) -> None:
    operator, arguments = OPERATORS[name]
    torch.library.opcheck(operator.default, arguments)


FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "segment_sum": lambda v: ops.segment_sum(v, OFFSETS),
    "segment_mean": lambda v: ops.segment_mean(v, OFFSETS),
    "segment_sqrtn": lambda v: ops.segment_sqrtn(v, OFFSETS),
    "segment_l2": lambda v: ops.segment_l2(v, OFFSETS),
    "segment_first_n": lambda v: ops.segment_first_n(v, OFFSETS, 2),
    "reduce_sum": lambda v: ops.reduce_sum(INDEX, v, 4),
    "reduce_mean": lambda v: ops.reduce_mean(INDEX, v, 4),
    "reduce_sqrtn": lambda v: ops.reduce_sqrtn(INDEX, v, 4),
    "reduce_mean_sqrtn": lambda v: ops.reduce_mean_sqrtn(INDEX, v, 4),
    "fused_reduce_sum_and_split": lambda v: tuple(
        ops.fused_reduce_sum_and_split(INDEX, v, 4, [2, 1])
    ),
    "fused_sorted_segment_sum": lambda v: tuple(
        ops.fused_sorted_segment_sum([INDEX.sort().values] * 2, [v, 2 * v], [(4, 3), (5, 3)])
    ),
    "fused_reduce_and_split_gpu": lambda v: tuple(
        ops.fused_reduce_and_split_gpu([OFFSETS] * 2, [v, v * v], [[1, 2], [3]])
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_of_segments_match_finite_differences(name: str) -> None:
    assert torch.autograd.gradcheck(FUNCTIONS[name], rows())
    assert torch.autograd.gradgradcheck(FUNCTIONS[name], rows())


def test_one_of_several_results_alone() -> None:
    values = rows()
    _, second = ops.fused_reduce_sum_and_split(INDEX, values, 4, [2, 1])
    (grad,) = torch.autograd.grad(second.sum(), values)
    assert grad.tolist() == [[0, 0, 1]] * 7


def everything(values: Tensor, offsets: Tensor, index: Tensor) -> tuple[Tensor, ...]:
    return (
        ops.segment_mean(values, offsets),
        ops.segment_l2(values, offsets),
        ops.segment_first_n(values, offsets, 2),
        ops.reduce_sum(index, values, 4),
        ops.reduce_sqrtn(index.view(-1, 1), values, [4]),
        ops.row_ids(offsets, values.shape[0]),
        ops.segment_offsets(index.sort().values, 4),
        *ops.fused_reduce_sum_and_split(index, values, 4, [2, 1]),
        *ops.fused_sorted_segment_sum([index.sort().values], [values], [(4, 3)]),
        *ops.fused_reduce_and_split_gpu([offsets], [values], [[1, 2]]),
    )


@pytest.mark.slow
def test_segments_compile_whole() -> None:
    compiled = torch.compile(everything, fullgraph=True, backend="aot_eager", dynamic=True)
    for count in (7, 9):
        values, index = rows(count), torch.arange(count) * 3 % 4
        offsets = torch.tensor([0, 2, 2, 5, count])
        want, got = everything(values, offsets, index), compiled(values, offsets, index)
        torch.testing.assert_close(got, want)
        total = sum(out.sum() for out in got if out.requires_grad)
        expected = sum(out.sum() for out in want if out.requires_grad)
        torch.testing.assert_close(
            torch.autograd.grad(total, values), torch.autograd.grad(expected, values)
        )


def test_segments_export() -> None:
    class Pool(torch.nn.Module):
        def forward(self, values: Tensor, offsets: Tensor, index: Tensor) -> Any:
            return everything(values, offsets, index)

    dim = torch.export.Dim("n", min=2, max=1000)
    exported = torch.export.export(
        Pool(),
        (rows(grad=False), OFFSETS, INDEX),
        dynamic_shapes={"values": {0: dim}, "offsets": None, "index": {0: dim}},
    )
    values, index = rows(9, grad=False), torch.arange(9) % 4
    offsets = torch.tensor([0, 2, 2, 5, 9])
    torch.testing.assert_close(
        exported.module()(values, offsets, index), everything(values, offsets, index)
    )


def test_meta_segments_have_shapes() -> None:
    values, offsets, index = (t.to("meta") for t in (rows(grad=False), OFFSETS, INDEX))
    assert ops.segment_mean(values, offsets).shape == (4, 3)
    assert ops.segment_first_n(values, offsets, 5).shape == (4, 5, 3)
    assert ops.reduce_mean(index, values, 11).shape == (11, 3)
