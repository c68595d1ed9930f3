"""Rows by id, by index, by offset and by segment in plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def match_rows(ids_M: Tensor, query_N: Tensor) -> Tensor:
    """First row of each id, int64 [N]; -1 where there is none."""
    if ids_M.numel() == 0:
        return torch.full_like(query_N, -1)
    sorted_M, order_M = torch.sort(ids_M, stable=True)
    place = torch.searchsorted(sorted_M, query_N.contiguous()).clamp(max=ids_M.numel() - 1)
    return order_M[place].where(sorted_M[place] == query_N, -1)


def scatter_rows(grad_ND: Tensor, index_N: Tensor, rows: int) -> Tensor:
    """Sum of the gradients of each row, [rows, D], in order; halves are summed in float32."""
    wide_ND = _wide(grad_ND)
    return (
        wide_ND.new_zeros(rows, wide_ND.shape[1]).index_add(0, index_N, wide_ND).to(grad_ND.dtype)
    )


def gather_flat(flat_E: Tensor, offsets: Sequence[Tensor], dims: Sequence[int]) -> list[Tensor]:
    """Rows flat[offset : offset + dim], one [n_k, d_k] per list of offsets."""
    return [flat_E[_places(part, dim)] for part, dim in zip(offsets, dims, strict=True)]


def scatter_flat(
    grads: Sequence[Tensor], offsets: Sequence[Tensor], size: int, scale: float
) -> Tensor:
    """Flat [size]: the sum of all rows over each element, in order, times scale."""
    flat_E = _wide(grads[0].new_zeros(size))
    for grad, part in zip(grads, offsets, strict=True):
        places = _places(part, grad.shape[1]).flatten()
        flat_E = flat_E.index_add(0, places, grad.reshape(-1).to(flat_E.dtype))
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


def sum_offsets(buffer_E: Tensor, *offset_map: Any) -> Tensor:
    """Each value element = the sum of the buffer's over its places; halves in float32."""
    *tensors, length = offset_map
    source, target = offset_map_places(*tensors)
    wide_E = _wide(buffer_E)
    return wide_E.new_zeros(length).index_add(0, source, wide_E[target]).to(buffer_E.dtype)


def row_ids(offsets_B1: Tensor, rows: int | None = None) -> Tensor:
    """Segment of each row, int64 [N]: offsets [0, 2, 2, 3] give [0, 0, 2].

    rows: N, if known; else it is read from the offsets.
    """
    lengths_B = offsets_B1.diff()
    segments_B = torch.arange(lengths_B.numel(), device=offsets_B1.device)
    return segments_B.repeat_interleave(lengths_B, output_size=rows)


def segment_offsets(indices_M: Tensor, length: int) -> Tensor:
    """Offsets int64 [B+1] of sorted indices: [0, 0, 2] and 3 give [0, 2, 2, 3]."""
    return torch.searchsorted(indices_M, torch.arange(length + 1, device=indices_M.device))


def segment_first_n(rows_ND: Tensor, offsets_B1: Tensor, length: int) -> Tensor:
    """First `length` rows of each segment, [B, length, D], zero padded."""
    places_BL = offsets_B1[:-1].unsqueeze(1) + torch.arange(length, device=rows_ND.device)
    inside_BL = places_BL < offsets_B1[1:].unsqueeze(1)
    padded_ND = torch.cat([rows_ND, rows_ND.new_zeros(1, rows_ND.shape[1])])
    return padded_ND[places_BL.where(inside_BL, rows_ND.shape[0])]


def segment_pooled(rows_ND: Tensor, offsets_B1: Tensor, mode: str) -> Tensor:
    """Sum, mean, sqrtn or l2 of each segment's rows, [B, D]."""
    index_N = row_ids(offsets_B1, rows_ND.shape[0])
    return grouped(rows_ND, index_N, offsets_B1.diff(), mode)


def divisors(counts_B: Tensor, mode: str) -> Tensor:
    """What a sum of so many rows is divided by, float64."""
    counts_B = counts_B.clamp(min=1).double()
    return {"sum": counts_B.new_ones(1), "mean": counts_B, "sqrtn": counts_B.sqrt()}[mode]


def grouped(values_MD: Tensor, index_M: Tensor, counts_B: Tensor, mode: str) -> Tensor:
    """Rows added in order into the row of their index; half precision is added in float32."""
    wide_MD = _wide(values_MD)
    terms_MD = wide_MD * wide_MD if mode == "l2" else wide_MD
    sums_BD = wide_MD.new_zeros(counts_B.numel(), wide_MD.shape[1]).index_add(0, index_M, terms_MD)
    if mode == "l2":
        zero_BD = sums_BD == 0
        sums_BD = sums_BD.masked_fill(zero_BD, 1).sqrt().masked_fill(zero_BD, 0)
    else:
        sums_BD = sums_BD / divisors(counts_B, mode).to(sums_BD.dtype).unsqueeze(1)
    return sums_BD.to(values_MD.dtype)


def _wide(values: Tensor) -> Tensor:
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


def _places(offsets: Tensor, dim: int) -> Tensor:
    return offsets.unsqueeze(1) + torch.arange(dim, device=offsets.device)


def _spans(first_N: Tensor, length_N: Tensor) -> Tensor:
    """first[0], first[0]+1, .. (length[0] of them), first[1], .."""
    total = length_N.sum()
    before_N = length_N.cumsum(0) - length_N
    within = torch.arange(int(total), device=first_N.device) - before_N.repeat_interleave(length_N)
    return first_N.repeat_interleave(length_N) + within
