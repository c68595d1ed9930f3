"""The device cache of a shard with rows on the host: its size, its clock, what it must hold."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shoal.errors import OutOfDeviceMemory
from shoal.kernels import cache
from shoal.kernels import tables as words
from shoal.kernels.cache import CacheMaps
from shoal.kernels.gradients import Runs
from shoal.kernels.host_copies import retire
from shoal.kernels.tables import RowForm
from shoal.table.cuda.memory import DeviceMemory
from shoal.table.spec import CachePolicy

_log = logging.getLogger("shoal.table")

_ALL = (1 << 31) - 1  # later than every tick


@dataclass(frozen=True, slots=True)
class CachedForm:
    """A row form, a table that has it, and its share of the cache's bytes (shares add up to 1)."""

    form: RowForm
    table: int
    share: float

    @property
    def row_bytes(self) -> int:
        """Bytes of a row's weights and state."""
        return self.form.weight_bytes + self.form.state_bytes


@dataclass(frozen=True, slots=True)
class CacheStats:
    """What a cache did since it was made; rows are counted once a batch.

    hits: rows that had a slot. misses: rows that had none; of these `in_place` got none either.
    written_back: rows that went home. slots, bytes: its size now.
    """

    hits: int
    misses: int
    in_place: int
    written_back: int
    slots: int
    bytes: int


class RowCache:
    """Slots in device memory for rows whose home is host memory. Not thread-safe.

    With `cache_bytes=0` it is a staging area: as large as the largest batch needs, and emptied
    after each, so that a row crosses the bus once a batch however often it occurs.

    Args:
        memory: of the shard.
        forms: the shard's row forms.
        cache_bytes: device memory for slots.
        policy: whose slots are taken first: least recently or least frequently used rows'.
        device: the shard's.

    Attributes:
        moves: changes whenever a payload handle may no longer hold.

    Raises:
        OutOfDeviceMemory: no room for that many bytes.
    """

    def __init__(
        self,
        memory: DeviceMemory,
        forms: Sequence[CachedForm],
        *,
        cache_bytes: int,
        policy: CachePolicy,
        device: torch.device,
    ) -> None:
        self._memory = memory
        self._forms = tuple(forms)
        self._lfu = policy == "lfu"
        self._device = device
        self._staging = cache_bytes == 0
        self._tick = 0
        self._held = False  # any row may have a slot
        self._dirty = False  # any slot may be dirty
        self._full = False  # the device has no room for a larger staging area
        self.moves = 0
        self._storage: list[Tensor] = []
        self._maps = self._made([int(cache_bytes * f.share) // f.row_bytes for f in self._forms])

    def _made(self, slots_F: Sequence[int]) -> CacheMaps:
        """Pools of so many slots, whole chunks of numbers each."""
        pools, columns, first = [], [], 0
        storage = self._allocated(slots_F)
        for place, (cached, slots) in enumerate(zip(self._forms, slots_F, strict=True)):
            chunks = -(-slots // words.CHUNK_ROWS)
            pools.append(range(first, first + slots))
            first += chunks * words.CHUNK_ROWS
            starts = np.arange(chunks, dtype=np.int64) * words.CHUNK_ROWS
            part = np.zeros((words.CHUNK_WORDS, chunks), dtype=np.int64)
            weights, state = storage[2 * place : 2 * place + 2]
            part[words.CHUNK_WEIGHTS] = weights.data_ptr() + starts * cached.form.weight_bytes
            part[words.CHUNK_STATE] = state.data_ptr() + starts * cached.form.state_bytes
            part[words.CHUNK_TABLE] = cached.table
            part[words.CHUNK_CAPACITY] = np.minimum(slots - starts, words.CHUNK_ROWS)
            columns.append(part)
        base = 0
        if first:
            replaced = self._memory.layout.chunks_WC
            base = self._memory.lend(np.concatenate(columns, axis=1)) << words.CHUNK_BITS
            retire(replaced)
        maps = cache.new_maps(
            self._memory.chunks << words.CHUNK_BITS,
            base,
            tuple(pools),
            self._device,
            counted=self._lfu,
        )
        retire(*self._storage)
        self._storage = storage
        return maps

    def _allocated(self, slots_F: Sequence[int]) -> list[Tensor]:
        sizes = [
            slots * size
            for cached, slots in zip(self._forms, slots_F, strict=True)
            for size in (cached.form.weight_bytes, cached.form.state_bytes)
        ]
        try:
            return [torch.empty(size, dtype=torch.uint8, device=self._device) for size in sizes]
        except torch.OutOfMemoryError as error:
            free = torch.cuda.mem_get_info(self._device)[0]
            raise OutOfDeviceMemory(
                "device cache of rows in host memory",
                got=f"{sum(sizes)} bytes wanted, {free} free on {self._device}",
                allowed="what the device has free",
                remedy="Give it fewer cache_bytes, or use smaller batches.",
            ) from error

    def _follow(self) -> None:
        """Cover chunks that the shard has added."""
        handles = self._memory.chunks << words.CHUNK_BITS
        known = self._maps.payload_H
        if handles > known.numel():
            longer = cache.resized(known, max(handles, known.numel() * 5 // 4))
            retire(known)
            self._maps = dataclasses.replace(self._maps, payload_H=longer)

    def admit(self, runs: Runs, keep_from: int | None, *, most_F: Sequence[int]) -> int:
        """Bring the rows of a batch to the device, as many as there are slots for.

        Args:
            keep_from: tick of the oldest batch that is still live, or None. Rows used since then
                keep their slots.
            most_F: rows that each form has at most.

        Returns:
            This batch's tick.
        """
        self._follow()
        self._tick += 1
        keep = self._tick if keep_from is None else keep_from
        if self._staging:
            if self._held:
                self._sweep(keep, forget=True)
            batches = 1 if keep_from is None else 2
            self._cover([batches * min(r, m) for r, m in zip(runs.rooms, most_F, strict=True)])
        cache.admit(
            self._memory.layout,
            self._maps,
            tuple(cached.form for cached in self._forms),
            runs,
            self._tick,
            keep,
            lfu=self._lfu,
        )
        self._held = True
        self.moves += 1
        return self._tick

    def _cover(self, rows_F: Sequence[int]) -> None:
        """Make the staging area large enough for a batch, if the device has room."""
        slots_F = [len(pool) for pool in self._maps.pools]
        if self._full or all(rows <= slots for rows, slots in zip(rows_F, slots_F, strict=True)):
            return
        self.empty()
        wanted = [
            max(rows, slots + slots // 4) if rows > slots else slots
            for rows, slots in zip(rows_F, slots_F, strict=True)
        ]
        old = self._maps
        try:
            self._maps = dataclasses.replace(self._made(wanted), tallies=old.tallies)
        except (OutOfDeviceMemory, torch.OutOfMemoryError) as error:
            # Rows without a slot are read and written in place.
            self._full = True
            _log.warning("batches are only partly staged from now on: %s", error)
            return
        retire(old.payload_H, old.home_S, old.used_S, old.uses_S, old.dirty_S)

    def places_N(self, handles_N: Tensor) -> Tensor:
        """Payload handles of positions, int32 [N]; -1 stays -1. They hold until `moves` changes."""
        self._follow()
        return cache.translate(self._maps, handles_N)

    def payload_H(self) -> Tensor | None:
        """Payload handles of rows with a slot by home handle, -1 for others; None: none has one."""
        if not self._held:
            return None
        self._follow()
        return self._maps.payload_H

    def written(self, runs: Runs) -> Tensor:
        """Say that these rows are about to be changed; returns where they are.

        int32, by home handle: the payload handle of a row with a slot, -1 for a row that is to be
        changed at home.
        """
        self._follow()
        self._dirty = True
        cache.mark_dirty(self._maps, runs)
        return self._maps.payload_H

    def drop(self, handles_M: Tensor, size_1: Tensor) -> None:
        """Forget rows that are no more; see `kernels.row_cache.drop`."""
        if self._held:
            cache.drop(self._maps, handles_M, size_1)
            self.moves += 1

    def flush(self) -> None:
        """Bring all changed rows home; they keep their slots."""
        if self._dirty:
            self._sweep(_ALL, forget=False)

    def empty(self) -> None:
        """Bring all changed rows home and take all slots back."""
        if self._held:
            self._sweep(_ALL, forget=True)

    def settle(self, keep_from: int | None) -> None:
        """After rows have changed: a staging area keeps those of live batches only."""
        if self._staging and self._held:
            self._sweep(_ALL if keep_from is None else keep_from, forget=True)

    def _sweep(self, keep_from: int, *, forget: bool) -> None:
        for cached, pool in zip(self._forms, self._maps.pools, strict=True):
            cache.sweep(
                self._memory.layout, self._maps, cached.form, pool, keep_from, forget=forget
            )
        if keep_from == _ALL:
            self._dirty = False
            self._held = self._held and not forget
        if forget:
            self.moves += 1

    def stats(self) -> CacheStats:
        """Counts; waits for the device."""
        tallies = self._maps.tallies.tolist()
        hits, misses = tallies[cache.TALLY_HITS], tallies[cache.TALLY_MISSES]
        return CacheStats(
            hits=hits,
            misses=misses,
            in_place=misses - tallies[cache.TALLY_PLACED],
            written_back=tallies[cache.TALLY_WRITTEN],
            slots=sum(map(len, self._maps.pools)),
            bytes=sum(part.numel() for part in self._storage),
        )
