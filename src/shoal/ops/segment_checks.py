"""What segment operations ask of their arguments: `check_*` read shapes, `read_*` read values."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.address import check_dense
from shoal.errors import DTypeError, InputError, ShapeError, describe
from shoal.ops.dispatch import one_device

__all__ = [
    "Length",
    "bad_index",
    "bad_offset",
    "check_grouped",
    "check_index",
    "check_length",
    "check_offsets",
    "check_rows",
    "check_widths",
    "length_of",
    "read_index",
    "read_offsets",
    "table_of",
]

Length = int | torch.SymInt | Sequence[int]


def check_rows(op: str, rows_ND: Tensor, offsets_B1: Tensor) -> None:
    """Rows [N, D] of a floating dtype and offsets int64 [B+1] on one device.

    Raises:
        ShapeError, DTypeError, InputError: they are not.
    """
    _check_values(op, "rows", rows_ND)
    check_offsets(op, offsets_B1)
    if rows_ND.device != offsets_B1.device:
        one_device(op, rows=rows_ND, offsets=offsets_B1)


def check_offsets(op: str, offsets_B1: Tensor) -> None:
    """Offsets int64 [B+1].

    Raises:
        ShapeError, DTypeError: they are not.
    """
    check_dense(f"{op}: offsets", offsets_B1)
    if offsets_B1.ndim != 1 or offsets_B1.shape[0] < 1:
        got = tuple(offsets_B1.shape)
        raise _shape(f"{op}: shape of offsets", got, "[B+1]", "Start them at 0, one more each.")
    _check_int64(op, "offsets", offsets_B1)


def check_grouped(op: str, indices_M1: Tensor, values_MD: Tensor) -> Tensor:
    """Indices int64 [M] or [M, 1] and values [M, D] of a floating dtype; the indices as [M].

    Raises:
        ShapeError, DTypeError, InputError: they are not.
    """
    _check_values(op, "values", values_MD)
    check_dense(f"{op}: indices", indices_M1)
    shape = tuple(indices_M1.shape)
    if len(shape) not in (1, 2) or (len(shape) == 2 and shape[1] != 1):
        remedy = "Give the row of the result for each value."
        raise _shape(f"{op}: shape of indices", shape, "[M] or [M, 1]", remedy)
    if shape[0] != values_MD.shape[0]:
        allowed = f"{values_MD.shape[0]}, the number of values"
        raise _shape(f"{op}: number of indices", shape[0], allowed, "Give one index per value.")
    _check_int64(op, "indices", indices_M1)
    if indices_M1.device != values_MD.device:
        one_device(op, indices=indices_M1, values=values_MD)
    return indices_M1.reshape(-1)


def check_index(op: str, index_M: Tensor) -> None:
    """Indices int64 [M].

    Raises:
        ShapeError, DTypeError: they are not.
    """
    check_dense(f"{op}: indices", index_M)
    if index_M.ndim != 1:
        remedy = "Call .flatten()."
        raise _shape(f"{op}: shape of indices", tuple(index_M.shape), "[M]", remedy)
    _check_int64(op, "indices", index_M)


def length_of(op: str, length: Length) -> int:
    """Rows of the result, from B or [B].

    Raises:
        ShapeError: more than one number, or negative.
    """
    if not isinstance(length, int | torch.SymInt):
        sizes = tuple(length)
        if len(sizes) != 1:
            remedy = "Give the number of rows of the result."
            raise _shape(f"{op}: length", sizes, "B or [B]", remedy)
        length = sizes[0]
    check_length(op, length, least=0)
    return length  # type: ignore[return-value]


def check_length(op: str, length: int | torch.SymInt, *, least: int) -> None:
    """A length of `least` or more.

    Raises:
        ShapeError: it is less.
    """
    if length < least:
        remedy = "Give the number of rows to keep." if least else "Give the number of segments."
        raise _shape(f"{op}: length", length, f"{least} or more", remedy)


def check_widths(op: str, widths: Sequence[int], dim: int) -> None:
    """One or more column widths that sum to the row's.

    Raises:
        ShapeError: they do not.
    """
    if not widths or min(widths) < 0 or sum(widths) != dim:
        allowed = f"one or more widths that sum to {dim}"
        raise _shape(f"{op}: split widths", list(widths), allowed, "Split the whole row.")


def read_offsets(op: str, offsets_B1: Tensor, rows: int) -> None:
    """Offsets that start at 0, never fall, and end at the number of rows.

    Raises:
        ShapeError: they do not.
    """
    cuts = offsets_B1.detach().cpu()
    wrong = (cuts[1:] < cuts[:-1]) | (cuts[1:] > rows)
    if int(cuts[0]) != 0:
        raise bad_offset(op, cuts, rows, 0)
    if int(cuts[-1]) != rows:
        raise bad_offset(op, cuts, rows, cuts.numel() - 1)
    if bool(wrong.any()):
        raise bad_offset(op, cuts, rows, int(wrong.nonzero()[0]) + 1)


def bad_offset(op: str, offsets_B1: Tensor, rows: int, at: int) -> ShapeError:
    """The error for the first offset that is not allowed."""
    got = int(offsets_B1[at])
    if at == 0 and got != 0:
        return _shape(f"{op}: first offset", got, "0", "Start offsets at 0.")
    if at == offsets_B1.numel() - 1 and got != rows:
        allowed = f"{got}, the last offset"
        return _shape(f"{op}: number of rows", rows, allowed, "Give one row per id.")
    before = int(offsets_B1[at - 1])
    allowed = f"{before} to {rows}" if before <= rows else f"at most {rows}"
    return _shape(f"{op}: offset {at}", got, allowed, "Offsets rise from 0 to the number of rows.")


def read_index(op: str, index_M: Tensor, length: int, indices_sorted: bool) -> None:
    """Indices from 0 to length-1, never falling if they are said to be sorted.

    Raises:
        InputError: they are not.
    """
    index = index_M.detach().cpu()
    outside = (index < 0) | (index >= length)
    if bool(outside.any()):
        raise bad_index(op, index, length, int(outside.nonzero()[0]))
    falls = index.diff() < 0
    if indices_sorted and bool(falls.any()):
        raise bad_index(op, index, length, int(falls.nonzero()[0]) + 1)


def bad_index(op: str, index_M: Tensor, length: int, at: int) -> InputError:
    """The error for the first index that is not allowed."""
    got = int(index_M[at])
    if 0 <= got < length:
        allowed = f"{int(index_M[at - 1])}, the index before, or more"
        remedy = "Sort the indices, with their values, or do not say that they are sorted."
    else:
        allowed = f"0 to {length - 1}" if length else "none: the result has no rows"
        remedy = "An index is a row of the result."
    return InputError(describe(f"{op}: index {at}", got=got, allowed=allowed, remedy=remedy))


def table_of(op: str, table: int, tables: Sequence[object]) -> str:
    """How a message names one of several tables of an operation."""
    return f"{op}, table {table}" if len(tables) > 1 else op


def _check_values(op: str, name: str, values_ND: Tensor) -> None:
    check_dense(f"{op}: {name}", values_ND)
    if values_ND.ndim != 2:
        got = tuple(values_ND.shape)
        raise _shape(f"{op}: shape of {name}", got, "[N, D]", "Give one row per id.")
    if not values_ND.is_floating_point():
        what = f"{op}: dtype of {name}"
        allowed = "float16, bfloat16, float32 or float64"
        raise DTypeError(
            describe(what, got=values_ND.dtype, allowed=allowed, remedy="Call .float().")
        )


def _check_int64(op: str, name: str, tensor: Tensor) -> None:
    if tensor.dtype != torch.int64:
        what = f"{op}: dtype of {name}"
        raise DTypeError(describe(what, got=tensor.dtype, allowed="int64", remedy="Call .long()."))


def _shape(what: str, got: object, allowed: str, remedy: str) -> ShapeError:
    return ShapeError(describe(what, got=got, allowed=allowed, remedy=remedy))
