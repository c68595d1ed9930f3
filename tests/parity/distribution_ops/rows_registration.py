"""Row operators as citizens of torch: gradients, opcheck, compile, export."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import shoal.ops as ops
from support.backends import BACKENDS, Implementation

T = torch.tensor
implementations = pytest.mark.parametrize("impl", BACKENDS)


def on(impl: Implementation, *tensors: Tensor) -> list[Tensor]:
    return [tensor.to(impl.device) for tensor in tensors]


@pytest.mark.slow
@implementations
def test_gradients_of_rows_match_finite_differences(impl: Implementation) -> None:
    ids, input = on(impl, T([3, 1, 4, 5]), T([[4, 4], [3, 5]]))
    rows = torch.randn(4, 3, dtype=torch.float64, device=impl.device, requires_grad=True)
    grads = torch.randn(2, 2, 3, dtype=torch.float64, device=impl.device, requires_grad=True)

    def mapped(rows: Tensor) -> Tensor:
        return impl.map_id_to_embedding(list(ids.split([1, 3])), list(rows.split([1, 3])), input)

    def gathered(rows: Tensor) -> Tensor:
        return impl.gather_embeddings_by_input(ids, rows, input).embeddings

    def scattered(grads: Tensor) -> Tensor:
        return impl.gather_embeddings_by_ids_gradient_back_prop(ids, grads, input - 3)

    def mapped_back(grads: Tensor) -> list[Tensor]:
        parts = ids.split([1, 3])
        return impl.map_id_to_embedding_gradient_back_prop(list(parts), input, grads)

    with impl.chosen():
        assert torch.autograd.gradcheck(mapped, rows)
        assert torch.autograd.gradcheck(gathered, rows)
        assert torch.autograd.gradcheck(scattered, grads)
        assert torch.autograd.gradcheck(mapped_back, grads)
        assert torch.autograd.gradgradcheck(gathered, rows)


def test_opcheck_of_rows() -> None:
    rows, more = torch.randn(4, 3, requires_grad=True), torch.randn(2, 3, requires_grad=True)
    index = T([1, 5, 1])
    check: Any = torch.library.opcheck
    check(torch.ops.shoal.match_rows.default, ([T([5, 1])], T([1, 5, 2]), True, True, "op"))
    check(torch.ops.shoal.gather_rows.default, ([rows], T([1, 1, 0]), True, "op"))
    check(torch.ops.shoal.gather_rows.default, ([rows, more], index, True, "op"))
    grad = torch.randn(3, 3, requires_grad=True)
    check(torch.ops.shoal.scatter_rows.default, (grad, index, 7, "op"))


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = torch.nn.Parameter(torch.randn(3, 4))

    def forward(self, ids: Tensor, input: Tensor) -> Tensor:
        gathered = ops.gather_embeddings_by_input(ids, self.rows, input).embeddings
        return gathered + ops.map_id_to_embedding([ids], [self.rows], input)


def test_rows_compile_and_export() -> None:
    model, ids, input = Model(), T([7, 8, 9]), T([[9, 7], [7, 7]])
    want = model(ids, input)
    (grad,) = torch.autograd.grad(want.sum(), [model.rows])
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    got = compiled(ids, input)
    assert torch.equal(got, want)
    assert torch.equal(torch.autograd.grad(got.sum(), [model.rows])[0], grad)
    exported = torch.export.export(model, (ids, input))
    assert torch.equal(exported.module()(ids, input), want)
