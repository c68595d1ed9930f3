"""Operators on flat buffers as citizens of torch: gradients, opcheck, compile, export."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import shoal.ops as ops
from shoal.ragged import Ragged
from support.backends import BACKENDS, Implementation
from support.flat import DIMS, OFFSETS, offset_map

T = torch.tensor
implementations = pytest.mark.parametrize("impl", BACKENDS)
POS_OK, MAP_OK = offset_map("cpu")


def test_fused_gather_embeddings_by_input_gradient_static_shape_pair() -> None:
    with FakeTensorMode():
        grads = [torch.empty(6, 3), torch.empty(7, 2)]
        offsets = [torch.empty(6, dtype=torch.int64), torch.empty(7, dtype=torch.int64)]
        flat = ops.fused_gather_embeddings_by_input_gradient(22, grads, offsets, [3, 2])
        assert flat.shape == (22,)
        parts = ops.fused_gather_embeddings_by_input(flat, offsets, [3, 2])
        assert [part.shape for part in parts] == [(6, 3), (7, 2)]


@pytest.mark.slow
@implementations
def test_gradients_of_flat_buffers_match_finite_differences(impl: Implementation) -> None:
    device, double = impl.device, torch.float64
    flat = torch.randn(9, dtype=double, device=device, requires_grad=True)
    offsets = [T([0, 3, 0], device=device), T([7, 7], device=device)]
    grads = [
        torch.randn(n, dim, dtype=double, device=device, requires_grad=True)
        for n, dim in [(3, 3), (2, 2)]
    ]
    value = torch.randn(12, dtype=double, device=device, requires_grad=True)
    buffer = torch.randn(19, dtype=double, device=device, requires_grad=True)
    pos, value_offset = offset_map(device)

    def gathered(flat: Tensor) -> list[Tensor]:
        return impl.fused_gather_embeddings_by_input(flat, offsets, [3, 2])

    def scattered(*grads: Tensor) -> Tensor:
        return impl.fused_gather_embeddings_by_input_gradient(9, grads, offsets, [3, 2], 0.5)

    def filled(value: Tensor, buffer: Tensor) -> Tensor:
        return impl.fill_with_offset_map(pos, value, value_offset, buffer.clone(), DIMS)

    with impl.chosen():
        assert torch.autograd.gradcheck(gathered, flat)
        assert torch.autograd.gradcheck(scattered, grads)
        assert torch.autograd.gradcheck(filled, (value, buffer))
        assert torch.autograd.gradgradcheck(scattered, grads)


@pytest.mark.slow
def test_opcheck_of_flat_buffers() -> None:
    check: Any = torch.library.opcheck
    flat = torch.randn(9, requires_grad=True)
    offsets = [T([0, 3, 0]), T([7, 7])]
    grads = [torch.randn(3, 3, requires_grad=True), torch.randn(2, 2, requires_grad=True)]
    tensors = (POS_OK.values, POS_OK.offsets_B1, *MAP_OK)
    value, buffer = torch.randn(12, requires_grad=True), torch.randn(19, requires_grad=True)
    check(torch.ops.shoal.gather_flat.default, (flat, offsets, [3, 2]))
    check(torch.ops.shoal.scatter_flat.default, (grads, offsets, 9, 0.5))
    check(torch.ops.shoal.fill_offsets_.default, (torch.zeros(19), value, *tensors, DIMS))
    check(torch.ops.shoal.sum_offsets.default, (buffer, *tensors, DIMS, 12))


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.flat = torch.nn.Parameter(torch.randn(22))
        self.value = torch.nn.Parameter(torch.randn(12))

    def forward(self, first: Tensor, second: Tensor, offsets_V: Tensor, splits: Tensor) -> Tensor:
        parts = ops.fused_gather_embeddings_by_input(self.flat, [first, second], [3, 2])
        buffer = torch.empty(19)
        pos = Ragged(torch.arange(5), T([0, 0, 3, 5, 5]))
        handle = ops.fill_with_offset_map(pos, self.value, (offsets_V, splits), buffer, DIMS)
        filled = ops.finalize_shared_tensor([handle], torch.float32, [19])
        flat = ops.aligned_flat_concat([*parts, filled])
        return torch.cat(
            [part.flatten() for part in ops.aligned_flat_split([*parts, filled], flat)]
        )


def test_flat_buffers_compile_and_export() -> None:
    model, arguments = Model(), (T(OFFSETS[0]), T(OFFSETS[1]), *MAP_OK)
    leaves = list(model.parameters())
    want = model(*arguments)
    weights = torch.randn_like(want)
    grads = torch.autograd.grad(want, leaves, weights)
    got = torch.compile(model, fullgraph=True, backend="aot_eager")(*arguments)
    assert torch.equal(got, want)
    for a, b in zip(torch.autograd.grad(got, leaves, weights), grads, strict=True):
        assert torch.equal(a, b)
    exported = torch.export.export(model, arguments)
    assert torch.equal(exported.module()(*arguments), want)
