"""Placements as values: every sharding type, JSON, and what is refused."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch

from shoal.errors import ConfigError
from shoal.placement import (
    Hosted,
    Placement,
    bucket_hashes,
    column_wise,
    data_parallel,
    grid,
    hash_ids,
    owners,
    rank_buckets,
    ranks_of,
    row_wise,
    table_row_wise,
    table_wise,
)

DIM, WORLD = 12, 4

TYPES: dict[str, tuple[Hosted, ...]] = {
    "row-wise": row_wise("t", DIM, WORLD),
    "table-wise": table_wise("t", DIM, 2),
    "column-wise": column_wise("t", DIM, (3, 0, 1)),
    "column-wise, a rank twice": column_wise("t", DIM, (1, 2, 1)),
    "table-row-wise": table_row_wise("t", DIM, (2, 3)),
    "grid": grid("t", DIM, ((0, 1), (2, 3))),
    "grid, uneven": grid("t", DIM, ((0, 1, 3), (2,))),
    "shares out of order": (Hosted("t", 0, DIM, (3, 0, 2)),),
}


@pytest.mark.parametrize("slices", TYPES.values(), ids=TYPES.keys())
def test_every_id_has_one_owner_for_each_column(slices: tuple[Hosted, ...]) -> None:
    placement = Placement(WORLD, slices)
    hashes_N = hash_ids("t", torch.arange(-500, 500))
    held: Counter[int] = Counter()
    for one in placement.of("t"):
        ranks = owners(one, hashes_N)
        assert ranks.dtype == torch.int64
        assert set(ranks.tolist()) == set(one.ranks)
        held.update(range(one.start, one.stop))
    assert held == Counter(range(DIM))


@pytest.mark.parametrize("slices", [*TYPES.values(), data_parallel("t", DIM, WORLD)])
def test_json_brings_back_an_equal_value(slices: tuple[Hosted, ...]) -> None:
    placement = Placement(WORLD, (*table_wise("other", 3, 0), *slices))
    again = Placement.from_json(placement.to_json())
    assert again == placement
    assert hash(again) == hash(placement)
    assert again.to_json() == placement.to_json()


def test_the_order_of_slices_is_no_part_of_the_value() -> None:
    slices = (*row_wise("b", 4, WORLD), *column_wise("a", 8, (1, 0)))
    placement = Placement(WORLD, slices)
    assert placement == Placement(WORLD, slices[::-1])
    assert placement.tables() == ("a", "b")
    assert [one.start for one in placement.of("a")] == [0, 4]
    assert placement.of("none") == ()
    assert [(one.table, one.start) for one in placement.on(0)] == [("a", 4), ("b", 0)]
    assert [(one.table, one.start) for one in placement.on(3)] == [("b", 0)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_owners_of_rows_are_the_uniform_split(ranks: int) -> None:
    (hosted,) = row_wise("t", DIM, ranks)
    hashes_N = hash_ids("t", torch.arange(2000))
    assert torch.equal(owners(hosted, hashes_N), ranks_of(hashes_N, ranks))


def test_a_share_of_the_buckets_goes_to_the_rank_named_at_its_place() -> None:
    hosted = Hosted("t", 0, 4, (5, 0, 3))
    for share, rank in enumerate(hosted.ranks):
        first, last = bucket_hashes(*rank_buckets(share, 3))
        edges = torch.tensor([first - (first >> 63 << 64), last - (last >> 63 << 64)])
        assert owners(hosted, edges).tolist() == [rank, rank]


@pytest.mark.parametrize(
    ("dim", "slices", "cuts"),
    [
        (12, 3, [0, 4, 8, 12]),
        (16, 3, [0, 8, 12, 16]),  # multiples of 4 where that leaves no slice empty
        (128, 8, list(range(0, 129, 16))),
        (8, 3, [0, 3, 6, 8]),
        (6, 2, [0, 3, 6]),
        (7, 7, list(range(8))),
        (5, 1, [0, 5]),
    ],
)
def test_columns_are_cut_evenly(dim: int, slices: int, cuts: list[int]) -> None:
    placed = column_wise("t", dim, range(slices))
    assert [one.start for one in placed] + [placed[-1].stop] == cuts
    assert [one.ranks for one in placed] == [(rank,) for rank in range(slices)]


def test_shares() -> None:
    assert row_wise("t", 4, 3)[0].shares == 3
    assert table_wise("t", 4, 3)[0].shares == 1
    assert data_parallel("t", 4, 3)[0].shares == 1


HELPFUL = r".+: got .+; allowed: .+\. .+"


@pytest.mark.parametrize(
    "call",
    [
        lambda: Hosted("", 0, 4, (0,)),
        lambda: Hosted("t", 4, 4, (0,)),
        lambda: Hosted("t", -1, 4, (0,)),
        lambda: Hosted("t", 0, 4.0, (0,)),  # type: ignore[arg-type]
        lambda: Hosted("t", 0, 4, ()),
        lambda: Hosted("t", 0, 4, (1, 1)),
        lambda: Hosted("t", 0, 4, (-1,)),
        lambda: Hosted("t", 0, 4, [0]),  # type: ignore[arg-type]
        lambda: Placement(0, ()),
        lambda: Placement(2, table_wise("t", 4, 2)),
        lambda: Placement(2, (Hosted("t", 1, 4, (0,)),)),
        lambda: Placement(2, (Hosted("t", 0, 4, (0,)), Hosted("t", 5, 8, (1,)))),
        lambda: Placement(2, (Hosted("t", 0, 4, (0,)), Hosted("t", 3, 8, (1,)))),
        lambda: Placement(2, (Hosted("t", 0, 4, (0,)), Hosted("t", 0, 4, (1,)))),
        lambda: Placement(3, (Hosted("t", 0, 4, (0, 1), replicated=True),)),
        lambda: column_wise("t", 4, ()),
        lambda: column_wise("t", 4, (0, 1, 2, 3, 4)),
        lambda: owners(data_parallel("t", 4, 2)[0], torch.tensor([1])),
        lambda: Placement.from_json("{"),
        lambda: Placement.from_json("[]"),
        lambda: Placement.from_json("{}"),
        lambda: Placement.from_json(broken(format="other")),
        lambda: Placement.from_json(broken(hosted={})),
        lambda: Placement.from_json(broken(hosted=[{"table": "t"}])),
        lambda: Placement.from_json(
            broken(hosted=[{"table": "t", "start": 0, "stop": 4, "ranks": [0, 1]}])
        ),
        lambda: Placement.from_json(broken(world_size="2")),
        lambda: Placement.from_json(broken(world_size=1)),
        lambda: Placement.from_json(broken(more=1)),
    ],
)
def test_wrong_values_are_refused(call: object) -> None:
    with pytest.raises(ConfigError, match=HELPFUL):
        call()  # type: ignore[operator]


def broken(**changed: object) -> str:
    value = json.loads(Placement(2, row_wise("t", 4, 2)).to_json())
    return json.dumps({**value, **changed})
