"""Random rows, ids, flat buffers and offset maps: every implementation equals the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shoal.ragged import Ragged
from support import ops_reference as reference
from support.backends import BACKENDS, Implementation

FAST = BACKENDS[1:]
few = settings(max_examples=25, deadline=None)
implementations = pytest.mark.parametrize("impl", FAST)
seeds = st.integers(0, 2**31)
# Whole numbers: their sums are exact in any order, so implementations agree bit for bit.
WHOLE = 9


def whole(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randint(-WHOLE, WHOLE, shape, generator=generator).float()


def to(impl: Implementation, *tensors: Tensor) -> list[Tensor]:
    return [tensor.detach().to(impl.device).requires_grad_(tensor.requires_grad)
            for tensor in tensors]  # fmt: skip


@pytest.mark.slow
@implementations
@few
@given(
    counts=st.lists(st.integers(0, 60), min_size=1, max_size=4),
    n=st.integers(0, 200),
    width=st.integers(1, 70),
    spread=st.sampled_from([1, 3, 50, 2**62]),
    seed=seeds,
)
def test_map_id_to_embedding(
    impl: Implementation, counts: list[int], n: int, width: int, spread: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(-spread, spread, (count,), generator=generator) for count in counts]
    rows = [whole(generator, count, width).requires_grad_() for count in counts]
    all_ids = torch.cat(ids)
    n = n if len(all_ids) else 0
    input = all_ids[torch.randint(max(len(all_ids), 1), (n,), generator=generator)]
    grads = whole(generator, n, width)
    want = reference.map_id_to_embedding(ids, rows, input)
    want_grads = torch.autograd.grad(want, rows, grads)
    rows_on = to(impl, *rows)
    with impl.chosen():
        got = impl.map_id_to_embedding(to(impl, *ids), rows_on, input.to(impl.device))
        got_grads = torch.autograd.grad(got, rows_on, grads.to(impl.device))
    assert torch.equal(got.cpu(), want)
    for a, b in zip(got_grads, want_grads, strict=True):
        assert torch.equal(a.cpu(), b)


@pytest.mark.slow
@implementations
@few
@given(
    tables=st.lists(
        st.tuples(st.integers(1, 12), st.integers(0, 8), st.integers(0, 90)),
        min_size=1,
        max_size=5,
    ),
    scale=st.sampled_from([1.0, 0.5, -2.0]),
    seed=seeds,
)
def test_fused_gather(
    impl: Implementation, tables: list[tuple[int, int, int]], scale: float, seed: int
) -> None:
    """Each table holds some rows of its width in the buffer, and is asked for some of them."""
    generator = torch.Generator().manual_seed(seed)
    offsets, dims, size = [], [], 0
    for dim, rows, asked in tables:
        picked = torch.randint(max(rows, 1), (asked if rows else 0,), generator=generator)
        offsets.append(size + picked * dim)
        dims.append(dim)
        size += rows * dim
    flat = whole(generator, size).requires_grad_()
    want = reference.fused_gather_embeddings_by_input(flat, offsets, dims)
    grads = [whole(generator, *part.shape) for part in want]
    arguments: Any = (size, grads, offsets, dims, scale)
    want_flat = reference.fused_gather_embeddings_by_input_gradient(*arguments)
    (flat_on,), offsets_on = to(impl, flat), to(impl, *offsets)
    grads_on = to(impl, *grads)
    with impl.chosen():
        got = impl.fused_gather_embeddings_by_input(flat_on, offsets_on, dims)
        (got_grad,) = torch.autograd.grad(got, flat_on, grads_on)
        got_flat = impl.fused_gather_embeddings_by_input_gradient(
            size, grads_on, offsets_on, dims, scale
        )
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a.cpu(), b)
    assert torch.equal(got_flat.cpu(), want_flat)
    assert torch.equal(got_grad.cpu() * scale, want_flat)


@implementations
@few
@given(
    tables=st.lists(
        st.tuples(st.integers(1, 9), st.lists(st.integers(1, 4), max_size=8)),
        min_size=1,
        max_size=4,
    ),
    keep=st.floats(0, 1),
    seed=seeds,
)
def test_fill_with_offset_map(
    impl: Implementation, tables: list[tuple[int, list[int]]], keep: float, seed: int
) -> None:
    """Table k has keys that occur the listed numbers of times; a shard fills some of them."""
    generator = torch.Generator().manual_seed(seed)
    offsets: list[int] = []
    splits, dims, size, kept, lengths, key = [0], [], 0, [], [], 0
    for dim, occurrences in tables:
        places = size + torch.randperm(sum(occurrences), generator=generator) * dim
        size += sum(occurrences) * dim
        mine = [k for k in range(len(occurrences)) if torch.rand((), generator=generator) <= keep]
        kept += [key + k for k in reversed(mine)]
        lengths.append(len(mine))
        key += len(occurrences)
        offsets += places.tolist()
        for count in occurrences:
            splits.append(splits[-1] + count)
        dims.append(dim)
    value = whole(generator, sum(n * dim for n, dim in zip(lengths, dims, strict=True)))
    before, grad = whole(generator, size), whole(generator, size)
    pos = Ragged.from_lengths(
        torch.tensor(kept, dtype=torch.int64), torch.tensor(lengths, dtype=torch.int64)
    )
    pair = (torch.tensor(offsets, dtype=torch.int64), torch.tensor(splits))
    results = []
    for ops, device in ((reference, "cpu"), (impl, impl.device)):
        leaves = [value.to(device).requires_grad_(), before.to(device).requires_grad_()]
        pair_on = (pair[0].to(device), pair[1].to(device))
        with impl.chosen():
            out = ops.fill_with_offset_map(pos.to(device), leaves[0], pair_on, leaves[1] * 1, dims)
            grads = torch.autograd.grad(out, leaves, grad.to(device))
        results.append([out.detach().cpu(), *(part.cpu() for part in grads)])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("impl", BACKENDS[1:2])
@few
@given(
    n=st.integers(0, 40_000),
    rows=st.integers(1, 30_000),
    width=st.integers(1, 40),
    hot=st.floats(0, 1),
    seed=seeds,
)
def test_large_scatter(
    impl: Implementation, n: int, rows: int, width: int, hot: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    index = torch.randint(rows, (n,), generator=generator)
    index[torch.rand(n, generator=generator) < hot] = rows // 3
    grad = torch.randn(n, width, generator=generator)
    want = reference.scatter_rows(grad, index, rows)
    torch.testing.assert_close(impl.scatter_rows(grad, index, rows), want, rtol=1e-4, atol=1e-3)
