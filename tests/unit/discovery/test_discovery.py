"""One contract of all kinds of discovery: who registers is found, and who is gone is not."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from shoal.discovery import (
    Discovery,
    Memory,
    Space,
    StaticList,
    TfConfig,
    ZooKeeper,
    open_discovery,
    wait_for,
)
from shoal.discovery.nodes import Nodes
from shoal.errors import ConfigError, ServerLost
from support.zookeeper import ZooKeeperServer, require_zookeeper

Opened = Callable[[], Discovery]
KINDS = ["memory", pytest.param("zookeeper", marks=pytest.mark.xdist_group("zookeeper"))]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ZooKeeperServer]:
    require_zookeeper()
    one = ZooKeeperServer(tmp_path_factory.mktemp("zookeeper"))
    try:
        one.start()
        yield one
    finally:
        one.stop()


@pytest.fixture(params=KINDS)
def opened(request: pytest.FixtureRequest) -> Iterator[Opened]:
    """Opens further processes of one job."""
    every: list[Discovery] = []
    space = Space()
    path = f"/monolith/job-{time.monotonic_ns()}"

    def one() -> Discovery:
        if request.param == "memory":
            every.append(Memory(space))
        else:
            hosts = request.getfixturevalue("server").hosts
            every.append(ZooKeeper(hosts, path, session_s=30, connect_s=60))
        return every[-1]

    yield one
    for each in every:
        each.close()


class Seen:
    """What a watch was called with; waits for a book."""

    def __init__(self) -> None:
        self.books: list[dict[int, str]] = []
        self._changed = threading.Condition()

    def __call__(self, book: Mapping[int, str]) -> None:
        with self._changed:
            self.books.append(dict(book))
            self._changed.notify_all()

    def until(self, wanted: Mapping[int, str], timeout_s: float = 60) -> None:
        with self._changed:
            there = self._changed.wait_for(lambda: self.books[-1:] == [wanted], timeout_s)
        assert there, (self.books, wanted)


def test_who_registers_is_found(opened: Opened) -> None:
    first, second, worker = opened(), opened(), opened()
    assert worker.query("ps") == {}
    assert first.register("ps", 0, "h0:1001")
    assert second.register("ps", 1, "[::1]:1002")
    assert worker.register("worker", 0, "tcp://h2:1003")
    assert worker.query("ps") == {0: "h0:1001", 1: "[::1]:1002"}
    assert first.query("worker") == {0: "h2:1003"}
    assert first.query("other") == {}


def test_the_last_writer_wins(opened: Opened) -> None:
    first, second = opened(), opened()
    assert first.register("ps", 0, "h:1001")
    assert second.register("ps", 0, "h:1002")
    assert first.query("ps") == {0: "h:1002"}
    first.close()
    assert second.query("ps") == {0: "h:1002"}


@pytest.mark.slow
def test_an_index_that_is_held_is_not_given_away(opened: Opened) -> None:
    first, second = opened(), opened()
    assert first.register("ps", 0, "", replace=False)
    assert not second.register("ps", 0, "", replace=False)
    assert second.query("ps") == {}
    assert first.register("ps", 0, "h:1", replace=False)
    assert second.query("ps") == {0: "h:1"}
    first.close()
    assert second.register("ps", 0, "h:2", replace=False)
    assert second.query("ps") == {0: "h:2"}


def test_one_of_many_gets_an_index(opened: Opened) -> None:
    every = [opened() for _ in range(4)]
    got: list[bool] = []
    ready = threading.Barrier(4)

    def race(one: Discovery) -> None:
        ready.wait()
        got.append(one.register("ps", 3, "h:1", replace=False))

    threads = [threading.Thread(target=race, args=(one,)) for one in every]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(got) == [False, False, False, True]


def test_a_watch_sees_every_last_state(opened: Opened) -> None:
    first, second, seen = opened(), opened(), Seen()
    first.watch("ps", seen)
    assert seen.books == [{}]
    assert second.register("ps", 0, "h:1")
    seen.until({0: "h:1"})
    assert second.register("ps", 0, "h:2")
    seen.until({0: "h:2"})
    assert first.register("ps", 1, "h:3")
    seen.until({0: "h:2", 1: "h:3"})
    second.close()
    seen.until({1: "h:3"})
    first.close()
    first.close()


def test_all_are_waited_for(opened: Opened) -> None:
    first, worker = opened(), opened()
    assert first.register("ps", 1, "h:2")
    with pytest.raises(ServerLost, match=r"none with index \[0\] in 0\.1 s"):
        wait_for(worker, "ps", 2, timeout_s=0.1)
    late = threading.Timer(0.2, lambda: first.register("ps", 0, "h:1"))
    late.start()
    assert wait_for(worker, "ps", 2, timeout_s=60) == ("h:1", "h:2")
    late.join()


@pytest.mark.parametrize(
    ("role", "index", "address", "match"),
    [
        ("p/s", 0, "h:1", "role of a process"),
        ("", 0, "h:1", "role of a process"),
        ("ps", -1, "h:1", "index of a process"),
        ("ps", True, "h:1", "index of a process"),
        ("ps", 1 << 40, "h:1", "index of a process"),
        ("ps", 0, "h", "address of a process"),
        ("ps", 0, "h:0", "address of a process"),
        ("ps", 0, "h:65536", "address of a process"),
        ("ps", 0, "h:1\n", "address of a process"),
        ("ps", 0, "a b:1", "address of a process"),
        ("ps", 0, 5, "address of a process"),
    ],
)
def test_bad_registrations_are_refused(
    opened: Opened, role: Any, index: Any, address: Any, match: str
) -> None:
    with pytest.raises(ConfigError, match=match):
        opened().register(role, index, address)


def test_junk_in_zookeeper_is_passed_over(server: ZooKeeperServer) -> None:
    from kazoo.client import KazooClient

    one, seen = ZooKeeper(server.hosts, "/junk/job", connect_s=60), Seen()
    client = KazooClient(hosts=server.hosts)
    client.start()
    try:
        assert one.register("ps", 0, "h:1")
        one.watch("ps", seen)
        junk = {
            "ps.1": b"\xff\xfe",
            "ps.x": b"h:1",
            "ps": b"",
            "ps.99999999": b"h:1",
            "a.b.1": b"x",
        }
        for name, data in junk.items():
            client.create(f"/junk/job/{name}", data)
        client.create("/junk/job/ps.2", b"h:3")
        seen.until({0: "h:1", 2: "h:3"})
        client.set("/junk/job/ps.0", b"what")  # repaired: the node is still this process's
        client.set("/junk/job/ps.2", b"h:4")
        seen.until({0: "h:1", 2: "h:4"})
        until = time.monotonic() + 60  # that book may have been read before the junk came
        while client.get("/junk/job/ps.0")[0] != b"h:1":
            assert time.monotonic() < until
            time.sleep(0.01)
    finally:
        client.stop()
        client.close()
        one.close()


CLUSTER = {
    "cluster": {
        "chief": ["host0:2222"],
        "ps": ["host1:2222", "host2:2222"],
        "worker": ["host3:2222", "host4:2222", "host5:2222"],
    },
    "task": {"type": "worker", "index": 1},
}


def test_tf_config() -> None:
    found = TfConfig(json.dumps(CLUSTER))
    assert (found.role, found.index, found.address) == ("worker", 2, "host4:2222")
    assert found.query("ps") == {0: "host1:2222", 1: "host2:2222"}
    assert found.query("worker") == {
        0: "host0:2222",
        1: "host3:2222",
        2: "host4:2222",
        3: "host5:2222",
    }
    assert found.register("worker", 2, "host4:2222")
    with pytest.raises(ValueError, match="role in TF_CONFIG"):
        found.query("evaluator")
    with pytest.raises(ConfigError, match="registration of ps 0"):
        found.register("ps", 0, "host9:2222")
    assert wait_for(found, "ps", 2, timeout_s=1) == ("host1:2222", "host2:2222")


def test_tf_config_of_a_server_and_of_a_chief() -> None:
    server = TfConfig(json.dumps({**CLUSTER, "task": {"type": "ps", "index": 1}}))
    assert (server.role, server.index, server.address) == ("ps", 1, "host2:2222")
    chief = TfConfig(json.dumps({**CLUSTER, "task": {"type": "chief", "index": 0}}))
    assert (chief.role, chief.index, chief.address) == ("worker", 0, "host0:2222")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"cluster": {}}',
        '{"cluster": [], "task": {"type": "ps", "index": 0}}',
        '{"cluster": {"ps": "h:1"}, "task": {"type": "ps", "index": 0}}',
        '{"cluster": {"ps": [1]}, "task": {"type": "ps", "index": 0}}',
        '{"cluster": {"ps": ["h:1"]}, "task": {"type": "ps", "index": 1}}',
        '{"cluster": {"ps": ["h:1"]}, "task": {"type": "ps", "index": "0"}}',
        '{"cluster": {"ps": ["h:1"]}, "task": {"type": "evaluator", "index": 0}}',
        '{"cluster": {"chief": ["h:1", "h:2"]}, "task": {"type": "chief", "index": 0}}',
        '{"cluster": {"ps": ["h:1", "h:1"]}, "task": {"type": "ps", "index": 0}}',
        "[" * 100_000,
    ],
)
def test_a_malformed_tf_config_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        TfConfig(text)


def test_a_list() -> None:
    found, seen = StaticList(["tcp://h:1", "h:2"]), Seen()
    assert found.query("ps") == {0: "h:1", 1: "h:2"}
    assert found.query("worker") == {}
    found.watch("ps", seen)
    assert seen.books == [{0: "h:1", 1: "h:2"}]
    assert found.register("ps", 1, "h:2")
    for index, address in ((1, "h:3"), (2, "h:2")):
        with pytest.raises(ConfigError, match="in a list of addresses"):
            found.register("ps", index, address)
    for addresses in (["h:1", "h:1"], ["h"], [""]):
        with pytest.raises(ConfigError, match="address of a ps"):
            StaticList(addresses)


@pytest.mark.parametrize(
    "where", ["", "zookeeper", "zookeeper://", "etcd://h:1", "tcp://h:1", "TF_CONFIG"]
)
def test_an_unknown_discovery_is_refused(where: str) -> None:
    with pytest.raises(ConfigError, match="discovery of servers"):
        open_discovery(where, job="j")


@pytest.mark.parametrize(
    ("where", "match"),
    [
        ("zookeeper://h", "address of ZooKeeper"),
        ("zookeeper://h:1,", "address of ZooKeeper"),
        ("zookeeper://h:1/a b", "path in ZooKeeper"),
        ("zookeeper://h:1/../x", "path in ZooKeeper"),
        ("zookeeper://h:1/a//b", "path in ZooKeeper"),
        ("zookeeper://h:1/a?", "path in ZooKeeper"),
    ],
)
def test_a_malformed_address_of_zookeeper_is_refused(where: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        open_discovery(where, job="j")


def test_a_zookeeper_that_does_not_answer_is_reported() -> None:
    from support.ranks import free_port

    with pytest.raises(ServerLost, match="ZooKeeper at"):
        ZooKeeper(f"127.0.0.1:{free_port()}", "/a", connect_s=0.5)


def test_a_discovery_is_opened_by_its_name(server: ZooKeeperServer) -> None:
    variables = {"TF_CONFIG": json.dumps(CLUSTER)}
    assert open_discovery("tf_config", job="j", environment=variables).query("ps")
    one = open_discovery(f"zookeeper://{server.hosts}", job="a-job")
    other = ZooKeeper(server.hosts, "/monolith/a-job", connect_s=60)
    try:
        assert one.register("ps", 0, "h:1")
        assert other.query("ps") == {0: "h:1"}
    finally:
        one.close()
        other.close()


def test_kazoo_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "kazoo.client", None)
    with pytest.raises(ConfigError, match=r"no package kazoo.*shoal\[ps\]"):
        ZooKeeper("127.0.0.1:1", "/a")


def test_a_session_that_expires_registers_again(server: ZooKeeperServer, tmp_path: Path) -> None:
    from support.zookeeper import expire

    one, other, seen = (
        ZooKeeper(server.hosts, "/expiring", connect_s=60),
        ZooKeeper(server.hosts, "/expiring", connect_s=60),
        Seen(),
    )
    try:
        assert one.register("ps", 0, "h:1")
        other.watch("ps", seen)
        session = one.nodes.client.client_id[0]
        expire(one)
        until = time.monotonic() + 60
        while one.nodes.client.client_id is None or one.nodes.client.client_id[0] in (0, session):
            assert time.monotonic() < until
            time.sleep(0.05)
        seen.until({0: "h:1"})  # again, or still
        until = time.monotonic() + 60
        owner = session
        while owner == session:
            assert time.monotonic() < until
            with suppress(other.nodes.missing):
                owner = other.nodes.asked("get", "/expiring/ps.0")[1].ephemeralOwner
        seen.until({0: "h:1"})
    finally:
        one.close()
        other.close()


def test_who_leaves_right_after_all_were_there_is_still_named() -> None:
    class Brief(Memory):
        def watch(self, role: str, changed: Callable[[Mapping[int, str]], None]) -> None:
            changed({0: "h:1", 1: "h:2"})
            changed({1: "h:2"})

    assert wait_for(Brief(Space()), "ps", 2, timeout_s=1) == ("h:1", "h:2")


class Lost:
    """A client whose session is lost while it reads a node, the first few times."""

    connected = True
    client_id: tuple[int, bytes] | None = None

    def __init__(self) -> None:
        self.reads = 0


def test_a_session_lost_while_a_node_is_read_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.discovery.nodes._AGAIN_S", 0.01)
    import kazoo.exceptions as kazoo

    one: Any = object.__new__(Nodes)
    one.client, one.hosts, one._lock = Lost(), "h:1", threading.RLock()
    one._woken, one._closing = threading.Event(), threading.Event()
    one.errors, one.missing = (kazoo.KazooException,), kazoo.NoNodeError
    one._exists, one._expired = kazoo.NodeExistsError, kazoo.SessionExpiredError
    one._held, one._looks = {"/a/ps.0": b"h:1"}, []

    def asked(method: str, *_: object, **__: object) -> object:
        if method == "create":
            raise kazoo.NodeExistsError
        one.client.reads += 1
        if one.client.reads == 3:
            raise KeyError("what nobody expects")
        if one.client.reads > 5:
            one._closing.set()
        return b"h:1", None

    one.asked = asked
    with pytest.raises(kazoo.SessionExpiredError):
        one._written("/a/ps.0", b"h:1", replace=False)
    one._woken.set()
    thread = threading.Thread(target=one._follow, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    assert one.client.reads > 5
