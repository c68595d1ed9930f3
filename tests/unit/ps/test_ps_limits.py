"""What a server and a client refuse before they take memory, and what a server tells of itself."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from shoal import Segment, TableSpec
from shoal import config as settings
from shoal.cli import app
from shoal.comm import transport
from shoal.comm.transport import Client, Frames, Secret, Server
from shoal.config.build import build_parts, build_tables, open_data, source_inputs
from shoal.errors import ConfigError, InputError, ServerLost, ShoalError
from shoal.ps.client import RowsOverServers, ServerTicket, connect
from shoal.ps.connections import Patience, health_of
from shoal.ps.saving import ServerSaver
from shoal.ps.server import TableServer
from shoal.rules.initializers import Zeros
from shoal.table.shard import GradRecord, IdGroups, StepContext
from support.hostile_requests import GREETING, READY, frame
from support.ranks import free_port
from support.small_runs import small_run

KIB = 1 << 10
SPECS = (TableSpec(name="t", segments=(Segment(dim=64, initializer=Zeros()),)),)


@pytest.fixture
def served() -> Iterator[tuple[TableServer, Server]]:
    rows = TableServer(SPECS, index=0, of=1, most_bytes=64 * KIB)
    server = rows.serve("tcp://127.0.0.1:0")
    yield rows, server
    server.stop()


def groups(count: int) -> IdGroups:
    return IdGroups(
        torch.arange(count), torch.tensor([0, count]), torch.zeros(1, dtype=torch.int32)
    )


def free_address() -> str:
    """For servers that come back: nobody gets its port while none listens there."""
    return f"tcp://127.0.0.1:{free_port()}"


def rows_of(server: Server, **options: int) -> RowsOverServers:
    rows: RowsOverServers = connect([server.address], SPECS, **options).shard
    return rows


@contextlib.contextmanager
def connection(server: Server, sent: bytes, *, greets: bool = True) -> Iterator[socket.socket]:
    """Of TCP, below ZeroMQ, that has sent some bytes, after its greeting if it greets."""
    host, port = server.address.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as raw:
        if greets:
            raw.sendall(GREETING + READY)
            said = b""
            while READY[2:8] not in said:
                said += raw.recv(4096)
        with contextlib.suppress(ConnectionError):
            raw.sendall(sent)
        yield raw


def is_closed(raw: socket.socket, more: bytes = b"", within_s: int = 60) -> bool:
    """Whether the server closes a connection, which sends more every second: it is alive."""
    raw.settimeout(1)
    for _ in range(within_s):
        try:
            raw.sendall(more)
            while raw.recv(4096):
                pass
        except TimeoutError:
            continue
        except ConnectionError:
            pass
        return True
    return False


def test_a_reply_that_is_too_large_is_refused_before_its_rows_are_read(
    served: tuple[TableServer, Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    table, server = served
    rows = rows_of(server)
    assert rows.find(groups(256)).weights[0].shape == (256, 64)  # 64 KiB
    with monkeypatch.context() as patched:
        for method in ("find", "find_or_init", "export"):
            patched.setattr(table.shard, method, None)
        with pytest.raises(InputError, match=r"rows of a reply to find.*65792 bytes.*most_mib"):
            rows.find(groups(257))
    rows.assign(groups(200), [torch.ones(200, 64)], ctx=StepContext())
    rows.assign(groups(255), [torch.ones(255, 64)], ctx=StepContext())
    with pytest.raises(InputError, match="rows of a reply to export"):
        rows.export(0)
    rows.servers.close()


def test_a_request_that_is_too_large_is_not_sent(served: tuple[TableServer, Server]) -> None:
    table, server = served
    rows = rows_of(server, most_bytes=64 * KIB)
    with pytest.raises(InputError, match=r"request to a parameter server.*65792 bytes"):
        rows.assign(groups(257), [torch.ones(257, 64)], ctx=StepContext())
    assert table.shard.size(0) == 0
    assert rows.servers.count_lost() == 0
    rows.servers.close()


def test_a_frame_that_is_too_large_is_never_read(served: tuple[TableServer, Server]) -> None:
    """The connection is closed at the frame's head: nothing is allocated for it."""
    _, server = served
    client = Client([server.address])
    with pytest.raises(ServerLost):
        client.call(0, b"{}", [bytes(65 * KIB)], timeout_s=0.5).result()
    client.close()
    with connection(server, frame(bytes(300), size=1 << 40)) as raw:
        assert is_closed(raw)
    rows = rows_of(server)
    assert rows.size(0) == 0
    rows.servers.close()


LIMIT = 9 * 64 * KIB  # of the bytes of a connection that nobody has read


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="TCP counts bytes on Linux")
@pytest.mark.parametrize("size", [0, 60 * KIB])
def test_a_message_that_never_ends_is_cut_off(
    size: int, served: tuple[TableServer, Server]
) -> None:
    """ZeroMQ would collect its frames, each of an allowed size, until the memory is full."""
    _, server = served
    rows = rows_of(server)
    piece = frame(bytes(size), more=True)
    endless = piece * (LIMIT // len(piece) + 1)
    with connection(server, endless) as raw:
        assert is_closed(raw, piece)
        assert rows.size(0) == 0
    rows.servers.close()


def test_a_large_message_of_allowed_frames_is_read(served: tuple[TableServer, Server]) -> None:
    """Again and again: what was read is no longer counted."""
    _, server = served
    message = [bytes(8), b'{"method":"hello"}', *[bytes(60 * KIB)] * 8]
    sent = b"".join(frame(one, more=n + 1 < len(message)) for n, one in enumerate(message))
    with connection(server, b"") as raw:
        replies = b""
        for asked in range(1, 7):
            raw.sendall(sent)
            while replies.count(b'"index"') < asked:
                found = raw.recv(4096)
                assert found
                replies += found
            time.sleep(0.05)  # a check falls between two of them


def test_connections_are_limited_together() -> None:
    """Each is below its own limit; the one with the most is closed, and the others are not."""
    server = Server("tcp://127.0.0.1:0", lambda *_: (b"", []), most_bytes=64 * KIB, waiting=4)
    piece = frame(bytes(60 * KIB), more=True)
    with (
        connection(server, piece) as small,
        connection(server, 4 * piece) as large,
    ):
        assert is_closed(large, frame(b"", more=True))
        assert not is_closed(small, frame(b"", more=True), within_s=1)
    server.stop()


CURVE = GREETING.replace(b"NULL\0", b"CURVE")


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(GREETING + READY, id="no encryption"),
        pytest.param(GREETING[:10] + b"\1\5" + frame(b"") * 20, id="a protocol without tokens"),
        pytest.param(CURVE + frame(bytes(60 * KIB), more=True) * 20, id="frames of a message"),
        pytest.param(CURVE + frame(bytes(60 * KIB), flags=4) * 20, id="a greeting without sense"),
        pytest.param(CURVE + frame(b"", flags=4, size=1 << 40), id="a greeting without end"),
    ],
)
def test_who_does_not_know_the_token_has_one_frame(sent: bytes) -> None:
    """The first frame that is no part of the greeting ends the connection."""
    secret = Secret("a token that both sides know")
    rows = TableServer(SPECS, index=0, of=1, most_bytes=64 * KIB)
    server = rows.serve("tcp://127.0.0.1:0", secret=secret)
    with connection(server, sent, greets=False) as raw:
        assert is_closed(raw)
    worker = connect([server.address], SPECS, secret=secret).shard
    assert worker.size(0) == 0
    worker.servers.close()
    server.stop()


TOKENS = {
    "another": (Secret("a token of the servers"), Secret("a token of nobody else")),
    "none of the worker": (Secret("a token of the servers"), None),
    "none of the server": (None, Secret("a token of the workers")),
}


@pytest.mark.slow
@pytest.mark.parametrize("unix", [False, True], ids=["tcp", "unix"])
@pytest.mark.parametrize(("theirs", "own"), TOKENS.values(), ids=TOKENS)
def test_a_worker_with_the_wrong_token_ends(
    theirs: Secret | None, own: Secret | None, unix: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not unix:
        monkeypatch.setattr(transport, "_local", lambda address: None)
    rows = TableServer(SPECS, index=0, of=1)
    server = rows.serve("tcp://127.0.0.1:0", secret=theirs)
    repeats = 3 if unix else 0
    for reply_s in (2, 20, 60):  # until greetings have failed, on a busy machine
        with pytest.raises(ServerLost) as lost:
            connect([server.address], SPECS, secret=own, patience=Patience(reply_s, repeats, 0.1))
        if "greetings failed" in str(lost.value):
            break
    assert re.search(r"greetings failed.*another token(.|\n)*one token file", str(lost.value))
    assert health_of([server.address], secret=own, timeout_s=0.5) == [None]
    worker = connect([server.address], SPECS, secret=theirs).shard  # as if nothing had been
    worker.servers.close()
    server.stop()


@pytest.mark.slow
def test_a_server_with_a_token_is_told_though_it_never_hangs_up() -> None:
    """Its greeting says that it wants one; a worker without one does not greet it again."""
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + b"\1" + bytes(31)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = Client([f"tcp://127.0.0.1:{listener.getsockname()[1]}"])
        listener.settimeout(60)
        theirs, _ = listener.accept()
        with theirs:
            theirs.sendall(greeting)
            waiting, ends = client.call(0, b"", timeout_s=600), time.monotonic() + 60
            while not client._failed_greetings[0]:
                assert time.monotonic() < ends
                client.wait([waiting], 0.05)
            with pytest.raises(ServerLost, match=r"greetings failed.*another token"):
                client.call(0, b"", timeout_s=0.1).result()
        client.close()


@pytest.mark.parametrize("text", ["", "fifteen letters", "  \n fifteen letters \n "])
def test_a_token_that_can_be_guessed_is_refused(text: str, tmp_path: Path) -> None:
    """Its key is a hash: who records a greeting can try out tokens at leisure."""
    file = tmp_path / "token"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"token: \d+ characters.*16(.|\n)*openssl rand"):
        Secret.of_file(str(file))
    with pytest.raises(ConfigError, match="characters"):
        Secret(text.strip())
    assert Secret.of_file(None) is None
    file.write_text("sixteen letters!\n")
    assert Secret.of_file(str(file)) == Secret("sixteen letters!")


def test_a_reply_that_is_too_large_for_the_client_is_never_read() -> None:
    large = [memoryview(bytes(65 * KIB))]
    server = Server("tcp://127.0.0.1:0", lambda head, frames: (b"", large if head else []))
    client = Client([server.address], most_bytes=64 * KIB)
    assert client.call(0, b"", timeout_s=30).result() == (b"", [])
    with pytest.raises(ServerLost):
        client.call(0, b"large", timeout_s=0.5).result()
    client.close()
    server.stop()


@pytest.mark.slow
def test_the_health_of_servers(served: tuple[TableServer, Server], tmp_path: Path) -> None:
    table, server = served
    gone = f"127.0.0.1:{free_port()}"
    with ServerSaver(table, tmp_path, every_s=3600) as saver:
        rows = rows_of(server)
        rows.assign(groups(9), [torch.ones(9, 64)], ctx=StepContext())
        saver.save()
        found = None
        while found is None:  # one that is late on a busy machine counts as lost
            lost, found = health_of([gone, server.address], timeout_s=2)
            assert lost is None
        assert found.pop("saved") == table.saved
        assert found == {
            "state": "serving",
            "server": 0,
            "of": 1,
            "rows": {"t": 9},
            "queue": 0,
            "updates": 1,
            "workers": 1,
            "lost": 0,
        }
        rows.servers.close()
    printed = CliRunner().invoke(app, ["ps", "--status", server.address])
    assert printed.exit_code == 0
    assert json.loads(printed.output)["rows"] == {"t": 9}
    printed = CliRunner().invoke(app, ["ps", "--status", server.address, gone])
    assert printed.exit_code == 1
    assert "no answer" in printed.output


def test_updates_that_a_server_lost_are_counted_at_the_end() -> None:
    """No further update has to come for that: it may have been the worker's last."""
    table = TableServer(SPECS, index=0, of=1)
    server = table.serve(free_address())
    rows = connect([server.address], SPECS, worker="w", patience=Patience(reply_s=30)).shard
    for _ in range(3):
        rows.assign_add(groups(2), [torch.ones(2, 64)], ctx=StepContext())
    with table.between_updates() as state:
        saved = state
    for _ in range(2):
        rows.assign_add(groups(2), [torch.ones(2, 64)], ctx=StepContext())
    assert rows.servers.count_lost() == 0
    server.stop()
    restarted = TableServer(SPECS, index=0, of=1)
    restarted.resume(saved)
    server = restarted.serve(server.address)
    assert rows.servers.count_lost() == 2
    rows.servers.close()
    assert rows.servers.staleness.lost == 2
    (health,) = health_of([server.address], timeout_s=60)
    assert health is not None
    assert health["lost"] == 2
    server.stop()


def test_an_update_brings_the_count_of_those_that_were_lost() -> None:
    """What a run logs as `servers/lost`: nobody asks for it before the end."""
    table = TableServer(SPECS, index=0, of=1)
    server = table.serve(free_address())
    rows: RowsOverServers = connect([server.address], SPECS, worker="w").shard
    yes = torch.ones(2, dtype=torch.bool)
    found = ServerTicket(groups(2), torch.ones(2, dtype=torch.int64), yes, yes, 0, (), (0,))
    with table.between_updates() as state:
        saved = state
    for _ in range(2):
        rows.assign_add(groups(2), [torch.ones(2, 64)], ctx=StepContext())
    server.stop()
    restarted = TableServer(SPECS, index=0, of=1)
    restarted.resume(saved)
    server = restarted.serve(server.address)
    record = GradRecord(found, (torch.ones(2, 64),))
    rows.apply_summed(rows.sum_grads([record]), [record], ctx=StepContext())
    assert rows.servers.staleness.scalars()["servers/lost"] == 2
    rows.servers.close()
    server.stop()


def test_lost_updates_are_counted_at_the_end_though_an_update_failed() -> None:
    server = TableServer(SPECS, index=0, of=1).serve("tcp://127.0.0.1:0")
    rows: RowsOverServers = connect([server.address], SPECS, stale_updates=1).shard
    counted: list[bool] = []
    rows.servers._count_lost = lambda _: len(counted.append(True) or counted)  # type: ignore[func-returns-value,method-assign]

    def fail() -> None:
        raise ServerLost("an update")

    rows.servers._sender.send(fail)
    with pytest.raises(ServerLost, match="an update"):
        rows.servers.close()
    assert counted == [True]
    server.stop()


def test_closing_does_not_wait_for_an_update_that_another_thread_repeats() -> None:
    server = TableServer(SPECS, index=0, of=1).serve("tcp://127.0.0.1:0")
    rows = connect([server.address], SPECS, patience=Patience(reply_s=600)).shard
    server.stop()
    errors: list[BaseException] = []

    def update() -> None:
        try:
            rows.assign_add(groups(2), [torch.ones(2, 64)], ctx=StepContext())
        except ShoalError as error:
            errors.append(error)

    thread = threading.Thread(target=update, daemon=True)
    thread.start()
    time.sleep(0.2)
    rows.servers.close()
    thread.join(60)
    assert not thread.is_alive()
    assert len(errors) == 1


def test_a_worker_that_never_updated_is_not_remembered(served: tuple[TableServer, Server]) -> None:
    _, server = served
    rows = rows_of(server)
    rows.find(groups(3))
    rows.servers.close()
    (health,) = health_of([server.address], timeout_s=60)
    assert health is not None
    assert health["workers"] == 0


@pytest.mark.parametrize(
    "overrides",
    [{}, {"features": {"f1": {"table": "shared"}, "f0": {"table": "shared"}}}],
    ids=["those of the data", "named"],
)
def test_tables_are_known_without_the_data(overrides: dict[str, Any], tmp_path: Path) -> None:
    path = small_run(tmp_path, examples=200, eval_examples=100, **overrides)
    run = settings.load(path, environment={})
    found, read = source_inputs(run.data.source), open_data(run).evaluation.source
    assert (found.features, found.num_dense) == (read.features, read.num_dense)
    assert build_tables(run) == build_parts(run).tables


class Slow:
    """A server whose replies wait until they are let through."""

    def __init__(self, address: str = "tcp://127.0.0.1:0") -> None:
        self.open = threading.Event()
        self.server = Server(address, self._handle, threads=8)

    def _handle(self, head: bytes, frames: Frames) -> tuple[bytes, list[memoryview]]:
        if head == b"slow":
            assert self.open.wait(60)
        return head, []


def test_threads_take_turns_at_one_client() -> None:
    """A thread that has its reply leaves; another one goes on with what it waits for."""
    slow = Slow()
    client = Client([slow.server.address])
    late = client.call(0, b"slow", timeout_s=60)
    found: list[bytes] = []

    def ask(head: bytes) -> None:
        found.extend(client.call(0, head, timeout_s=60).result()[0] for _ in range(50))

    waiter = threading.Thread(target=lambda: found.append(late.result()[0]))
    waiter.start()
    threads = [threading.Thread(target=ask, args=(b"%d" % k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert sorted(set(found)) == [b"0", b"1", b"2", b"3"]
    slow.open.set()
    waiter.join(60)
    assert found[-1] == b"slow"
    client.close()
    slow.server.stop()


def test_a_client_that_is_closed_wakes_who_waits() -> None:
    slow = Slow()
    client = Client([slow.server.address])
    calls = [client.call(0, b"slow", timeout_s=60) for _ in range(3)]
    errors: list[BaseException | None] = []
    threads = [threading.Thread(target=lambda c=c: errors.append(c.exception())) for c in calls]  # type: ignore[misc]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    client.close()
    for thread in threads:
        thread.join(60)
    assert [type(error) for error in errors] == [ServerLost] * 3
    slow.open.set()
    slow.server.stop()


def test_a_wait_may_be_shorter_than_a_call() -> None:
    slow = Slow()
    client = Client([slow.server.address])
    call = client.call(0, b"slow", timeout_s=60)
    with pytest.raises(futures.TimeoutError):  # under Python 3.10 not the builtin one
        call.result(0.05)
    slow.open.set()
    assert call.result(60) == (b"slow", [])
    client.close()
    slow.server.stop()


def test_loopback_goes_by_a_unix_socket_of_the_same_user() -> None:
    slow = Slow()
    port = slow.server.address.rpartition(":")[2]
    assert transport._nearest(slow.server.address) == f"ipc://@shoal-tcp-{port}"
    assert transport._nearest(f"tcp://127.0.0.1:{free_port()}").startswith("tcp://")
    assert transport._nearest("tcp://192.0.2.1:80") == "tcp://192.0.2.1:80"
    slow.server.stop()


def test_a_server_that_comes_back_without_its_unix_socket_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow = Slow(free_address())
    client = Client([slow.server.address])
    assert client.call(0, b"a", timeout_s=60).result()[0] == b"a"
    slow.server.stop()
    with monkeypatch.context() as patched:
        patched.setattr(transport, "_local", lambda address: None)
        again = Server(slow.server.address, lambda head, frames: (head, []))
    with socket.socket(socket.AF_UNIX) as probe, pytest.raises(ConnectionRefusedError):
        probe.connect(f"\0{transport._local(again.address)}")
    for _ in range(20):  # the first may still go to the one that has left
        with contextlib.suppress(ServerLost):
            if client.call(0, b"b", timeout_s=3).result()[0] == b"b":
                break
    else:
        pytest.fail("the server was not found again")
    client.close()
    again.stop()


@pytest.mark.parametrize("unix", [False, True], ids=["tcp", "unix"])
def test_an_update_that_was_given_up_is_not_applied_with_other_values(
    unix: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ZeroMQ queues the caller's own memory, which is the caller's again when the call fails."""
    if not unix:
        monkeypatch.setattr(transport, "_local", lambda address: None)
    specs = (TableSpec(name="t", segments=(Segment(dim=4, initializer=Zeros()),)),)
    address = free_address()
    server = TableServer(specs, index=0, of=1).serve(address)
    rows: RowsOverServers = connect([address], specs).shard
    rows.servers._patience = Patience(reply_s=0.5, repeats=0)
    server.stop()
    added = torch.ones(20_000, 4)
    with pytest.raises(ServerLost):
        rows.assign_add(groups(20_000), [added], ctx=StepContext())
    added.fill_(5.0)
    server = TableServer(specs, index=0, of=1).serve(address)
    other = connect([address], specs).shard
    for _ in range(50):
        with contextlib.suppress(ServerLost):
            rows.find(groups(1))
            break
    assert set(other.find(groups(20_000)).weights[0].unique().tolist()) <= {0.0, 1.0}
    other.servers.close()
    rows.servers.close()
    server.stop()


def test_a_server_that_moved_wakes_who_waits_for_it() -> None:
    slow, other = Slow(), Slow()
    client = Client([slow.server.address])
    calls = [client.call(0, b"slow", timeout_s=600) for _ in range(2)]
    threads = [threading.Thread(target=call.exception, daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    client.move(0, other.server.address)
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    client.close()
    for one in (slow, other):
        one.open.set()
        one.server.stop()


@pytest.mark.parametrize(
    ("option", "value", "told"),
    [
        ("--save-every-s", "0", "got 0.0; allowed: above 0"),
        ("--save-every-s", "-1", "got -1.0; allowed: above 0"),
        ("--save-every-s", "nan", "got nan; allowed: above 0"),
        ("--save-every-s", "inf", "got inf; allowed: above 0"),
        ("--threads", "0", "got 0; allowed: 1 or more"),
        ("--of", "0", "got 0; allowed: 1..4096"),
    ],
)
def test_a_server_that_could_not_work_does_not_start(
    option: str, value: str, told: str, tmp_path: Path
) -> None:
    file = small_run(tmp_path, examples=100)
    command = ["ps", str(file), "--store", str(tmp_path / "store"), option, value]
    found = CliRunner().invoke(app, command)
    assert found.exit_code and told in " ".join(found.output.split()), found.output
