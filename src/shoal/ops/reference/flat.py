"""Rows of several widths in one flat buffer, in plain torch: differentiable, on any device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.ragged import Ragged

__all__ = [
    "aligned_flat_concat",
    "aligned_flat_split",
    "fill_with_offset_map",
    "finalize_shared_tensor",
    "fused_gather_embeddings_by_input",
    "fused_gather_embeddings_by_input_gradient",
    "offset_map_places",
]


def fused_gather_embeddings_by_input(
    fused_embeddings: Tensor,
    fused_embedding_offsets: Sequence[Tensor],
    embedding_dims: Sequence[int],
) -> list[Tensor]:
    """Rows flat[offset : offset + dim], one [n_k, d_k] per list of offsets."""
    pairs = zip(fused_embedding_offsets, embedding_dims, strict=True)
    return [fused_embeddings[_places(offsets, dim)] for offsets, dim in pairs]


def fused_gather_embeddings_by_input_gradient(
    size: int | Tensor,
    grads: Sequence[Tensor],
    embedding_offsets: Sequence[Tensor],
    embedding_dims: Sequence[int],
    scale: float = 1.0,
) -> Tensor:
    """Flat [size]: the sum of all rows over each element, in order, times scale."""
    length = size.numel() if isinstance(size, Tensor) else size
    half = grads[0].dtype in (torch.float16, torch.bfloat16)
    flat_E = grads[0].new_zeros(length, dtype=torch.float32 if half else None)
    for grad, offsets, dim in zip(grads, embedding_offsets, embedding_dims, strict=True):
        flat_E = flat_E.index_add(
            0, _places(offsets, dim).flatten(), grad.reshape(-1).to(flat_E.dtype)
        )
    return (flat_E * scale).to(grads[0].dtype)


def offset_map_places(
    positions_N: Tensor,
    splits_K1: Tensor,
    offsets_V: Tensor,
    offset_splits_U1: Tensor,
    dims: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """Elements of the value and of the buffer that an offset map pairs, int64 [pairs] each."""
    dims_K = torch.tensor(dims, dtype=torch.int64, device=positions_N.device)
    width_N = dims_K.repeat_interleave(splits_K1.diff())
    start_N = width_N.cumsum(0) - width_N
    counts_N = offset_splits_U1.diff()[positions_N]
    first_N = offset_splits_U1[positions_N]
    width_V = width_N.repeat_interleave(counts_N)
    offset_V = offsets_V[_spans(first_N, counts_N)]
    source = _spans(start_N.repeat_interleave(counts_N), width_V)
    return source, _spans(offset_V, width_V)


def fill_with_offset_map(
    pos: Ragged,
    value: Tensor,
    value_offset: tuple[Tensor, Tensor],
    value_buffer: Tensor,
    dims: Sequence[int],
) -> Tensor:
    """Copy each row of the value to all offsets of its key, in the buffer."""
    source, target = offset_map_places(pos.values, pos.offsets_B1, *value_offset, dims)
    value_buffer[target] = value[source]
    return value_buffer


def finalize_shared_tensor(
    shared_tensor_handles: Sequence[Tensor], dtype: torch.dtype, shape: Sequence[int]
) -> Tensor:
    """The shared buffer in a shape."""
    return shared_tensor_handles[0].view(*shape)


def aligned_flat_concat(
    tensors: Sequence[Tensor], scale: float = 1.0, *, alignment_bytes: int = 256
) -> Tensor:
    """All elements in one flat buffer, each tensor at an aligned start, zeros between."""
    unit = alignment_bytes // tensors[0].element_size()
    parts = [torch.nn.functional.pad(t.flatten(), (0, -t.numel() % unit)) for t in tensors]
    return torch.cat(parts) * scale


def aligned_flat_split(
    tensors: Sequence[Tensor], flat: Tensor, *, alignment_bytes: int = 256
) -> list[Tensor]:
    """Parts of a flat buffer, shaped as the tensors it was made of."""
    unit = alignment_bytes // flat.element_size()
    parts, start = [], 0
    for tensor in tensors:
        parts.append(flat[start : start + tensor.numel()].view(tensor.shape))
        start += tensor.numel() + -tensor.numel() % unit
    return parts


def _places(offsets: Tensor, dim: int) -> Tensor:
    return offsets.unsqueeze(1) + torch.arange(dim, device=offsets.device)


def _spans(first_N: Tensor, length_N: Tensor) -> Tensor:
    """first[0], first[0]+1, .. (length[0] of them), first[1], .."""
    total = length_N.sum()
    before_N = length_N.cumsum(0) - length_N
    within = torch.arange(int(total), device=first_N.device) - before_N.repeat_interleave(length_N)
    return first_N.repeat_interleave(length_N) + within
