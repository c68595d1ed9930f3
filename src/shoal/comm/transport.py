"""Requests with large payloads between processes: a server's threads, a client's calls.

Carried by ZeroMQ (decision 0020): it frames, reconnects, bounds queues and encrypts. A request is
a head (small bytes) and frames of raw memory; so is a reply, or it is an error of Shoal's tree.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import json
import logging
import math
import os
import queue
import socket as sockets
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal import errors
from shoal.comm.launch_environment import PORTS
from shoal.comm.unread import UnreadLimit
from shoal.errors import ConfigError, ServerLost, ShoalError

if TYPE_CHECKING:
    import zmq
else:
    try:
        import zmq
    except ImportError:  # told to those who call or serve
        zmq = None

Frames = list[memoryview]
Handler = Callable[[bytes, Frames], tuple[bytes, Sequence[Any]]]
"""(head, frames) of a request -> those of its reply; called by several threads at once."""

_LOG = logging.getLogger(__name__)

_DONE, _FAILED = b"\0", b"\1"
_NUMBER = 8  # bytes of a request's number
_LINGER_MS = 1000
MOST_BYTES = 1 << 31  # of a frame, unless told
_MOST_HEAD = 1 << 20  # bytes
_MOST_FRAMES = 16
_LEAST_TOKEN = 16  # characters
_MESSAGES = 8  # of one client, that wait in a socket; requests to one server under way at once
_FULL_MS = 50  # how often a socket is tried that takes no more
_QUIET_MS = 200  # how often a thread looks whether it should end
_BEAT_MS = 5000  # how often a connection is tried
_STRANGER = "greetings failed: it stopped, or has another token than this process, or one has none"
_GREETINGS = 2  # that failed one after the other: a server that stops fails one
_DEAD_MS = 20_000  # without a sign of life it is closed, and made again; more than a frame takes


def _check_package() -> None:
    if zmq is None:
        raise errors.no_package("connection to a server", "zmq", "ps", "pyzmq 25 or later")


def _watch(socket: zmq.Socket[bytes], address: str) -> None:
    """Notice connections that are dead though nobody closed them: a router forgot them, say."""
    socket.ipv6 = "[" in address  # else names like localhost may mean an address nobody listens at
    socket.heartbeat_ivl = _BEAT_MS
    socket.heartbeat_timeout = socket.handshake_ivl = socket.connect_timeout = _DEAD_MS


def _local(address: str) -> str | None:
    """The name of the Unix socket of who listens at a loopback port, without leading zero."""
    if not address.startswith(("tcp://127.0.0.1:", "tcp://localhost:")):
        return None
    return f"shoal-tcp-{address.rpartition(':')[2]}"


def _nearest(address: str) -> str:
    """The server's Unix socket instead of its loopback port, if the same user listens there.

    It moves the same bytes in two thirds of the time.
    """
    name = _local(address)
    if name is None or not hasattr(sockets, "SO_PEERCRED"):
        return address
    with sockets.socket(sockets.AF_UNIX) as probe, contextlib.suppress(OSError):
        probe.settimeout(1.0)
        probe.connect(f"\0{name}")
        found = probe.getsockopt(sockets.SOL_SOCKET, sockets.SO_PEERCRED, struct.calcsize("3i"))
        if struct.unpack("3i", found)[1] == os.getuid():
            return f"ipc://@{name}"
    return address


@dataclass(frozen=True, slots=True)
class Secret:
    """A token that server and clients share: it encrypts and authenticates (CurveZMQ).

    The server's key pair is made from it, so only who knows the token can connect, and only to a
    server that knows it.

    Raises:
        ConfigError: a token of fewer than 16 characters.
    """

    token: str = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.token) < _LEAST_TOKEN:
            raise _refused_token("token", f"{len(self.token)} characters")

    @classmethod
    def of_file(cls, path: str | None) -> Secret | None:
        """What a file holds, but for blanks around it; None of no file.

        Raises:
            ConfigError: the file cannot be read, or its text is too short.
        """
        if path is None:
            return None
        try:
            token = Path(path).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise _refused_token("file of a token", f"{path}: {error}") from None
        if len(token) < _LEAST_TOKEN:
            raise _refused_token("file of a token", f"{path}: {len(token)} characters")
        return cls(token)

    def _server_key(self) -> bytes:
        from zmq.utils import z85

        key: bytes = z85.encode(hashlib.sha256(b"shoal server " + self.token.encode()).digest())
        return key

    def guard(self, socket: zmq.Socket[bytes]) -> None:
        """Let only clients in that know it."""
        socket.curve_secretkey = self._server_key()
        socket.curve_server = True

    def join(self, socket: zmq.Socket[bytes]) -> None:
        """Connect only to servers that know it."""
        socket.curve_serverkey = zmq.curve_public(self._server_key())
        socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()


def _refused_token(what: str, got: str) -> ConfigError:
    return ConfigError(
        what,
        got=got,
        allowed=f"a random text of {_LEAST_TOKEN} characters or more",
        remedy="Make one with `openssl rand -hex 32`, in a file that only those who need it can "
        "read: who records messages can try short ones out.",
    )


def _check_port(address: str) -> None:
    """ZeroMQ takes a port modulo 65,536."""
    port = address.rpartition(":")[2]
    if port.isdecimal() and int(port) >= PORTS:
        raise zmq.ZMQError(errno.EINVAL)


class Server:
    """Answers requests of any number of clients, several at once, in the order they come.

    While `waiting` requests wait for a thread, no more are read: senders' queues fill and they
    wait. An error of a handler is its caller's; a malformed message is dropped.

    Args:
        address: "tcp://HOST:PORT"; port 0 takes a free one.
        handler: makes replies; frames are good until it returns.
        threads: handlers at work at once.
        most_bytes: of a frame; who sends more is disconnected before memory is taken. So is who
            brings more than nine times as much that nobody has read, and who brings most when
            all connections have brought more than `waiting` times as much.
        waiting: requests that may wait for a thread.
        secret: what clients must know; None: anybody may connect.

    Attributes:
        address: with the port that was taken.

    Raises:
        ConfigError: the address is taken or none of this machine, or pyzmq is missing.
    """

    def __init__(
        self,
        address: str,
        handler: Handler,
        *,
        threads: int = 4,
        most_bytes: int = MOST_BYTES,
        waiting: int = 64,
        secret: Secret | None = None,
    ) -> None:
        _check_package()
        self._context: Any = zmq.Context()
        self._handler = handler
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.maxmsgsize = most_bytes
        self._socket.rcvhwm = _MESSAGES
        self._socket.sndhwm = 2 * _MESSAGES  # replies above are dropped; some were given up
        _watch(self._socket, address)
        self._unread = UnreadLimit(
            self._socket, each=(_MESSAGES + 1) * most_bytes, together=waiting * most_bytes
        )
        if secret is not None:
            secret.guard(self._socket)
        try:
            _check_port(address)
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(
                "address of a server",
                got=f"{address}: {error.strerror}",
                allowed="tcp://HOST:PORT of this machine with a port that is free, or port 0",
                remedy="Choose another, or stop who has it.",
            ) from None
        self.address: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        if secret is None and not self.address.startswith(("tcp://127.", "tcp://[::1]")):
            _LOG.warning(
                "%s has no token: whoever reaches it may use it. Give it a token file, or listen"
                " on 127.0.0.1",
                self.address,
            )
        if (name := _local(self.address)) is not None:
            try:
                self._socket.bind(f"ipc://@{name}")
            except zmq.ZMQError as error:  # not Linux, or another's: by TCP then
                if error.errno != zmq.EPROTONOSUPPORT:
                    _LOG.warning("no Unix socket @%s (%s): local clients use TCP", name, error)
        self._work: queue.Queue[list[Any] | None] = queue.Queue(waiting)
        self._replies = self._context.socket(zmq.PULL)
        self._replies.bind("inproc://replies")
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._serve, daemon=True) for _ in range(threads)]
        self._door = threading.Thread(target=self._turn, daemon=True)
        for thread in (*self._threads, self._door):
            thread.start()

    @property
    def waiting(self) -> int:
        """Requests that were read and wait for a thread."""
        return self._work.qsize()

    @property
    def stopping(self) -> bool:
        """Whether it reads no more requests."""
        return self._stopping.is_set()

    def stop(self) -> None:
        """Read no more requests, answer those that were read, and close. May be called twice."""
        if not self._stopping.is_set():
            self._stopping.set()
            self._door.join()
            self._context.term()

    def _turn(self) -> None:
        """Requests in, replies out: the one thread that has the socket."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._replies, zmq.POLLIN)
        open_requests, ending = 0, False
        while not ending or open_requests:
            full = ending or self._work.full()
            poller.modify(self._socket, 0 if full else zmq.POLLIN)
            ready = dict(poller.poll(_QUIET_MS))
            if self._replies in ready:
                reply = self._replies.recv_multipart(copy=False)
                open_requests -= 1
                with contextlib.suppress(zmq.ZMQError):  # the client is gone
                    self._socket.send_multipart(reply, copy=False)
            if self._socket in ready and not full:
                request = self._socket.recv_multipart(copy=False)
                self._unread.read(request)
                if _is_request(request):
                    self._work.put(request)
                    open_requests += 1
            self._unread.check()
            ending = self._stopping.is_set()
        for _ in self._threads:
            self._work.put(None)
        for thread in self._threads:
            thread.join()
        self._replies.close(linger=0)
        _close(self._socket, linger_ms=_LINGER_MS)

    def _serve(self) -> None:
        out = self._context.socket(zmq.PUSH)
        out.connect("inproc://replies")
        while (request := self._work.get()) is not None:
            who, number, head, *frames = request
            try:
                replied, data = self._handler(head.bytes, [frame.buffer for frame in frames])
                parts = [_DONE, replied, *data]
            except BaseException as error:  # noqa: BLE001 - the caller's
                parts = [_FAILED, _described(error)]
            out.send_multipart([who.bytes, number.bytes, *parts], copy=False)
            del request, frames
        out.close(linger=_LINGER_MS)


def _is_request(parts: list[Any]) -> bool:
    small = 3 <= len(parts) <= 3 + _MOST_FRAMES and len(parts[1]) == _NUMBER
    return small and len(parts[2]) <= _MOST_HEAD


class Reply(Future[tuple[bytes, Frames]]):
    """What a call is going to bring; who waits for it does the client's work meanwhile."""

    def __init__(self, client: Client) -> None:
        super().__init__()
        self.client = client

    def result(self, timeout: float | None = None) -> tuple[bytes, Frames]:
        """The reply, or the error of the call."""
        self.client.wait([self], timeout)
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """The error of the call, None if it has a reply."""
        self.client.wait([self], timeout)
        return super().exception(0)


def wait_for(
    futures: Sequence[Future[Any]], timeout_s: float | None = None, *, first: bool = False
) -> None:
    """Wait until all futures of one client are done, or one of them (`first`), or time is up."""
    replies = [one for one in futures if isinstance(one, Reply)]
    if replies:
        replies[0].client.wait(futures, timeout_s, first=first)
    else:
        wait(futures, timeout_s, FIRST_COMPLETED if first else ALL_COMPLETED)


@dataclass(slots=True)
class _Call:
    """A request under way."""

    server: int
    parts: list[Any]
    future: Reply
    deadline: float


class Client:
    """Calls to some servers; any thread may call. A server that comes back is connected again.

    A lost Unix socket, or a call without a reply in time, has the server connected from scratch:
    what still waited to be sent is dropped (frames are the caller's again), and other calls that
    were under way there may be lost too.

    It has no thread: of those that wait for replies, one sends and receives for all. Few requests
    to a server are under way at once; others wait here, until their deadlines.

    Args:
        addresses: "tcp://HOST:PORT" of each server.
        secret: what the servers were given.
        most_bytes: of a frame of a reply; a server that sends more is disconnected.

    Raises:
        ConfigError: an address that is none, or pyzmq is missing.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        secret: Secret | None = None,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        _check_package()
        self._context: Any = zmq.Context()
        self._secret, self._most_bytes = secret, most_bytes
        self._asked: deque[Callable[[], None]] = deque()  # done by who has the turn
        self._addresses = list(addresses)
        self._lock = threading.Lock()  # of the four below
        self._closed = False
        self._bell = self._context.socket(zmq.PUSH)
        self._turn = threading.Lock()  # of who has the sockets and calls
        self._left = threading.Condition()  # notified when calls are done, or the turn is free
        self._bell_end = self._context.socket(zmq.PULL)
        self._bell_end.bind("inproc://bell")
        self._bell.connect("inproc://bell")
        try:
            self._sockets = [self._connected(address) for address in addresses]
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        self._poller = zmq.Poller()
        self._poller.register(self._bell_end, zmq.POLLIN)
        for socket in self._sockets:
            self._watched(socket)
        self._failed_greetings = [0] * len(addresses)  # since the last that did not fail
        self._numbers = itertools.count()
        self._calls: dict[bytes, _Call] = {}  # under way
        self._held: list[deque[_Call]] = [deque() for _ in addresses]
        self._ended = False

    def _connected(self, address: str) -> Any:
        socket = self._context.socket(zmq.DEALER)
        socket.linger = 0
        socket.sndhwm = _MESSAGES
        socket.maxmsgsize = self._most_bytes
        _watch(socket, address)
        if self._secret is not None:
            self._secret.join(socket)
        nearest = _nearest(address)
        events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        events |= zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
        if nearest != address:
            # Its owner is checked before each connection, which ZeroMQ's own reconnecting is not.
            socket.reconnect_ivl = -1
            events |= zmq.EVENT_DISCONNECTED
        socket.get_monitor_socket(events)
        try:
            _check_port(address)
            socket.connect(nearest)
        except zmq.ZMQError as error:
            _close(socket)
            raise ConfigError(
                "address of a server",
                got=f"{address}: {error.strerror}",
                allowed="tcp://HOST:PORT",
                remedy="Give the address that the server prints.",
            ) from None
        return socket

    def _watched(self, socket: Any) -> None:
        for one in (socket, _monitor(socket)):
            self._poller.register(one, zmq.POLLIN)

    def _replace(self, server: int, socket: Any, got: str) -> None:
        """Use another connection; calls under way over the old one are lost."""
        old = self._sockets[server]
        for one in (old, _monitor(old)):
            self._poller.unregister(one)
        _close(old)
        self._sockets[server] = socket
        self._watched(socket)
        for number in [n for n, one in self._calls.items() if one.server == server]:
            self._fail(self._calls.pop(number), got)
        with self._left:
            self._left.notify_all()

    def _reconnect(self, server: int) -> None:
        try:
            socket = self._connected(self._addresses[server])
        except (ShoalError, OSError) as error:  # the old one stays
            _LOG.warning("server %d could not be connected again: %s", server, error)
        else:
            self._replace(server, socket, "a connection that was lost")

    def _reconnect_lost(self) -> None:
        """Servers whose Unix sockets were closed: these do not reconnect by themselves.

        And note which of them do not greet.
        """
        for server, socket in enumerate(self._sockets):
            monitor = _monitor(socket)
            while self._sockets[server] is socket and monitor.get(zmq.EVENTS) & zmq.POLLIN:
                event, _ = struct.unpack("=Hi", monitor.recv_multipart()[0])
                if event == zmq.EVENT_DISCONNECTED:
                    self._reconnect(server)
                elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    self._failed_greetings[server] = 0
                else:  # after one of the protocol no other is tried
                    final = event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
                    before = self._failed_greetings[server]
                    self._failed_greetings[server] += _GREETINGS if final else 1
                    if before < _GREETINGS <= self._failed_greetings[server]:
                        _LOG.warning("server %d: %s", server, _STRANGER)

    def call(
        self, server: int, head: bytes, frames: Sequence[Any] = (), *, timeout_s: float
    ) -> Reply:
        """Send a request; frames must stay as they are until the reply is there.

        The future's result is the reply; its exception the error that the server raised, or
        `ServerLost` when none came in time. It is done only while somebody waits for it.
        """
        call = _Call(server, [head, *frames], Reply(self), time.monotonic() + timeout_s)
        with self._lock:
            if self._closed:
                raise ConfigError(
                    f"call to server {server}",
                    got="a client that was closed",
                    allowed="an open one",
                    remedy="Connect again.",
                )
            self._asked.append(partial(self._held[server].append, call))
        self._start()
        return call.future

    def move(self, server: int, address: str) -> None:
        """Call a server at another address from now on; calls under way to it are lost.

        Raises:
            ConfigError: an address that is none; nothing changed.
        """
        with self._lock:
            if self._closed or address == self._addresses[server]:
                return
            socket = self._connected(address)
            self._asked.append(partial(self._replace, server, socket, "a server that moved"))
            self._addresses[server] = address
        self._start()

    def wait(
        self, futures: Sequence[Future[Any]], timeout_s: float | None = None, *, first: bool = False
    ) -> None:
        """Wait until all of the client's futures are done, or one (`first`), or time is up."""
        until_s = None if timeout_s is None else time.monotonic() + timeout_s

        def over() -> bool:
            done = [future.done() for future in futures]
            late = until_s is not None and until_s <= time.monotonic()
            return late or (any(done) if first else all(done))

        while not over():
            if self._turn.acquire(blocking=False):
                try:
                    while True:
                        full = not self._send()
                        if over() or self._ended:  # a server that moved fails its calls
                            break
                        self._receive(until_s, full=full)
                finally:
                    self._leave()
            else:
                left_s = None if until_s is None else until_s - time.monotonic()
                with self._left:
                    self._left.wait_for(lambda: over() or not self._turn.locked(), left_s)

    def close(self) -> None:
        """Give up what is under way. May be called twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._ring()
        with self._turn:
            self._end()
        self._bell.close(linger=0)
        with self._left:
            self._left.notify_all()
        self._context.term()

    def _start(self) -> None:
        """Send what is asked, here or where somebody waits."""
        if self._turn.acquire(blocking=False):
            try:
                self._send()
            finally:
                self._leave()
        else:
            with self._lock:
                if not self._closed:
                    self._ring()

    def _ring(self) -> None:
        """Wake who waits; holds the lock. The other end may be closed already, or rung before."""
        with contextlib.suppress(zmq.Again):
            self._bell.send(b"", zmq.DONTWAIT)

    def _leave(self) -> None:
        self._turn.release()
        with self._left:
            self._left.notify_all()

    def _receive(self, until_s: float | None, *, full: bool) -> None:
        """Wait for something to happen, and take what has come; `full`: not all could be sent."""
        times = [call.deadline for call in (*self._calls.values(), *itertools.chain(*self._held))]
        times += [time.monotonic() + _FULL_MS / 1e3] if full else []
        times += [] if until_s is None else [until_s]
        wait_ms = max(0, math.ceil(1e3 * (min(times) - time.monotonic()))) if times else None
        ready = dict(self._poller.poll(wait_ms))
        if self._bell_end in ready:
            with contextlib.suppress(zmq.Again):
                while True:
                    self._bell_end.recv(zmq.DONTWAIT)
        for socket in self._sockets:
            if socket in ready:
                _settle(self._calls, socket.recv_multipart(copy=False))
        self._reconnect_lost()
        self._give_up()
        if self._closed:
            self._end()
        with self._left:
            self._left.notify_all()

    def _give_up(self) -> None:
        """Fail calls whose deadlines have passed, when nothing of them can be sent any more."""
        now = time.monotonic()
        late = [n for n, call in self._calls.items() if call.deadline <= now]
        given_up = [self._calls.pop(number) for number in late]
        held = [call for call in itertools.chain(*self._held) if call.deadline <= now]
        for call in held:
            self._held[call.server].remove(call)
        waiting = {call.server for call in self._calls.values()}
        for server in {call.server for call in (*given_up, *held)}:
            shares = any(_is_shared(call) for call in given_up if call.server == server)
            if shares or server not in waiting:
                self._reconnect(server)
        for call in given_up:
            self._fail(call, "no reply in time")
        for call in held:
            self._fail(call, "a server that takes no more requests")

    def _send(self) -> bool:
        """What is asked, as far as it may be under way; False: a socket takes no more."""
        if self._ended:
            return True
        self._reconnect_lost()
        self._do_asked()
        pairs = zip(self._sockets, self._held, strict=True)
        return all([_sent(*pair, self._calls, self._numbers) for pair in pairs])

    def _do_asked(self) -> None:
        while self._asked:
            self._asked.popleft()()

    def _fail(self, call: _Call, got: str) -> None:
        strange = self._failed_greetings[call.server] >= _GREETINGS
        call.future.set_exception(
            ServerLost(
                f"call to server {call.server} at {self._addresses[call.server]}",
                got=f"{got}; {_STRANGER}" if strange else got,
                allowed="a reply",
                remedy="Give all of them one token file."
                if strange
                else "Look whether the server runs and its address is right.",
            )
        )

    def _end(self) -> None:
        if self._ended:
            return
        self._ended = True
        self._do_asked()
        for call in (*self._calls.values(), *itertools.chain(*self._held)):
            self._fail(call, "a client that was closed")
        for socket in (self._bell_end, *self._sockets):
            _close(socket)


def _monitor(socket: Any) -> Any:
    """Where a socket says what becomes of its connections; None of one that was not asked."""
    return socket._monitor_socket


def _close(socket: Any, *, linger_ms: int = 0) -> None:
    monitor = _monitor(socket)
    if monitor is not None:
        socket.disable_monitor()
        monitor.close(linger=0)
    socket.close(linger=linger_ms)


def _is_shared(call: _Call) -> bool:
    """Whether ZeroMQ reads frames where the caller has them: it copies smaller ones."""
    return any(memoryview(part).nbytes >= zmq.COPY_THRESHOLD for part in call.parts)


def _sent(
    socket: Any, held: deque[_Call], calls: dict[bytes, _Call], numbers: Iterator[int]
) -> bool:
    """Send what is held, as far as it may be under way; False: the socket takes no more."""
    if not held:
        return True
    room = _MESSAGES - sum(call.server == held[0].server for call in calls.values())
    while held and room > 0:
        number = next(numbers).to_bytes(_NUMBER, "little")
        try:
            socket.send_multipart([number, *held[0].parts], zmq.DONTWAIT, copy=False)
        except zmq.Again:  # it is down, or as much waits for it as may
            return False
        calls[number] = held.popleft()
        room -= 1
    return True


def _settle(calls: dict[bytes, _Call], reply: list[Any]) -> None:
    if len(reply) < 3:  # not of a server of ours
        return
    number, status, head, *frames = reply
    call = calls.pop(number.bytes, None)
    if call is None:  # given up before
        return
    if status.bytes == _DONE:
        call.future.set_result((head.bytes, [frame.buffer for frame in frames]))
    else:
        call.future.set_exception(_raised(head.bytes))


def _described(error: BaseException) -> bytes:
    kind = type(error).__name__ if isinstance(error, ShoalError) else "ShoalError"
    text = str(error) if isinstance(error, ShoalError) else f"{type(error).__name__}: {error}"
    return json.dumps([kind, text]).encode()


def _raised(described: bytes) -> ShoalError:
    try:
        kind, text = map(str, json.loads(described))
    except (ValueError, TypeError, RecursionError):
        return ShoalError("a reply that no server of Shoal writes")
    made: Any = getattr(errors, kind, None)
    known = isinstance(made, type) and issubclass(made, ShoalError)
    return made(text) if known else ShoalError(text)
