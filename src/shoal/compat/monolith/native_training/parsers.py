"""Ids of a batch split for `PartitionedHashTable` where batches are prepared."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from shoal.errors import ConfigError
from shoal.ops import FeatureConfigs, MonolithOffsets, sharding_sparse_fids
from shoal.ragged import KeyedRagged
from shoal.table.spec import TableSpec

PREFIX = "__sharding_sparse_fids__"
_OFFSETS = (
    "fid_offset", "feature_offset", "nfl_offset", "batch_size",
    "nfl_size", "feature_size", "fid_size", "emb_size",
)  # fmt: skip
_VERSION: Literal[5] = 5


@dataclass(frozen=True, slots=True)
class ShardingSparseFidsOpParams:
    """What `PartitionedHashTable.gen_feature_configs` made.

    Args:
        num_ps: parts that ids are split in, at least 1.
        use_native_multi_hash_table: a table for each feature; else features of one config share.
        unique: whether a part lists an id of a feature once; called for each batch.
        transfer_float16: rows and gradients travel as float16.
        sub_table_name_to_config: the tables.
        feature_configs: features and layouts.
        enable_gpu_emb: rows are on the GPU of this process.
        use_gpu: layouts are made on the GPU.
    """

    num_ps: int
    use_native_multi_hash_table: bool
    unique: Callable[[], bool]
    transfer_float16: bool
    sub_table_name_to_config: Mapping[str, TableSpec]
    feature_configs: FeatureConfigs
    enable_gpu_emb: bool
    use_gpu: bool


@dataclass(slots=True)
class ParserCtx:
    """What the preparation of batches and the table have in common."""

    enable_fused_layout: bool = True
    sharding_sparse_fids_op_params: ShardingSparseFidsOpParams | None = None

    def params(self) -> ShardingSparseFidsOpParams:
        """`sharding_sparse_fids_op_params`.

        Raises:
            ConfigError: not set.
        """
        if self.sharding_sparse_fids_op_params is None:
            raise ConfigError(
                "sharding_sparse_fids_op_params of ParserCtx",
                got="None",
                allowed="what PartitionedHashTable.gen_feature_configs returns",
                remedy="Set it before batches are split.",
            )
        return self.sharding_sparse_fids_op_params


def sharding_sparse_fids_with_context(
    sparse_features: KeyedRagged,
    features: MutableMapping[str, Tensor],
    parser_ctx: ParserCtx,
    *,
    shared: Collection[str] = (),
) -> None:
    """Split a batch's ids by table and part, and add them and the layout's offsets to `features`.

    All are tensors under Monolith's keys: `shards/TABLE:PART` (and `shards_row_split/TABLE:PART`
    of native tables), `fid_offset`, ..., as `ops.sharding_sparse_fids` has them in version 5.

    Args:
        sparse_features: ids by feature, on the CPU.
        features: of the batch; changed.
        parser_ctx: with its parameters set.
        shared: features whose first example holds the ids of the whole batch.
    """
    params = parser_ctx.params()
    found = sharding_sparse_fids(
        sparse_features,
        params.num_ps,
        params.feature_configs,
        unique=params.unique(),
        shared=shared,
    )
    packed = found.monolith(_VERSION)
    for name in _OFFSETS:
        features[PREFIX + name] = torch.as_tensor(getattr(packed, name), device="cpu")
    for key, ids in found.fids.items():
        features[f"{PREFIX}shards/{key}"] = ids
    if params.use_native_multi_hash_table:
        for key, splits in found.row_splits.items():
            features[f"{PREFIX}shards_row_split/{key}"] = splits


def offsets_of(
    features: Mapping[str, Tensor], num_ps: int, device: torch.device
) -> MonolithOffsets:
    """The layout's offsets among features, on a device."""
    on_host = ("batch_size", "nfl_size", "feature_size", "fid_size", "emb_size")
    fields = {
        name: features[PREFIX + name].to("cpu" if name in on_host else device) for name in _OFFSETS
    }
    return MonolithOffsets(**fields, ps_num=num_ps, version=_VERSION)  # type: ignore[arg-type]
