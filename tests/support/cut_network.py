"""Networks between workers and a server that can be cut: a proxy, and a network namespace."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import pytest

__all__ = ["CUTS", "Cut", "Link", "Proxy", "namespace"]

Cut = Literal["stall", "no replies", "reset", "forgotten"]
"""What a cut does to connections:

stall: nothing passes, and all of it arrives later. no replies: only requests pass. reset: they are
reset, and new ones too. forgotten: nothing passes on them ever again and nobody is told, as when a
router lost its state; new ones work after the cut.
"""
CUTS: tuple[Cut, ...] = ("stall", "no replies", "reset", "forgotten")


@dataclass
class _Pair:
    """A connection from a worker, and the one to the server."""

    ends: tuple[socket.socket, socket.socket]
    forgotten: bool = False


@dataclass
class Proxy:
    """Forwards what comes to `address` to another until it is cut."""

    target: str
    address: str = ""
    _pairs: list[_Pair] = field(default_factory=list)
    _open: tuple[threading.Event, threading.Event] = field(
        default_factory=lambda: (threading.Event(), threading.Event())
    )
    _cut: Cut | None = None

    def __enter__(self) -> Proxy:
        for event in self._open:
            event.set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.mend()
        for pair in self._pairs:
            _close(pair)

    def cut(self, how: Cut) -> None:
        """Until `mend`."""
        self._cut = how
        if how == "stall":
            self._open[0].clear()
        if how in ("stall", "no replies"):
            self._open[1].clear()
        for pair in self._pairs:
            if how == "forgotten":
                pair.forgotten = True
            elif how == "reset":
                _close(pair)

    def mend(self) -> None:
        """The network is as it was before."""
        self._cut = None
        for event in self._open:
            event.set()

    def _accept(self) -> None:
        host, port = self.target.removeprefix("tcp://").split(":")
        with contextlib.suppress(OSError):
            while True:
                ours, _ = self._listener.accept()
                theirs = socket.socket()
                pair = _Pair((ours, theirs), self._cut == "forgotten")
                try:
                    theirs.connect((host, int(port)))
                except OSError:
                    _close(pair)
                    continue
                if self._cut == "reset":
                    _close(pair)
                    continue
                self._pairs.append(pair)
                for direction in range(2):
                    threading.Thread(target=self._pump, args=(pair, direction), daemon=True).start()

    def _pump(self, pair: _Pair, direction: int) -> None:
        source, sink = pair.ends if direction == 0 else pair.ends[::-1]
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self._open[direction].wait()
                if not pair.forgotten:
                    sink.sendall(data)
        if not pair.forgotten:
            _close(pair)


def _close(pair: _Pair) -> None:
    """At once, and so that the other side is told."""
    for end in pair.ends:
        with contextlib.suppress(OSError):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            end.shutdown(socket.SHUT_RDWR)
        end.close()


@dataclass(frozen=True)
class Link:
    """A cable to a network namespace, in which `host` is."""

    name: str
    host: str

    def cut(self) -> None:
        """Until `mend`."""
        _ip("link", "set", self.name, "down")

    def mend(self) -> None:
        """The network is as it was before."""
        _ip("link", "set", self.name, "up")


@contextmanager
def namespace() -> Iterator[Link]:
    """A network namespace of its name; skips the test where the system permits none."""
    number = random.SystemRandom().randrange(1 << 14)
    name, host = f"sh{os.getpid() % 10**6}x{number}", f"10.77.{number >> 6}.{number % 64 * 4}"
    base, last = host.rsplit(".", 1)
    near, far = (f"{base}.{int(last) + k}" for k in (1, 2))
    try:
        _ip("netns", "add", name)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network namespaces here: {error}")
    try:
        _ip("link", "add", name, "type", "veth", "peer", "name", "far", "netns", name)
        _ip("address", "add", f"{near}/30", "dev", name)
        _ip("link", "set", name, "up")
        _ip("-n", name, "address", "add", f"{far}/30", "dev", "far")
        _ip("-n", name, "link", "set", "far", "up")
        _ip("-n", name, "link", "set", "lo", "up")
        yield Link(name, far)
    finally:
        _ip("netns", "delete", name)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
