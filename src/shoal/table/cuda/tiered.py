"""`TieredShard`: a GPU shard whose rows live in pinned host memory, behind a device cache."""

from __future__ import annotations

import dataclasses
import logging
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import get_args

import torch
from torch import Tensor

from shoal.errors import ConfigError
from shoal.kernels.gradients import Runs
from shoal.kernels.tables import CallGroups
from shoal.table.cuda.cache import CachedForm, CachePolicy, CacheStats, RowCache
from shoal.table.cuda.calls import CallShape
from shoal.table.cuda.shard import CudaShard
from shoal.table.cuda.ticket import CudaTicket
from shoal.table.shard import IdGroups, StepContext
from shoal.table.spec import TableSpec
from shoal.table.values import RowChunk, TableStats

_log = logging.getLogger("shoal.table")

_PREFETCHED = 2  # batches whose rows wait for their lookup at most


@dataclasses.dataclass(slots=True)
class _Held:
    """What a ticket holds in the cache: its tick, and payload handles as of some `moves`."""

    tick: int
    moves: int = -1
    places_N: Tensor | None = None


class TieredShard(CudaShard):
    """Tables larger than a GPU's memory: rows in host memory, the rows in use on the device.

    Index and metadata have one home, the device. Weights and optimizer state are in page-locked
    host memory; rows of a batch are brought to the cache at its lookup, or by `prefetch` ahead of
    it, and go home when others need their place. Results do not depend on the cache: rows that
    get no place in it are read and written where they are. Everything else is as in `CudaShard`.

    Args:
        specs, seed, device: as `CudaShard`'s.
        cache_bytes: device memory for rows. 0 keeps none from one batch to the next; each batch
            then takes what its distinct rows need, at most one row a position.
        policy: whose place is taken first, the least recently ("lru") or the least frequently
            ("lfu") used rows'; a batch counts as one use, and counts age.

    Raises:
        ConfigError: bad cache_bytes or policy.
        DeviceUnavailable: no such device here, or no Triton.
        OutOfDeviceMemory: no room for the cache, or no more host memory to lock.
    """

    _HOST_ROWS = True

    def __init__(
        self,
        specs: Sequence[TableSpec],
        *,
        seed: int = 0,
        device: str | torch.device = "cuda",
        cache_bytes: int = 0,
        policy: CachePolicy = "lru",
    ) -> None:
        _check(cache_bytes, policy)
        self._settings = {"cache_bytes": cache_bytes, "policy": policy}
        super().__init__(specs, seed=seed, device=device)
        self._cache = RowCache(
            self._memory,
            self._cached_forms(),
            cache_bytes=cache_bytes,
            policy=policy,
            device=self._device,
        )
        self._held: weakref.WeakKeyDictionary[CudaTicket, _Held] = weakref.WeakKeyDictionary()
        self._prefetched: deque[int] = deque(maxlen=_PREFETCHED)
        on_gpu = self._device.type == "cuda"
        self._ahead = torch.cuda.Stream(self._device) if on_gpu else None  # type: ignore[no-untyped-call]
        _log.info(
            "rows of %s are kept in host memory; cache on %s: %d bytes, %s",
            ", ".join(spec.name for spec in self._specs) or "no table",
            self._device,
            cache_bytes,
            policy,
        )

    @property
    def settings(self) -> dict[str, object]:
        """What a copy is made with, beside specs, seed and device."""
        return dict(self._settings)

    def _cached_forms(self) -> list[CachedForm]:
        """Forms, and shares of the cache by the bytes that their tables expect to hold."""
        weights = [0.0] * len(self._forms)
        tables = [0] * len(self._forms)
        for k, (spec, form) in enumerate(zip(self._specs, self._form_of, strict=True)):
            row = self._forms[form]
            weights[form] += max(spec.expected_rows, 1) * (row.weight_bytes + row.state_bytes)
            tables[form] = k
        return [
            CachedForm(form, table, weight / sum(weights))
            for form, table, weight in zip(self._forms, tables, weights, strict=True)
        ]

    def find_or_init(
        self, groups: IdGroups, counts_N: Tensor | None = None, *, ctx: StepContext
    ) -> CudaTicket:
        """`CudaShard.find_or_init`; starts to bring the rows to the device."""
        with self._turn():
            ticket = super().find_or_init(groups, counts_N, ctx=ctx)
            self._held[ticket] = _Held(self._admit(ticket.runs(self._stream)))
            if self._prefetched:
                self._prefetched.popleft()
            return ticket

    def prefetch(self, groups: IdGroups) -> None:
        """Start to bring rows of a coming batch to the device, beside other work; no inserts.

        The best time is between a batch's gather and its backward: the rows then cross the bus
        while the model computes. Later verbs wait for them. Rows of live tickets keep their place.
        """
        with self._turn():
            self._shapes.of(groups)
        side = self._ahead
        if side is None:
            self._fetch(groups)
            return
        groups.ids_N.record_stream(side)
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            self._fetch(groups)

    def _fetch(self, groups: IdGroups) -> None:
        with self._turn():
            shape, call = self._call(groups)
            handles_N, _ = self._probe(call)
            self._prefetched.append(self._admit(self._runs_of(handles_N, shape.rooms)))

    def _admit(self, runs: Runs) -> int:
        most_F = [0] * len(self._forms)
        for form, room in zip(self._form_of, self._memory.rows_room_K.tolist(), strict=True):
            most_F[form] += room
        return self._cache.admit(runs, self._keep_from(), most_F=most_F)

    def _keep_from(self) -> int | None:
        """Tick of the oldest batch whose rows are still wanted."""
        live = [held.tick for ticket, held in list(self._held.items()) if ticket.live]
        return min([*live, *self._prefetched], default=None)

    def _places_N(self, shape: CallShape, handles_N: Tensor) -> Tensor:
        """Payload handles of positions: of a ticket's, or of a lookup that brings its rows now."""
        for ticket, held in list(self._held.items()):
            if ticket.live and ticket.handles_N is handles_N:
                if held.places_N is None or held.moves != self._cache.moves:
                    held.places_N = self._cache.places_N(handles_N)
                    held.moves = self._cache.moves
                return held.places_N
        self._admit(self._runs_of(handles_N, shape.rooms))
        return self._cache.places_N(handles_N)

    def _payload_of(self, runs: Runs) -> Tensor:
        """Where rows are that a step is about to change: payload handles by home handle, or -1."""
        return self._cache.written(runs)

    def _found_rows(self, shape: CallShape, call: CallGroups) -> tuple[tuple[Tensor, ...], Tensor]:
        handles_N, found_N = self._probe(call)
        rows = self._rows_of(shape, call, handles_N, self._last_step, initial=False)
        return rows, found_N

    def _stepped(self, ctx: StepContext) -> None:
        super()._stepped(ctx)
        self._cache.settle(self._keep_from())

    def _forget_places(self, handles_M: Tensor, size_1: Tensor) -> None:
        self._cache.drop(handles_M, size_1)

    def _where(self, handles_R: Tensor) -> Tensor:
        return self._cache.places_N(handles_R)

    def _payload_now(self) -> Tensor | None:
        return self._cache.payload_H()

    @contextmanager
    def _at_home(self) -> Iterator[None]:
        """A turn in which rows are changed in host memory; the cache is empty before and after."""
        with self._turn():
            self._cache.empty()
            try:
                yield
            finally:
                self._cache.empty()

    def assign(self, groups: IdGroups, weights: Sequence[Tensor], *, ctx: StepContext) -> None:
        """`CudaShard.assign`, in host memory."""
        with self._at_home():
            super().assign(groups, weights, ctx=ctx)

    def assign_add(self, groups: IdGroups, deltas: Sequence[Tensor], *, ctx: StepContext) -> None:
        """`CudaShard.assign_add`, in host memory."""
        with self._at_home():
            super().assign_add(groups, deltas, ctx=ctx)

    def reinitialize(self, groups: IdGroups, *, ctx: StepContext) -> Tensor:
        """`CudaShard.reinitialize`, in host memory."""
        with self._at_home():
            return super().reinitialize(groups, ctx=ctx)

    def load(self, table: int, chunk: RowChunk) -> None:
        """`CudaShard.load`, into host memory."""
        with self._at_home():
            super().load(table, chunk)

    def clear(self, table: int) -> None:
        """`CudaShard.clear`; the rows of all tables leave the cache."""
        with self._at_home():
            super().clear(table)

    @contextmanager
    def _rows_at_home(self) -> Iterator[None]:
        """Rows that are read whole are read in host memory: what the cache changed goes there."""
        with self._turn():
            self._cache.flush()
            yield

    def flush(self) -> None:
        """Write all changed rows home; they stay in the cache."""
        with self._turn():
            self._cache.flush()

    def stats(self) -> tuple[TableStats, ...]:
        """Counters of each table; says that its rows are on the host."""
        return tuple(dataclasses.replace(table, on_host=True) for table in super().stats())

    def cache_stats(self) -> CacheStats:
        """What the cache did so far; waits for the device."""
        with self._turn():
            return self._cache.stats()


def _check(cache_bytes: object, policy: object) -> None:
    if not isinstance(cache_bytes, int) or isinstance(cache_bytes, bool) or cache_bytes < 0:
        raise ConfigError(
            "cache_bytes of a tiered shard",
            got=repr(cache_bytes),
            allowed="an int, 0 or more",
            remedy="Give the device memory to use for rows; 0 keeps none between batches.",
        )
    if policy not in get_args(CachePolicy):
        raise ConfigError(
            "policy of a tiered shard",
            got=repr(policy),
            allowed=", ".join(get_args(CachePolicy)),
            remedy="Name one of them.",
        )
