"""The interface of discovery, which of them a text names, and waiting for others."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from typing import Protocol

from shoal.discovery.fixed import TfConfig
from shoal.discovery.zookeeper import ZooKeeper
from shoal.errors import ConfigError, ServerLost

Book = Mapping[int, str]
"""HOST:PORT of the processes of a role, by index."""


class Discovery(Protocol):
    """Addresses of a job's processes, by role and index. Methods may be called by any thread."""

    def register(self, role: str, index: int, address: str, *, replace: bool = True) -> bool:
        """Be the one that has an index, until `close` or until this process dies.

        Args:
            role: such as "ps" or "worker".
            index: from 0.
            address: HOST:PORT; "" holds the index, and others do not see it yet.
            replace: take it from another process; False: only if nobody has it.

        Returns:
            whether this process has it.

        Raises:
            ConfigError: no address, role or index; or an index that cannot be had.
            ServerLost: the registry does not answer.
        """

    def query(self, role: str) -> dict[int, str]:
        """Who is there now; during an outage of the registry, who was there before it.

        Raises:
            ServerLost: the registry does not answer, and never did.
        """

    def watch(self, role: str, changed: Callable[[Book], None]) -> None:
        """Call with who is there, now and after each change, from a thread of its own."""

    def close(self) -> None:
        """Take back what was registered, and watch no more. May be called twice."""


def open_discovery(
    where: str,
    *,
    job: str,
    session_s: float = 10.0,
    environment: Mapping[str, str] | None = None,
) -> Discovery:
    """The discovery that a text names.

    Args:
        where: "zookeeper://HOST:PORT[,HOST:PORT...][/PATH]" (without a path: /monolith/JOB), or
            "tf_config".
        job: name of the job.
        session_s: how long a registry keeps who has died.
        environment: variables to read; the process's own when left out.

    Raises:
        ConfigError: no such discovery, or what it reads is malformed.
        ServerLost: ZooKeeper does not answer.
    """
    kind, _, rest = where.partition("://")
    if where == "tf_config":
        found = os.environ if environment is None else environment
        return TfConfig(found.get("TF_CONFIG", ""))
    if kind == "zookeeper" and rest:
        hosts, _, path = rest.partition("/")
        return ZooKeeper(hosts, f"/{path or f'monolith/{job}'}", session_s=session_s)
    raise ConfigError(
        "discovery of servers",
        got=repr(where)[:200],
        allowed="zookeeper://HOST:PORT[,HOST:PORT...][/PATH], tf_config",
        remedy="Name one of these, or list the addresses of all servers.",
    )


def wait_for(discovery: Discovery, role: str, count: int, *, timeout_s: float) -> tuple[str, ...]:
    """The addresses of processes 0..count-1 of a role, once all are there.

    Raises:
        ServerLost: some did not come in time.
    """
    latest: dict[int, str] = {}
    complete = threading.Event()

    def changed(book: Book) -> None:
        nonlocal latest
        if complete.is_set():  # who leaves between this and the answer is still in it
            return
        latest = dict(book)
        if all(index in latest for index in range(count)):
            complete.set()

    discovery.watch(role, changed)
    if not complete.wait(timeout_s):
        missing = [index for index in range(count) if index not in latest]
        raise ServerLost(
            f"{role} of a job",
            got=f"none with index {missing[:20]} in {timeout_s:g} s",
            allowed=f"{count} of them",
            remedy="Start them, or look whether they use the same discovery and job.",
        )
    return tuple(latest[index] for index in range(count))
