"""A lookup plan becomes tables: slices are cut where they meet, get roles, and gaps are listed."""

from __future__ import annotations

import pytest

from shoal.errors import ConfigError
from shoal.lookup import (
    ADDED,
    ALONE,
    FIRST,
    Columns,
    Output,
    Pool,
    Slice,
    check_sums,
    compile_tables,
    join,
    plan_of,
)


def test_slices_that_meet_are_cut_alike() -> None:
    pools = (Pool("sum", (Slice(0, 4, 0, 0),)), Pool("mean", (Slice(1, 3, 0, 1, add=True),)))
    tables = compile_tables(pools, (Output(5),))
    found = [(row[0], row[1], row[2], row[4], row[6]) for row in tables.slices_S.tolist()]
    assert found == [
        (0, 0, 1, 0, ALONE),
        (0, 1, 2, 1, FIRST),
        (0, 3, 1, 3, ALONE),
        (1, 1, 2, 1, ADDED),
    ]
    assert tables.sums_AM.tolist() == [[0, 1, 3]]
    assert tables.gaps == ((0, 4, 5),)
    assert not tables.sequences_add


def test_rows_of_a_sequence_are_cut_alike() -> None:
    pools = (
        Pool("first_n", (Slice(0, 4, 0, 0),), length=2),
        Pool("sum", (Slice(0, 2, 0, 3, add=True),)),
        Pool("sum", (Slice(0, 8, 0, 0, add=True),)),
    )
    tables = compile_tables(pools, (Output(8),))
    spans: dict[tuple[int, int], set[int]] = {}
    for group, _, width, _, place, step, *_ in tables.slices_S.tolist():
        for lane in range(2 if group == 0 else 1):
            first = place + lane * step
            spans.setdefault((first, first + width), set()).add(group)
    edges = sorted(spans)
    assert [stop for _, stop in edges[:-1]] == [first for first, _ in edges[1:]]
    assert all({0, 2} <= groups for groups in spans.values())
    assert tables.sequences_add


def test_columns_written_twice_are_refused() -> None:
    pools = (Pool("sum", (Slice(0, 3, 0, 0),)), Pool("sum", (Slice(0, 2, 0, 2),)))
    with pytest.raises(ConfigError, match="column 2 of output 0 of a pool plan: got written twice"):
        check_sums(pools)
    steps = (Pool("first_n", (Slice(0, 4, 0, 0, add=True, step=2),), length=2),)
    with pytest.raises(ConfigError, match="step of a first_n slice into output 0: got 2"):
        check_sums(steps)


def test_joined_sequences_are_one_output() -> None:
    parts = [Columns(0, 0, 2, length=3), Columns(1, 1, 4, length=3)]
    plan = plan_of([("first_n", 3), ("first_n", 3)], [join("x", "concat", parts)])
    assert plan.outputs == (Output(15, (3, 5)),)
    assert [pool.spans(pool.slices[0]) for pool in plan.pools] == [
        [(0, 2), (5, 7), (10, 12)],
        [(2, 5), (7, 10), (12, 15)],
    ]


def test_the_first_feature_starts_a_sum_whatever_the_layout_says() -> None:
    parts = [Columns(1, 0, 2, length=0), Columns(0, 0, 2, length=0)]
    plan = plan_of([("sum", 0), ("sum", 0)], [join("x", "addn", parts)])
    assert [pool.slices[0].add for pool in plan.pools] == [False, True]
