"""Every way to place tables with every kind of rule and of batch: the bits of one process."""

from __future__ import annotations

import pytest

from support.exchange_cases import MATRIX, same_as_local
from support.exchange_runs import Case, local_run, rank_runs
from support.ranks import run_ranks

pytestmark = pytest.mark.multiproc


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_the_same_bits(world_size: int) -> None:
    cases = MATRIX if world_size > 1 else MATRIX[::4]
    by_rank = run_ranks(world_size, rank_runs, cases)
    for case, *outcomes in zip(cases, *by_rank, strict=True):
        same_as_local(case, outcomes)


@pytest.mark.parametrize("case", MATRIX[:3])
def test_the_cases_admit_and_expire(case: Case) -> None:
    whole = local_run(case, 2)
    assert whole.evicted
    assert any(table["occurrences"] for table in whole.rows.values())
    assert all(table["ids"] for table in whole.rows.values())
