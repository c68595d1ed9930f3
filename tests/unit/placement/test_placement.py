"""Hashes, buckets, uniform splits and routing rules: pinned values and arithmetic facts."""

from __future__ import annotations

import itertools

import pytest
import torch

from shoal.errors import ConfigError
from shoal.placement import (
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

GAMMA = 0x9E3779B97F4A7C15
EXTREMES = [0, 1, -1, (1 << 63) - 1, -(1 << 63), 123456789012345]

# int64 views of the hashes of EXTREMES in table "user"
HASHES = [
    -5369564163883771257,
    -7956794584001491287,
    -2150352387628918174,
    4341485995816534639,
    5633753351217982286,
    6948129631016264671,
]


@pytest.mark.parametrize(
    ("word", "mixed"),
    [
        (0, 0),
        # The first two outputs of splitmix64 from seed 0.
        (GAMMA, 0xE220A8397B1DCDAF),
        (2 * GAMMA, 0x6E789E6AA1B965F4),
    ],
)
def test_mix64_known_answers(word: int, mixed: int) -> None:
    assert mix64(word) == mixed


def test_mix64_of_tensors_is_mix64_of_ints() -> None:
    mixed_N = mix64(torch.tensor(EXTREMES))
    assert [word % (1 << 64) for word in mixed_N.tolist()] == [mix64(word) for word in EXTREMES]


def test_salt_is_pinned() -> None:
    assert salt("user") == 0xA9B763A76D99F804
    assert salt("") == int.from_bytes(bytes.fromhex("e3b0c44298fc1c14"), "little")


def test_hashes_are_pinned_and_differ_by_table() -> None:
    ids_N = torch.tensor(EXTREMES)
    hashes_N = hash_ids("user", ids_N)
    assert hashes_N.tolist() == HASHES
    assert not (hash_ids("item", ids_N) == hashes_N).any()


def test_hashing_keeps_ids_apart_and_shapes() -> None:
    ids_NN = torch.arange(-5000, 5000).reshape(100, 100)
    hashes_NN = hash_ids("user", ids_NN)
    assert hashes_NN.shape == ids_NN.shape
    assert hashes_NN.unique().numel() == ids_NN.numel()
    assert hash_ids("user", ids_NN[:0]).shape == (0, 100)


def test_sort_key_orders_hashes_as_unsigned() -> None:
    hashes_N = hash_ids("user", torch.arange(1000))
    order_N = sort_key(hashes_N).argsort()
    unsigned = [hash % (1 << 64) for hash in hashes_N[order_N].tolist()]
    assert unsigned == sorted(unsigned)


def test_buckets_are_the_top_bits() -> None:
    hashes_N = hash_ids("user", torch.tensor(EXTREMES))
    expected = [(hash % (1 << 64)) >> 48 for hash in hashes_N.tolist()]
    assert buckets_of(hashes_N).tolist() == expected
    for bucket, hash in zip(expected, hashes_N.tolist(), strict=True):
        first, last = bucket_hashes(bucket, bucket + 1)
        assert first <= hash % (1 << 64) <= last


def test_all_buckets_cover_all_hashes() -> None:
    assert bucket_hashes(0, BUCKETS) == (0, (1 << 64) - 1)
    assert bucket_hashes(0, 5)[1] + 1 == bucket_hashes(5, 9)[0]


def test_ids_spread_evenly_over_buckets() -> None:
    counts = buckets_of(hash_ids("user", torch.arange(1 << 18))).bincount(minlength=BUCKETS)
    # A mean of 4 a bucket: Poisson leaves about 1.8 % of the buckets empty.
    assert (counts == 0).double().mean().item() == pytest.approx(0.0183, abs=0.003)
    assert counts.max() < 25


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 8, 1000, BUCKETS])
def test_uniform_split_partitions_the_buckets(ranks: int) -> None:
    ranges = [rank_buckets(rank, ranks) for rank in range(ranks)]
    assert ranges[0][0] == 0
    assert ranges[-1][1] == BUCKETS
    assert all(left[1] == right[0] for left, right in itertools.pairwise(ranges))
    sizes = {stop - start for start, stop in ranges}
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 1000])
def test_ranks_of_agrees_with_the_ranges(ranks: int) -> None:
    hashes_N = hash_ids("user", torch.arange(2000))
    for bucket, rank in zip(
        buckets_of(hashes_N).tolist(), ranks_of(hashes_N, ranks).tolist(), strict=True
    ):
        start, stop = rank_buckets(rank, ranks)
        assert start <= bucket < stop


@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_doubling_ranks_splits_each_range(ranks: int) -> None:
    hashes_N = hash_ids("user", torch.arange(500))
    assert torch.equal(ranks_of(hashes_N, 2 * ranks) // 2, ranks_of(hashes_N, ranks))


@pytest.mark.parametrize("divisor", [1, 2, 3, 7, 1024, 999_983, (1 << 31) - 1])
def test_routing_rules_at_the_extremes(divisor: int) -> None:
    ids_N = torch.tensor(EXTREMES)
    assert floormod(ids_N, divisor).tolist() == [id % divisor for id in EXTREMES]
    expected = [(id % (1 << 64)) % divisor for id in EXTREMES]
    assert unsigned_mod(ids_N, divisor).tolist() == expected


def test_routing_rules_differ_for_negative_ids() -> None:
    # Slot 512 of a v1 fid is the first with the sign bit set.
    id_N = torch.tensor([-(1 << 63) + 1])
    assert floormod(id_N, 3).item() == 2
    assert unsigned_mod(id_N, 3).item() == 0


@pytest.mark.parametrize(
    ("call", "names"),
    [
        (lambda: ranks_of(torch.tensor([1]), 0), "ranks"),
        (lambda: ranks_of(torch.tensor([1]), BUCKETS + 1), "ranks"),
        (lambda: rank_buckets(2, 2), "rank"),
        (lambda: rank_buckets(-1, 2), "rank"),
        (lambda: bucket_hashes(3, 3), "bucket range"),
        (lambda: bucket_hashes(0, BUCKETS + 1), "bucket range"),
        (lambda: floormod(torch.tensor([1]), 0), "divisor"),
        (lambda: unsigned_mod(torch.tensor([1]), 1 << 31), "divisor"),
    ],
)
def test_wrong_ranges_are_refused(call: object, names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        call()  # type: ignore[operator]
