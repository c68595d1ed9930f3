"""Faults of parameter servers, workers and networks at random moments: no update can hide.

Rows count the updates that were applied (`support.counted_updates`), so `Job.finish` holds servers
to an equation: sent = applied + counted as lost.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.counted_updates import Job
from support.cut_network import CUTS, Proxy, namespace
from support.shares import SHARE

pytestmark = [pytest.mark.slow, pytest.mark.multiproc]

CASES = range(0, 50, SHARE)


@pytest.fixture
def job(tmp_path: Path, case: int) -> Iterator[Job]:
    with Job(tmp_path, case, stale_updates=case % 3 * 2) as made:
        yield made


@pytest.mark.parametrize("case", CASES)
def test_a_killed_server_loses_what_came_since_its_last_save(job: Job, case: int) -> None:
    chance = random.Random(case)
    job.start()
    victim, saves = chance.randrange(2), chance.randrange(6)
    job.wait(lambda: job.saves(victim) >= saves)
    time.sleep(chance.uniform(0, 0.3))
    job.servers[victim].kill()
    job.servers[victim].join()
    saved = job.saved(victim)
    done = job.done()
    time.sleep(chance.uniform(0, 0.5))
    job.start_server(victim)
    job.advance(5)
    for name, servers in job.finish().items():
        assert servers[1 - victim].lost == 0
        # Of those that were on their way when the server died, some may have been applied.
        more = servers[victim].lost - (done[name] - saved.get(name, 0))
        assert 0 <= more <= 1 + job.stale_updates


@pytest.mark.parametrize("case", CASES)
def test_a_killed_worker_leaves_whole_updates(job: Job, case: int) -> None:
    chance = random.Random(case)
    job.start(3)
    time.sleep(chance.uniform(0, 0.5))
    job.workers["w1"].kill()
    job.workers["w1"].join()
    job.advance(5)
    for servers in job.finish().values():
        assert [one.lost for one in servers] == [0, 0]


@pytest.mark.parametrize("case", CASES)
def test_a_server_that_is_told_to_end_loses_nothing(job: Job, case: int) -> None:
    chance = random.Random(case)
    job.start()
    victim = chance.randrange(2)
    time.sleep(chance.uniform(0, 0.5))
    job.servers[victim].terminate()
    job.servers[victim].join(200)
    assert job.servers[victim].exitcode == 0, job.logs()
    job.start_server(victim)
    job.advance(5)
    for servers in job.finish().values():
        assert [one.lost for one in servers] == [0, 0]


@pytest.mark.parametrize("case", CASES)
def test_a_server_that_stands_still_applies_nothing_twice(job: Job, case: int) -> None:
    chance = random.Random(case)
    job.start()
    pid = job.servers[chance.randrange(2)].pid
    time.sleep(chance.uniform(0, 0.3))
    os.kill(pid, signal.SIGSTOP)
    time.sleep(job.reply_s * chance.uniform(1.2, 5))
    os.kill(pid, signal.SIGCONT)
    job.advance(5)
    for servers in job.finish().values():
        assert [one.lost for one in servers] == [0, 0]


def seconds(case: int, chance: random.Random) -> float:
    """How long a network is cut: with all cases, some of them as long as the spec says."""
    return chance.uniform(10, 30) if SHARE == 1 and case % 10 == 9 else chance.uniform(0.3, 3)


@pytest.mark.parametrize("case", CASES)
def test_a_cut_connection_to_a_server(job: Job, case: int) -> None:
    chance = random.Random(case)
    cut, victim = chance.choice(CUTS), chance.randrange(2)
    with Proxy(job.listens[victim]) as proxy:
        job.addresses[victim] = proxy.address
        job.start()
        time.sleep(chance.uniform(0, 0.3))
        proxy.cut(cut)
        time.sleep(seconds(case, chance))
        proxy.mend()
        job.advance(5)
        for servers in job.finish().values():
            assert [one.lost for one in servers] == [0, 0]


@pytest.mark.parametrize("case", CASES)
def test_a_cut_cable_to_a_server(job: Job, case: int) -> None:
    chance = random.Random(case)
    with namespace() as link:
        job.listens[1] = job.addresses[1] = f"tcp://{link.host}:7000"
        job.namespaces[1] = link.name
        job.start()
        time.sleep(chance.uniform(0, 0.3))
        link.cut()
        time.sleep(seconds(case, chance))
        link.mend()
        job.advance(5)
        for servers in job.finish().values():
            assert [one.lost for one in servers] == [0, 0]


@pytest.mark.parametrize("case", range(0, 10, SHARE))
def test_a_server_that_is_killed_again_still_knows_what_it_lost(job: Job, case: int) -> None:
    chance = random.Random(case)
    job.start()
    for _ in range(2):
        saves = job.saves(0) + chance.randrange(1, 3)
        job.wait(lambda saves=saves: job.saves(0) >= saves)  # type: ignore[misc]
        time.sleep(chance.uniform(0, 0.2))
        job.servers[0].kill()
        job.servers[0].join()
        job.start_server(0)
        job.advance(5)
    job.finish()
