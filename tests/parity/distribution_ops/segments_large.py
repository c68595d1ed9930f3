"""Segments that are long, results beyond the caches, several threads, order of adding."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from shoal import ops
from support.backends import BACKENDS, COMPILED, Implementation
from support.segments import SEGMENTS, compare, ints, offsets_of, random_rows

pytestmark = pytest.mark.usefixtures("poisoned")
on_all = pytest.mark.parametrize("impl", BACKENDS)


@pytest.mark.slow
@pytest.mark.parametrize("impl", BACKENDS[-1:])
@pytest.mark.parametrize("mode", ["sum", "mean", "sqrtn", "l2"])
@pytest.mark.parametrize("dim", [5, 40])
def test_chunks_of_long_segments(
    impl: Implementation, monkeypatch: pytest.MonkeyPatch, mode: str, dim: int
) -> None:
    kernels = pytest.importorskip("shoal.kernels.segments")
    monkeypatch.setattr(kernels, "CHUNK", 16)
    lengths = [15, 16, 0, 33, 1, 70, 3, 16, 40]
    values, offsets = random_rows(sum(lengths), dim, impl), offsets_of(lengths, impl)
    op = f"segment_{mode}"
    compare(impl, op, values, lambda fn: fn(values, offsets))
    index = torch.randint(0, 4, (150,), generator=torch.Generator().manual_seed(2))
    values = random_rows(150, dim, impl)
    compare(impl, "reduce_sum", values, lambda fn: fn(index.to(impl.device), values, 4))


@pytest.mark.slow
@pytest.mark.parametrize("impl", COMPILED)
@pytest.mark.parametrize("dim", [3, 16, 50, 64, 200])
@pytest.mark.parametrize("op", SEGMENTS)
def test_segments_beyond_the_caches(impl: Implementation, op: str, dim: int) -> None:
    rows = (6 << 20) // (4 * dim)
    generator = torch.Generator().manual_seed(dim)
    offsets = torch.randint(0, rows + 1, (rows - 1,), generator=generator).sort().values
    offsets = torch.cat([torch.tensor([0]), offsets, torch.tensor([rows])]).to(impl.device)
    memory = torch.rand(rows * dim + 1, generator=generator).to(impl.device)
    values = memory[1:].view(rows, dim).requires_grad_()
    compare(impl, op, values, lambda fn: fn(values, offsets))
    index = torch.randint(0, rows // 3, (rows,), generator=generator).to(impl.device)
    reduced = op.replace("segment_l2", "reduce_sqrtn").replace("segment_sqrtn", "reduce_mean_sqrtn")
    reduced = reduced.replace("segment_", "reduce_")
    for by in (index, index.sort().values):
        compare(impl, reduced, values, lambda fn, by=by: fn(by, values, rows // 3))


def test_segments_beyond_the_caches_may_be_changed() -> None:
    values = torch.rand(200_000, 16).requires_grad_()
    out = ops.segment_sum(values, torch.arange(0, 200_001, 4))
    assert out.is_contiguous()
    out.mul_(2).sum().backward()
    assert values.grad is not None
    assert values.grad.unique().tolist() == [2]


THREAD_CASES: dict[str, Callable[[Tensor], list[Tensor]]] = {
    "one-segment": lambda v: [ops.segment_sum(v, torch.tensor([0, len(v)]))],
    "skewed": lambda v: [ops.segment_l2(v, torch.tensor([0, 3, 3, len(v) - 50, len(v)]))],
    "even": lambda v: [ops.segment_mean(v, torch.arange(0, len(v) + 1, 5))],
    "unsorted": lambda v: [ops.reduce_mean_sqrtn(torch.arange(len(v)) * 7919 % 997, v, 997)],
    "first-n": lambda v: [ops.segment_first_n(v, torch.arange(0, len(v) + 1, 5), 3)],
    "split": lambda v: ops.fused_reduce_and_split_gpu(
        [torch.arange(0, len(v) + 1, 5)] * 2, [v, v], [[30, 3, 31], [64]]
    ),
}


@pytest.mark.parametrize("case", THREAD_CASES)
def test_threads_do_not_change_a_bit_of_segments(case: str) -> None:
    values = torch.rand(20_000, 64, generator=torch.Generator().manual_seed(3)).requires_grad_()
    seen, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            outs = THREAD_CASES[case](values)
            weights = [torch.linspace(-1, 1, out.numel()).reshape(out.shape) for out in outs]
            total = sum((out * w).sum() for out, w in zip(outs, weights, strict=True))
            seen.append([*outs, *torch.autograd.grad(total, values)])
    finally:
        torch.set_num_threads(before)
    for other in seen[1:]:
        assert all(torch.equal(a, b) for a, b in zip(seen[0], other, strict=True))


@on_all
def test_segments_are_added_in_order(impl: Implementation) -> None:
    values = torch.tensor([[1e8], [1.0], [-1e8], [1.0]], device=impl.device)
    assert impl.segment_sum(values, ints([0, 4], impl)).tolist() == [[1.0]]
    mixed = ints([1, 0, 1, 1, 0, 1], impl)
    rows = torch.tensor([[1e8], [5.0], [1.0], [-1e8], [6.0], [1.0]], device=impl.device)
    assert impl.reduce_sum(mixed, rows, 2).tolist() == [[11.0], [1.0]]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_no_segment_operation_waits_for_the_device() -> None:
    offsets, index = torch.arange(0, 4001, 5).cuda(), (torch.arange(4000) * 7 % 50).cuda()
    values, rising = torch.rand(4000, 64, device="cuda").requires_grad_(), index.sort().values
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        outs = [
            ops.segment_mean(values, offsets),
            ops.segment_l2(values, offsets),
            ops.segment_first_n(values, offsets, 3),
            ops.reduce_mean(index, values, 50),
            ops.reduce_mean(rising, values, 50, indices_sorted=True),
            ops.reduce_sum(rising, values, 50, indices_sorted=True),
            *ops.fused_reduce_sum_and_split(index, values, 50, [60, 4]),
            *ops.fused_sorted_segment_sum([rising], [values], [(50, 64)]),
            *ops.fused_reduce_and_split_gpu([offsets], [values], [[1, 63]]),
        ]
        sum(out.sum() for out in outs).backward()
        ops.row_ids(offsets, 4000)
    finally:
        torch.cuda.set_sync_debug_mode("default")
