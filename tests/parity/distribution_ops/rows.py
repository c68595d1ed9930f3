"""Rows by id and by index: Monolith's pairs and edge cases, on every implementation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import shoal.ops as ops
from support.backends import BACKENDS, COMPILED, Implementation

pytestmark = pytest.mark.usefixtures("poisoned")


T = torch.tensor
implementations = pytest.mark.parametrize("impl", BACKENDS)


def on(impl: Implementation, *tensors: Tensor) -> list[Tensor]:
    return [tensor.to(impl.device) for tensor in tensors]


@implementations
@pytest.mark.parametrize(
    ("ids", "query", "index"),
    [
        pytest.param([7, 8, 9], [9, 7, 7], [2, 0, 0], id="plain"),
        pytest.param([5, 6, 5, 6], [6, 5], [1, 0], id="first-match-wins"),
        pytest.param([-1, 0, -(2**63), 2**63 - 1], [-(2**63), 2**63 - 1, -1, 0], [2, 3, 0, 1],
                     id="any-int64"),
        pytest.param([3], [], [], id="no-queries"),
        pytest.param([], [], [], id="nothing"),
        pytest.param([3, 4], [[4, 3], [3, 3]], [[1, 0], [0, 0]], id="any-shape"),
    ],
)  # fmt: skip
def test_match_rows(impl: Implementation, ids: list, query: list, index: list) -> None:
    ids_M, query_N = on(impl, T(ids, dtype=torch.int64), T(query, dtype=torch.int64))
    assert impl.match_rows(ids_M, query_N).tolist() == index


@implementations
@pytest.mark.parametrize("ids", [[], [1, 2]])
def test_match_rows_missing_ok(impl: Implementation, ids: list[int]) -> None:
    ids_M, query_N = on(impl, T(ids, dtype=torch.int64), T([9, 2]))
    got = impl.match_rows(ids_M, query_N, missing_ok=True).tolist()
    assert got == [-1, 1 if ids else -1]


@implementations
def test_map_id_to_embedding_pair(impl: Implementation) -> None:
    ids = on(impl, T([1]), T([2]))
    embeddings = on(impl, T([[1.0, 1.0]]), T([[2.0, 2.0]]))
    out = impl.map_id_to_embedding(ids, embeddings, T([[1], [2]]).to(impl.device))
    assert out.tolist() == [[[1, 1]], [[2, 2]]]


@implementations
def test_map_id_to_embedding_gradient_back_prop_pair(impl: Implementation) -> None:
    ids = on(impl, T([1]), T([2]))
    leaves = [e.requires_grad_() for e in on(impl, T([[1.0, 1.0]]), T([[2.0, 2.0]]))]
    (input,) = on(impl, T([1, 1, 2]))
    with impl.chosen():
        out = impl.map_id_to_embedding(ids, leaves, input)
        (torch.full_like(out, 2.0) - out).sum().backward()
    assert [leaf.grad.tolist() for leaf in leaves] == [[[-2, -2]], [[-1, -1]]]
    grads = impl.map_id_to_embedding_gradient_back_prop(ids, input, -torch.ones_like(out))
    assert [grad.tolist() for grad in grads] == [[[-2, -2]], [[-1, -1]]]


@implementations
@pytest.mark.parametrize("multi", [False, True], ids=["one-thread", "multi-threads"])
def test_map_id_to_embedding_round_trip(impl: Implementation, multi: bool) -> None:
    ids_N, rows_ND = torch.arange(1000), torch.rand(1000, 16)
    parts = [ids_N % 10 == shard for shard in range(10)]
    ids = on(impl, *(ids_N[part] for part in parts))
    embeddings = on(impl, *(rows_ND[part] for part in parts))
    out = impl.map_id_to_embedding(ids, embeddings, ids_N.to(impl.device), multi)
    assert torch.equal(out.cpu(), rows_ND)


@implementations
def test_map_id_to_embedding_first_match_takes_the_gradient(impl: Implementation) -> None:
    ids = on(impl, T([4, 5]), T([5, 6]))
    (input, grads) = on(impl, T([5, 5, 6]), torch.ones(3, 1))
    parts = impl.map_id_to_embedding_gradient_back_prop(ids, input, grads)
    assert [part.tolist() for part in parts] == [[[0], [2]], [[0], [1]]]


@implementations
def test_gather_embeddings_by_input_pair(impl: Implementation) -> None:
    ids, rows, input = on(
        impl, T([1, 2, 3]), T([[1.0, 1], [2, 2], [3, 3]]), T([[2], [1], [2]])
    )  # fmt: skip
    out, index_mapping = impl.gather_embeddings_by_input(ids, rows, input)
    assert out.tolist() == [[[2, 2]], [[1, 1]], [[2, 2]]]
    assert index_mapping.tolist() == [[1], [0], [1]]


@implementations
def test_gather_embeddings_by_input_gradient_pair(impl: Implementation) -> None:
    ids, rows, input = on(
        impl, T([1, 2, 3]), T([[1.0, 1], [2, 2], [3, 3]]), T([[1], [2], [1]])
    )  # fmt: skip
    rows.requires_grad_()
    with impl.chosen():
        out = impl.gather_embeddings_by_input(ids, rows, input).embeddings
        (torch.full_like(out, 2.0) - out).sum().backward()
    assert rows.grad.tolist() == [[-2, -2], [-1, -1], [0, 0]]


@implementations
def test_gather_embeddings_by_ids_gradient_back_prop_pair(impl: Implementation) -> None:
    grads = T([[1.0, 1], [2, 2], [4, 4], [8, 8]])
    ids, grads, index = on(impl, T([2, 3, 1]), grads, T([1, 0, 1, 2]))
    out = impl.gather_embeddings_by_ids_gradient_back_prop(ids, grads, index)
    assert out.tolist() == [[2, 2], [5, 5], [8, 8]]


@implementations
@pytest.mark.parametrize("width", [0, 1, 3, 4, 16, 17, 65])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gather_and_scatter_widths(impl: Implementation, width: int, dtype: torch.dtype) -> None:
    index = torch.randint(7, (5, 4))
    rows, grad = torch.randn(7, width, dtype=dtype), torch.randn(5, 4, width, dtype=dtype)
    gathered = impl.gather_rows(*on(impl, rows, index))
    assert torch.equal(gathered.cpu(), rows[index])
    want = torch.zeros(7, width, dtype=dtype)
    want.index_add_(0, index.flatten(), grad.reshape(20, width))
    torch.testing.assert_close(impl.scatter_rows(*on(impl, grad, index), 7).cpu(), want)


@implementations
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves_are_summed_in_float32(impl: Implementation, dtype: torch.dtype) -> None:
    grad, index = on(impl, torch.full((300, 2), 0.1, dtype=dtype), torch.zeros(300).long())
    got = impl.scatter_rows(grad, index, 1)
    torch.testing.assert_close(got, (grad.float().sum(0, True)).to(dtype), rtol=1e-2, atol=0)
    assert torch.equal(impl.gather_rows(got, index[:3]), got.expand(3, 2))


@implementations
@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64, torch.bool, torch.cfloat])
def test_gather_rows_any_dtype(impl: Implementation, dtype: torch.dtype) -> None:
    rows, index = on(impl, torch.randint(2, (5, 3)).to(dtype), T([4, 0, 4]))
    assert torch.equal(impl.gather_rows(rows, index), rows[index])


@implementations
def test_gather_rows_of_several_arrays(impl: Implementation) -> None:
    sizes = [3, 0, 1, 400, 2]
    arrays, index = [torch.randn(size, 5) for size in sizes], torch.randint(406, (50,))
    index[:4] = T([0, 3, 405, 403])
    got = impl.gather_rows(on(impl, *arrays), index.to(impl.device))
    assert torch.equal(got.cpu(), torch.cat(arrays)[index])


@implementations
def test_strided_rows(impl: Implementation) -> None:
    rows, index = on(impl, torch.randn(6, 8)[:, ::2], T([5, 9, 0, 9, 1])[::2])
    assert torch.equal(impl.gather_rows(rows, index), rows[index])
    got = impl.scatter_rows(rows[:3], index, 6)
    assert torch.equal(got[index], rows[:3])


@implementations
@pytest.mark.parametrize("hot", [0.0, 0.9, 1.0])
def test_scatter_rows_of_hot_rows(impl: Implementation, hot: float) -> None:
    n = 700
    index = torch.where(torch.rand(n) < hot, 3, torch.randint(9, (n,)))
    grad = torch.randn(n, 5, dtype=torch.float64)
    want = torch.zeros(9, 5, dtype=torch.float64).index_add_(0, index, grad)
    torch.testing.assert_close(impl.scatter_rows(*on(impl, grad, index), 9).cpu(), want)


@implementations
def test_no_rows_and_no_ids(impl: Implementation) -> None:
    rows, index = on(impl, torch.empty(0, 3), torch.empty(0, dtype=torch.int64))
    assert impl.gather_rows(rows, index).shape == (0, 3)
    assert impl.scatter_rows(rows, index, 4).tolist() == [[0, 0, 0]] * 4
    assert impl.scatter_rows(rows, index, 0).shape == (0, 3)
    assert impl.map_id_to_embedding([index], [rows], index).shape == (0, 3)


@pytest.mark.slow
@pytest.mark.parametrize("impl", COMPILED)
@pytest.mark.parametrize("width", [1, 16, 100])
@pytest.mark.parametrize("rows", [1, 40, 70_000])
def test_row_results_do_not_depend_on_threads(impl: Implementation, rows: int, width: int) -> None:
    torch.manual_seed(rows + width)  # sums of so many are near to those of doubles, not always
    n = 90_000
    index = torch.randint(rows, (n,))
    index[torch.rand(n) < 0.3] = rows // 2
    grad, table = torch.randn(n, width), torch.randn(rows, width)
    want = torch.zeros(rows, width, dtype=torch.float64).index_add_(0, index, grad.double())
    index, grad, table = on(impl, index, grad, table)
    ids = torch.randperm(rows).to(impl.device) - rows // 2
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            matched = impl.match_rows(ids, ids[index])
            results.append(
                [impl.scatter_rows(grad, index, rows), impl.gather_rows(table, index), matched]
            )
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(results[0][0].cpu().double(), want, rtol=1e-4, atol=2e-2)
    assert torch.equal(results[0][1], table[index])
    assert torch.equal(results[0][2], index)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_a_large_output_is_written_past_the_cache() -> None:
    index, table = torch.randint(1000, (70_000,)), torch.randn(1000, 64)
    assert torch.equal(ops.gather_rows(table, index), table[index])
    sums = ops.scatter_rows(table[index][:, :61], index * 70, 70_000)
    want = torch.zeros(70_000, 61).index_add_(0, index * 70, table[index][:, :61])
    assert torch.equal(sums, want)
