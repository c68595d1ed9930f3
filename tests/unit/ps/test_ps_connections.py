"""Workers that come and go, or vanish: a server keeps neither memory nor threads for them."""

from __future__ import annotations

import os
import socket
import threading
import time
from typing import Any

import pytest
import torch

from shoal.comm.transport import Client, Server
from shoal.errors import ConfigError, ServerLost
from shoal.ps.client import RowsOverServers
from shoal.ps.connections import Servers
from shoal.table.shard import IdGroups, StepContext
from support.hostile_requests import SPECS, ServerProcess
from support.ranks import free_port

WORKERS = 100
SPARE_BYTES = 16 << 20


def work(address: str) -> None:
    """Connect, look up and update the same rows as everybody, and leave."""
    servers = Servers([address], SPECS)
    rows = RowsOverServers(servers)
    ids_N = torch.arange(500)
    groups = IdGroups(ids_N, torch.tensor([0, 500]), torch.zeros(1, dtype=torch.int32))
    rows.find(groups)
    rows.apply_ids(groups, (torch.ones(500, 3),), ctx=StepContext())
    servers.close()


def vanish(address: str) -> None:
    """Connect, and leave in the middle of the greeting."""
    host, port = address.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(b"\xff" + bytes(8))


@pytest.mark.slow
def test_workers_that_come_and_go() -> None:
    with ServerProcess() as server:
        for _ in range(20):
            work(server.address)
        bytes_before, threads_before = server.memory_and_threads()
        own_threads, own_files = threading.active_count(), len(os.listdir("/proc/self/fd"))
        for _ in range(WORKERS):
            work(server.address)
            vanish(server.address)
        bytes_after, threads_after = server.memory_and_threads()
        assert threads_after <= threads_before
        assert bytes_after <= bytes_before + SPARE_BYTES
        assert threading.active_count() <= own_threads
        assert len(os.listdir("/proc/self/fd")) <= own_files + 2
        ends = time.monotonic() + 60  # the server's sockets close behind its replies
        while len(os.listdir(f"/proc/{server.process.pid}/fd")) >= 60:
            assert time.monotonic() < ends
            time.sleep(0.05)


def test_a_client_closes_though_a_waiter_was_quicker() -> None:
    client = Client([f"tcp://127.0.0.1:{free_port()}"])
    bell = client._bell

    class LateBell:
        """Rings once the waiter has noticed by itself that the client is closed."""

        def send(self, *arguments: Any) -> None:
            ends = time.monotonic() + 30
            while client._closed and not client._ended and time.monotonic() < ends:
                time.sleep(0.01)
            time.sleep(0.3)  # ZeroMQ learns of the end that was closed
            bell.send(*arguments)

        def close(self, linger: int) -> None:
            bell.close(linger=linger)

    client._bell = LateBell()
    reply = client.call(0, b"", timeout_s=0.5)
    waiter = threading.Thread(target=lambda: client.wait([reply]), daemon=True)
    waiter.start()
    while waiter.is_alive() and not client._turn.locked():
        time.sleep(0.001)
    closer = threading.Thread(target=client.close, daemon=True)
    closer.start()
    closer.join(60)
    assert not closer.is_alive()
    with pytest.raises(ServerLost):
        reply.result()


@pytest.mark.parametrize("port", [65536, 99999])
def test_a_port_that_no_machine_has(port: int) -> None:
    address = f"tcp://127.0.0.1:{port}"
    with pytest.raises(ConfigError, match=f"address of a server: got {address}"):
        Server(address, lambda *_: [], most_bytes=1 << 20)
    with pytest.raises(ConfigError, match=f"address of a server: got {address}"):
        Client([address])
