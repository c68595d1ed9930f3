"""How a batch's ids reach the shards that own them, and how gradients go back.

`Exchange` is all that the embedding knows of where rows live. A `Route` is the frozen record of
one dispatch; reading and the way back accept only that. In one process ids stay where they are:
probing, reading and pooling are one pass of the local shard, and the way back is a record.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from shoal.ragged import KeyedRagged
from shoal.table.shard import GradRecord, IdGroups, PoolPlan, Shard, StepContext, Ticket

__all__ = ["Exchange", "LocalExchange", "Request", "Route"]


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One batch, in the order a plan pools it.

    Args:
        batch: the batch as the user gave it; its identity tells a recomputed forward from a new.
        ordered: the same with the plan's features in the plan's order.
        tables_G: int32 [G], each feature's table in `Shard.specs`.
        plan: how the rows are pooled.
    """

    batch: KeyedRagged
    ordered: KeyedRagged
    tables_G: Tensor
    plan: PoolPlan

    def groups(self) -> IdGroups:
        """Its ids, one group per feature."""
        return IdGroups(self.ordered.values_N, self.ordered.host_splits, self.tables_G)


# No slots: routes are held weakly, and a weakref slot needs Python 3.11.
@dataclass(frozen=True, eq=False)
class Route:
    """What was sent where: a request, and the ticket its rows are held under."""

    request: Request
    ticket: Ticket
    event_time_s: int


class Exchange(Protocol):
    """From ids to pooled rows and back."""

    @property
    def shard(self) -> Shard:
        """The shard of this process."""
        ...

    def dispatch(self, request: Request, *, insert: bool, ctx: StepContext) -> Route:
        """Send ids to their owners, for training.

        insert: owners admit and insert unknown ids now; else they only read, and the rows come
        into being when gradients are applied.

        Raises:
            TableFull: an owner has no room; nothing was inserted.
        """
        ...

    def combine(self, route: Route, *, ctx: StepContext) -> tuple[Tensor, ...]:
        """The route's rows as they are now, pooled: one [B, width] per output."""
        ...

    def read(self, request: Request) -> tuple[Tensor, ...]:
        """Rows for inference, pooled; unknown ids read as zeros and are not inserted."""
        ...

    def back(self, route: Route, grads: tuple[Tensor, ...]) -> GradRecord:
        """Send the gradients of the outputs the same way back; the owner's record of them."""
        ...


class _ReadTicket:
    """Stands for a lookup that holds no rows; its ids are all that is needed later."""

    __slots__ = ("groups",)

    def __init__(self, groups: IdGroups) -> None:
        self.groups = groups

    @property
    def admitted_N(self) -> Tensor:
        return torch.zeros_like(self.groups.ids_N, dtype=torch.bool)

    @property
    def found_N(self) -> Tensor:
        return torch.zeros_like(self.groups.ids_N, dtype=torch.bool)

    def end(self) -> None:
        """Nothing is held."""


class LocalExchange:
    """One process owns all rows: nothing is sent."""

    __slots__ = ("_shard",)

    def __init__(self, shard: Shard) -> None:
        self._shard = shard

    @property
    def shard(self) -> Shard:
        return self._shard

    def dispatch(self, request: Request, *, insert: bool, ctx: StepContext) -> Route:
        groups = request.groups()
        ticket = self._shard.find_or_init(groups, ctx=ctx) if insert else _ReadTicket(groups)
        return Route(request, ticket, ctx.event_time_s)

    def combine(self, route: Route, *, ctx: StepContext) -> tuple[Tensor, ...]:
        request, ticket = route.request, route.ticket
        if isinstance(ticket, _ReadTicket):
            return self._find(request, ticket.groups)
        ordered = request.ordered
        return self._shard.gather_pooled(
            ticket, request.plan, ordered.offsets_FB1, ordered.weights_N, ctx=ctx
        )

    def read(self, request: Request) -> tuple[Tensor, ...]:
        return self._find(request, request.groups())

    def back(self, route: Route, grads: tuple[Tensor, ...]) -> GradRecord:
        request, ordered = route.request, route.request.ordered
        return GradRecord(route.ticket, grads, request.plan, ordered.offsets_FB1, ordered.weights_N)

    def _find(self, request: Request, groups: IdGroups) -> tuple[Tensor, ...]:
        ordered = request.ordered
        return self._shard.find_pooled(groups, request.plan, ordered.offsets_FB1, ordered.weights_N)
