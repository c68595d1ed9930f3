"""Corners of the operations on ids, rows and flat buffers that the parity tests do not reach."""

from __future__ import annotations

import ctypes
import mmap
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal import ops
from shoal.errors import DeviceUnavailable, InputError, ShapeError
from shoal.ops.dispatch import bounds_checks
from shoal.ragged import Ragged
from support.backends import forced

ON_CPU = [
    "reference",
    "core",
    pytest.param(
        "triton",
        marks=pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here"),
    ),
]
KEY = Ragged(torch.tensor([0, 1]), torch.tensor([0, 2]))


def int64(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def test_kept_row_numbers_serve_only_ragged_of_as_many_values() -> None:
    offsets_B1 = int64(0, 2, 5)
    assert ops.fused_value_rowids(Ragged(torch.arange(5), offsets_B1)).numel() == 5
    with pytest.raises(ShapeError, match="number of rows: got 3; allowed: 5, the last"):
        ops.fused_value_rowids(Ragged(torch.arange(3), offsets_B1))


@pytest.mark.parametrize("backend", ON_CPU)
def test_values_without_rows_are_refused(backend: Any) -> None:
    with (
        bounds_checks(),
        forced(backend),
        pytest.raises(ShapeError, match="number of rows: got 3; allowed: 0"),
    ):
        ops.fused_value_rowids(Ragged(torch.arange(3), int64(0)))


VALUES = Ragged(int64(7, 8), int64(0, 2))
LONG = Ragged(int64(7, 8), int64(0, 3))
NAMED = [
    (lambda: ops.split_by_indices(int64(0, 5), torch.rand(2), 2), "split_by_indices: indices_N"),
    (lambda: ops.ragged_partition(int64(0, 5), VALUES, 2), "ragged_partition: indices_N"),
    (
        lambda: ops.ragged_split_by_indices(int64(0, 5), VALUES, 2),
        "ragged_split_by_indices: indices_N",
    ),
    (lambda: ops.ragged_partition(int64(0, 1), LONG, 2), "ragged_partition: number of rows"),
    (
        lambda: ops.unique_key_with_value_and_offset(LONG, [1]),
        "unique_key_with_value_and_offset: number of rows",
    ),
    (lambda: ops.reorder_by_indices(int64(7, 8), int64(0, 5), 2), "reorder_by_indices: shards_N"),
    (
        lambda: ops.fused_reorder_by_indices([int64(7)], 2, shard_by=lambda ids, num: ids),
        "fused_reorder_by_indices: shard_by's result",
    ),
    (lambda: ops.unpermute_rows(torch.rand(2), int64(0, 5)), "unpermute_rows: order_N"),
]


@pytest.mark.parametrize("backend", ON_CPU)
@pytest.mark.parametrize(("call", "named"), NAMED, ids=[named for _, named in NAMED])
def test_errors_name_the_function_that_was_called(call: Any, named: str, backend: Any) -> None:
    with bounds_checks(), forced(backend), pytest.raises(InputError, match=f"^{named}"):
        call()


@pytest.mark.parametrize("backend", ON_CPU)
def test_a_bad_shard_leaves_given_outputs_alone(backend: Any) -> None:
    outs = {name: int64(9, 9, 9) for name in ("ids_out_N", "counts_out_N", "offsets_out_N")}
    outs |= {"slot_sizes_out_WK": int64(9, 9), "size_out_1": int64(9)}
    with bounds_checks(), forced(backend), pytest.raises(InputError, match="at 2: got 2"):
        ops.fused_reorder_by_indices_into(
            [int64(1, 2, 3)], 2, shard_by=lambda ids, num: int64(0, 1, 2), **outs
        )
    assert all(bool((out == 9).all()) for out in outs.values())


def test_large_results_may_be_changed_in_place() -> None:
    # A view of other memory could not: autograd refuses views that an operator returned.
    rows_ND = torch.rand(1 << 12, 64, requires_grad=True)
    order_N = torch.arange(1 << 12).flip(0)
    for out_ND in (
        ops.permute_rows(rows_ND, order_N),
        ops.unpermute_rows(rows_ND, order_N),
        ops.gather_rows(rows_ND, order_N),
        ops.fused_gather_embeddings_by_input(rows_ND.flatten(), [order_N], [64])[0],
    ):
        out_ND.mul_(2).sum().backward()  # type: ignore[no-untyped-call]
    assert rows_ND.grad is not None


COMPLEX = {
    "permute": lambda flat: ops.permute_rows(flat.view(3, 2), int64(2, 0, 1)),
    "gather": lambda flat: ops.gather_rows(flat.view(3, 2), int64(2, 0, 2)),
    "flat": lambda flat: ops.fused_gather_embeddings_by_input(flat, [int64(4, 0, 4)], [2])[0],
    "fill": lambda flat: ops.fill_with_offset_map(
        KEY, flat[:4], (int64(0, 4, 2), int64(0, 2, 3)), torch.zeros(6, dtype=flat.dtype), [2]
    ),
}
"""Each takes a flat buffer of six and is linear in it."""


@pytest.mark.parametrize("backend", ON_CPU[1:])
@pytest.mark.parametrize("name", COMPLEX)
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_rows_keep_their_imaginary_part(name: str, dtype: Any, backend: Any) -> None:
    flat = torch.randn(6, dtype=dtype, requires_grad=True)
    real, imaginary = (part.detach().clone().requires_grad_() for part in (flat.real, flat.imag))
    with forced(backend):
        out = COMPLEX[name](flat)
        parts = [COMPLEX[name](part) for part in (real, imaginary)]
        assert torch.equal(out, torch.complex(*parts))
        out.backward(torch.full_like(out, 1 + 2j))
        for part, factor in zip(parts, (1.0, 2.0), strict=True):
            part.backward(torch.full_like(part, factor))
    assert flat.grad is not None and real.grad is not None and imaginary.grad is not None
    assert torch.equal(flat.grad, torch.complex(real.grad, imaginary.grad))


def before_a_guard_page(n: int) -> Tensor:
    """float32 [n] of ones; who reads behind it is stopped."""
    page = mmap.PAGESIZE
    room = -(-n * 4 // page) * page
    memory = mmap.mmap(-1, room + page)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address + room), page, 0) == 0
    return torch.frombuffer(memory, dtype=torch.float32, count=n, offset=room - 4 * n).fill_(1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="reads are guarded when interpreted")
@pytest.mark.skipif(sys.platform != "linux", reason="guard pages as Linux has them")
def test_a_long_run_of_narrow_rows_is_not_read_as_wide_ones() -> None:
    narrow = before_a_guard_page(300 * 2).view(300, 2)
    grads, offsets = [torch.ones(1, 64), narrow], [int64(0), torch.full((300,), 100)]
    with forced("triton"):
        flat_E = ops.fused_gather_embeddings_by_input_gradient(200, grads, offsets, [64, 2])
    assert flat_E[:64].eq(1).all() and flat_E[100:102].eq(300).all() and flat_E[102:].eq(0).all()


@pytest.mark.slow
def test_unique_keys_compile_in_one_graph() -> None:
    def offsets(values: Tensor, offsets_B1: Tensor) -> Tensor:
        keys = Ragged(values, offsets_B1)
        return ops.unique_key_with_value_and_offset(keys, [2, 3], False).value_offset.offsets_N

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(offsets, backend="aot_eager", fullgraph=True)
        assert compiled(int64(0, 1, 0, 0), int64(0, 3, 4)).tolist() == [0, 4, 2, 6]


def test_a_shared_buffer_may_be_a_scalar() -> None:
    assert ops.finalize_shared_tensor([torch.ones(1)], torch.float32, ()).shape == ()


def test_a_negative_number_of_rows_is_refused() -> None:
    with pytest.raises(ShapeError, match="scatter_rows: rows: got -1; allowed: 0 or more"):
        ops.scatter_rows(torch.rand(0, 2), int64(), -1)


def test_an_offset_into_a_buffer_shorter_than_a_row_is_named() -> None:
    with pytest.raises(InputError, match="none: the 2 elements hold no row of 3"):
        ops.fused_gather_embeddings_by_input(torch.rand(2), [int64(0)], [3])


@pytest.mark.gpu
def test_the_core_is_kept_from_cuda_memory() -> None:
    with forced("core"), pytest.raises(DeviceUnavailable, match="backend 'core'"):
        ops.dedup(int64(1, 2).cuda())
