"""Checks of the values in a `LayoutIndex`, run by operators: they read tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.errors import InputError, ShapeError, describe

__all__ = ["check_layout"]

_OP = "fused_embedding_to_layout"


def check_layout(
    buffers: Sequence[Tensor] | Sequence[int],
    rows_N: Tensor,
    buffer_N: Tensor,
    cell_splits: Tensor,
    cells: Tensor,
    features: Tensor,
    slices: Tensor,
    sums: Tensor,
    batch_sizes: Sequence[int] | None = None,
    *_: object,
) -> None:
    """Raise for offsets, cells or rows out of range. `buffers` may be their numbers of floats.

    Raises:
        ShapeError: cell_splits that do not start at 0, fall, or do not end at the number of ids.
        InputError: cells that do not exist or are too few, a buffer that does not exist, or a row
            that leaves its buffer.
    """
    _check_splits(cell_splits.cpu(), rows_N.shape[0])
    sizes = [b if isinstance(b, int) else b.numel() for b in buffers]
    cells_RF, own_F6 = cells.cpu(), features.cpu()
    _check_cells(cells_RF, cell_splits.shape[0] - 1, batch_sizes)
    for request in cells_RF:
        _check_rows(rows_N.cpu(), buffer_N.cpu(), cell_splits.cpu(), request, own_F6, sizes)


def _check_splits(splits: Tensor, count: int) -> None:
    what = f"{_OP}: cell_splits_C1"
    if int(splits[0]) != 0:
        raise _bad(ShapeError, f"{what}[0]", int(splits[0]), 0)
    falls = (splits[1:] < splits[:-1]).nonzero()
    if falls.numel():
        at = int(falls[0]) + 1
        allowed = f"at least {int(splits[at - 1])}, the one before"
        raise _bad(ShapeError, f"{what}[{at}]", int(splits[at]), allowed)
    if int(splits[-1]) != count:
        allowed = f"{count}, the number of ids"
        raise _bad(ShapeError, f"{what}[-1]", int(splits[-1]), allowed)


def _check_cells(cells: Tensor, total: int, batch_sizes: Sequence[int] | None) -> None:
    sizes = [None] * cells.shape[0] if batch_sizes is None else batch_sizes
    for request, size in zip(range(cells.shape[0]), sizes, strict=True):
        first, count, shared = cells[request].unbind(1)
        wrong = (first < 0) | (count < 0) | (first > total - count)
        if size is not None:
            wrong |= (count != 0) & (count != torch.where(shared != 0, 1, size))
        if bool(wrong.any()):
            feature = int(wrong.nonzero()[0])
            cell, many = int(first[feature]), int(count[feature])
            what = f"{_OP}: cells of feature {feature} of request {request}"
            wanted = "none, or one" if bool(shared[feature]) else f"none, or {size}"
            allowed = f"{wanted}, within the {total} cells"
            raise _bad(InputError, what, f"{many} from cell {cell}", allowed)


def _check_rows(
    rows_N: Tensor,
    buffer_N: Tensor,
    splits: Tensor,
    cells_F3: Tensor,
    features_F: Tensor,
    sizes: Sequence[int],
) -> None:
    """Rows of ids that a feature with slices reads must lie in their buffers."""
    sizes_M = torch.tensor(sizes, dtype=torch.int64, device="cpu")
    reach_N = torch.full_like(rows_N, -1)
    for row, (cell, count, _) in zip(features_F.tolist(), cells_F3.tolist(), strict=True):
        if count and row[0] < row[1]:
            reach_N[int(splits[cell]) : int(splits[cell + count])] = row[5]
    read_N = reach_N >= 0
    missing = (read_N & ((buffer_N < 0) | (buffer_N >= len(sizes)))).nonzero()
    if missing.numel():
        at = int(missing[0])
        what = f"{_OP}: buffer_N[{at}], the buffer of an id"
        raise _bad(InputError, what, int(buffer_N[at]), f"0..{len(sizes) - 1}")
    room_N = sizes_M[torch.where(read_N, buffer_N, 0).long()] - reach_N
    outside = (read_N & ((rows_N < 0) | (rows_N > room_N))).nonzero()
    if outside.numel():
        at = int(outside[0])
        what = f"{_OP}: rows_N[{at}], the place of a row of {int(reach_N[at])} floats"
        allowed = f"0..{int(room_N[at])} in buffer {int(buffer_N[at])}"
        raise _bad(InputError, what, int(rows_N[at]), allowed)


def _bad(kind: type[InputError], what: str, got: object, allowed: object) -> InputError:
    remedy = "Pass the offsets that were made with these rows."
    return kind(describe(what, got=got, allowed=allowed, remedy=remedy))
