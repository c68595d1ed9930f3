"""Rows of a GPU shard in pinned host memory: which batches hold places in the device cache."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence

from torch import Tensor

from shoal.kernels.gradients import Runs
from shoal.table.cuda.cache import CachedForm, RowCache
from shoal.table.cuda.calls import ShardTables
from shoal.table.cuda.memory import DeviceMemory
from shoal.table.cuda.ticket import HeldRows, LiveTickets
from shoal.table.spec import HostRows

_log = logging.getLogger("shoal.table")

_PREFETCHED = 2  # batches whose rows wait for their lookup at most


class RowsOnHost:
    """Index and metadata are on the device; weights and state are in host memory, where kernels
    reach them, or in the cache: brought there at a batch's lookup, or by a prefetch ahead of it,
    and sent home when others need their place. Not thread-safe.

    Args:
        tables, memory: the shard's; `memory` keeps rows on the host.
        tickets: whose rows keep their place.
        setting: size and policy of the cache.

    Raises:
        OutOfDeviceMemory: no room for the cache.
    """

    def __init__(
        self, tables: ShardTables, memory: DeviceMemory, tickets: LiveTickets, setting: HostRows
    ) -> None:
        self._tables = tables
        self._memory = memory
        self._tickets = tickets
        self.cache = RowCache(
            memory,
            _cached_forms(tables),
            cache_bytes=setting.cache_bytes,
            policy=setting.policy,
            device=tables.device,
        )
        self._prefetched: deque[int] = deque(maxlen=_PREFETCHED)
        _log.info(
            "rows of %s are kept in host memory; cache on %s: %d bytes, %s",
            ", ".join(spec.name for spec in tables.specs) or "no table",
            tables.device,
            setting.cache_bytes,
            setting.policy,
        )

    def looked_up(self, runs: Runs) -> HeldRows:
        """Start to bring the rows of a lookup to the device; what its ticket is to hold."""
        held = HeldRows(self._admit(runs))
        if self._prefetched:
            self._prefetched.popleft()
        return held

    def prefetch(self, handles_N: Tensor, rooms: Sequence[int]) -> None:
        """Start to bring rows of a coming lookup."""
        self._prefetched.append(self._admit(self._runs_of(handles_N, rooms)))

    def _runs_of(self, handles_N: Tensor, rooms: Sequence[int]) -> Runs:
        return self._tables.runs_of(self._memory.layout, handles_N, rooms)

    def _admit(self, runs: Runs) -> int:
        most_F = [0] * len(self._tables.forms)
        for form, room in zip(self._tables.form_of, self._memory.rows_room_K.tolist(), strict=True):
            most_F[form] += room
        return self.cache.admit(runs, self._keep_from(), most_F=most_F)

    def _keep_from(self) -> int | None:
        """Tick of the oldest batch whose rows are still wanted."""
        held = [ticket.held.tick for ticket in self._tickets.live() if ticket.held is not None]
        return min([*held, *self._prefetched], default=None)

    def places_N(self, handles_N: Tensor, rooms: Sequence[int], held: HeldRows | None) -> Tensor:
        """Payload handles of positions; those of no ticket bring their rows now."""
        if held is None:
            self._admit(self._runs_of(handles_N, rooms))
            return self.cache.places_N(handles_N)
        if held.places_N is None or held.moves != self.cache.moves:
            held.places_N = self.cache.places_N(handles_N)
            held.moves = self.cache.moves
        return held.places_N

    def stepped(self) -> None:
        """After a step: a staging area keeps the rows of live lookups only."""
        self.cache.settle(self._keep_from())


def _cached_forms(tables: ShardTables) -> list[CachedForm]:
    """Forms, and shares of the cache by the bytes that their tables expect to hold."""
    weights = [0.0] * len(tables.forms)
    owners = [0] * len(tables.forms)
    for k, (spec, form) in enumerate(zip(tables.specs, tables.form_of, strict=True)):
        row = tables.forms[form]
        weights[form] += max(spec.expected_rows, 1) * (row.weight_bytes + row.state_bytes)
        owners[form] = k
    return [
        CachedForm(form, table, weight / sum(weights))
        for form, table, weight in zip(tables.forms, owners, weights, strict=True)
    ]
