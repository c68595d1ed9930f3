"""Discovery through ZooKeeper: a node that lives as long as its process, at Monolith's paths."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Mapping
from typing import Any

from shoal.discovery.values import (
    MOST_INDEX,
    check_address,
    check_index,
    check_role,
    is_address,
)
from shoal.errors import ConfigError, ServerLost

_log = logging.getLogger("shoal.discovery")
_PATH = re.compile(r"(?:/[-_.0-9A-Za-z]{1,100}){1,20}")
_NODE = re.compile(r"([-_0-9A-Za-z]{1,100})\.([0-9]{1,7})")
_TRIES = 3
_AGAIN_S = 0.5
_REPAIR_S = 60.0  # between looks at what no watch reported

Changed = Callable[[Mapping[int, str]], None]


def _package() -> Any:
    try:
        import kazoo.client
        import kazoo.exceptions
        import kazoo.handlers.threading
    except ImportError:
        raise ConfigError(
            "discovery through ZooKeeper",
            got="no package kazoo",
            allowed="kazoo 2.10 or later",
            remedy="pip install 'shoal[ps]'.",
        ) from None
    return kazoo


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
        kazoo = _package()
        for host in hosts.split(","):
            check_address(host, "address of ZooKeeper")
        if not _PATH.fullmatch(path) or "/.." in path or "/./" in f"{path}/":
            raise ConfigError(
                "path in ZooKeeper",
                got=repr(path)[:200],
                allowed="/NAME/NAME..., of letters, digits, -, _ and .",
                remedy="Name it in the address of the discovery: zookeeper://HOST:PORT/monolith/JOB",
            )
        self._path, self._hosts, self._reply_s = path, hosts, connect_s
        self._errors: tuple[type[Exception], ...] = (
            kazoo.exceptions.KazooException,
            kazoo.handlers.threading.KazooTimeoutError,
        )
        self._exists: type[Exception] = kazoo.exceptions.NodeExistsError
        self._expired: type[Exception] = kazoo.exceptions.SessionExpiredError
        self._missing: type[Exception] = kazoo.exceptions.NoNodeError
        self._lock = threading.RLock()
        self._own: dict[tuple[str, int], str] = {}
        self._books: dict[str, dict[int, str]] = {}
        self._watching: list[tuple[str, Changed]] = []
        self._woken, self._closing = threading.Event(), threading.Event()
        self._client = kazoo.client.KazooClient(hosts=hosts, timeout=session_s, logger=_log)
        self._client.add_listener(self._wake)
        try:
            self._client.start(connect_s)
        except self._errors as error:
            self._client.close()
            raise self._lost(error) from None
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def register(self, role: str, index: int, address: str, *, replace: bool = True) -> bool:
        """Have a node."""
        place = check_role(role), check_index(index)
        checked = check_address(address) if address else ""
        error: Exception | None = None
        for _ in range(_TRIES):
            try:
                with self._lock:
                    if not self._written(place, checked, replace=replace):
                        return False
                    self._own[place] = checked
                    return True
            except self._errors as raised:
                error = raised
            self._closing.wait(_AGAIN_S)
        raise self._lost(error)

    def query(self, role: str) -> dict[int, str]:
        """What the nodes say; the book as it was while ZooKeeper does not answer."""
        check_role(role)
        error: object = "no connection"
        if self._client.connected:
            try:
                return self._read(role)
            except self._errors as raised:
                error = raised
        if role in self._books:
            return dict(self._books[role])
        raise self._lost(error)

    def watch(self, role: str, changed: Changed) -> None:
        """From the thread that follows ZooKeeper; the first time, from the caller's."""
        with self._lock:
            book = self._books[role] = self.query(role)
            self._watching.append((role, changed))
            changed(book)
        self._woken.set()

    def close(self) -> None:
        """End the session, and with it its nodes."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._woken.set()
        self._client.stop()
        self._thread.join()
        self._client.close()

    def _node(self, place: tuple[str, int]) -> str:
        return f"{self._path}/{place[0]}.{place[1]}"

    def _asked(self, method: str, *arguments: Any, **options: Any) -> Any:
        """The reply to one request, in bounded time."""
        reply = getattr(self._client, f"{method}_async")(*arguments, **options)
        return reply.get(timeout=self._reply_s)

    def _written(self, place: tuple[str, int], address: str, *, replace: bool) -> bool:
        """Whether the node is this session's now."""
        node, data = self._node(place), address.encode()
        for _ in range(_TRIES):
            try:
                self._asked("create", node, data, ephemeral=True, makepath=True)
                return True
            except self._exists:
                pass
            try:
                found, stat = self._asked("get", node)
                owner = self._client.client_id
                if owner is None:
                    raise self._expired("session lost while a node was read")
                if stat.ephemeralOwner == owner[0]:
                    if found != data:
                        self._asked("set", node, data)
                    return True
                if not replace:
                    return False
                self._asked("delete", node)
            except self._missing:  # it went meanwhile
                continue
        return False

    def _read(self, role: str) -> dict[int, str]:
        """The book of a role, and a wake-up at its next change."""
        try:
            children = self._asked("get_children", self._path, watch=self._wake)
        except self._missing:
            self._asked("ensure_path", self._path)
            children = self._asked("get_children", self._path, watch=self._wake)
        book: dict[int, str] = {}
        for child in children:
            found = _NODE.fullmatch(child)
            if found is None or found[1] != role or int(found[2]) >= MOST_INDEX:
                continue
            try:
                data, _ = self._asked("get", f"{self._path}/{child}", watch=self._wake)
            except self._missing:  # it went meanwhile
                continue
            address = data[:400].decode("utf-8", "replace")
            if is_address(address):
                book[int(found[2])] = address
            elif address:
                _log.warning("%s/%s holds no address: %r", self._path, child, address[:100])
        return dict(sorted(book.items()))

    def _wake(self, _: object) -> None:
        """Of a change, a new connection or a lost one: kazoo's threads must not wait."""
        self._woken.set()

    def _follow(self) -> None:
        while not self._closing.is_set():
            self._woken.wait(_REPAIR_S)
            self._woken.clear()
            try:
                if self._client.connected:
                    self._repair()
                    self._report()
            except Exception as error:  # noqa: BLE001 - without this thread no worker follows
                known = isinstance(error, self._errors)
                if not self._closing.wait(_AGAIN_S):
                    level = logging.INFO if known else logging.ERROR
                    said = "ZooKeeper at %s: %r; the last book is kept"
                    _log.log(level, said, self._hosts, error, exc_info=not known)
                    self._woken.set()

    def _repair(self) -> None:
        """Nodes of this process that a lost session, or junk in them, has undone."""
        with self._lock:
            for place, address in self._own.items():
                self._written(place, address, replace=False)

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

    def _lost(self, error: object) -> ServerLost:
        return ServerLost(
            f"ZooKeeper at {self._hosts}",
            got=repr(error)[:200],
            allowed="a reply",
            remedy="Look whether it runs, and its address is right.",
        )


def _call(changed: Changed, book: Mapping[int, str], role: str) -> None:
    try:
        changed(book)
    except Exception:  # noqa: BLE001 - the others are called all the same
        _log.exception("what watches %s failed", role)
