"""Ids of a batch split per table and shard, one id at a time."""

from __future__ import annotations

from collections.abc import Collection

import torch

from shoal.ops.layout_index import LayoutIndex
from shoal.ops.layout_specs import FeatureConfigs
from shoal.ops.sparse_fids import ShardedFids, ShardRule, completed
from shoal.placement import floormod, unsigned_mod
from shoal.ragged import KeyedRagged

__all__ = ["sharding_sparse_fids"]


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
