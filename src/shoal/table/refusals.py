"""Refusals of the compiled core, worded for people."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

from shoal import _core
from shoal.errors import (
    CheckpointError,
    InputError,
    NonFiniteGradient,
    OutOfDeviceMemory,
    ShapeError,
    TableFull,
    TicketError,
    describe,
    out_of_device_memory,
)

__all__ = [
    "KEPT_EPOCH",
    "cleared",
    "closed_snapshot",
    "copies_lost",
    "cut",
    "enough_memory",
    "foreign_ticket",
    "kept",
    "last_epoch",
    "out_of_memory",
    "plan_without_offsets",
    "second_snapshot",
    "snapshot_since",
    "table_full",
    "worded",
]

KEPT_EPOCH = "a closed epoch from which on deletions are kept"

T = TypeVar("T")


def worded(call: Callable[[], T]) -> T:
    """Run a call into the core.

    Raises:
        TableFull: no room for new ids; nothing was inserted.
        NonFiniteGradient: a gradient, or a row's sum of them, is NaN or infinite under
            nan_policy="raise"; nothing was changed.
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
                "gradient of a row, summed over all that has its id",
                got="NaN or infinity",
                allowed="finite values under nan_policy='raise'",
                remedy="Find the overflow (loss scale, learning rate), or choose "
                "nan_policy='skip' or 'clip'. No table was changed.",
            )
        ) from None


def cut(call: Callable[[], T]) -> T:
    """Run a call that closes an epoch.

    Raises:
        InputError: there is no epoch after the open one.
    """
    try:
        return call()
    except OverflowError as error:
        raise last_epoch() from error


def last_epoch() -> InputError:
    """The error for a cut where there is no epoch after the open one."""
    return InputError(
        describe(
            "cut",
            got="the last epoch is open",
            allowed="at most 2^32 - 2 epochs in the life of a table's rows",
            remedy="Set the versions of all rows to 1 and load them into new tables.",
        )
    )


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


def out_of_memory(what: str, wanted_bytes: int, device: torch.device) -> OutOfDeviceMemory:
    """The error for an allocation that failed, with what the device has free."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
    return out_of_device_memory(f"{what} on {device}", wanted_bytes, free)


@contextmanager
def enough_memory(what: str, device: torch.device) -> Iterator[None]:
    """Word a failed allocation; torch says how many bytes it was asked for.

    Raises:
        OutOfDeviceMemory: an allocation failed.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        asked = re.search(r"Tried to allocate ([\d.]+ \w+)", str(error))
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
        raise OutOfDeviceMemory(
            describe(
                f"device memory for {what} on {device}",
                got=f"{asked[1] if asked else 'more'} wanted",
                allowed=f"{free:,} bytes free",
                remedy="Look up smaller batches, keep rows in host memory (a tiered table), or "
                "give the tables a row budget (capacity_rows with on_full='lru' or 'lfu').",
            )
        ) from error


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


def second_snapshot() -> InputError:
    """The error for a snapshot while another one is open."""
    return InputError(
        describe(
            "snapshot",
            got="another one is open",
            allowed="one snapshot of a shard at a time",
            remedy="Close the other one first.",
        )
    )


def snapshot_since(got: str, allowed: str) -> InputError:
    """The error for a snapshot of what changed since a cursor that is no good."""
    remedy = "Take a full snapshot: since=None."
    return InputError(describe("snapshot", got=got, allowed=allowed, remedy=remedy))


def closed_snapshot() -> InputError:
    """The error for reading a snapshot after its end."""
    return InputError(
        describe(
            "snapshot",
            got="a closed one",
            allowed="an open one",
            remedy="Read before close(), or take another.",
        )
    )


def kept(call: Callable[[], T]) -> T:
    """Run a call that reads copies of rows.

    Raises:
        CheckpointError: copies were lost.
    """
    try:
        return call()
    except RuntimeError as error:
        raise copies_lost(str(error)) from error


def copies_lost(why: str) -> CheckpointError:
    """The error for a snapshot whose copies of changed rows are not whole."""
    return CheckpointError(
        describe(
            "snapshot",
            got=f"rows that training changed could not be kept: {why}",
            allowed="room for them in the temporary folder",
            remedy="Point TMPDIR to a folder with room for the rows that change during a "
            "save, or raise buffer_bytes. The tables are as they should be.",
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
