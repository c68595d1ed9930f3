"""The layout against the exact cases of Monolith's tests, on every implementation."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

from shoal.ops import (
    fused_embedding_to_layout,
    sharding_sparse_fids,
)
from support import ops_reference as reference
from support.backends import BACKENDS, Implementation
from support.layout_case import Case, as_batch, assert_layouts, make_case, make_grad_case
from support.layout_two import on

pytestmark = pytest.mark.usefixtures("poisoned")


BIG = (256, (49, 50, 100))
SMALL = (3, (3, 3, 3))
slow = functools.partial(pytest.param, marks=pytest.mark.slow)


@functools.lru_cache(maxsize=8)
def forward_case(small: bool, one_width: bool = False) -> Case:
    batch_size, groups = SMALL if small else BIG
    return make_case(batch_size, groups, one_width=one_width)


@pytest.mark.parametrize("impl", BACKENDS)
@pytest.mark.parametrize("version", [*map(slow, (2, 3, 4)), 5])
def test_fused_embedding_to_layout_pair(impl: Implementation, version: int) -> None:
    case = forward_case(impl.interpreted)
    buffers, offsets = on(impl, case.buffers(version)), on(impl, case.offsets(version))
    assert_layouts(impl.fused_embedding_to_layout(buffers, offsets, case.configs), case)


@pytest.mark.slow
@pytest.mark.parametrize("impl", BACKENDS)
def test_fused_embedding_to_layout_pair_of_version_1(impl: Implementation) -> None:
    case = forward_case(impl.interpreted, one_width=True)
    buffers, offsets = on(impl, case.buffers(1)), on(impl, case.offsets(1))
    assert_layouts(impl.fused_embedding_to_layout(buffers, offsets, case.configs), case)


@pytest.mark.slow
@pytest.mark.parametrize("impl", BACKENDS)
@pytest.mark.parametrize("unique", [True, False])
def test_fused_embedding_to_layout_pair_of_sharded_ids(impl: Implementation, unique: bool) -> None:
    case = forward_case(impl.interpreted)
    found = sharding_sparse_fids(
        as_batch(case), case.ps_num, case.configs, unique=unique, shared=case.shared
    )
    rows = [
        [x for name in names for fid in part for x in case.row(name, fid)]
        for (names, part) in buffer_parts(case, found.fids, found.row_splits)
    ]
    flat, sizes = [x for part in rows for x in part], found.emb_sizes_TP.reshape(-1).tolist()
    buffers = list(torch.tensor(flat).split(sizes))
    got = impl.fused_embedding_to_layout(on(impl, buffers), on(impl, found.index), case.configs)
    assert_layouts(got, case)


def buffer_parts(
    case: Case, fids: dict[str, Tensor], row_splits: dict[str, Tensor]
) -> list[tuple[list[str], list[int]]]:
    parts = []
    for key, found in fids.items():
        names = case.configs.features_of(key.split(":")[0])
        pieces = found.split(row_splits[key].diff().tolist())
        parts += [([name], piece.tolist()) for name, piece in zip(names, pieces, strict=True)]
    return parts


@pytest.mark.parametrize("impl", BACKENDS)
@pytest.mark.parametrize("version", [1, *map(slow, (2, 3, 4)), 5])
def test_fused_embedding_to_layout_grad_pair(impl: Implementation, version: int) -> None:
    case = make_grad_case(2 if impl.interpreted else 16, one_width=version == 1)
    buffers, offsets = on(impl, case.buffers(version)), on(impl, case.offsets(version))
    ones = [torch.ones_like(out) for out in case.expected()]
    grads = impl.fused_embedding_to_layout_grad(on(impl, ones), buffers, offsets, case.configs)
    want = expected_uses(case)
    if version == 4:
        order = [t * case.ps_num + p for p in range(case.ps_num) for t in range(2)]
        want = [torch.cat([want[m] for m in order])]
    for grad, uses in zip(grads, want, strict=True):
        torch.testing.assert_close(grad.cpu().flatten(), uses)


def expected_uses(case: Case) -> list[Tensor]:
    """Each row's gradient: how often its fid is used; 1/len for means, three at most for firsts."""
    uses: dict[str, dict[int, float]] = {}
    for name, cells in case.ids.items():
        config = case.configs.feature_configs[name]
        own = uses.setdefault(name, {})
        for cell in cells:
            kept = cell[:3] if config.pooling_type == "firstn" else cell
            share = 1 / len(cell) if config.pooling_type == "mean" and cell else 1.0
            for fid in kept:
                own[fid] = own.get(fid, 0.0) + share
    return [
        torch.tensor(
            [
                uses[name].get(fid, 0.0)
                for name, fids in found.items()
                for fid in fids
                for _ in range(case.width(name))
            ]
        )
        for found in case.lists.values()
    ]


@pytest.mark.slow
@pytest.mark.parametrize("impl", BACKENDS)
def test_gradient_of_layout_equals_autograd_of_the_reference(impl: Implementation) -> None:
    """With shared features, sums, means, firsts and rows of two widths in one table."""
    case = make_case(4, (3, 3, 3)) if impl.interpreted else make_case(16, (9, 10, 10))
    buffers = [b.requires_grad_() for b in case.buffers(3)]
    outputs = reference.fused_embedding_to_layout(buffers, case.offsets(3), case.configs)
    generator = torch.Generator().manual_seed(0)
    grads = [torch.randn(out.shape, generator=generator) for out in outputs]
    want = torch.autograd.grad(outputs, buffers, grads)
    mine = [b.detach().to(impl.device).requires_grad_() for b in buffers]
    with impl.chosen():
        laid = fused_embedding_to_layout(mine, on(impl, case.offsets(3)), case.configs)
        got = torch.autograd.grad(laid, mine, on(impl, grads))
    direct = impl.fused_embedding_to_layout_grad(
        on(impl, grads), mine, on(impl, case.offsets(3)), case.configs
    )
    for one, other, third in zip(got, want, direct, strict=True):
        torch.testing.assert_close(one.cpu(), other)
        torch.testing.assert_close(third.cpu(), other)


@pytest.mark.slow
@pytest.mark.parametrize("impl", BACKENDS)
@pytest.mark.parametrize("scale", [0.25, torch.tensor(0.25)], ids=["number", "tensor"])
def test_fused_embedding_to_layout_grad_pair_with_a_scale(
    impl: Implementation, scale: float | Tensor
) -> None:
    case = make_grad_case(2)
    buffers, offsets = on(impl, case.buffers(3)), on(impl, case.offsets(3))
    ones = on(impl, [torch.ones_like(out) for out in case.expected()])
    factor = scale.to(impl.device) if isinstance(scale, Tensor) else scale
    grads = impl.fused_embedding_to_layout_grad(
        ones, buffers, offsets, case.configs, layout_tensors_grad_scale=factor
    )
    for grad, uses in zip(grads, expected_uses(case), strict=True):
        torch.testing.assert_close(grad.cpu(), uses * 0.25)
