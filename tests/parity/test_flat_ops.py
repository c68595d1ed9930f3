"""Flat buffers and offset maps: Monolith's pairs and edge cases, on every implementation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import shoal.ops as ops
from shoal.errors import DTypeError, InputError, ShapeError
from shoal.ops.dispatch import forced
from shoal.ragged import Ragged
from support.backends import BACKENDS, Implementation

T = torch.tensor
implementations = pytest.mark.parametrize("impl", BACKENDS)
FORCED = pytest.mark.parametrize("backend", ["core", "reference", "triton"])

# Rows 1.x, 3.x, 4.x, 6.x are 3 wide, the others 2: n.x is n and x tenths.
FLAT = [
    1.1, 1.2, 1.3, 2.1, 2.2, 3.1, 3.2, 3.3, 4.1, 4.2, 4.3, 5.1, 5.2, 6.1, 6.2, 6.3, 7.1, 7.2, 8.1,
    8.2, 9.1, 9.2,
]  # fmt: skip
OFFSETS = ([13, 0, 5, 13, 8, 13], [16, 18, 11, 11, 16, 20, 3])
FIRSTS = ([6, 1, 3, 6, 4, 6], [7, 8, 5, 5, 7, 9, 2])
GRADIENT = [
    2.1, 2.2, 2.3, 7.4, 7.5, 3.1, 3.2, 3.3, 5.1, 5.2, 5.3, 7.8, 8.0, 11.3, 11.6, 11.9, 6.8, 7.0,
    2.4, 2.5, 6.4, 6.5,
]  # fmt: skip
# keys [[], [0, 1, 2, 1, 0], [0, 1, 0], []]
MAP = ([0, 8, 2, 6, 4, 10, 16, 13], [0, 2, 4, 5, 7, 8])
DIMS = [1, 2, 3, 4]
POS = ([0, 1, 2, 3, 4], [0, 0, 3, 5, 5])
FILLED = [0, 1, 2, 3, 4, 5, 2, 3, 0, 1, 6, 7, 8, 9, 10, 11, 6, 7, 8]


def times(impl: Implementation, full: int, short: int) -> int:
    """Repetitions: interpreted kernels take milliseconds a block."""
    return short if impl.name == "triton" and impl.device == "cpu" else full


def offset_map(device: str, pos: Any = POS) -> tuple[Ragged, tuple[Tensor, Tensor]]:
    ragged = Ragged(T(pos[0], dtype=torch.int64), T(pos[1])).to(device)
    return ragged, (T(MAP[0], device=device), T(MAP[1], device=device))


@implementations
@pytest.mark.parametrize("repeat", [(1, 1), (12345, 11777)], ids=["once", "repeated"])
def test_fused_gather_embeddings_by_input_pair(
    impl: Implementation, repeat: tuple[int, int]
) -> None:
    repeats = [times(impl, count, min(count, 3 + k)) for k, count in enumerate(repeat)]
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
    repeat = times(impl, repeat, min(repeat, 150))
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


def test_static_shape_is_inferred() -> None:
    with FakeTensorMode():
        grads = [torch.empty(6, 3), torch.empty(7, 2)]
        offsets = [torch.empty(6, dtype=torch.int64), torch.empty(7, dtype=torch.int64)]
        flat = ops.fused_gather_embeddings_by_input_gradient(22, grads, offsets, [3, 2])
        assert flat.shape == (22,)
        parts = ops.fused_gather_embeddings_by_input(flat, offsets, [3, 2])
        assert [part.shape for part in parts] == [(6, 3), (7, 2)]


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
def test_two_shards_fill_one_buffer(impl: Implementation) -> None:
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
def test_fill_with_offset_map_empty(impl: Implementation) -> None:
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
def test_aligned_flat_round_trip(impl: Implementation, alignment: int) -> None:
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


@pytest.mark.parametrize("many", [True, False])
def test_fused_results_do_not_depend_on_threads(many: bool) -> None:
    dims, before, results = [3, 16, 40], torch.get_num_threads(), []
    n, size = (60_000, 4_500_000) if many else (2000, 700)
    flat = torch.randn(size)
    offsets = [torch.randint(size - dim, (n,)) for dim in dims]
    grads = [torch.randn(n, dim) for dim in dims]
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            gathered = ops.fused_gather_embeddings_by_input(flat, offsets, dims)
            summed = ops.fused_gather_embeddings_by_input_gradient(size, grads, offsets, dims)
            results.append([*gathered, summed])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    with forced("reference"):
        wanted = ops.fused_gather_embeddings_by_input_gradient(size, grads, offsets, dims)
        gathered = ops.fused_gather_embeddings_by_input(flat, offsets, dims)
    assert all(torch.equal(a, b) for a, b in zip(gathered, results[0][:-1], strict=True))
    torch.testing.assert_close(results[0][-1], wanted, rtol=1e-5, atol=1e-4)


@implementations
def test_fused_gather_empty(impl: Implementation) -> None:
    none = torch.empty(0, dtype=torch.int64, device=impl.device)
    flat = torch.empty(0, device=impl.device)
    assert impl.fused_gather_embeddings_by_input(flat, [], []) == []
    parts = impl.fused_gather_embeddings_by_input(flat, [none, none], [3, 1])
    assert [part.shape for part in parts] == [(0, 3), (0, 1)]
    got = impl.fused_gather_embeddings_by_input_gradient(5, parts, [none, none], [3, 1])
    assert got.tolist() == [0.0] * 5


FLAT_E, OFFSETS_N, GRADS = torch.ones(6), T([0, 4]), torch.ones(2, 2)
VALUE, BUFFER = torch.ones(12), torch.zeros(19)
POS_OK, MAP_OK = offset_map("cpu")


def fill(
    pos: Ragged = POS_OK,
    value: Tensor = VALUE,
    offsets: Any = None,
    splits: Any = None,
    buffer: Tensor = BUFFER,
    dims: list[int] = DIMS,
) -> Tensor:
    offset_pair = (T(offsets or MAP[0]), T(splits or MAP[1]))
    return ops.fill_with_offset_map(pos, value, offset_pair, buffer, dims)


def grads_of(size: int, grads: list[Tensor], offsets: list[Tensor], dims: list[int]) -> Tensor:
    return ops.fused_gather_embeddings_by_input_gradient(size, grads, offsets, dims)


NAMES = ["what", "call", "error", "message"]
BAD: list[Any] = [
    ("offset-too-large",
     lambda: ops.fused_gather_embeddings_by_input(FLAT_E, [OFFSETS_N, T([5])], [2, 2]),
     InputError, r"fused_embedding_offsets\[1\]\[0\]: got 5; allowed: 0 to 4"),
    ("offset-negative", lambda: ops.fused_gather_embeddings_by_input(FLAT_E, [T([1, -2])], [2]),
     InputError, r"offsets\[0\]\[1\]: got -2"),
    ("gradient-offset", lambda: grads_of(5, [GRADS], [OFFSETS_N], [2]),
     InputError, r"embedding_offsets\[0\]\[1\]: got 4; allowed: 0 to 3"),
    ("value-too-short", lambda: fill(value=torch.ones(10)),
     InputError, r"length of value: got 10; allowed: 12"),
    ("position-names-no-key", lambda: fill(pos=Ragged(T([0, 1, 5, 3, 4]), T([0, 0, 3, 5, 5]))),
     InputError, r"pos.values\[2\]: got 5; allowed: 0 to 4"),
    ("position-negative", lambda: fill(pos=Ragged(T([0, -1, 2, 3, 4]), T([0, 0, 3, 5, 5]))),
     InputError, r"pos.values\[1\]: got -1"),
    ("row-leaves-buffer", lambda: fill(offsets=[0, 8, 2, 6, 4, 10, 17, 13]),
     InputError, r"value_offset values\[6\]: got 17"),
    ("offset-below-zero", lambda: fill(offsets=[0, 8, -2, 6, 4, 10, 16, 13]),
     InputError, r"value_offset values\[2\]: got -2"),
    ("splits-fall", lambda: fill(splits=[0, 2, 1, 5, 7, 8]),
     ShapeError, r"value_offset splits: got a break at \[2\]"),
    ("splits-start", lambda: fill(splits=[1, 2, 4, 5, 7, 8]), ShapeError, r"break at \[0\]"),
    ("splits-end", lambda: fill(splits=[0, 2, 4, 5, 7, 9]), ShapeError, r"break at \[5\]"),
    ("pos-splits-fall", lambda: fill(pos=Ragged(T([0, 1, 2, 3, 4]), T([0, 3, 2, 5, 5]))),
     ShapeError, r"pos.offsets_B1: got a break at \[2\]"),
]  # fmt: skip
BAD_METADATA: list[Any] = [
    ("int32-offsets", lambda: ops.fused_gather_embeddings_by_input(FLAT_E, [OFFSETS_N.int()], [2]),
     DTypeError, r"fused_embedding_offsets\[0\]: got torch.int32; allowed: int64"),
    ("int32-gradient-offsets", lambda: grads_of(6, [GRADS], [OFFSETS_N.int()], [2]),
     DTypeError, r"embedding_offsets\[0\]: got torch.int32"),
    ("lists", lambda: ops.fused_gather_embeddings_by_input(FLAT_E, [OFFSETS_N], [2, 3]),
     InputError, r"fused_embedding_offsets 1, embedding_dims 2"),
    ("no-tables", lambda: grads_of(6, [], [], []), InputError, r"1 or more"),
    ("width", lambda: ops.fused_gather_embeddings_by_input(FLAT_E, [OFFSETS_N], [0]),
     ShapeError, r"embedding_dims\[0\]: got 0"),
    ("flat", lambda: ops.fused_gather_embeddings_by_input(GRADS, [OFFSETS_N], [2]),
     ShapeError, r"fused_embeddings: got \(2, 2\)"),
    ("gradient-shape", lambda: grads_of(6, [GRADS], [OFFSETS_N], [3]),
     ShapeError, r"grads\[0\]: got \(2, 2\); allowed: \[2, 3\]"),
    ("gradient-dtypes", lambda: grads_of(6, [GRADS, GRADS.double()], [OFFSETS_N] * 2, [2, 2]),
     DTypeError, r"one dtype"),
    ("size", lambda: grads_of(-1, [GRADS], [OFFSETS_N], [2]), ShapeError, r"size: got -1"),
    ("devices", lambda: ops.fused_gather_embeddings_by_input(FLAT_E.to("meta"), [OFFSETS_N], [2]),
     InputError, r"on meta"),
    ("tables-of-pos", lambda: fill(dims=[1, 2]), ShapeError, r"number of dims: got 2; allowed: 4"),
    ("value-dtype", lambda: fill(value=VALUE.double()), DTypeError, r"value and value_buffer"),
    ("buffer-strides", lambda: fill(buffer=torch.zeros(38)[::2]), ShapeError, r"contiguous"),
    ("other-handle",
     lambda: ops.finalize_shared_tensor([BUFFER, VALUE], torch.float32, [19]),
     InputError, r"shared_tensor_handles\[1\]: got another tensor"),
    ("handle-dtype", lambda: ops.finalize_shared_tensor([BUFFER], torch.float64, [19]),
     DTypeError, r"dtype: got torch.float32; allowed: torch.float64"),
    ("handle-shape", lambda: ops.finalize_shared_tensor([BUFFER], torch.float32, [2, -1]),
     ShapeError, r"shape: got \(2, -1\); allowed: a shape of 19 elements"),
    ("alignment", lambda: ops.aligned_flat_concat([FLAT_E], alignment_bytes=6),
     ShapeError, r"alignment_bytes: got 6"),
    ("split-length", lambda: ops.aligned_flat_split([FLAT_E], FLAT_E),
     ShapeError, r"length of flat: got 6; allowed: 64"),
]  # fmt: skip


@FORCED
@pytest.mark.parametrize(NAMES, BAD, ids=[case[0] for case in BAD])
def test_bad_values(
    backend: Any, what: str, call: Callable[[], object], error: type[Exception], message: str
) -> None:
    with forced(backend), pytest.raises(error, match=message):
        call()
    assert not BUFFER.any(), "a refused fill left traces"


@pytest.mark.parametrize(NAMES, BAD_METADATA, ids=[case[0] for case in BAD_METADATA])
def test_bad_metadata(
    what: str, call: Callable[[], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        call()


@implementations
def test_gradients_check(impl: Implementation) -> None:
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


def test_opcheck() -> None:
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


def test_compile_and_export() -> None:
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
