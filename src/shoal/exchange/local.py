"""The exchange of one process: ids stay where they are.

Probing, reading and pooling are one pass of the local shard, and the way back is a record.
"""

from __future__ import annotations

from torch import Tensor

from shoal.comm.collectives import Collectives, LocalCollectives
from shoal.exchange.request import PendingRecords, ReadyRecords, Request, Route, Sending
from shoal.table.read_ticket import ReadTicket
from shoal.table.shard import GradRecord, IdGroups, Shard, StepContext
from shoal.table.spec import TableSpec

__all__ = ["LocalExchange"]


class LocalExchange:
    """One process owns all rows: nothing is sent."""

    __slots__ = ("_collectives", "_shard")

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self._collectives = LocalCollectives(shard.device)

    @property
    def shard(self) -> Shard:
        """The owner of all rows."""
        return self._shard

    @property
    def specs(self) -> tuple[TableSpec, ...]:
        """The shard's tables."""
        return self._shard.specs

    @property
    def collectives(self) -> Collectives:
        """Those of a world of one."""
        return self._collectives

    def send(self, request: Request, *, insert: bool, ctx: StepContext) -> Sending:
        """Nothing is sent."""
        return Sending(request, insert, ctx)

    def probe(self, sending: Sending) -> Route:
        """Find or insert the ids."""
        return self.dispatch(sending.request, insert=sending.insert, ctx=sending.ctx)

    def dispatch(self, request: Request, *, insert: bool, ctx: StepContext) -> Route:
        """Find or insert the ids, or only remember them."""
        groups = request.groups()
        ticket = self._shard.find_or_init(groups, ctx=ctx) if insert else ReadTicket(groups)
        return Route(request, (ticket,), ctx.event_time_s)

    def fetch(self, route: Route, *, ctx: StepContext) -> None:
        """Nothing to begin: `combine` reads and pools in one pass."""

    def combine(self, route: Route, *, ctx: StepContext) -> tuple[Tensor, ...]:
        """Read and pool the rows as they are now."""
        request, ticket = route.request, route.ticket
        if isinstance(ticket, ReadTicket):
            return self._find(request, ticket.groups)
        ordered = request.ordered
        return self._shard.gather_pooled(
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
        return ReadyRecords((record,))

    def _find(self, request: Request, groups: IdGroups) -> tuple[Tensor, ...]:
        ordered = request.ordered
        return self._shard.find_pooled(groups, request.plan, ordered.offsets_FB1, ordered.weights_N)
