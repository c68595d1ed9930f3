"""Operations between ids, rows and model inputs. `reference` is the plain-torch oracle."""

from __future__ import annotations

from shoal.ops.ids import (
    dedup,
    dedup_into,
    fused_value_rowids,
    normalize_merged_split,
)
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
    row_ids,
    segment_first_n,
    segment_l2,
    segment_mean,
    segment_sqrtn,
    segment_sum,
)
from shoal.ops.reorder import (
    fused_reorder_by_indices,
    fused_reorder_by_indices_into,
    reorder_by_indices,
    unique_key_with_value_and_offset,
)
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
    "FusedReorder",
    "Layout",
    "Partition",
    "RaggedPartition",
    "RaggedSplit",
    "Reorder",
    "ShardBy",
    "UniqueKeys",
    "ValueOffset",
    "dedup",
    "dedup_into",
    "fused_reorder_by_indices",
    "fused_reorder_by_indices_into",
    "fused_value_rowids",
    "normalize_merged_split",
    "partition",
    "permute_rows",
    "pooled_layout",
    "ragged_partition",
    "ragged_split_by_indices",
    "reorder_by_indices",
    "row_ids",
    "segment_first_n",
    "segment_l2",
    "segment_mean",
    "segment_sqrtn",
    "segment_sum",
    "split_by_indices",
    "unique_key_with_value_and_offset",
    "unpermute_rows",
]
