"""An exchange that is made when the first batch comes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from shoal.comm.collectives import Collectives
from shoal.exchange import Exchange, PendingRecords, Request, Route, Sending
from shoal.table.shard import Shard, StepContext
from shoal.table.spec import TableSpec

__all__ = ["LaterExchange"]


class LaterExchange:
    """Stands in for an exchange between ranks until it is needed.

    Args:
        shard: this rank's.
        specs: the whole tables.
        make: makes the exchange, or returns the one that was made.
    """

    def __init__(
        self, shard: Shard, specs: Sequence[TableSpec], make: Callable[[], Exchange]
    ) -> None:
        self._shard = shard
        self._specs = tuple(specs)
        self._make = make

    @property
    def shard(self) -> Shard:
        """The rows this rank holds."""
        return self._shard

    @property
    def specs(self) -> tuple[TableSpec, ...]:
        """The whole tables."""
        return self._specs

    @property
    def collectives(self) -> Collectives:
        """See `Exchange`; makes it, as all that follows."""
        return self._make().collectives

    def send(self, request: Request, *, insert: bool, ctx: StepContext) -> Sending:
        """See `Exchange`."""
        return self._make().send(request, insert=insert, ctx=ctx)

    def probe(self, sending: Sending) -> Route:
        """See `Exchange`."""
        return self._make().probe(sending)

    def dispatch(self, request: Request, *, insert: bool, ctx: StepContext) -> Route:
        """See `Exchange`."""
        return self._make().dispatch(request, insert=insert, ctx=ctx)

    def fetch(self, route: Route, *, ctx: StepContext) -> None:
        """See `Exchange`."""
        self._make().fetch(route, ctx=ctx)

    def combine(self, route: Route, *, ctx: StepContext) -> tuple[Tensor, ...]:
        """See `Exchange`."""
        return self._make().combine(route, ctx=ctx)

    def read(self, request: Request) -> tuple[Tensor, ...]:
        """See `Exchange`."""
        return self._make().read(request)

    def back(self, route: Route, grads: tuple[Tensor, ...]) -> PendingRecords:
        """See `Exchange`."""
        return self._make().back(route, grads)
