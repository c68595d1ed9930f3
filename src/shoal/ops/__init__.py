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
from shoal.ops.reference import (
    Dedup,
    Layout,
    dedup,
    pooled_layout,
    row_ids,
    segment_first_n,
    segment_l2,
    segment_mean,
    segment_sqrtn,
    segment_sum,
)
from shoal.ops.rows import (
    GatheredRows,
    gather_embeddings_by_ids_gradient_back_prop,
    gather_embeddings_by_input,
    gather_rows,
    map_id_to_embedding,
    map_id_to_embedding_gradient_back_prop,
    match_rows,
    scatter_rows,
)

__all__ = [
    "Dedup",
    "GatheredRows",
    "Layout",
    "aligned_flat_concat",
    "aligned_flat_split",
    "dedup",
    "fill_with_offset_map",
    "finalize_shared_tensor",
    "fused_gather_embeddings_by_input",
    "fused_gather_embeddings_by_input_gradient",
    "gather_embeddings_by_ids_gradient_back_prop",
    "gather_embeddings_by_input",
    "gather_rows",
    "map_id_to_embedding",
    "map_id_to_embedding_gradient_back_prop",
    "match_rows",
    "pooled_layout",
    "row_ids",
    "scatter_rows",
    "segment_first_n",
    "segment_l2",
    "segment_mean",
    "segment_sqrtn",
    "segment_sum",
]
