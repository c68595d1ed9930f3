"""Flat buffers and offset maps: Monolith's pairs and edge cases, on every implementation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import shoal.ops as ops
from shoal.ragged import Ragged
from support.backends import BACKENDS, COMPILED, Implementation, forced
from support.flat import DIMS, FILLED, OFFSETS, offset_map

pytestmark = pytest.mark.usefixtures("poisoned")


T = torch.tensor
implementations = pytest.mark.parametrize("impl", BACKENDS)

# Rows 1.x, 3.x, 4.x, 6.x are 3 wide, the others 2: n.x is n and x tenths.
FLAT = [
    1.1, 1.2, 1.3, 2.1, 2.2, 3.1, 3.2, 3.3, 4.1, 4.2, 4.3, 5.1, 5.2, 6.1, 6.2, 6.3, 7.1, 7.2, 8.1,
    8.2, 9.1, 9.2,
]  # fmt: skip
FIRSTS = ([6, 1, 3, 6, 4, 6], [7, 8, 5, 5, 7, 9, 2])
GRADIENT = [
    2.1, 2.2, 2.3, 7.4, 7.5, 3.1, 3.2, 3.3, 5.1, 5.2, 5.3, 7.8, 8.0, 11.3, 11.6, 11.9, 6.8, 7.0,
    2.4, 2.5, 6.4, 6.5,
]  # fmt: skip


@implementations
@pytest.mark.parametrize("repeat", [(1, 1), (12345, 11777)], ids=["once", "repeated"])
def test_fused_gather_embeddings_by_input_pair(
    impl: Implementation, repeat: tuple[int, int]
) -> None:
    repeats = [min(count, 3 + k) if impl.interpreted else count for k, count in enumerate(repeat)]
    flat = T(FLAT, device=impl.device)
    offsets = [T(o, device=impl.device).repeat(r) for o, r in zip(OFFSETS, repeats, strict=True)]
    parts = impl.fused_gather_embeddings_by_input(flat, offsets, [3, 2])
    for part, firsts, dim, count in zip(parts, FIRSTS, [3, 2], repeats, strict=True):
        want = T([[first + (c + 1) / 10 for c in range(dim)] for first in firsts])
        assert torch.equal(part.cpu(), want.repeat(count, 1))


@implementations
@pytest.mark.parametrize("repeat", [1, 888], ids=["once", "repeated"])
@pytest.mark.parametrize("scale", [1, 0.5], ids=["plain", "scaled"])
def test_fused_gather_embeddings_by_input_gradient_pair(
    impl: Implementation, repeat: int, scale: float
) -> None:
    repeat = min(repeat, 150) if impl.interpreted else repeat
    starts, rows = ([0.1, 0.2, 0.3], [0.4, 0.5]), (6, 7)
    grads = [
        T([[r + tenth for tenth in start] for r in range(1, n + 1)], device=impl.device)
        for start, n in zip(starts, rows, strict=True)
    ]
    grads = [grad.repeat(repeat, 1) for grad in grads]
    offsets = [T(o, device=impl.device).repeat(repeat) for o in OFFSETS]
    got = impl.fused_gather_embeddings_by_input_gradient(22, grads, offsets, [3, 2], scale)
    want = T(GRADIENT) * (scale * repeat)
    torch.testing.assert_close(got.cpu(), want, rtol=1e-7 * max(repeat, 10), atol=0)
    same = impl.fused_gather_embeddings_by_input_gradient(got, grads, offsets, [3, 2], scale)
    assert torch.equal(same, got)


@implementations
def test_fill_with_offset_map_pair(impl: Implementation) -> None:
    pos, value_offset = offset_map(impl.device)
    value = torch.arange(12.0, device=impl.device, requires_grad=True)
    buffer = torch.full((19,), float("nan"), device=impl.device)
    with impl.chosen():
        handle = impl.fill_with_offset_map(pos, value, value_offset, buffer, DIMS)
        out = impl.finalize_shared_tensor([handle], torch.float32, [-1])
        assert out.tolist() == FILLED
        (grad,) = torch.autograd.grad(out, value, torch.arange(19.0, device=impl.device))
    assert grad.tolist() == [8, 10, 8, 10, 4, 5, 26, 28, 30, 13, 14, 15]


@implementations
def test_fill_with_offset_map_doc_pair(impl: Implementation) -> None:
    pos = Ragged(T([0, 1, 2]), T([0, 2, 3])).to(impl.device)
    value_offset = (T([0, 4, 2, 6], device=impl.device), T([0, 2, 3, 4], device=impl.device))
    value, buffer = torch.arange(7.0, device=impl.device), torch.empty(9, device=impl.device)
    filled = impl.fill_with_offset_map(pos, value, value_offset, buffer, [2, 3])
    assert filled is buffer
    assert filled.tolist() == [0, 1, 2, 3, 0, 1, 4, 5, 6]


@implementations
def test_finalize_shared_tensor_pair(impl: Implementation) -> None:
    parts = [([0, 2, 4], [0, 0, 2, 3, 3]), ([1, 3], [0, 0, 1, 2, 2])]
    values = [T([0.0, 1, 4, 5, 9, 10, 11]), T([2.0, 3, 6, 7, 8])]
    values = [value.to(impl.device).requires_grad_() for value in values]
    buffer, handles = torch.empty(19, device=impl.device), []
    with impl.chosen():
        for part, value in zip(parts, values, strict=True):
            pos, value_offset = offset_map(impl.device, part)
            handles.append(impl.fill_with_offset_map(pos, value, value_offset, buffer, DIMS))
        out = impl.finalize_shared_tensor(handles, torch.float32, [19])
        assert out.tolist() == FILLED
        grads = torch.autograd.grad(out, values, torch.arange(19.0, device=impl.device))
    assert [grad.tolist() for grad in grads] == [
        [8, 10, 4, 5, 13, 14, 15],
        [8, 10, 26, 28, 30],
    ]


@implementations
def test_fill_with_offset_map_empty_pair(impl: Implementation) -> None:
    none = torch.empty(0, dtype=torch.int64, device=impl.device)
    pos = Ragged(none, torch.zeros(3, dtype=torch.int64, device=impl.device))
    value = torch.empty(0, device=impl.device, requires_grad=True)
    value_offset = (none, torch.zeros(1, dtype=torch.int64, device=impl.device))
    with impl.chosen():
        out = impl.fill_with_offset_map(
            pos, value, value_offset, torch.empty(0, device=impl.device), [1, 2]
        )
        assert out.shape == (0,)
        assert torch.autograd.grad(out.sum(), value)[0].shape == (0,)


@implementations
def test_a_partial_fill_leaves_the_rest(impl: Implementation) -> None:
    pos, value_offset = offset_map(impl.device, ([4], [0, 0, 0, 1, 1]))
    before = torch.arange(19.0, device=impl.device).requires_grad_()
    value = -torch.ones(3, device=impl.device, requires_grad=True)
    with impl.chosen():
        out = impl.fill_with_offset_map(pos, value, value_offset, before * 1, DIMS)
        out.backward(torch.ones_like(out))
    want = torch.arange(19.0)
    want[13:16] = -1
    assert out.tolist() == want.tolist()
    assert before.grad.tolist() == [1.0] * 13 + [0.0] * 3 + [1.0] * 3


@implementations
@pytest.mark.parametrize("alignment", [8, 256])
def test_aligned_flat_concat_and_aligned_flat_split_pair(
    impl: Implementation, alignment: int
) -> None:
    shapes = [(k % 7, 1 + k % 5) if k % 3 else (k,) for k in range(155)]
    tensors = [torch.randn(shape, device=impl.device, requires_grad=True) for shape in shapes]
    with impl.chosen():
        flat = impl.aligned_flat_concat(tensors, 2.0, alignment_bytes=alignment)
        parts = impl.aligned_flat_split(tensors, flat, alignment_bytes=alignment)
        assert all(torch.equal(p, 2 * t) for p, t in zip(parts, tensors, strict=True))
        starts = [p.data_ptr() - flat.data_ptr() for p in parts if p.numel()]
        assert {start % alignment for start in starts} == {0}
        assert flat.numel() * 4 % alignment == 0
        grads = torch.autograd.grad(sum((p * p).sum() for p in parts), tensors)
    for grad, tensor in zip(grads, tensors, strict=True):
        torch.testing.assert_close(grad, 8 * tensor)


def random_offsets(impl: Implementation, size: int, dims: list[int], n: int) -> list[Tensor]:
    """Of rows that overlap as they may: in part on the CPU, whole or not at all on CUDA."""
    if impl.device == "cpu":
        return [torch.randint(size - dim, (n,)) for dim in dims]
    widest = max(dims)
    slots = size // len(dims) // widest
    return [(k * slots + torch.randint(slots, (n,))) * widest for k in range(len(dims))]


@pytest.mark.parametrize("impl", COMPILED)
@pytest.mark.parametrize("many", [True, False])
def test_fused_results_do_not_depend_on_threads(impl: Implementation, many: bool) -> None:
    dims, before, results = [3, 16, 40], torch.get_num_threads(), []
    n, size = (60_000, 4_500_000) if many else (2000, 700)
    flat = torch.randn(size)
    offsets = random_offsets(impl, size, dims, n)
    grads = [torch.randn(n, dim) for dim in dims]
    with forced("reference"):
        wanted = ops.fused_gather_embeddings_by_input_gradient(size, grads, offsets, dims)
        rows = ops.fused_gather_embeddings_by_input(flat, offsets, dims)
    flat = flat.to(impl.device)
    offsets, grads = ([part.to(impl.device) for part in parts] for parts in (offsets, grads))
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            gathered = impl.fused_gather_embeddings_by_input(flat, offsets, dims)
            summed = impl.fused_gather_embeddings_by_input_gradient(size, grads, offsets, dims)
            results.append([*gathered, summed])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert all(torch.equal(a, b.cpu()) for a, b in zip(rows, results[0][:-1], strict=True))
    torch.testing.assert_close(results[0][-1].cpu(), wanted, rtol=1e-5, atol=1e-4)


@implementations
def test_fused_gather_empty(impl: Implementation) -> None:
    none = torch.empty(0, dtype=torch.int64, device=impl.device)
    flat = torch.empty(0, device=impl.device)
    assert impl.fused_gather_embeddings_by_input(flat, [], []) == []
    parts = impl.fused_gather_embeddings_by_input(flat, [none, none], [3, 1])
    assert [part.shape for part in parts] == [(0, 3), (0, 1)]
    got = impl.fused_gather_embeddings_by_input_gradient(5, parts, [none, none], [3, 1])
    assert got.tolist() == [0.0] * 5
