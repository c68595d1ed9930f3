"""Segment sums of many tables, split by columns: the oracle of the fused ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.ops.reference.segments import reduce_sum, segment_sum
from shoal.ops.segment_checks import Length, check_widths

__all__ = [
    "fused_reduce_and_split_gpu",
    "fused_reduce_sum_and_split",
    "fused_sorted_segment_sum",
]


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
