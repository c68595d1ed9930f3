"""Operations between ids, rows and model inputs. `reference` is the plain-torch oracle."""

from __future__ import annotations

from shoal.ops.fused_segments import (
    fused_reduce_and_split_gpu,
    fused_reduce_sum_and_split,
    fused_sorted_segment_sum,
)
from shoal.ops.indexed_segments import (
    reduce_mean,
    reduce_mean_sqrtn,
    reduce_sqrtn,
    reduce_sum,
    segment_offsets,
)
from shoal.ops.layout import fused_embedding_to_layout, fused_embedding_to_layout_grad
from shoal.ops.layout_index import LayoutIndex
from shoal.ops.layout_specs import FeatureConfig, FeatureConfigs, OutConfig, SliceConfig
from shoal.ops.monolith_layout import MonolithOffsets
from shoal.ops.reference import Dedup, Layout, dedup, pooled_layout
from shoal.ops.segments import (
    row_ids,
    segment_first_n,
    segment_l2,
    segment_mean,
    segment_sqrtn,
    segment_sum,
)
from shoal.ops.sparse_fids import ShardedFids, sharding_sparse_fids

__all__ = [
    "Dedup",
    "FeatureConfig",
    "FeatureConfigs",
    "Layout",
    "LayoutIndex",
    "MonolithOffsets",
    "OutConfig",
    "ShardedFids",
    "SliceConfig",
    "dedup",
    "fused_embedding_to_layout",
    "fused_embedding_to_layout_grad",
    "fused_reduce_and_split_gpu",
    "fused_reduce_sum_and_split",
    "fused_sorted_segment_sum",
    "pooled_layout",
    "reduce_mean",
    "reduce_mean_sqrtn",
    "reduce_sqrtn",
    "reduce_sum",
    "row_ids",
    "segment_first_n",
    "segment_l2",
    "segment_mean",
    "segment_offsets",
    "segment_sqrtn",
    "segment_sum",
    "sharding_sparse_fids",
]
