"""The autograd node of a lookup."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shoal.errors import InputError, TicketError, describe
from shoal.exchange import Route
from shoal.table.shard import StepContext

if TYPE_CHECKING:
    from shoal.embedding.collection import EmbeddingCollection

__all__ = ["Lookup"]


class Lookup(torch.autograd.Function):
    """Forward reads a route's rows, backward sends the gradients of the outputs back.

    Each output may go backward on its own, as if it came from a table of its own: only an output
    that went backward without its graph being retained may not do so again.
    """

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, owner: EmbeddingCollection, route: Route, step: StepContext
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.owner = owner
        ctx.route = route
        ctx.versions = _versions(route)
        ctx.spent = set()
        ctx.generation = None
        outputs = owner.exchange.combine(route, ctx=step)
        ctx.dtypes = owner.output_dtypes(outputs)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, None, None, None]:
        if torch.is_grad_enabled():
            raise _bad(
                "backward with create_graph=True through an embedding lookup",
                "a second derivative with respect to table rows",
                "first derivatives",
                "Differentiate twice with respect to the lookup's outputs instead.",
            )
        owner: EmbeddingCollection = ctx.owner
        ledger, route = owner.ledger, ctx.route
        given = [i for i, grad in enumerate(grads) if grad is not None]
        if route is None or not ctx.spent.isdisjoint(given):
            remedy = "Pass retain_graph=True to the earlier backward."
            raise _late("a graph that already ran and was not retained", "one backward", remedy)
        if ctx.generation not in (None, ledger.generation):
            remedy = "Call all backward passes of a batch first, or run its forward again."
            raise _late("a graph whose gradient was applied", "backward before step()", remedy)
        if ctx.versions != _versions(route):
            remedy = "Build a new batch instead of changing one."
            raise _bad("ids of a batch", "a change in place since forward", "none", remedy)
        ctx.generation = ledger.generation
        ledger.write(route, owner.exchange.back(route, _complete(grads, route, ctx.dtypes)))
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            ctx.spent.update(given)
            if len(ctx.spent) == len(grads):
                # Nothing can run again: from here on the record alone holds the ticket.
                ctx.route = None
        return None, None, None, None


def _versions(route: Route) -> tuple[int, int]:
    batch = route.request.batch
    return batch.values_N._version, batch.offsets_FB1._version


def _complete(
    grads: Sequence[Tensor | None], route: Route, dtypes: tuple[torch.dtype, ...]
) -> tuple[Tensor, ...]:
    """Contiguous gradients, zeros for outputs that nothing was computed from."""
    parts = []
    for i, grad in enumerate(grads):
        if grad is None:
            width = route.request.plan.outputs[i].width
            ordered = route.request.ordered
            size, device = ordered.batch_size, ordered.values_N.device
            grad = torch.zeros(size, width, dtype=dtypes[i], device=device)
        parts.append(grad if grad.is_contiguous() else grad.contiguous())
    return tuple(parts)


def _late(got: str, allowed: str, remedy: str) -> TicketError:
    what = "backward through an embedding lookup"
    return TicketError(describe(what, got=got, allowed=allowed, remedy=remedy))


def _bad(what: str, got: object, allowed: object, remedy: str) -> InputError:
    return InputError(describe(what, got=got, allowed=allowed, remedy=remedy))
