"""Connections of a worker to all parameter servers of a job: repeats, counts, order of updates."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import math
import random
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from shoal.comm.transport import Client, Frames, Secret, wait_for
from shoal.errors import ConfigError, InputError, ServerLost, ShoalError
from shoal.ps.messages import MOST_BYTES, READS, UPDATES, Head, identity
from shoal.ps.sending import HedgeDelay, Staleness, UpdateSender, first_reply
from shoal.table.spec import TableSpec

Reply = tuple[bytes, Frames]
Asked = tuple[Head, Sequence[Any]]

_log = logging.getLogger("shoal.ps")
_LONGEST_PAUSE_S = 10.0
_GOODBYE_S = 1.0


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a worker waits for servers.

    Args:
        reply_s: for one reply.
        repeats: how often a request is sent again that had no reply.
        pause_s: before the first repeat, up to; each later pause is twice as long, 10 s at most.
    """

    reply_s: float = 30.0
    repeats: int = 5
    pause_s: float = 0.5

    @property
    def longest_s(self) -> float:
        """Seconds after which no request is sent again."""
        return self.reply_s * (1 + self.repeats) + sum(map(self.pause_of, range(self.repeats)))

    def pause_of(self, repeat: int) -> float:
        """Seconds before a repeat, the first of which is 0, at most."""
        return min(_LONGEST_PAUSE_S, self.pause_s * 2.0**repeat)


class Servers:
    """Connections to all servers of a job, as one worker.

    Args:
        addresses: of the servers, by index: tcp://HOST:PORT, or HOST:PORT.
        specs: all tables, as the servers have them.
        worker: this worker's name, of no other; None makes one.
        patience: how long to wait for replies.
        secret: what the servers were given.
        stale_updates: how many updates of this worker may be on their way while training continues;
            0: `step` returns when servers have applied them, and lookups see all of them.
        most_bytes: of a frame of a request or a reply, as servers have it.
        watch: called with `follow` before servers are greeted, so that one that moves meanwhile
            is found; None: they stay where they are.

    Attributes:
        staleness: what lookups lacked, and what was sent again.

    Raises:
        ConfigError: servers of other tables, or in another order.
        ServerLost: a server does not answer.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        specs: Sequence[TableSpec],
        *,
        worker: str | None = None,
        patience: Patience | None = None,
        secret: Secret | None = None,
        stale_updates: int = 0,
        most_bytes: int = MOST_BYTES,
        watch: Callable[[Callable[[Mapping[int, str]], None]], None] | None = None,
    ) -> None:
        self.specs = tuple(specs)
        self.count = len(addresses)
        self.staleness = Staleness()
        self.worker = worker or uuid.uuid4().hex
        self._patience = patience or Patience()
        self._most_bytes = most_bytes
        self._client = Client(
            [_with_scheme(one) for one in addresses], secret=secret, most_bytes=most_bytes
        )
        self._numbers = [0] * self.count
        self._updating = threading.Lock()
        self._identities = [""] * self.count  # not known before the greeting
        # Above those of a process that had this name before.
        self._numbers_once = itertools.count(time.time_ns())
        self._hedge = HedgeDelay()
        self._sender = UpdateSender(stale_updates)
        try:
            if watch is not None:
                watch(self.follow)
            self.seed = self._greet()
            self._identities = [
                identity(self.specs, index, self.count, self.seed) for index in range(self.count)
            ]
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Wait for updates that are on their way, have those counted that were lost, disconnect.

        May be called twice.

        Raises:
            ShoalError: one of them failed.
        """
        # A server may be down, or this closed before, or another thread still waits.
        with contextlib.closing(self._client):
            try:
                self._sender.close()
            finally:
                if self._updating.acquire(blocking=False):
                    try:
                        with contextlib.suppress(ShoalError):
                            self._count_lost(replace(self._patience, repeats=0, reply_s=_GOODBYE_S))
                    finally:
                        self._updating.release()

    def count_lost(self) -> int:
        """How many updates of this worker servers have lost, once all have arrived.

        A server counts numbers that never came when the next comes; this has it count now.

        Raises:
            ShoalError: an update failed, or a server gave no reply.
        """
        self._sender.settle()
        with self._updating:
            return self._count_lost(self._patience)

    def _count_lost(self, patience: Patience) -> int:
        asked: Asked = Head(method="count_lost"), []
        requests = [asked if last else None for last in self._numbers]
        replies = self._asked(requests, self._numbers, patience)
        found = enumerate(said for said, _ in replies)
        return self.staleness.counted_lost({n: int(said) for n, said in found if said})

    def follow(self, book: Mapping[int, str]) -> None:
        """Call servers where an address book has them; who is not in it stays where it was."""
        for index, address in book.items():
            if index < self.count:
                self._client.move(index, _with_scheme(address))

    def _greet(self) -> int:
        mine = [repr(spec) for spec in self.specs]
        seeds = set()
        for index, (said, _) in enumerate(self.ask([(Head(method="hello"), [])] * self.count)):
            told = json.loads(said)
            if (told["index"], told["of"], told["tables"]) != (index, self.count, mine):
                raise ConfigError(
                    f"parameter server {index}",
                    got=f"server {told['index']} of {told['of']} with tables {told['tables']}",
                    allowed=f"server {index} of {self.count} with tables {mine}",
                    remedy="Give all servers and workers one config, and addresses in order.",
                )
            self._numbers[index] = told["applied"]
            seeds.add(told["seed"])
        if len(seeds) > 1:
            what, remedy = "seeds of the parameter servers", "Give all servers one config."
            raise ConfigError(what, sorted(seeds), "one", remedy)
        return int(seeds.pop())

    def ask(self, requests: Sequence[Asked | None]) -> list[Reply]:
        """Send each server its request, all at once, and wait for all replies; None sends none.

        A request without a reply is sent again; an update then is applied once, a lookup counts
        its ids once, and weights move their average once. All but training lookups wait for
        updates that are on their way.

        Raises:
            ServerLost: a server gave no reply, however often it was asked.
            ShoalError: what a server raised, or an update before this request.
        """
        self._check_bytes(requests)
        methods = {request[0].method for request in requests if request is not None}
        if not methods:
            return [(b"", [])] * len(requests)
        if methods == {"lookup"}:
            self.staleness.looked_up(self._sender.on_their_way)
            return self._asked_once(requests)
        self._sender.settle()
        if methods == {"average"}:
            return self._asked_once(requests)
        return self._updated(requests) if methods & set(UPDATES) else self._asked(requests)

    def update(self, requests: Sequence[Asked | None]) -> None:
        """Send updates; returns while up to `stale_updates` of them are on their way.

        Raises:
            ShoalError: what a server raised, now or at an update before this one, which then is
                not sent.
        """
        self._check_bytes(requests)
        if self._sender.most:  # the caller may write to its tensors before they are sent
            requests = [one and (one[0], [bytes(frame) for frame in one[1]]) for one in requests]

        def send() -> None:
            replies = self._updated(requests)
            told = {n: json.loads(said) for n, (said, _) in enumerate(replies) if said}
            self.staleness.updated([behind for behind, _ in told.values()])
            self.staleness.counted_lost({server: lost for server, (_, lost) in told.items()})

        self._sender.send(send)

    def settle(self) -> None:
        """Wait until servers have applied this worker's updates.

        Raises:
            ShoalError: one of them failed.
        """
        self._sender.settle()

    def _updated(self, requests: Sequence[Asked | None]) -> list[Reply]:
        with self._updating:
            for server, request in enumerate(requests):
                self._numbers[server] += request is not None
            return self._asked(requests, self._numbers)

    def _asked_once(self, requests: Sequence[Asked | None]) -> list[Reply]:
        return self._asked(requests, [next(self._numbers_once)] * self.count)

    def _asked(
        self,
        requests: Sequence[Asked | None],
        numbers: Sequence[int] | None = None,
        patience: Patience | None = None,
    ) -> list[Reply]:
        """numbers: of each server's request; None: nothing is remembered of them."""
        patience = patience or self._patience
        longest_s = math.ceil(self._patience.longest_s)
        heads: list[bytes | None] = []
        for server, request in enumerate(requests):
            added: dict[str, Any] = {"worker": self.worker, "server": self._identities[server]}
            if numbers is not None:
                added |= {"number": numbers[server], "argument": longest_s}
            heads.append(request and request[0].model_copy(update=added).to_bytes())

        until_s = time.monotonic() + patience.reply_s

        def send(server: int) -> Future[Reply] | None:
            head, request = heads[server], requests[server]
            if head is None or request is None:
                return None
            left_s = max(0.0, until_s - time.monotonic())
            return self._client.call(server, head, request[1], timeout_s=left_s)

        began_s = time.monotonic()
        under_way = [send(server) for server in range(len(requests))]
        reads = all(request is None or request[0].method in READS for request in requests)
        if reads:
            again = {server: send(server) for server in self._hedge.late(under_way)}
            self.staleness.hedged += len(again)
            for server, other in again.items():
                under_way[server] = first_reply(under_way[server], other)
        # All are waited for: the next update must not overtake one that a server still works on.
        for repeat in range(patience.repeats):
            lost = [
                server
                for server, future in enumerate(under_way)
                if future is not None and isinstance(future.exception(), ServerLost)
            ]
            if not lost:
                break
            self.staleness.repeated += len(lost)
            what = "no reply of servers %s, which have the rows: asking again, %d of %d"
            _log.warning(what, lost, repeat + 1, patience.repeats)
            time.sleep(random.uniform(0.5, 1) * patience.pause_of(repeat))
            until_s = time.monotonic() + patience.reply_s
            for server in lost:
                under_way[server] = send(server)
        wait_for([future for future in under_way if future is not None])
        replies = [(b"", []) if future is None else future.result() for future in under_way]
        if reads:
            self._hedge.took(time.monotonic() - began_s)
        return replies

    def _check_bytes(self, requests: Sequence[Asked | None]) -> None:
        """Before anything is sent: a server would close the connection."""
        sizes = [memoryview(frame).nbytes for one in requests if one for frame in one[1]]
        if max(sizes, default=0) > self._most_bytes:
            raise InputError(
                "request to a parameter server",
                got=f"{max(sizes)} bytes",
                allowed=f"{self._most_bytes} bytes at most",
                remedy="Send fewer ids at once, or raise distributed.servers.most_mib.",
            )


def _with_scheme(address: str) -> str:
    return address if "://" in address else f"tcp://{address}"


def health_of(
    addresses: Sequence[str], *, secret: Secret | None = None, timeout_s: float = 5.0
) -> list[dict[str, Any] | None]:
    """How servers are: state, rows, queue, updates, newest save; None of one without an answer."""
    client = Client([_with_scheme(one) for one in addresses], secret=secret)
    try:
        head = Head(method="health").to_bytes()
        replies = [client.call(k, head, timeout_s=timeout_s) for k in range(len(addresses))]
        wait_for(replies)
        lost = [isinstance(reply.exception(), ServerLost) for reply in replies]
        pairs = zip(replies, lost, strict=True)
        return [None if gone else json.loads(reply.result()[0]) for reply, gone in pairs]
    finally:
        client.close()
