"""How much the connections of a server's socket may bring that nobody has read."""

from __future__ import annotations

import contextlib
import os
import socket as sockets
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import zmq
else:
    try:
        import zmq
    except ImportError:  # told by `transport`
        zmq = None

_EVERY_S = 0.1
_FRAME_BYTES = 64  # that a frame takes on the wire next to what is in it, at most
_BEAT_BYTES = 64  # a second: signs of life, which are no messages
_BYTES_RECEIVED = 128  # where Linux has it in its tcp_info


@dataclass(slots=True)
class _Connection:
    """One of TCP: by the inode, for its file descriptor may be another's by now."""

    inode: int
    read: float = 0.0  # bytes of the wire
    unread: float = 0.0


class UnreadLimit:
    """Closes connections that bring more than a server reads.

    ZeroMQ bounds the frames of a message, not their number, and shows nobody a message before its
    last frame has come: one that never ends would fill the memory. So what TCP has received is
    compared with what was read, ten times a second. Only on Linux. Connections of Unix sockets,
    which count nothing, are let in from the same user alone.

    Args:
        socket: the server's, before it is bound.
        each: bytes that one connection may have brought.
        together: bytes of all connections; above them the one with the most is closed.
    The owner closes the socket's monitor with the socket.
    """

    def __init__(self, socket: zmq.Socket[bytes], *, each: int, together: int) -> None:
        self._each, self._together = each, together
        self._events: Any = socket.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._connections: dict[int, _Connection] = {}  # by file descriptor
        self._checked_s = time.monotonic()
        with contextlib.suppress(zmq.ZMQError):  # a system that does not say whose a socket is
            socket.setsockopt(zmq.IPC_FILTER_UID, os.getuid())

    def read(self, message: Sequence[zmq.Frame]) -> None:
        """Count a message of the socket: the sender's name, which was not sent, and its frames."""
        try:
            descriptor = int(message[-1].get(zmq.SRCFD))
        except zmq.ZMQError:  # the peer speaks an old protocol, as no client of ours
            return
        if descriptor not in self._connections:  # it has come since the last look
            self._come_and_go()
        found = self._connections.get(descriptor)
        if found is not None:
            found.read += sum(len(part) + _FRAME_BYTES for part in message[1:])

    def check(self) -> None:
        """Close what is above the limits; looks ten times a second, however often it is called."""
        now_s = time.monotonic()
        since_s = now_s - self._checked_s
        if since_s < _EVERY_S:
            return
        self._checked_s = now_s
        self._come_and_go()
        for descriptor, one in self._connections.items():
            received = _received(descriptor)
            # What is counted above what came is no allowance for what comes.
            one.read = min(received, one.read + _BEAT_BYTES * since_s)
            one.unread = received - one.read
        most = sorted(self._connections.items(), key=lambda item: -item[1].unread)
        total = sum(one.unread for _, one in most)
        for descriptor, one in most:
            if one.unread <= self._each and total <= self._together:
                break
            total -= one.unread
            _shut(descriptor, one.inode)

    def _come_and_go(self) -> None:
        while self._events.poll(0):
            event, value = struct.unpack("=hi", self._events.recv_multipart()[0])
            self._connections.pop(value, None)
            if event == zmq.EVENT_ACCEPTED:
                with contextlib.suppress(OSError):  # it has gone
                    self._connections[value] = _Connection(os.fstat(value).st_ino)


def _received(descriptor: int) -> int:
    """Bytes that TCP has received; 0 of what is no connection of TCP, or where it does not say."""
    if not hasattr(sockets, "TCP_INFO"):
        return 0
    found = None
    try:
        found = sockets.socket(sockets.AF_INET, sockets.SOCK_STREAM, 0, descriptor)
        info = found.getsockopt(sockets.IPPROTO_TCP, sockets.TCP_INFO, _BYTES_RECEIVED + 8)
        return int(struct.unpack_from("=Q", info, _BYTES_RECEIVED)[0])
    except (OSError, struct.error):
        return 0
    finally:
        if found is not None:
            found.detach()  # the descriptor is ZeroMQ's


def _shut(descriptor: int, inode: int) -> None:
    """Close a connection under ZeroMQ, if the descriptor still is its."""
    with contextlib.suppress(OSError), sockets.socket(fileno=os.dup(descriptor)) as one:
        if os.fstat(one.fileno()).st_ino == inode:
            one.shutdown(sockets.SHUT_RDWR)
