"""The harness itself: results come back by rank, and a rank that fails is told."""

from __future__ import annotations

import os
import time

import pytest

from support import ranks
from support.ranks import RankFailure, run_ranks, start_ranks

pytestmark = pytest.mark.multiproc


def who(extra: int) -> tuple[int, int, int]:
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), extra


def fails_on_one() -> None:
    if os.environ["RANK"] == "1":
        raise ValueError("no luck")


def sleeps() -> None:
    time.sleep(600)


def process() -> tuple[int, str | None]:
    return os.getpid(), os.environ.get("ONCE")


def test_ranks_are_reused_while_all_are_well() -> None:
    first = run_ranks(2, process, environ={"ONCE": "x"}, reuse=True)
    again = run_ranks(2, process, reuse=True)
    assert [pid for pid, _ in again] == [pid for pid, _ in first]
    assert [once for _, once in first + again] == ["x", "x", None, None]
    with pytest.raises(RankFailure, match="no luck"):
        run_ranks(2, fails_on_one, reuse=True)
    assert not {pid for pid, _ in run_ranks(2, process, reuse=True)} & {pid for pid, _ in first}


def test_ranks_that_died_between_calls_are_not_reused() -> None:
    first = run_ranks(2, process, reuse=True)
    died = ranks._IDLE[2].processes[1]
    died.kill()
    died.join()
    assert not {pid for pid, _ in run_ranks(2, process, reuse=True)} & {pid for pid, _ in first}


def test_results_by_rank() -> None:
    assert run_ranks(2, who, 7) == [(0, 2, 7), (1, 2, 7)]


def test_a_failure_names_its_rank() -> None:
    with pytest.raises(RankFailure, match="no luck") as caught:
        run_ranks(2, fails_on_one)
    assert set(caught.value.failures) == {1}


def test_a_killed_rank_and_a_hang_are_told() -> None:
    started = start_ranks(2, sleeps, timeout_s=5)
    started.processes[0].kill()
    started.processes[0].join()
    found = started.outcomes()
    assert not found[0][0] and "died" in found[0][1]
    assert found[1] == (False, "hung")
