"""Refusals of the compiled core, worded for people."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from shoal import _core
from shoal.errors import NonFiniteGradient, ShapeError, TableFull, TicketError, describe

__all__ = ["cleared", "foreign_ticket", "plan_without_offsets", "table_full", "worded"]

T = TypeVar("T")


def worded(call: Callable[[], T]) -> T:
    """Run a call into the core.

    Raises:
        TableFull: no room for new ids; nothing was inserted.
        NonFiniteGradient: NaN or infinity under nan_policy="raise"; nothing was changed.
        TicketError: a ticket ended meanwhile.
    """
    try:
        return call()
    except _core.TableFullError as error:
        rows, capacity, wanted, name = str(error).split(" ", 3)
        raise table_full(name, int(rows), int(capacity), int(wanted)) from None
    except _core.TicketStateError:
        raise foreign_ticket() from None
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


def table_full(name: str, rows: int, capacity: int, wanted: int) -> TableFull:
    """The error for new ids that a table has no room for."""
    return TableFull(
        describe(
            f"new ids for table {name!r}",
            got=f"{wanted} beside {rows} rows",
            allowed=f"capacity_rows={capacity} in all",
            remedy="Raise capacity_rows, set on_full to 'lru' or 'lfu', or evict; "
            "rows under live tickets cannot be evicted.",
        )
    )


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


def plan_without_offsets() -> ShapeError:
    """The error for a pooled gradient that does not say how it was pooled."""
    return ShapeError(
        describe(
            "gradient record",
            got="a plan without offsets",
            allowed="plan and offsets together, or neither",
            remedy="Pass the offsets that gather_pooled was given.",
        )
    )


def cleared(call: Callable[[], None], name: str) -> None:
    """Run a call that drops a table.

    Raises:
        TicketError: a live ticket holds rows; nothing was dropped.
    """
    try:
        call()
    except _core.TicketStateError:
        raise TicketError(
            describe(
                f"clear of table {name!r}",
                got="live tickets",
                allowed="no step in flight",
                remedy="Call step() or zero_grad() first.",
            )
        ) from None
