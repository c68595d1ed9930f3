"""Reordering and splitting of ids in plain torch: the oracle of the fast operations."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.ops.layout_plan import FeatureConfigs, LayoutIndex
from shoal.ops.reference.rows import dedup, row_ids
from shoal.ops.sparse_fids import ShardedFids, ShardRule, completed
from shoal.placement import floormod, unsigned_mod
from shoal.ragged import KeyedRagged, Ragged

ShardBy = Callable[[Tensor, int], Tensor]
"""From ids int64 [N] and a number of shards to shards int64 [N] in [0, shards)."""


class Partition(NamedTuple):
    """Positions grouped by shard.

    order_N int64 [N]: the positions of shard 0 in input order, then those of shard 1, and so on;
    sizes_W int64 [W], positions of each shard.
    """

    order_N: Tensor
    sizes_W: Tensor


class RaggedPartition(NamedTuple):
    """A ragged's values grouped by shard.

    values_N, positions_N int64 [N]: the values of shard 0 in input order, then those of shard 1,
    and so on, and where each stood in the input. sizes_W int64 [W]: values of each shard.
    offsets_WB1 int64 [W, B+1]: of each shard's values alone, by input row.
    """

    values_N: Tensor
    positions_N: Tensor
    sizes_W: Tensor
    offsets_WB1: Tensor


class RaggedSplit(NamedTuple):
    """A ragged cut by shard.

    values: W ragged, each with the batch size of the input. positions: W ragged of the same
    offsets; where each value stood among the input's values.
    """

    values: list[Ragged]
    positions: list[Ragged]


class Reorder(NamedTuple):
    """Distinct ids by shard: ids_U int64 [U] (or [U, C]), sizes_W int64 [W]."""

    ids_U: Tensor
    sizes_W: Tensor


class FusedReorder(NamedTuple):
    """Distinct ids of K tables, packed for W shards.

    ids_U int64 [U]: by shard, then by table, then in order of first appearance.
    counts_U int64 [U]: occurrences of each id in its table.
    shard_sizes_W int64 [W]: ids of each shard. slot_sizes_WK int64 [W*K], shard-major: ids of each
    table in each shard.
    offset_sizes_K int64 [K]: ids of each table as given; on the CPU, unless they came as a ragged.
    offsets_N int64 [N]: for every id as given, where its row starts in a flat buffer of the rows of
    ids_U.
    """

    ids_U: Tensor
    counts_U: Tensor
    shard_sizes_W: Tensor
    slot_sizes_WK: Tensor
    offset_sizes_K: Tensor
    offsets_N: Tensor


class ValueOffset(NamedTuple):
    """For each distinct key, where its copies start in a flat buffer; jagged twice.

    offsets_N int64 [N]; those of distinct key u are `offsets_N[splits_U1[u]:splits_U1[u+1]]`, and
    the distinct keys of slot k are `slot_splits_K1[k]` up to `slot_splits_K1[k+1]`.
    """

    offsets_N: Tensor
    splits_U1: Tensor
    slot_splits_K1: Tensor


class UniqueKeys(NamedTuple):
    """Distinct keys of each slot, where their rows go, and a buffer for all rows or None."""

    unique_key: Ragged
    value_offset: ValueOffset
    value_buffer: Tensor | None


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
    sizes_W = torch.zeros(num_shards, dtype=torch.int64, device=shards_N.device)
    sizes_W.index_add_(0, shards_N.long(), torch.ones_like(shards_N, dtype=torch.int64))
    return Partition(torch.argsort(shards_N, stable=True), sizes_W)


def permute_rows(rows_N: Tensor, order_N: Tensor) -> Tensor:
    """Row i of the result is row order_N[i]."""
    return rows_N.index_select(0, order_N)


def unpermute_rows(rows_N: Tensor, order_N: Tensor) -> Tensor:
    """Row order_N[i] of the result is row i."""
    return torch.empty_like(rows_N).index_copy(0, order_N, rows_N)


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
    first_U = _first_places(found.inverse_N, found.ids_U.numel())
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
    """The same with the shard of every id given, one (shard, table) at a time."""
    device = ids[0].device
    founds = [dedup(part) for part in ids]
    owners = [
        shards_N[_first_places(found.inverse_N, found.ids_U.numel())]
        for shards_N, found in zip(shards, founds, strict=True)
    ]
    starts = [torch.zeros_like(found.ids_U) for found in founds]  # of each distinct id's row
    packed, counts, sizes, at = [], [], [], 0
    for shard in range(num_of_shards):
        for found, owner_U, start_U, dim in zip(founds, owners, starts, dims, strict=True):
            mine_U = owner_U == shard
            size = int(mine_U.sum())
            start_U[mine_U] = at + dim * torch.arange(size, device=device)
            packed.append(found.ids_U[mine_U])
            counts.append(found.counts_U[mine_U])
            sizes.append(size)
            at += dim * size
    sizes_WK = torch.tensor(sizes, dtype=torch.int64, device=device)
    offsets = [start_U[found.inverse_N] for found, start_U in zip(founds, starts, strict=True)]
    return FusedReorder(
        torch.cat(packed),
        torch.cat(counts),
        sizes_WK.view(num_of_shards, len(ids)).sum(1),
        sizes_WK,
        torch.tensor([part.numel() for part in ids], dtype=torch.int64, device="cpu"),
        torch.cat(offsets),
    )


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


def normalize_merged_split(row_splits_T: Tensor, sizes_P: Tensor) -> Tensor:
    """Row splits, one after another, as those of the joined ragged."""
    lengths = [part.diff() for part in torch.split(row_splits_T, sizes_P.tolist())]
    return torch.cat([row_splits_T.new_zeros(1), torch.cat(lengths).cumsum(0)])


def fused_value_rowids(ragged: Ragged) -> Tensor:
    """Row of each value."""
    return row_ids(ragged.offsets_B1)


def _first_places(inverse_N: Tensor, size: int) -> Tensor:
    places_N = torch.arange(inverse_N.numel(), device=inverse_N.device)
    first_U = torch.full((size,), inverse_N.numel(), device=inverse_N.device)
    return first_U.scatter_reduce(0, inverse_N, places_N, "amin")


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
