"""The exchange between ranks, in a world of one, gives what the local one gives on any shard."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shoal.comm.collectives import LocalCollectives
from support.exchange_runs import Case, local_run, rank_run, whole_rows
from support.shards import SHARD_KINDS, ShardFactory, interpreted_too, shard_factory

Rows = dict[int, tuple[Any, ...]]


def rows_in(found: Rows) -> list[tuple[int, tuple[Any, ...]]]:
    return [(id_, row) for id_, row in found.items() if len(row) > 1]


def occurrences_in(found: Rows) -> Rows:
    return {id_: row for id_, row in found.items() if len(row) == 1}


@pytest.fixture(params=SHARD_KINDS)
def make_shard(request: pytest.FixtureRequest) -> ShardFactory:
    return shard_factory(request.param)


@pytest.mark.slow
@interpreted_too
def test_same_as_local(make_shard: ShardFactory) -> None:
    case = Case(
        "row_wise",
        {"tags": "data_parallel"},
        steps=2,
        sizes=(3,),
        threshold=2,
        optimizer="adagrad",
        early=True,
    )
    device = make_shard([]).device
    outcome = rank_run(case, LocalCollectives(device), make_shard)
    whole = local_run(case, 1)
    for got, want in zip(outcome.outputs, whole.outputs, strict=True):
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)
    for table in ("users", "items", "tags"):
        mine, theirs = whole_rows([outcome], table), whole_rows([whole], table)
        assert mine.keys() == theirs.keys()
        for id_, (*numbers, last, count) in rows_in(theirs):
            for got, want in zip(mine[id_], numbers, strict=False):
                np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)
            assert mine[id_][-2:] == (last, count)
        assert occurrences_in(mine) == occurrences_in(theirs)
