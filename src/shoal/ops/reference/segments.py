"""Plain-torch operations: differentiable, on any device and dtype, the oracle of the fast ones.

Segments are given by offsets: segment b is rows `offsets_B1[b]:offsets_B1[b+1]`. Rows are added
in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from shoal.errors import DTypeError, ShapeError, describe, unknown_name

__all__ = [
    "Dedup",
    "Layout",
    "dedup",
    "pooled_layout",
    "row_ids",
    "segment_first_n",
    "segment_l2",
    "segment_mean",
    "segment_sqrtn",
    "segment_sum",
]

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
        raise DTypeError(
            describe("dtype of ids", got=ids_N.dtype, allowed="int64", remedy="Call .long().")
        )
    if ids_N.ndim != 1:
        raise _shape_error("ids", tuple(ids_N.shape), "[N]", "Call .flatten().")
    ids_U, inverse_N, counts_U = torch.unique(ids_N, return_inverse=True, return_counts=True)
    places_N = torch.arange(ids_N.numel(), device=ids_N.device)
    first_U = torch.full_like(ids_U, ids_N.numel()).scatter_reduce(0, inverse_N, places_N, "amin")
    order_U = first_U.argsort()
    rank_U = torch.empty_like(order_U)
    rank_U[order_U] = torch.arange(order_U.numel(), device=ids_N.device)
    return Dedup(ids_U[order_U], counts_U[order_U], rank_U[inverse_N])


def row_ids(offsets_B1: Tensor) -> Tensor:
    """Segment of each row, int64 [N]: offsets [0, 2, 2, 3] give [0, 0, 2]."""
    lengths_B = offsets_B1.diff()
    segments_B = torch.arange(lengths_B.numel(), device=offsets_B1.device)
    return segments_B.repeat_interleave(lengths_B)


def segment_sum(rows_ND: Tensor, offsets_B1: Tensor) -> Tensor:
    """Sum of each segment's rows, [B, D]; an empty segment gives zeros.

    Raises:
        ShapeError: rows not [N, D], or N not the last offset.
    """
    _check_rows(rows_ND, offsets_B1)
    out_BD = rows_ND.new_zeros(offsets_B1.numel() - 1, rows_ND.shape[1])
    return out_BD.index_add(0, row_ids(offsets_B1), rows_ND)


def segment_mean(rows_ND: Tensor, offsets_B1: Tensor) -> Tensor:
    """Mean of each segment's rows, [B, D]; an empty segment gives zeros, not NaN.

    Raises:
        ShapeError: as `segment_sum`.
    """
    counts_B = offsets_B1.diff().clamp(min=1).to(rows_ND.dtype)
    return segment_sum(rows_ND, offsets_B1) / counts_B.unsqueeze(1)


def segment_sqrtn(rows_ND: Tensor, offsets_B1: Tensor) -> Tensor:
    """Sum of each segment's rows over the square root of their number, [B, D]; empty gives zeros.

    Raises:
        ShapeError: as `segment_sum`.
    """
    counts_B = offsets_B1.diff().clamp(min=1).to(rows_ND.dtype)
    return segment_sum(rows_ND, offsets_B1) / counts_B.sqrt().unsqueeze(1)


def segment_l2(rows_ND: Tensor, offsets_B1: Tensor) -> Tensor:
    """Square root of each segment's sum of squares, by column, [B, D].

    Monolith calls this reduce_sqrtn. The gradient is x/y, and 0 where y is 0.

    Raises:
        ShapeError: as `segment_sum`.
    """
    squares_BD = segment_sum(rows_ND * rows_ND, offsets_B1)
    zero_BD = squares_BD == 0
    return squares_BD.masked_fill(zero_BD, 1).sqrt().masked_fill(zero_BD, 0)


def segment_first_n(rows_ND: Tensor, offsets_B1: Tensor, length: int) -> Tensor:
    """First `length` rows of each segment, [B, length, D], zero padded.

    Raises:
        ShapeError: as `segment_sum`, or length below 1.
    """
    _check_rows(rows_ND, offsets_B1)
    if length < 1:
        raise _shape_error("length", length, "1 or more", "Use a sum to pool whole segments.")
    steps_L = torch.arange(length, device=rows_ND.device)
    places_BL = offsets_B1[:-1].unsqueeze(1) + steps_L
    inside_BL = places_BL < offsets_B1[1:].unsqueeze(1)
    padded_ND = torch.cat([rows_ND, rows_ND.new_zeros(1, rows_ND.shape[1])])
    return padded_ND[places_BL.where(inside_BL, rows_ND.shape[0])]


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


def _check_rows(rows_ND: Tensor, offsets_B1: Tensor) -> None:
    if rows_ND.ndim != 2 or offsets_B1.ndim != 1 or offsets_B1.numel() < 1:
        got = (tuple(rows_ND.shape), tuple(offsets_B1.shape))
        raise _shape_error("rows and offsets", got, "[N, D] and [B+1]", "One row per id.")
    if rows_ND.device.type == "cpu" and int(offsets_B1[-1]) != rows_ND.shape[0]:
        got_rows, allowed = rows_ND.shape[0], f"{int(offsets_B1[-1])}, the last offset"
        raise _shape_error("number of rows", got_rows, allowed, "Give one row per id.")


def _shape_error(what: str, got: object, allowed: str, remedy: str) -> ShapeError:
    return ShapeError(describe(what, got=got, allowed=allowed, remedy=remedy))
