"""Segment sums of many tables in one call, split by columns on the way out.

On CUDA one launch serves all tables; addresses travel from page-locked memory, so nothing waits
for the device. Capturing these calls in a CUDA graph is not supported.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shoal import _core
from shoal.address import address
from shoal.errors import DTypeError, ShapeError
from shoal.ops import checks
from shoal.ops.dispatch import fresh, one_device, operator
from shoal.ops.indexed_segments import index_sum_split, write_offsets
from shoal.ops.reference import rows as reference
from shoal.ops.segments import is_double, widened


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
    _check_lists(op, indices=indices, values=values, shapes=shapes)
    if not values:
        return []
    index = [checks.check_grouped(op, i, v) for i, v in zip(indices, values, strict=True)]
    for k, (shape, rows_MD) in enumerate(zip(shapes, values, strict=True)):
        if len(shape) != 2 or shape[1] != rows_MD.shape[1] or shape[0] < 0:
            allowed = f"(B, {rows_MD.shape[1]})"
            raise ShapeError(
                f"{op}: shape {k}", got=tuple(shape), allowed=allowed, remedy="Keep the columns."
            )
    _check_alike(op, values)
    offsets = write_offsets(index, [shape[0] for shape in shapes], op)
    widths = [rows_MD.shape[1] for rows_MD in values]
    return list(fused_segment_sum(list(values), offsets, widths, [1] * len(widths), op))


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
    return list(index_sum_split(values_MD, index_M, size, list(split_dims), indices_sorted))


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
    _check_lists(op, splits=splits, embeddings=embeddings, slice_dims=slice_dims)
    if not embeddings:
        return []
    for offsets_B1, rows_ND, widths in zip(splits, embeddings, slice_dims, strict=True):
        checks.check_segments(op, rows_ND, offsets_B1)
        checks.check_widths(op, widths, rows_ND.shape[1])
    _check_alike(op, embeddings)
    flat = [width for widths in slice_dims for width in widths]
    parts = [len(widths) for widths in slice_dims]
    return list(fused_segment_sum(list(embeddings), list(splits), flat, parts, op))


def _check_lists(op: str, **lists: Sequence[Any]) -> None:
    counts = {name: len(values) for name, values in lists.items()}
    if len(set(counts.values())) > 1:
        remedy = "Give one of each for every table."
        raise ShapeError(f"{op}: lengths", got=counts, allowed="equal", remedy=remedy)


def _check_alike(op: str, values: Sequence[Tensor]) -> None:
    if len({rows_ND.dtype for rows_ND in values}) > 1:
        got = sorted({str(rows_ND.dtype) for rows_ND in values})
        allowed = "one dtype for all tables"
        raise DTypeError(f"{op}: dtypes", got=got, allowed=allowed, remedy="Cast them.")
    if len({rows_ND.device for rows_ND in values}) > 1:
        one_device(op, **{f"table {k}": rows_ND for k, rows_ND in enumerate(values)})


def _core_sum(
    values: list[Tensor], offsets: list[Tensor], widths: list[int], parts: list[int], op: str
) -> list[Tensor]:
    rows = [widened(rows_ND) for rows_ND in values]
    owners = [k for k, count in enumerate(parts) for _ in range(count)]
    outs = [
        fresh(offsets[k].shape[0] - 1, width, dtype=rows[0].dtype)
        for k, width in zip(owners, widths, strict=True)
    ]
    _run(_core.fused_segment_sum, rows, offsets, outs, parts, op)
    same = rows[0].dtype == values[0].dtype
    return outs if same else [out.to(values[0].dtype) for out in outs]


def _core_sum_backward(
    grads: list[Tensor], offsets: list[Tensor], rows: list[int], parts: list[int], op: str
) -> list[Tensor]:
    wide, first = [widened(part) for part in grads], 0
    outs = []
    for count, parts_of_table in zip(rows, parts, strict=True):
        dim = sum(part.shape[1] for part in wide[first : first + parts_of_table])
        outs.append(fresh(count, dim, dtype=wide[0].dtype))
        first += parts_of_table
    _run(_core.fused_segment_sum_backward, outs, offsets, wide, parts, op)
    same = wide[0].dtype == grads[0].dtype
    return outs if same else [out.to(grads[0].dtype) for out in outs]


def _run(
    kernel: Any,
    rows: list[Tensor],
    offsets: list[Tensor],
    pooled: list[Tensor],
    parts: list[int],
    op: str,
) -> None:
    cuts = [offsets_B1.contiguous() for offsets_B1 in offsets]
    table, bad = kernel(
        [address(rows_ND) for rows_ND in rows],
        [address(offsets_B1) for offsets_B1 in cuts],
        [offsets_B1.shape[0] - 1 for offsets_B1 in cuts],
        [rows_ND.shape[0] for rows_ND in rows],
        [address(part) for part in pooled],
        [part.shape[1] for part in pooled],
        parts,
        is_double(op, rows[0].dtype),
        torch.get_num_threads(),
    )
    if bad >= 0:
        name = checks.table_of(op, table, rows)
        raise checks.bad_offset(name, cuts[table], rows[table].shape[0], bad)


def _reference_sum(
    values: list[Tensor], offsets: list[Tensor], widths: list[int], parts: list[int], op: str
) -> list[Tensor]:
    outs, first = [], 0
    for rows_ND, offsets_B1, count in zip(values, offsets, parts, strict=True):
        sums_BD = reference.segment_sum(rows_ND, offsets_B1)
        parts_BD = torch.split(sums_BD, widths[first : first + count], dim=1)
        outs += [part_BD.clone() for part_BD in parts_BD]
        first += count
    return outs


def _reference_sum_backward(
    grads: list[Tensor], offsets: list[Tensor], rows: list[int], parts: list[int], op: str
) -> list[Tensor]:
    outs, first = [], 0
    for offsets_B1, count, number in zip(offsets, rows, parts, strict=True):
        grads_BD = torch.cat(grads[first : first + number], dim=1)
        outs.append(grads_BD[reference.row_ids(offsets_B1, count)])
        first += number
    return outs


def _fake_sum(
    values: list[Tensor], offsets: list[Tensor], widths: list[int], parts: list[int], op: str
) -> list[Tensor]:
    owners = [k for k, count in enumerate(parts) for _ in range(count)]
    return [
        values[k].new_empty(offsets[k].shape[0] - 1, width)
        for k, width in zip(owners, widths, strict=True)
    ]


def _fake_sum_backward(
    grads: list[Tensor], offsets: list[Tensor], rows: list[int], parts: list[int], op: str
) -> list[Tensor]:
    outs, first = [], 0
    for count, number in zip(rows, parts, strict=True):
        dim = sum(part.shape[1] for part in grads[first : first + number])
        outs.append(grads[0].new_empty(count, dim))
        first += number
    return outs


def _check_sum(
    values: list[Tensor], offsets: list[Tensor], widths: list[int], parts: list[int], op: str
) -> None:
    for k, (rows_ND, offsets_B1) in enumerate(zip(values, offsets, strict=True)):
        checks.read_offsets(checks.table_of(op, k, values), offsets_B1, rows_ND.shape[0])


def _setup_sum(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    values, offsets, _widths, ctx.parts, ctx.op = inputs
    ctx.rows = [rows_ND.shape[0] for rows_ND in values]
    ctx.save_for_backward(*offsets)


def _setup_sum_backward(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    grads, offsets, _rows, ctx.parts, ctx.op = inputs
    ctx.widths = [part.shape[1] for part in grads]
    ctx.save_for_backward(*offsets)


def _sum_gradient(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    offsets = list(ctx.saved_tensors)
    values = _fused_segment_sum_backward(list(grads), offsets, ctx.rows, ctx.parts, ctx.op)
    return values, [None] * len(offsets), None, None, None


def _second_gradient(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    offsets = list(ctx.saved_tensors)
    sums = fused_segment_sum(list(grads), offsets, ctx.widths, ctx.parts, ctx.op)
    return sums, [None] * len(offsets), None, None, None


fused_segment_sum = operator(
    "fused_segment_sum(Tensor[] values, Tensor[] offsets, SymInt[] widths, int[] parts, str op) "
    "-> Tensor[]",
    from_host=True,
    reference=_reference_sum,
    core=_core_sum,
    triton="fused_segments:segment_sum",
    fake=_fake_sum,
    check=_check_sum,
    backward=_sum_gradient,
    setup=_setup_sum,
)

_fused_segment_sum_backward = operator(
    "fused_segment_sum_backward(Tensor[] grads, Tensor[] offsets, SymInt[] rows, int[] parts, "
    "str op) -> Tensor[]",
    from_host=True,
    reference=_reference_sum_backward,
    core=_core_sum_backward,
    triton="fused_segments:segment_sum_backward",
    fake=_fake_sum_backward,
    backward=_second_gradient,
    setup=_setup_sum_backward,
)
