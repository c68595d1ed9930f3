"""Segments of rows given by the segment of each row, in any order: Monolith's reduce_*.

On the CPU a sorted index is noticed and costs one look at it; an unsorted one is put in order by
a stable counting sort. On CUDA an index is sorted unless `indices_sorted` says that it is; neither
waits for the device. Values of one index are added in their order, so results are the same bits
each time. Indices are checked on the CPU, and on CUDA under `set_bounds_checks`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shoal import _core
from shoal.address import address
from shoal.ops import checks
from shoal.ops.dispatch import fresh, operator
from shoal.ops.reference import rows as reference
from shoal.ops.segments import MODES, is_double, kept_alive, share_of, widened

_NAMES = {
    "sum": "reduce_sum",
    "mean": "reduce_mean",
    "sqrtn": "reduce_mean_sqrtn",
    "l2": "reduce_sqrtn",
}


def reduce_sum(
    indices_M1: Tensor, values_MD: Tensor, length: checks.Length, *, indices_sorted: bool = False
) -> Tensor:
    """Sum of the values of each index; zeros where there are none. Monolith: `reduce_sum`.

    indices_M1 int64 [M] or [M, 1], values_MD floating [M, D], length B or [B] -> [B, D].
    Gradient: each value gets its index's. `indices_sorted` promises that they never fall, which
    spares a sort on CUDA.

    Raises:
        ShapeError: shapes other than these.
        DTypeError: values not floating, or indices not int64.
        InputError: on two devices, an index out of range, or not sorted as promised.
    """
    return _grouped("sum", indices_M1, values_MD, length, indices_sorted)


def reduce_mean(
    indices_M1: Tensor, values_MD: Tensor, length: checks.Length, *, indices_sorted: bool = False
) -> Tensor:
    """Mean of the values of each index. Monolith: `reduce_mean`.

    An index without values gives zeros (Monolith: NaN). Shapes and errors as `reduce_sum`.
    Gradient: the index's over its number of values.
    """
    return _grouped("mean", indices_M1, values_MD, length, indices_sorted)


def reduce_sqrtn(
    indices_M1: Tensor, values_MD: Tensor, length: checks.Length, *, indices_sorted: bool = False
) -> Tensor:
    """L2 norm, by column, of the values of each index. Monolith: `reduce_sqrtn`.

    The name is Monolith's, and what it computes is sqrt(sum of x*x); the usual sum/sqrt(n) is
    `reduce_mean_sqrtn`. Shapes and errors as `reduce_sum`. Gradient: g*x/y, and 0 where y is 0.
    """
    return _grouped("l2", indices_M1, values_MD, length, indices_sorted)


def reduce_mean_sqrtn(
    indices_M1: Tensor, values_MD: Tensor, length: checks.Length, *, indices_sorted: bool = False
) -> Tensor:
    """Sum of the values of each index over the square root of their number.

    Zeros for an index without values. Shapes and errors as `reduce_sum`. Gradient: the index's
    over the square root of its number of values.
    """
    return _grouped("sqrtn", indices_M1, values_MD, length, indices_sorted)


def segment_offsets(indices_M: Tensor, length: int) -> Tensor:
    """Offsets of sorted indices: [0, 0, 2] and 3 give [0, 2, 2, 3].

    indices_M int64 [M], length B -> int64 [B+1], no gradient. The inverse of `row_ids`.

    Raises:
        ShapeError: indices not [M], or a negative length.
        DTypeError: indices not int64.
        InputError: an index out of range, or not sorted.
    """
    checks.check_index("segment_offsets", indices_M)
    checks.check_length("segment_offsets", length, least=0)
    return write_offsets([indices_M], [length], "segment_offsets")[0]  # type: ignore[no-any-return]


def _grouped(
    mode: str, indices_M1: Tensor, values_MD: Tensor, length: checks.Length, in_order: bool
) -> Tensor:
    op = _NAMES[mode]
    index_M = checks.check_grouped(op, indices_M1, values_MD)
    size = checks.length_of(op, length)
    return _index_reduce(values_MD, index_M, size, mode, in_order)  # type: ignore[no-any-return]


def _core_reduce(
    values_MD: Tensor, index_M: Tensor, length: int, mode: str, in_order: bool
) -> Tensor:
    (pooled_BD,) = _run_reduce(
        _NAMES[mode], values_MD, index_M, length, [values_MD.shape[1]], mode, in_order
    )
    return pooled_BD


def _run_reduce(
    op: str,
    values_MD: Tensor,
    index_M: Tensor,
    length: int,
    widths: Sequence[int],
    mode: str,
    in_order: bool,
) -> list[Tensor]:
    rows_MD, index_M = widened(values_MD), index_M.contiguous()
    outs = [fresh(length, width, dtype=rows_MD.dtype) for width in widths]
    bad, unsorted = _core.index_reduce(
        address(rows_MD),
        address(index_M),
        [address(out) for out in outs],
        list(widths),
        rows_MD.shape[0],
        length,
        MODES.index(mode),
        in_order,
        is_double(op, rows_MD.dtype),
        torch.get_num_threads(),
    )
    if bad >= 0 or unsorted >= 0:
        raise checks.bad_segment_index(op, index_M, length, bad if bad >= 0 else unsorted)
    return [out.to(values_MD.dtype) for out in outs]


def _core_reduce_backward(
    grads_BD: Tensor,
    index_M: Tensor,
    values_MD: Tensor | None,
    pooled_BD: Tensor | None,
    mode: str,
    in_order: bool,
) -> Tensor:
    return _run_backward(_NAMES[mode], [grads_BD], index_M, values_MD, pooled_BD, mode)


def _run_backward(
    op: str,
    grads: Sequence[Tensor],
    index_M: Tensor,
    values_MD: Tensor | None,
    pooled_BD: Tensor | None,
    mode: str,
) -> Tensor:
    wide, index_M = [widened(part) for part in grads], index_M.contiguous()
    inputs, pooled = kept_alive(values_MD), kept_alive(pooled_BD)
    widths, length = [part.shape[1] for part in wide], wide[0].shape[0]
    out_MD = fresh(index_M.shape[0], sum(widths), dtype=wide[0].dtype)
    bad = _core.index_reduce_backward(
        [address(part) for part in wide],
        widths,
        address(index_M),
        address(inputs),
        address(pooled),
        address(out_MD),
        index_M.shape[0],
        length,
        MODES.index(mode),
        is_double(op, out_MD.dtype),
        torch.get_num_threads(),
    )
    if bad >= 0:
        raise checks.bad_segment_index(op, index_M, length, bad)
    return out_MD.to(grads[0].dtype)


def _reference_reduce(
    values_MD: Tensor, index_M: Tensor, length: int, mode: str, in_order: bool
) -> Tensor:
    counts_B = torch.bincount(index_M, minlength=length)
    return reference.grouped(values_MD, index_M, counts_B, mode)


def _reference_reduce_backward(
    grads_BD: Tensor,
    index_M: Tensor,
    values_MD: Tensor | None,
    pooled_BD: Tensor | None,
    mode: str,
    in_order: bool,
) -> Tensor:
    if values_MD is not None and pooled_BD is not None:
        return values_MD * share_of(grads_BD, pooled_BD)[index_M]
    counts_B = torch.bincount(index_M, minlength=grads_BD.shape[0])
    over_B1 = reference.divisors(counts_B, mode).to(grads_BD.dtype).unsqueeze(1)
    return (grads_BD / over_B1)[index_M]


def _setup_reduce(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    values_MD, index_M, ctx.length, ctx.mode, ctx.in_order = inputs
    ctx.save_for_backward(index_M, *((values_MD, output) if ctx.mode == "l2" else ()))


def _reduce_gradient(ctx: Any, grads_BD: Tensor) -> tuple[Any, ...]:
    index_M, *kept = ctx.saved_tensors
    values_MD, pooled_BD = kept or (None, None)
    grads_MD = _index_reduce_backward(
        grads_BD, index_M, values_MD, pooled_BD, ctx.mode, ctx.in_order
    )
    return grads_MD, *(None,) * 4


def _setup_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    grads_BD, index_M, values_MD, pooled_BD, ctx.mode, ctx.in_order = inputs
    ctx.length = grads_BD.shape[0]
    kept = () if values_MD is None else (grads_BD, values_MD, pooled_BD)
    ctx.save_for_backward(index_M, *kept)


def _second_gradient(ctx: Any, grads_MD: Tensor) -> tuple[Any, ...]:
    index_M, *kept = ctx.saved_tensors
    if not kept:
        sums_BD = _index_reduce(grads_MD, index_M, ctx.length, ctx.mode, ctx.in_order)
        return sums_BD, *(None,) * 5
    grads_BD, values_MD, pooled_BD = kept
    once_BD = share_of(torch.ones_like(pooled_BD), pooled_BD)
    sums_BD = _index_reduce(grads_MD * values_MD, index_M, ctx.length, "sum", ctx.in_order)
    share_BD = grads_BD * once_BD
    shares_MD = _index_reduce_backward(share_BD, index_M, None, None, "sum", ctx.in_order)
    by_pooled_BD = -sums_BD * share_BD * once_BD
    return sums_BD * once_BD, None, grads_MD * shares_MD, by_pooled_BD, None, None


_index_reduce = operator(
    "index_reduce(Tensor values_MD, Tensor index_M, SymInt length, str mode, "
    "bool indices_sorted) -> Tensor",
    reference=_reference_reduce,
    core=_core_reduce,
    triton="segments:index_reduce",
    fake=lambda values, index, length, mode, in_order: values.new_empty(length, values.shape[1]),
    check=lambda values, index, length, mode, in_order: checks.read_index(
        _NAMES[mode], index, length, in_order
    ),
    backward=_reduce_gradient,
    setup=_setup_reduce,
)

_index_reduce_backward = operator(
    "index_reduce_backward(Tensor grads_BD, Tensor index_M, Tensor? values_MD, "
    "Tensor? pooled_BD, str mode, bool indices_sorted) -> Tensor",
    reference=_reference_reduce_backward,
    core=_core_reduce_backward,
    triton="segments:index_reduce_backward",
    fake=lambda grads, index, values, pooled, mode, in_order: grads.new_empty(
        index.shape[0], grads.shape[1]
    ),
    backward=_second_gradient,
    setup=_setup_backward,
)


def _core_sum_split(
    values_MD: Tensor, index_M: Tensor, length: int, widths: list[int], in_order: bool
) -> list[Tensor]:
    op = "fused_reduce_sum_and_split"
    return _run_reduce(op, values_MD, index_M, length, widths, "sum", in_order)


def _reference_sum_split(
    values_MD: Tensor, index_M: Tensor, length: int, widths: list[int], in_order: bool
) -> list[Tensor]:
    sums_BD = _reference_reduce(values_MD, index_M, length, "sum", in_order)
    return [part.clone() for part in torch.split(sums_BD, widths, dim=1)]


def _setup_split(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(inputs[1])


def _setup_split_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    grads, index_M = inputs
    ctx.length, ctx.widths = grads[0].shape[0], [part.shape[1] for part in grads]
    ctx.save_for_backward(index_M)


def _split_gradient(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    return _index_sum_split_backward(grads, ctx.saved_tensors[0]), *(None,) * 4


def _split_second_gradient(ctx: Any, grads_MD: Tensor) -> tuple[Any, ...]:
    index_M = ctx.saved_tensors[0]
    return index_sum_split(grads_MD, index_M, ctx.length, ctx.widths, False), None


index_sum_split = operator(
    "index_sum_split(Tensor values_MD, Tensor index_M, SymInt length, SymInt[] widths, "
    "bool indices_sorted) -> Tensor[]",
    from_host=True,
    reference=_reference_sum_split,
    core=_core_sum_split,
    triton="fused_segments:index_sum_split",
    fake=lambda values, index, length, widths, in_order: [
        values.new_empty(length, width) for width in widths
    ],
    check=lambda values, index, length, widths, in_order: checks.read_index(
        "fused_reduce_sum_and_split", index, length, in_order
    ),
    backward=_split_gradient,
    setup=_setup_split,
)

_index_sum_split_backward = operator(
    "index_sum_split_backward(Tensor[] grads, Tensor index_M) -> Tensor",
    reference=lambda grads, index: torch.cat(grads, dim=1)[index],
    core=lambda grads, index: _run_backward(
        "fused_reduce_sum_and_split", grads, index, None, None, "sum"
    ),
    triton="fused_segments:index_sum_split_backward",
    fake=lambda grads, index: grads[0].new_empty(
        index.shape[0], sum(part.shape[1] for part in grads)
    ),
    backward=_split_second_gradient,
    setup=_setup_split_backward,
)


def _core_offsets(indices: list[Tensor], lengths: list[int], op: str) -> list[Tensor]:
    outs = []
    for k, (index_M, length) in enumerate(zip(indices, lengths, strict=True)):
        index_M, offsets_B1 = index_M.contiguous(), fresh(length + 1, dtype=torch.int64)
        bad, unsorted = _core.segment_offsets(
            address(index_M),
            address(offsets_B1),
            index_M.shape[0],
            length,
            torch.get_num_threads(),
        )
        if bad >= 0 or unsorted >= 0:
            at = bad if bad >= 0 else unsorted
            raise checks.bad_segment_index(checks.table_of(op, k, indices), index_M, length, at)
        outs.append(offsets_B1)
    return outs


def _check_sorted(indices: list[Tensor], lengths: list[int], op: str) -> None:
    for k, (index_M, length) in enumerate(zip(indices, lengths, strict=True)):
        name = checks.table_of(op, k, indices)
        checks.read_index(name, index_M, length, indices_sorted=True)


write_offsets = operator(
    "segment_offsets(Tensor[] indices, SymInt[] lengths, str op) -> Tensor[]",
    from_host=True,
    reference=lambda indices, lengths, op: [
        reference.segment_offsets(index, length)
        for index, length in zip(indices, lengths, strict=True)
    ],
    core=_core_offsets,
    triton="fused_segments:segment_offsets",
    fake=lambda indices, lengths, op: [
        index.new_empty(length + 1) for index, length in zip(indices, lengths, strict=True)
    ],
    check=_check_sorted,
)
