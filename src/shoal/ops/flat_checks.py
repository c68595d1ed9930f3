"""What the flat-buffer operations refuse; see `shoal.ops.rows_checks`."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from shoal.address import check_dense
from shoal.errors import InputError, ShapeError, describe
from shoal.ops.id_checks import check_ids
from shoal.ops.rows_checks import bad_index, check_rows, refuse

__all__ = [
    "bad_flat_offset",
    "check_dims",
    "check_flat",
    "check_flat_offsets",
    "check_gradients",
    "check_map_values",
    "map_error",
]

_REMEDY = "Use the offsets that were made for this buffer."


def check_dims(op: str, name: str, dims: Sequence[int]) -> None:
    """Require widths of 1 or more.

    Raises:
        ShapeError: one is less.
    """
    for k, dim in enumerate(dims):
        if dim < 1:
            raise refuse(f"{op}: {name}[{k}]", dim, "1 or more", "Leave empty tables out.")


def check_flat(op: str, name: str, flat_E: Tensor) -> None:
    """Require one dimension.

    Raises:
        ShapeError: there are others.
    """
    check_dense(f"{op}: {name}", flat_E)
    if flat_E.ndim != 1:
        raise refuse(f"{op}: {name}", tuple(flat_E.shape), "[E]", "Call .flatten().")


def check_gradients(
    op: str, grads: Sequence[Tensor], offsets: Sequence[Tensor], dims: Sequence[int]
) -> None:
    """Require one gradient [n, dim] per list of n offsets.

    Raises:
        DTypeError, ShapeError: it is not so.
    """
    for k, (grad, offsets_N, dim) in enumerate(zip(grads, offsets, dims, strict=True)):
        check_ids(op, f"embedding_offsets[{k}]", offsets_N)
        check_rows(op, f"grads[{k}]", grad)
        if tuple(grad.shape) != (offsets_N.shape[0], dim):
            allowed = f"[{offsets_N.shape[0]}, {dim}]"
            raise refuse(f"{op}: grads[{k}]", tuple(grad.shape), allowed, "One row per offset.")


def bad_flat_offset(what: str, k: int, at: int, got: int, dim: int, size: int) -> InputError:
    """A row that leaves the flat buffer."""
    allowed = f"0 to {size - dim}, so that {dim} of {size} elements follow"
    if dim > size:
        allowed = f"none: the {size} elements hold no row of {dim}"
    return InputError(describe(f"{what}[{k}][{at}]", got=got, allowed=allowed, remedy=_REMEDY))


def check_flat_offsets(
    what: str, offsets: Sequence[Tensor], dims: Sequence[int], size: int
) -> None:
    """Require every row to lie inside the buffer.

    Raises:
        InputError: one does not; names the first.
    """
    for k, (offsets_N, dim) in enumerate(zip(offsets, dims, strict=True)):
        bad_N = (offsets_N < 0) | (offsets_N > size - dim)
        if bool(bad_N.any()):
            at = int(bad_N.int().argmax())
            raise bad_flat_offset(what, k, at, int(offsets_N[at]), dim, size)


def map_error(
    fault: int,
    at: int,
    positions_N: Tensor,
    offsets_V: Tensor,
    keys: int,
    length: int,
    size: int,
) -> InputError:
    """Words for a fault of an offset map, by the core's number."""
    op = "fill_with_offset_map"
    if fault == 3:
        return bad_index(f"{op}: pos.values", at, int(positions_N[at]), keys)
    if fault == 5:
        got, allowed = int(offsets_V[at]), f"a row inside the {size} elements of the buffer"
        what = f"{op}: value_offset values[{at}]"
        return InputError(describe(what, got=got, allowed=allowed, remedy=_REMEDY))
    if fault == 2:
        remedy = "Give the rows of pos, in its order, each as wide as its table."
        return refuse(f"{op}: length of value", length, f"{at}, rows of pos by dims", remedy)
    ends = positions_N.numel() if fault == 1 else offsets_V.numel()
    name = "pos.offsets_B1" if fault == 1 else "value_offset splits"
    allowed = f"0, never falling, {ends} at the end"
    return ShapeError(
        describe(f"{op}: {name}", got=f"a break at [{at}]", allowed=allowed, remedy=_REMEDY)
    )


def check_map_values(
    offset_map: Sequence[Tensor], dims: Sequence[int], length: int, size: int
) -> None:
    """Require a map (positions, splits, offsets, offset splits) that fits its value and its buffer.

    Raises:
        InputError: it does not; names the first fault.
    """
    positions_N, splits_K1, offsets_V, offset_splits_U1 = offset_map
    keys = offset_splits_U1.numel() - 1

    def fail(fault: int, at: int) -> InputError:
        return map_error(fault, at, positions_N, offsets_V, keys, length, size)

    bad = _broken_splits(splits_K1, positions_N.numel())
    if bad is not None:
        raise fail(1, bad)
    counts = splits_K1.diff().tolist()
    elements = sum(count * dim for count, dim in zip(counts, dims, strict=True))
    if elements != length:
        raise fail(2, elements)
    bad = _broken_splits(offset_splits_U1, offsets_V.numel())
    if bad is not None:
        raise fail(4, bad)
    offsets, offset_splits, row = offsets_V.tolist(), offset_splits_U1.tolist(), 0
    for count, dim in zip(counts, dims, strict=True):
        for key in positions_N[row : row + count].tolist():
            if not 0 <= key < keys:
                raise fail(3, row)
            for at in range(offset_splits[key], offset_splits[key + 1]):
                if not 0 <= offsets[at] <= size - dim:
                    raise fail(5, at)
            row += 1


def _broken_splits(splits: Tensor, end: int) -> int | None:
    edges = splits.tolist()
    if edges[0] != 0:
        return 0
    for i in range(1, len(edges)):
        if edges[i] < edges[i - 1]:
            return i
    return None if edges[-1] == end else len(edges) - 1
