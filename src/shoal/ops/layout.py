"""From rows of ids straight to pooled, joined model inputs, and back.

One implementation of Monolith's five versions of `fused_embedding_to_layout`: rows are described
by a `LayoutIndex`, which `LayoutIndex.from_keyed` makes of a batch and its gathered unique rows,
`sharding_sparse_fids` of a batch to be looked up on shards, and `MonolithOffsets` of Monolith's
packed tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

import torch
from torch import Tensor

from shoal._core import ops as core
from shoal.address import address, check_dense, fresh_address
from shoal.errors import DTypeError, InputError, ShapeError, known_name
from shoal.lookup import ALONE, BY_ROW, LayoutCall
from shoal.ops.checks import check_layout
from shoal.ops.dispatch import linear, operator
from shoal.ops.layout_plan import FeatureConfigs, LayoutIndex, OutType
from shoal.ops.monolith_layout import MonolithOffsets, decode_monolith

Layout = OutType
_OP = "fused_embedding_to_layout"


def fused_embedding_to_layout(
    embeddings_list: Sequence[Tensor],
    offsets: LayoutIndex | MonolithOffsets,
    feature_cfgs: FeatureConfigs,
) -> list[Tensor]:
    """Pool each example's rows by feature and lay slices of them out as model inputs.

    A cell without ids, and a feature the batch lacks, give zeros. A shared feature is pooled once
    and copied to every example. The differences from Monolith: "stack" works with "firstn",
    offsets are 64-bit, and a bad offset is an error, not a crash.

    Args:
        embeddings_list: buffers of rows, floating, any shape: each table's `rows_UD`, or
            Monolith's flat buffers per table and server.
        offsets: where each id's row lies. On CUDA they are not checked unless
            `set_bounds_checks` is on.
        feature_cfgs: features and layouts; `feature_cfgs.outputs` names what is returned.

    Returns:
        Outputs in sorted layout name order, [B, D], [B, L, D], [B, n, D] or [B, n, L, D] as
        `layout_plan` has them, of the dtype of the rows.

    Raises:
        ShapeError: lengths that do not fit together; cell_splits_C1 that fall.
        DTypeError: other dtypes, or tensors on several devices.
        InputError: cells, buffers or rows out of range.

    Gradient: to the buffers: `fused_embedding_to_layout_grad`.
    Monolith: `fused_embedding_to_layout`.
    """
    arguments = forward_arguments(embeddings_list, offsets, feature_cfgs)
    return layout_forward(*arguments)  # type: ignore[no-any-return]


def fused_embedding_to_layout_grad(
    layout_tensors_grad: Sequence[Tensor | None],
    embeddings_list: Sequence[Tensor],
    offsets: LayoutIndex | MonolithOffsets,
    feature_cfgs: FeatureConfigs,
    *,
    layout_tensors_grad_scale: float | Tensor | None = None,
) -> list[Tensor]:
    """Gradients of the outputs as gradients of the rows.

    Each id gets its cell's gradient ("mean": over the cell's number of ids; "firstn": the first L
    ids only; a shared feature: summed over the batch); ids of one row are added in order of
    feature, example and id, whatever the number of threads.

    Args:
        layout_tensors_grad: one per output, in its shape; None counts as zeros.
        embeddings_list: the buffers; only their shapes are read.
        offsets, feature_cfgs: what the forward pass was given; one request.
        layout_tensors_grad_scale: factor on every gradient (a loss scale, a clip): a number or a
            tensor of one element.

    Returns:
        One gradient per buffer, in its shape; zeros where no id reads.

    Raises:
        As `fused_embedding_to_layout`; InputError for several requests.

    Gradient: to layout_tensors_grad.
    Monolith: `fused_embedding_to_layout_grad`.
    """
    forward = embeddings_list, offsets, feature_cfgs
    arguments = gradient_arguments(layout_tensors_grad, *forward, layout_tensors_grad_scale)
    grads: list[Tensor] = layout_backward(*arguments)
    return [grad.view(rows.shape) for grad, rows in zip(grads, embeddings_list, strict=True)]


def pooled_layout(layout: Layout, slices: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Lay pooled slices out as a model reads them.

    Slices are [B, D] each or [B, L, D] each. "none": as they are, one output per slice;
    "concat": [B, sum D] or [B, L, sum D]; "stack": [B, n, D] or [B, n, L, D]; "addn": their sum
    [B, D].

    Raises:
        UnknownName: no such layout.
        ShapeError: no slices, shapes the layout cannot join, or "addn" of sequences.
    """
    known_name("layout", layout, get_args(Layout))
    shapes = [tuple(part.shape) for part in slices]
    joined = {shape[:-1] for shape in shapes} if layout == "concat" else set(shapes)
    if not shapes or len(shapes[0]) not in (2, 3):
        raise ShapeError(f"slices of {layout}", shapes, "[B, D] or [B, L, D]", "Pool them first.")
    if layout == "none":
        return tuple(slices)
    if len(joined) > 1:
        allowed = "equal shapes" if layout != "concat" else "shapes equal but for D"
        raise ShapeError(f"slices of {layout}", shapes, allowed, "Use layout 'none'.")
    if layout == "concat":
        return (torch.cat(list(slices), dim=-1),)
    if layout == "stack":
        return (torch.stack(list(slices), dim=1),)
    if len(shapes[0]) == 3:
        raise ShapeError("slices of addn", shapes, "[B, D]", "Pool sequences before adding.")
    return (torch.stack(list(slices)).sum(dim=0),)


def forward_arguments(
    embeddings_list: Sequence[Tensor],
    offsets: LayoutIndex | MonolithOffsets,
    feature_cfgs: FeatureConfigs,
) -> tuple[Any, ...]:
    """Arguments of `shoal::layout_forward`, checked but for their values."""
    buffers = list(embeddings_list)
    return buffers, *_call(_OP, buffers, offsets, feature_cfgs)


def gradient_arguments(
    layout_tensors_grad: Sequence[Tensor | None],
    embeddings_list: Sequence[Tensor],
    offsets: LayoutIndex | MonolithOffsets,
    feature_cfgs: FeatureConfigs,
    scale: float | Tensor | None,
) -> tuple[Any, ...]:
    """Arguments of `shoal::layout_backward`, checked but for their values."""
    op, buffers = f"{_OP}_grad", list(embeddings_list)
    call = _call(op, buffers, offsets, feature_cfgs)
    if len(call.batch_sizes) != 1:
        got, remedy = len(call.batch_sizes), "Several requests in one call are for serving."
        raise InputError(f"{op}: requests", got, "one", remedy)
    shapes = _output_shapes(call.batch_sizes, call.shapes)
    grads = _grads(op, layout_tensors_grad, shapes, buffers[0])
    sizes = [buffer.numel() for buffer in buffers]
    return grads, _scale(op, scale, buffers[0]), sizes, *call


def _call(
    op: str,
    buffers: Sequence[Tensor],
    offsets: LayoutIndex | MonolithOffsets,
    feature_cfgs: FeatureConfigs,
) -> LayoutCall:
    _check_buffers(op, buffers)
    index, device = offsets, buffers[0].device
    if isinstance(index, MonolithOffsets):
        index = decode_monolith(index, buffers, feature_cfgs)
    if index.rows_N.device != device:
        got, allowed = index.rows_N.device, f"{device}, as embeddings_list"
        raise DTypeError(f"{op}: device of offsets", got, allowed, "Move them with .to().")
    features = len(feature_cfgs.features)
    if index.cells_RF.shape[1] != features:
        number, remedy = index.cells_RF.shape[1], "Make the index with the same feature_cfgs."
        raise ShapeError(f"{op}: features of cells_RF", number, features, remedy)
    tables, cells = feature_cfgs.plan.on(device), (index.cell_splits_C1, index.cells_RF)
    return tables.call(index.rows_N, index.buffer_N, *cells, index.batch_sizes)


def _check_buffers(op: str, buffers: Sequence[Tensor]) -> None:
    if not buffers:
        raise InputError(f"{op}: embeddings_list", "no tensors", "one or more", "Pass the rows.")
    first = buffers[0]
    for i, tensor in enumerate(buffers):
        name = f"embeddings_list[{i}]"
        check_dense(f"{op}: {name}", tensor)
        if not tensor.is_floating_point() or tensor.dtype != first.dtype:
            allowed = "one floating dtype" if i == 0 else f"{first.dtype}, as embeddings_list[0]"
            raise DTypeError(f"{op}: dtype of {name}", tensor.dtype, allowed, "Cast it.")
        if tensor.device != first.device:
            allowed, remedy = f"{first.device}, as embeddings_list[0]", "Move it with .to()."
            raise DTypeError(f"{op}: device of {name}", tensor.device, allowed, remedy)
    if first.dtype not in (torch.float32, torch.float64) and first.device.type == "cpu":
        what, allowed = f"{op}: dtype of embeddings_list[0]", "float32 or float64 on the CPU"
        raise DTypeError(what, first.dtype, allowed, "Call .float().")


def _grads(
    op: str, given: Sequence[Tensor | None], shapes: Sequence[Sequence[int]], like: Tensor
) -> list[Tensor]:
    """The gradients; one that is missing becomes an empty tensor, which counts as zeros."""
    if len(given) != len(shapes):
        what = f"{op}: layout_tensors_grad"
        raise ShapeError(what, len(given), len(shapes), "Pass one per output.")
    for i, (grad, shape) in enumerate(zip(given, shapes, strict=True)):
        what = f"of layout_tensors_grad[{i}]"
        if grad is None:
            continue
        if tuple(grad.shape) != tuple(shape):
            got, want = tuple(grad.shape), tuple(shape)
            raise ShapeError(f"{op}: shape {what}", got, want, "As the output.")
        if grad.dtype != like.dtype or grad.device != like.device:
            kinds = (grad.dtype, str(grad.device)), (like.dtype, str(like.device))
            raise DTypeError(f"{op}: dtype and device {what}", *kinds, "As the rows.")
    return [like.new_empty(0) if grad is None else grad for grad in given]


def _scale(op: str, scale: float | Tensor | None, like: Tensor) -> Tensor | None:
    if scale is None:
        return None
    if not isinstance(scale, Tensor):
        return torch.full((), float(scale), dtype=like.dtype, device=like.device)
    if scale.numel() != 1 or scale.device != like.device:
        got, allowed = f"{scale.numel()} elements on {scale.device}", f"1 element on {like.device}"
        raise ShapeError(f"{op}: layout_tensors_grad_scale", got, allowed, "Pass a scalar.")
    return scale.detach().reshape(()).to(like.dtype)


def _output_shapes(batch_sizes: Sequence[int], shapes: Sequence[int]) -> list[list[int]]:
    size = sum(batch_sizes)
    return [[size, *(n for n in shapes[i : i + 3] if n)] for i in range(0, len(shapes), 3)]


def _core_forward(buffers: list[Tensor], *call: Any) -> list[Tensor]:
    given, dtype = LayoutCall(*call), buffers[0].dtype
    sources = [buffer.contiguous() for buffer in buffers]
    shapes = _output_shapes(given.batch_sizes, given.shapes)
    outputs = [torch.empty(shape, dtype=dtype, device="cpu") for shape in shapes]
    begins, floats = [address(part) for part in sources], [part.numel() for part in sources]
    ends = begins, floats, [fresh_address(output) for output in outputs]
    _run_core(core.layout_forward, ends, buffers, given, dtype)
    return outputs


def _core_backward(
    grads: list[Tensor], scale: Tensor | None, sizes: list[int], *call: Any
) -> list[Tensor]:
    given, dtype = LayoutCall(*call), grads[0].dtype
    sources = [grad.contiguous() for grad in grads]
    buffers = [torch.empty(size, dtype=dtype, device="cpu") for size in sizes]
    begins = [address(source) if source.numel() else 0 for source in sources]
    factor = 1.0 if scale is None else float(scale)
    ends = begins, factor, [fresh_address(buffer) for buffer in buffers], sizes
    _run_core(core.layout_backward, ends, sizes, given, dtype)
    return buffers


def _run_core(
    run: Any,
    ends: tuple[Any, ...],
    buffers: Sequence[Tensor] | Sequence[int],
    given: LayoutCall,
    dtype: torch.dtype,
) -> None:
    """Lay rows out, or back, between these ends."""
    read = [tensor.contiguous() for tensor in given[:6]]
    ids, cells = given.rows_N.shape[0], given.cell_splits.shape[0] - 1
    sizes = [ids, cells, given.features.shape[0], given.slices.shape[0], given.limits[1]]
    call = [address(tensor) for tensor in read], sizes, given.batch_sizes
    if not run(*ends, *call, dtype == torch.float64, torch.get_num_threads()):
        check_layout(buffers, *given)
        what, got = f"{_OP}: offsets", "values out of range"
        raise InputError(what, got, allowed="ids' rows", remedy="Create them again.")


def _fake_forward(buffers: list[Tensor], *rest: Any) -> list[Tensor]:
    batch_sizes, shapes, _ = rest[-3:]
    return [buffers[0].new_empty(shape) for shape in _output_shapes(batch_sizes, shapes)]


def _forward_transposed(
    grads: list[Tensor | None], buffer_shapes: Sequence[torch.Size], *call: Any
) -> list[Tensor]:
    requests = len(LayoutCall(*call).batch_sizes)
    if requests != 1:
        remedy = "Several requests in one call are for serving."
        raise InputError(f"{_OP}: requests", requests, "one for gradients", remedy)
    like = next(grad for grad in grads if grad is not None)
    # An empty gradient counts as zeros: nothing is filled, nothing is read.
    given = [like.new_empty(0) if grad is None else grad for grad in grads]
    found = layout_backward(given, None, [shape.numel() for shape in buffer_shapes], *call)
    return [grad.view(shape) for grad, shape in zip(found, buffer_shapes, strict=True)]


def _backward_transposed(
    grads: list[Tensor | None],
    shapes: Sequence[torch.Size],
    scale: Tensor | None,
    sizes: Sequence[int],
    *call: Any,
) -> list[Tensor | None]:
    like = next(grad for grad in grads if grad is not None)
    rows = [
        like.new_zeros(size) if grad is None else grad
        for grad, size in zip(grads, sizes, strict=True)
    ]
    laid = layout_forward(rows, *call)
    scaled = laid if scale is None else [part * scale for part in laid]
    # Those that were empty counted as zeros.
    return [part if shape.numel() else None for part, shape in zip(scaled, shapes, strict=True)]


_INDEX = (
    "Tensor rows_N, Tensor buffer_N, Tensor cell_splits, Tensor cells, Tensor features, "
    "Tensor slices, Tensor sums, SymInt[] batch_sizes, int[] shapes, int[] limits"
)

layout_forward = operator(
    f"layout_forward(Tensor[] buffers, {_INDEX}) -> Tensor[]",
    from_host=True,
    core=_core_forward,
    triton="layout:layout_forward",
    fake=_fake_forward,
    check=check_layout,
    gradient=linear(_forward_transposed),
)

layout_backward = operator(
    f"layout_backward(Tensor[] grads, Tensor? scale, SymInt[] sizes, {_INDEX}) -> Tensor[]",
    from_host=True,
    core=_core_backward,
    triton="layout:layout_backward",
    fake=lambda grads, scale, sizes, *_: [grads[0].new_empty(size) for size in sizes],
    check=lambda grads, scale, sizes, *call: check_layout(sizes, *call),
    gradient=linear(_backward_transposed),
)


def layout_added(buffers: Sequence[Tensor], *call: Any) -> list[Tensor]:
    """`layout_forward` of a plan in which sequences share columns with other slices.

    Implementations write the rows of sequences alone: here each slice has columns of its own, which
    are then added in order of slice. Columns that no slice covers are zeros. On CUDA it waits for
    the device.
    """
    given = LayoutCall(*call)
    features, slices, floats = given.features.clone(), given.slices.clone(), given.limits[1]
    features[:, 2] %= BY_ROW
    slices[:, 3], slices[:, 4], slices[:, 5] = 0, given.slices[:, 7], given.slices[:, 2]
    slices[:, 6], slices[:, 8] = ALONE, floats
    alone = given._replace(features=features, slices=slices, sums=given.sums[:0])
    (apart_BE,) = layout_forward(list(buffers), *alone._replace(shapes=[0, 0, floats]))
    shapes = _output_shapes(given.batch_sizes, given.shapes)
    outputs = [apart_BE.new_zeros(shape) for shape in shapes]
    flat, lengths = [out.flatten(1) for out in outputs], features[:, 3].tolist()
    for feature, _, width, output, place, step, _, first, _ in given.slices.tolist():
        for j in range(max(lengths[feature], 1)):
            to, at = place + j * step, first + j * width
            flat[output][:, to : to + width] += apart_BE[:, at : at + width]
    return outputs
