"""How ids come into a GPU shard: admission, room, and the launches that claim rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from shoal.kernels import initial_values, table_erase, table_index
from shoal.kernels.dedup import dedup_first
from shoal.kernels.refusals import count_refused
from shoal.kernels.row_scan import pin_marks
from shoal.kernels.table_layout import CHUNK_ROWS, CallGroups
from shoal.table import refusals
from shoal.table.cuda_core import CudaCore
from shoal.table.device_admission import Sights
from shoal.table.device_calls import CallShape
from shoal.table.device_counters import Counts
from shoal.table.device_evict import Scored, lowest_many, scored_jobs
from shoal.table.shard import StepContext
from shoal.table.spec import TableSpec

__all__ = ["CudaInsert"]


class CudaInsert(CudaCore):
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
        self._sights = Sights([(s.name, s.admission) for s in self._specs], self._device)
        limited = [s.capacity_rows is not None for s in self._specs]
        self._limited_K = np.array(limited, dtype=np.bool_)
        self._capacity_K: Counts = np.array(
            [np.iinfo(np.int64).max if s.capacity_rows is None else s.capacity_rows for s in specs],
            dtype=np.int64,
        )

    def _probe(self, call: CallGroups) -> tuple[Tensor, Tensor]:
        """Handles int32 [N], -1 where there is none, and bool [N]; inserts nothing."""
        handles_N = torch.empty_like(call.ids_N, dtype=torch.int32)
        found_N = torch.empty_like(call.ids_N, dtype=torch.bool)
        table_index.probe(self._layout, call, handles_N, found_N, None, insert=False)
        return handles_N, found_N

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
            TableFull, OutOfDeviceMemory: no room; nothing was inserted.
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
            self._memory.reserve(self._with_room(shape, call, wanted_N, may_drop=may_drop))
        except Exception:
            if missing_N is not None and not admit_all:
                self._sights.undo(call, counts_N, missing_N)
            raise
        if missing_N is not None and wanted_N is not None:
            if not admit_all:
                count_refused(self._layout, call, missing_N, wanted_N)
            self._sights.forget(call, wanted_N)
        table_index.probe(self._layout, call, handles_N, found_N, wanted_N, insert=True)
        self._initialise(shape, ctx)
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

    def _with_room(
        self, shape: CallShape, call: CallGroups, wanted_N: Tensor | None, *, may_drop: bool
    ) -> Counts:
        """Most rows that the call adds to each table, after making room in full ones.

        Waits for the device only where a table could pass its `capacity_rows`.

        Raises:
            TableFull: there are not enough rows that may go; nothing was dropped.
        """
        counters, capacity_K = self._memory.counters, self._capacity_K
        near_K = self._limited_K & (shape.new_K > 0)
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
        firsts, size_1 = self._firsts(call.ids_N[places], tables_N)
        distinct = tables_N[firsts[: int(size_1)]]
        counts: Counts = torch.bincount(distinct, minlength=len(self._specs)).cpu().numpy()
        return counts

    @staticmethod
    def _firsts(ids_M: Tensor, tables_M: Tensor) -> tuple[Tensor, Tensor]:
        _, _, firsts_M, _, size_1 = dedup_first(ids_M, tables_M)
        return firsts_M, size_1

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
                raise refusals.table_full(
                    spec.name, int(rows_K[k]), int(self._capacity_K[k]), int(fresh_K[k])
                )
        tables = [int(k) for k in np.flatnonzero(over_K > 0)]
        drops = [int(over_K[k] + self._capacity_K[k] // 64) for k in tables]
        self._drop(
            tables, [min(d, int(free_K[k])) for d, k in zip(drops, tables, strict=True)], marks
        )

    def _marked_K(self, marks: Tensor) -> Counts:
        """Marked rows of each table; waits for the device."""
        per_chunk = marks.view(-1, CHUNK_ROWS).sum(dim=1, dtype=torch.int64).cpu().numpy()
        counts = np.zeros(len(self._specs), dtype=np.int64)
        np.add.at(counts, self._memory.tables_of_chunks, per_chunk[: self._memory.chunks])
        return counts

    def _drop(self, tables: Sequence[int], drops: Sequence[int], marks: Tensor | None) -> None:
        """Drop so many rows of each of these tables, those of least score, but no marked ones."""
        # First, because selected rows are marked as free and must then leave the index.
        self._memory.make_free_lists(tables)
        jobs_EW = scored_jobs(
            [Scored(k, "lfu" if self._specs[k].on_full == "lfu" else "lru") for k in tables],
            self._device,
        )
        rows = max(int(self._memory.rows_room_K[k]) for k in tables)
        gone_M, size_1 = lowest_many(self._layout, jobs_EW, rows, drops, marks)
        self._erase(gone_M, size_1)

    def _erase(self, handles_M: Tensor, size_1: Tensor) -> None:
        """Take dropped rows out of the index; their tables' free lists are long enough."""
        table_erase.erase(self._layout, handles_M, size_1.to(torch.int32))
