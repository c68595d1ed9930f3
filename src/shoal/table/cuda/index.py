"""How ids come into a GPU shard: admission, room within row budgets, the claims of rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from shoal.kernels import index as table_index
from shoal.kernels import initial_values
from shoal.kernels.admission import count_refused
from shoal.kernels.host_copies import retire, sent
from shoal.kernels.ids import dedup_first
from shoal.kernels.initial_values import device_form
from shoal.kernels.lowest_rows import lowest_rows
from shoal.kernels.row_changes import Scan, expired_rows, overdrafts, pin_marks
from shoal.kernels.tables import CHUNK_ROWS, CHUNK_TABLE, CallGroups
from shoal.table import native
from shoal.table.cuda.admission import AdmissionCounters
from shoal.table.cuda.calls import CallShape, ShardTables, probed
from shoal.table.cuda.counters import Counts
from shoal.table.cuda.eviction_order import Lives, scanned_together, scored_jobs
from shoal.table.cuda.host_rows import RowsOnHost
from shoal.table.cuda.memory import DeviceMemory
from shoal.table.cuda.side_stream import Lease
from shoal.table.cuda.snapshots import History
from shoal.table.cuda.ticket import LiveTickets
from shoal.table.shard import StepContext

# A scan costs the table, not what it drops, so tables drop this share of their budget ahead.
_AHEAD = 64
_JOBS_KEPT = 16


class Index:
    """Which ids have rows in a GPU shard: admits, inserts, keeps tables within their budgets.

    Args:
        tables, memory: the shard's.
        history: is called for rows that are dropped.
        host: where rows are on the host; else None.

    Attributes:
        tickets: lookups whose rows may not go.
        admission: what is known of ids without rows.
    """

    def __init__(
        self,
        tables: ShardTables,
        memory: DeviceMemory,
        history: History,
        host: RowsOnHost | None,
        tickets: LiveTickets,
    ) -> None:
        specs = tables.specs
        self.tickets = tickets
        self.admission = AdmissionCounters(
            [(s.hash_name, s.admission) for s in specs], tables.device
        )
        self._tables = tables
        self._memory = memory
        self._history = history
        self._host = host
        limited = [s.capacity_rows is not None for s in specs]
        self._limited_K = np.array(limited, dtype=np.bool_)
        dropping = [s.capacity_rows is not None and s.on_full != "raise" for s in specs]
        self._dropping_K = np.array(dropping, dtype=np.bool_)
        self._limits, self._drops = any(limited), any(dropping)
        self._capacity_K: Counts = np.array(
            [np.iinfo(np.int64).max if s.capacity_rows is None else s.capacity_rows for s in specs],
            dtype=np.int64,
        )
        # What trimming some tables takes, on the device: jobs, and budgets for `overdrafts`.
        self._trims: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}
        # Most rows beyond its budget that each table holds because a trim ran out of memory.
        self._over_K: Counts = np.zeros(len(specs), dtype=np.int64)

    def may_refuse(self, tables: Sequence[int]) -> bool:
        """Whether admission may have refused ids of a lookup in these tables."""
        return self.admission.counts_any(tables)

    def handles_of(self, table: int) -> Tensor:
        """Handles of a table's rows, int32 [R]; waits for the device."""
        return table_index.list_handles(self._memory.entries_of(table))

    def evict(self, now_s: int) -> int:
        """Drop expired rows, and those over a budget; returns how many. Waits for the device."""
        memory, history = self._memory, self._history
        counters = memory.counters
        memory.settle(history.turns.stream)
        before = counters.erased
        held = [ticket.handles_N for ticket in self.tickets.live()]
        marks = pin_marks(held, memory.chunks_ready) if held else None
        expiring = {k: s.expiry for k, s in enumerate(self._tables.specs) if s.expiry is not None}
        if expiring:
            memory.make_free_lists(list(expiring))
            for part in self._scans(list(expiring)):
                room = max(int(memory.rows_room_K[k]) for k in part)
                lives = Lives([(k, expiring[k]) for k in part], self._tables.device)
                scan = Scan(lives.jobs_EW, room, marks=marks)
                gone_M, size_1 = expired_rows(memory.layout, scan, now_s)
                if history.deletions.kept or history.open_snapshots():
                    # Few of many: room is needed for those only, and all of this waits.
                    gone_M = gone_M[: int(size_1)]
                self._erase(gone_M, size_1)
            memory.settle(history.turns.stream)
        over_K = np.where(self._limited_K, counters.rows_K - self._capacity_K, 0)
        tables = [int(k) for k in np.flatnonzero(over_K > 0)]
        if tables:
            self.drop(tables, [int(over_K[k]) for k in tables], marks)
            memory.settle(history.turns.stream)
        return counters.erased - before

    def _trimmed_after(self, shape: CallShape) -> tuple[int, ...]:
        """Tables that may pass their budget in this call and are sure to have rows to drop then:
        those of the call and of live tickets fit in.
        """
        if not self._drops:
            return ()
        full_K = self._dropping_K & (shape.new_K > 0)
        full_K &= self._memory.counters.rows_bound_K + shape.new_K > self._capacity_K
        if not full_K.any():
            return ()
        kept_K = shape.new_K + sum(ticket.shape.new_K for ticket in self.tickets.live())
        full_K &= kept_K <= self._capacity_K
        tables = tuple(np.flatnonzero(full_K).tolist())
        if tables:
            self._memory.overdraw(np.where(full_K, shape.new_K + self._over_K, 0))
        return tables

    def _trim(self, tables: tuple[int, ...], shape: CallShape, handles_N: Tensor) -> None:
        """Drop what these tables hold beyond their budgets, but no rows of live lookups."""
        self._over_K[list(tables)] += shape.new_K[list(tables)]
        held = [ticket.handles_N for ticket in self.tickets.live()]
        marks = pin_marks([handles_N, *held], self._memory.chunks_ready)
        for part in self._scans(tables):
            self._trim_part(part, marks)

    def _scans(self, tables: Sequence[int]) -> list[tuple[int, ...]]:
        """Tables that one scan takes."""
        parts = scanned_together([int(self._memory.rows_room_K[k]) for k in tables])
        return [tuple(tables[at] for at in part) for part in parts]

    def _trim_part(self, tables: tuple[int, ...], marks: Tensor) -> None:
        rows_of = list(tables)
        trim = self._trims.get(tables)
        if trim is None:
            if len(self._trims) >= _JOBS_KEPT:
                for old in self._trims.values():
                    retire(*old)
                self._trims.clear()
            trim = self._trims[tables] = self._made_trim(tables)
        drops_E = overdrafts(self._memory.layout, trim[1])
        rows = int(self._memory.rows_room_K[rows_of].max())
        most = int((self._over_K[rows_of] + self._capacity_K[rows_of] // _AHEAD).sum())
        scan = Scan(trim[0], rows, marks=marks)
        self._erase(*lowest_rows(self._memory.layout, scan, drops_E, most))
        self._over_K[rows_of] = 0

    def _made_trim(self, tables: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        capacity_E = self._capacity_K[list(tables)]
        budgets_EW = np.stack([np.array(tables), capacity_E, capacity_E // _AHEAD], axis=1)
        return self._jobs(tables), sent(torch.from_numpy(budgets_EW), self._tables.device)

    def _jobs(self, tables: Sequence[int]) -> Tensor:
        kinds = [(k, self._tables.specs[k].on_full) for k in tables]
        return scored_jobs(kinds, self._tables.device)

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
        if not self._limits:
            return shape.new_K
        counters, capacity_K = self._memory.counters, self._capacity_K
        near_K = self._limited_K & (shape.new_K > 0)
        near_K[list(loose)] = False
        if not (near_K & (counters.rows_bound_K + shape.new_K > capacity_K)).any():
            return shape.new_K
        counters.wait()
        handles_N, found_N = probed(self._memory.layout, call)
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
            return np.zeros(len(self._tables.specs), dtype=np.int64)
        sizes_G = call.splits_G1.diff()
        tables_N = torch.repeat_interleave(
            call.tables_G.to(torch.int64), sizes_G, output_size=shape.splits[-1]
        )[places]
        _, _, firsts, _, size_1 = dedup_first(call.ids_N[places], tables_N)
        distinct = tables_N[firsts[: int(size_1)]]
        counts: Counts = torch.bincount(distinct, minlength=len(self._tables.specs)).cpu().numpy()
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
        held = [ticket.handles_N for ticket in self.tickets.live()]
        marks = pin_marks([handles_N, *held], self._memory.chunks_ready)
        rows_K = self._memory.counters.rows_K
        free_K = rows_K - self._marked_K(marks)
        for k in np.flatnonzero(over_K > 0):
            spec = self._tables.specs[k]
            if not may_drop or spec.on_full == "raise" or over_K[k] > free_K[k]:
                droppable = may_drop and spec.on_full != "raise"
                kept = int(rows_K[k] - free_K[k] if droppable else rows_K[k])
                capacity, fresh = int(self._capacity_K[k]), int(fresh_K[k])
                raise native.table_full(spec.name, spec.on_full, capacity, kept=kept, wanted=fresh)
        tables = [int(k) for k in np.flatnonzero(over_K > 0)]
        drops = [int(over_K[k] + self._capacity_K[k] // _AHEAD) for k in tables]
        self.drop(
            tables, [min(d, int(free_K[k])) for d, k in zip(drops, tables, strict=True)], marks
        )

    def _marked_K(self, marks: Tensor) -> Counts:
        """Marked rows of each table; waits for the device."""
        per_chunk = marks.view(-1, CHUNK_ROWS).sum(dim=1, dtype=torch.int64).cpu().numpy()
        counts = np.zeros(len(self._tables.specs), dtype=np.int64)
        np.add.at(counts, self._memory.columns_WC[CHUNK_TABLE, : len(per_chunk)], per_chunk)
        return counts

    def drop(self, tables: Sequence[int], drops: Sequence[int], marks: Tensor | None) -> None:
        """Drop so many rows of each of these tables, those of least score, but no marked ones."""
        # First, because selected rows are marked as free and must then leave the index.
        self._memory.make_free_lists(tables)
        drop_of = dict(zip(tables, drops, strict=True))
        for part in self._scans(tables):
            rows = max(int(self._memory.rows_room_K[k]) for k in part)
            wanted = [drop_of[k] for k in part]
            scan = Scan(self._jobs(part), rows, marks=marks)
            drops_E = sent(wanted, self._tables.device)
            self._erase(*lowest_rows(self._memory.layout, scan, drops_E, sum(wanted)))

    def _erase(self, handles_M: Tensor, size_1: Tensor) -> None:
        """Take dropped rows out of the index; their tables' free lists are long enough."""
        # Their versions are 0 by now, but all else of them is there.
        self._history.keep(handles_M, size_1)
        if self._host is not None:
            # Their handles may be given to others at once.
            self._host.cache.drop(handles_M, size_1)
        self._history.deleted(handles_M, size_1)
        table_index.erase(self._memory.layout, handles_M, size_1)

    def inserted(
        self,
        shape: CallShape,
        call: CallGroups,
        counts_N: Tensor | None,
        ctx: StepContext,
        *,
        admit_all: bool = False,
        may_drop: bool = True,
        lease: Lease | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Insert what is missing and admitted: handles int32 [N] and what was found, int8 [N].

        Args:
            admit_all: ask no admission.
            may_drop: make room in a full table as its spec says; False raises.
            lease: has the memory for both.

        Raises:
            TableFull, OutOfDeviceMemory: no room; nothing was inserted. Only where a full table
                is trimmed may memory run out later: its new rows are there then, beyond the
                budget until the next call.
        """
        counting = self.admission.counts_any(shape.ids_of)
        if lease is None:
            handles_N = torch.empty_like(call.ids_N, dtype=torch.int32)
            met_N = torch.empty_like(call.ids_N, dtype=torch.int8)
        else:
            handles_N, met_N = lease.handles_N, lease.met_N
        missing_N = ~probed(self._memory.layout, call)[1] if counting else None
        wanted_N = missing_N
        if missing_N is not None and not admit_all:
            wanted_N = self.admission.add(call, counts_N, missing_N, shape.ids_of)
        try:
            loose = self._trimmed_after(shape) if may_drop else ()
            self._memory.reserve(
                self._with_room(shape, call, wanted_N, loose=loose, may_drop=may_drop)
            )
            if loose:
                self._memory.make_free_lists(loose)
            for form in shape.forms:
                device_form(self._tables.forms[form], self._tables.device)
            if missing_N is not None and wanted_N is not None and not admit_all:
                count_refused(self._memory.layout, call, missing_N, wanted_N)
        except Exception:
            if missing_N is not None and not admit_all:
                self.admission.undo(call, counts_N, missing_N)
            raise
        # From here on nothing is allocated until all new rows are written.
        if wanted_N is not None:
            self.admission.forget(call, wanted_N)
        table_index.probe(self._memory.layout, call, handles_N, met_N, wanted_N, insert=True)
        self._initialise(shape, ctx)
        try:
            if loose:
                self._trim(loose, shape, handles_N)
        finally:
            self._memory.counters.send(self._memory.layout, self._history.turns.stream)
        return handles_N, met_N

    def _initialise(self, shape: CallShape, ctx: StepContext) -> None:
        for form in shape.forms:
            initial_values.initialise(
                self._memory.layout,
                self._tables.forms[form],
                form,
                shape.rooms[form],
                version=self._history.version,
                event_time_s=ctx.event_time_s,
            )
