"""What ranks that share tables find out together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.ledger import GradientLedger

__all__ = ["anywhere", "shared", "summed", "worst"]


def shared(ledgers: Sequence[GradientLedger]) -> GradientLedger | None:
    """One of the ledgers whose tables are spread over ranks; None if there is none."""
    return next((ledger for ledger in ledgers if ledger.world_size > 1), None)


def anywhere(ledgers: Sequence[GradientLedger], here: Sequence[Tensor]) -> Tensor:
    """Which ranks say yes to any of some bool scalars, uint8 [W]; a collective call."""
    ledger = shared(ledgers)
    device = ledgers[0].shard.device
    mine = torch.stack([flag.to(device) for flag in here]).any().to(torch.uint8)
    if ledger is None or ledger.collectives is None:
        return mine.reshape(1)
    collectives = ledger.collectives
    said_W = torch.zeros(collectives.world_size, dtype=torch.uint8, device=collectives.device)
    said_W[collectives.rank] = mine
    return _reduced(ledger, said_W, "max", "vote on finite gradients")


def summed(ledgers: Sequence[GradientLedger], value: Tensor) -> Tensor:
    """A scalar, added up over ranks; a collective call."""
    ledger = shared(ledgers)
    return value if ledger is None else _reduced(ledger, value, "sum", "norm of gradients")


def worst(ledgers: Sequence[GradientLedger], value: Tensor) -> Tensor:
    """The largest of a scalar over ranks, NaN if any is; a collective call."""
    ledger = shared(ledgers)
    if ledger is None:
        return value
    # Whether the maximum of a NaN is one depends on what carries it.
    pair = torch.stack([value.nan_to_num(0.0, posinf=torch.inf), value.isnan().to(value.dtype)])
    found = _reduced(ledger, pair, "max", "norm of gradients")
    return torch.where(found[1] > 0, torch.nan, found[0])


def _reduced(ledger: GradientLedger, values: Tensor, op: str, what: str) -> Tensor:
    collectives = ledger.collectives
    assert collectives is not None
    collectives.step = ledger.global_step
    asked = values.to(collectives.device)
    if op == "max":
        (found,) = collectives.all_reduce(asked, "max", what=what).wait()
    else:
        (found,) = collectives.all_reduce(asked, "sum", what=what).wait()
    return found.to(ledger.shard.device)
