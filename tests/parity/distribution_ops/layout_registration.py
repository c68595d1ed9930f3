"""Layout operators as citizens of torch: opcheck, gradients, compile, export; threads."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shoal.ops import (
    LayoutIndex,
    MonolithOffsets,
    fused_embedding_to_layout,
    fused_embedding_to_layout_grad,
)
from shoal.ragged import KeyedRagged
from support import ops_reference as reference
from support.backends import COMPILED, Implementation
from support.layout_case import as_batch, make_case
from support.layout_two import BATCH, TWO, on, two_index, two_rows


@pytest.mark.slow
def test_opcheck_of_layout() -> None:
    from shoal.ops.layout import forward_arguments, gradient_arguments

    rows = [row.requires_grad_() for row in two_rows(dtype=torch.float64)]
    forward = forward_arguments(rows, two_index(("a",), {"a": [[0], []], "d": [[1], [2]]}), TWO)
    torch.library.opcheck(torch.ops.shoal.layout_forward.default, forward)
    grads = [out.detach().requires_grad_() for out in torch.ops.shoal.layout_forward(*forward)]
    for scale in (None, 2.0):
        arguments = gradient_arguments(grads, rows, two_index((), {"a": [[0], [1]]}), TWO, scale)
        torch.library.opcheck(torch.ops.shoal.layout_backward.default, arguments)


def test_gradients_of_layout_match_finite_differences() -> None:
    index = two_index(("a",), {**BATCH, "a": [[2, 1], [], []]})
    rows = [row.requires_grad_() for row in two_rows(dtype=torch.float64)]

    def laid(*rows: Tensor) -> list[Tensor]:
        return fused_embedding_to_layout(rows, index, TWO)

    assert torch.autograd.gradcheck(laid, rows)
    assert torch.autograd.gradgradcheck(laid, rows)
    grads = [out.detach().requires_grad_() for out in laid(*rows)]
    assert torch.autograd.gradcheck(
        lambda *g: fused_embedding_to_layout_grad(
            g, rows, index, TWO, layout_tensors_grad_scale=3.0
        ),
        grads,
    )


@pytest.mark.slow
def test_layout_compiles_as_one_graph() -> None:
    keyed = KeyedRagged.from_lists(BATCH)

    def step(rows: list[Tensor], values: Tensor, offsets: Tensor) -> Tensor:
        batch = KeyedRagged(keyed.keys, values, offsets)
        index = LayoutIndex.from_keyed(batch, values, {"s": 4, "t": 3}, TWO)
        return sum(out.square().sum() for out in fused_embedding_to_layout(rows, index, TWO))

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    rows = [row.requires_grad_() for row in two_rows()]
    want = torch.autograd.grad(step(rows, keyed.values_N, keyed.offsets_FB1), rows)
    got = torch.autograd.grad(compiled(rows, keyed.values_N, keyed.offsets_FB1), rows)
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


def test_layout_exports() -> None:
    index = two_index()

    class Model(torch.nn.Module):
        def forward(self, s: Tensor, t: Tensor, rows_N: Tensor) -> list[Tensor]:
            own = LayoutIndex(rows_N, index.buffer_N, index.cell_splits_C1, index.cells_RF, (3,))
            return fused_embedding_to_layout([s, t], own, TWO)

    arguments = (*two_rows(), index.rows_N)
    exported = torch.export.export(Model(), arguments).module()
    for one, other in zip(exported(*arguments), Model()(*arguments), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("impl", COMPILED)
@pytest.mark.parametrize("together", [True, False], ids=["rows shared by features", "rows apart"])
def test_layout_does_not_depend_on_threads(impl: Implementation, together: bool) -> None:
    case = make_case(64, (9, 10, 10))
    index: LayoutIndex | MonolithOffsets = case.offsets(3)
    buffers = case.buffers(3)
    if together:
        keyed = as_batch(case)
        inverse = torch.remainder(keyed.values_N, 57)
        widths = {"table_one": 21, "table_two": 21}
        index = LayoutIndex.from_keyed(keyed, inverse, widths, case.configs, shared=case.shared)
        buffers = [torch.randn(57, 21) for _ in range(2)]
    mine, there = on(impl, buffers), on(impl, index)
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            outputs = impl.fused_embedding_to_layout(mine, there, case.configs)
            grads = [out * 0.1 for out in outputs]
            found.append(
                outputs + impl.fused_embedding_to_layout_grad(grads, mine, there, case.configs)
            )
    finally:
        torch.set_num_threads(threads)
    grads = [grad.cpu() for grad in grads]
    want = reference.fused_embedding_to_layout_grad(grads, buffers, index, case.configs)
    for got in found:
        assert all(torch.equal(one, other) for one, other in zip(got, found[0], strict=True))
        for one, other in zip(got[-len(want) :], want, strict=True):
            torch.testing.assert_close(one.cpu(), other, rtol=1e-5, atol=1e-4)
