"""Servers and their indices: who is first, who stands by, who takes over; workers follow."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from shoal import Segment, StepContext, TableSpec
from shoal.discovery import Memory, Space, StaticList, TfConfig
from shoal.errors import ConfigError, ServerLost
from shoal.ps.client import connect
from shoal.ps.connections import Patience
from shoal.ps.membership import ROLE, IndexLease, discovery_of, servers_of
from shoal.ps.saving import ServerSaver
from shoal.ps.server import TableServer
from shoal.rules.initializers import Zeros
from shoal.rules.optimizers import SGD
from shoal.table.shard import IdGroups

SPECS = (
    TableSpec(name="t", segments=(Segment(dim=2, initializer=Zeros(), optimizer=SGD(lr=1.0)),)),
)


def until(reached: Callable[[], bool], timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def lease(space: Space, of: int = 2) -> tuple[IndexLease, Memory, threading.Event]:
    session, ended = Memory(space), threading.Event()
    return IndexLease(session, of, ended), session, ended


def refuse() -> None:
    raise AssertionError("nobody has to wait")


def test_the_first_servers_get_the_indices_and_another_takes_over() -> None:
    space = Space()
    first, session, _ = lease(space)
    second, _, _ = lease(space)
    third, _, _ = lease(space)
    assert [first.take(None, refuse), second.take(None, refuse)] == [0, 1]
    first.announce(0, "tcp://h:1")
    waits, got = threading.Event(), []
    thread = threading.Thread(target=lambda: got.append(third.take(None, waits.set)))
    thread.start()
    assert waits.wait(60)
    assert got == []
    session.close()
    thread.join(60)
    assert got == [0]
    assert not first.is_held()
    first.check()  # nobody answers workers in its place yet
    third.announce(0, "h:3")
    assert third.is_held()


@pytest.mark.slow
def test_a_server_that_stands_by_ends_when_it_is_asked_to() -> None:
    space = Space()
    first, _, _ = lease(space, 1)
    assert first.take(None, refuse) == 0
    second, _, ended = lease(space, 1)
    assert second.take(None, ended.set) is None


def test_the_server_whose_index_is_given_replaces_another_which_ends() -> None:
    space = Space()
    first, _, ended = lease(space)
    assert first.take(None, refuse) == 0
    first.announce(0, "h:1")
    second, _, _ = lease(space)
    assert second.take(0, refuse) == 0
    assert not ended.is_set()
    second.announce(0, "h:2")
    assert ended.is_set()
    with pytest.raises(ServerLost, match="taken by h:2"):
        first.check()
    assert not first.is_held()
    second.check()


def test_an_index_that_was_taken_before_it_is_announced() -> None:
    space = Space()
    first, second = lease(space)[0], lease(space)[0]
    assert [first.take(1, refuse), second.take(1, refuse)] == [1, 1]
    with pytest.raises(ServerLost, match="taken by another server"):
        first.announce(1, "h:1")


@pytest.mark.parametrize("index", [-1, 2, None])
def test_an_index_that_cannot_be(index: int | None) -> None:
    with pytest.raises(ConfigError, match="index of a server"):
        IndexLease(None, 2, threading.Event()).take(index, refuse)


@pytest.mark.parametrize("of", [0, 4097])
def test_a_number_of_servers_that_cannot_be(of: int) -> None:
    with pytest.raises(ConfigError, match=rf"number of servers: got {of}; allowed: 1\.\.4096"):
        IndexLease(None, of, threading.Event())


def test_without_a_discovery_the_index_is_as_given() -> None:
    with IndexLease(None, 2, threading.Event()) as one:
        assert one.take(1, refuse) == 1
        one.announce(1, "tcp://0.0.0.0:5")
        assert one.is_held()
    assert IndexLease(None, 1, threading.Event()).take(None, refuse) == 0


def test_tf_config_gives_a_server_its_index() -> None:
    cluster = '{"cluster": {"ps": ["h:1", "h:2"]}, "task": {"type": "ps", "index": 1}}'
    one = IndexLease(TfConfig(cluster), 2, threading.Event())
    assert one.take(None, refuse) == 1
    one.announce(1, "h:2")
    assert one.is_held()
    with pytest.raises(ConfigError, match="registration of ps 1"):
        one.announce(1, "127.0.0.1:5000")


@pytest.mark.parametrize("address", ["tcp://0.0.0.0:5", "[::]:5", "*:5", "h", ""])
def test_an_address_that_no_worker_reaches(address: str) -> None:
    one = lease(Space())[0]
    with pytest.raises(ConfigError, match="address"):
        one.announce(0, address)


def test_servers_are_found_by_a_list_or_by_registration() -> None:
    listed = discovery_of(None, ["tcp://h:1", "h:2"], "job")
    assert servers_of(listed, None, timeout_s=1) == ("h:1", "h:2")
    assert servers_of(listed, 2, timeout_s=1) == ("h:1", "h:2")
    session = Memory(Space())
    session.register(ROLE, 0, "h:1")
    assert servers_of(session, 1, timeout_s=1) == ("h:1",)
    with pytest.raises(ServerLost, match=r"none with index \[1\]"):
        servers_of(session, 2, timeout_s=0.05)
    for found, count in ((listed, 3), (session, None), (session, 0), (StaticList([]), None)):
        with pytest.raises(ConfigError, match=r"servers\.count"):
            servers_of(found, count, timeout_s=1)
    for where, addresses in ((None, []), ("tf_config", ["h:1"])):
        with pytest.raises(ConfigError, match=r"distributed\.servers"):
            discovery_of(where, addresses, "job")


def test_a_worker_follows_a_server_that_moves(tmp_path: Path) -> None:
    """Its standby has the rows of the last save, and no update is lost or applied twice after."""
    space = Space()
    worker = Memory(space)
    old = TableServer(SPECS, index=0, of=1)
    groups = IdGroups(torch.tensor([5]), torch.tensor([0, 1]), torch.tensor([0], dtype=torch.int32))
    grads = [torch.ones(1, 2)]
    first = old.serve("tcp://127.0.0.1:0")
    Memory(space).register(ROLE, 0, first.address)
    addresses = servers_of(worker, 1, timeout_s=10)
    patience = Patience(reply_s=100, repeats=3, pause_s=0.01)
    rows = connect(addresses, SPECS, worker="w", patience=patience).shard
    worker.watch(ROLE, rows.servers.follow)
    with ServerSaver(old, tmp_path, every_s=1000):
        rows.apply_ids(groups, grads, ctx=StepContext())
    first.stop()  # nothing answers there any more
    late = threading.Thread(
        target=lambda: rows.apply_ids(groups, grads, ctx=StepContext()), daemon=True
    )
    late.start()
    new = TableServer(SPECS, index=0, of=1)
    with ServerSaver(new, tmp_path, every_s=1000):
        second = new.serve("tcp://127.0.0.1:0")
        time.sleep(0.2)  # the update waits for a reply that does not come, most likely
        Memory(space).register(ROLE, 0, second.address)
        late.join(60)
        assert not late.is_alive()
        rows.apply_ids(groups, grads, ctx=StepContext())
        assert rows.find(groups).weights[0].tolist() == [[-3, -3]]
        rows.servers.close()
        second.stop()


@pytest.mark.parametrize("held", [False, True])
def test_two_servers_with_one_store(tmp_path: Path, held: bool) -> None:
    """The one that is replaced does not save over the other; the other saves in full."""
    one, other = (TableServer(SPECS, index=0, of=1) for _ in range(2))
    with ServerSaver(one, tmp_path, every_s=1000) as saver:
        saver.save()
        with ServerSaver(other, tmp_path, every_s=1000, is_held=lambda: held) as replaced:
            replaced.save()
            newest = saver.save()
            if held:
                saved = replaced.save()
                assert (saved.kind, saved.step) == ("full", newest.step + 1)
            else:
                with pytest.raises(ServerLost, match="another server"):
                    replaced.save()
                replaced._is_held = lambda: True


class Outage(Memory):
    """A registry that does not answer, some of the time."""

    answers = True
    asked = 0

    def register(self, role: str, index: int, address: str, *, replace: bool = True) -> bool:
        self.asked += 1
        if not self.answers:
            raise ServerLost("registry")
        return super().register(role, index, address, replace=replace)


def test_a_server_that_stands_by_outlasts_an_outage_of_the_registry(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shoal.ps.membership._AGAIN_S", 0.01)
    space = Space()
    first, session, _ = lease(space, 1)
    assert first.take(None, refuse) == 0
    registry, waits, got = Outage(space), threading.Event(), []
    second = IndexLease(registry, 1, threading.Event())
    thread = threading.Thread(target=lambda: got.append(second.take(None, waits.set)), daemon=True)
    thread.start()
    assert waits.wait(60)
    registry.answers, before = False, registry.asked
    until(lambda: registry.asked > before + 2)
    session.close()
    registry.answers = True
    thread.join(60)
    assert got == [0]
    registry.answers = False
    with pytest.raises(ServerLost):  # one that only starts
        IndexLease(registry, 1, threading.Event()).take(None, refuse)
