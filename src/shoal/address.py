"""Memory that the compiled core reads and writes: the only module that asks where it lies."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal import _core
from shoal.errors import DTypeError

_PLAIN = Tensor.__torch_dispatch__
_GROUP_DTYPES = (torch.int64, torch.int64, torch.int32)
# Below this the allocator's own free lists are warm and cheaper than a pooled buffer.
_POOLED_BYTES = 1 << 19
# `new_empty` of a tensor costs two thirds of `torch.empty` with a dtype and a device.
_EMPTY = {
    dtype: torch.empty(0, dtype=dtype, device="cpu")
    for dtype in (torch.bool, torch.float32, torch.float64)
}


def address(tensor: Tensor) -> int:
    """Address of the values of a dense, contiguous CPU tensor, for the length of a core call.

    Raises:
        DTypeError: values that are elsewhere, laid out otherwise, or nowhere (fake, meta).
    """
    try:
        # A subclass that dispatches by itself (fake, functional, nested) need not have values.
        kind = type(tensor)
        plain = kind is Tensor or kind.__torch_dispatch__ is _PLAIN
        if plain and tensor.is_cpu and tensor.is_contiguous() and not tensor.is_neg():
            found = tensor.data_ptr()
            if found or not tensor.numel():
                return found
    except RuntimeError as error:  # no storage: sparse, or wrapped by torch.func
        raise _without_values(tensor) from error
    raise _without_values(tensor)


def group_addresses(
    ids_N: Tensor, splits_G1: Tensor, tables_G: Tensor
) -> tuple[int, int, int] | None:
    """Addresses of plain CPU vectors, int64, int64 and int32; None where a closer look is due.

    One call for what every lookup checks: three are a tenth of a small one.
    """
    try:
        for vector in (ids_N, splits_G1, tables_G):
            if type(vector) is not Tensor or vector.dim() != 1 or not vector.is_cpu:
                return None
            if not vector.is_contiguous() or vector.is_neg():
                return None
        ids, splits, tables = ids_N.data_ptr(), splits_G1.data_ptr(), tables_G.data_ptr()
    except RuntimeError:  # no storage
        return None
    if (ids_N.dtype, splits_G1.dtype, tables_G.dtype) != _GROUP_DTYPES:
        return None
    whole = (ids or not ids_N.numel()) and splits and (tables or not tables_G.numel())
    return (ids, splits, tables) if whole else None


def fresh_address(tensor: Tensor) -> int:
    """`address` of a CPU tensor that Shoal has just allocated: it is dense, if it has values."""
    found = tensor.data_ptr() if type(tensor) is Tensor else 0
    if found or not tensor.numel():
        return found
    raise _without_values(tensor)


def empty_rows(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """An uninitialised [rows, columns] float32 or float64 tensor; a large one reuses memory."""
    if rows * columns * dtype.itemsize < _POOLED_BYTES:
        return _EMPTY[dtype].new_empty(rows, columns)
    make = _core.pooled64 if dtype is torch.float64 else _core.pooled32
    tensor: Tensor = make(rows, columns)
    return tensor


def empty_flags(n: int) -> tuple[Tensor, int]:
    """An uninitialised bool [n] CPU tensor, and its address."""
    made = _EMPTY[torch.bool].new_empty(n)
    return made, fresh_address(made)


def check_dense(what: str, tensor: Tensor) -> None:
    """Require a tensor whose elements lie side by side or at strides.

    Raises:
        DTypeError: it is sparse, nested, quantised, of another library, or no tensor.
    """
    is_tensor = type(tensor) is Tensor or isinstance(tensor, Tensor)
    if is_tensor and tensor.layout is torch.strided and not tensor.is_quantized:
        return
    got = f"a {type(tensor).__name__} {getattr(tensor, 'layout', '')}".rstrip()
    remedy = "Convert with torch.from_numpy, .to_dense() or .dequantize()."
    raise DTypeError(what, got=got, allowed="a dense tensor", remedy=remedy)


def check_int64(what: str, tensor: Tensor) -> None:
    """Require a dense int64 tensor.

    Raises:
        DTypeError: it is neither.
    """
    check_dense(what, tensor)
    if tensor.dtype is not torch.int64:
        raise DTypeError(f"dtype of {what}", tensor.dtype, "int64", "Call .long().")


def _without_values(tensor: Tensor) -> DTypeError:
    return DTypeError(
        "tensor",
        got=f"{type(tensor).__name__} of {tensor.dtype} and {tensor.layout} on {tensor.device}",
        allowed="dense, contiguous tensors with values in CPU memory",
        remedy="Convert with .to_dense(), .contiguous(), .resolve_neg() or .cpu(); call outside "
        "of FakeTensorMode and of torch.func's transforms, where tensors have no values.",
    )
