"""Operations between ids, rows and model inputs. `reference` is the plain-torch oracle."""

from __future__ import annotations

from shoal.ops.flat import (
    aligned_flat_concat,
    aligned_flat_split,
    fill_with_offset_map,
    finalize_shared_tensor,
    fused_gather_embeddings_by_input,
    fused_gather_embeddings_by_input_gradient,
)
from shoal.ops.fused_segments import (
    fused_reduce_and_split_gpu,
    fused_reduce_sum_and_split,
    fused_sorted_segment_sum,
)
from shoal.ops.ids import dedup, dedup_into, fused_value_rowids, normalize_merged_split
from shoal.ops.indexed_segments import (
    reduce_mean,
    reduce_mean_sqrtn,
    reduce_sqrtn,
    reduce_sum,
    segment_offsets,
)
from shoal.ops.layout import fused_embedding_to_layout, fused_embedding_to_layout_grad
from shoal.ops.layout_plan import FeatureConfig, FeatureConfigs, LayoutIndex, OutConfig, SliceConfig
from shoal.ops.monolith_layout import MonolithOffsets
from shoal.ops.reference import (
    Dedup,
    FusedReorder,
    Layout,
    Partition,
    RaggedPartition,
    RaggedSplit,
    Reorder,
    ShardBy,
    UniqueKeys,
    ValueOffset,
    pooled_layout,
)
from shoal.ops.reference.rows import GatheredRows
from shoal.ops.reorder import (
    fused_reorder_by_indices,
    fused_reorder_by_indices_into,
    reorder_by_indices,
    reorder_by_indices_into,
    unique_key_with_value_and_offset,
    unique_key_with_value_and_offset_into,
)
from shoal.ops.rows import (
    gather_embeddings_by_ids_gradient_back_prop,
    gather_embeddings_by_input,
    gather_rows,
    map_id_to_embedding,
    map_id_to_embedding_gradient_back_prop,
    match_rows,
    scatter_rows,
)
from shoal.ops.segments import (
    row_ids,
    segment_first_n,
    segment_l2,
    segment_mean,
    segment_sqrtn,
    segment_sum,
)
from shoal.ops.sparse_fids import ShardedFids, sharding_sparse_fids
from shoal.ops.splits import (
    partition,
    permute_rows,
    ragged_partition,
    ragged_split_by_indices,
    split_by_indices,
    unpermute_rows,
)

__all__ = [
    "Dedup",
    "FeatureConfig",
    "FeatureConfigs",
    "FusedReorder",
    "GatheredRows",
    "Layout",
    "LayoutIndex",
    "MonolithOffsets",
    "OutConfig",
    "Partition",
    "RaggedPartition",
    "RaggedSplit",
    "Reorder",
    "ShardBy",
    "ShardedFids",
    "SliceConfig",
    "UniqueKeys",
    "ValueOffset",
    "aligned_flat_concat",
    "aligned_flat_split",
    "dedup",
    "dedup_into",
    "fill_with_offset_map",
    "finalize_shared_tensor",
    "fused_embedding_to_layout",
    "fused_embedding_to_layout_grad",
    "fused_gather_embeddings_by_input",
    "fused_gather_embeddings_by_input_gradient",
    "fused_reduce_and_split_gpu",
    "fused_reduce_sum_and_split",
    "fused_reorder_by_indices",
    "fused_reorder_by_indices_into",
    "fused_sorted_segment_sum",
    "fused_value_rowids",
    "gather_embeddings_by_ids_gradient_back_prop",
    "gather_embeddings_by_input",
    "gather_rows",
    "map_id_to_embedding",
    "map_id_to_embedding_gradient_back_prop",
    "match_rows",
    "normalize_merged_split",
    "partition",
    "permute_rows",
    "pooled_layout",
    "ragged_partition",
    "ragged_split_by_indices",
    "reduce_mean",
    "reduce_mean_sqrtn",
    "reduce_sqrtn",
    "reduce_sum",
    "reorder_by_indices",
    "reorder_by_indices_into",
    "row_ids",
    "scatter_rows",
    "segment_first_n",
    "segment_l2",
    "segment_mean",
    "segment_offsets",
    "segment_sqrtn",
    "segment_sum",
    "sharding_sparse_fids",
    "split_by_indices",
    "unique_key_with_value_and_offset",
    "unique_key_with_value_and_offset_into",
    "unpermute_rows",
]
