"""The exchange between ranks: ids to their owners, rows back, and gradients the same way.

One lookup of a batch, on every rank:

1. `send`: ids made distinct per hosted table and grouped by owner; the sizes are exchanged.
2. `probe`: ids and their counts reach their owners, who find or insert them as one lookup.
3. `fetch`: owners read the rows and send them back; `combine` pools them.
4. `back`: gradients per distinct id go to the owners, which keep them with the lookup's ticket.

Tables that every rank holds are read at home; their ids and gradients go to every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import Tensor

from shoal.comm.collectives import Arriving, Collectives, Pending
from shoal.comm.consensus import latest_time, said
from shoal.errors import CollectiveFailed, ConfigError, DTypeError, ShoalError, known_name
from shoal.exchange.local import PendingRecords, Request, Route, Sending
from shoal.exchange.partition import (
    SendPlan,
    Transfer,
    compile_send_plan,
    flat_rows,
    ids_by_sender,
    partition,
    received_ids,
    reply_buffers,
    rows_of_groups,
)
from shoal.exchange.pooling import RequestPlans
from shoal.exchange.wire import RowBuffer, Wire, send_rows
from shoal.placement import Placement
from shoal.table import shard as scalars
from shoal.table.hosting import hosted_specs
from shoal.table.shard import GradRecord, ReadTicket, Shard, StepContext, Ticket
from shoal.table.spec import TableSpec

if TYPE_CHECKING:
    from shoal.exchange.pooling_cuda import Places


GradReduce = Literal["mean", "sum"]

_IDS = "exchange of ids"


class AllToAllExchange:
    """Rows live on the rank that a placement names; every method is collective.

    Args:
        shard: this rank's; it holds `hosted_specs(specs, placement, rank)`.
        placement: where every table's rows are, the same on every rank.
        specs: the whole tables, the same on every rank.
        collectives: of all ranks, used by this exchange alone.
        grad_reduce: "mean" divides every gradient by the number of ranks, as DDP does with dense
            ones; "sum" is Monolith's.
        per_sender_steps: one lookup, and one record of gradients, per sender, so that the owner
            can step once for each: Monolith's order of things.
        wire: how rows and gradients travel; as they are, by default.

    Attributes:
        shard, placement, specs, wire: as given.
        on_transfer, on_gradients: called with what crosses the wire for each training lookup, and
            when its gradients are sent; None: nobody asks.

    Raises:
        ConfigError: the shard, the placement and the ranks do not fit each other.
        UnknownName: no such grad_reduce.
    """

    def __init__(
        self,
        shard: Shard,
        placement: Placement,
        specs: Sequence[TableSpec],
        collectives: Collectives,
        *,
        grad_reduce: GradReduce = "mean",
        per_sender_steps: bool = False,
        wire: Wire | None = None,
    ) -> None:
        known_name("grad_reduce", grad_reduce, get_args(GradReduce))
        self.shard = shard
        self.placement = placement
        self.specs = tuple(specs)
        self._collectives = collectives
        self._check_fit()
        self._scale = 1.0 / collectives.world_size if grad_reduce == "mean" else 1.0
        self._per_sender = per_sender_steps
        self.wire = Wire() if wire is None else wire
        mine = shard.specs, collectives.rank
        self._plans = RequestPlans(partial(compile_send_plan, self.specs, placement, *mine))
        self._in_flight: Pending | None = None
        self._backs = 0
        self._names = ", ".join(spec.name for spec in self.specs)
        self.on_transfer: Callable[[Transfer], None] | None = None
        self.on_gradients: Callable[[Transfer], None] | None = None
        self._left: CollectiveFailed | None = None

    def _check_fit(self) -> None:
        ranks = self._collectives.world_size
        if self.placement.world_size != ranks:
            got, allowed = self.placement.world_size, f"the number of ranks, {ranks}"
            remedy = "Make the placement for this job."
            raise ConfigError("world_size of the placement", got, allowed, remedy)
        wanted = hosted_specs(self.specs, self.placement, self._collectives.rank)
        missing = [spec.name for spec in wanted if spec not in self.shard.specs]
        if missing:
            raise ConfigError(
                f"tables of the shard of rank {self._collectives.rank}",
                got=f"no {', '.join(missing)} as the placement wants them",
                allowed="the tables that hosted_specs gives for this rank",
                remedy="Make the shard with hosted_specs(specs, placement, rank).",
            )

    @property
    def collectives(self) -> Collectives:
        """What carries ids, rows and gradients.

        Raises:
            CollectiveFailed: this rank left a lookup that the others are still in; what it sent
                them now would be taken for a part of that.
        """
        if self._left is not None:
            raise self._left
        return self._collectives

    def send(self, request: Request, *, insert: bool, ctx: StepContext) -> Sending:
        """Group a request's distinct ids by owner and begin to exchange sizes.

        Raises:
            InputError: a time outside 0..2^32-1; nothing was sent.
            DTypeError: ids on another device than the shard; nothing was sent.
        """
        return self._send(request, insert, ctx, kind=1 + insert)

    def _send(self, request: Request, insert: bool, ctx: StepContext, *, kind: int) -> Sending:
        scalars.event_time(ctx.event_time_s)
        ids_N = request.ordered.values_N
        if ids_N.device != self.shard.device:
            remedy = "Move the batch to the shard's device."
            raise DTypeError("device of a request", ids_N.device, self.shard.device, remedy)
        self.collectives.step = ctx.global_step
        outgoing = partition(self.send_plan(tuple(request.tables_G.tolist())), request.ordered)
        step = ctx.global_step if kind else 0
        header = outgoing.header(said(ctx.event_time_s, backs=self._backs, step=step, kind=kind))
        sizes = self._collectives.exchange_sizes(header, what="exchange of id counts")
        return Sending(request, insert, ctx, outgoing, sizes)

    def probe(self, sending: Sending) -> Route:
        """Send the ids; find or insert those that came here.

        Raises:
            TableFull: this rank's shard is full; nothing was inserted here. Unless every rank
                holds all rows, the exchange is of no use any more: others wait for this rank's.
            CollectiveFailed: another rank failed.
        """
        ctx = sending.ctx
        self.collectives.step = ctx.global_step
        transfer = self._transfer(sending)
        if self.on_transfer is not None:
            self.on_transfer(transfer)
        here = StepContext(global_step=ctx.global_step, event_time_s=transfer.event_time_s)
        tickets = tuple(
            self._inserted(transfer, ids, here) if sending.insert else ids
            for ids in self._lookups(transfer)
        )
        return Route(sending.request, tickets, transfer.event_time_s, transfer)

    def fetch(self, route: Route, *, ctx: StepContext) -> None:
        """Begin to send back the route's rows as they are now."""
        route.fetched = self._sent_rows(route, ctx)

    def combine(self, route: Route, *, ctx: StepContext) -> tuple[Tensor, ...]:
        """Pool the route's rows: what `fetch` began, or the rows as they are now."""
        fetched: _Fetched | None = route.fetched
        if fetched is None:
            fetched = self._sent_rows(route, ctx)
        elif fetched.step == ctx.global_step:
            route.fetched = None
        # Else steps have changed the rows: a forward that is computed again reads these once more.
        return self._pool(route.request, fetched, route.places)

    def read(self, request: Request) -> tuple[Tensor, ...]:
        """Rows for inference, pooled; unknown ids read as zeros and are not inserted."""
        ctx = StepContext(global_step=self.collectives.step)
        transfer = self._transfer(self._send(request, False, ctx, kind=0))
        found = self._collectives.all_to_all(transfer.id_parts(None), what=_IDS).wait()
        rows = []
        if transfer.plan.here_G.numel():
            ids = received_ids(transfer, found, counted=False)
            rows = [self.shard.find(ids.groups).weights]
        sent = self._send_rows(transfer, flat_rows(transfer, rows), ctx.global_step)
        return self._pool(request, sent)

    def back(self, route: Route, grads: tuple[Tensor, ...]) -> PendingRecords:
        """Send gradients per distinct id to the owners; their records, once they have arrived."""
        transfer, request = _transfer_of(route), route.request
        self._backs += 1
        if self.on_gradients is not None:
            self.on_gradients(transfer)
        if self._in_flight is not None:
            self._in_flight.wait()
        spread = self._plans.received(request).spread(
            grads,
            transfer.floats(),
            transfer.outgoing.offsets_N,
            request.ordered,
            route.places,
        )
        buffers = [
            RowBuffer(data, layout.dims, *transfer.sizes_of(layout), to_all=layout.replicated)
            for layout, data in zip(transfer.plan.buffers, spread, strict=True)
        ]
        # Kept here until it has arrived: nobody may wait for gradients that are dropped.
        pending = self._in_flight = send_rows(
            self.collectives, buffers, self.wire.grads, what="exchange of gradients"
        )

        def records() -> tuple[GradRecord, ...]:
            tickets = route.tickets
            by_ticket = rows_of_groups(transfer, pending.wait(), len(tickets))
            return tuple(
                GradRecord(ticket, grads, scale=self._scale)
                for ticket, grads in zip(tickets, by_ticket, strict=True)
            )

        return Arriving(records, repeated=True)

    def _transfer(self, sending: Sending) -> Transfer:
        if sending.outgoing is None or sending.sizes is None:
            raise _foreign("a sending")
        sizes = sending.sizes.wait()
        words = sizes.received_WX[:, -1].tolist()
        latest_s = latest_time(words, self._collectives.rank, self._names)
        return Transfer(sending.outgoing, sizes, latest_s)

    def _lookups(self, transfer: Transfer) -> tuple[ReadTicket, ...]:
        """One lookup of what came here, or one per sender; none where no table is."""
        found = self._collectives.all_to_all(transfer.id_parts(torch.int32), what=_IDS).wait()
        if self._per_sender:
            return ids_by_sender(transfer, found)
        if not transfer.plan.here_G.numel():
            return ()
        return (received_ids(transfer, found, counted=True),)

    def _inserted(self, transfer: Transfer, ids: ReadTicket, ctx: StepContext) -> Ticket:
        try:
            return self.shard.find_or_init(ids.groups, ids.counts_N, ctx=ctx)
        except ShoalError as error:
            # If every rank holds all rows, all of them fail alike.
            alike = all(layout.replicated for layout in transfer.plan.buffers)
            if self._collectives.world_size > 1 and not alike:
                self._left = CollectiveFailed(
                    f"exchange between ranks on rank {self._collectives.rank}",
                    got="a rank that left a lookup at step "
                    f"{ctx.global_step}: {type(error).__name__}: {error}",
                    allowed="ranks that take part in every lookup to its end",
                    remedy="Start all ranks again from the last checkpoint, with more room.",
                )
            raise

    def _sent_rows(self, route: Route, ctx: StepContext) -> _Fetched:
        self.collectives.step = ctx.global_step
        rows = [
            self.shard.find(ticket.groups).weights
            if isinstance(ticket, ReadTicket)
            else self.shard.gather(ticket, ctx=ctx)
            for ticket in route.tickets
        ]
        transfer = _transfer_of(route)
        fetched = self._send_rows(transfer, flat_rows(transfer, rows), ctx.global_step)
        if route.places is None:
            # While rows are on their way.
            received = self._plans.received(route.request)
            route.places = received.places(transfer.outgoing.offsets_N, route.request.ordered)
        return fetched

    def _send_rows(self, transfer: Transfer, rows: Sequence[Tensor], step: int) -> _Fetched:
        """Begin to send each buffer's rows to who asked; rows of replicated tables stay."""
        away, home = reply_buffers(transfer, rows)
        pending = send_rows(self._collectives, away, self.wire.rows, what="exchange of rows")
        return _Fetched(transfer, pending, home, step)

    def _pool(
        self, request: Request, fetched: _Fetched, places: Places | None = None
    ) -> tuple[Tensor, ...]:
        rows = (*fetched.pending.wait(), *fetched.home)
        offsets_N = fetched.transfer.outgoing.offsets_N
        return self._plans.received(request).pool(rows, offsets_N, request.ordered, places)

    def send_plan(self, tables_G: tuple[int, ...]) -> SendPlan:
        """The buffers of calls whose groups are of these tables."""
        return self._plans.send(tables_G)


@dataclass(frozen=True, slots=True, eq=False)
class _Fetched:
    """Rows on their way, by buffer, and those that are at home; as they were at a step."""

    transfer: Transfer
    pending: Pending
    home: tuple[Tensor, ...]
    step: int


def _transfer_of(route: Route) -> Transfer:
    if route.transfer is None:
        raise _foreign("a route")
    return route.transfer


def _foreign(what: str) -> ConfigError:
    return ConfigError(
        f"{what} in an exchange between ranks",
        got="one of another exchange",
        allowed="what this exchange's own calls returned",
        remedy="Use one exchange for all steps of a lookup.",
    )
