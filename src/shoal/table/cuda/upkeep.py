"""Methods of a GPU shard beside the step: writes by id, eviction, versions, whole rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from shoal.errors import TicketError
from shoal.kernels import index as table_erase
from shoal.kernels.history import pin_marks
from shoal.kernels.rows import Metadata, read_metadata, write_metadata, write_values, write_weights
from shoal.kernels.tables import (
    COUNT_ERASED,
    COUNT_EVICTED,
    COUNT_FREE,
    COUNT_FRESH,
    COUNT_INSERTED,
    COUNT_ISSUED,
    COUNT_NONFINITE,
    COUNT_READY,
    COUNT_REFUSED,
)
from shoal.rules.initializers import initial_values
from shoal.table import checks, rows, shard
from shoal.table.cuda.core import drawn_incarnation
from shoal.table.cuda.deletions import RECORD
from shoal.table.cuda.eviction import Lives, expired_many
from shoal.table.cuda.export import entry_of, export_rows, write_rows
from shoal.table.cuda.stepper import CudaStep
from shoal.table.shard import IdGroups, StepContext
from shoal.table.spec import TableSpec
from shoal.table.values import AdmissionState, Entry, RowChunk, TableStats


class CudaWrite(CudaStep):
    """Upserts rows. Arguments as `CudaShard`'s."""

    def assign(self, groups: IdGroups, weights: Sequence[Tensor], *, ctx: StepContext) -> None:
        """Upsert weights; optimizer state of existing rows untouched. The last duplicate wins."""
        self._write(groups, weights, ctx, add=False)

    def assign_add(self, groups: IdGroups, deltas: Sequence[Tensor], *, ctx: StepContext) -> None:
        """Add to rows; a missing id is initialised first. Duplicates add up."""
        self._write(groups, deltas, ctx, add=True)

    def _write(
        self, groups: IdGroups, values: Sequence[Tensor], ctx: StepContext, *, add: bool
    ) -> None:
        with self._turn():
            shape, call = self._call(groups)
            ready = checks.grads(values, self._group_shapes(shape), self._device)
            handles_N, _ = self._inserted(shape, call, None, ctx, admit_all=True)
            self._keep(handles_N, forms=shape.forms)
            for form in shape.forms:
                mine = [g for g, k in enumerate(shape.tables) if self._form_of[k] == form]
                cuts = [(shape.splits[g], shape.splits[g + 1]) for g in mine]
                write_weights(
                    self._layout,
                    self._forms[form],
                    torch.cat([handles_N[start:stop] for start, stop in cuts]),
                    torch.cat([ready[g] for g in mine]),
                    add=add,
                    epoch=self._epoch,
                    event_time_s=ctx.event_time_s,
                )

    def reinitialize(self, groups: IdGroups, *, ctx: StepContext) -> Tensor:
        """Initial value and state again: int32 [N], 1 existed, 0 inserted, in input order.

        Waits for the device.
        """
        with self._turn():
            shape, call = self._call(groups)
            existed_N = self._probe(call)[1]
            handles_N, _ = self._inserted(shape, call, None, ctx, admit_all=True)
            for g, k in enumerate(shape.tables):
                part = slice(shape.splits[g], shape.splits[g + 1])
                again_M = torch.unique(handles_N[part][existed_N[part]])
                if again_M.numel():
                    self._restart_rows(k, again_M, ctx)
            return existed_N.to(torch.int32)

    def _restart_rows(self, table: int, handles_M: Tensor, ctx: StepContext) -> None:
        spec, form = self._specs[table], self._forms[self._form_of[table]]
        self._keep(handles_M, forms=(self._form_of[table],))
        metadata_4M = read_metadata(self._layout, handles_M)
        ids_M = metadata_4M[0].cpu()
        weights = _initial_weights(spec, ids_M, self._seed).to(form.dtype)
        state = torch.cat([s.optimizer.init_state(s.dim, form.real) for s in spec.segments])
        state_MS = state.expand(len(ids_M), -1).contiguous()
        write_values(
            self._layout,
            form,
            handles_M,
            weights.to(self._device),
            state_MS.to(self._device),
        )
        epoch_M = torch.full_like(metadata_4M[1], self._epoch)
        seen_M = metadata_4M[2].clamp(min=ctx.event_time_s)
        write_metadata(self._layout, handles_M, Metadata(versions=epoch_M, last_seen_s=seen_M))


def _initial_weights(spec: TableSpec, ids_M: Tensor, seed: int) -> Tensor:
    parts, start = list[Tensor](), spec.first_column
    for segment in spec.segments:
        parts.append(
            initial_values(
                segment.initializer,
                ids_M,
                seed=seed,
                table=spec.hash_name,
                column_start=start,
                dim=segment.dim,
            )
        )
        start += segment.dim
    return torch.cat(parts, dim=1)


_PIECE_ROWS = 1 << 20


class CudaUpkeep(CudaWrite):
    """What a GPU shard does between batches; all of it waits for the device."""

    def evict(self, now_s: int) -> int:
        """Drop expired rows, and those over a budget; returns how many. Never pinned ones."""
        shard.event_time(now_s, "now_s")
        with self._turn():
            counters = self._memory.counters
            self._settled()
            before = int(counters.known_KC[:, COUNT_EVICTED].sum())
            held = [ticket.handles_N for ticket in self._live_tickets()]
            marks = pin_marks(held, self._memory.chunks) if held else None
            expiring = {k: s.expiry for k, s in enumerate(self._specs) if s.expiry is not None}
            if expiring:
                self._memory.make_free_lists(list(expiring))
                for part in self._scans(list(expiring)):
                    room = max(int(self._memory.rows_room_K[k]) for k in part)
                    lives = Lives([(k, expiring[k]) for k in part], self._device)
                    gone_M, size_1 = expired_many(self._layout, lives, room, now_s, marks)
                    if self._deletions.kept or self._open_snapshot() is not None:
                        # Few of many: room is needed for those only, and all of this waits.
                        gone_M = gone_M[: int(size_1)]
                    self._erase(gone_M, size_1)
                self._settled()
            over_K = np.where(self._limited_K, counters.rows_K - self._capacity_K, 0)
            tables = [int(k) for k in np.flatnonzero(over_K > 0)]
            if tables:
                self._drop(tables, [int(over_K[k]) for k in tables], marks)
                self._settled()
            return int(counters.known_KC[:, COUNT_EVICTED].sum()) - before

    def export(self, table: int) -> RowChunk:
        """All rows of a table, ordered by hash, on the CPU."""
        checks.table_index(table, len(self._specs))
        with self._rows_at_home():
            self._settled()
            form, spec = self._forms[self._form_of[table]], self._specs[table]
            handles_R = self._handles_of(table)
            return export_rows(self._layout, form, spec.name, handles_R, hashed_as=spec.hash_name)

    @contextmanager
    def _rows_at_home(self) -> Iterator[None]:
        """A turn in which the rows are where their handles say, as of the last verb."""
        with self._turn():
            yield

    def _handles_of(self, table: int) -> Tensor:
        size = int(self._memory.counters.rows_K[table])
        handles_R = torch.empty(size, dtype=torch.int32, device=self._device)
        size_1 = torch.zeros(1, dtype=torch.int32, device=self._device)
        slots = int(self._memory.slots_K[table])
        table_erase.list_handles(self._layout, table, slots, handles_R, size_1)
        return handles_R

    def expect(self, table: int, rows: int) -> None:
        """Nothing more than checks: growth on a GPU is quick beside the way there.

        Raises:
            InputError: rows is negative.
            DTypeError: no int.
        """
        checks.table_index(table, len(self._specs))
        checks.expected_rows(rows)

    def load(self, table: int, chunk: RowChunk) -> None:
        """Upsert rows with their state and metadata.

        Raises:
            TableFull: they would pass `capacity_rows`; loading drops no other rows.
        """
        checks.table_index(table, len(self._specs))
        spec, form = self._specs[table], self._forms[self._form_of[table]]
        parts = checks.chunk(chunk, spec, form.dtype, form.real)
        ids, versions, last_seen_s, counts, weights, state = (part.cpu() for part in parts)
        with self._turn():
            ids_N = ids.to(self._device)
            groups = IdGroups(
                ids_N,
                torch.tensor([0, ids_N.numel()], device="cpu"),
                torch.tensor([table], dtype=torch.int32, device="cpu"),
            )
            shape, call = self._call(groups)
            counters_C = self._layout.counters_KC[table]
            before = counters_C[COUNT_INSERTED] + counters_C[COUNT_ISSUED]
            handles_N, _ = self._inserted(
                shape, call, None, StepContext(), admit_all=True, may_drop=False
            )
            self._keep(handles_N, forms=shape.forms)
            # They bring versions of an earlier life, which no cursor of this one covers.
            if len(versions):
                self._incarnation = drawn_incarnation()
            # Rows that are loaded were inserted elsewhere.
            counters_C[COUNT_INSERTED] = before - counters_C[COUNT_ISSUED]
            loaded = RowChunk(spec.name, ids, weights, state, versions, last_seen_s, counts)
            write_rows(self._layout, form, handles_N, loaded)
            # Stamps to come must not lie before those that came in.
            self._epoch = max(self._epoch, int(versions.max()) if len(versions) else 0)
            if len(versions) and self._deletions.open:
                self._deletions.start(self._epoch - 1)

    def entry(self, table: int, id: int) -> Entry | None:
        """One row in full, or None."""
        checks.table_index(table, len(self._specs))
        shard.whole("id", id, shard.MIN_ID, shard.MAX_ID, remedy="Pass an int64 id.")
        with self._rows_at_home():
            groups = IdGroups(
                torch.tensor([id], device=self._device),
                torch.tensor([0, 1], device="cpu"),
                torch.tensor([table], dtype=torch.int32, device="cpu"),
            )
            _, call = self._call(groups)
            handles_1, _ = self._probe(call)
            return entry_of(self._layout, self._forms[self._form_of[table]], handles_1)

    def size(self, table: int) -> int:
        """Rows of a table."""
        checks.table_index(table, len(self._specs))
        with self._turn():
            self._settled()
            return int(self._memory.counters.rows_K[table])

    def clear(self, table: int) -> None:
        """Drop all rows of a table.

        Raises:
            TicketError: a live ticket holds rows.
        """
        checks.table_index(table, len(self._specs))
        with self._turn():
            name = self._specs[table].name
            if any(table in ticket.shape.tables for ticket in self._live_tickets()):
                raise TicketError(
                    f"clear of table {name!r}",
                    got="live tickets",
                    allowed="no step in flight",
                    remedy="Call step() or zero_grad() first.",
                )
            if self._open_snapshot() is not None:
                self._settled()
                self._keep(self._handles_of(table), forms=(self._form_of[table],))
            if self._deletions.kept:
                self._log_all(table)
            self._memory.forget(table)
            counters_C = self._layout.counters_KC[table]
            counters_C[COUNT_INSERTED] += counters_C[COUNT_ISSUED]
            for word in (COUNT_ISSUED, COUNT_FREE, COUNT_FRESH, COUNT_READY, COUNT_ERASED):
                counters_C[word] = 0
            self._sights.clear(table)
            self._settled()

    def _log_all(self, table: int) -> None:
        """Log the ids of a whole table, piece by piece: they are about to go."""
        self._settled()
        self._deletions.drain()
        for handles_R in torch.split(self._handles_of(table), _PIECE_ROWS):
            ids_R = read_metadata(self._layout, handles_R)[0]
            records_R = np.empty(len(ids_R), dtype=RECORD)
            records_R["id"], records_R["epoch"] = ids_R.cpu().numpy(), self._epoch
            records_R["table"] = table
            self._deletions.append(records_R)

    def admission_state(self, table: int) -> AdmissionState:
        """Sights of ids without a row; survives a restart through `load_admission_state`."""
        checks.table_index(table, len(self._specs))
        with self._turn():
            return self._sights.state(table)

    def load_admission_state(self, table: int, state: AdmissionState) -> None:
        """Restore what `admission_state` returned.

        Raises:
            ShapeError: the sketch has another size than the spec's.
        """
        checks.table_index(table, len(self._specs))
        with self._turn():
            self._sights.load(table, state)

    def stats(self) -> tuple[TableStats, ...]:
        """Counters of every table."""
        with self._turn():
            self._settled()
            return tuple(self._stats_of(k) for k in range(len(self._specs)))

    def _stats_of(self, k: int) -> TableStats:
        known = self._memory.counters.known_KC[k]
        weights, state, metadata, index = self._memory.bytes_of(k)
        return rows.stats_of(
            self._specs[k].name,
            {
                "rows": int(self._memory.counters.rows_K[k]),
                "slots": int(self._memory.slots_K[k]),
                "weights": weights,
                "state": state,
                "metadata": metadata,
                "index": index + self._sights.nbytes(k),
                "inserted": int(known[COUNT_INSERTED] + known[COUNT_ISSUED]),
                "refused": int(known[COUNT_REFUSED]),
                "evicted": int(known[COUNT_EVICTED]),
                "nonfinite": int(known[COUNT_NONFINITE]),
            },
        )

    def _settled(self) -> None:
        """Have the device's counters at hand."""
        self._memory.counters.send(self._layout, self._stream)
        self._memory.counters.wait()
