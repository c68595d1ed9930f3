"""From an id to its hash, its bucket and its rank: pure arithmetic, nothing else.

h = mix64(id ^ salt(table)) is a bijection of a table's 2^64 ids. Everything that is ordered or
split is ordered or split by h read as unsigned. The top BUCKET_BITS of h are the id's bucket; a
uniform split gives each rank a run of whole buckets, so what is kept per bucket never straddles
ranks. Hashes travel as int64 tensors that hold uint64 bits.

`floormod` and `unsigned_mod` are routing rules for Monolith-compatible operations; rows are
stored in h order whatever the routing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.errors import ConfigError, describe
from shoal.hashing import mix64, salt, to_signed

__all__ = [
    "BUCKETS",
    "BUCKET_BITS",
    "bucket_hashes",
    "buckets_of",
    "floormod",
    "hash_ids",
    "mix64",
    "rank_buckets",
    "ranks_of",
    "salt",
    "sort_key",
    "unsigned_mod",
]

BUCKET_BITS = 16
"""Top bits of h that name a bucket."""

BUCKETS = 1 << BUCKET_BITS
"""Buckets of a table, and the most ranks a uniform split serves."""

_LARGEST_DIVISOR = (1 << 31) - 1


def hash_ids(table: str, ids_N: Tensor) -> Tensor:
    """h of each id of a table: int64 of any shape in, uint64 bits in int64 of that shape out."""
    return mix64(ids_N ^ to_signed(salt(table)))


def sort_key(hashes_N: Tensor) -> Tensor:
    """int64 whose signed order is the unsigned order of the hashes: the top bit flipped."""
    return hashes_N ^ to_signed(1 << 63)


def buckets_of(hashes_N: Tensor) -> Tensor:
    """Bucket 0..BUCKETS-1 of each hash, int64."""
    return (hashes_N >> (64 - BUCKET_BITS)) & (BUCKETS - 1)


def bucket_hashes(start: int, stop: int) -> tuple[int, int]:
    """First and last hash (unsigned, both inside) of the buckets [start, stop).

    Raises:
        ConfigError: the range is empty or leaves 0..BUCKETS.
    """
    if not 0 <= start < stop <= BUCKETS:
        raise ConfigError(
            describe(
                "bucket range",
                got=f"[{start}, {stop})",
                allowed=f"0 <= start < stop <= {BUCKETS}",
                remedy="Name at least one bucket.",
            )
        )
    shift = 64 - BUCKET_BITS
    return start << shift, (stop << shift) - 1


def rank_buckets(rank: int, ranks: int) -> tuple[int, int]:
    """Buckets [start, stop) that a rank owns when `ranks` W split all buckets evenly.

    start = ceil(rank * BUCKETS / W), stop = ceil((rank + 1) * BUCKETS / W): sizes differ by at
    most one.

    Raises:
        ConfigError: W is not in 1..BUCKETS or rank not in 0..W-1.
    """
    _check_ranks(ranks)
    if not 0 <= rank < ranks:
        raise ConfigError(
            describe(
                "rank of a uniform split",
                got=rank,
                allowed=f"0..{ranks - 1}",
                remedy="Ranks count from 0.",
            )
        )
    return -(-rank * BUCKETS // ranks), -(-(rank + 1) * BUCKETS // ranks)


def ranks_of(hashes_N: Tensor, ranks: int) -> Tensor:
    """Owner 0..W-1 of each hash under a uniform split: floor(bucket * W / BUCKETS), int64.

    Raises:
        ConfigError: W is not in 1..BUCKETS.
    """
    _check_ranks(ranks)
    return (buckets_of(hashes_N) * ranks) >> BUCKET_BITS


def floormod(ids_N: Tensor, divisor: int) -> Tensor:
    """Ids modulo a divisor, floored: Python's %, never negative. int64 in, int64 out.

    Raises:
        ConfigError: the divisor is not in 1..2^31-1.
    """
    _check_divisor(divisor)
    return torch.remainder(ids_N, divisor)


def unsigned_mod(ids_N: Tensor, divisor: int) -> Tensor:
    """Ids read as uint64, modulo a divisor. int64 in, int64 out.

    Raises:
        ConfigError: the divisor is not in 1..2^31-1.
    """
    _check_divisor(divisor)
    high_N, low_N = (ids_N >> 32) & 0xFFFFFFFF, ids_N & 0xFFFFFFFF
    return ((high_N % divisor) * ((1 << 32) % divisor) + low_N) % divisor


def _check_ranks(ranks: int) -> None:
    if not 1 <= ranks <= BUCKETS:
        raise ConfigError(
            describe(
                "ranks of a uniform split",
                got=ranks,
                allowed=f"1..{BUCKETS}",
                remedy="Split a table over fewer ranks.",
            )
        )


def _check_divisor(divisor: int) -> None:
    if not 1 <= divisor <= _LARGEST_DIVISOR:
        raise ConfigError(
            describe(
                "divisor of a routing rule",
                got=divisor,
                allowed=f"1..{_LARGEST_DIVISOR}",
                remedy="Pass the number of shards.",
            )
        )
