"""How ids come into a GPU shard: admission, room within row budgets, the claims of rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shoal.kernels import index, initial_values
from shoal.kernels import index as table_erase
from shoal.kernels import index as table_index
from shoal.kernels.admission import count_refused
from shoal.kernels.history import overdrafts, pin_marks
from shoal.kernels.ids import dedup_first
from shoal.kernels.initial_values import device_form
from shoal.kernels.launch import retire, sent
from shoal.kernels.tables import CHUNK_ROWS, CHUNK_TABLE, CallGroups
from shoal.table import native
from shoal.table.cuda.admission import Sights
from shoal.table.cuda.calls import CallShape
from shoal.table.cuda.core import CudaCore
from shoal.table.cuda.counters import Counts
from shoal.table.cuda.eviction import Scored, lowest_many, scanned_together, scored_jobs
from shoal.table.shard import StepContext
from shoal.table.spec import TableSpec

# A scan costs the table, not what it drops, so tables drop this share of their budget ahead.
_AHEAD = 64
_JOBS_KEPT = 16


@dataclass(frozen=True, slots=True)
class _Trim:
    """What trimming some tables takes, on the device: jobs, and budgets as `overdrafts` reads."""

    jobs_EW: Tensor
    budgets_EW: Tensor


class CudaBudget(CudaCore):
    """Keeps tables within their budgets. Arguments as `CudaShard`'s."""

    def __init__(
        self,
        specs: Sequence[TableSpec],
        *,
        seed: int,
        device: str | torch.device,
        host_rows: bool,
    ) -> None:
        super().__init__(specs, seed=seed, device=device, host_rows=host_rows)
        limited = [s.capacity_rows is not None for s in self._specs]
        self._limited_K = np.array(limited, dtype=np.bool_)
        dropping = [s.capacity_rows is not None and s.on_full != "raise" for s in self._specs]
        self._dropping_K = np.array(dropping, dtype=np.bool_)
        self._capacity_K: Counts = np.array(
            [np.iinfo(np.int64).max if s.capacity_rows is None else s.capacity_rows for s in specs],
            dtype=np.int64,
        )
        self._trims: dict[tuple[int, ...], _Trim] = {}
        # Most rows beyond its budget that each table holds because a trim ran out of memory.
        self._over_K: Counts = np.zeros(len(self._specs), dtype=np.int64)

    def _probe(self, call: CallGroups) -> tuple[Tensor, Tensor]:
        """Handles int32 [N], -1 where there is none, and bool [N]; inserts nothing."""
        handles_N = torch.empty_like(call.ids_N, dtype=torch.int32)
        found_N = torch.empty_like(call.ids_N, dtype=torch.bool)
        table_index.probe(self._layout, call, handles_N, found_N, None, insert=False)
        return handles_N, found_N

    def _trimmed_after(self, shape: CallShape) -> tuple[int, ...]:
        """Tables that may pass their budget in this call and are sure to have rows to drop then:
        those of the call and of live tickets fit in.
        """
        if not self._dropping_K.any():
            return ()
        full_K = self._dropping_K & (shape.new_K > 0)
        full_K &= self._memory.counters.rows_bound_K + shape.new_K > self._capacity_K
        if not full_K.any():
            return ()
        kept_K = shape.new_K + sum(ticket.shape.new_K for ticket in self._live_tickets())
        full_K &= kept_K <= self._capacity_K
        tables = tuple(np.flatnonzero(full_K).tolist())
        if tables:
            self._memory.overdraw(np.where(full_K, shape.new_K + self._over_K, 0))
        return tables

    def _trim(self, tables: tuple[int, ...], shape: CallShape, handles_N: Tensor) -> None:
        """Drop what these tables hold beyond their budgets, but no rows of live lookups."""
        self._over_K[list(tables)] += shape.new_K[list(tables)]
        held = [ticket.handles_N for ticket in self._live_tickets()]
        marks = pin_marks([handles_N, *held], self._memory.chunks)
        for part in self._scans(tables):
            self._trim_part(part, marks)

    def _scans(self, tables: Sequence[int]) -> list[tuple[int, ...]]:
        """Tables that one scan takes."""
        parts = scanned_together([int(self._memory.rows_room_K[k]) for k in tables])
        return [tuple(tables[at] for at in part) for part in parts]

    def _trim_part(self, tables: tuple[int, ...], marks: Tensor) -> None:
        index = list(tables)
        trim = self._trims.get(tables)
        if trim is None:
            if len(self._trims) >= _JOBS_KEPT:
                for old in self._trims.values():
                    retire(old.jobs_EW, old.budgets_EW)
                self._trims.clear()
            trim = self._trims[tables] = self._made_trim(tables)
        drops_E = overdrafts(self._layout, trim.budgets_EW)
        rows = int(self._memory.rows_room_K[index].max())
        most = int((self._over_K[index] + self._capacity_K[index] // _AHEAD).sum())
        gone_M, size_1 = lowest_many(self._layout, trim.jobs_EW, rows, drops_E, marks, most=most)
        self._erase(gone_M, size_1)
        self._over_K[index] = 0

    def _made_trim(self, tables: tuple[int, ...]) -> _Trim:
        capacity_E = self._capacity_K[list(tables)]
        budgets_EW = np.stack([np.array(tables), capacity_E, capacity_E // _AHEAD], axis=1)
        return _Trim(self._jobs(tables), sent(torch.from_numpy(budgets_EW), self._device))

    def _jobs(self, tables: Sequence[int]) -> Tensor:
        scored = [Scored(k, "lfu" if self._specs[k].on_full == "lfu" else "lru") for k in tables]
        return scored_jobs(scored, self._device)

    def _with_room(
        self,
        shape: CallShape,
        call: CallGroups,
        wanted_N: Tensor | None,
        *,
        loose: Sequence[int],
        may_drop: bool,
    ) -> Counts:
        """Most rows that the call adds to each table, after making room in full ones.

        Waits for the device only where a table could pass its `capacity_rows` and may not be
        trimmed afterwards.

        loose: tables that will be.

        Raises:
            TableFull: there are not enough rows that may go; nothing was dropped.
        """
        counters, capacity_K = self._memory.counters, self._capacity_K
        near_K = self._limited_K & (shape.new_K > 0)
        near_K[list(loose)] = False
        if not (near_K & (counters.rows_bound_K + shape.new_K > capacity_K)).any():
            return shape.new_K
        counters.wait()
        handles_N, found_N = self._probe(call)
        missing_N = ~found_N if wanted_N is None else wanted_N & ~found_N
        fresh_K = self._distinct_K(shape, call, missing_N)
        over_K = np.where(near_K, counters.rows_K + fresh_K - capacity_K, 0)
        if (over_K > 0).any():
            self._drop_lowest(over_K, fresh_K, handles_N, may_drop=may_drop)
        return np.where(near_K, fresh_K, shape.new_K)

    def _distinct_K(self, shape: CallShape, call: CallGroups, missing_N: Tensor) -> Counts:
        """Distinct ids of each table among some positions; waits for the device."""
        places = missing_N.nonzero().flatten()
        if places.numel() == 0:
            return np.zeros(len(self._specs), dtype=np.int64)
        sizes_G = call.splits_G1.diff()
        tables_N = torch.repeat_interleave(
            call.tables_G.to(torch.int64), sizes_G, output_size=shape.splits[-1]
        )[places]
        _, _, firsts, _, size_1 = dedup_first(call.ids_N[places], tables_N)
        distinct = tables_N[firsts[: int(size_1)]]
        counts: Counts = torch.bincount(distinct, minlength=len(self._specs)).cpu().numpy()
        return counts

    def _drop_lowest(
        self, over_K: Counts, fresh_K: Counts, handles_N: Tensor, *, may_drop: bool
    ) -> None:
        """Drop the least used rows of tables that are over their budget.

        Rows of the call and of live tickets stay. Large tables drop a little ahead: a scan costs
        the table, not what it drops.

        Raises:
            TableFull: a table may not drop rows, or has too few that may go.
        """
        held = [ticket.handles_N for ticket in self._live_tickets()]
        marks = pin_marks([handles_N, *held], self._memory.chunks)
        rows_K = self._memory.counters.rows_K
        free_K = rows_K - self._marked_K(marks)
        for k in np.flatnonzero(over_K > 0):
            spec = self._specs[k]
            if not may_drop or spec.on_full == "raise" or over_K[k] > free_K[k]:
                raise native.table_full(
                    spec.name, int(rows_K[k]), int(self._capacity_K[k]), int(fresh_K[k])
                )
        tables = [int(k) for k in np.flatnonzero(over_K > 0)]
        drops = [int(over_K[k] + self._capacity_K[k] // _AHEAD) for k in tables]
        self._drop(
            tables, [min(d, int(free_K[k])) for d, k in zip(drops, tables, strict=True)], marks
        )

    def _marked_K(self, marks: Tensor) -> Counts:
        """Marked rows of each table; waits for the device."""
        per_chunk = marks.view(-1, CHUNK_ROWS).sum(dim=1, dtype=torch.int64).cpu().numpy()
        counts = np.zeros(len(self._specs), dtype=np.int64)
        np.add.at(counts, self._memory.columns_WC[CHUNK_TABLE], per_chunk[: self._memory.chunks])
        return counts

    def _drop(self, tables: Sequence[int], drops: Sequence[int], marks: Tensor | None) -> None:
        """Drop so many rows of each of these tables, those of least score, but no marked ones."""
        # First, because selected rows are marked as free and must then leave the index.
        self._memory.make_free_lists(tables)
        drop_of = dict(zip(tables, drops, strict=True))
        for part in self._scans(tables):
            rows = max(int(self._memory.rows_room_K[k]) for k in part)
            wanted = [drop_of[k] for k in part]
            gone_M, size_1 = lowest_many(self._layout, self._jobs(part), rows, wanted, marks)
            self._erase(gone_M, size_1)

    def _erase(self, handles_M: Tensor, size_1: Tensor) -> None:
        """Take dropped rows out of the index; their tables' free lists are long enough."""
        # Their versions are 0 by now, but all else of them is there.
        self._keep(handles_M, size_1)
        self._forget_places(handles_M, size_1)
        self._deletions.record(self._layout, handles_M, size_1, self._epoch)
        table_erase.erase(self._layout, handles_M, size_1)

    def _forget_places(self, handles_M: Tensor, size_1: Tensor) -> None:
        """What is known of where these rows are: their handles may be given to others at once."""


class CudaInsert(CudaBudget):
    """Claims rows; owns what admission knows of ids without rows. Arguments as `CudaShard`'s."""

    def __init__(
        self,
        specs: Sequence[TableSpec],
        *,
        seed: int,
        device: str | torch.device,
        host_rows: bool,
    ) -> None:
        super().__init__(specs, seed=seed, device=device, host_rows=host_rows)
        self._sights = Sights([(s.hash_name, s.admission) for s in self._specs], self._device)

    def _may_lack_rows(self, shape: CallShape) -> bool:
        """Whether admission may have refused ids of a training lookup."""
        return self._sights.counts_any({k: 1 for k in shape.tables})

    def _inserted(
        self,
        shape: CallShape,
        call: CallGroups,
        counts_N: Tensor | None,
        ctx: StepContext,
        *,
        admit_all: bool = False,
        may_drop: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """Insert what is missing and admitted: handles int32 [N] and what was found, bool [N].

        Args:
            admit_all: ask no admission.
            may_drop: make room in a full table as its spec says; False raises.

        Raises:
            TableFull, OutOfDeviceMemory: no room; nothing was inserted. Only where a full table
                is trimmed may memory run out later: its new rows are there then, beyond the
                budget until the next call.
        """
        sizes = {k: int(n) for k, n in enumerate(shape.new_K) if n}
        counting = self._sights.counts_any(sizes)
        handles_N = torch.empty_like(call.ids_N, dtype=torch.int32)
        found_N = torch.empty_like(call.ids_N, dtype=torch.bool)
        missing_N = ~self._probe(call)[1] if counting else None
        wanted_N = missing_N
        if missing_N is not None and not admit_all:
            wanted_N = self._sights.add(call, counts_N, missing_N, sizes)
        try:
            loose = self._trimmed_after(shape) if may_drop else ()
            self._memory.reserve(
                self._with_room(shape, call, wanted_N, loose=loose, may_drop=may_drop)
            )
            self._memory.make_free_lists(loose)
            for form in shape.forms:
                device_form(self._forms[form], self._device)
            if missing_N is not None and wanted_N is not None and not admit_all:
                count_refused(self._layout, call, missing_N, wanted_N)
        except Exception:
            if missing_N is not None and not admit_all:
                self._sights.undo(call, counts_N, missing_N)
            raise
        # From here on nothing is allocated until all new rows are written.
        if wanted_N is not None:
            self._sights.forget(call, wanted_N)
        index.probe(self._layout, call, handles_N, found_N, wanted_N, insert=True)
        self._initialise(shape, ctx)
        try:
            if loose:
                self._trim(loose, shape, handles_N)
        finally:
            self._memory.counters.send(self._layout, self._stream)
        return handles_N, found_N

    def _initialise(self, shape: CallShape, ctx: StepContext) -> None:
        for form in shape.forms:
            initial_values.initialise(
                self._layout,
                self._forms[form],
                form,
                shape.rooms[form],
                epoch=self._epoch,
                event_time_s=ctx.event_time_s,
            )
