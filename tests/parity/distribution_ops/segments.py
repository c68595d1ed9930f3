"""Segment operations on every implementation: Monolith's pairs, then everything else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from support import ops_reference as reference
from support.backends import BACKENDS, Implementation
from support.segments import (
    LENGTHS,
    REDUCES,
    SEGMENTS,
    compare,
    ints,
    offsets_of,
    random_rows,
    rows_of,
)

pytestmark = pytest.mark.usefixtures("poisoned")
on_all = pytest.mark.parametrize("impl", BACKENDS)


# ---- Monolith's pairs -------------------------------------------------------------------------


@on_all
@pytest.mark.parametrize("flat", [False, True], ids=["M1", "M"])
def test_reduce_mean_pair(impl: Implementation, flat: bool) -> None:
    index, values = ints([[0], [0], [1]], impl), rows_of([[4, 4], [2, 2], [1, 1]], impl)
    out = impl.reduce_mean(index.flatten() if flat else index, values, [2])
    assert out.tolist() == [[3, 3], [1, 1]]


@on_all
def test_reduce_mean_gradient_pair(impl: Implementation) -> None:
    values = rows_of([[4, 4], [2, 2]], impl)
    out = impl.reduce_mean(ints([[0], [0]], impl), values, [1])
    with impl.chosen():
        (rows_of([[1, 1]], impl).detach() * 2 - 2 * out).sum().backward()
    assert values.grad.tolist() == [[-1, -1], [-1, -1]]


@on_all
def test_reduce_sum_pair(impl: Implementation) -> None:
    values = rows_of([[1, 1], [2, 2], [4, 4]], impl)
    out = impl.reduce_sum(ints([[0], [0], [1]], impl), values, [2])
    assert out.tolist() == [[3, 3], [4, 4]]
    with impl.chosen():
        (1 - out).sum().backward()
    assert values.grad.tolist() == [[-1, -1]] * 3


@on_all
def test_reduce_sqrtn_pair_is_an_l2_norm(impl: Implementation) -> None:
    values = rows_of([[3, 3], [4, 4], [4, 4]], impl)
    out = impl.reduce_sqrtn(ints([[0], [0], [1]], impl), values, [2])
    assert out.tolist() == [[5, 5], [4, 4]]


@on_all
def test_reduce_sqrtn_gradient_pair(impl: Implementation) -> None:
    values = rows_of([[3, 4], [4, 3]], impl)
    out = impl.reduce_sqrtn(ints([[0], [0]], impl), values, [1])
    with impl.chosen():
        (1 - out).sum().backward()
    want = torch.tensor([[-0.6, -0.8], [-0.8, -0.6]], device=impl.device)
    torch.testing.assert_close(values.grad, want)


@on_all
def test_reduce_sqrtn_gradient_of_zeros_pair(impl: Implementation) -> None:
    values = rows_of([[0, 0], [0, 0]], impl)
    out = impl.reduce_sqrtn(ints([[0], [0]], impl), values, [1])
    with impl.chosen():
        (1 - out).sum().backward()
    assert out.tolist() == [[0, 0]]
    assert values.grad.tolist() == [[0, 0], [0, 0]]


FIVE = [[1.0, 1, 1, 1, 1], [2, 2, 1, 1, 1], [4, 4, 2, 2, 2], [4, 4, 2, 2, 2]]
SORTED_SUMS = [
    pytest.param([0, 0, 1], [[1, 1, 1], [2, 2, 1], [4, 4, 2]], (2, 3), [[3, 3, 2], [4, 4, 2]],
                 id="two-rows"),
    pytest.param([0, 0, 1], [[1, 1, 1], [2, 2, 1], [4, 4, 2]], (4, 3),
                 [[3, 3, 2], [4, 4, 2], [0, 0, 0], [0, 0, 0]], id="padded"),
    pytest.param([], [], (2, 3), [[0, 0, 0], [0, 0, 0]], id="empty"),
    pytest.param([0, 0, 2, 2], FIVE, (4, 5),
                 [[3, 3, 2, 2, 2], [0] * 5, [8, 8, 4, 4, 4], [0] * 5], id="five-columns"),
]  # fmt: skip


@on_all
@pytest.mark.parametrize(("index", "values", "shape", "want"), SORTED_SUMS)
def test_fused_sorted_segment_sum_pair(
    impl: Implementation,
    index: list[int],
    values: list[list[float]],
    shape: tuple[int, int],
    want: list[list[float]],
) -> None:
    rows = torch.tensor(values, dtype=torch.float32, device=impl.device).reshape(-1, shape[1])
    rows.requires_grad_()
    (out,) = impl.fused_sorted_segment_sum([ints(index, impl)], [rows], [shape])
    assert out.tolist() == want
    weights = torch.arange(out.numel(), device=impl.device).reshape(shape).float()
    with impl.chosen():
        (out * weights).sum().backward()
    assert rows.grad.tolist() == weights[ints(index, impl)].tolist()


@on_all
def test_fused_sorted_segment_sum_pair_of_all_at_once(impl: Implementation) -> None:
    cases = [case.values for case in SORTED_SUMS]
    rows = [
        torch.tensor(values, dtype=torch.float32, device=impl.device).reshape(-1, shape[1])
        for _, values, shape, _ in cases
    ]
    outs = impl.fused_sorted_segment_sum(
        [ints(index, impl) for index, *_ in cases], rows, [shape for _, _, shape, _ in cases]
    )
    assert [out.tolist() for out in outs] == [want for *_, want in cases]


@on_all
@pytest.mark.parametrize(
    ("index", "length", "split_dims", "want"),
    [
        pytest.param([0, 0, 1], 2, [2, 1], [[[3, 3], [4, 4]], [[2], [2]]], id="2-1"),
        pytest.param([0, 0, 1], 2, [1, 2], [[[3], [4]], [[3, 2], [4, 2]]], id="1-2"),
        pytest.param(
            [0, 0, 2],
            4,
            [1, 2],
            [[[3], [0], [4], [0]], [[3, 2], [0, 0], [4, 2], [0, 0]]],
            id="empty-rows",
        ),
    ],
)
def test_fused_reduce_sum_and_split_pair(
    impl: Implementation, index: list[int], length: int, split_dims: list[int], want: list[Any]
) -> None:
    values = rows_of([[1, 1, 1], [2, 2, 1], [4, 4, 2]], impl)
    outs = impl.fused_reduce_sum_and_split(ints(index, impl), values, length, split_dims)
    assert [out.tolist() for out in outs] == want
    with impl.chosen():
        sum(out.sum() for out in outs).backward()
    assert values.grad.tolist() == [[1, 1, 1]] * 3


def monolith_slices(width: int) -> list[int]:
    """Quarters, the remainder in the last; single columns below four."""
    if width < 4:
        return [1] * width
    quarter = width // 4
    return [quarter] * 3 + [width - 3 * quarter]


@on_all
@pytest.mark.parametrize(
    "batch", [16, pytest.param(256, marks=pytest.mark.slow, id="256-as-there")]
)
def test_fused_reduce_and_split_gpu_pair(impl: Implementation, batch: int) -> None:
    tables, batch = (9, 12) if impl.interpreted else (102, batch)
    generator = torch.Generator().manual_seed(7)
    splits, embeddings, slices = [], [], []
    for k in range(1, tables + 1):
        lengths = torch.randperm(batch, generator=generator)
        splits.append(offsets_of(lengths.tolist(), impl))
        rows = torch.rand(int(lengths.sum()), 2 * k - 1, generator=generator)
        embeddings.append(rows.to(impl.device).requires_grad_())
        slices.append(monolith_slices(2 * k - 1))
    outs = impl.fused_reduce_and_split_gpu(splits, embeddings, slices)
    weights = [torch.rand(out.shape, generator=generator).to(impl.device) for out in outs]
    with impl.chosen():
        total = sum((out * weight).sum() for out, weight in zip(outs, weights, strict=True))
        grads = torch.autograd.grad(total, embeddings)

    given, flat_weights = iter(outs), iter(weights)
    for offsets, rows, widths, grad in zip(splits, embeddings, slices, grads, strict=True):
        row = torch.repeat_interleave(torch.arange(batch, device=impl.device), offsets.diff())
        sums = rows.new_zeros(batch, rows.shape[1]).index_add(0, row, rows)
        for part in torch.split(sums, widths, dim=1):
            torch.testing.assert_close(next(given), part, rtol=1e-5, atol=1e-3)
        parts = torch.cat([next(flat_weights) for _ in widths], dim=1)
        torch.testing.assert_close(grad, parts[row])
    assert next(given, None) is None


# ---- parity with plain torch ------------------------------------------------------------------


@on_all
@pytest.mark.parametrize("dim", [1, 2, 3, 4, 7, 8, 16, 30, 40, 129])
@pytest.mark.parametrize("op", [*SEGMENTS, "segment_first_n"])
def test_segments_equal_plain_torch(impl: Implementation, op: str, dim: int) -> None:
    values = random_rows(sum(LENGTHS), dim, impl)
    offsets = offsets_of(LENGTHS, impl)
    extra = (2,) if op == "segment_first_n" else ()
    compare(impl, op, values, lambda fn: fn(values, offsets, *extra))


@on_all
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("op", SEGMENTS)
def test_segments_of_other_dtypes(impl: Implementation, op: str, dtype: torch.dtype) -> None:
    values = random_rows(sum(LENGTHS), 12, impl, dtype=dtype)
    offsets = offsets_of(LENGTHS, impl)
    assert getattr(impl, op)(values, offsets).dtype == dtype
    compare(impl, op, values, lambda fn: fn(values, offsets))


@on_all
@pytest.mark.parametrize("order", ["sorted", "unsorted", "promised"])
@pytest.mark.parametrize("dim", [1, 6, 16, 40, 64])
@pytest.mark.parametrize("op", REDUCES)
def test_reduces_equal_plain_torch(impl: Implementation, op: str, dim: int, order: str) -> None:
    index = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    if order == "unsorted":
        index = index[torch.randperm(len(index), generator=torch.Generator().manual_seed(1))]
    index, values = index.to(impl.device), random_rows(len(index), dim, impl)
    promise = {"indices_sorted": order == "promised"}
    compare(impl, op, values, lambda fn: fn(index, values, len(LENGTHS), **promise))


@on_all
@pytest.mark.parametrize("indices_sorted", [False, True])
def test_split_sums_equal_plain_torch(impl: Implementation, indices_sorted: bool) -> None:
    index = torch.tensor([3, 0, 3, 1, 1, 0, 3])
    index = (index.sort().values if indices_sorted else index).to(impl.device)
    values = random_rows(7, 9, impl)
    promise = {"indices_sorted": indices_sorted}
    for part in range(3):
        compare(
            impl,
            "fused_reduce_sum_and_split",
            values,
            lambda fn, part=part: fn(index, values, 5, [4, 2, 3], **promise)[part],
        )


@on_all
@pytest.mark.parametrize("op", [*SEGMENTS, "segment_first_n"])
def test_nothing_in_gives_zeros(impl: Implementation, op: str) -> None:
    extra = (2,) if op == "segment_first_n" else ()
    for rows, segments, dim in [(0, 3, 4), (0, 0, 4), (2, 1, 0)]:
        values = random_rows(rows, dim, impl)
        offsets = offsets_of([rows] + [0] * (segments - 1) if segments else [], impl)
        out = getattr(impl, op)(values, offsets, *extra)
        assert out.shape == (segments, *extra, dim)
        assert out.count_nonzero() == 0
        with impl.chosen():
            (grad,) = torch.autograd.grad(out.sum(), values)
        assert grad.shape == values.shape


@on_all
@pytest.mark.parametrize("op", REDUCES)
def test_no_values_reduce_to_zeros(impl: Implementation, op: str) -> None:
    for length, dim in [(3, 4), (0, 4), (3, 0)]:
        values = random_rows(0, dim, impl)
        out = getattr(impl, op)(ints([], impl), values, length)
        assert out.shape == (length, dim)
        assert out.count_nonzero() == 0
        with impl.chosen():
            (grad,) = torch.autograd.grad(out.sum(), values)
        assert grad.shape == (0, dim)


@on_all
def test_no_tables_and_empty_tables(impl: Implementation) -> None:
    assert impl.fused_sorted_segment_sum([], [], []) == []
    assert impl.fused_reduce_and_split_gpu([], [], []) == []
    none, some = random_rows(0, 3, impl), random_rows(4, 5, impl)
    splits = [offsets_of([], impl), offsets_of([0, 0], impl), offsets_of([3, 1], impl)]
    outs = impl.fused_reduce_and_split_gpu(splits, [none, none, some], [[3], [0, 3], [5]])
    assert [tuple(out.shape) for out in outs] == [(0, 3), (2, 0), (2, 3), (2, 5)]
    torch.testing.assert_close(outs[3], reference.segment_sum(some, splits[2]))


@on_all
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_tables_of_other_dtypes(impl: Implementation, dtype: torch.dtype) -> None:
    values, offsets = random_rows(sum(LENGTHS), 12, impl, dtype=dtype), offsets_of(LENGTHS, impl)
    ids = reference.row_ids(offsets)

    def split(fn: Any) -> Tensor:
        return torch.cat(fn([offsets, offsets], [values, values], [[5, 7], [12]]), dim=1)

    compare(impl, "fused_reduce_and_split_gpu", values, split)
    shape = (len(LENGTHS), 12)
    compare(impl, "fused_sorted_segment_sum", values, lambda fn: fn([ids], [values], [shape])[0])
    parted = (ids.flip(0), values, len(LENGTHS), [4, 8])
    compare(impl, "fused_reduce_sum_and_split", values, lambda fn: torch.cat(fn(*parted), dim=1))


@on_all
def test_rows_and_offsets_convert(impl: Implementation) -> None:
    offsets = offsets_of(LENGTHS, impl)
    ids = impl.row_ids(offsets)
    assert ids.tolist() == [b for b, length in enumerate(LENGTHS) for _ in range(length)]
    assert torch.equal(impl.row_ids(offsets, sum(LENGTHS)), ids)
    assert torch.equal(impl.segment_offsets(ids, len(LENGTHS)), offsets)
    assert impl.row_ids(offsets_of([], impl)).tolist() == []
    assert impl.segment_offsets(ints([], impl), 2).tolist() == [0, 0, 0]


@on_all
def test_views_are_read_as_they_are(impl: Implementation) -> None:
    wide = torch.arange(60.0, device=impl.device).reshape(10, 6)
    offsets = offsets_of([4, 0, 6], impl)
    spread = offsets.repeat_interleave(2)[::2]
    for rows in (wide[:, 1:4], wide.T.contiguous().T, wide[:, 2:]):
        want = reference.segment_sum(rows.contiguous(), offsets)
        torch.testing.assert_close(impl.segment_sum(rows, spread), want)


@on_all
def test_infinities_stay_in_their_segment(impl: Implementation) -> None:
    values = rows_of([[float("inf"), 1], [1, float("nan")], [2, 2], [3, 3], [0, 0]], impl)
    out = impl.segment_sum(values, offsets_of([2, 3], impl))
    assert out[1].tolist() == [5, 5]
    assert out[0, 0].isinf()
    assert out[0, 1].isnan()
