"""Registration next to a server that starts, whatever ZooKeeper does."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from shoal.errors import ConfigError, ServerLost
from shoal.serve.registration import (
    BackgroundRegistration,
    ReplicaMeta,
    ServedPart,
    ServerState,
    ServingRegistration,
    from_json,
    register_server,
)

PART = ServedPart(bzid="b", model="m")


class Recorded:
    """Nodes that remember what they hold."""

    def __init__(self) -> None:
        self.states: list[int] = []
        self.closed = False
        self.loading = threading.Event()

    def hold(self, path: str, data: bytes) -> None:
        meta = from_json(ReplicaMeta, data)
        assert meta is not None
        self.states.append(meta.stat)
        if meta.stat == ServerState.LOADING:
            self.loading.set()

    def close(self) -> None:
        self.closed = True


def test_a_server_registers_once_zookeeper_answers() -> None:
    nodes: Any = Recorded()
    tries, done = [], threading.Event()

    def register() -> ServingRegistration:
        tries.append(1)
        if len(tries) == 1:
            raise ServerLost("ZooKeeper", "no answer", "one", "Start it.")
        return ServingRegistration(nodes, PART, "h:1")

    with BackgroundRegistration(register, lambda: False, done):
        assert nodes.loading.wait(60)
    assert nodes.states == [ServerState.UNKNOWN, ServerState.LOADING, ServerState.UNLOADING]
    assert (len(tries), nodes.closed) == (2, True)


def test_another_discovery_ends_the_server() -> None:
    done = threading.Event()
    registered = BackgroundRegistration(
        lambda: register_server("consul://h:1", PART, "h:1"), lambda: True, done
    )
    with pytest.raises(ConfigError, match="zookeeper"), registered:
        assert done.wait(60)


@pytest.mark.parametrize("data", [b'{"stat": "30"}', b'{"address": 7}', b"[]", b"{", None])
def test_values_of_other_types_are_no_replica(data: bytes | None) -> None:
    assert from_json(ReplicaMeta, data) is None


def test_unknown_keys_are_passed_over() -> None:
    assert from_json(ReplicaMeta, b'{"stat": 30, "more": 1}') == ReplicaMeta(stat=30)
