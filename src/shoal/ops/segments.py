"""Segments of rows given by offsets: sums, means, norms, first rows.

Segment b is rows `offsets_B1[b]:offsets_B1[b+1]`. Rows are added in order, so results depend
neither on threads nor on the batch around a segment; but on CUDA a whole chunk of 1,024 rows,
counted from the batch's first, that one segment holds is summed by itself. float16 and bfloat16
are added in float32. Values of offsets are checked on the CPU, and on CUDA under
`set_bounds_checks`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shoal import _core
from shoal.address import address
from shoal.errors import DTypeError
from shoal.ops import checks
from shoal.ops.dispatch import fresh, operator
from shoal.ops.reference import rows as reference

MODES = ("sum", "mean", "sqrtn", "l2")


def segment_sum(rows_ND: Tensor, offsets_B1: Tensor) -> Tensor:
    """Sum of each segment's rows.

    rows_ND floating [N, D], offsets_B1 int64 [B+1] -> [B, D]; an empty segment gives zeros.
    Gradient: each row gets its segment's.

    Raises:
        ShapeError: shapes other than these, or offsets that do not rise from 0 to N.
        DTypeError: rows not floating, or offsets not int64.
        InputError: on two devices.
    """
    checks.check_segments("segment_sum", rows_ND, offsets_B1)
    return segment_reduce(rows_ND, offsets_B1, "sum")  # type: ignore[no-any-return]


def segment_mean(rows_ND: Tensor, offsets_B1: Tensor) -> Tensor:
    """Mean of each segment's rows; an empty segment gives zeros, not NaN.

    rows_ND floating [N, D], offsets_B1 int64 [B+1] -> [B, D]. Gradient: the segment's over its
    number of rows.

    Raises:
        ShapeError, DTypeError, InputError: as `segment_sum`.
    """
    checks.check_segments("segment_mean", rows_ND, offsets_B1)
    return segment_reduce(rows_ND, offsets_B1, "mean")  # type: ignore[no-any-return]


def segment_sqrtn(rows_ND: Tensor, offsets_B1: Tensor) -> Tensor:
    """Sum of each segment's rows over the square root of their number; empty gives zeros.

    rows_ND floating [N, D], offsets_B1 int64 [B+1] -> [B, D]. Gradient: the segment's over the
    square root of its number of rows.

    Raises:
        ShapeError, DTypeError, InputError: as `segment_sum`.
    """
    checks.check_segments("segment_sqrtn", rows_ND, offsets_B1)
    return segment_reduce(rows_ND, offsets_B1, "sqrtn")  # type: ignore[no-any-return]


def segment_l2(rows_ND: Tensor, offsets_B1: Tensor) -> Tensor:
    """Square root of each segment's sum of squares, by column.

    rows_ND floating [N, D], offsets_B1 int64 [B+1] -> [B, D]. Gradient: g*x/y, and 0 where y
    is 0.

    Raises:
        ShapeError, DTypeError, InputError: as `segment_sum`.
    """
    checks.check_segments("segment_l2", rows_ND, offsets_B1)
    return segment_reduce(rows_ND, offsets_B1, "l2")  # type: ignore[no-any-return]


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
    return _first_n(rows_ND, offsets_B1, length)  # type: ignore[no-any-return]


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
    return _row_ids(offsets_B1, count)  # type: ignore[no-any-return]


def is_double(op: str, dtype: torch.dtype) -> bool:
    """float64 or float32, the dtypes of the core.

    Raises:
        DTypeError: neither.
    """
    if dtype not in (torch.float32, torch.float64):
        allowed = "float16, bfloat16, float32 or float64"
        raise DTypeError(
            f"{op}: dtype of rows", got=dtype, allowed=allowed, remedy="Call .float()."
        )
    return dtype == torch.float64


def widened(tensor: Tensor) -> Tensor:
    """Contiguous, and float32 if it was float16 or bfloat16."""
    if tensor.dtype in (torch.float16, torch.bfloat16):
        tensor = tensor.float()
    return tensor.contiguous()


def kept_alive(tensor: Tensor | None) -> Tensor:
    """What the core reads an optional argument from; address 0 where there is none."""
    return torch.empty(0, device="cpu") if tensor is None else widened(tensor)


def share_of(grads_BD: Tensor, pooled_BD: Tensor) -> Tensor:
    """g/y of an L2 norm y, and 0 where y is 0."""
    return (grads_BD / pooled_BD).masked_fill(pooled_BD == 0, 0)


def _core_reduce(values_ND: Tensor, offsets_B1: Tensor, mode: str) -> Tensor:
    op, rows_ND, offsets_B1 = f"segment_{mode}", widened(values_ND), offsets_B1.contiguous()
    (rows, dim), segments = rows_ND.shape, offsets_B1.shape[0] - 1
    out_BD = fresh(segments, dim, dtype=rows_ND.dtype)
    bad = _core.segment_reduce(
        address(rows_ND),
        address(offsets_B1),
        address(out_BD),
        segments,
        rows,
        dim,
        MODES.index(mode),
        is_double(op, rows_ND.dtype),
        torch.get_num_threads(),
    )
    if bad >= 0:
        raise checks.bad_offset(op, offsets_B1, rows, bad)
    return out_BD.to(values_ND.dtype)


def _core_reduce_backward(
    grads_BD: Tensor,
    offsets_B1: Tensor,
    values_ND: Tensor | None,
    pooled_BD: Tensor | None,
    mode: str,
    rows: int,
) -> Tensor:
    op, wide_BD, offsets_B1 = f"segment_{mode}", widened(grads_BD), offsets_B1.contiguous()
    inputs, pooled = kept_alive(values_ND), kept_alive(pooled_BD)
    segments, dim = wide_BD.shape
    out_ND = fresh(rows, dim, dtype=wide_BD.dtype)
    bad = _core.segment_reduce_backward(
        address(wide_BD),
        address(offsets_B1),
        address(inputs),
        address(pooled),
        address(out_ND),
        segments,
        rows,
        dim,
        MODES.index(mode),
        is_double(op, wide_BD.dtype),
        torch.get_num_threads(),
    )
    if bad >= 0:
        raise checks.bad_offset(op, offsets_B1, rows, bad)
    return out_ND.to(grads_BD.dtype)


def _reference_reduce(values_ND: Tensor, offsets_B1: Tensor, mode: str) -> Tensor:
    ids_N = reference.row_ids(offsets_B1, values_ND.shape[0])
    return reference.grouped(values_ND, ids_N, offsets_B1.diff(), mode)


def _reference_reduce_backward(
    grads_BD: Tensor,
    offsets_B1: Tensor,
    values_ND: Tensor | None,
    pooled_BD: Tensor | None,
    mode: str,
    rows: int,
) -> Tensor:
    ids_N = reference.row_ids(offsets_B1, rows)
    if values_ND is not None and pooled_BD is not None:
        return values_ND * share_of(grads_BD, pooled_BD)[ids_N]
    over_B1 = reference.divisors(offsets_B1.diff(), mode).to(grads_BD.dtype).unsqueeze(1)
    return (grads_BD / over_B1)[ids_N]


def _setup_reduce(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    values_ND, offsets_B1, ctx.mode = inputs
    ctx.rows = values_ND.shape[0]
    ctx.save_for_backward(offsets_B1, *((values_ND, output) if ctx.mode == "l2" else ()))


def _reduce_gradient(ctx: Any, grads_BD: Tensor) -> tuple[Any, ...]:
    offsets_B1, *kept = ctx.saved_tensors
    values_ND, pooled_BD = kept or (None, None)
    grads_ND = segment_reduce_backward(
        grads_BD, offsets_B1, values_ND, pooled_BD, ctx.mode, ctx.rows
    )
    return grads_ND, None, None


def _setup_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    grads_BD, offsets_B1, values_ND, pooled_BD, ctx.mode, ctx.rows = inputs
    kept = () if values_ND is None else (grads_BD, values_ND, pooled_BD)
    ctx.save_for_backward(offsets_B1, *kept)


def _second_gradient(ctx: Any, grads_ND: Tensor) -> tuple[Any, ...]:
    offsets_B1, *kept = ctx.saved_tensors
    if not kept:
        return segment_reduce(grads_ND, offsets_B1, ctx.mode), *(None,) * 5
    grads_BD, values_ND, pooled_BD = kept
    once_BD = share_of(torch.ones_like(pooled_BD), pooled_BD)
    sums_BD = segment_reduce(grads_ND * values_ND, offsets_B1, "sum")
    share_BD = grads_BD * once_BD
    shares_ND = segment_reduce_backward(share_BD, offsets_B1, None, None, "sum", ctx.rows)
    return (
        sums_BD * once_BD,
        None,
        grads_ND * shares_ND,
        -sums_BD * share_BD * once_BD,
        None,
        None,
    )


segment_reduce = operator(
    "segment_reduce(Tensor values_ND, Tensor offsets_B1, str mode) -> Tensor",
    reference=_reference_reduce,
    core=_core_reduce,
    triton="segments:reduce",
    fake=lambda values, offsets, mode: values.new_empty(offsets.shape[0] - 1, values.shape[1]),
    check=lambda values, offsets, mode: checks.read_offsets(
        f"segment_{mode}", offsets, values.shape[0]
    ),
    backward=_reduce_gradient,
    setup=_setup_reduce,
)

segment_reduce_backward = operator(
    "segment_reduce_backward(Tensor grads_BD, Tensor offsets_B1, Tensor? values_ND, "
    "Tensor? pooled_BD, str mode, SymInt rows) -> Tensor",
    reference=_reference_reduce_backward,
    core=_core_reduce_backward,
    triton="segments:reduce_backward",
    fake=lambda grads, offsets, values, pooled, mode, rows: grads.new_empty(rows, grads.shape[1]),
    backward=_second_gradient,
    setup=_setup_backward,
)


def _core_first_n(rows_ND: Tensor, offsets_B1: Tensor, length: int) -> Tensor:
    rows_ND, offsets_B1 = rows_ND.contiguous(), offsets_B1.contiguous()
    (rows, dim), segments = rows_ND.shape, offsets_B1.shape[0] - 1
    out_BLD = fresh(segments, length, dim, dtype=rows_ND.dtype)
    _run_first_n(rows_ND, offsets_B1, out_BLD, rows, length, False)
    return out_BLD


def _core_first_n_backward(grads_BLD: Tensor, offsets_B1: Tensor, rows: int) -> Tensor:
    grads_BLD, offsets_B1 = grads_BLD.contiguous(), offsets_B1.contiguous()
    out_ND = fresh(rows, grads_BLD.shape[2], dtype=grads_BLD.dtype)
    _run_first_n(grads_BLD, offsets_B1, out_ND, rows, grads_BLD.shape[1], True)
    return out_ND


def _run_first_n(
    source: Tensor, offsets_B1: Tensor, out: Tensor, rows: int, length: int, back: bool
) -> None:
    bad = _core.segment_first_n(
        address(source),
        address(offsets_B1),
        address(out),
        offsets_B1.shape[0] - 1,
        rows,
        length,
        out.shape[-1] * out.element_size(),
        back,
        torch.get_num_threads(),
    )
    if bad >= 0:
        raise checks.bad_offset("segment_first_n", offsets_B1, rows, bad)


def _reference_first_n_backward(grads_BLD: Tensor, offsets_B1: Tensor, rows: int) -> Tensor:
    ids_N = reference.row_ids(offsets_B1, rows)
    steps_N = torch.arange(rows, device=ids_N.device) - offsets_B1[ids_N]
    kept_N = steps_N < grads_BLD.shape[1]
    grads_ND = grads_BLD[ids_N, steps_N.where(kept_N, 0)]
    return grads_ND.masked_fill(~kept_N.unsqueeze(1), 0)


def _setup_first_n(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows_ND, offsets_B1, _length = inputs
    ctx.rows = rows_ND.shape[0]
    ctx.save_for_backward(offsets_B1)


def _setup_first_n_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    grads_BLD, offsets_B1, _rows = inputs
    ctx.length = grads_BLD.shape[1]
    ctx.save_for_backward(offsets_B1)


def _first_n_gradient(ctx: Any, grads_BLD: Tensor) -> tuple[Any, ...]:
    return _first_n_backward(grads_BLD, ctx.saved_tensors[0], ctx.rows), None, None


def _first_n_second_gradient(ctx: Any, grads_ND: Tensor) -> tuple[Any, ...]:
    return _first_n(grads_ND, ctx.saved_tensors[0], ctx.length), None, None


_first_n = operator(
    "segment_first_n(Tensor rows_ND, Tensor offsets_B1, SymInt length) -> Tensor",
    reference=reference.segment_first_n,
    core=_core_first_n,
    triton="segments:first_n",
    fake=lambda rows, offsets, length: rows.new_empty(offsets.shape[0] - 1, length, rows.shape[1]),
    check=lambda rows, offsets, length: checks.read_offsets(
        "segment_first_n", offsets, rows.shape[0]
    ),
    backward=_first_n_gradient,
    setup=_setup_first_n,
)

_first_n_backward = operator(
    "segment_first_n_backward(Tensor grads_BLD, Tensor offsets_B1, SymInt rows) -> Tensor",
    reference=_reference_first_n_backward,
    core=_core_first_n_backward,
    triton="segments:first_n_backward",
    fake=lambda grads, offsets, rows: grads.new_empty(rows, grads.shape[2]),
    backward=_first_n_second_gradient,
    setup=_setup_first_n_backward,
)


def _core_row_ids(offsets_B1: Tensor, rows: int) -> Tensor:
    offsets_B1 = offsets_B1.contiguous()
    ids_N = fresh(max(rows, 0), dtype=torch.int64)
    bad = _core.segment_row_ids(
        address(offsets_B1),
        address(ids_N),
        offsets_B1.shape[0] - 1,
        rows,
        torch.get_num_threads(),
    )
    if bad >= 0:
        raise checks.bad_offset("row_ids", offsets_B1, rows, bad)
    return ids_N


_row_ids = operator(
    "row_ids(Tensor offsets_B1, SymInt rows) -> Tensor",
    reference=reference.row_ids,
    core=_core_row_ids,
    triton="segments:row_ids",
    fake=lambda offsets, rows: offsets.new_empty(rows),
    check=lambda offsets, rows: checks.read_offsets("row_ids", offsets, rows),
)
