"""What the row operations refuse: metadata before they are called, values inside them.

The compiled core finds bad values in its own pass and asks here for the words; the other
implementations run the checks below first.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.address import check_dense
from shoal.errors import DTypeError, InputError, ShapeError, describe
from shoal.ops.dispatch import one_device

__all__ = [
    "bad_index",
    "check_index_values",
    "check_lists",
    "check_match_values",
    "check_rows",
    "check_same_dtype",
    "floating",
    "missing_id",
    "refuse",
]


def refuse(what: str, got: object, allowed: object, remedy: str) -> ShapeError:
    """A `ShapeError` in the words of `describe`."""
    return ShapeError(describe(what, got=got, allowed=allowed, remedy=remedy))


def check_rows(op: str, name: str, tensor: Tensor) -> None:
    """Require two dimensions.

    Raises:
        ShapeError: it has others.
    """
    check_dense(f"{op}: {name}", tensor)
    if tensor.ndim != 2:
        raise refuse(f"{op}: {name}", tuple(tensor.shape), "[rows, D]", "Give one row per id.")


def floating(op: str, name: str, tensor: Tensor) -> None:
    """Require a floating dtype.

    Raises:
        DTypeError: it is another.
    """
    if not tensor.is_floating_point():
        raise DTypeError(
            describe(
                f"{op}: {name}",
                got=tensor.dtype,
                allowed="a floating dtype",
                remedy="Gradients and embeddings are floating: call .float().",
            )
        )


def check_same_dtype(op: str, name: str, tensors: Sequence[Tensor]) -> None:
    """Require one dtype.

    Raises:
        DTypeError: there are several.
    """
    for tensor in tensors:
        check_dense(f"{op}: {name}", tensor)
    dtypes = {str(tensor.dtype) for tensor in tensors}
    if len(dtypes) > 1:
        got, allowed = ", ".join(sorted(dtypes)), "one dtype"
        raise DTypeError(describe(f"{op}: {name}", got=got, allowed=allowed, remedy="Call .to()."))


def check_lists(op: str, **lists: Sequence[object]) -> None:
    """Require one length of all lists, and at least one entry.

    Raises:
        InputError: it is not so.
    """
    lengths = {name: len(entries) for name, entries in lists.items()}
    if len(set(lengths.values())) > 1 or 0 in lengths.values():
        raise InputError(
            describe(
                f"{op}: lengths of lists",
                got=", ".join(f"{name} {length}" for name, length in lengths.items()),
                allowed="one length for all, 1 or more",
                remedy="Give one entry of each per table.",
            )
        )


def check_devices(op: str, **tensors: Tensor | Sequence[Tensor]) -> None:
    """Require one device of all tensors.

    Raises:
        InputError: there are several.
    """
    named = {
        name if single else f"{name}[{i}]": tensor
        for name, entry in tensors.items()
        for single in [isinstance(entry, Tensor)]
        for i, tensor in enumerate([entry] if isinstance(entry, Tensor) else entry)
    }
    one_device(op, **named)


def missing_id(what: str, at: int, got: int) -> InputError:
    """An id that no row has."""
    return InputError(
        describe(
            f"{what}[{at}]",
            got=f"id {got}",
            allowed="an id that ids holds",
            remedy="Look up every id of the input, or drop this one.",
        )
    )


def bad_index(what: str, at: int, got: int, size: int) -> InputError:
    """An index or offset outside its range."""
    return InputError(
        describe(
            f"{what}[{at}]",
            got=got,
            allowed=f"0 to {size - 1}" if size > 0 else "none: there is nothing to name",
            remedy="Check what made the indices.",
        )
    )


def check_match_values(what: str, ids_M: Tensor, query_N: Tensor) -> None:
    """Require that every query has a row.

    Raises:
        InputError: one has none; names the first.
    """
    missing_N = torch.isin(query_N, ids_M, invert=True)
    if bool(missing_N.any()):
        at = int(missing_N.int().argmax())
        raise missing_id(what, at, int(query_N[at]))


def check_index_values(what: str, index_N: Tensor, size: int) -> None:
    """Require 0 <= index < size.

    Raises:
        InputError: one is outside; names the first.
    """
    bad_N = (index_N < 0) | (index_N >= size)
    if bool(bad_N.any()):
        at = int(bad_N.int().argmax())
        raise bad_index(what, at, int(index_N[at]), size)
