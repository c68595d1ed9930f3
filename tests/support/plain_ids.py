"""Distinct ids and grouping by shard in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def dedup(ids_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Distinct ids of int64 [N], in order of first appearance; counts; inverse."""
    ids_U, inverse_N, counts_U = torch.unique(ids_N, return_inverse=True, return_counts=True)
    order_U = first_places(inverse_N, ids_U.numel()).argsort()
    rank_U = torch.empty_like(order_U)
    rank_U[order_U] = torch.arange(order_U.numel(), device=ids_N.device)
    return ids_U[order_U], counts_U[order_U], rank_U[inverse_N]


def first_places(inverse_N: Tensor, size: int) -> Tensor:
    """Where each of `size` distinct ids appears first."""
    places_N = torch.arange(inverse_N.numel(), device=inverse_N.device)
    first_U = torch.full((size,), inverse_N.numel(), device=inverse_N.device)
    return first_U.scatter_reduce(0, inverse_N, places_N, "amin")


def partition(shards_N: Tensor, num_shards: int) -> tuple[Tensor, Tensor]:
    """Stable grouping of positions by shard: order, sizes."""
    sizes_W = torch.zeros(num_shards, dtype=torch.int64, device=shards_N.device)
    sizes_W.index_add_(0, shards_N.long(), torch.ones_like(shards_N, dtype=torch.int64))
    return torch.argsort(shards_N, stable=True), sizes_W


def permute_rows(rows_N: Tensor, order_N: Tensor) -> Tensor:
    """Row i of the result is row order_N[i]."""
    return rows_N.index_select(0, order_N)


def unpermute_rows(rows_N: Tensor, order_N: Tensor) -> Tensor:
    """Row order_N[i] of the result is row i."""
    return torch.empty_like(rows_N).index_copy(0, order_N, rows_N)


def fused_reorder_given(
    ids: Sequence[Tensor], num_of_shards: int, dims: Sequence[int], shards: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Distinct ids of tables, counts, sizes [W*K] and offsets, one (shard, table) at a time."""
    device = ids[0].device
    founds = [dedup(part) for part in ids]
    owners = [
        shards_N[first_places(inverse_N, ids_U.numel())]
        for shards_N, (ids_U, _, inverse_N) in zip(shards, founds, strict=True)
    ]
    starts = [torch.zeros_like(ids_U) for ids_U, _, _ in founds]  # of each distinct id's row
    packed, counts, sizes, at = [], [], [], 0
    for shard in range(num_of_shards):
        for (ids_U, counts_U, _), owner_U, start_U, dim in zip(
            founds, owners, starts, dims, strict=True
        ):
            mine_U = owner_U == shard
            size = int(mine_U.sum())
            start_U[mine_U] = at + dim * torch.arange(size, device=device)
            packed.append(ids_U[mine_U])
            counts.append(counts_U[mine_U])
            sizes.append(size)
            at += dim * size
    sizes_WK = torch.tensor(sizes, dtype=torch.int64, device=device)
    offsets = [
        start_U[inverse_N] for (_, _, inverse_N), start_U in zip(founds, starts, strict=True)
    ]
    return torch.cat(packed), torch.cat(counts), sizes_WK, torch.cat(offsets)


def normalize_merged_split(row_splits_T: Tensor, sizes_P: Tensor) -> Tensor:
    """Row splits, one after another, as those of the joined ragged."""
    lengths = [part.diff() for part in torch.split(row_splits_T, sizes_P.tolist())]
    return torch.cat([row_splits_T.new_zeros(1), torch.cat(lengths).cumsum(0)])
