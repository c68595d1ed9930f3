"""Servers that register in a real ZooKeeper: it stops, sessions expire, servers move."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
from rich.console import Console

from shoal import StepContext
from shoal import config as settings
from shoal.checkpoint import CheckpointStore
from shoal.config.build import build_tables
from shoal.discovery import open_discovery
from shoal.errors import ServerLost
from shoal.placement import hash_ids, ranks_of
from shoal.ps.client import connect
from shoal.ps.connections import Patience
from shoal.ps.membership import ROLE, servers_of
from shoal.ps.messages import Head
from shoal.table.shard import IdGroups
from shoal.train import runs
from support.served import start_server
from support.shares import SHARE
from support.small_runs import small_run
from support.zookeeper import ZooKeeperServer, expire, require_zookeeper

RUN = {"examples": 2_000, "num_features": 2, "vocabulary": 200, "batch_size": 100}
pytestmark = pytest.mark.xdist_group("zookeeper")


@pytest.fixture
def zookeeper(tmp_path: Path) -> Iterator[ZooKeeperServer]:
    require_zookeeper()
    one = ZooKeeperServer(tmp_path / "zookeeper")
    try:
        one.start()
        yield one
    finally:
        one.stop()


def until(reached: Callable[[], bool], timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.02)


class Cluster:
    """Servers of `shoal ps` without indices of their own, and a worker in this process."""

    def __init__(self, folder: Path, hosts: str, servers: int = 2) -> None:
        self.folder, self.servers = folder, servers
        self.session_s = 10  # longer than a server stands still on a busy machine
        self.where = f"zookeeper://{hosts}"
        small_run(folder, **RUN, tables={"default": {"dim": 4, "initializer": "zeros"}})
        self._processes: dict[str, BaseProcess] = {}
        self.sent = 0
        self._ending = threading.Event()
        self._errors: list[BaseException] = []

    def start(self, *names: str) -> None:
        for name in names:
            self._processes[name] = start_server(
                self.folder,
                self.log(name),
                [
                    *("run.yaml", "--of", str(self.servers)),
                    *("--store", "store", "--save-every-s", "0.5"),
                    f"distributed.servers.discovery={self.where}",
                    f"distributed.servers.session_s={self.session_s}",
                ],
            )

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def standing_by(self) -> list[str]:
        """The servers that wait for an index, whatever else they log meanwhile."""
        found = [
            self.said(name).partition("all indices are taken: standing by\n")
            for name in self._processes
        ]
        return [
            name
            for name, (_, waits, after) in zip(self._processes, found, strict=True)
            if waits and f" of {self.servers} at " not in after
        ]

    def said(self, name: str) -> str:
        return self.log(name).read_text() if self.log(name).exists() else ""

    def process(self, name: str) -> BaseProcess:
        return self._processes[name]

    def signal(self, name: str, number: int) -> None:
        pid = self._processes[name].pid
        assert pid is not None
        os.kill(pid, number)

    def ended(self, name: str, number: int) -> int | None:
        """The exit status after a signal."""
        self.signal(name, number)
        self._processes[name].join(100)
        return self._processes[name].exitcode

    def serving(self, index: int) -> list[str]:
        started = f"server {index} of {self.servers} at "
        return [
            name
            for name, process in self._processes.items()
            if process.exitcode is None and started in self.said(name)
        ]

    def connect(self) -> None:
        """A worker that adds 1 to each of its rows, again and again."""
        tables = build_tables(settings.load(self.folder / "run.yaml", environment={}))
        self.discovery = open_discovery(self.where, job="small", session_s=self.session_s)
        addresses = servers_of(self.discovery, self.servers, timeout_s=120)
        patience = Patience(reply_s=5, repeats=20)
        exchange = connect(addresses, tables, worker="w", patience=patience)
        self.rows = exchange.shard
        self.discovery.watch(ROLE, self.rows.servers.follow)
        self.ids = torch.arange(40)
        splits, tables = torch.tensor([0, 40]), torch.tensor([0], dtype=torch.int32)
        self.groups = IdGroups(self.ids, splits, tables)
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        dim = self.rows.specs[0].dim
        try:
            while not self._ending.is_set():
                ones = [torch.ones(40, dim)]
                self.rows.assign_add(self.groups, ones, ctx=StepContext())
                self.sent += 1
                time.sleep(0.002)
        except BaseException as error:  # noqa: BLE001 - the test's own thread reports it
            self._errors.append(error)

    def advance(self, updates: int = 5) -> None:
        """Wait until further updates have been applied."""
        wanted = self.sent + updates
        until(lambda: self.sent >= wanted or bool(self._errors), 120)
        assert not self._errors, self._errors

    def finish(self) -> list[int]:
        """Every update was applied once, or is counted as lost; how many, by server."""
        self._ending.set()
        self._thread.join(120)
        assert not self._thread.is_alive() and not self._errors, self._errors
        hello = (Head(method="hello"), [])
        told = self.rows.servers.ask([hello] * self.servers)
        lost = [int(json.loads(said)["lost"]) for said, _ in told]
        spec = self.rows.specs[0]
        owner_n = ranks_of(hash_ids(spec.hash_name, self.ids), self.servers)
        expected = self.sent - torch.tensor(lost)[owner_n]
        added = self.rows.find(self.groups).weights[0][:, 0]
        assert added.tolist() == expected.tolist()
        return lost

    def end(self) -> None:
        self._ending.set()
        for process in self._processes.values():
            process.kill()
            process.join()
        for name in ("rows", "discovery"):
            held = getattr(self, name, None)
            if held is not None:
                getattr(held, "servers", held).close()


@pytest.fixture
def cluster(tmp_path: Path, zookeeper: ZooKeeperServer) -> Iterator[Cluster]:
    one = Cluster(tmp_path, zookeeper.hosts)
    try:
        yield one
    finally:
        one.end()
        for log in sorted(tmp_path.glob("*.log")):  # shown if the test fails
            print(log.name, log.read_text())


def started(cluster: Cluster, *names: str) -> None:
    cluster.start(*names)

    def ready() -> bool:
        assert all(cluster.process(name).exitcode is None for name in names), "a server ended"
        return all(cluster.serving(index) for index in range(cluster.servers))

    until(ready, 200)


@pytest.mark.slow
def test_a_server_that_stands_by_takes_over(cluster: Cluster) -> None:
    started(cluster, "a", "b", "c")
    until(lambda: len(cluster.standing_by()) == 1, 120)
    (spare,) = cluster.standing_by()
    cluster.connect()
    store = CheckpointStore(cluster.folder / "store/server-1-of-2")
    until(lambda: len(store.list()) >= 2)
    (killed,) = cluster.serving(1)
    cluster.process(killed).kill()
    cluster.process(killed).join()
    until(lambda: cluster.serving(1) == [spare], 120)
    cluster.advance()
    lost = cluster.finish()
    assert lost[0] == 0
    (other,) = cluster.serving(0)
    for name in (other, spare):
        assert cluster.ended(name, signal.SIGTERM) == 0, cluster.said(name)
    assert cluster.discovery.query(ROLE) == {}


@pytest.mark.slow
def test_a_server_that_was_replaced_ends_and_saves_nothing(cluster: Cluster) -> None:
    """It stood still for so long that another took its index."""
    started(cluster, "a", "b")
    cluster.connect()
    cluster.start("c")
    until(lambda: cluster.standing_by() == ["c"], 120)
    (still,) = cluster.serving(0)
    cluster.signal(still, signal.SIGSTOP)
    until(lambda: "c" in cluster.serving(0), 120)
    cluster.advance()
    assert cluster.ended(still, signal.SIGCONT) == 2
    assert "taken by" in cluster.said(still)
    cluster.advance()
    assert cluster.finish()[1] == 0


@pytest.mark.slow
@pytest.mark.parametrize("part", range(0, 10, SHARE))
def test_zookeeper_stops_and_sessions_expire_while_training_goes_on(
    part: int, cluster: Cluster, zookeeper: ZooKeeperServer
) -> None:
    """Five times in each part."""
    chance = random.Random(part)
    cluster.session_s = 2  # nobody stands by
    started(cluster, "a", "b")
    cluster.connect()
    for _ in range(5):
        zookeeper.stop()
        cluster.advance()  # the last good address book is kept
        time.sleep(chance.uniform(0, 4))
        zookeeper.start()
        both = {0, 1}
        until(lambda both=both: set(cluster.discovery.query(ROLE)) == both, 60)  # type: ignore[misc]
        expire(cluster.discovery)
        (name,) = cluster.serving(chance.randrange(2))
        cluster.signal(name, signal.SIGSTOP)
        time.sleep(chance.uniform(0, 4))
        cluster.signal(name, signal.SIGCONT)
        cluster.advance()
    fresh = open_discovery(cluster.where, job="small")
    until(lambda: set(fresh.query(ROLE)) == {0, 1}, 60)
    fresh.close()
    assert cluster.finish() == [0, 0]


def test_a_worker_whose_servers_do_not_register_says_so(
    tmp_path: Path, zookeeper: ZooKeeperServer
) -> None:
    path = small_run(tmp_path, **RUN)
    where = f"zookeeper://{zookeeper.hosts}"
    run = settings.load(
        path,
        [
            "distributed.path=ps",
            f"distributed.servers.discovery={where}",
            "distributed.servers.count=2",
            "distributed.servers.start_s=0.2",
        ],
        environment={},
    )
    with pytest.raises(ServerLost, match=r"none with index \[0, 1\] in 0\.2 s"):
        runs.run(run, console=Console(quiet=True))
