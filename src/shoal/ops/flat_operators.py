"""The operators on flat buffers: gather, its sum, filling by an offset map, its sum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shoal import _core
from shoal.address import address
from shoal.errors import InputError
from shoal.ops.dispatch import operator
from shoal.ops.flat_checks import (
    bad_flat_offset,
    check_flat_offsets,
    check_map_values,
    map_error,
)
from shoal.ops.outputs import fresh
from shoal.ops.reference import flat as reference
from shoal.ops.rows import threads, widened

__all__ = ["fill_offsets", "gather_flat", "scatter_flat"]

_GATHER_OFFSETS = "fused_gather_embeddings_by_input: fused_embedding_offsets"
_SCATTER_OFFSETS = "fused_gather_embeddings_by_input_gradient: embedding_offsets"


def _bad_item(
    what: str, item: int, offsets: Sequence[Tensor], dims: Sequence[int], size: int
) -> InputError:
    k = 0
    while item >= offsets[k].numel():
        item -= offsets[k].numel()
        k += 1
    return bad_flat_offset(what, k, item, int(offsets[k][item]), dims[k], size)


def _core_gather(flat_E: Tensor, offsets: Sequence[Tensor], dims: Sequence[int]) -> list[Tensor]:
    flat_E, offsets = flat_E.contiguous(), [part.contiguous() for part in offsets]
    counts = [part.numel() for part in offsets]
    rows = [fresh(n, dim, dtype=flat_E.dtype) for n, dim in zip(counts, dims, strict=True)]
    bad = _core.gather_flat(
        address(flat_E),
        flat_E.numel(),
        flat_E.element_size(),
        [address(part) for part in rows],
        [address(part) for part in offsets],
        counts,
        dims,
        threads(),
    )
    if bad >= 0:
        raise _bad_item(_GATHER_OFFSETS, bad, offsets, dims, flat_E.numel())
    return rows


def _core_scatter(
    grads: Sequence[Tensor], offsets: Sequence[Tensor], size: int, scale: float
) -> Tensor:
    dtype = widened(grads[0].dtype)
    wide = [grad.to(dtype).contiguous() for grad in grads]
    offsets = [part.contiguous() for part in offsets]
    dims = [grad.shape[1] for grad in grads]
    flat_E = fresh(size, dtype=dtype)
    bad = _core.scatter_flat(
        [address(part) for part in wide],
        [address(part) for part in offsets],
        [part.numel() for part in offsets],
        dims,
        size,
        scale,
        dtype is torch.float64,
        address(flat_E),
        threads(),
    )
    if bad >= 0:
        raise _bad_item(_SCATTER_OFFSETS, bad, offsets, dims, size)
    return flat_E.to(grads[0].dtype)


def _core_map(tensors: Sequence[Tensor], dims: Sequence[int]) -> dict[str, Any]:
    """The arguments by which the core takes a map."""
    positions_N, splits_K1, offsets_V, offset_splits_U1 = tensors
    return {
        "positions": address(positions_N),
        "n": positions_N.numel(),
        "splits": address(splits_K1),
        "dims": dims,
        "offsets": address(offsets_V),
        "n_offsets": offsets_V.numel(),
        "offset_splits": address(offset_splits_U1),
        "keys": offset_splits_U1.numel() - 1,
    }


def _core_fill(buffer_E: Tensor, value: Tensor, *offset_map: Any) -> None:
    *tensors, dims = offset_map
    tensors, value = [tensor.contiguous() for tensor in tensors], value.contiguous()
    length, size = value.numel(), buffer_E.numel()
    fault, at = _core.fill_offsets(
        **_core_map(tensors, dims),
        value=address(value),
        length=length,
        element_bytes=value.element_size(),
        buffer=address(buffer_E),
        size=size,
        threads=threads(),
    )
    if fault:
        keys = tensors[3].numel() - 1
        raise map_error(fault, at, tensors[0], tensors[2], keys, length, size)


def _core_sum(buffer_E: Tensor, *offset_map: Any) -> Tensor:
    *tensors, dims, length = offset_map
    tensors, dtype = [tensor.contiguous() for tensor in tensors], widened(buffer_E.dtype)
    wide_E = buffer_E.to(dtype).contiguous()
    value = fresh(length, dtype=dtype)
    fault, at = _core.sum_offsets(
        **_core_map(tensors, dims),
        buffer=address(wide_E),
        size=wide_E.numel(),
        is_double=dtype is torch.float64,
        value=address(value),
        length=length,
        threads=threads(),
    )
    if fault:
        keys = tensors[3].numel() - 1
        raise map_error(fault, at, tensors[0], tensors[2], keys, length, wide_E.numel())
    return value.to(buffer_E.dtype)


def _reference_fill(buffer_E: Tensor, value: Tensor, *offset_map: Any) -> None:
    source, target = reference.offset_map_places(*offset_map)
    buffer_E[target] = value[source]


def _reference_sum(buffer_E: Tensor, *offset_map: Any) -> Tensor:
    *tensors, length = offset_map
    source, target = reference.offset_map_places(*tensors)
    wide_E = buffer_E.to(widened(buffer_E.dtype))
    return wide_E.new_zeros(length).index_add(0, source, wide_E[target]).to(buffer_E.dtype)


def _check_fill(buffer_E: Tensor, value: Tensor, *offset_map: Any) -> None:
    *tensors, dims = offset_map
    check_map_values(tensors, dims, value.numel(), buffer_E.numel())


def _check_sum(buffer_E: Tensor, *offset_map: Any) -> None:
    *tensors, dims, length = offset_map
    check_map_values(tensors, dims, length, buffer_E.numel())


def _setup_gather(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    flat_E, offsets, ctx.dims = inputs
    ctx.save_for_backward(*offsets)
    ctx.size = flat_E.shape[0]


def _gather_backward(ctx: Any, grads: Sequence[Tensor]) -> tuple[Any, ...]:
    offsets = list(ctx.saved_tensors)
    if grads[0].is_complex():
        pairs = [torch.view_as_real(grad).flatten(1) for grad in grads]
        twice = [2 * part for part in offsets]
        flat_E = torch.view_as_complex(scatter_flat(pairs, twice, 2 * ctx.size, 1.0).view(-1, 2))
    else:
        flat_E = scatter_flat(list(grads), offsets, ctx.size, 1.0)
    return flat_E, [None] * len(offsets), None


def _setup_scatter(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    grads, offsets, _, ctx.scale = inputs
    ctx.save_for_backward(*offsets)
    ctx.dims = [grad.shape[1] for grad in grads]


def _scatter_backward(ctx: Any, grad_E: Tensor) -> tuple[Any, ...]:
    offsets = list(ctx.saved_tensors)
    scaled_E = grad_E if ctx.scale == 1 else grad_E * ctx.scale
    return gather_flat(scaled_E, offsets, ctx.dims), [None] * len(offsets), None, None


def _setup_sum(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    buffer_E, *tensors, ctx.dims, _ = inputs
    ctx.save_for_backward(*tensors)
    ctx.size = buffer_E.shape[0]


def _sum_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    buffer_E = grad.new_zeros(ctx.size)
    fill_offsets(buffer_E, grad, *ctx.saved_tensors, ctx.dims)
    return buffer_E, None, None, None, None, None, None


gather_flat = operator(
    "gather_flat(Tensor flat_E, Tensor[] offsets, SymInt[] dims) -> Tensor[]",
    from_host=True,
    reference=reference.fused_gather_embeddings_by_input,
    core=_core_gather,
    triton="flat:gather_flat",
    fake=lambda flat_E, offsets, dims: [
        flat_E.new_empty(part.shape[0], dim) for part, dim in zip(offsets, dims, strict=True)
    ],
    check=lambda flat_E, offsets, dims: check_flat_offsets(
        _GATHER_OFFSETS, offsets, dims, flat_E.numel()
    ),
    backward=_gather_backward,
    setup=_setup_gather,
)
scatter_flat = operator(
    "scatter_flat(Tensor[] grads, Tensor[] offsets, SymInt size, float scale) -> Tensor",
    from_host=True,
    reference=lambda grads, offsets, size, scale: (
        reference.fused_gather_embeddings_by_input_gradient(
            size, grads, offsets, [grad.shape[1] for grad in grads], scale
        )
    ),
    core=_core_scatter,
    triton="flat:scatter_flat",
    fake=lambda grads, offsets, size, scale: grads[0].new_empty(size),
    check=lambda grads, offsets, size, scale: check_flat_offsets(
        _SCATTER_OFFSETS, offsets, [grad.shape[1] for grad in grads], size
    ),
    backward=_scatter_backward,
    setup=_setup_scatter,
)
_MAP = "Tensor positions_N, Tensor splits_K1, Tensor offsets_V, Tensor offset_splits_U1, int[] dims"
fill_offsets = operator(
    f"fill_offsets_(Tensor(a!) buffer_E, Tensor value, {_MAP}) -> ()",
    from_host=True,
    reference=_reference_fill,
    core=_core_fill,
    triton="flat:fill_offsets",
    fake=lambda *_: None,
    check=_check_fill,
)
sum_offsets = operator(
    f"sum_offsets(Tensor buffer_E, {_MAP}, SymInt length) -> Tensor",
    from_host=True,
    reference=_reference_sum,
    core=_core_sum,
    triton="flat:sum_offsets",
    fake=lambda buffer_E, *rest: buffer_E.new_empty(rest[-1]),
    check=_check_sum,
    backward=_sum_backward,
    setup=_setup_sum,
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
