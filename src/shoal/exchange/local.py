"""How a batch's ids reach the shards that own them; the exchange of one process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from shoal.comm.collectives import Arriving, Collectives, LocalCollectives, PendingSizes
from shoal.exchange.partition import Outgoing, Transfer
from shoal.lookup import PoolPlan
from shoal.ragged import KeyedRagged
from shoal.table.shard import GradRecord, IdGroups, ReadTicket, Shard, StepContext, Ticket
from shoal.table.spec import TableSpec


class Request(NamedTuple):
    """One batch, in the order a plan pools it.

    Args:
        batch: the batch as the user gave it; a recomputed forward has the same object.
        ordered: the same with the plan's features in the plan's order.
        tables_G: int32 [G], each feature's table in `Exchange.specs`.
        plan: how the rows are pooled.
    """

    batch: KeyedRagged
    ordered: KeyedRagged
    tables_G: Tensor
    plan: PoolPlan

    def groups(self) -> IdGroups:
        """Its ids, one group per feature."""
        return IdGroups(self.ordered.values_N, self.ordered.host_splits, self.tables_G)


class Sending(NamedTuple):
    """A dispatch that has begun: what `Exchange.send` returns and `probe` finishes.

    Args:
        request, insert, ctx: what was sent, for what.
        outgoing: the ids as they are sent; None in one process.
        sizes: how many ids come from each rank, on their way; None in one process.
    """

    request: Request
    insert: bool
    ctx: StepContext
    outgoing: Outgoing | None = None
    sizes: PendingSizes | None = None


# No slots: routes are held weakly, and a weakref slot needs Python 3.11.
@dataclass(eq=False)
class Route:
    """What was sent where: a request, and the tickets its rows are held under.

    Args:
        request: what this rank asked for.
        tickets: of the rows that this rank's shard gives: one, or one per sender; none where it
            holds no table of the request (and senders do not step one by one).
        event_time_s: latest event time of any sender.
        transfer: ids, sizes and splits of the exchange; None in one process.
        fetched: rows on their way for the next `combine`, as the exchange keeps them.
        places: which row each position reads, as the exchange keeps it.
    """

    request: Request
    tickets: tuple[Ticket, ...]
    event_time_s: int
    transfer: Transfer | None = None
    fetched: Any = None
    places: Any = None

    @property
    def ticket(self) -> Ticket:
        """The first ticket; the only one, but for one step per sender."""
        return self.tickets[0]


PendingRecords = Arriving[tuple[GradRecord, ...]]
"""Gradients on their way to their owner: one record per ticket of the route, in their order."""


class Exchange(Protocol):
    """From ids to pooled rows and back.

    With several ranks every method is collective: all ranks call it, in the same order.
    """

    @property
    def shard(self) -> Shard:
        """The shard of this process."""

    @property
    def specs(self) -> tuple[TableSpec, ...]:
        """The whole tables that requests name; the shard may hold parts of them."""

    @property
    def collectives(self) -> Collectives:
        """What carries ids, rows and gradients between ranks."""

    def send(self, request: Request, *, insert: bool, ctx: StepContext) -> Sending:
        """Begin a dispatch: make ids distinct, group them by owner, send owners their number.

        insert: owners admit and insert unknown ids now; else they only read, and the rows come
        into being when gradients are applied.
        """

    def probe(self, sending: Sending) -> Route:
        """Finish it: ids reach their owners, who find or insert them.

        Raises:
            TableFull: this rank's shard has no room; nothing was inserted (with one lookup per
                sender: of this and later senders). Other ranks fail at their next collective.
            CollectiveFailed: another rank failed.
        """

    def fetch(self, route: Route, *, ctx: StepContext) -> None:
        """Begin to read the route's rows as they are now, for its next `combine`."""

    def combine(self, route: Route, *, ctx: StepContext) -> tuple[Tensor, ...]:
        """The route's rows as they are now, or were at `fetch`: one [B, width] per output."""

    def read(self, request: Request) -> tuple[Tensor, ...]:
        """Rows for inference, pooled; unknown ids read as zeros and are not inserted."""

    def back(self, route: Route, grads: tuple[Tensor, ...]) -> PendingRecords:
        """Send the gradients of the outputs the same way back; the owner's records of them."""


class LocalExchange:
    """One process owns all rows: nothing is sent."""

    __slots__ = ("collectives", "shard", "specs")

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        self.specs = shard.specs
        self.collectives: Collectives = LocalCollectives(shard.device)

    def send(self, request: Request, *, insert: bool, ctx: StepContext) -> Sending:
        """Nothing is sent."""
        return Sending(request, insert, ctx)

    def probe(self, sending: Sending) -> Route:
        """Find or insert the ids, or only remember them."""
        request, insert, ctx, *_ = sending
        groups = request.groups()
        ticket = self.shard.find_or_init(groups, ctx=ctx) if insert else ReadTicket(groups)
        return Route(request, (ticket,), ctx.event_time_s)

    def fetch(self, route: Route, *, ctx: StepContext) -> None:
        """Nothing to begin: `combine` reads and pools in one pass."""

    def combine(self, route: Route, *, ctx: StepContext) -> tuple[Tensor, ...]:
        """Read and pool the rows as they are now."""
        request, ticket = route.request, route.ticket
        if isinstance(ticket, ReadTicket):
            return self._find(request, ticket.groups)
        ordered = request.ordered
        return self.shard.gather_pooled(
            ticket, request.plan, ordered.offsets_FB1, ordered.weights_N, ctx=ctx
        )

    def read(self, request: Request) -> tuple[Tensor, ...]:
        """Read and pool, for inference."""
        return self._find(request, request.groups())

    def back(self, route: Route, grads: tuple[Tensor, ...]) -> PendingRecords:
        """A record of the gradients of the outputs, as they are."""
        request, ordered = route.request, route.request.ordered
        record = GradRecord(
            route.ticket, grads, request.plan, ordered.offsets_FB1, ordered.weights_N
        )
        return Arriving(lambda: (record,))

    def _find(self, request: Request, groups: IdGroups) -> tuple[Tensor, ...]:
        ordered = request.ordered
        return self.shard.find_pooled(groups, request.plan, ordered.offsets_FB1, ordered.weights_N)
