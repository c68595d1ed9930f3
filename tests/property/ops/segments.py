"""Random ragged inputs: every implementation equals plain torch, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from support import ops_reference as reference
from support.backends import BACKENDS, Implementation

on_fast = pytest.mark.parametrize("impl", BACKENDS[1:])
several = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.differing_executors]
)

LENGTHS = st.lists(st.sampled_from([0, 0, 1, 1, 2, 3, 5, 18]), max_size=8)
DIMS = st.integers(0, 40)
DTYPES = st.sampled_from([torch.float32, torch.float64])
SEGMENTS = st.sampled_from(["segment_sum", "segment_mean", "segment_sqrtn", "segment_l2"])
REDUCES = st.sampled_from(["reduce_sum", "reduce_mean", "reduce_mean_sqrtn", "reduce_sqrtn"])
SEEDS = st.integers(0, 2**20)


def values_of(rows: int, dim: int, dtype: torch.dtype, seed: int, impl: Implementation) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-3, 4, (rows, dim), generator=generator).to(dtype)
    return values.to(impl.device).requires_grad_()


def offsets_of(lengths: list[int], impl: Implementation) -> Tensor:
    return torch.tensor([0, *lengths], device=impl.device).cumsum(0)


def same(impl: Implementation, op: str, inputs: list[Tensor], *args: Any, **kwargs: Any) -> None:
    got = getattr(impl, op)(*args, **kwargs)
    want = getattr(reference, op)(*args, **kwargs)
    outs, wants = ([x] if isinstance(x, Tensor) else list(x) for x in (got, want))
    weights = [torch.arange(out.numel(), device=impl.device).view(out.shape) % 7 for out in wants]
    total = sum((out * weight).sum() for out, weight in zip(outs, weights, strict=True))
    expected = sum((out * weight).sum() for out, weight in zip(wants, weights, strict=True))
    torch.testing.assert_close(outs, wants)
    with impl.chosen():
        grads = torch.autograd.grad(total, inputs)
    torch.testing.assert_close(grads, torch.autograd.grad(expected, inputs))


@pytest.mark.slow
@on_fast
@given(LENGTHS, DIMS, DTYPES, SEGMENTS, SEEDS)
@several
def test_segments(
    impl: Implementation, lengths: list[int], dim: int, dtype: torch.dtype, op: str, seed: int
) -> None:
    values = values_of(sum(lengths), dim, dtype, seed, impl)
    same(impl, op, [values], values, offsets_of(lengths, impl))


@on_fast
@given(LENGTHS, st.integers(1, 9), st.integers(1, 4), SEEDS)
@several
def test_first_n(
    impl: Implementation, lengths: list[int], dim: int, length: int, seed: int
) -> None:
    values = values_of(sum(lengths), dim, torch.float32, seed, impl)
    same(impl, "segment_first_n", [values], values, offsets_of(lengths, impl), length)


@on_fast
@given(st.lists(st.integers(0, 6), max_size=30), DIMS, DTYPES, REDUCES, st.booleans(), SEEDS)
@several
def test_reduces(
    impl: Implementation,
    index: list[int],
    dim: int,
    dtype: torch.dtype,
    op: str,
    in_order: bool,
    seed: int,
) -> None:
    index_M = torch.tensor(sorted(index) if in_order else index, dtype=torch.int64)
    values = values_of(len(index), dim, dtype, seed, impl)
    same(impl, op, [values], index_M.to(impl.device), values, 7, indices_sorted=in_order)


@pytest.mark.slow
@on_fast
@given(st.lists(st.tuples(LENGTHS, st.lists(st.integers(0, 5), min_size=1, max_size=4)),
                min_size=1, max_size=4), SEEDS)  # fmt: skip
@several
def test_tables(impl: Implementation, tables: list[tuple[list[int], list[int]]], seed: int) -> None:
    splits = [offsets_of(lengths, impl) for lengths, _ in tables]
    rows = [
        values_of(sum(lengths), sum(widths), torch.float32, seed + k, impl)
        for k, (lengths, widths) in enumerate(tables)
    ]
    same(impl, "fused_reduce_and_split_gpu", rows, splits, rows, [w for _, w in tables])
    index = [reference.row_ids(offsets) for offsets in splits]
    shapes = [(len(lengths), sum(widths)) for lengths, widths in tables]
    same(impl, "fused_sorted_segment_sum", rows, index, rows, shapes)


@on_fast
@given(LENGTHS)
@several
def test_rows_and_offsets_convert(impl: Implementation, lengths: list[int]) -> None:
    offsets = offsets_of(lengths, impl)
    ids = impl.row_ids(offsets)
    assert torch.equal(impl.segment_offsets(ids, len(lengths)), offsets)
    assert torch.equal(ids, reference.row_ids(offsets))
