"""Collectives on several ranks: what arrives, and that nobody hangs when a rank stops."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from shoal.comm import Collectives, LocalCollectives, Part, TorchCollectives
from shoal.errors import CollectiveFailed, ShapeError
from support.collective_checks import check_collectives
from support.ranks import run_ranks, start_ranks

pytestmark = pytest.mark.multiproc

TIMEOUT_S = 60.0
LATE_S = 10.0  # in its place, where a test waits until it is over


@contextmanager
def gloo(timeout_s: float = TIMEOUT_S) -> Iterator[TorchCollectives]:
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    group = dist.new_group(timeout=timedelta(seconds=timeout_s))
    dist.barrier()  # processes start at different times
    collectives = TorchCollectives(group, torch.device("cpu"), timeout_s)
    yield collectives
    collectives.close()
    dist.destroy_process_group()


def all_checks() -> None:
    with gloo() as collectives:
        check_collectives(collectives)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_gloo(world_size: int) -> None:
    run_ranks(world_size, all_checks)


def test_one_rank_alone() -> None:
    check_collectives(LocalCollectives())
    part = Part(torch.zeros(2), (2,), (1,))
    with pytest.raises(ShapeError, match="from itself"):
        LocalCollectives().all_to_all([part], what="mistake")


def exchange(collectives: Collectives, what: str, rows: int = 4) -> torch.Tensor:
    splits = (rows,) * collectives.world_size
    data = torch.full((sum(splits),), float(collectives.rank))
    return collectives.all_to_all([Part(data, splits, splits)], what=what).wait()[0]


def loop_until(stops: str) -> dict[str, str]:
    """Exchanges in a loop; at step 3 rank 1 stops in the way named. What the others saw."""
    with gloo(limit_of(stops)) as collectives:
        try:
            for step in range(1000):
                collectives.step = step
                if step == 3 and collectives.rank == 1:
                    stop(stops)
                exchange(collectives, "rows")
        except CollectiveFailed as error:
            try:
                collectives.barrier(what="after it")
                later = ""
            except CollectiveFailed as again:
                later = str(again)
            return {"error": str(error), "later": later}
    return {}


def limit_of(stops: str) -> float:
    return LATE_S if stops == "late" else TIMEOUT_S


def stop(how: str) -> None:
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "raises":
        raise ValueError("a batch is wrong")
    time.sleep(1.5 * LATE_S)
    os._exit(0)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "raises", "late"])
def test_a_rank_that_stops_ends_the_others(how: str) -> None:
    found = start_ranks(3, loop_until, how).outcomes()
    assert not found[1][0]
    for rank in (0, 2):
        good, saw = found[rank]
        assert good, saw
        for part in ("'rows'", "step 3", f"rank {rank} of 3", f"within {limit_of(how)} s"):
            assert part in saw["error"]
        assert saw["later"] == saw["error"], "later collectives fail at once, with the first error"


def other_sizes() -> str:
    """Rank 1 sends less than rank 0 was told; Gloo ends a process that gets too much."""
    with gloo(LATE_S) as collectives:
        rows = 4 if collectives.rank == 0 else 3
        try:
            exchange(collectives, "gradients", rows)
        except CollectiveFailed as error:
            return str(error)
        return "arrived"


def test_splits_that_do_not_match_hang_nobody() -> None:
    found = start_ranks(2, other_sizes).outcomes()
    texts = [str(outcome) for _, outcome in found.values()]
    assert "hung" not in texts
    assert texts != ["arrived", "arrived"]


def closed() -> str:
    with gloo() as collectives:
        exchange(collectives, "rows")
        collectives.barrier(what="all here")
        collectives.close()
        with pytest.raises(CollectiveFailed, match="closed"):
            exchange(collectives, "too late")
    return "done"


def test_no_call_follows_a_close() -> None:
    assert run_ranks(2, closed) == ["done", "done"]


def two_under_way() -> list[str]:
    with gloo(LATE_S) as collectives:
        if collectives.rank == 1:
            collectives.barrier(what="ready")
            dist.barrier()  # until the other has met both
            os._exit(0)
        collectives.barrier(what="ready")
        splits = (1, 1)
        pendings = [
            collectives.all_to_all([Part(torch.zeros(2), splits, splits)], what=what)
            for what in ("first", "second")
        ]
        said = []
        for pending in pendings:
            with pytest.raises(CollectiveFailed) as error:
                pending.wait()
            said.append(str(error.value))
        dist.barrier()
        return said


@pytest.mark.slow
def test_the_first_failure_is_told_again_not_a_later_one() -> None:
    good, (first, second) = start_ranks(2, two_under_way).outcomes()[0]
    assert good
    assert "'first'" in first
    assert second == first
