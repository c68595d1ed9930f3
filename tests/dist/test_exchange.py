"""Several ranks give the rows and outputs of one process, for every way to place tables."""

from __future__ import annotations

import pytest

from support.exchange_cases import CASES, same_as_local
from support.exchange_failures import (
    full_everywhere,
    full_owner,
    monolith_numbers,
    rounded_on_the_way,
    wrong_time,
)
from support.exchange_runs import Case, rank_runs
from support.ranks import run_ranks

pytestmark = pytest.mark.multiproc


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_same_as_one_process(world_size: int) -> None:
    cases = CASES if world_size > 1 else CASES[::4]
    by_rank = run_ranks(world_size, rank_runs, cases)
    for case, *outcomes in zip(cases, *by_rank, strict=True):
        same_as_local(case, outcomes)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_monolith_distributed_multi_type_hash_table(world_size: int) -> None:
    """Zeros first; every rank sends the same gradients, and they add up."""
    for before, after in run_ranks(world_size, monolith_numbers):
        assert before == [[[0.0], [0.0]], [[0.0, 0.0], [0.0, 0.0]]]
        w = world_size
        assert after == [[[-1.0 * w], [-1.0 * w]], [[-0.5 * w, -1.0 * w], [0.0, 0.0]]]


@pytest.mark.slow
def test_shares_keep_their_part_of_the_capacity() -> None:
    shardings = ("row_wise", "data_parallel")
    cases = [Case(sharding, capacity=10, sizes=(2,), steps=6) for sharding in shardings]
    spread, whole = zip(*run_ranks(2, rank_runs, cases), strict=True)
    for outcomes in (spread, whole):
        limit = 5 if outcomes is spread else 10
        for outcome in outcomes:
            assert 0 < len(outcome.rows["users"]["ids"]) <= limit
    assert whole[0].rows["users"]["ids"] == whole[1].rows["users"]["ids"]


@pytest.mark.slow
def test_precision_on_the_way() -> None:
    for errors in run_ranks(2, rounded_on_the_way, (None, "float16", "bfloat16", "int8")):
        assert errors[0] <= 1e-6
        assert all(0 < error < 0.1 for error in errors[1:])
        assert errors[1] < errors[2]


@pytest.mark.slow
def test_full_owner_stops_everyone() -> None:
    first, second = run_ranks(2, full_owner, 8.0)
    assert first[0] == "TableFull"
    assert first[1].count("left a lookup at step 7") == 3
    kind, text = second
    assert kind == "CollectiveFailed"
    for part in ("rank 1", "step 7", "exchange of rows"):
        assert part in text


@pytest.mark.slow
def test_full_replicas_may_go_on() -> None:
    assert run_ranks(2, full_everywhere) == [("TableFull", [0.0] * 4)] * 2


@pytest.mark.slow
def test_bad_time_is_raised_before_anything_is_sent() -> None:
    assert run_ranks(2, wrong_time) == [("InputError", 6), ("InputError", 6)]
