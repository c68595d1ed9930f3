"""Rows of several widths in one flat buffer: Monolith's fused gather, offset maps, flat concat.

An offset counts elements of the buffer, not rows or bytes, in 64 bits. An offset map says where the
unique keys of several tables lie in a buffer that holds one row per occurrence:

* `pos`: `Ragged` [K tables]; `pos.values` are numbers of unique keys, counted through all tables;
  table k has the rows `pos.offsets_B1[k]:pos.offsets_B1[k+1]`, each `dims[k]` wide.
* `value_offset`: (values int64 [V], splits int64 [U+1]); key u lies at elements
  `values[splits[u]:splits[u+1]]` of the buffer. No two rows of the buffer overlap.

Keys [[0, 1, 0], [0]] with dims [2, 3] have the map ([0, 4, 2, 6], [0, 2, 3, 4]) and a buffer of 9.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.errors import DTypeError, InputError, describe
from shoal.ops.flat_checks import check_dims, check_flat, check_gradients
from shoal.ops.flat_operators import fill_offsets, gather_flat, scatter_flat
from shoal.ops.id_checks import check_ids
from shoal.ops.reference.ids import ValueOffset
from shoal.ops.rows_checks import (
    check_devices,
    check_lists,
    check_same_dtype,
    floating,
    refuse,
)
from shoal.ragged import Ragged

__all__ = [
    "aligned_flat_concat",
    "aligned_flat_split",
    "fill_with_offset_map",
    "finalize_shared_tensor",
    "fused_gather_embeddings_by_input",
    "fused_gather_embeddings_by_input_gradient",
]


def fused_gather_embeddings_by_input(
    fused_embeddings: Tensor,
    fused_embedding_offsets: Sequence[Tensor],
    embedding_dims: Sequence[int],
) -> list[Tensor]:
    """Rows of several tables out of one flat buffer.

    fused_embeddings [E] of any dtype, fused_embedding_offsets int64 [N_k] per table: the element at
    which each row starts, embedding_dims: its width; gives one [N_k, D_k] per table, row i being
    `fused_embeddings[offset[i] : offset[i] + D_k]`. No tables give no tensors. Gradient:
    `fused_gather_embeddings_by_input_gradient`, with its rule for rows that meet. On CUDA
    without bounds checks a row that leaves the buffer reads as NaN (integers: 0).

    Raises:
        DTypeError, ShapeError: offsets not int64 [N_k], buffer not [E], a width below 1.
        InputError: an offset outside 0 to E-D_k; names it. Lists of different lengths, or devices.

    Monolith: `fused_gather_embeddings_by_input` (its offsets are int32, which caps E at 2^31).
    """
    op = "fused_gather_embeddings_by_input"
    offsets, dims = list(fused_embedding_offsets), list(embedding_dims)
    check_flat(op, "fused_embeddings", fused_embeddings)
    if not offsets and not dims:
        return []
    check_lists(op, fused_embedding_offsets=offsets, embedding_dims=dims)
    for k, offsets_N in enumerate(offsets):
        check_ids(op, f"fused_embedding_offsets[{k}]", offsets_N)
    check_dims(op, "embedding_dims", dims)
    check_devices(op, fused_embeddings=fused_embeddings, fused_embedding_offsets=offsets)
    return list(gather_flat(fused_embeddings, offsets, dims))


def fused_gather_embeddings_by_input_gradient(
    size: int | Tensor,
    grads: Sequence[Tensor],
    embedding_offsets: Sequence[Tensor],
    embedding_dims: Sequence[int],
    scale: float = 1.0,
) -> Tensor:
    """Gradient of the flat buffer that `fused_gather_embeddings_by_input` read.

    size: E, or the buffer [E] itself; grads [N_k, D_k] floating and embedding_offsets int64 [N_k]
    per table; gives [E]: each element is `scale` times the sum of the gradient rows over it, added
    table by table in order (float16 and bfloat16 in float32), 0 where there is none. Gradient: the
    gather, times `scale`. On CUDA, rows that meet must share offset and width, as they do in a
    buffer of rows; on the CPU they may overlap in part.

    Raises:
        DTypeError, ShapeError: offsets not int64, grads not floating [N_k, D_k], a width below 1.
        InputError: an offset outside 0 to E-D_k; names it. No tables, lists of different lengths,
            a negative size, or several devices.

    Monolith: `fused_gather_embeddings_by_input_gradient` (its CPU kernel ignores `scale`).
    """
    op = "fused_gather_embeddings_by_input_gradient"
    grads, offsets, dims = list(grads), list(embedding_offsets), list(embedding_dims)
    check_lists(op, grads=grads, embedding_offsets=offsets, embedding_dims=dims)
    check_dims(op, "embedding_dims", dims)
    check_gradients(op, grads, offsets, dims)
    for k, grad in enumerate(grads):
        floating(op, f"grads[{k}]", grad)
    check_same_dtype(op, "grads", grads)
    check_devices(op, grads=grads, embedding_offsets=offsets)
    length = size.numel() if isinstance(size, Tensor) else size
    if length < 0:
        raise refuse(f"{op}: size", length, "0 or more", "Give the length of the buffer.")
    flat_E: Tensor = scatter_flat(grads, offsets, length, float(scale))
    return flat_E


def fill_with_offset_map(
    pos: Ragged,
    value: Tensor,
    value_offset: tuple[Tensor, Tensor] | ValueOffset,
    value_buffer: Tensor,
    dims: Sequence[int],
) -> Tensor:
    """Write each row of the value to all places of its key in the buffer, in place.

    pos: `Ragged` of K tables, value [sum of rows_k D_k] of the buffer's dtype, value_offset: (int64
    [V], int64 [U+1]) as the module's text explains, or the `ValueOffset` that
    `unique_key_with_value_and_offset` returns, value_buffer [E] contiguous, dims: D_k; gives
    `value_buffer` itself. Elements under no offset stay as they were. Gradient: of the value, the
    sum over a key's offsets, in order; of the buffer, zero where it was written. `pos` names a key
    once at most, and rows of the buffer do not overlap; neither is checked.

    One buffer may be filled by several calls, one per shard, each with its own part of the keys;
    `finalize_shared_tensor` then gives the buffer whole.

    Raises:
        DTypeError, ShapeError: positions or offsets not int64, value or buffer not flat or of two
            dtypes, a width below 1, a value of the wrong length.
        InputError: a position that names no key, an offset whose row leaves the buffer, splits that
            fall, or several devices. The buffer is unchanged.

    Monolith: `fill_with_offset_map`.
    """
    op = "fill_with_offset_map"
    offsets_V, splits_U1 = value_offset[:2]
    dims = list(dims)
    check_ids(op, "value_offset values", offsets_V)
    check_ids(op, "value_offset splits", splits_U1)
    check_flat(op, "value", value)
    check_flat(op, "value_buffer", value_buffer)
    check_same_dtype(op, "value and value_buffer", [value, value_buffer])
    if len(dims) != pos.batch_size:
        got, allowed = len(dims), f"{pos.batch_size}, the tables of pos"
        raise refuse(f"{op}: number of dims", got, allowed, "Give one width per table.")
    check_dims(op, "dims", dims)
    if splits_U1.shape[0] < 1:
        raise refuse(f"{op}: value_offset splits", "[0]", "[U+1]", "Splits start with a 0.")
    if not value_buffer.is_contiguous():
        raise refuse(f"{op}: value_buffer", "strides", "contiguous", "Make it with torch.empty.")
    check_devices(
        op,
        pos=pos.values,
        value=value,
        value_offset=[offsets_V, splits_U1],
        value_buffer=value_buffer,
    )
    fill_offsets(value_buffer, value, pos.values, pos.offsets_B1, offsets_V, splits_U1, dims)
    return value_buffer


def finalize_shared_tensor(
    shared_tensor_handles: Sequence[Tensor], dtype: torch.dtype, shape: Sequence[int]
) -> Tensor:
    """The buffer that several fills share, once all are done.

    shared_tensor_handles: what the fills returned, the same tensor every time; gives it as a view
    of the given shape, one -1 allowed. Gradient: identity, to the buffer and so to every fill.

    Raises:
        DTypeError, ShapeError: the buffer has another dtype, or its length does not fit the shape.
        InputError: no handles, or handles of different buffers.

    Monolith: `finalize_shared_tensor`.
    """
    op = "finalize_shared_tensor"
    check_lists(op, shared_tensor_handles=shared_tensor_handles)
    buffer_E = shared_tensor_handles[0]
    for i, handle in enumerate(shared_tensor_handles):
        if handle is not buffer_E and not _same_storage(handle, buffer_E):
            what, allowed = f"{op}: shared_tensor_handles[{i}]", "the buffer of the first handle"
            remedy = "Fill one buffer in several calls, and give what they return."
            raise InputError(describe(what, got="another tensor", allowed=allowed, remedy=remedy))
    if buffer_E.dtype != dtype:
        remedy = "Make the buffer in the dtype you want."
        raise DTypeError(describe(f"{op}: dtype", got=buffer_E.dtype, allowed=dtype, remedy=remedy))
    known = 1
    for length in shape:
        known *= length if length >= 0 else 1
    free = sum(length < 0 for length in shape)
    fits = known == buffer_E.numel() if free == 0 else known > 0 and buffer_E.numel() % known == 0
    if free > 1 or not fits:
        sizes, allowed = tuple(shape), f"a shape of {buffer_E.numel()} elements, one -1 allowed"
        raise refuse(f"{op}: shape", sizes, allowed, "Give the length of the buffer.")
    return buffer_E.view(tuple(shape))


def aligned_flat_concat(
    tensors: Sequence[Tensor], scale: float = 1.0, *, alignment_bytes: int = 256
) -> Tensor:
    """Many tensors in one flat buffer, as one all-reduce takes them.

    tensors: any shapes, one dtype; gives [E]: the elements of each, times `scale`, starting at a
    multiple of `alignment_bytes` from the buffer's start, zeros in between and after the last, so
    that E is a multiple of the alignment too. Each element is copied once. Gradient:
    `aligned_flat_split`, times `scale`.

    Raises:
        DTypeError: several dtypes.
        ShapeError: an alignment that is not a positive multiple of the element size.
        InputError: no tensors, or several devices.

    Monolith: `monolith_aligned_flat_concat`.
    """
    op = "aligned_flat_concat"
    tensors = list(tensors)
    check_lists(op, tensors=tensors)
    check_same_dtype(op, "tensors", tensors)
    check_devices(op, tensors=tensors)
    unit = _unit(op, tensors[0], alignment_bytes)
    parts: list[Tensor] = []
    for tensor in tensors:
        parts.append(tensor.flatten())
        gap = -tensor.numel() % unit
        if gap:
            parts.append(tensor.new_zeros(gap))
    flat_E = torch.cat(parts)
    return flat_E if scale == 1 else flat_E * scale


def aligned_flat_split(
    tensors: Sequence[Tensor], flat: Tensor, *, alignment_bytes: int = 256
) -> list[Tensor]:
    """The parts of a buffer that `aligned_flat_concat` made, shaped as the tensors were.

    tensors: only their shapes count; flat [E]; gives one view per tensor, nothing is copied.
    Gradient: `aligned_flat_concat`.

    Raises:
        ShapeError: E is not the length those tensors make; flat is not flat and contiguous.
        InputError: no tensors.

    Monolith: `monolith_aligned_flat_split`.
    """
    op = "aligned_flat_split"
    tensors = list(tensors)
    check_lists(op, tensors=tensors)
    check_flat(op, "flat", flat)
    unit = _unit(op, flat, alignment_bytes)
    sizes: list[int] = []
    for tensor in tensors:
        sizes += [tensor.numel(), -tensor.numel() % unit]
    if sum(sizes) != flat.shape[0] or not flat.is_contiguous():
        got, allowed = flat.shape[0], f"{sum(sizes)} elements side by side"
        raise refuse(f"{op}: length of flat", got, allowed, "Split what aligned_flat_concat made.")
    parts = torch.split(flat, sizes)[::2]
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def _same_storage(a: Tensor, b: Tensor) -> bool:
    return not torch.compiler.is_compiling() and a.data_ptr() == b.data_ptr()


def _unit(op: str, tensor: Tensor, alignment_bytes: int) -> int:
    size = tensor.element_size()
    if alignment_bytes < 1 or alignment_bytes % size:
        allowed = f"a positive multiple of {size}, the bytes of an element"
        raise refuse(f"{op}: alignment_bytes", alignment_bytes, allowed, "Use 256.")
    return alignment_bytes // size
