"""Rows by id and by index: Monolith's pairs and edge cases, on every implementation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import shoal.ops as ops
from shoal.errors import DTypeError, InputError, ShapeError
from shoal.ops.dispatch import bounds_checks, forced
from support.backends import BACKENDS, Implementation

T = torch.tensor
implementations = pytest.mark.parametrize("impl", BACKENDS)
FORCED = pytest.mark.parametrize("backend", ["core", "reference", "triton"])


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fresh memory holds NaN (integers: their least value), so an unwritten output shows."""

    def poison(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def made(*args: Any, **kwargs: Any) -> Tensor:
            tensor = make(*args, **kwargs)
            floats = tensor.is_floating_point()
            return tensor.fill_(float("nan") if floats else torch.iinfo(tensor.dtype).min)

        return made

    monkeypatch.setattr(torch, "empty", poison(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poison(torch.empty_like))
    monkeypatch.setattr(Tensor, "new_empty", poison(Tensor.new_empty))
    yield


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
def test_map_id_to_embedding_pair(impl: Implementation, poisoned: None) -> None:
    ids = on(impl, T([1]), T([2]))
    embeddings = on(impl, T([[1.0, 1.0]]), T([[2.0, 2.0]]))
    out = impl.map_id_to_embedding(ids, embeddings, T([[1], [2]]).to(impl.device))
    assert out.tolist() == [[[1, 1]], [[2, 2]]]


@implementations
def test_map_id_to_embedding_gradient_pair(impl: Implementation, poisoned: None) -> None:
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
def test_gather_embeddings_by_input_pair(impl: Implementation, poisoned: None) -> None:
    ids, rows, input = on(
        impl, T([1, 2, 3]), T([[1.0, 1], [2, 2], [3, 3]]), T([[2], [1], [2]])
    )  # fmt: skip
    out, index_mapping = impl.gather_embeddings_by_input(ids, rows, input)
    assert out.tolist() == [[[2, 2]], [[1, 1]], [[2, 2]]]
    assert index_mapping.tolist() == [[1], [0], [1]]


@implementations
def test_gather_embeddings_by_input_gradient_pair(impl: Implementation, poisoned: None) -> None:
    ids, rows, input = on(
        impl, T([1, 2, 3]), T([[1.0, 1], [2, 2], [3, 3]]), T([[1], [2], [1]])
    )  # fmt: skip
    rows.requires_grad_()
    with impl.chosen():
        out = impl.gather_embeddings_by_input(ids, rows, input).embeddings
        (torch.full_like(out, 2.0) - out).sum().backward()
    assert rows.grad.tolist() == [[-2, -2], [-1, -1], [0, 0]]


@implementations
def test_gather_embeddings_by_ids_gradient_back_prop_pair(
    impl: Implementation, poisoned: None
) -> None:
    grads = T([[1.0, 1], [2, 2], [4, 4], [8, 8]])
    ids, grads, index = on(impl, T([2, 3, 1]), grads, T([1, 0, 1, 2]))
    out = impl.gather_embeddings_by_ids_gradient_back_prop(ids, grads, index)
    assert out.tolist() == [[2, 2], [5, 5], [8, 8]]


@implementations
@pytest.mark.parametrize("width", [0, 1, 3, 4, 16, 17, 65])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gather_and_scatter_widths(
    impl: Implementation, width: int, dtype: torch.dtype, poisoned: None
) -> None:
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
def test_strided_inputs(impl: Implementation) -> None:
    rows, index = on(impl, torch.randn(6, 8)[:, ::2], T([5, 9, 0, 9, 1])[::2])
    assert torch.equal(impl.gather_rows(rows, index), rows[index])
    got = impl.scatter_rows(rows[:3], index, 6)
    assert torch.equal(got[index], rows[:3])


@implementations
@pytest.mark.parametrize("hot", [0.0, 0.9, 1.0])
def test_scatter_rows_of_hot_rows(impl: Implementation, hot: float, poisoned: None) -> None:
    n = 700
    index = torch.where(torch.rand(n) < hot, 3, torch.randint(9, (n,)))
    grad = torch.randn(n, 5, dtype=torch.float64)
    want = torch.zeros(9, 5, dtype=torch.float64).index_add_(0, index, grad)
    torch.testing.assert_close(impl.scatter_rows(*on(impl, grad, index), 9).cpu(), want)


@implementations
def test_empty(impl: Implementation) -> None:
    rows, index = on(impl, torch.empty(0, 3), torch.empty(0, dtype=torch.int64))
    assert impl.gather_rows(rows, index).shape == (0, 3)
    assert impl.scatter_rows(rows, index, 4).tolist() == [[0, 0, 0]] * 4
    assert impl.scatter_rows(rows, index, 0).shape == (0, 3)
    assert impl.map_id_to_embedding([index], [rows], index).shape == (0, 3)


@pytest.mark.parametrize("width", [1, 16, 100])
@pytest.mark.parametrize("rows", [1, 40, 70_000])
def test_results_do_not_depend_on_threads(rows: int, width: int) -> None:
    n = 90_000
    index = torch.randint(rows, (n,))
    index[torch.rand(n) < 0.3] = rows // 2
    grad, table = torch.randn(n, width), torch.randn(rows, width)
    ids, before = torch.randperm(rows) - rows // 2, torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            matched = ops.match_rows(ids, ids[index])
            results.append(
                [ops.scatter_rows(grad, index, rows), ops.gather_rows(table, index), matched]
            )
    finally:
        torch.set_num_threads(before)
    want = torch.zeros(rows, width).index_add_(0, index, grad)
    torch.testing.assert_close(results[0][0], want, rtol=1e-4, atol=1e-3)
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


IDS, ROWS, INPUT = T([1, 2]), torch.ones(2, 3), T([2, 1, 1])
NAMES = ["what", "call", "error", "message"]
BAD: list[Any] = [
    ("missing-id", lambda: ops.map_id_to_embedding([IDS], [ROWS], T([[1], [7]])),
     InputError, r"map_id_to_embedding: input\[1\]: got id 7; allowed: an id that ids holds"),
    ("missing-id-backwards",
     lambda: ops.map_id_to_embedding_gradient_back_prop([IDS], T([3]), torch.ones(1, 3)),
     InputError, r"map_id_to_embedding_gradient_back_prop: input\[0\]: got id 3"),
    ("missing-id-gather", lambda: ops.gather_embeddings_by_input(IDS, ROWS, T([1, 9])),
     InputError, r"gather_embeddings_by_input: input\[1\]: got id 9"),
    ("missing-id-match", lambda: ops.match_rows(IDS, T([5])), InputError, r"query\[0\]: got id 5"),
    ("index-too-large", lambda: ops.gather_rows(ROWS, T([0, 2])),
     InputError, r"gather_rows: index\[1\]: got 2; allowed: 0 to 1"),
    ("index-negative", lambda: ops.gather_rows(ROWS, T([-1])), InputError, r"got -1"),
    ("index-into-nothing", lambda: ops.gather_rows(ROWS[:0], T([0])), InputError, r"nothing"),
    ("scatter-index", lambda: ops.scatter_rows(torch.ones(2, 3), T([0, 5]), 5),
     InputError, r"scatter_rows: index\[1\]: got 5; allowed: 0 to 4"),
    ("mapping-index",
     lambda: ops.gather_embeddings_by_ids_gradient_back_prop(IDS, torch.ones(1, 3), T([2])),
     InputError, r"back_prop: index_mapping\[0\]: got 2"),
]  # fmt: skip
BAD_METADATA: list[Any] = [
    ("int32-ids", lambda: ops.map_id_to_embedding([IDS.int()], [ROWS], INPUT),
     DTypeError, r"map_id_to_embedding: ids: got torch.int32; allowed: int64"),
    ("int32-input", lambda: ops.gather_embeddings_by_input(IDS, ROWS, INPUT.int()),
     DTypeError, r"input: got torch.int32"),
    ("int32-index", lambda: ops.gather_rows(ROWS, INPUT.int()), DTypeError, r"index: got"),
    ("int32-mapping",
     lambda: ops.gather_embeddings_by_ids_gradient_back_prop(IDS, torch.ones(3, 3), INPUT.int()),
     DTypeError, r"index_mapping: got torch.int32"),
    ("lists-of-two-lengths", lambda: ops.map_id_to_embedding([IDS, IDS], [ROWS], INPUT),
     InputError, r"got ids 2, embeddings 1"),
    ("no-lists", lambda: ops.map_id_to_embedding([], [], INPUT), InputError, r"1 or more"),
    ("rows-and-ids", lambda: ops.map_id_to_embedding([IDS], [torch.ones(3, 3)], INPUT),
     ShapeError, r"rows of embeddings\[0\]: got 3; allowed: 2"),
    ("flat-rows", lambda: ops.gather_embeddings_by_input(IDS, torch.ones(2), INPUT),
     ShapeError, r"embeddings: got \(2,\)"),
    ("two-widths", lambda: ops.map_id_to_embedding([IDS, IDS], [ROWS, torch.ones(2, 4)], INPUT),
     ShapeError, r"widths of embeddings: got \[3, 4\]"),
    ("two-dtypes", lambda: ops.gather_rows([ROWS, ROWS.double()], INPUT), DTypeError, r"one dtype"),
    ("grad-shape", lambda: ops.scatter_rows(torch.ones(2, 3), INPUT, 4),
     ShapeError, r"scatter_rows: grads: got \(2, 3\)"),
    ("grad-dtype", lambda: ops.scatter_rows(torch.ones(3, 3).long(), INPUT, 4),
     DTypeError, r"floating"),
    ("two-devices", lambda: ops.gather_rows(ROWS.to("meta"), INPUT), InputError, r"on meta"),
]  # fmt: skip


@FORCED
@pytest.mark.parametrize(NAMES, BAD, ids=[case[0] for case in BAD])
def test_bad_values(
    backend: Any, what: str, call: Callable[[], object], error: type[Exception], message: str
) -> None:
    with forced(backend), pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize(NAMES, BAD_METADATA, ids=[case[0] for case in BAD_METADATA])
def test_bad_metadata(
    what: str, call: Callable[[], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        call()


def test_the_first_bad_place_is_named_whatever_the_threads() -> None:
    index = torch.zeros(100_000, dtype=torch.int64)
    index[[40_000, 99_000]] = 9
    with pytest.raises(InputError, match=r"index\[40000\]: got 9"):
        ops.gather_rows(torch.ones(3, 64), index)
    with pytest.raises(InputError, match=r"index\[40000\]: got 9"):
        ops.scatter_rows(torch.ones(100_000, 64), index, 5)
    with pytest.raises(InputError, match=r"query\[40000\]: got id 9"):
        ops.match_rows(torch.zeros(1).long(), index)


@pytest.mark.parametrize("impl", BACKENDS[-1:])
def test_triton_reads_a_missing_row_as_nan(impl: Implementation) -> None:
    from shoal.kernels import rows as kernels

    rows, index = on(impl, torch.ones(2, 3), T([-1, 1, 2]))
    got = kernels.gather_rows([rows], index, True, "test")
    assert got.isnan().all(1).tolist() == [True, False, True]
    assert kernels.gather_rows([rows.long()], index, True, "test").tolist()[0] == [0, 0, 0]


@pytest.mark.gpu
def test_bounds_checks_on_cuda() -> None:
    rows, index = torch.ones(2, 3, device="cuda"), T([5], device="cuda")
    with bounds_checks(), pytest.raises(InputError, match=r"index\[0\]: got 5"):
        ops.gather_rows(rows, index)


@implementations
def test_gradients_check(impl: Implementation) -> None:
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


def test_opcheck() -> None:
    rows, more = torch.randn(4, 3, requires_grad=True), torch.randn(2, 3, requires_grad=True)
    index = T([1, 5, 1])
    check: Any = torch.library.opcheck
    check(torch.ops.shoal.match_rows.default, (T([5, 1]), T([1, 5, 2]), True, True, "op"))
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


def test_compile_and_export() -> None:
    model, ids, input = Model(), T([7, 8, 9]), T([[9, 7], [7, 7]])
    want = model(ids, input)
    (grad,) = torch.autograd.grad(want.sum(), [model.rows])
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    got = compiled(ids, input)
    assert torch.equal(got, want)
    assert torch.equal(torch.autograd.grad(got.sum(), [model.rows])[0], grad)
    exported = torch.export.export(model, (ids, input))
    assert torch.equal(exported.module()(ids, input), want)
