"""What flat buffers and offset maps refuse, and what they say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import shoal.ops as ops
from shoal.errors import DTypeError, InputError, ShapeError
from shoal.ragged import Ragged
from support.backends import forced
from support.flat import DIMS, MAP, offset_map

T = torch.tensor
FORCED = pytest.mark.parametrize("backend", ["core", "reference", "triton"])

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
def test_bad_values_of_flat_buffers(
    backend: Any, what: str, call: Callable[[], object], error: type[Exception], message: str
) -> None:
    with forced(backend), pytest.raises(error, match=message):
        call()
    assert not BUFFER.any(), "a refused fill left traces"


@pytest.mark.parametrize(NAMES, BAD_METADATA, ids=[case[0] for case in BAD_METADATA])
def test_bad_metadata_of_flat_buffers(
    what: str, call: Callable[[], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        call()
