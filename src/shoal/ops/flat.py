"""Rows of several widths in one flat buffer: Monolith's fused gather, offset maps, flat concat."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shoal._core import ops as core
from shoal.address import address
from shoal.errors import DTypeError, InputError, ShapeError
from shoal.ops import checks
from shoal.ops.dispatch import fresh, linear, operator, widened
from shoal.ops.ids_by_shard import ValueOffset
from shoal.ragged import Ragged

_GATHER_OFFSETS = "fused_gather_embeddings_by_input: fused_embedding_offsets"
_SCATTER_OFFSETS = "fused_gather_embeddings_by_input_gradient: embedding_offsets"


def _bad_item(
    what: str, item: int, offsets: Sequence[Tensor], dims: Sequence[int], size: int
) -> InputError:
    k = 0
    while item >= offsets[k].numel():
        item -= offsets[k].numel()
        k += 1
    return checks.bad_flat_offset(what, k, item, int(offsets[k][item]), dims[k], size)


def _core_lists(
    rows: Sequence[Tensor], offsets: Sequence[Tensor], dims: Sequence[int], flat_E: Tensor
) -> tuple[Any, ...]:
    """The arguments by which the core takes rows and where they lie."""
    addresses = [address(part) for part in rows], [address(part) for part in offsets]
    counts = [part.numel() for part in offsets]
    return *addresses, counts, list(dims), address(flat_E), flat_E.numel()


def _core_gather(flat_E: Tensor, offsets: Sequence[Tensor], dims: Sequence[int]) -> list[Tensor]:
    flat_E, offsets = flat_E.contiguous(), [part.contiguous() for part in offsets]
    shapes = [(part.numel(), dim) for part, dim in zip(offsets, dims, strict=True)]
    rows = [fresh(*shape, dtype=flat_E.dtype) for shape in shapes]
    lists = _core_lists(rows, offsets, dims, flat_E)
    bad = core.gather_flat(*lists, flat_E.element_size(), torch.get_num_threads())
    if bad >= 0:
        raise _bad_item(_GATHER_OFFSETS, bad, offsets, dims, flat_E.numel())
    return rows


def _core_scatter(
    grads: Sequence[Tensor], offsets: Sequence[Tensor], size: int, scale: float
) -> Tensor:
    wide, offsets = [widened(grad) for grad in grads], [part.contiguous() for part in offsets]
    dims, flat_E = [grad.shape[1] for grad in grads], fresh(size, dtype=wide[0].dtype)
    run = core.scatter_flat_f64 if flat_E.dtype is torch.float64 else core.scatter_flat_f32
    bad = run(*_core_lists(wide, offsets, dims, flat_E), scale, torch.get_num_threads())
    if bad >= 0:
        raise _bad_item(_SCATTER_OFFSETS, bad, offsets, dims, size)
    return flat_E.to(grads[0].dtype)


def _with_map(
    run: Any, tensors: Sequence[Tensor], dims: Sequence[int], length: int, size: int, *how: int
) -> None:
    """Run by a map that the core checks, of values of `length` and a buffer of `size` elements."""
    tensors = [tensor.contiguous() for tensor in tensors]
    addresses, counts = [address(part) for part in tensors], [part.numel() for part in tensors]
    fault, at = run(addresses, counts, dims, length, size, *how, torch.get_num_threads())
    if fault:
        keys = tensors[3].numel() - 1
        raise checks.map_error(fault, at, tensors[0], tensors[2], keys, length, size)


def _check_map(*offset_map: Any) -> None:
    *tensors, dims, length, size = offset_map
    _with_map(core.check_map, [tensor.cpu() for tensor in tensors], dims, length, size)


def _core_fill(buffer_E: Tensor, value: Tensor, *offset_map: Any) -> None:
    *tensors, dims = offset_map
    value = value.contiguous()
    places = address(value), address(buffer_E), value.element_size()
    _with_map(core.fill_offsets, tensors, dims, value.numel(), buffer_E.numel(), *places)


def _core_sum(buffer_E: Tensor, *offset_map: Any) -> Tensor:
    *tensors, dims, length = offset_map
    wide_E = widened(buffer_E)
    value = fresh(length, dtype=wide_E.dtype)
    run = core.sum_offsets_f64 if value.dtype is torch.float64 else core.sum_offsets_f32
    _with_map(run, tensors, dims, length, wide_E.numel(), address(value), address(wide_E))
    return value.to(buffer_E.dtype)


def _gather_transposed(
    grads: Sequence[Tensor], shape: torch.Size, offsets: list[Tensor], _: list[int]
) -> Tensor:
    if not grads[0].is_complex():
        return scatter_flat(list(grads), offsets, shape[0], 1.0)  # type: ignore[no-any-return]
    pairs = [torch.view_as_real(grad).flatten(1) for grad in grads]
    twice = [2 * part for part in offsets]
    return torch.view_as_complex(scatter_flat(pairs, twice, 2 * shape[0], 1.0).view(-1, 2))


def _scatter_transposed(
    grad_E: Tensor, shapes: Sequence[torch.Size], offsets: list[Tensor], _: int, scale: float
) -> list[Tensor]:
    scaled_E = grad_E if scale == 1 else grad_E * scale
    return gather_flat(scaled_E, offsets, [shape[1] for shape in shapes])  # type: ignore[no-any-return]


def _sum_transposed(grad: Tensor, shape: torch.Size, *offset_map: Any) -> Tensor:
    buffer_E = grad.new_zeros(shape)
    fill_offsets(buffer_E, grad, *offset_map[:-1])
    return buffer_E


gather_flat = operator(
    "gather_flat(Tensor flat_E, Tensor[] offsets, SymInt[] dims) -> Tensor[]",
    from_host=True,
    core=_core_gather,
    triton="flat_rows:gather_flat",
    fake=lambda flat_E, offsets, dims: [
        flat_E.new_empty(part.shape[0], dim) for part, dim in zip(offsets, dims, strict=True)
    ],
    check=lambda flat_E, offsets, dims: checks.check_flat_offsets(
        _GATHER_OFFSETS, offsets, dims, flat_E.numel()
    ),
    gradient=linear(_gather_transposed),
)
scatter_flat = operator(
    "scatter_flat(Tensor[] grads, Tensor[] offsets, SymInt size, float scale) -> Tensor",
    from_host=True,
    core=_core_scatter,
    triton="flat_rows:scatter_flat",
    fake=lambda grads, offsets, size, scale: grads[0].new_empty(size),
    check=lambda grads, offsets, size, scale: checks.check_flat_offsets(
        _SCATTER_OFFSETS, offsets, [grad.shape[1] for grad in grads], size
    ),
    gradient=linear(_scatter_transposed),
)
_MAP = "Tensor positions_N, Tensor splits_K1, Tensor offsets_V, Tensor offset_splits_U1, int[] dims"
fill_offsets = operator(
    f"fill_offsets_(Tensor(a!) buffer_E, Tensor value, {_MAP}) -> ()",
    from_host=True,
    core=_core_fill,
    triton="flat_rows:fill_offsets",
    fake=lambda *_: None,
    check=lambda buffer_E, value, *offset_map: _check_map(
        *offset_map, value.numel(), buffer_E.numel()
    ),
)
sum_offsets = operator(
    f"sum_offsets(Tensor buffer_E, {_MAP}, SymInt length) -> Tensor",
    from_host=True,
    core=_core_sum,
    triton="flat_rows:sum_offsets",
    fake=lambda buffer_E, *rest: buffer_E.new_empty(rest[-1]),
    check=lambda buffer_E, *offset_map: _check_map(*offset_map, buffer_E.numel()),
    gradient=linear(_sum_transposed),
)


def _sum_of_any(buffer_E: Tensor, *offset_map: Any) -> Tensor:
    """`sum_offsets`, of complex numbers too."""
    if not buffer_E.is_complex():
        return sum_offsets(buffer_E, *offset_map)  # type: ignore[no-any-return]
    positions_N, splits_K1, offsets_V, offset_splits_U1, dims, length = offset_map
    pairs_E, twice = torch.view_as_real(buffer_E).flatten(), [2 * dim for dim in dims]
    map_of_pairs = positions_N, splits_K1, 2 * offsets_V, offset_splits_U1, twice
    return torch.view_as_complex(sum_offsets(pairs_E, *map_of_pairs, 2 * length).view(-1, 2))


class _Fill(torch.autograd.Function):
    """Gradient of the in-place fill; `register_autograd` takes functional operators only."""

    @staticmethod
    def forward(ctx: Any, buffer_E: Tensor, value: Tensor, *offset_map: Any) -> Tensor:
        *tensors, ctx.dims = offset_map
        ctx.save_for_backward(*tensors)
        ctx.length = value.shape[0]
        ctx.mark_dirty(buffer_E)
        with torch._C._AutoDispatchBelowAutograd():
            fill_offsets(buffer_E, value, *offset_map)
        return buffer_E

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (grad_E,) = grads
        offset_map = (*ctx.saved_tensors, ctx.dims)
        before_E = None
        if ctx.needs_input_grad[0]:
            before_E = grad_E.clone()
            fill_offsets(before_E, grad_E.new_zeros(ctx.length), *offset_map)
        value = None
        if ctx.needs_input_grad[1]:
            value = _sum_of_any(grad_E, *offset_map, ctx.length)
        return before_E, value, None, None, None, None, None


def _fill_with_gradient(*args: Any) -> None:
    _Fill.apply(*args)  # type: ignore[no-untyped-call]


_AUTOGRAD: Any = torch.library.Library("shoal", "IMPL")  # type: ignore[no-untyped-call]
_AUTOGRAD.impl("fill_offsets_", _fill_with_gradient, "Autograd")


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
    checks.check_flat(op, "fused_embeddings", fused_embeddings)
    if not offsets and not dims:
        return []
    checks.check_lists(op, least=1, fused_embedding_offsets=offsets, embedding_dims=dims)
    for k, offsets_N in enumerate(offsets):
        checks.check_ids(op, f"fused_embedding_offsets[{k}]", offsets_N)
    checks.check_dims(op, "embedding_dims", dims)
    checks.check_devices(op, fused_embeddings=fused_embeddings, fused_embedding_offsets=offsets)
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
    checks.check_lists(op, least=1, grads=grads, embedding_offsets=offsets, embedding_dims=dims)
    checks.check_dims(op, "embedding_dims", dims)
    checks.check_gradients(op, grads, offsets, dims)
    checks.check_devices(op, grads=grads, embedding_offsets=offsets)
    length = size.numel() if isinstance(size, Tensor) else size
    if length < 0:
        raise ShapeError(f"{op}: size", length, "0 or more", "Give the length of the buffer.")
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
    checks.check_ids(op, "value_offset values", offsets_V)
    checks.check_ids(op, "value_offset splits", splits_U1)
    checks.check_flat(op, "value", value)
    checks.check_flat(op, "value_buffer", value_buffer)
    checks.check_same_dtype(op, "value and value_buffer", [value, value_buffer])
    if len(dims) != pos.batch_size:
        got, allowed = len(dims), f"{pos.batch_size}, the tables of pos"
        raise ShapeError(f"{op}: number of dims", got, allowed, "Give one width per table.")
    checks.check_dims(op, "dims", dims)
    if splits_U1.shape[0] < 1:
        raise ShapeError(f"{op}: value_offset splits", "[0]", "[U+1]", "Splits start with a 0.")
    if not value_buffer.is_contiguous():
        remedy = "Make it with torch.empty."
        raise ShapeError(f"{op}: value_buffer", "strides", "contiguous", remedy)
    offset = [offsets_V, splits_U1]
    checks.check_devices(
        op, pos=pos.values, value=value, value_offset=offset, value_buffer=value_buffer
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
    checks.check_lists(op, least=1, shared_tensor_handles=shared_tensor_handles)
    buffer_E = shared_tensor_handles[0]
    for i, handle in enumerate(shared_tensor_handles):
        if handle is not buffer_E and not _same_storage(handle, buffer_E):
            what, allowed = f"{op}: shared_tensor_handles[{i}]", "the buffer of the first handle"
            remedy = "Fill one buffer in several calls, and give what they return."
            raise InputError(what, got="another tensor", allowed=allowed, remedy=remedy)
    if buffer_E.dtype != dtype:
        remedy = "Make the buffer in the dtype you want."
        raise DTypeError(f"{op}: dtype", got=buffer_E.dtype, allowed=dtype, remedy=remedy)
    known = math.prod([length for length in shape if length >= 0])
    free = sum(length < 0 for length in shape)
    fits = known == buffer_E.numel() if free == 0 else known > 0 and buffer_E.numel() % known == 0
    if free > 1 or not fits:
        sizes, allowed = tuple(shape), f"a shape of {buffer_E.numel()} elements, one -1 allowed"
        raise ShapeError(f"{op}: shape", sizes, allowed, "Give the length of the buffer.")
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
    checks.check_lists(op, least=1, tensors=tensors)
    checks.check_same_dtype(op, "tensors", tensors)
    checks.check_devices(op, tensors=tensors)
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
    checks.check_lists(op, least=1, tensors=tensors)
    checks.check_flat(op, "flat", flat)
    unit = _unit(op, flat, alignment_bytes)
    sizes: list[int] = []
    for tensor in tensors:
        sizes += [tensor.numel(), -tensor.numel() % unit]
    if sum(sizes) != flat.shape[0] or not flat.is_contiguous():
        got, allowed = flat.shape[0], f"{sum(sizes)} elements side by side"
        raise ShapeError(
            f"{op}: length of flat", got, allowed, "Split what aligned_flat_concat made."
        )
    parts = torch.split(flat, sizes)[::2]
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def _same_storage(a: Tensor, b: Tensor) -> bool:
    return not torch.compiler.is_compiling() and a.data_ptr() == b.data_ptr()


def _unit(op: str, tensor: Tensor, alignment_bytes: int) -> int:
    size = tensor.element_size()
    if alignment_bytes < 1 or alignment_bytes % size:
        allowed = f"a positive multiple of {size}, the bytes of an element"
        raise ShapeError(f"{op}: alignment_bytes", alignment_bytes, allowed, "Use 256.")
    return alignment_bytes // size
