"""`CudaTicket`: rows of one training lookup in a GPU shard."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.kernels.gradients import Runs, bags_of
from shoal.kernels.host_copies import retire
from shoal.table.cuda.calls import CallShape
from shoal.table.cuda.side_stream import Lease
from shoal.table.cuda.turns import Turns
from shoal.table.shard import IdGroups, not_copied
from shoal.uncompiled import uncompiled


@dataclass(slots=True)
class HeldRows:
    """What a ticket holds in a cache: its tick, and payload handles as of some `moves`."""

    tick: int
    moves: int = -1
    places_N: Tensor | None = None


@uncompiled
@dataclass(eq=False, repr=False)
class CudaTicket:
    """See `shoal.table.shard.Ticket`; ends with this object at the latest.

    Args:
        shard, turns: who issued it, and its turns.
        groups, shape: the call.
        handles_N: int32 [N] on the device, -1 where the id has no row.
        met_N: int8 [N] on the device: what `probe` reported while it inserted.
        counts_N: int32 [N] occurrences on the device, or None: 1 each.
        event_time_s: when the lookup happened.
        runs: gives the runs of `handles_N` to a stream.
        stream: the shard's, at the lookup.
        held: where rows are in a cache, if the shard has one.
        lease: what the handles are in, if they have no memory of their own.
    """

    shard: object
    _turns: Turns
    groups: IdGroups
    shape: CallShape
    handles_N: Tensor
    _met_N: Tensor
    counts_N: Tensor | None
    event_time_s: int
    runs: Callable[[torch.cuda.Stream | None], Runs]
    stream: torch.cuda.Stream | None
    held: HeldRows | None
    _lease: Lease | None
    live: bool = True
    _bags: tuple[Tensor, Tensor] | None = None

    def __reduce__(self) -> Any:
        raise not_copied("a ticket")

    def bags_of(self, offsets_GB1: Tensor, bags: int) -> Tensor:
        """Each position's bag, int32 [N]; found once for the same offsets."""
        if self._bags is None or self._bags[0] is not offsets_GB1:
            self._bags = (offsets_GB1, bags_of(offsets_GB1, bags, self.shape.splits[-1]))
        return self._bags[1]

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """What it holds on the device but its runs."""
        parts = (self.handles_N, self._met_N, self.counts_N, *(self._bags or ()))
        return tuple(part for part in parts if part is not None)

    @property
    def admitted_N(self) -> Tensor:
        """bool [N] on the shard's device: the id has a row."""
        with self._turns:
            self._read()
            return self.handles_N >= 0

    @property
    def found_N(self) -> Tensor:
        """bool [N] on the shard's device: the id had a row before this lookup. Waits for it."""
        # A row is new if one of its positions did not meet it.
        with self._turns:
            self._read()
            handles_N, met_N = self.handles_N, self._met_N.view(torch.bool)
            return met_N & ~torch.isin(handles_N, handles_N[~met_N & (handles_N >= 0)])

    def _read(self) -> None:
        if self.stream is not self._turns.stream:
            retire(self.handles_N, self._met_N)

    def end(self) -> None:
        """Release the rows; a second call does nothing."""
        self.live = False
        self.runs = _none


def _none(_: torch.cuda.Stream | None) -> Runs:
    raise AssertionError("runs of a ticket that has ended")


class LiveTickets:
    """Tickets of a shard whose rows may not go."""

    def __init__(self) -> None:
        self._made: weakref.WeakSet[CudaTicket] = weakref.WeakSet()

    def add(self, ticket: CudaTicket) -> None:
        """A ticket that was just made."""
        self._made.add(ticket)

    def live(self) -> list[CudaTicket]:
        """Those that have not ended."""
        return [ticket for ticket in self._made if ticket.live]
