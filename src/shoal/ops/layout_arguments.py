"""From the public arguments of the layout to the operators' tensors; checks all but values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.address import check_dense
from shoal.errors import DTypeError, InputError, ShapeError
from shoal.lookup import LayoutCall, LookupTables
from shoal.ops.layout_plan import FeatureConfigs, LayoutIndex
from shoal.ops.monolith_layout import MonolithOffsets, decode_monolith

_OP = "fused_embedding_to_layout"


def forward_arguments(
    embeddings_list: Sequence[Tensor],
    offsets: LayoutIndex | MonolithOffsets,
    feature_cfgs: FeatureConfigs,
) -> tuple[Any, ...]:
    """Arguments of `shoal::layout_forward`."""
    buffers = list(embeddings_list)
    index, plan = _index(buffers, offsets, feature_cfgs, _OP)
    return (buffers, *_call(index, plan))


def gradient_arguments(
    layout_tensors_grad: Sequence[Tensor | None],
    embeddings_list: Sequence[Tensor],
    offsets: LayoutIndex | MonolithOffsets,
    feature_cfgs: FeatureConfigs,
    scale: float | Tensor | None,
) -> tuple[Any, ...]:
    """Arguments of `shoal::layout_backward`."""
    op = f"{_OP}_grad"
    buffers = list(embeddings_list)
    index, plan = _index(buffers, offsets, feature_cfgs, op)
    if len(index.batch_sizes) != 1:
        got, remedy = len(index.batch_sizes), "Several requests in one call are for serving."
        raise InputError(f"{op}: requests", got, "one", remedy)
    grads = _grads(layout_tensors_grad, buffers[0], plan, index.batch_size, op)
    sizes = [buffer.numel() for buffer in buffers]
    factor = _scale(scale, buffers[0], op)
    return (grads, factor, sizes, *_call(index, plan))


def reshaped(grads: Sequence[Tensor], embeddings_list: Sequence[Tensor]) -> list[Tensor]:
    """Flat gradients in the shapes of the buffers."""
    return [grad.view(buffer.shape) for grad, buffer in zip(grads, embeddings_list, strict=True)]


def _call(index: LayoutIndex, tables: LookupTables) -> LayoutCall:
    cells = index.cell_splits_C1, index.cells_RF
    return tables.call(index.rows_N, index.buffer_N, *cells, index.batch_sizes)


def _index(
    buffers: Sequence[Tensor],
    offsets: LayoutIndex | MonolithOffsets,
    feature_cfgs: FeatureConfigs,
    op: str,
) -> tuple[LayoutIndex, LookupTables]:
    _check_tensors("embeddings_list", buffers, op)
    index = offsets
    if isinstance(index, MonolithOffsets):
        index = decode_monolith(index, buffers, feature_cfgs)
    if index.rows_N.device != buffers[0].device:
        allowed = f"{buffers[0].device}, as embeddings_list"
        remedy = "Move them with .to()."
        raise DTypeError(f"{op}: device of offsets", index.rows_N.device, allowed, remedy)
    features = len(feature_cfgs.features)
    if index.cells_RF.shape[1] != features:
        got, remedy = index.cells_RF.shape[1], "Make the index with the same feature_cfgs."
        raise ShapeError(f"{op}: features of cells_RF", got, features, remedy)
    return index, feature_cfgs.plan.on(buffers[0].device)


def _check_tensors(name: str, tensors: Sequence[Tensor], op: str) -> None:
    if not tensors:
        raise InputError(f"{op}: {name}", "no tensors", "one or more", "Pass the rows.")
    first = tensors[0]
    for i, tensor in enumerate(tensors):
        check_dense(f"{op}: {name}[{i}]", tensor)
        if not tensor.is_floating_point() or tensor.dtype != first.dtype:
            allowed = "one floating dtype" if i == 0 else f"{first.dtype}, as {name}[0]"
            raise DTypeError(f"{op}: dtype of {name}[{i}]", tensor.dtype, allowed, "Cast it.")
        if tensor.device != first.device:
            allowed = f"{first.device}, as {name}[0]"
            what = f"{op}: device of {name}[{i}]"
            raise DTypeError(what, tensor.device, allowed, "Move it with .to().")
    narrow = first.dtype not in (torch.float32, torch.float64)
    if narrow and first.device.type == "cpu":
        allowed = "float32 or float64 on the CPU"
        raise DTypeError(f"{op}: dtype of {name}[0]", first.dtype, allowed, "Call .float().")


def _grads(
    given: Sequence[Tensor | None], like: Tensor, plan: LookupTables, size: int, op: str
) -> list[Tensor]:
    """The gradients; one that is missing becomes an empty tensor, which counts as zeros."""
    outputs = len(plan.shapes) // 3
    if len(given) != outputs:
        raise ShapeError(f"{op}: layout_tensors_grad", len(given), outputs, "Pass one per output.")
    grads = []
    for i, grad in enumerate(given):
        if grad is None:
            grads.append(like.new_empty(0))
            continue
        want = (size, *(n for n in plan.shapes[3 * i : 3 * i + 3] if n))
        what = f"of layout_tensors_grad[{i}]"
        if tuple(grad.shape) != want:
            raise ShapeError(f"{op}: shape {what}", tuple(grad.shape), want, "As the output.")
        if grad.dtype != like.dtype or grad.device != like.device:
            got, allowed = (grad.dtype, str(grad.device)), (like.dtype, str(like.device))
            raise DTypeError(f"{op}: dtype and device {what}", got, allowed, "As the rows.")
        grads.append(grad)
    return grads


def _scale(scale: float | Tensor | None, like: Tensor, op: str) -> Tensor | None:
    if scale is None:
        return None
    if not isinstance(scale, Tensor):
        return torch.full((), float(scale), dtype=like.dtype, device=like.device)
    if scale.numel() != 1 or scale.device != like.device:
        got = f"{scale.numel()} elements on {scale.device}"
        allowed = f"1 element on {like.device}"
        raise ShapeError(f"{op}: layout_tensors_grad_scale", got, allowed, "Pass a scalar.")
    return scale.detach().reshape(()).to(like.dtype)
