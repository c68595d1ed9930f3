"""Rows of parameter servers by id, and lookups of a worker that train on them."""

from __future__ import annotations

import json
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor

from shoal.comm.collectives import Arriving, Collectives, LocalCollectives
from shoal.comm.frames import memory, tensor
from shoal.exchange.local import PendingRecords, Request, Route, Sending
from shoal.exchange.partition import (
    Outgoing,
    SendPlan,
    compile_send_plan,
    partition,
    row_views,
)
from shoal.exchange.pooling import RequestPlans
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
from shoal.ps.connections import Asked, Reply, Servers
from shoal.ps.messages import READS, REALS, Head, Method, rows_to_frames
from shoal.ps.server import spread_over
from shoal.table import checks
from shoal.table.hosting import joined_chunk, joined_stats
from shoal.table.rows import real_dtype, weight_dtype
from shoal.table.shard import Found, GradRecord, IdGroups, ReadTicket, StepContext, SummedGrads
from shoal.table.spec import TableSpec
from shoal.table.values import Entry, RowChunk, TableStats

_CPU = torch.device("cpu")
_NOBODY = -1  # of the servers, a worker is none


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

    def fetch(self, route: Route, *, ctx: StepContext) -> None:
        """The rows came with the lookup."""

    def combine(self, route: Route, *, ctx: StepContext) -> tuple[Tensor, ...]:
        """Pool the rows that the lookup brought."""
        brought, received = self._brought[route], self._plans.received(route.request)
        return received.pool(brought.rows, brought.outgoing.offsets_N, route.request.ordered)

    def read(self, request: Request) -> tuple[Tensor, ...]:
        """Rows for inference, pooled; unknown ids read as zeros and are not inserted."""
        ctx = StepContext()
        return self.combine(self.probe(self.send(request, insert=False, ctx=ctx)), ctx=ctx)

    def back(self, route: Route, grads: tuple[Tensor, ...]) -> PendingRecords:
        """A record of the gradients of the lookup's distinct ids."""
        outgoing, rows = self._brought[route].outgoing, self._brought[route].rows
        spread = self._plans.received(route.request).spread(
            grads, [part.numel() for part in rows], outgoing.offsets_N, route.request.ordered
        )
        record = GradRecord(route.ticket, _by_group(outgoing, spread))
        return Arriving(lambda: (record,))


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
