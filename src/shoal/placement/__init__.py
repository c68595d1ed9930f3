"""The rank of each id: hashes, buckets and splits, and placements as plain values."""

from __future__ import annotations

from shoal.ids import mix64, salt
from shoal.placement.ownership import (
    BUCKET_BITS,
    BUCKETS,
    Hosted,
    Placement,
    bucket_hashes,
    buckets_of,
    column_wise,
    data_parallel,
    floormod,
    grid,
    hash_ids,
    owners,
    rank_buckets,
    ranks_of,
    row_wise,
    sort_key,
    table_row_wise,
    table_wise,
    unsigned_mod,
)

__all__ = [
    "BUCKETS",
    "BUCKET_BITS",
    "Hosted",
    "Placement",
    "bucket_hashes",
    "buckets_of",
    "column_wise",
    "data_parallel",
    "floormod",
    "grid",
    "hash_ids",
    "mix64",
    "owners",
    "rank_buckets",
    "ranks_of",
    "row_wise",
    "salt",
    "sort_key",
    "table_row_wise",
    "table_wise",
    "unsigned_mod",
]
