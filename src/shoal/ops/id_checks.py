"""What every operation asks of int64 tensors, and the words it refuses them with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.address import check_dense
from shoal.errors import DTypeError, InputError, ShapeError, describe

__all__ = ["check_ids", "check_out", "shape_error", "value_error"]


def check_ids(op: str, name: str, tensor: Tensor, *, dims: Sequence[int] | None = (1,)) -> None:
    """Require int64 with one of these numbers of dimensions; None: with any.

    Raises:
        DTypeError, ShapeError: it is not so.
    """
    check_dense(f"{op}: {name}", tensor)
    if tensor.dtype != torch.int64:
        what, remedy = f"{op}: dtype of {name}", "Call .long()."
        raise DTypeError(describe(what, got=tensor.dtype, allowed="int64", remedy=remedy))
    if dims is not None and tensor.ndim not in dims:
        allowed = " or ".join(f"{ndim} dimension{'s' * (ndim > 1)}" for ndim in dims)
        raise shape_error(op, f"shape of {name}", tuple(tensor.shape), allowed)


def check_out(op: str, name: str, out: Tensor, *shape: int) -> None:
    """Require a contiguous int64 tensor of this shape to write to.

    Raises:
        DTypeError, ShapeError: it is not so.
    """
    check_ids(op, name, out, dims=(len(shape),))
    if out.shape != shape or not out.is_contiguous():
        got = f"{tuple(out.shape)}, strides {tuple(out.stride())}"
        raise shape_error(op, f"shape of {name}", got, f"{shape}, contiguous")


def shape_error(op: str, what: str, got: object, allowed: object) -> ShapeError:
    """A `ShapeError` of an operator's argument."""
    remedy = "Give tensors of lengths and offsets that fit together."
    return ShapeError(describe(f"{op}: {what}", got=got, allowed=allowed, remedy=remedy))


def value_error(op: str, what: str, got: object, allowed: object) -> InputError:
    """An `InputError` of a value in an operator's argument."""
    remedy = "Check what made it."
    return InputError(describe(f"{op}: {what}", got=got, allowed=allowed, remedy=remedy))
