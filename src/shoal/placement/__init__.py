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
    floormod,
    hash_ids,
    owners,
    rank_buckets,
    ranks_of,
    sort_key,
    unsigned_mod,
)
from shoal.placement.sharding_types import (
    Sharding,
    column_wise,
    data_parallel,
    grid,
    row_wise,
    sharded,
    table_row_wise,
    table_wise,
)

__all__ = [
    "BUCKETS",
    "BUCKET_BITS",
    "Hosted",
    "Placement",
    "Sharding",
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
    "sharded",
    "sort_key",
    "table_row_wise",
    "table_wise",
    "unsigned_mod",
]
