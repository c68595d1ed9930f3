"""Whatever comes to a server's port: it answers, refuses without a change, and lives on."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import zmq

from shoal.comm.transport import Client, Secret
from shoal.errors import ServerLost, ShoalError
from shoal.ps.connections import Servers
from shoal.ps.server import TableServer
from support.hostile_requests import SPECS, Fuzzer, ServerProcess, corpus, send_bytes
from support.shares import share_of


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess() as made:
        yield made
    assert made.process.exitcode == 0


@pytest.mark.slow
def test_inputs_that_were_kept(server: ServerProcess) -> None:
    fuzzer = Fuzzer(server, 0)
    for one in corpus():
        if "raw" in one:
            fuzzer.send_raw(bytes.fromhex(one["raw"]))
        else:
            fuzzer.send([bytes.fromhex(part) for part in one["parts"]])
    fuzzer.check()
    fuzzer.close()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_spoiled_requests(server: ServerProcess, seed: int) -> None:
    fuzzer = Fuzzer(server, seed)
    fuzzer.run(300)
    assert min(fuzzer.outcomes[kind] for kind in ("answered", "refused", "dropped", "raw")) > 10
    fuzzer.close()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10, 14))
def test_many_spoiled_requests_take_no_memory(server: ServerProcess, seed: int) -> None:
    fuzzer = Fuzzer(server, seed)
    fuzzer.run(share_of(1000, 20))
    before, _ = server.memory_and_threads()
    for _ in range(8):
        fuzzer.run(share_of(1000, 20))
        fuzzer.check_memory(before)
    fuzzer.close()


def test_bytes_at_the_port_of_an_encrypted_server() -> None:
    secret = Secret("a token of the fuzzer")
    server = TableServer(SPECS, index=0, of=1).serve("tcp://127.0.0.1:0", secret=secret)
    for one in corpus():
        if "raw" in one:
            send_bytes(server.address, bytes.fromhex(one["raw"]))
    servers = Servers([server.address], SPECS, secret=secret)
    assert servers.seed == 0
    servers.close()
    server.stop()


REPLIES = {
    "no status": [],
    "no head": [b"\0"],
    "an error that is no JSON": [b"\1", b"{"],
    "an error of three parts": [b"\1", b'["a", "b", "c"]'],
    "an error that is a number": [b"\1", b"7"],
    "an error of a name that is no class": [b"\1", b'["describe", "x"]'],
}


@pytest.mark.parametrize("reply", REPLIES.values(), ids=REPLIES.keys())
def test_a_client_survives_replies_that_no_server_writes(reply: list[bytes]) -> None:
    context = zmq.Context()
    fake = context.socket(zmq.ROUTER)
    port = fake.bind_to_random_port("tcp://127.0.0.1")

    def answer() -> None:
        head = b""
        while head != b"last":
            who, number, head = fake.recv_multipart()
            said = [b"\0", b"fine"] if head == b"last" else reply
            fake.send_multipart([who, number, *said])

    thread = threading.Thread(target=answer)
    thread.start()
    client = Client([f"tcp://127.0.0.1:{port}"])
    with pytest.raises(ServerLost if len(reply) < 2 else ShoalError):
        client.call(0, b"first", timeout_s=0.5).result()
    assert client.call(0, b"last", timeout_s=60).result() == (b"fine", [])
    client.close()
    thread.join()
    context.destroy(linger=0)
