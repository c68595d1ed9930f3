"""What a worker has of parameter servers: their rows by id, and lookups that train on them."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import random
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor

from shoal.comm.collectives import Arriving, Collectives, LocalCollectives
from shoal.comm.frames import memory, tensor
from shoal.comm.transport import Client, Frames, Secret, wait_for
from shoal.errors import ConfigError, InputError, ServerLost, ShoalError
from shoal.exchange.local import PendingRecords, Request, Route, Sending
from shoal.exchange.partition import (
    Outgoing,
    SendPlan,
    compile_send_plan,
    partition,
    row_views,
)
from shoal.exchange.received import ReceivedRows, RequestPlans
from shoal.exchange.rows_by_id import check_call
from shoal.exchange.wire import Wire
from shoal.ps.calls import (
    Answer,
    ServerShare,
    SplitCall,
    answer_of,
    cat,
    chunk_of_frames,
    head_of,
    rows_by_real,
    shares_of,
)
from shoal.ps.messages import (
    MOST_BYTES,
    READS,
    REALS,
    UPDATES,
    Head,
    Method,
    identity,
    rows_to_frames,
)
from shoal.ps.sending import HedgeDelay, Staleness, UpdateSender, first_reply
from shoal.ps.server import spread_over
from shoal.table import checks
from shoal.table.hosting import joined_chunk, joined_stats
from shoal.table.rows import real_dtype, weight_dtype
from shoal.table.shard import Found, GradRecord, IdGroups, ReadTicket, StepContext, SummedGrads
from shoal.table.spec import TableSpec
from shoal.table.values import Entry, RowChunk, TableStats

Reply = tuple[bytes, Frames]
Asked = tuple[Head, Sequence[Any]]

_CPU = torch.device("cpu")
_NOBODY = -1  # of the servers, a worker is none
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
            raise ConfigError(
                "seeds of the parameter servers",
                got=sorted(seeds),
                allowed="one",
                remedy="Give all servers one config.",
            )
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


class RowsOverServers:
    """Rows by id over all servers, and updates of what was looked up.

    Args:
        servers: connections to them.
        wire: how rows travel.
    """

    def __init__(self, servers: Servers, *, wire: Wire | None = None) -> None:
        self.servers = servers
        self.specs = servers.specs
        self.device = _CPU
        self.seed = servers.seed
        self.last_step = 0
        self.wire = wire or Wire()
        self.placement = spread_over(self.specs, servers.count)

    def send_plan(self, tables_G: tuple[int, ...]) -> SendPlan:
        """The buffers of calls whose groups are of these tables."""
        return compile_send_plan(self.specs, self.placement, (), _NOBODY, tables_G)

    def find(self, groups: IdGroups) -> Found:
        """Read rows; never inserts."""
        split, answers = self._call("find", groups, (), StepContext())
        return Found(split.rows(answers), split.flags(answers, False, torch.bool))

    def apply_ids(
        self,
        groups: IdGroups,
        grads: Sequence[Tensor],
        counts_N: Tensor | None = None,
        *,
        ctx: StepContext,
        seen_weights: Sequence[Tensor] | None = None,
    ) -> None:
        """One optimizer step per row; missing ids are inserted (admission applies)."""
        values = [grads] if seen_weights is None else [grads, seen_weights]
        _, head, shares = self._split("apply", groups, values, counts_N, ctx)
        self._update(head, shares, (), counted=counts_N is not None)

    def assign(self, groups: IdGroups, weights: Sequence[Tensor], *, ctx: StepContext) -> None:
        """Upsert weights; of duplicates the last wins."""
        self._call("assign", groups, [weights], ctx)

    def assign_add(self, groups: IdGroups, deltas: Sequence[Tensor], *, ctx: StepContext) -> None:
        """Add to rows; a missing id is initialised first. Duplicates add up."""
        self._call("assign_add", groups, [deltas], ctx)

    def reinitialize(self, groups: IdGroups, *, ctx: StepContext) -> Tensor:
        """Initial value and state again: int32 [N] in input order: 1 existed, 0 inserted,
        -1 of a table that does not exist.
        """
        split, answers = self._call("reinitialize", groups, (), ctx)
        return split.flags(answers, -1, torch.int32)

    def evict(self, now_s: int) -> int:
        """Drop rows expired at event time `now_s`; how many."""
        return sum(self._numbers("evict", argument=now_s))

    def close_version(self) -> int:
        """Close every server's version and open the next; the latest that was closed."""
        return max(self._numbers("close_version"))

    def clear(self, table: int) -> None:
        """Drop all rows of a table."""
        checks.table_index(table, len(self.specs))
        self._all("clear", argument=table)

    def size(self, table: int) -> int:
        """Rows of a table."""
        checks.table_index(table, len(self.specs))
        return sum(self._numbers("size", argument=table))

    def stats(self) -> tuple[TableStats, ...]:
        """Counters of the whole tables."""
        everyone = [
            [TableStats(**stats) for stats in json.loads(said)] for said, _ in self._all("stats")
        ]
        return tuple(
            joined_stats(
                spec,
                [
                    (self.placement.of(spec.name)[0], server, stats[table])
                    for server, stats in enumerate(everyone)
                ],
            )
            for table, spec in enumerate(self.specs)
        )

    def entry(self, table: int, id: int) -> Entry | None:
        """One row in full, or None."""
        checks.table_index(table, len(self.specs))
        spec = self.specs[table]
        for said, frames in self._all("entry", argument=table, id=id):
            if frames:
                version, last_seen_s, count = json.loads(said)
                weights = tensor(frames[0], weight_dtype(spec), spec.dim, "weights")
                state = tensor(frames[1], real_dtype(spec), spec.state_width, "state")
                return Entry(id, weights.clone(), state.clone(), version, last_seen_s, count)
        return None

    def export(self, table: int) -> RowChunk:
        """All rows of a table, ordered by hash: for small tables."""
        checks.table_index(table, len(self.specs))
        hosted = self.placement.of(self.specs[table].name)[0]
        chunks = [
            chunk_of_frames(self.specs[table], frames)
            for _, frames in self._all("export", argument=table)
        ]
        return joined_chunk(self.specs[table], [(hosted, chunk) for chunk in chunks])

    def check(self) -> None:
        """Wait for updates that are on their way, and raise what servers found in them."""
        self.servers.settle()

    def apply(self, records: Sequence[GradRecord], *, ctx: StepContext) -> None:
        """Sum the gradients per row over all records; one optimizer step per admitted row."""
        ticket = cast(ServerTicket, records[0].ticket) if len(records) == 1 else None
        if ticket is None or not ticket.admitted_N.all():
            self.apply_summed(self.sum_grads(records), records, ctx=ctx)
            return
        # The ids of one lookup are distinct, and lie by server already.
        (record,) = records
        grads = record.grads
        if record.scale != 1.0:
            grads = tuple(grad * record.scale for grad in grads)
        (ready,) = check_call(
            "apply", ticket.groups, [grads], ticket.counts_N, ctx, self.specs, _CPU
        )
        latest_s = max(ctx.event_time_s, ticket.event_time_s)
        head = head_of("apply", replace(ctx, event_time_s=latest_s))
        self._update(head, ticket.with_rows(ready), [ticket], counted=True)
        ticket.end()

    def sum_grads(self, records: Sequence[GradRecord]) -> SummedGrads:
        """The per-row sums of `apply`: of ids that were admitted, each server's in order."""
        tables: dict[int, list[tuple[Tensor, Tensor, Tensor]]] = {}
        counted: set[int] = set()
        for record in records:
            ticket = cast(ServerTicket, record.ticket)
            cuts = pairwise(ticket.groups.splits_G1.tolist())
            once = id(ticket) not in counted
            counted.add(id(ticket))
            for (start, stop), table, grad in zip(
                cuts, ticket.groups.tables_G.tolist(), record.grads, strict=True
            ):
                ids_n, count_n = ticket.groups.ids_N[start:stop], ticket.counts_N[start:stop] * once
                keep_n = ticket.admitted_N[start:stop]
                if not keep_n.all():
                    ids_n, grad, count_n = ids_n[keep_n], grad[keep_n], count_n[keep_n]
                grad = grad if record.scale == 1.0 else grad * record.scale
                tables.setdefault(table, []).append((ids_n, grad, count_n))
        distinct = len(records) == 1  # a lookup's ids are
        found = {k: _summed(parts, distinct=distinct) for k, parts in sorted(tables.items())}
        return SummedGrads(
            tuple(found),
            tuple(part[0] for part in found.values()),
            tuple(part[1] for part in found.values()),
            tuple(part[2] for part in found.values()),
        )

    def apply_summed(
        self, summed: SummedGrads, records: Sequence[GradRecord], *, ctx: StepContext
    ) -> None:
        """`apply` with sums that the caller may have changed; ends the records' tickets."""
        sizes = [ids.numel() for ids in summed.ids]
        groups = IdGroups(
            cat(summed.ids),
            torch.tensor([0, *sizes], device="cpu").cumsum(0),
            torch.tensor(summed.tables, dtype=torch.int32, device="cpu"),
        )
        tickets = [cast(ServerTicket, record.ticket) for record in records]
        latest_s = max([ctx.event_time_s, *(ticket.event_time_s for ticket in tickets)])
        latest = replace(ctx, event_time_s=latest_s)
        _, head, shares = self._split("apply", groups, [summed.sums], cat(summed.counts), latest)
        self._update(head, shares, tickets, counted=True)
        for ticket in tickets:
            ticket.end()

    def _update(
        self,
        head: Head,
        shares: Sequence[ServerShare],
        tickets: Sequence[ServerTicket],
        *,
        counted: bool,
    ) -> None:
        seen = [
            min((k for one in tickets if (k := one.seen[server]) is not None), default=None)
            for server in range(self.servers.count)
        ]
        self.servers.update(self._requests(head, shares, counted=counted, seen=seen))

    def ask(self, head: Head, shares: Sequence[ServerShare], *, counted: bool) -> list[Answer]:
        """Each server's share of a call; what it replies. Who has no ids is not asked."""
        replies = self.servers.ask(self._requests(head, shares, counted=counted))
        return [
            answer_of(head.method, share, reply, self.specs, self.wire.rows)
            for share, reply in zip(shares, replies, strict=True)
        ]

    def _requests(
        self,
        head: Head,
        shares: Sequence[ServerShare],
        *,
        counted: bool,
        seen: Sequence[int | None] | None = None,
    ) -> list[Asked | None]:
        reply = self.wire.rows if head.method in READS else None
        kind = self.wire.grads if head.method == "apply" else None
        requests: list[Asked | None] = []
        for server, share in enumerate(shares):
            if not share.ids_n.numel():
                requests.append(None)
                continue
            own = {"tables": share.tables, "sizes": share.sizes, "sets": len(share.sets)}
            read_at = None if seen is None else seen[server]
            same = {"counted": counted, "wire": kind, "reply": reply, "seen": read_at}
            named = head.model_copy(update={**same, **own})
            frames = [memory(share.ids_n)]
            if counted:
                frames.append(memory(share.counts_n.to(torch.int32)))
            segments = [named.segments(self.specs, real) for real in REALS]
            for flats in share.sets:
                frames += rows_to_frames(segments, flats, kind)
            requests.append((named, frames))
        return requests

    def _split(
        self,
        method: Method,
        groups: IdGroups,
        values: Sequence[Sequence[Tensor]],
        counts_N: Tensor | None,
        ctx: StepContext,
    ) -> tuple[SplitCall, Head, list[ServerShare]]:
        named = "apply_ids" if method == "apply" else method
        ready = check_call(named, groups, values, counts_N, ctx, self.specs, _CPU)
        split = SplitCall(groups, self.specs, self.servers.count, distinct=method == "find")
        return split, head_of(method, ctx), split.shares(counts_N, ready)

    def _call(
        self,
        method: Method,
        groups: IdGroups,
        values: Sequence[Sequence[Tensor]],
        ctx: StepContext,
    ) -> tuple[SplitCall, list[Answer]]:
        split, head, shares = self._split(method, groups, values, None, ctx)
        return split, self.ask(head, shares, counted=False)

    def _all(self, method: Method, argument: int = 0, id: int = 0) -> list[Reply]:
        head = Head(method=method, argument=argument, id=id)
        return self.servers.ask([(head, [])] * self.servers.count)

    def _numbers(self, method: Method, argument: int = 0) -> list[int]:
        return [int(json.loads(said)) for said, _ in self._all(method, argument)]


def _summed(
    parts: Sequence[tuple[Tensor, Tensor, Tensor]], *, distinct: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, sums and counts."""
    ids, grads, counts = (cat(columns) for columns in zip(*parts, strict=True))
    if distinct:
        return ids, grads, counts
    unique, at_N = torch.unique(ids, return_inverse=True)
    sums = grads.new_zeros(len(unique), grads.shape[1]).index_add_(0, at_N, grads)
    return unique, sums, counts.new_zeros(len(unique)).index_add_(0, at_N, counts)


@dataclass(frozen=True, slots=True, eq=False)
class ServerTicket:
    """A training lookup: distinct ids by server, buffer and table, their rows as they were.

    Servers hold nothing for it: the update names the ids again.

    shares: the same ids by server.
    seen: updates that each server had applied when it read the rows; None of one without ids.
    """

    groups: IdGroups
    counts_N: Tensor
    admitted_N: Tensor
    found_N: Tensor
    event_time_s: int
    shares: tuple[ServerShare, ...]
    seen: tuple[int | None, ...]

    def with_rows(self, rows: Sequence[Tensor]) -> list[ServerShare]:
        """Each server's share of the ids, with the rows [n, D] of its groups."""
        left = iter(rows)
        return [
            replace(share, sets=[rows_by_real([next(left) for _ in share.tables])])
            for share in self.shares
        ]

    def end(self) -> None:
        """Nothing is held."""


class ServerExchange:
    """Lookups of a worker: ids to servers, rows back and pooled here, gradients the same way.

    What a lookup reads may lack updates that are on their way: of other workers, and of this one as
    many as `Servers` allows.

    Args:
        shard: the servers' rows.
    """

    def __init__(self, shard: RowsOverServers) -> None:
        self.shard: Any = shard
        self._rows = shard
        self.specs = shard.specs
        self.collectives: Collectives = LocalCollectives(_CPU)
        self._plans = RequestPlans(shard.send_plan)
        self._brought: weakref.WeakKeyDictionary[Route, _Brought] = weakref.WeakKeyDictionary()

    def send(self, request: Request, *, insert: bool, ctx: StepContext) -> Sending:
        """Make the ids distinct and group them by server."""
        plan = self._plans.send(tuple(request.tables_G.tolist()))
        return Sending(request, insert, ctx, partition(plan, request.ordered))

    def probe(self, sending: Sending) -> Route:
        """Ask the servers: they find or insert the ids, and their rows come back."""
        outgoing = sending.outgoing
        assert outgoing is not None
        method: Method = "lookup" if sending.insert else "find"
        shares = shares_of(outgoing)
        head = head_of(method, sending.ctx)
        answers = self._rows.ask(head, shares, counted=sending.insert)
        groups, counts_N = _groups(shares)
        if sending.insert:
            admitted_N, found_N = (
                torch.cat([answer.flags[k] for answer in answers]) for k in range(2)
            )
            ticket: Any = ServerTicket(
                groups,
                counts_N,
                admitted_N,
                found_N,
                sending.ctx.event_time_s,
                tuple(shares),
                tuple(answer.seen for answer in answers),
            )
        else:
            ticket = ReadTicket(groups, counts_N)
        reals = [REALS.index(layout.real) for layout in outgoing.plan.buffers]
        rows = [cat([answer.rows[real] for answer in answers]) for real in reals]
        route = Route(sending.request, (ticket,), sending.ctx.event_time_s)
        self._brought[route] = _Brought(outgoing, rows)
        return route

    def dispatch(self, request: Request, *, insert: bool, ctx: StepContext) -> Route:
        """`probe(send(...))`."""
        return self.probe(self.send(request, insert=insert, ctx=ctx))

    def fetch(self, route: Route, *, ctx: StepContext) -> None:
        """The rows came with the lookup."""

    def combine(self, route: Route, *, ctx: StepContext) -> tuple[Tensor, ...]:
        """Pool the rows that the lookup brought."""
        brought, received = self._brought[route], self._received_rows(route.request)
        return received.pool(brought.rows, brought.outgoing.offsets_N, route.request.ordered)

    def read(self, request: Request) -> tuple[Tensor, ...]:
        """Rows for inference, pooled; unknown ids read as zeros and are not inserted."""
        ctx = StepContext()
        return self.combine(self.dispatch(request, insert=False, ctx=ctx), ctx=ctx)

    def back(self, route: Route, grads: tuple[Tensor, ...]) -> PendingRecords:
        """A record of the gradients of the lookup's distinct ids."""
        outgoing, rows = self._brought[route].outgoing, self._brought[route].rows
        spread = self._received_rows(route.request).spread(
            grads, [part.numel() for part in rows], outgoing.offsets_N, route.request.ordered
        )
        record = GradRecord(route.ticket, _by_group(outgoing, spread))
        return Arriving(lambda: (record,))

    def _received_rows(self, request: Request) -> ReceivedRows:
        return self._plans.received(request.plan, tuple(request.tables_G.tolist()))


@dataclass(frozen=True, slots=True, eq=False)
class _Brought:
    """What a lookup sent, and the rows that came back, flat, by buffer."""

    outgoing: Outgoing
    rows: list[Tensor]


def _groups(shares: Sequence[ServerShare]) -> tuple[IdGroups, Tensor]:
    """All servers' groups, one after the other, and how often each id occurs."""
    sizes = torch.tensor([0, *(n for share in shares for n in share.sizes)], device="cpu")
    tables = [k for share in shares for k in share.tables]
    tables_G = torch.tensor(tables, dtype=torch.int32, device="cpu")
    groups = IdGroups(cat([share.ids_n for share in shares]), sizes.cumsum(0), tables_G)
    return groups, cat([share.counts_n for share in shares])


def _by_group(outgoing: Outgoing, flats: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Rows [n, D] of the groups of `_groups`."""
    cut = [
        row_views(flat, buffer.sizes_WK.tolist(), layout.dims)
        for layout, buffer, flat in zip(outgoing.plan.buffers, outgoing.buffers, flats, strict=True)
    ]
    return tuple(
        piece
        for server in range(outgoing.plan.world_size)
        for layout, pieces in zip(outgoing.plan.buffers, cut, strict=True)
        for piece in pieces[server * len(layout.dims) : (server + 1) * len(layout.dims)]
    )


def connect(
    addresses: Sequence[str],
    specs: Sequence[TableSpec],
    *,
    wire: Wire | None = None,
    **options: Any,
) -> ServerExchange:
    """The exchange of a worker with the servers at these addresses; options as of `Servers`."""
    return ServerExchange(RowsOverServers(Servers(addresses, specs, **options), wire=wire))
