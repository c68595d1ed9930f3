"""Discovery through ZooKeeper: a node that lives as long as its process, at Monolith's paths."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Mapping

from shoal.discovery.nodes import Nodes
from shoal.discovery.values import (
    MOST_INDEX,
    check_address,
    check_index,
    check_role,
    is_address,
)
from shoal.errors import ConfigError

_log = logging.getLogger("shoal.discovery")
_PATH = re.compile(r"(?:/[-_.0-9A-Za-z]{1,100}){1,20}")
_NODE = re.compile(r"([-_0-9A-Za-z]{1,100})\.([0-9]{1,7})")

Changed = Callable[[Mapping[int, str]], None]


class ZooKeeper:
    """Nodes PATH/ROLE.INDEX with HOST:PORT in them.

    They are ephemeral: ZooKeeper removes those of a process `session_s` after it was last heard of.
    One whose session was lost registers again as soon as it can, unless another has its index by
    then. During an outage of ZooKeeper books stay as they were.

    Args:
        hosts: HOST:PORT of ZooKeeper's servers, with commas between them.
        path: folder of the job.
        session_s: how long ZooKeeper keeps nodes of a process that it does not hear; it has bounds
            of its own (4 to 40 by default).
        connect_s: how long to wait for ZooKeeper at first, and for each of its replies.

    Raises:
        ConfigError: no such hosts or path, or kazoo is missing.
        ServerLost: ZooKeeper does not answer.
    """

    def __init__(
        self, hosts: str, path: str, *, session_s: float = 10.0, connect_s: float = 15.0
    ) -> None:
        if not _PATH.fullmatch(path) or "/.." in path or "/./" in f"{path}/":
            raise ConfigError(
                "path in ZooKeeper",
                got=repr(path)[:200],
                allowed="/NAME/NAME..., of letters, digits, -, _ and .",
                remedy="Name it in the address of the discovery: zookeeper://HOST:PORT/monolith/JOB",
            )
        self._path = path
        self._lock = threading.RLock()
        self._books: dict[str, dict[int, str]] = {}
        self._watching: list[tuple[str, Changed]] = []
        self.nodes = Nodes(hosts, session_s=session_s, reply_s=connect_s)
        self.nodes.follow(self._report)

    def register(self, role: str, index: int, address: str, *, replace: bool = True) -> bool:
        """Have a node."""
        place = check_role(role), check_index(index)
        data = check_address(address).encode() if address else b""
        return self.nodes.hold(f"{self._path}/{place[0]}.{place[1]}", data, replace=replace)

    def query(self, role: str) -> dict[int, str]:
        """What the nodes say; the book as it was while ZooKeeper does not answer.

        Raises:
            ServerLost: it has not answered yet.
        """
        check_role(role)
        error: object = "no connection"
        if self.nodes.client.connected:
            try:
                return self._read(role)
            except self.nodes.errors as raised:
                error = raised
        if role in self._books:
            return dict(self._books[role])
        raise self.nodes.lost(error)

    def watch(self, role: str, changed: Changed) -> None:
        """From the thread that follows ZooKeeper; the first time, from the caller's."""
        with self._lock:
            book = self._books[role] = self.query(role)
            self._watching.append((role, changed))
            changed(book)
        self.nodes.wake()

    def close(self) -> None:
        """End the session, and with it its nodes."""
        self.nodes.close()

    def _read(self, role: str) -> dict[int, str]:
        """The book of a role, and a wake-up at its next change."""
        children = self.nodes.children(self._path)
        book: dict[int, str] = {}
        for child in children:
            found = _NODE.fullmatch(child)
            if found is None or found[1] != role or int(found[2]) >= MOST_INDEX:
                continue
            data = self.nodes.read(f"{self._path}/{child}")
            if data is None:  # it went meanwhile
                continue
            address = data[:400].decode("utf-8", "replace")
            if is_address(address):
                book[int(found[2])] = address
            elif address:
                _log.warning("%s/%s holds no address: %r", self._path, child, address[:100])
        return dict(sorted(book.items()))

    def _report(self) -> None:
        with self._lock:
            roles = {role for role, _ in self._watching}
        for role in roles:
            book = self._read(role)
            if book == self._books.get(role):
                continue
            with self._lock:
                self._books[role] = book
                for watched, changed in self._watching:
                    if watched == role:
                        _call(changed, book, role)


def _call(changed: Changed, book: Mapping[int, str], role: str) -> None:
    try:
        changed(book)
    except Exception:  # noqa: BLE001 - the others are called all the same
        _log.exception("what watches %s failed", role)
