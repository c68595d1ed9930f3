"""Which rank holds an id: the hash, buckets and splits, and placements as plain values."""

from __future__ import annotations

from shoal.placement.arithmetic import (
    BUCKET_BITS,
    BUCKETS,
    bucket_hashes,
    buckets_of,
    floormod,
    hash_ids,
    mix64,
    rank_buckets,
    ranks_of,
    salt,
    sort_key,
    unsigned_mod,
)
from shoal.placement.values import (
    Hosted,
    Placement,
    column_wise,
    data_parallel,
    grid,
    owners,
    row_wise,
    table_row_wise,
    table_wise,
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
