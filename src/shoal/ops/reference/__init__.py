"""Plain-torch operations: differentiable, on any device and dtype, the oracle of the fast ones."""

from __future__ import annotations

from shoal.ops.reference.flat import (
    aligned_flat_concat,
    aligned_flat_split,
    fill_with_offset_map,
    finalize_shared_tensor,
    fused_gather_embeddings_by_input,
    fused_gather_embeddings_by_input_gradient,
)
from shoal.ops.reference.fused_segments import (
    fused_reduce_and_split_gpu,
    fused_reduce_sum_and_split,
    fused_sorted_segment_sum,
)
from shoal.ops.reference.layout import fused_embedding_to_layout, fused_embedding_to_layout_grad
from shoal.ops.reference.rows import (
    GatheredRows,
    gather_embeddings_by_ids_gradient_back_prop,
    gather_embeddings_by_input,
    gather_rows,
    map_id_to_embedding,
    map_id_to_embedding_gradient_back_prop,
    match_rows,
    scatter_rows,
)
from shoal.ops.reference.segments import (
    Dedup,
    Layout,
    dedup,
    pooled_layout,
    reduce_mean,
    reduce_mean_sqrtn,
    reduce_sqrtn,
    reduce_sum,
    row_ids,
    segment_first_n,
    segment_l2,
    segment_mean,
    segment_offsets,
    segment_sqrtn,
    segment_sum,
)
from shoal.ops.reference.sparse_fids import sharding_sparse_fids

__all__ = [
    "Dedup",
    "GatheredRows",
    "Layout",
    "aligned_flat_concat",
    "aligned_flat_split",
    "dedup",
    "fill_with_offset_map",
    "finalize_shared_tensor",
    "fused_embedding_to_layout",
    "fused_embedding_to_layout_grad",
    "fused_gather_embeddings_by_input",
    "fused_gather_embeddings_by_input_gradient",
    "fused_reduce_and_split_gpu",
    "fused_reduce_sum_and_split",
    "fused_sorted_segment_sum",
    "gather_embeddings_by_ids_gradient_back_prop",
    "gather_embeddings_by_input",
    "gather_rows",
    "map_id_to_embedding",
    "map_id_to_embedding_gradient_back_prop",
    "match_rows",
    "pooled_layout",
    "reduce_mean",
    "reduce_mean_sqrtn",
    "reduce_sqrtn",
    "reduce_sum",
    "row_ids",
    "scatter_rows",
    "segment_first_n",
    "segment_l2",
    "segment_mean",
    "segment_offsets",
    "segment_sqrtn",
    "segment_sum",
    "sharding_sparse_fids",
]
