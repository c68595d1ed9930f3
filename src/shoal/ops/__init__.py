"""Operations between ids, rows and model inputs. `reference` is the plain-torch oracle."""

from __future__ import annotations

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

__all__ = [
    "Dedup",
    "Layout",
    "dedup",
    "pooled_layout",
    "row_ids",
    "segment_first_n",
    "segment_l2",
    "segment_mean",
    "segment_sqrtn",
    "segment_sum",
]
