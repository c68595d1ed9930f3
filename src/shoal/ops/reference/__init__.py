"""Plain-torch operations: differentiable, on any device and dtype, the oracle of the fast ones."""

from __future__ import annotations

from shoal.ops.reference.layout import (
    fused_embedding_to_layout,
    fused_embedding_to_layout_grad,
)
from shoal.ops.reference.segments import (
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
from shoal.ops.reference.sparse_fids import sharding_sparse_fids

__all__ = [
    "Dedup",
    "Layout",
    "dedup",
    "fused_embedding_to_layout",
    "fused_embedding_to_layout_grad",
    "pooled_layout",
    "row_ids",
    "segment_first_n",
    "segment_l2",
    "segment_mean",
    "segment_sqrtn",
    "segment_sum",
    "sharding_sparse_fids",
]
