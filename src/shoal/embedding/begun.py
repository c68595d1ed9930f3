"""Batches whose lookup began before their forward: what a pipeline has done ahead."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.errors import InputError, TicketError, describe
from shoal.exchange import Exchange, Request, Route, Sending
from shoal.ledger import GradientLedger
from shoal.ragged import KeyedRagged

__all__ = ["BegunLookups"]


@dataclass(slots=True)
class _Begun:
    """One lookup: its ids are on their way, or its route is there."""

    request: Request
    event_time_s: int
    sending: Sending | None
    route: Route | None = None


class BegunLookups:
    """Lookups of one collection that have begun and that no forward has used yet.

    Each batch object has one at most; it holds its batch, so that the identity stays its own.
    """

    def __init__(self) -> None:
        self._lookups: dict[int, _Begun] = {}

    def __len__(self) -> int:
        return len(self._lookups)

    def check_new(self, batch: KeyedRagged) -> None:
        """Refuse a batch that has begun.

        Raises:
            InputError: it has.
        """
        if id(batch) in self._lookups:
            raise InputError(
                describe(
                    "batch of begin()",
                    got="a batch that has begun and that no forward has used yet",
                    allowed="a batch once",
                    remedy="Build a batch for each step, or call drop_begun() first.",
                )
            )

    def add(self, request: Request, event_time_s: int, sending: Sending) -> None:
        """Remember what was sent for a request."""
        self._lookups[id(request.batch)] = _Begun(request, event_time_s, sending)

    def probe(self, batch: KeyedRagged, exchange: Exchange) -> Route:
        """The route of a batch; the ids are waited for and looked up the first time.

        Raises:
            TicketError: the batch has not begun.
        """
        return self._probed(self._of(batch), exchange)

    def fetch(self, batch: KeyedRagged, exchange: Exchange, ledger: GradientLedger) -> None:
        """Begin to bring a batch's rows here as they are now.

        Raises:
            TicketError: the batch has not begun.
        """
        begun = self._of(batch)
        route = self._probed(begun, exchange)
        exchange.fetch(route, ctx=ledger.context(begun.event_time_s))

    def take(self, batch: KeyedRagged, exchange: Exchange) -> Route | None:
        """The route of a batch that has begun, for its forward; forgotten here. None if not."""
        begun = self._lookups.pop(id(batch), None)
        return None if begun is None else self._probed(begun, exchange)

    def drop(self) -> None:
        """Forget all; their tickets end."""
        self._lookups.clear()

    def _of(self, batch: KeyedRagged) -> _Begun:
        begun = self._lookups.get(id(batch))
        if begun is None:
            raise TicketError(
                describe(
                    "lookup of a batch",
                    got="a batch that has not begun, or that a forward has used",
                    allowed="a batch after begin()",
                    remedy="Call begin(batch), probe(batch), fetch(batch), then the forward.",
                )
            )
        return begun

    def _probed(self, begun: _Begun, exchange: Exchange) -> Route:
        if begun.route is None:
            assert begun.sending is not None
            begun.route = exchange.probe(begun.sending)
            begun.sending = None
        return begun.route
