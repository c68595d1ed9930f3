"""What a worker has of parameter servers: their rows by id, and lookups that train on them."""

from __future__ import annotations

import json
import random
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor

from shoal.comm.collectives import Arriving, Collectives, LocalCollectives
from shoal.comm.transport import Client, Frames, Secret
from shoal.errors import ConfigError, ServerLost, ShoalError
from shoal.exchange.partition import (
    Outgoing,
    SendPlan,
    compile_send_plan,
    partition,
    row_views,
)
from shoal.exchange.received import ReceivedRows, RequestPlans
from shoal.exchange.request import PendingRecords, Request, Route, Sending
from shoal.exchange.rows_by_id import check_call
from shoal.exchange.wire import Wire
from shoal.placement import hash_ids, ranks_of
from shoal.ps.messages import (
    REALS,
    UPDATES,
    Head,
    Method,
    memory,
    rows_of_frames,
    rows_of_segments,
    rows_to_frames,
    tensor,
)
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


class Servers:
    """Connections to all servers of a job, as one worker.

    Args:
        addresses: of the servers, by index: tcp://HOST:PORT, or HOST:PORT.
        specs: all tables, as the servers have them.
        worker: this worker's name, of no other; None makes one.
        patience: how long to wait for replies.
        secret: what the servers were given.

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
    ) -> None:
        self.specs = tuple(specs)
        self.count = len(addresses)
        self.worker = worker or uuid.uuid4().hex
        self._patience = patience or Patience()
        self._client = Client([_with_scheme(one) for one in addresses], secret=secret)
        self._numbers = [0] * self.count
        self._updating = threading.Lock()
        self.repeated = 0
        try:
            self.seed = self._greet()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Disconnect. May be called twice."""
        self._client.close()

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

        A request without a reply is sent again; an update then is applied once.

        Raises:
            ServerLost: a server gave no reply, however often it was asked.
            ShoalError: what a server raised.
        """
        if any(request is not None and request[0].method in UPDATES for request in requests):
            with self._updating:
                return self._asked([self._numbered(*each) for each in enumerate(requests)])
        return self._asked(requests)

    def _numbered(self, server: int, request: Asked | None) -> Asked | None:
        if request is None:
            return None
        self._numbers[server] += 1
        return request[0].model_copy(update={"number": self._numbers[server]}), request[1]

    def _asked(self, requests: Sequence[Asked | None]) -> list[Reply]:
        heads = [
            None if one is None else one[0].model_copy(update={"worker": self.worker}).to_bytes()
            for one in requests
        ]

        def send(server: int) -> Future[Reply] | None:
            head, request = heads[server], requests[server]
            if head is None or request is None:
                return None
            return self._client.call(server, head, request[1], timeout_s=self._patience.reply_s)

        under_way = [send(server) for server in range(len(requests))]
        # All are waited for: the next update must not overtake one that a server still works on.
        outcomes = [
            self._outcome(future, partial(send, server)) for server, future in enumerate(under_way)
        ]
        for outcome in outcomes:
            if isinstance(outcome, ShoalError):
                raise outcome
        return [outcome for outcome in outcomes if not isinstance(outcome, ShoalError)]

    def _outcome(
        self, future: Future[Reply] | None, send: Callable[[], Future[Reply] | None]
    ) -> Reply | ShoalError:
        """A reply, or the error in its place; what gets no reply is sent again."""
        if future is None:
            return b"", []
        for pause in range(self._patience.repeats):
            error = future.exception()
            if not isinstance(error, ServerLost):
                break
            self.repeated += 1
            time.sleep(random.uniform(0.5, 1) * min(10, self._patience.pause_s * 2**pause))
            future = send() or future
        error = future.exception()
        if error is None or not isinstance(error, ShoalError):
            return future.result()
        return error


def _with_scheme(address: str) -> str:
    return address if "://" in address else f"tcp://{address}"


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
        split, answers = self._call("find", groups, (), None, StepContext())
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
        self._call("apply", groups, values, counts_N, ctx)

    def assign(self, groups: IdGroups, weights: Sequence[Tensor], *, ctx: StepContext) -> None:
        """Upsert weights; of duplicates the last wins."""
        self._call("assign", groups, [weights], None, ctx)

    def assign_add(self, groups: IdGroups, deltas: Sequence[Tensor], *, ctx: StepContext) -> None:
        """Add to rows; a missing id is initialised first. Duplicates add up."""
        self._call("assign_add", groups, [deltas], None, ctx)

    def reinitialize(self, groups: IdGroups, *, ctx: StepContext) -> Tensor:
        """Initial value and state again: int32 [N] in input order: 1 existed, 0 inserted,
        -1 of a table that does not exist.
        """
        split, answers = self._call("reinitialize", groups, (), None, ctx)
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
            _chunk(self.specs[table], frames) for _, frames in self._all("export", argument=table)
        ]
        return joined_chunk(self.specs[table], [(hosted, chunk) for chunk in chunks])

    def check(self) -> None:
        """Nothing is found later than its call."""

    def apply(self, records: Sequence[GradRecord], *, ctx: StepContext) -> None:
        """Sum the gradients per row over all records; one optimizer step per admitted row."""
        self.apply_summed(self.sum_grads(records), records, ctx=ctx)

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
            _cat(summed.ids),
            torch.tensor([0, *sizes], device="cpu").cumsum(0),
            torch.tensor(summed.tables, dtype=torch.int32, device="cpu"),
        )
        tickets = [cast(ServerTicket, record.ticket) for record in records]
        latest_s = max([ctx.event_time_s, *(ticket.event_time_s for ticket in tickets)])
        counts_N = _cat(summed.counts)
        self.apply_ids(groups, summed.sums, counts_N, ctx=replace(ctx, event_time_s=latest_s))
        for ticket in tickets:
            ticket.end()

    def ask(self, head: Head, parts: Sequence[_Part], *, counted: bool, sets: int) -> list[Answer]:
        """Each server's part of a call; what it replies. Who has no ids is not asked."""
        reply = self.wire.rows if head.method in ("find", "lookup") else None
        kind = self.wire.grads if head.method == "apply" else None
        same = {"counted": counted, "sets": sets, "wire": kind, "reply": reply}
        requests: list[Asked | None] = []
        for part in parts:
            if not part.ids_n.numel():
                requests.append(None)
                continue
            own = head.model_copy(update={**same, "tables": part.tables, "sizes": part.sizes})
            frames = [memory(part.ids_n)]
            if counted:
                frames.append(memory(part.counts_n.to(torch.int32)))
            segments = [own.segments(self.specs, real) for real in REALS]
            for flats in part.sets:
                frames += rows_to_frames(segments, flats, kind)
            requests.append((own, frames))
        replies = self.servers.ask(requests)
        return [
            _answer(head.method, part, frames, self.specs, reply)
            for part, (_, frames) in zip(parts, replies, strict=True)
        ]

    def _call(
        self,
        method: Method,
        groups: IdGroups,
        values: Sequence[Sequence[Tensor]],
        counts_N: Tensor | None,
        ctx: StepContext,
    ) -> tuple[_Split, list[Answer]]:
        named = "apply_ids" if method == "apply" else method
        ready = check_call(named, groups, values, counts_N, ctx, self.specs, _CPU)
        split = _Split(groups, self.specs, self.servers.count)
        parts = split.parts(counts_N, ready)
        counted = counts_N is not None
        return split, self.ask(head_of(method, ctx), parts, counted=counted, sets=len(ready))

    def _all(self, method: Method, argument: int = 0, id: int = 0) -> list[Reply]:
        head = Head(method=method, argument=argument, id=id)
        return self.servers.ask([(head, [])] * self.servers.count)

    def _numbers(self, method: Method, argument: int = 0) -> list[int]:
        return [int(json.loads(said)) for said, _ in self._all(method, argument)]


def head_of(method: Method, ctx: StepContext) -> Head:
    """The head of a request of a step."""
    return Head(
        method=method,
        step=ctx.global_step,
        event_time_s=ctx.event_time_s,
        nan_policy=ctx.nan_policy,
        nan_clip=ctx.nan_clip,
        rates=dict(ctx.learning_rates),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """One server's share of a call: groups by buffer and table, and sets of flat rows by dtype."""

    tables: tuple[int, ...]
    sizes: tuple[int, ...]
    ids_n: Tensor
    counts_n: Tensor
    sets: list[list[Tensor]]


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """What a server replied: flat rows of each dtype of `REALS`, and flags of each id."""

    rows: list[Tensor]
    flags: list[Tensor]


class _Split:
    """A call's groups by server: which of their positions go to which, in order.

    Groups of tables that do not exist go nowhere.
    """

    def __init__(self, groups: IdGroups, specs: Sequence[TableSpec], servers: int) -> None:
        self.groups, self.specs, self.servers = groups, specs, servers
        cuts = pairwise(groups.splits_G1.tolist())
        found = enumerate(zip(cuts, groups.tables_G.tolist(), strict=True))
        self.spans = [(n, *cut, k) for n, (cut, k) in found if 0 <= k < len(specs)]
        self.orders: list[Tensor | None] = []  # None: as they are, for one server has all
        self.sizes: list[list[int]] = []
        for _, start, stop, table in self.spans:
            hashes_n = hash_ids(specs[table].hash_name, groups.ids_N[start:stop])
            owner_n = ranks_of(hashes_n, servers)
            sizes = torch.bincount(owner_n, minlength=servers).tolist()
            self.sizes.append(sizes)
            alone = max(sizes) == stop - start
            self.orders.append(None if alone else owner_n.argsort(stable=True))

    def parts(self, counts_N: Tensor | None, sets: Sequence[Sequence[Tensor]]) -> list[_Part]:
        """Each server's share of ids, occurrences and rows."""
        ids = self._by_server(self._of_groups(self.groups.ids_N))
        counts = ids if counts_N is None else self._by_server(self._of_groups(counts_N))
        rows = [self._by_server([one[n] for n, *_ in self.spans]) for one in sets]
        tables = tuple(table for *_, table in self.spans)
        return [
            _Part(
                tables,
                tuple(sizes[server] for sizes in self.sizes),
                _cat(ids[server]),
                _cat(counts[server]),
                [_by_real(one[server]) for one in rows],
            )
            for server in range(self.servers)
        ]

    def rows(self, answers: Sequence[Answer]) -> tuple[Tensor, ...]:
        """Rows [n, D] of each group."""
        pieces: list[list[Tensor]] = [[] for _ in self.spans]
        for server, answer in enumerate(answers):
            for real, flat in zip(REALS, answer.rows, strict=True):
                own = [
                    (g, (self.sizes[g][server], self.specs[table].dim))
                    for g, (*_, table) in enumerate(self.spans)
                    if real_dtype(self.specs[table]) is real
                ]
                views = rows_of_segments(flat, [segment for _, segment in own])
                for (g, _), view in zip(own, views, strict=True):
                    pieces[g].append(view)
        return tuple(self._in_order(g, parts) for g, parts in enumerate(pieces))

    def flags(self, answers: Sequence[Answer], other: int, dtype: torch.dtype) -> Tensor:
        """Each position's flag; `other` of groups that went nowhere."""
        flags_N = torch.full_like(self.groups.ids_N, other, dtype=dtype)
        sizes = [[one[server] for one in self.sizes] for server in range(self.servers)]
        cut = [torch.split(a.flags[0], cut) for a, cut in zip(answers, sizes, strict=True)]
        for g, (_, start, stop, _) in enumerate(self.spans):
            flags_N[start:stop] = self._in_order(g, [parts[g] for parts in cut])
        return flags_N

    def _of_groups(self, values_N: Tensor) -> list[Tensor]:
        return [values_N[start:stop] for _, start, stop, _ in self.spans]

    def _by_server(self, values: Sequence[Tensor]) -> list[list[Tensor]]:
        """Of each server, its part of each group's values."""
        cut = [
            torch.split(part if order is None else part[order], sizes)
            for part, order, sizes in zip(values, self.orders, self.sizes, strict=True)
        ]
        return [[parts[server] for parts in cut] for server in range(self.servers)]

    def _in_order(self, group: int, parts: Sequence[Tensor]) -> Tensor:
        order, joined = self.orders[group], _cat(parts)
        if order is None:
            return joined
        return torch.empty_like(joined).index_copy_(0, order, joined)


def _by_real(parts: Sequence[Tensor]) -> list[Tensor]:
    """Rows of each dtype of `REALS`, one after the other."""
    own = [[part.reshape(-1) for part in parts if part.dtype is real] for real in REALS]
    return [
        _cat(some) if some else torch.empty(0, dtype=r, device="cpu")
        for some, r in zip(own, REALS, strict=True)
    ]


def _parts_of(outgoing: Outgoing) -> list[_Part]:
    """Each server's share of a lookup's distinct ids, by buffer and table."""
    layouts = outgoing.plan.buffers
    sizes = [buffer.sizes_WK.sum(1).tolist() for buffer in outgoing.buffers]
    ids = [torch.split(b.ids_N, cut) for b, cut in zip(outgoing.buffers, sizes, strict=True)]
    counts = [torch.split(b.counts_N, cut) for b, cut in zip(outgoing.buffers, sizes, strict=True)]
    return [
        _Part(
            tuple(table.table for layout in layouts for table in layout.tables),
            tuple(n for buffer in outgoing.buffers for n in buffer.sizes_WK[server].tolist()),
            _cat([part[server] for part in ids]),
            _cat([part[server] for part in counts]),
            [],
        )
        for server in range(outgoing.plan.world_size)
    ]


def _answer(
    method: Method, part: _Part, frames: Frames, specs: Sequence[TableSpec], kind: Any
) -> Answer:
    """Nothing was asked of a server without ids."""
    if method not in ("find", "lookup", "reinitialize"):
        return Answer([], [])
    count = sum(part.sizes)
    flag = torch.int32 if method == "reinitialize" else torch.bool
    flags = {"find": 1, "lookup": 2, "reinitialize": 1}[method]
    if not frames:
        none = [torch.empty(0, dtype=real, device="cpu") for real in REALS]
        return Answer(none, [torch.empty(0, dtype=flag, device="cpu")] * flags)
    head = Head(method="find", tables=part.tables, sizes=part.sizes)
    rows: list[Tensor] = []
    if method != "reinitialize":
        segments = [head.segments(specs, real) for real in REALS]
        rows = rows_of_frames(segments, frames[: len(REALS)], kind)
    return Answer(
        rows, [tensor(frame, flag, count, "flags") for frame in frames[len(frames) - flags :]]
    )


def _cat(parts: Sequence[Tensor]) -> Tensor:
    """Of ids, if there are none."""
    if not parts:
        return torch.empty(0, dtype=torch.int64, device="cpu")
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _chunk(spec: TableSpec, frames: Frames) -> RowChunk:
    rows = frames[0].nbytes // 8
    wide = (weight_dtype(spec), spec.dim), (real_dtype(spec), spec.state_width)
    weights, state = (
        tensor(frame, dtype, rows * width, "rows").view(rows, width)
        for frame, (dtype, width) in zip(frames[1:3], wide, strict=True)
    )
    ids, versions, last_seen_s, counts = (
        tensor(frame, torch.int64, rows, "rows") for frame in (frames[0], *frames[3:])
    )
    return RowChunk(spec.name, ids, weights, state, versions, last_seen_s, counts)


def _summed(
    parts: Sequence[tuple[Tensor, Tensor, Tensor]], *, distinct: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, sums and counts."""
    ids, grads, counts = (_cat(columns) for columns in zip(*parts, strict=True))
    if distinct:
        return ids, grads, counts
    unique, at_N = torch.unique(ids, return_inverse=True)
    sums = grads.new_zeros(len(unique), grads.shape[1]).index_add_(0, at_N, grads)
    return unique, sums, counts.new_zeros(len(unique)).index_add_(0, at_N, counts)


@dataclass(frozen=True, slots=True, eq=False)
class ServerTicket:
    """A training lookup: distinct ids by server, buffer and table, their rows as they were.

    Servers hold nothing for it: the update names the ids again.
    """

    groups: IdGroups
    counts_N: Tensor
    admitted_N: Tensor
    found_N: Tensor
    event_time_s: int

    def end(self) -> None:
        """Nothing is held."""


class ServerExchange:
    """Lookups of a worker: ids to servers, rows back and pooled here, gradients the same way.

    What a lookup reads may lack updates of other workers that are on their way; never one of this
    worker's own.

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
        parts = _parts_of(outgoing)
        head = head_of(method, sending.ctx)
        answers = self._rows.ask(head, parts, counted=sending.insert, sets=0)
        groups, counts_N = _groups(parts)
        if sending.insert:
            admitted_N, found_N = (
                torch.cat([answer.flags[k] for answer in answers]) for k in range(2)
            )
            ticket: Any = ServerTicket(
                groups, counts_N, admitted_N, found_N, sending.ctx.event_time_s
            )
        else:
            ticket = ReadTicket(groups, counts_N)
        reals = [REALS.index(layout.real) for layout in outgoing.plan.buffers]
        rows = [_cat([answer.rows[real] for answer in answers]) for real in reals]
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


def _groups(parts: Sequence[_Part]) -> tuple[IdGroups, Tensor]:
    """All servers' groups, one after the other, and how often each id occurs."""
    sizes = torch.tensor([0, *(n for part in parts for n in part.sizes)], device="cpu")
    tables = [k for part in parts for k in part.tables]
    tables_G = torch.tensor(tables, dtype=torch.int32, device="cpu")
    groups = IdGroups(_cat([part.ids_n for part in parts]), sizes.cumsum(0), tables_G)
    return groups, _cat([part.counts_n for part in parts])


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
