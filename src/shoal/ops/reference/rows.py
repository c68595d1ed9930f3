"""Rows by id, by index and by segment in plain torch: the oracle of the fast operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from shoal.errors import DTypeError, ShapeError, unknown_name
from shoal.ops.checks import (
    Length,
    check_grouped,
    check_length,
    check_match_values,
    check_offsets,
    check_segments,
    check_widths,
    length_of,
    read_index,
    read_offsets,
)
from shoal.ragged import Ragged


class GatheredRows(NamedTuple):
    """embeddings [*input.shape, D]; index_mapping int64, shaped as the input: row of each id."""

    embeddings: Tensor
    index_mapping: Tensor


def match_rows(
    ids_M: Tensor, query: Tensor, *, missing_ok: bool = False, multi_threads: bool = True
) -> Tensor:
    """First row of each id, int64 shaped as `query`; -1 where there is none, if that is allowed."""
    if not missing_ok:
        check_match_values("match_rows: query", ids_M, query.flatten())
    if ids_M.numel() == 0:
        return torch.full_like(query, -1)
    sorted_M, order_M = torch.sort(ids_M, stable=True)
    place = torch.searchsorted(sorted_M, query.contiguous()).clamp(max=ids_M.numel() - 1)
    return order_M[place].where(sorted_M[place] == query, -1)


def gather_rows(rows: Tensor | Sequence[Tensor], index: Tensor) -> Tensor:
    """Rows by index, [*index.shape, D]; several arrays are numbered through."""
    rows_MD = rows if isinstance(rows, Tensor) else torch.cat(list(rows))
    return rows_MD[index]


def scatter_rows(grad: Tensor, index: Tensor, rows: int) -> Tensor:
    """Sum of the gradients of each row, [rows, D], in order; halves are summed in float32."""
    width = grad.shape[-1]
    wide = grad.float() if grad.dtype in (torch.float16, torch.bfloat16) else grad
    sums_MD = wide.new_zeros(rows, width)
    flat_ND = wide.reshape(index.numel(), width)
    return sums_MD.index_add(0, index.flatten(), flat_ND).to(grad.dtype)


def map_id_to_embedding(
    ids: Sequence[Tensor],
    embeddings: Sequence[Tensor],
    input: Tensor,
    use_multi_threads: bool = True,
) -> Tensor:
    """Row of the first of `ids` that equals each id of the input, [*input.shape, D]."""
    return gather_rows(embeddings, match_rows(torch.cat(list(ids)), input))


def map_id_to_embedding_gradient_back_prop(
    ids: Sequence[Tensor], input: Tensor, grads: Tensor
) -> list[Tensor]:
    """Gradients of the rows that `map_id_to_embedding` read, one [M, D] per entry of `ids`."""
    index = match_rows(torch.cat(list(ids)), input)
    sizes = [part.numel() for part in ids]
    return list(torch.split(scatter_rows(grads, index, sum(sizes)), sizes))


def gather_embeddings_by_input(
    ids: Tensor, embeddings: Tensor, input: Tensor, use_multi_threads: bool = True
) -> GatheredRows:
    """Rows by id, and which they are."""
    index = match_rows(ids, input)
    return GatheredRows(embeddings[index], index)


def gather_embeddings_by_ids_gradient_back_prop(
    ids: Tensor, grads: Tensor, index_mapping: Tensor
) -> Tensor:
    """Gradient [M, D] of the rows that `gather_embeddings_by_input` read."""
    return scatter_rows(grads, index_mapping, ids.numel())


def fused_gather_embeddings_by_input(
    fused_embeddings: Tensor,
    fused_embedding_offsets: Sequence[Tensor],
    embedding_dims: Sequence[int],
) -> list[Tensor]:
    """Rows flat[offset : offset + dim], one [n_k, d_k] per list of offsets."""
    pairs = zip(fused_embedding_offsets, embedding_dims, strict=True)
    return [fused_embeddings[_places(offsets, dim)] for offsets, dim in pairs]


def fused_gather_embeddings_by_input_gradient(
    size: int | Tensor,
    grads: Sequence[Tensor],
    embedding_offsets: Sequence[Tensor],
    embedding_dims: Sequence[int],
    scale: float = 1.0,
) -> Tensor:
    """Flat [size]: the sum of all rows over each element, in order, times scale."""
    length = size.numel() if isinstance(size, Tensor) else size
    half = grads[0].dtype in (torch.float16, torch.bfloat16)
    flat_E = grads[0].new_zeros(length, dtype=torch.float32 if half else None)
    for grad, offsets, dim in zip(grads, embedding_offsets, embedding_dims, strict=True):
        flat_E = flat_E.index_add(
            0, _places(offsets, dim).flatten(), grad.reshape(-1).to(flat_E.dtype)
        )
    return (flat_E * scale).to(grads[0].dtype)


def offset_map_places(
    positions_N: Tensor,
    splits_K1: Tensor,
    offsets_V: Tensor,
    offset_splits_U1: Tensor,
    dims: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """Elements of the value and of the buffer that an offset map pairs, int64 [pairs] each."""
    dims_K = torch.tensor(dims, dtype=torch.int64, device=positions_N.device)
    width_N = dims_K.repeat_interleave(splits_K1.diff())
    start_N = width_N.cumsum(0) - width_N
    counts_N = offset_splits_U1.diff()[positions_N]
    first_N = offset_splits_U1[positions_N]
    width_V = width_N.repeat_interleave(counts_N)
    offset_V = offsets_V[_spans(first_N, counts_N)]
    source = _spans(start_N.repeat_interleave(counts_N), width_V)
    return source, _spans(offset_V, width_V)


def fill_with_offset_map(
    pos: Ragged,
    value: Tensor,
    value_offset: tuple[Tensor, Tensor],
    value_buffer: Tensor,
    dims: Sequence[int],
) -> Tensor:
    """Copy each row of the value to all offsets of its key, in the buffer."""
    source, target = offset_map_places(pos.values, pos.offsets_B1, *value_offset, dims)
    value_buffer[target] = value[source]
    return value_buffer


def finalize_shared_tensor(
    shared_tensor_handles: Sequence[Tensor], dtype: torch.dtype, shape: Sequence[int]
) -> Tensor:
    """The shared buffer in a shape."""
    return shared_tensor_handles[0].view(*shape)


def aligned_flat_concat(
    tensors: Sequence[Tensor], scale: float = 1.0, *, alignment_bytes: int = 256
) -> Tensor:
    """All elements in one flat buffer, each tensor at an aligned start, zeros between."""
    unit = alignment_bytes // tensors[0].element_size()
    parts = [torch.nn.functional.pad(t.flatten(), (0, -t.numel() % unit)) for t in tensors]
    return torch.cat(parts) * scale


def aligned_flat_split(
    tensors: Sequence[Tensor], flat: Tensor, *, alignment_bytes: int = 256
) -> list[Tensor]:
    """Parts of a flat buffer, shaped as the tensors it was made of."""
    unit = alignment_bytes // flat.element_size()
    parts, start = [], 0
    for tensor in tensors:
        parts.append(flat[start : start + tensor.numel()].view(tensor.shape))
        start += tensor.numel() + -tensor.numel() % unit
    return parts


def _places(offsets: Tensor, dim: int) -> Tensor:
    return offsets.unsqueeze(1) + torch.arange(dim, device=offsets.device)


def _spans(first_N: Tensor, length_N: Tensor) -> Tensor:
    """first[0], first[0]+1, .. (length[0] of them), first[1], .."""
    total = length_N.sum()
    before_N = length_N.cumsum(0) - length_N
    within = torch.arange(int(total), device=first_N.device) - before_N.repeat_interleave(length_N)
    return first_N.repeat_interleave(length_N) + within


Layout = Literal["none", "concat", "stack", "addn"]
LAYOUTS = ("none", "concat", "stack", "addn")


class Dedup(NamedTuple):
    """Distinct ids in order of first appearance.

    ids_U int64 [U]; counts_U int64 [U], occurrences of each; inverse_N int64 [N] with
    `ids_U[inverse_N] == ids_N`.
    """

    ids_U: Tensor
    counts_U: Tensor
    inverse_N: Tensor


def dedup(ids_N: Tensor) -> Dedup:
    """Distinct ids of int64 [N], in order of first appearance.

    Raises:
        DTypeError: not int64.
        ShapeError: not one-dimensional.
    """
    if ids_N.dtype != torch.int64:
        raise DTypeError("dtype of ids", got=ids_N.dtype, allowed="int64", remedy="Call .long().")
    if ids_N.ndim != 1:
        raise _shape_error("ids", tuple(ids_N.shape), "[N]", "Call .flatten().")
    ids_U, inverse_N, counts_U = torch.unique(ids_N, return_inverse=True, return_counts=True)
    places_N = torch.arange(ids_N.numel(), device=ids_N.device)
    first_U = torch.full_like(ids_U, ids_N.numel()).scatter_reduce(0, inverse_N, places_N, "amin")
    order_U = first_U.argsort()
    rank_U = torch.empty_like(order_U)
    rank_U[order_U] = torch.arange(order_U.numel(), device=ids_N.device)
    return Dedup(ids_U[order_U], counts_U[order_U], rank_U[inverse_N])


def row_ids(offsets_B1: Tensor, rows: int | None = None) -> Tensor:
    """Segment of each row, int64 [N]: offsets [0, 2, 2, 3] give [0, 0, 2].

    rows: N, if known; else it is read from the offsets.
    """
    check_offsets("row_ids", offsets_B1)
    if offsets_B1.device.type == "cpu":
        read_offsets("row_ids", offsets_B1, int(offsets_B1[-1]) if rows is None else rows)
    lengths_B = offsets_B1.diff()
    segments_B = torch.arange(lengths_B.numel(), device=offsets_B1.device)
    return segments_B.repeat_interleave(lengths_B, output_size=rows)


def segment_offsets(indices_M: Tensor, length: int) -> Tensor:
    """Offsets int64 [B+1] of sorted indices: [0, 0, 2] and 3 give [0, 2, 2, 3].

    Raises:
        InputError: an index out of range, or not sorted.
    """
    if indices_M.device.type == "cpu":
        read_index("segment_offsets", indices_M, length, indices_sorted=True)
    bounds_B1 = torch.arange(length + 1, device=indices_M.device)
    return torch.searchsorted(indices_M, bounds_B1)


def segment_sum(rows_ND: Tensor, offsets_B1: Tensor) -> Tensor:
    """Sum of each segment's rows, [B, D]; an empty segment gives zeros.

    Raises:
        ShapeError: rows not [N, D], or N not the last offset.
    """
    return _reduced("segment_sum", rows_ND, offsets_B1)


def segment_mean(rows_ND: Tensor, offsets_B1: Tensor) -> Tensor:
    """Mean of each segment's rows, [B, D]; an empty segment gives zeros, not NaN.

    Raises:
        ShapeError: as `segment_sum`.
    """
    return _reduced("segment_mean", rows_ND, offsets_B1)


def segment_sqrtn(rows_ND: Tensor, offsets_B1: Tensor) -> Tensor:
    """Sum of each segment's rows over the square root of their number, [B, D]; empty gives zeros.

    Raises:
        ShapeError: as `segment_sum`.
    """
    return _reduced("segment_sqrtn", rows_ND, offsets_B1)


def segment_l2(rows_ND: Tensor, offsets_B1: Tensor) -> Tensor:
    """Square root of each segment's sum of squares, by column, [B, D].

    Monolith calls this reduce_sqrtn. The gradient is x/y, and 0 where y is 0.

    Raises:
        ShapeError: as `segment_sum`.
    """
    return _reduced("segment_l2", rows_ND, offsets_B1)


def segment_first_n(rows_ND: Tensor, offsets_B1: Tensor, length: int) -> Tensor:
    """First `length` rows of each segment, [B, length, D], zero padded.

    Raises:
        ShapeError: as `segment_sum`, or length below 1.
    """
    _check("segment_first_n", rows_ND, offsets_B1)
    check_length("segment_first_n", length, least=1)
    steps_L = torch.arange(length, device=rows_ND.device)
    places_BL = offsets_B1[:-1].unsqueeze(1) + steps_L
    inside_BL = places_BL < offsets_B1[1:].unsqueeze(1)
    padded_ND = torch.cat([rows_ND, rows_ND.new_zeros(1, rows_ND.shape[1])])
    return padded_ND[places_BL.where(inside_BL, rows_ND.shape[0])]


def reduce_sum(
    indices_M1: Tensor, values_MD: Tensor, length: Length, *, indices_sorted: bool = False
) -> Tensor:
    """Sum of the values of each index, [B, D]; zeros where there are none."""
    return _grouped("reduce_sum", "sum", indices_M1, values_MD, length, indices_sorted)


def reduce_mean(
    indices_M1: Tensor, values_MD: Tensor, length: Length, *, indices_sorted: bool = False
) -> Tensor:
    """Mean of the values of each index, [B, D]; zeros, not NaN, where there are none."""
    return _grouped("reduce_mean", "mean", indices_M1, values_MD, length, indices_sorted)


def reduce_sqrtn(
    indices_M1: Tensor, values_MD: Tensor, length: Length, *, indices_sorted: bool = False
) -> Tensor:
    """Square root of the sum of squares of the values of each index, [B, D]: an L2 norm."""
    return _grouped("reduce_sqrtn", "l2", indices_M1, values_MD, length, indices_sorted)


def reduce_mean_sqrtn(
    indices_M1: Tensor, values_MD: Tensor, length: Length, *, indices_sorted: bool = False
) -> Tensor:
    """Sum of the values of each index over the square root of their number, [B, D]."""
    return _grouped("reduce_mean_sqrtn", "sqrtn", indices_M1, values_MD, length, indices_sorted)


def pooled_layout(layout: Layout, slices: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Lay pooled slices out as a model reads them.

    Slices are [B, D] each or [B, L, D] each. "none": as they are, one output per slice;
    "concat": [B, sum D] or [B, L, sum D]; "stack": [B, n, D] or [B, n, L, D]; "addn": their sum
    [B, D].

    Raises:
        UnknownName: no such layout.
        ShapeError: no slices, shapes the layout cannot join, or "addn" of sequences.
    """
    if layout not in LAYOUTS:
        raise unknown_name("layout", layout, LAYOUTS)
    shapes = [tuple(part.shape) for part in slices]
    joined = {shape[:-1] for shape in shapes} if layout == "concat" else set(shapes)
    if not shapes or len(shapes[0]) not in (2, 3):
        raise _shape_error(f"slices of {layout}", shapes, "[B, D] or [B, L, D]", "Pool them first.")
    if layout == "none":
        return tuple(slices)
    if len(joined) > 1:
        allowed = "equal shapes" if layout != "concat" else "shapes equal but for D"
        raise _shape_error(f"slices of {layout}", shapes, allowed, "Use layout 'none'.")
    if layout == "concat":
        return (torch.cat(list(slices), dim=-1),)
    if layout == "stack":
        return (torch.stack(list(slices), dim=1),)
    if len(shapes[0]) == 3:
        raise _shape_error("slices of addn", shapes, "[B, D]", "Pool sequences before adding.")
    return (torch.stack(list(slices)).sum(dim=0),)


def pooled(sums_BD: Tensor, counts_B: Tensor, mode: str) -> Tensor:
    """What `mode` makes of sums (of squares, for l2) and the number of rows in each."""
    if mode == "l2":
        zero_BD = sums_BD == 0
        return sums_BD.masked_fill(zero_BD, 1).sqrt().masked_fill(zero_BD, 0)
    return sums_BD / divisors(counts_B, mode).to(sums_BD.dtype).unsqueeze(1)


def divisors(counts_B: Tensor, mode: str) -> Tensor:
    """What a sum of so many rows is divided by, float64."""
    counts_B = counts_B.clamp(min=1).double()
    return {"sum": counts_B.new_ones(1), "mean": counts_B, "sqrtn": counts_B.sqrt()}[mode]


def grouped(values_MD: Tensor, index_M: Tensor, counts_B: Tensor, mode: str) -> Tensor:
    """Rows added in order into the row of their index; half precision is added in float32."""
    wide_MD = values_MD.float() if values_MD.dtype in (torch.float16, torch.bfloat16) else values_MD
    terms_MD = wide_MD * wide_MD if mode == "l2" else wide_MD
    zeros_BD = wide_MD.new_zeros(counts_B.numel(), wide_MD.shape[1])
    return pooled(zeros_BD.index_add(0, index_M, terms_MD), counts_B, mode).to(values_MD.dtype)


def _reduced(op: str, rows_ND: Tensor, offsets_B1: Tensor) -> Tensor:
    _check(op, rows_ND, offsets_B1)
    mode = op.removeprefix("segment_")
    return grouped(rows_ND, row_ids(offsets_B1, rows_ND.shape[0]), offsets_B1.diff(), mode)


def _grouped(
    op: str, mode: str, indices_M1: Tensor, values_MD: Tensor, length: Length, in_order: bool
) -> Tensor:
    index_M, size = check_grouped(op, indices_M1, values_MD), length_of(op, length)
    if index_M.device.type == "cpu":
        read_index(op, index_M, size, in_order)
    return grouped(values_MD, index_M, torch.bincount(index_M, minlength=size), mode)


def _check(op: str, rows_ND: Tensor, offsets_B1: Tensor) -> None:
    check_segments(op, rows_ND, offsets_B1)
    if rows_ND.device.type == "cpu":
        read_offsets(op, offsets_B1, rows_ND.shape[0])


def _shape_error(what: str, got: object, allowed: str, remedy: str) -> ShapeError:
    return ShapeError(what, got=got, allowed=allowed, remedy=remedy)


def fused_sorted_segment_sum(
    indices: Sequence[Tensor], values: Sequence[Tensor], shapes: Sequence[Sequence[int]]
) -> list[Tensor]:
    """Sum of the values of each sorted index, one [B, D] for each table."""
    return [
        reduce_sum(index_M, values_MD, shape[0], indices_sorted=True)
        for index_M, values_MD, shape in zip(indices, values, shapes, strict=True)
    ]


def fused_reduce_sum_and_split(
    indices_M1: Tensor,
    values_MD: Tensor,
    length: Length,
    split_dims: Sequence[int],
    *,
    indices_sorted: bool = False,
) -> list[Tensor]:
    """`reduce_sum`, its columns split: one [B, s] for each s of split_dims."""
    check_widths("fused_reduce_sum_and_split", split_dims, values_MD.shape[1])
    sums_BD = reduce_sum(indices_M1, values_MD, length, indices_sorted=indices_sorted)
    return list(torch.split(sums_BD, list(split_dims), dim=1))


def fused_reduce_and_split_gpu(
    splits: Sequence[Tensor], embeddings: Sequence[Tensor], slice_dims: Sequence[Sequence[int]]
) -> list[Tensor]:
    """Segment sums of several tables, their columns split, in one flat list."""
    return [
        part
        for offsets_B1, rows_ND, widths in zip(splits, embeddings, slice_dims, strict=True)
        for part in torch.split(segment_sum(rows_ND, offsets_B1), list(widths), dim=1)
    ]
