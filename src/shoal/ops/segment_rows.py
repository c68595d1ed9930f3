"""First rows of segments and back, and the segment of each row."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shoal._core import ops as core
from shoal.address import address
from shoal.ops import checks
from shoal.ops.dispatch import by_core, fresh, operator


def segment_first_n(rows_ND: Tensor, offsets_B1: Tensor, length: int) -> Tensor:
    """First `length` rows of each segment, zero padded.

    rows_ND floating [N, D], offsets_B1 int64 [B+1] -> [B, length, D]. Gradient: a row that was
    kept gets its own, the others zeros.

    Raises:
        ShapeError: as `segment_sum`, or length below 1.
        DTypeError, InputError: as `segment_sum`.
    """
    checks.check_segments("segment_first_n", rows_ND, offsets_B1)
    checks.check_length("segment_first_n", length, least=1)
    return _first_n(rows_ND, offsets_B1, length, rows_ND.shape[0], False)  # type: ignore[no-any-return]


def row_ids(offsets_B1: Tensor, rows: int | None = None) -> Tensor:
    """Segment of each row: offsets [0, 2, 2, 3] give [0, 0, 2].

    offsets_B1 int64 [B+1] -> int64 [N], no gradient. `rows` is N; without it the host reads the
    last offset, which waits for a CUDA device.

    Raises:
        ShapeError: offsets not [B+1], or they do not rise from 0 to N.
        DTypeError: offsets not int64.
    """
    checks.check_offsets("row_ids", offsets_B1)
    count = max(int(offsets_B1[-1]), 0) if rows is None else rows
    return all_row_ids(offsets_B1, count, "row_ids")  # type: ignore[no-any-return]


def _core_first_n(source: Tensor, offsets_B1: Tensor, length: int, rows: int, back: bool) -> Tensor:
    source, offsets_B1 = source.contiguous(), offsets_B1.contiguous()
    segments = offsets_B1.shape[0] - 1
    out = fresh(*_first_n_shape(source, segments, length, rows, back), dtype=source.dtype)
    bad = core.first_n(
        address(source),
        address(offsets_B1),
        address(out),
        segments,
        rows,
        length,
        out.shape[-1] * out.element_size(),
        back,
        torch.get_num_threads(),
    )
    if bad >= 0:
        raise checks.bad_offset("segment_first_n", offsets_B1, rows, bad)
    return out


def _first_n_shape(
    source: Tensor, segments: int, length: int, rows: int, back: bool
) -> tuple[int, ...]:
    return (rows, source.shape[-1]) if back else (segments, length, source.shape[-1])


def _setup_first_n(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, offsets_B1, ctx.length, ctx.rows, ctx.back = inputs
    ctx.save_for_backward(offsets_B1)


def _first_n_gradient(ctx: Any, grads: Tensor) -> tuple[Any, ...]:
    turned = _first_n(grads, *ctx.saved_tensors, ctx.length, ctx.rows, not ctx.back)
    return turned, None, None, None, None


# From rows [N, D] to [B, length, D] and back: each is the other's gradient.
_first_n = operator(
    "segment_first_n(Tensor source, Tensor offsets_B1, SymInt length, SymInt rows, bool back) "
    "-> Tensor",
    core=_core_first_n,
    triton="segments:first_n",
    fake=lambda source, offsets, *how: source.new_empty(
        _first_n_shape(source, offsets.shape[0] - 1, *how)
    ),
    check=lambda source, offsets, length, rows, back: checks.read_offsets(
        "segment_first_n", offsets, rows
    ),
    gradient=(_first_n_gradient, _setup_first_n),
)


def _core_row_ids(offsets_B1: Tensor, rows: int, op: str) -> Tensor:
    offsets_B1, ids_N = offsets_B1.contiguous(), fresh(max(rows, 0), dtype=torch.int64)
    segments, threads = offsets_B1.shape[0] - 1, torch.get_num_threads()
    bad = core.row_ids(address(offsets_B1), address(ids_N), segments, rows, threads)
    if bad >= 0:
        raise checks.bad_offset(op, offsets_B1, rows, bad)
    return ids_N


all_row_ids = operator(
    "row_ids(Tensor offsets_B1, SymInt rows, str op) -> Tensor",
    core=_core_row_ids,
    triton="ids:value_rowids",
    fake=lambda offsets, rows, op: offsets.new_empty(rows),
    check=by_core(_core_row_ids),
)
