"""Nodes in ZooKeeper: those that live as long as their process, those that stay, and changes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from shoal.discovery.values import check_address
from shoal.errors import ServerLost, no_package

_log = logging.getLogger("shoal.discovery")
_TRIES = 3
_AGAIN_S = 0.5
_REPAIR_S = 60.0  # between looks at what no watch reported


def _package() -> Any:
    try:
        import kazoo.client
        import kazoo.exceptions
        import kazoo.handlers.threading
    except ImportError:
        what = "discovery through ZooKeeper"
        raise no_package(what, "kazoo", "ps", "kazoo 2.10 or later") from None
    return kazoo


class Nodes:
    """A session with ZooKeeper, and a thread that looks again whenever something changed.

    Nodes that it holds are ephemeral: ZooKeeper removes those of a process `session_s` after it was
    last heard of. After a lost session they are made again as soon as possible, unless another
    process has made them by then. Methods may be called by any thread.

    Args:
        hosts: HOST:PORT of ZooKeeper's servers, with commas between them.
        session_s: how long ZooKeeper keeps nodes of a process that it does not hear; it has bounds
            of its own (4 to 40 by default).
        reply_s: how long to wait for ZooKeeper at first, and for each of its replies.

    Attributes:
        client: kazoo's.
        errors: what its requests raise.
        missing: the one of them for a node that is not there.

    Raises:
        ConfigError: no such hosts, or kazoo is missing.
        ServerLost: ZooKeeper does not answer.
    """

    def __init__(self, hosts: str, *, session_s: float = 10.0, reply_s: float = 15.0) -> None:
        kazoo = _package()
        for host in hosts.split(","):
            check_address(host, "address of ZooKeeper")
        self.hosts, self._reply_s = hosts, reply_s
        self.errors: tuple[type[Exception], ...] = (
            kazoo.exceptions.KazooException,
            kazoo.handlers.threading.KazooTimeoutError,
        )
        self.missing: type[Exception] = kazoo.exceptions.NoNodeError
        self._exists: type[Exception] = kazoo.exceptions.NodeExistsError
        self._expired: type[Exception] = kazoo.exceptions.SessionExpiredError
        self._lock = threading.RLock()
        self._held: dict[str, bytes] = {}
        self._looks: list[Callable[[], None]] = []
        self._woken, self._closing = threading.Event(), threading.Event()
        self.client = kazoo.client.KazooClient(hosts=hosts, timeout=session_s, logger=_log)
        self.client.add_listener(self.wake)
        try:
            self.client.start(reply_s)
        except self.errors as error:
            self.client.close()
            raise self.lost(error) from None
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def hold(self, path: str, data: bytes, *, replace: bool = True) -> bool:
        """Have a node until `release` or `close`.

        Args:
            path: of the node; folders above it are made.
            data: its content; again with other data changes it.
            replace: take it from another session; False: only if nobody has it.

        Returns:
            whether this session has it.

        Raises:
            ServerLost: ZooKeeper does not answer.
        """

        def write() -> bool:
            with self._lock:
                written = self._written(path, data, replace=replace)
                if written:
                    self._held[path] = data
                return written

        return bool(self.tried(write))

    def release(self, path: str) -> None:
        """Have a node no longer; one that another session has by now stays.

        Raises:
            ServerLost: ZooKeeper does not answer; the node ends with the session.
        """

        def write() -> None:
            with suppress(self.missing):
                stat, session = self.asked("exists", path), self.client.client_id
                if stat is not None and session is not None and stat.ephemeralOwner == session[0]:
                    self.asked("delete", path)

        with self._lock:
            self._held.pop(path, None)
        self.tried(write)

    def put(self, path: str, data: bytes = b"") -> None:
        """Make a node that stays, with the folders above it, or change its data.

        Raises:
            ServerLost: ZooKeeper does not answer.
        """

        def write() -> None:
            try:
                self.asked("create", path, data, makepath=True)
            except self._exists:
                self.asked("set", path, data)

        self.tried(write)

    def delete(self, path: str) -> None:
        """Remove a node, whoever made it; one that is not there is fine.

        Raises:
            ServerLost: ZooKeeper does not answer.
        """

        def write() -> None:
            with suppress(self.missing):
                self.asked("delete", path)

        self.tried(write)

    def read(self, path: str) -> bytes | None:
        """Data of a node, or None; `follow`'s callbacks are called when it changes, or appears."""
        found = self._seen("get", path)
        return None if found is None else bytes(found[0])

    def children(self, path: str) -> list[str]:
        """Names of a node's children, sorted; watched as by `read`."""
        return sorted(self._seen("get_children", path) or ())

    def _seen(self, method: str, path: str) -> Any:
        """What a node says; None of a missing one, whose appearance is watched."""
        there = True
        while there:
            with suppress(self.missing):
                return self.asked(method, path, watch=self.wake)
            there = self.asked("exists", path, watch=self.wake) is not None
        return None

    def follow(self, look: Callable[[], None]) -> Callable[[], None]:
        """Call from a thread of its own, soon and whenever something that was read changed.

        It is called again after it raised.

        Returns:
            what ends that.
        """
        with self._lock:
            self._looks.append(look)
        self.wake()

        def unfollow() -> None:
            with self._lock, suppress(ValueError):
                self._looks.remove(look)

        return unfollow

    def close(self) -> None:
        """End the session, and with it its nodes. May be called twice."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._woken.set()
        self.client.stop()
        if self._thread is not threading.current_thread():
            self._thread.join()
        self.client.close()

    def asked(self, method: str, *arguments: Any, **options: Any) -> Any:
        """The reply to one request, in bounded time."""
        reply = getattr(self.client, f"{method}_async")(*arguments, **options)
        return reply.get(timeout=self._reply_s)

    def tried(self, request: Callable[[], Any]) -> Any:
        """What a request returns, which is repeated a few times where it fails.

        Raises:
            ServerLost: it failed each time.
        """
        error: Exception | None = None
        for _ in range(_TRIES):
            try:
                return request()
            except self.errors as raised:
                error = raised
            self._closing.wait(_AGAIN_S)
        raise self.lost(error)

    def wake(self, _: object = None) -> None:
        """Look again. Never waits: kazoo's threads call it, of changes and lost connections."""
        self._woken.set()

    def lost(self, error: object) -> ServerLost:
        """The error of a ZooKeeper that does not answer."""
        return ServerLost(
            f"ZooKeeper at {self.hosts}",
            got=repr(error)[:200],
            allowed="a reply",
            remedy="Look whether it runs, and its address is right.",
        )

    def _written(self, path: str, data: bytes, *, replace: bool) -> bool:
        """Whether the node is this session's now."""
        for _ in range(_TRIES):
            try:
                self.asked("create", path, data, ephemeral=True, makepath=True)
                return True
            except self._exists:
                pass
            try:
                found, stat = self.asked("get", path)
                owner = self.client.client_id
                if owner is None:
                    raise self._expired("session lost while a node was read")
                if stat.ephemeralOwner == owner[0]:
                    if found != data:
                        self.asked("set", path, data)
                    return True
                if not replace:
                    return False
                self.asked("delete", path)
            except self.missing:  # it went meanwhile
                continue
        return False

    def _follow(self) -> None:
        while not self._closing.is_set():
            self._woken.wait(_REPAIR_S)
            self._woken.clear()
            try:
                if self.client.connected:
                    self._repair()
                    for look in tuple(self._looks):
                        look()
            except Exception as error:  # noqa: BLE001 - without this thread nobody follows
                known = isinstance(error, self.errors)
                if not self._closing.wait(_AGAIN_S):
                    level = logging.INFO if known else logging.ERROR
                    said = "ZooKeeper at %s: %r; what was last known is kept"
                    _log.log(level, said, self.hosts, error, exc_info=not known)
                    self._woken.set()

    def _repair(self) -> None:
        """Nodes of this session that a lost one, or junk in them, has undone."""
        with self._lock:
            for path, data in self._held.items():
                self._written(path, data, replace=False)
