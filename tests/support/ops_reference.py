"""The public operations in plain torch: differentiable oracles of the tests."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from shoal.ops import (
    Dedup,
    FeatureConfigs,
    FusedReorder,
    GatheredRows,
    LayoutIndex,
    MonolithOffsets,
    Partition,
    RaggedPartition,
    RaggedSplit,
    Reorder,
    ShardBy,
    ShardedFids,
    UniqueKeys,
    ValueOffset,
)
from shoal.ops.checks import check_layout
from shoal.ops.layout import forward_arguments, gradient_arguments
from shoal.ops.sparse_fids import ShardRule, completed
from shoal.placement import floormod, unsigned_mod
from shoal.ragged import KeyedRagged, Ragged
from support import plain_ids, plain_rows
from support.plain_ids import first_places
from support.plain_layout import layout_backward, layout_forward
from support.plain_rows import (
    gather_flat,
    grouped,
    offset_map_places,
    row_ids,
    scatter_flat,
    segment_pooled,
)

Length = int | Sequence[int]

normalize_merged_split = plain_ids.normalize_merged_split
permute_rows = plain_ids.permute_rows
unpermute_rows = plain_ids.unpermute_rows
segment_first_n = plain_rows.segment_first_n
segment_offsets = plain_rows.segment_offsets


def dedup(ids_N: Tensor) -> Dedup:
    """Distinct ids of int64 [N], in order of first appearance."""
    return Dedup(*plain_ids.dedup(ids_N))


def dedup_into(
    ids_N: Tensor,
    *,
    ids_out_N: Tensor,
    counts_out_N: Tensor,
    inverse_out_N: Tensor,
    size_out_1: Tensor,
) -> None:
    """`dedup` into the heads of given tensors."""
    found = dedup(ids_N)
    ids_out_N[: found.ids_U.numel()] = found.ids_U
    counts_out_N[: found.ids_U.numel()] = found.counts_U
    inverse_out_N.copy_(found.inverse_N)
    size_out_1.fill_(found.ids_U.numel())


def partition(shards_N: Tensor, num_shards: int) -> Partition:
    """Stable grouping of positions by shard."""
    return Partition(*plain_ids.partition(shards_N, num_shards))


def split_by_indices(indices_N: Tensor, tensor_N: Tensor, num_splits: int) -> list[Tensor]:
    """Rows of each split, in order."""
    return [tensor_N[indices_N == split] for split in range(num_splits)]


def ragged_split_by_indices(indices_N: Tensor, ragged: Ragged, num_splits: int) -> RaggedSplit:
    """Values of each split, row by row, and where they stood."""
    rows_N = row_ids(ragged.offsets_B1)
    positions_N = torch.arange(ragged.values.numel(), device=ragged.values.device)
    values, positions = [], []
    for split in range(num_splits):
        mine_N = indices_N == split
        lengths_B = torch.zeros_like(ragged.lengths)
        lengths_B.index_add_(0, rows_N[mine_N], torch.ones_like(rows_N[mine_N]))
        values.append(Ragged.from_lengths(ragged.values[mine_N], lengths_B))
        positions.append(Ragged.from_lengths(positions_N[mine_N], lengths_B))
    return RaggedSplit(values, positions)


def ragged_partition(indices_N: Tensor, ragged: Ragged, num_splits: int) -> RaggedPartition:
    """The splits of `ragged_split_by_indices`, joined."""
    values, positions = ragged_split_by_indices(indices_N, ragged, num_splits)
    sizes = [part.values.numel() for part in values]
    return RaggedPartition(
        torch.cat([part.values for part in values]),
        torch.cat([part.values for part in positions]),
        torch.tensor(sizes, device=indices_N.device),
        torch.stack([part.offsets_B1 for part in values]),
    )


def reorder_by_indices(ids_N: Tensor, shards_N: Tensor, num_shards: int) -> Reorder:
    """Distinct ids (or rows of ids) by shard, the last to appear first."""
    if ids_N.ndim == 2:
        _, keys_N = torch.unique(ids_N, dim=0, return_inverse=True)
    else:
        keys_N = ids_N
    found = dedup(keys_N)
    first_U = first_places(found.inverse_N, found.ids_U.numel())
    shards_U = shards_N[first_U].long()
    places = [first_U[shards_U == shard].flip(0) for shard in range(num_shards)]
    sizes = [place.numel() for place in places]
    return Reorder(ids_N[torch.cat(places)], torch.tensor(sizes, device=ids_N.device))


def fused_reorder_by_indices(
    ids: Sequence[Tensor] | Ragged,
    num_of_shards: int,
    dim_sizes: Sequence[int] | None = None,
    *,
    shard_by: ShardBy = floormod,
) -> FusedReorder:
    """Distinct ids of every table, cut by shard."""
    if isinstance(ids, Ragged):
        ids = list(torch.split(ids.values, ids.lengths.tolist()))
    parts: Sequence[Tensor] = ids
    dims = dim_sizes if dim_sizes is not None else [1] * len(parts)
    shards = [shard_by(part, num_of_shards) for part in parts]
    return fused_reorder_given(parts, num_of_shards, dims, shards)


def fused_reorder_given(
    ids: Sequence[Tensor], num_of_shards: int, dims: Sequence[int], shards: Sequence[Tensor]
) -> FusedReorder:
    """The same with the shard of every id given."""
    ids_U, counts_U, sizes_WK, offsets_N = plain_ids.fused_reorder_given(
        ids, num_of_shards, dims, shards
    )
    shard_sizes_W = sizes_WK.view(num_of_shards, len(ids)).sum(1)
    lengths_K = torch.tensor([part.numel() for part in ids], dtype=torch.int64, device="cpu")
    return FusedReorder(ids_U, counts_U, shard_sizes_W, sizes_WK, lengths_K, offsets_N)


def unique_key_with_value_and_offset(
    key: Ragged, dims: Sequence[int], generate_buffer: bool = True
) -> UniqueKeys:
    """Distinct keys of each slot, and where the rows of all their occurrences start."""
    device = key.values.device
    unique, offsets, lengths, at = [], [], [], 0
    for slot, dim in zip(key.to_lists(), dims, strict=True):
        found = dedup(torch.tensor(slot, dtype=torch.int64, device=device))
        for u in range(found.ids_U.numel()):
            places = (found.inverse_N == u).nonzero().flatten()
            offsets.append(at + dim * places)
            lengths.append(places.numel())
        unique.append(found.ids_U.tolist())
        at += dim * len(slot)
    keys = Ragged.from_lists(unique).to(device)
    splits = [0]
    for length in lengths:
        splits.append(splits[-1] + length)
    none = torch.empty(0, dtype=torch.int64, device=device)
    value_offset = ValueOffset(
        torch.cat([*offsets, none]),
        torch.tensor(splits, dtype=torch.int64, device=device),
        keys.offsets_B1,
    )
    return UniqueKeys(
        keys,
        value_offset,
        torch.empty(at, dtype=torch.float32, device=device) if generate_buffer else None,
    )


def fused_value_rowids(ragged: Ragged) -> Tensor:
    """Row of each value."""
    return row_ids(ragged.offsets_B1)


def sharding_sparse_fids(
    batch: KeyedRagged,
    ps_num: int,
    feature_cfgs: FeatureConfigs,
    *,
    unique: bool = True,
    shared: Collection[str] = (),
    rule: ShardRule = "unsigned_mod",
) -> ShardedFids:
    """`shoal.ops.sharding_sparse_fids` in plain Python."""
    batch, cells = completed(batch, ps_num, feature_cfgs, shared, rule)
    tables = feature_cfgs.tables
    lists: list[list[int]] = [[] for _ in range(len(tables) * ps_num)]
    floats = [0] * len(lists)
    shard_N = (floormod if rule == "floormod" else unsigned_mod)(batch.values_N, ps_num).tolist()
    ids_N, splits = batch.values_N.tolist(), batch.key_splits.tolist()
    rows, buffers, row_splits = [], [], []
    for f, name in enumerate(batch.keys):
        config = feature_cfgs.feature_configs[name]
        first = tables.index(config.table) * ps_num
        row_splits.append([len(lists[first + p]) for p in range(ps_num)])
        seen: dict[int, int] = {}
        for n in range(splits[f], splits[f + 1]):
            buffer = first + shard_N[n]
            row = seen.get(ids_N[n]) if unique else None
            if row is None:
                row = seen[ids_N[n]] = floats[buffer]
                floats[buffer] += config.width
                lists[buffer].append(ids_N[n])
            rows.append(row)
            buffers.append(buffer)
    index = LayoutIndex(
        torch.tensor(rows, dtype=torch.int64, device="cpu"),
        torch.tensor(buffers, dtype=torch.int32, device="cpu"),
        batch.offsets_FB1,
        cells,
        (batch.batch_size,),
    )
    return ShardedFids(
        torch.tensor([id_ for part in lists for id_ in part], dtype=torch.int64, device="cpu"),
        torch.tensor(row_splits, dtype=torch.int64, device="cpu"),
        index,
        torch.tensor([len(part) for part in lists], device="cpu").view(-1, ps_num),
        torch.tensor(floats, device="cpu").view(-1, ps_num),
        feature_cfgs,
        batch,
    )


def match_rows(ids_M: Tensor, query: Tensor, *, missing_ok: bool = False) -> Tensor:
    """First row of each id, int64 shaped as `query`; -1 where there is none."""
    return plain_rows.match_rows(ids_M, query.flatten()).view(query.shape)


def gather_rows(rows: Tensor | Sequence[Tensor], index: Tensor) -> Tensor:
    """Rows by index, [*index.shape, D]; several arrays are numbered through."""
    rows_MD = rows if isinstance(rows, Tensor) else torch.cat(list(rows))
    return rows_MD[index]


def scatter_rows(grad: Tensor, index: Tensor, rows: int) -> Tensor:
    """Sum of the gradients of each row, [rows, D], in order."""
    flat_ND = grad.reshape(index.numel(), grad.shape[-1])
    return plain_rows.scatter_rows(flat_ND, index.flatten(), rows)


def map_id_to_embedding(
    ids: Sequence[Tensor],
    embeddings: Sequence[Tensor],
    input: Tensor,
    use_multi_threads: bool = True,
) -> Tensor:
    """Row of the first of `ids` that equals each id of the input, [*input.shape, D]."""
    return gather_rows(embeddings, match_rows(torch.cat(list(ids)), input))


def map_id_to_embedding_gradient_back_prop(
    ids: Sequence[Tensor], input: Tensor, grads: Tensor
) -> list[Tensor]:
    """Gradients of the rows that `map_id_to_embedding` read, one [M, D] per entry of `ids`."""
    index = match_rows(torch.cat(list(ids)), input)
    sizes = [part.numel() for part in ids]
    return list(torch.split(scatter_rows(grads, index, sum(sizes)), sizes))


def gather_embeddings_by_input(
    ids: Tensor, embeddings: Tensor, input: Tensor, use_multi_threads: bool = True
) -> GatheredRows:
    """Rows by id, and which they are."""
    index = match_rows(ids, input)
    return GatheredRows(embeddings[index], index)


def gather_embeddings_by_ids_gradient_back_prop(
    ids: Tensor, grads: Tensor, index_mapping: Tensor
) -> Tensor:
    """Gradient [M, D] of the rows that `gather_embeddings_by_input` read."""
    return scatter_rows(grads, index_mapping, ids.numel())


def fused_gather_embeddings_by_input(
    fused_embeddings: Tensor,
    fused_embedding_offsets: Sequence[Tensor],
    embedding_dims: Sequence[int],
) -> list[Tensor]:
    """Rows flat[offset : offset + dim], one [n_k, d_k] per list of offsets."""
    return gather_flat(fused_embeddings, fused_embedding_offsets, embedding_dims)


def fused_gather_embeddings_by_input_gradient(
    size: int | Tensor,
    grads: Sequence[Tensor],
    embedding_offsets: Sequence[Tensor],
    embedding_dims: Sequence[int],
    scale: float = 1.0,
) -> Tensor:
    """Flat [size]: the sum of all rows over each element, in order, times scale."""
    length = size.numel() if isinstance(size, Tensor) else size
    return scatter_flat(grads, embedding_offsets, length, scale)


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


def segment_sum(rows_ND: Tensor, offsets_B1: Tensor) -> Tensor:
    """Sum of each segment's rows, [B, D]; an empty segment gives zeros."""
    return segment_pooled(rows_ND, offsets_B1, "sum")


def segment_mean(rows_ND: Tensor, offsets_B1: Tensor) -> Tensor:
    """Mean of each segment's rows, [B, D]; an empty segment gives zeros, not NaN."""
    return segment_pooled(rows_ND, offsets_B1, "mean")


def segment_sqrtn(rows_ND: Tensor, offsets_B1: Tensor) -> Tensor:
    """Sum of each segment's rows over the square root of their number, [B, D]."""
    return segment_pooled(rows_ND, offsets_B1, "sqrtn")


def segment_l2(rows_ND: Tensor, offsets_B1: Tensor) -> Tensor:
    """Square root of each segment's sum of squares, by column, [B, D]."""
    return segment_pooled(rows_ND, offsets_B1, "l2")


def reduce_sum(
    indices_M1: Tensor, values_MD: Tensor, length: Length, *, indices_sorted: bool = False
) -> Tensor:
    """Sum of the values of each index, [B, D]; zeros where there are none."""
    return _grouped("reduce_sum", "sum", indices_M1, values_MD, length, indices_sorted)


def reduce_mean(
    indices_M1: Tensor, values_MD: Tensor, length: Length, *, indices_sorted: bool = False
) -> Tensor:
    """Mean of the values of each index, [B, D]; zeros, not NaN, where there are none."""
    return _grouped("reduce_mean", "mean", indices_M1, values_MD, length, indices_sorted)


def reduce_sqrtn(
    indices_M1: Tensor, values_MD: Tensor, length: Length, *, indices_sorted: bool = False
) -> Tensor:
    """Square root of the sum of squares of the values of each index, [B, D]: an L2 norm."""
    return _grouped("reduce_sqrtn", "l2", indices_M1, values_MD, length, indices_sorted)


def reduce_mean_sqrtn(
    indices_M1: Tensor, values_MD: Tensor, length: Length, *, indices_sorted: bool = False
) -> Tensor:
    """Sum of the values of each index over the square root of their number, [B, D]."""
    return _grouped("reduce_mean_sqrtn", "sqrtn", indices_M1, values_MD, length, indices_sorted)


def _grouped(
    op: str, mode: str, indices_M1: Tensor, values_MD: Tensor, length: Length, in_order: bool
) -> Tensor:
    index_M, size = indices_M1.reshape(-1), length if isinstance(length, int) else length[0]
    return grouped(values_MD, index_M, torch.bincount(index_M, minlength=size), mode)


def fused_sorted_segment_sum(
    indices: Sequence[Tensor], values: Sequence[Tensor], shapes: Sequence[Sequence[int]]
) -> list[Tensor]:
    """Sum of the values of each sorted index, one [B, D] for each table."""
    return [
        reduce_sum(index_M, values_MD, shape[0], indices_sorted=True)
        for index_M, values_MD, shape in zip(indices, values, shapes, strict=True)
    ]


def fused_reduce_sum_and_split(
    indices_M1: Tensor,
    values_MD: Tensor,
    length: Length,
    split_dims: Sequence[int],
    *,
    indices_sorted: bool = False,
) -> list[Tensor]:
    """`reduce_sum`, its columns split: one [B, s] for each s of split_dims."""
    sums_BD = reduce_sum(indices_M1, values_MD, length, indices_sorted=indices_sorted)
    return list(torch.split(sums_BD, list(split_dims), dim=1))


def fused_reduce_and_split_gpu(
    splits: Sequence[Tensor], embeddings: Sequence[Tensor], slice_dims: Sequence[Sequence[int]]
) -> list[Tensor]:
    """Segment sums of several tables, their columns split, in one flat list."""
    return [
        part
        for offsets_B1, rows_ND, widths in zip(splits, embeddings, slice_dims, strict=True)
        for part in torch.split(segment_sum(rows_ND, offsets_B1), list(widths), dim=1)
    ]


def fused_embedding_to_layout(
    embeddings_list: Sequence[Tensor],
    offsets: LayoutIndex | MonolithOffsets,
    feature_cfgs: FeatureConfigs,
) -> list[Tensor]:
    """`shoal.ops.fused_embedding_to_layout` in plain torch."""
    arguments = forward_arguments(embeddings_list, offsets, feature_cfgs)
    check_layout(*arguments[:9])
    return layout_forward(*arguments)


def fused_embedding_to_layout_grad(
    layout_tensors_grad: Sequence[Tensor | None],
    embeddings_list: Sequence[Tensor],
    offsets: LayoutIndex | MonolithOffsets,
    feature_cfgs: FeatureConfigs,
    *,
    layout_tensors_grad_scale: float | Tensor | None = None,
) -> list[Tensor]:
    """`shoal.ops.fused_embedding_to_layout_grad` in plain torch."""
    arguments = gradient_arguments(
        layout_tensors_grad, embeddings_list, offsets, feature_cfgs, layout_tensors_grad_scale
    )
    grads, scale, sizes, *rest = arguments
    check_layout(sizes, *rest[:8])
    found = layout_backward(grads, scale, sizes, *rest)
    return [grad.view(rows.shape) for grad, rows in zip(found, embeddings_list, strict=True)]
