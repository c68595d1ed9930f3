"""Refusals of the compiled core, worded for people."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from shoal import _core
from shoal.errors import NonFiniteGradient, TableFull, TicketError, describe

__all__ = ["foreign_ticket", "pinned", "worded"]

T = TypeVar("T")


def worded(call: Callable[[], T]) -> T:
    """Run a call into the core.

    Raises:
        TableFull: no room for new ids; nothing was inserted.
        NonFiniteGradient: NaN or infinity under nan_policy="raise"; nothing was changed.
    """
    try:
        return call()
    except _core.TableFullError as error:
        rows, capacity, wanted, name = str(error).split(" ", 3)
        raise TableFull(
            describe(
                f"new ids for table {name!r}",
                got=f"{wanted} beside {rows} rows",
                allowed=f"capacity_rows={capacity} in all",
                remedy="Raise capacity_rows, set on_full to 'lru' or 'lfu', or evict; "
                "rows under live tickets cannot be evicted.",
            )
        ) from None
    except _core.NonFiniteError:
        raise NonFiniteGradient(
            describe(
                "gradient",
                got="NaN or infinity",
                allowed="finite values under nan_policy='raise'",
                remedy="Find the overflow (loss scale, learning rate), or choose "
                "nan_policy='skip' or 'clip'. No table was changed.",
            )
        ) from None


def foreign_ticket() -> TicketError:
    """The error for a ticket that ended or belongs elsewhere."""
    return TicketError(
        describe(
            "ticket",
            got="one that ended or that another shard issued",
            allowed="a live ticket of this shard",
            remedy="Look the ids up again: a ticket serves one step.",
        )
    )


def pinned(name: str) -> TicketError:
    """The error for dropping a table while a step is in flight."""
    return TicketError(
        describe(
            f"clear of table {name!r}",
            got="live tickets",
            allowed="no step in flight",
            remedy="Call step() or zero_grad() first.",
        )
    )
