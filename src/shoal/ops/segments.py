"""Segments of rows, by offsets or by index, of one table or many: sums, means, norms, first rows.

Segment b is rows `offsets_B1[b]:offsets_B1[b+1]`, of the rows as they lie or of an order of them.
An index (the segment of each row, in any order) is made offsets and an order first. On the CPU a
sorted index is noticed and costs one look at it; an unsorted one is put in order by a stable
counting sort. On CUDA an index is sorted unless `indices_sorted` says that it is; neither waits
for the device.

Rows are added in order, so results depend neither on threads nor on the batch around a segment; but
on CUDA a whole chunk of 1,024 rows, counted from the batch's first, that one segment holds is
summed by itself. float16 and bfloat16 are added in float32. Values of offsets and of an index are
checked on the CPU, and on CUDA under `set_bounds_checks`.

Sums of many tables are one launch on CUDA; addresses travel from pinned memory, so nothing
waits for the device. Capturing these calls in a CUDA graph is not supported.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shoal._core import ops as core
from shoal.address import address
from shoal.errors import ShapeError
from shoal.ops import checks
from shoal.ops.dispatch import by_core, fresh, linear, operator, widened

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
    return _reduced("sum", rows_ND, offsets_B1)


def segment_mean(rows_ND: Tensor, offsets_B1: Tensor) -> Tensor:
    """Mean of each segment's rows; an empty segment gives zeros, not NaN.

    rows_ND floating [N, D], offsets_B1 int64 [B+1] -> [B, D]. Gradient: the segment's over its
    number of rows.

    Raises:
        ShapeError, DTypeError, InputError: as `segment_sum`.
    """
    return _reduced("mean", rows_ND, offsets_B1)


def segment_sqrtn(rows_ND: Tensor, offsets_B1: Tensor) -> Tensor:
    """Sum of each segment's rows over the square root of their number; empty gives zeros.

    rows_ND floating [N, D], offsets_B1 int64 [B+1] -> [B, D]. Gradient: the segment's over the
    square root of its number of rows.

    Raises:
        ShapeError, DTypeError, InputError: as `segment_sum`.
    """
    return _reduced("sqrtn", rows_ND, offsets_B1)


def segment_l2(rows_ND: Tensor, offsets_B1: Tensor) -> Tensor:
    """Square root of each segment's sum of squares, by column.

    rows_ND floating [N, D], offsets_B1 int64 [B+1] -> [B, D]. Gradient: g*x/y, and 0 where y
    is 0.

    Raises:
        ShapeError, DTypeError, InputError: as `segment_sum`.
    """
    return _reduced("l2", rows_ND, offsets_B1)


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
    return _reduced_by("reduce_sum", "sum", indices_M1, values_MD, length, indices_sorted)


def reduce_mean(
    indices_M1: Tensor, values_MD: Tensor, length: checks.Length, *, indices_sorted: bool = False
) -> Tensor:
    """Mean of the values of each index. Monolith: `reduce_mean`.

    An index without values gives zeros (Monolith: NaN). Shapes and errors as `reduce_sum`.
    Gradient: the index's over its number of values.
    """
    return _reduced_by("reduce_mean", "mean", indices_M1, values_MD, length, indices_sorted)


def reduce_sqrtn(
    indices_M1: Tensor, values_MD: Tensor, length: checks.Length, *, indices_sorted: bool = False
) -> Tensor:
    """L2 norm, by column, of the values of each index. Monolith: `reduce_sqrtn`.

    The name is Monolith's, and what it computes is sqrt(sum of x*x); the usual sum/sqrt(n) is
    `reduce_mean_sqrtn`. Shapes and errors as `reduce_sum`. Gradient: g*x/y, and 0 where y is 0.
    """
    return _reduced_by("reduce_sqrtn", "l2", indices_M1, values_MD, length, indices_sorted)


def reduce_mean_sqrtn(
    indices_M1: Tensor, values_MD: Tensor, length: checks.Length, *, indices_sorted: bool = False
) -> Tensor:
    """Sum of the values of each index over the square root of their number.

    Zeros for an index without values. Shapes and errors as `reduce_sum`. Gradient: the index's
    over the square root of its number of values.
    """
    return _reduced_by("reduce_mean_sqrtn", "sqrtn", indices_M1, values_MD, length, indices_sorted)


def segment_offsets(indices_M: Tensor, length: int) -> Tensor:
    """Offsets of sorted indices: [0, 0, 2] and 3 give [0, 2, 2, 3].

    indices_M int64 [M], length B -> int64 [B+1], no gradient. The inverse of `row_ids`.

    Raises:
        ShapeError: indices not [M], or a negative length.
        DTypeError: indices not int64.
        InputError: an index out of range, or not sorted.
    """
    checks.check_ids("segment_offsets", "indices", indices_M)
    checks.check_length("segment_offsets", length, least=0)
    return _grouped(indices_M, length, True, "segment_offsets")[0]


def fused_sorted_segment_sum(
    indices: Sequence[Tensor], values: Sequence[Tensor], shapes: Sequence[Sequence[int]]
) -> list[Tensor]:
    """Sum of the values of each sorted index, for several tables. Monolith's of this name.

    For each table k: indices int64 [M], never falling, values floating [M, D], shape (B, D) ->
    [B, D], zeros where there is no value. One dtype and device for all. Gradient: each value gets
    its index's.

    Raises:
        ShapeError: lists of different lengths, or shapes other than these.
        DTypeError: values not floating or of several dtypes, or indices not int64.
        InputError: on two devices, an index out of range, or not sorted.
    """
    op = "fused_sorted_segment_sum"
    if not checks.check_lists(op, indices=indices, values=values, shapes=shapes):
        return []
    index = [checks.check_grouped(op, i, v) for i, v in zip(indices, values, strict=True)]
    for k, (shape, rows_MD) in enumerate(zip(shapes, values, strict=True)):
        if len(shape) != 2 or shape[1] != rows_MD.shape[1] or shape[0] < 0:
            allowed = f"(B, {rows_MD.shape[1]})"
            raise ShapeError(
                f"{op}: shape {k}", got=tuple(shape), allowed=allowed, remedy="Keep the columns."
            )
    checks.check_same_dtype(op, "tables", values)
    checks.check_devices(op, tables=values)
    offsets = _sorted_offsets(index, [shape[0] for shape in shapes], op)
    widths = [rows_MD.shape[1] for rows_MD in values]
    parts = [1] * len(widths)
    return list(_segment_sums(list(values), offsets, None, None, widths, parts, op))


def fused_reduce_sum_and_split(
    indices_M1: Tensor,
    values_MD: Tensor,
    length: checks.Length,
    split_dims: Sequence[int],
    *,
    indices_sorted: bool = False,
) -> list[Tensor]:
    """`reduce_sum`, its columns split. Monolith: `fused_reduce_sum_and_split`.

    indices_M1 int64 [M] or [M, 1], values_MD floating [M, D], length B or [B], split_dims that
    sum to D -> one contiguous [B, s] for each s. Gradient: each value gets its index's.

    Raises:
        ShapeError: shapes other than these, or split_dims that do not sum to D.
        DTypeError, InputError: as `reduce_sum`.
    """
    op = "fused_reduce_sum_and_split"
    index_M = checks.check_grouped(op, indices_M1, values_MD)
    size = checks.length_of(op, length)
    checks.check_widths(op, split_dims, values_MD.shape[1])
    offsets_B1, order_M = _grouped(index_M, size, indices_sorted, op)
    widths = list(split_dims)
    return list(
        _segment_sums([values_MD], [offsets_B1], order_M, index_M, widths, [len(widths)], op)
    )


def fused_reduce_and_split_gpu(
    splits: Sequence[Tensor], embeddings: Sequence[Tensor], slice_dims: Sequence[Sequence[int]]
) -> list[Tensor]:
    """Segment sums of several tables, their columns split, on CPU and CUDA alike.

    For each table k: splits int64 [B+1] (row splits), embeddings floating [N, D], slice_dims that
    sum to D -> one contiguous [B, s] for each s, all tables in one flat list. One dtype and device
    for all. Gradient: each row gets its segment's. Monolith: `fused_reduce_and_split_gpu`, which
    keeps its splits on the CPU; here they lie with the embeddings.

    Raises:
        ShapeError: lists of different lengths, shapes other than these, or splits that do not
            rise from 0 to N.
        DTypeError: embeddings not floating or of several dtypes, or splits not int64.
        InputError: on two devices.
    """
    op = "fused_reduce_and_split_gpu"
    if not checks.check_lists(op, splits=splits, embeddings=embeddings, slice_dims=slice_dims):
        return []
    for offsets_B1, rows_ND, widths in zip(splits, embeddings, slice_dims, strict=True):
        checks.check_segments(op, rows_ND, offsets_B1)
        checks.check_widths(op, widths, rows_ND.shape[1])
    checks.check_same_dtype(op, "tables", embeddings)
    checks.check_devices(op, tables=embeddings)
    flat = [width for widths in slice_dims for width in widths]
    parts = [len(widths) for widths in slice_dims]
    return list(_segment_sums(list(embeddings), list(splits), None, None, flat, parts, op))


def _reduced(mode: str, rows_ND: Tensor, offsets_B1: Tensor) -> Tensor:
    checks.check_segments(f"segment_{mode}", rows_ND, offsets_B1)
    return segment_reduce(rows_ND, offsets_B1, None, None, mode)  # type: ignore[no-any-return]


def _reduced_by(
    op: str,
    mode: str,
    indices_M1: Tensor,
    values_MD: Tensor,
    length: checks.Length,
    indices_sorted: bool,
) -> Tensor:
    index_M = checks.check_grouped(op, indices_M1, values_MD)
    size = checks.length_of(op, length)
    return _index_reduce(values_MD, index_M, size, indices_sorted, mode, op)[0]  # type: ignore[no-any-return]


def _grouped(
    index_M: Tensor, length: int, indices_sorted: bool, op: str
) -> tuple[Tensor, Tensor | None]:
    """Offsets of an index, and the order of its rows; none where they are said to be sorted."""
    offsets_B1, order_M = _group_index(index_M, length, indices_sorted, op)
    return offsets_B1, None if indices_sorted else order_M


def _core_group(
    index_M: Tensor, length: int, indices_sorted: bool, op: str
) -> tuple[Tensor, Tensor]:
    index_M, offsets_B1 = index_M.contiguous(), fresh(length + 1, dtype=torch.int64)
    order_M = fresh(0 if indices_sorted else index_M.shape[0], dtype=torch.int64)
    order = 0 if indices_sorted else address(order_M)
    sizes, threads = (index_M.shape[0], length), torch.get_num_threads()
    bad = core.group_index(address(index_M), address(offsets_B1), order, *sizes, threads)
    if bad >= 0:
        raise checks.bad_segment_index(op, index_M, length, bad)
    return offsets_B1, order_M


def _core_offsets(indices: list[Tensor], lengths: list[int], op: str) -> list[Tensor]:
    return [
        _core_group(index_M, length, True, checks.table_of(op, k, indices))[0]
        for k, (index_M, length) in enumerate(zip(indices, lengths, strict=True))
    ]


# The order of a sorted index on the CPU begins with -1 and is not read.
_group_index = operator(
    "group_index(Tensor index_M, SymInt length, bool indices_sorted, str op) -> (Tensor, Tensor)",
    core=_core_group,
    triton="segments:group_index",
    fake=lambda index, length, in_order, op: (
        index.new_empty(length + 1),
        index.new_empty(0 if in_order else index.shape[0]),
    ),
    check=by_core(_core_group),
)

_sorted_offsets = operator(
    "sorted_offsets(Tensor[] indices, SymInt[] lengths, str op) -> Tensor[]",
    from_host=True,
    core=_core_offsets,
    triton="segments:sorted_offsets",
    fake=lambda indices, lengths, op: [
        index.new_empty(length + 1) for index, length in zip(indices, lengths, strict=True)
    ],
    check=by_core(_core_offsets),
)


def _run_core(
    op: str,
    mode: str,
    values: Sequence[Tensor],
    offsets: Sequence[Tensor],
    pooled: Sequence[Tensor],
    parts: Sequence[int],
    *,
    back: bool = False,
    also: Sequence[Tensor | None] = (None,) * 4,
) -> None:
    """Reduce values to what is pooled; or, going back, spread that to the values.

    also: an order, an index, and what L2 norms were made of and are.
    """
    cuts = [offsets_B1.contiguous() for offsets_B1 in offsets]
    table, bad = core.segments(
        back,
        MODES.index(mode),
        values[0].dtype == torch.float64,
        torch.get_num_threads(),
        [address(rows_ND) for rows_ND in values],
        [address(offsets_B1) for offsets_B1 in cuts],
        [offsets_B1.shape[0] - 1 for offsets_B1 in cuts],
        [rows_ND.shape[0] for rows_ND in values],
        [address(part) for part in pooled],
        [part.shape[1] for part in pooled],
        parts,
        *[0 if one is None else address(one) for one in also],
    )
    if bad >= 0 and (index := also[1]) is not None:
        raise checks.bad_segment_index(op, index, cuts[0].shape[0] - 1, bad)
    if bad >= 0:
        name = checks.table_of(op, table, values)
        raise checks.bad_offset(name, cuts[table], values[table].shape[0], bad)


def _core_reduce(values_ND: Tensor, offsets_B1: Tensor, *rest: Any) -> Tensor:
    order_N, _, mode = rest
    rows_ND = widened(values_ND)
    out_BD = fresh(offsets_B1.shape[0] - 1, rows_ND.shape[1], dtype=rows_ND.dtype)
    also = (order_N, None, None, None)
    _run_core(f"segment_{mode}", mode, [rows_ND], [offsets_B1], [out_BD], [1], also=also)
    return out_BD.to(values_ND.dtype)


def _core_spread(grads_BD: Tensor, offsets_B1: Tensor, *rest: Any) -> Tensor:
    *tensors, mode, rows = rest
    also = [None if one is None else widened(one) for one in tensors]
    wide_BD = widened(grads_BD)
    out_ND = fresh(rows, wide_BD.shape[1], dtype=wide_BD.dtype)
    given = [out_ND], [offsets_B1], [wide_BD], [1]
    _run_core(f"segment_{mode}", mode, *given, back=True, also=also)
    return out_ND.to(grads_BD.dtype)


def _share_of(grads_BD: Tensor, pooled_BD: Tensor) -> Tensor:
    """g/y of an L2 norm y, and 0 where y is 0."""
    return (grads_BD / pooled_BD).masked_fill(pooled_BD == 0, 0)


def _setup_reduce(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    values_ND, *segments, ctx.mode = inputs
    ctx.rows = values_ND.shape[0]
    kept = (values_ND, output) if ctx.mode == "l2" else (None, None)
    ctx.save_for_backward(*segments, *kept)


def _reduce_gradient(ctx: Any, grads_BD: Tensor) -> tuple[Any, ...]:
    return segment_spread(grads_BD, *ctx.saved_tensors, ctx.mode, ctx.rows), *(None,) * 4


def _setup_spread(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    grads_BD, *tensors, ctx.mode, ctx.rows = inputs
    ctx.save_for_backward(None if tensors[-1] is None else grads_BD, *tensors)


def _spread_gradient(ctx: Any, grads_ND: Tensor) -> tuple[Any, ...]:
    grads_BD, *segments, values_ND, pooled_BD = ctx.saved_tensors
    if grads_BD is None:
        return segment_reduce(grads_ND, *segments, ctx.mode), *(None,) * 7
    once_BD = _share_of(torch.ones_like(pooled_BD), pooled_BD)
    sums_BD = segment_reduce(grads_ND * values_ND, *segments, "sum")
    share_BD = grads_BD * once_BD
    shares_ND = segment_spread(share_BD, *segments, None, None, "sum", ctx.rows)
    by_pooled_BD = -sums_BD * share_BD * once_BD
    return sums_BD * once_BD, None, None, None, grads_ND * shares_ND, by_pooled_BD, None, None


def _check_reduce(
    values_ND: Tensor, offsets_B1: Tensor, order: Tensor | None, index: Tensor | None, mode: str
) -> None:
    if index is None:
        checks.read_offsets(f"segment_{mode}", offsets_B1, values_ND.shape[0])


segment_reduce = operator(
    "segment_reduce(Tensor values_ND, Tensor offsets_B1, Tensor? order_N, Tensor? index_N, "
    "str mode) -> Tensor",
    core=_core_reduce,
    triton="segments:reduce",
    fake=lambda values, offsets, *_: values.new_empty(offsets.shape[0] - 1, values.shape[1]),
    check=_check_reduce,
    gradient=(_reduce_gradient, _setup_reduce),
)

segment_spread = operator(
    "segment_spread(Tensor grads_BD, Tensor offsets_B1, Tensor? order_N, Tensor? index_N, "
    "Tensor? values_ND, Tensor? pooled_BD, str mode, SymInt rows) -> Tensor",
    core=_core_spread,
    triton="segments:spread",
    fake=lambda grads, *rest: grads.new_empty(rest[-1], grads.shape[1]),
    gradient=(_spread_gradient, _setup_spread),
)


def _core_index_reduce(
    values_ND: Tensor, index_N: Tensor, length: int, in_order: bool, mode: str, op: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Both as one call, so that an index costs no operator of its own."""
    offsets_B1, order_N = _core_group(index_N, length, in_order, op)
    order = None if in_order else order_N
    return _core_reduce(values_ND, offsets_B1, order, index_N, mode), offsets_B1, order_N


def _setup_index_reduce(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    values_ND, index_N, _, in_order, ctx.mode, _ = inputs
    pooled_BD, offsets_B1, order_N = output
    ctx.rows = values_ND.shape[0]
    kept = (values_ND, pooled_BD) if ctx.mode == "l2" else (None, None)
    ctx.save_for_backward(offsets_B1, None if in_order else order_N, index_N, *kept)


def _index_reduce_gradient(ctx: Any, grads_BD: Tensor, *_: Any) -> tuple[Any, ...]:
    return segment_spread(grads_BD, *ctx.saved_tensors, ctx.mode, ctx.rows), *(None,) * 5


_index_reduce = operator(
    "index_reduce(Tensor values_ND, Tensor index_N, SymInt length, bool indices_sorted, str mode, "
    "str op) -> (Tensor, Tensor, Tensor)",
    core=_core_index_reduce,
    triton="segments:index_reduce",
    fake=lambda values, index, length, in_order, mode, op: (
        values.new_empty(length, values.shape[1]),
        index.new_empty(length + 1),
        index.new_empty(0 if in_order else index.shape[0]),
    ),
    check=lambda values, index, length, in_order, mode, op: _core_group(
        index.cpu(), length, in_order, op
    ),
    gradient=(_index_reduce_gradient, _setup_index_reduce),
)


def _core_sums(values: list[Tensor], offsets: list[Tensor], *rest: Any) -> list[Tensor]:
    order_N, _, widths, parts, op = rest
    rows = [widened(rows_ND) for rows_ND in values]
    outs = [
        fresh(offsets[k].shape[0] - 1, width, dtype=rows[0].dtype)
        for k, width in zip(_owners(parts), widths, strict=True)
    ]
    _run_core(op, "sum", rows, offsets, outs, parts, also=(order_N, None, None, None))
    return [out.to(values[0].dtype) for out in outs]


def _core_sums_backward(
    grads: list[Tensor], offsets: list[Tensor], rows: list[int], parts: list[int], op: str
) -> list[Tensor]:
    wide = [widened(part) for part in grads]
    outs = [
        fresh(count, dim, dtype=wide[0].dtype)
        for count, dim in zip(rows, _dims(grads, parts), strict=True)
    ]
    _run_core(op, "sum", outs, offsets, wide, parts, back=True)
    return [out.to(grads[0].dtype) for out in outs]


def _owners(parts: Sequence[int]) -> list[int]:
    """The table of each part."""
    return [k for k, count in enumerate(parts) for _ in range(count)]


def _dims(parted: Sequence[Tensor], parts: Sequence[int]) -> list[int]:
    """Width of each table."""
    dims = [0] * len(parts)
    for k, part in zip(_owners(parts), parted, strict=True):
        dims[k] += part.shape[1]
    return dims


def _check_sums(values: list[Tensor], offsets: list[Tensor], *rest: Any) -> None:
    if rest[1] is not None:  # an index, which was checked as it was grouped
        return
    for k, (rows_ND, offsets_B1) in enumerate(zip(values, offsets, strict=True)):
        checks.read_offsets(checks.table_of(rest[-1], k, values), offsets_B1, rows_ND.shape[0])


def _sums_transposed(
    grads: list[Tensor], shapes: Sequence[torch.Size], offsets: list[Tensor], *rest: Any
) -> list[Tensor]:
    order_N, index_N, _, parts, op = rest
    rows = [shape[0] for shape in shapes]
    if index_N is None:
        return _segment_sums_backward(list(grads), offsets, rows, parts, op)  # type: ignore[no-any-return]
    joined_BD = torch.cat(list(grads), dim=1)
    return [segment_spread(joined_BD, offsets[0], order_N, index_N, None, None, "sum", rows[0])]


_segment_sums = operator(
    "segment_sums(Tensor[] values, Tensor[] offsets, Tensor? order_N, Tensor? index_N, "
    "SymInt[] widths, int[] parts, str op) -> Tensor[]",
    from_host=True,
    core=_core_sums,
    triton="segments:sums",
    fake=lambda values, offsets, order, index, widths, parts, op: [
        values[k].new_empty(offsets[k].shape[0] - 1, width)
        for k, width in zip(_owners(parts), widths, strict=True)
    ],
    check=_check_sums,
    gradient=linear(_sums_transposed),
)

_segment_sums_backward = operator(
    "segment_sums_backward(Tensor[] grads, Tensor[] offsets, SymInt[] rows, int[] parts, "
    "str op) -> Tensor[]",
    from_host=True,
    core=_core_sums_backward,
    triton="segments:sums_backward",
    fake=lambda grads, offsets, rows, parts, op: [
        grads[0].new_empty(count, dim) for count, dim in zip(rows, _dims(grads, parts), strict=True)
    ],
    gradient=linear(
        lambda grads, shapes, offsets, _, parts, op: _segment_sums(
            list(grads), offsets, None, None, [shape[1] for shape in shapes], parts, op
        )
    ),
)


def _core_first_n(source: Tensor, offsets_B1: Tensor, length: int, rows: int, back: bool) -> Tensor:
    source, offsets_B1 = source.contiguous(), offsets_B1.contiguous()
    segments = offsets_B1.shape[0] - 1
    out = fresh(*_first_n_shape(source, segments, length, rows, back), dtype=source.dtype)
    places = address(source), address(offsets_B1), address(out)
    sizes = segments, rows, length, out.shape[-1] * out.element_size()
    bad = core.first_n(*places, *sizes, back, torch.get_num_threads())
    if bad >= 0:
        raise checks.bad_offset("segment_first_n", offsets_B1, rows, bad)
    return out


def _first_n_shape(
    source: Tensor, segments: int, length: int, rows: int, back: bool
) -> tuple[int, ...]:
    return (rows, source.shape[-1]) if back else (segments, length, source.shape[-1])


def _first_n_transposed(
    grads: Tensor, _: torch.Size, offsets_B1: Tensor, length: int, rows: int, back: bool
) -> Tensor:
    return _first_n(grads, offsets_B1, length, rows, not back)  # type: ignore[no-any-return]


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
    gradient=linear(_first_n_transposed),
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
