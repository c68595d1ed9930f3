"""Which server a process is, and where a worker finds all of them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from shoal.discovery import Book, Discovery, StaticList, TfConfig, open_discovery, wait_for
from shoal.discovery.values import check_address
from shoal.errors import ConfigError, ServerLost

_log = logging.getLogger(__name__)

ROLE = "ps"
MOST_SERVERS = 4096
_EVERYWHERE = ("0.0.0.0", "*", "[::]")
_AGAIN_S = 2.0  # how often a server that stands by tries without a change


def discovery_of(
    where: str | None, addresses: Sequence[str], job: str, session_s: float = 10.0
) -> Discovery:
    """The discovery of a job: the one that is named, or the list of addresses.

    Raises:
        ConfigError: both, neither, or a malformed one.
        ServerLost: the registry does not answer.
    """
    if (where is None) == (not addresses):
        raise ConfigError(
            "distributed.servers",
            got=f"discovery {where!r} and addresses {list(addresses)}",
            allowed="one of them",
            remedy="Start `shoal ps CONFIG --index I --of N` for each server, and name the "
            "addresses that they print; or let them register, say with "
            "discovery=zookeeper://HOST:PORT.",
        )
    if where is None:
        return StaticList(addresses)
    return open_discovery(where, job=job, session_s=session_s)


def servers_of(discovery: Discovery, count: int | None, *, timeout_s: float) -> tuple[str, ...]:
    """The addresses of all servers of a job, once they are there.

    Args:
        count: of servers; None: as many as a list or TF_CONFIG has.

    Raises:
        ConfigError: their number is not known.
        ServerLost: some did not come in time.
    """
    listed = isinstance(discovery, StaticList | TfConfig)
    known = len(discovery.query(ROLE)) if listed else count
    if not known or count not in (None, known):
        raise ConfigError(
            "distributed.servers.count",
            got=f"{count}, and {known or 0} in a list" if listed else count,
            allowed="how many servers there are, 1 or more",
            remedy="Set it to the N of `shoal ps --of N`.",
        )
    return wait_for(discovery, ROLE, known, timeout_s=timeout_s)


class IndexLease:
    """The index that a server has among those of its job. Use as a context.

    Args:
        discovery: where servers register, closed at the end; None: nowhere, and the index is given.
        of: how many servers the job has.
        ended: set by who wants the server to end; this sets it when another has its index.
    """

    def __init__(self, discovery: Discovery | None, of: int, ended: threading.Event) -> None:
        if not 1 <= of <= MOST_SERVERS:
            raise ConfigError("number of servers", of, f"1..{MOST_SERVERS}", "Set --of.")
        self._of, self._ended = of, ended
        self._changed = threading.Event()
        self._place: tuple[int, str] | None = None
        self._taken_by: str | None = None
        self._discovery = discovery
        if discovery is not None:
            discovery.watch(ROLE, self._seen)

    def __enter__(self) -> IndexLease:
        return self

    def __exit__(self, *_: object) -> None:
        if self._discovery is not None:
            self._discovery.close()

    def take(self, index: int | None, stands_by: Callable[[], None]) -> int | None:
        """Have an index: the given one, whoever has it now; or the first that nobody has.

        Calls `stands_by` and waits if there is none; None when the server is to end before.

        Raises:
            ConfigError: none is given, and there is nowhere to find one; or one that is too high.
            ServerLost: the registry does not answer; later, the server waits for it to come back.
        """
        found = self._discovery
        if index is None and isinstance(found, TfConfig) and found.role == ROLE:
            index = found.index
        if found is None or isinstance(found, TfConfig) or index is not None:
            index = 0 if index is None and self._of == 1 else index
            if index is None or not 0 <= index < self._of:
                raise ConfigError(
                    "index of a server",
                    got=index,
                    allowed=f"0..{self._of - 1}",
                    remedy="Give --index and --of; or let servers find a free one, with "
                    "distributed.servers.discovery=zookeeper://HOST:PORT.",
                )
            if found is not None:
                found.register(ROLE, index, "")
            return index
        waits = False
        while not self._ended.is_set():
            self._changed.clear()
            try:
                for free in range(self._of):
                    if found.register(ROLE, free, "", replace=False):
                        return free
            except ServerLost as error:
                if not waits:
                    raise
                _log.warning("standing by without the registry: %s", error)
            if not waits:
                stands_by()
            waits = True
            self._changed.wait(_AGAIN_S)
        return None

    def announce(self, index: int, address: str) -> None:
        """Let workers come: they reach this server at HOST:PORT.

        Raises:
            ConfigError: an address that names no machine.
            ServerLost: another server has the index meanwhile, or the registry does not answer.
        """
        if self._discovery is None:
            return
        if address.removeprefix("tcp://").rpartition(":")[0] in _EVERYWHERE:
            raise ConfigError(
                "address where workers reach this server",
                got=address,
                allowed="HOST:PORT of this machine",
                remedy="Give --announce HOST:PORT where --address listens everywhere.",
            )
        checked = check_address(address)
        self._place = index, checked
        if not self._discovery.register(ROLE, index, checked, replace=False):
            self._taken_by = "another server"
        self.check()

    def is_held(self) -> bool:
        """Whether the index is this server's for certain: the registry says so now."""
        if self._discovery is None or self._place is None:
            return self._discovery is None
        try:
            return self._discovery.register(ROLE, *self._place, replace=False)
        except ServerLost:
            return False

    def check(self) -> None:
        """Whether the index is still this server's, as far as it knows.

        Raises:
            ServerLost: another server has it.
        """
        if self._taken_by is not None:
            raise ServerLost(
                "index of this server",
                got=f"taken by {self._taken_by}",
                allowed="held by this server",
                remedy="Nothing, if that one replaces it: this process ends, and saves nothing.",
            )

    def _seen(self, book: Book) -> None:
        self._changed.set()
        if self._place is not None:
            index, address = self._place
            if book.get(index, address) != address and self._taken_by is None:
                self._taken_by = book[index]
                self._ended.set()
