"""Checks and conversions that `Ragged` and `KeyedRagged` share."""

from __future__ import annotations

import importlib
import itertools
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.address import check_dense
from shoal.errors import DeviceUnavailable, DTypeError, InputError, ShapeError, describe

__all__ = [
    "Rows",
    "bad",
    "check_ids",
    "check_offsets",
    "check_weights",
    "ids_of",
    "lists_of",
    "offsets_of",
    "parts_of_nested",
    "pinned",
    "read_offsets",
    "torchrec_class",
]

Rows = Sequence[Sequence[int]]


def bad(
    kind: type[InputError],
    what: str,
    got: object,
    allowed: object,
    remedy: str = "Build it with from_lists, from_dict or from_lengths.",
) -> InputError:
    return kind(describe(what, got=got, allowed=allowed, remedy=remedy))


def check_ids(name: str, tensor: Tensor) -> None:
    check_dense(name, tensor)
    if tensor.dtype != torch.int64:
        raise bad(DTypeError, f"dtype of {name}", tensor.dtype, "int64", "Call .long().")
    if tensor.ndim != 1:
        raise bad(ShapeError, f"shape of {name}", tuple(tensor.shape), "one dimension")


def check_offsets(values: Tensor, offsets: Tensor, *, keys: int) -> None:
    check_ids("offsets", offsets)
    if offsets.numel() < 1 or (offsets.numel() - 1) % keys:
        allowed = f"a multiple of {keys} (the number of keys), plus one"
        raise bad(ShapeError, "number of offsets", offsets.numel(), allowed)
    _check_device("offsets", offsets, values)


def check_weights(weights: Tensor, values: Tensor) -> None:
    check_dense("weights_N", weights)
    if not weights.is_floating_point():
        got, allowed = weights.dtype, "a floating dtype"
        raise bad(DTypeError, "dtype of weights_N", got, allowed, "Call .float().")
    if weights.shape != values.shape:
        got_shape, want = tuple(weights.shape), tuple(values.shape)
        raise bad(ShapeError, "shape of weights_N", got_shape, want, "Give one weight per id.")
    _check_device("weights_N", weights, values)


def _check_device(name: str, tensor: Tensor, values: Tensor) -> None:
    if tensor.device != values.device:
        allowed = f"{values.device}, as the values"
        remedy = "Move both with .to(device)."
        raise bad(DTypeError, f"device of {name}", tensor.device, allowed, remedy)


def read_offsets(offsets: Tensor, count: int) -> None:
    cuts = offsets.cpu()
    if int(cuts[0]) != 0:
        raise bad(ShapeError, "first offset", int(cuts[0]), 0)
    falls = (cuts[1:] < cuts[:-1]).nonzero()
    if falls.numel():
        at = int(falls[0]) + 1
        raise bad(ShapeError, f"offset {at}", int(cuts[at]), f"at least {int(cuts[at - 1])}")
    if int(cuts[-1]) != count:
        raise bad(ShapeError, "last offset", int(cuts[-1]), f"{count}, the number of values")


def offsets_of(lengths: Tensor) -> Tensor:
    check_ids("lengths", lengths)
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0))


def ids_of(rows: Rows) -> Tensor:
    try:
        flat = [operator.index(id_) for row in rows for id_ in row]
        return torch.from_numpy(np.array(flat, dtype=np.int64))
    except TypeError as error:
        remedy = "Hash strings with shoal.fid.hash_strings; cast floats yourself."
        raise bad(DTypeError, "ids", error, "integers", remedy) from error
    except OverflowError as error:
        remedy = "Subtract 2**64 from ids above 2**63 - 1: the 64 bits stay the same."
        raise bad(InputError, "ids", error, "-2**63..2**63-1", remedy) from error


def lists_of(values: Tensor, offsets: Tensor) -> list[list[int]]:
    flat = values.tolist()
    return [flat[start:stop] for start, stop in itertools.pairwise(offsets.tolist())]


def parts_of_nested(nested: Tensor) -> tuple[Tensor, Tensor]:
    layout = getattr(nested, "layout", None)
    if layout != torch.jagged or nested.lengths() is not None:  # type: ignore[attr-defined]
        allowed = "torch.jagged without holes"
        raise bad(ShapeError, "nested tensor", layout, allowed, "Call .contiguous().")
    return nested.values(), nested.offsets()  # type: ignore[attr-defined]


def pinned(tensor: Tensor) -> Tensor:
    """A copy in page-locked memory; the tensor itself where it is so, or there is no CUDA."""
    return tensor.pin_memory() if torch.cuda.is_available() and tensor.is_cpu else tensor


def torchrec_class(name: str) -> Any:
    try:
        return getattr(importlib.import_module("torchrec"), name)
    except ImportError as error:
        allowed = "any torchrec with KeyedJaggedTensor"
        remedy = "pip install torchrec, or use to_nested()."
        message = describe("torchrec", got="not installed", allowed=allowed, remedy=remedy)
        raise DeviceUnavailable(message) from error
