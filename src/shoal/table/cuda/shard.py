"""`CudaShard`: the Shard interface in Triton kernels, on one GPU."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from shoal.errors import ConfigError, DeviceUnavailable
from shoal.kernels import tables as words
from shoal.kernels.host_copies import retire
from shoal.kernels.rows import read_metadata, write_metadata, write_values, write_weights
from shoal.kernels.tables import CallGroups
from shoal.lookup import PoolPlan
from shoal.rules.initializers import initial_values
from shoal.table import checks, native, rows
from shoal.table import shard as scalars
from shoal.table.cuda.cache import CacheStats
from shoal.table.cuda.calls import CallShape, CallShapes, ShardTables, forms_of, occurrences, probed
from shoal.table.cuda.export import export_rows, read_rows, write_rows
from shoal.table.cuda.host_rows import RowsOnHost
from shoal.table.cuda.index import Index
from shoal.table.cuda.memory import DeviceMemory
from shoal.table.cuda.reader import Reader
from shoal.table.cuda.snapshots import CudaSnapshot, History
from shoal.table.cuda.stepper import Stepper
from shoal.table.cuda.ticket import CudaTicket, LiveTickets
from shoal.table.cuda.turns import Turns
from shoal.table.factory import missing_device, shard_copied
from shoal.table.shard import (
    BUFFER_BYTES,
    Found,
    GradRecord,
    IdGroups,
    StepContext,
    SummedGrads,
    check_buffer,
)
from shoal.table.spec import HostRows, TableSpec
from shoal.table.values import AdmissionState, Cursor, Entry, RowChunk, TableStats, released
from shoal.uncompiled import uncompiled


@uncompiled
class CudaShard:
    """Tables on a GPU; see `shoal.table.shard.Shard` for every method.

    Args:
        specs: the tables; names must be distinct.
        seed: with the table's name and the id, the key of every initial value.
        device: a CUDA device; "cpu" where Triton interprets its kernels.
        host_rows: weights and optimizer state are in host memory, behind a cache on the device;
            None: on the device. Index and metadata are on the device.

    Ids, offsets, weights, gradients and results are on the device; splits and tables of groups,
    exported rows and states are on the CPU. Methods run in the order of calls, on the stream that
    is current at the call, and return before the device has run them, except where a docstring
    says that they wait. Thread-safe. Summation order is fixed.

    Under nan_policy="raise" rows with a non-finite gradient are left as they are by the kernel;
    NonFiniteGradient is raised by a later method that knows, at the latest by `check()`.

    Attributes:
        specs: the tables, in the order their indices name them.
        seed: as given.
        device: where ids, rows and gradients are.
        last_step: global step of the last update: what reads without a step use (OneBit's scale).

    Raises:
        DeviceUnavailable: no such device here, or no Triton.
        OutOfDeviceMemory: no room for the expected rows or the cache.
    """

    def __init__(
        self,
        specs: Sequence[TableSpec],
        *,
        seed: int = 0,
        device: str | torch.device = "cuda",
        host_rows: HostRows | None = None,
    ) -> None:
        checks.distinct_names(specs)
        checks.seed(seed)
        if host_rows is not None and not isinstance(host_rows, HostRows):
            raise _not_host_rows(host_rows)
        where = _placed(torch.device(device))
        tables = self._tables = ShardTables(tuple(specs), *forms_of(specs), where)
        self.specs, self.seed, self.device = tables.specs, seed, where
        self._host_rows = host_rows
        self.last_step = 0
        with native.enough_memory("indexes of a GPU shard", where):
            self._memory = DeviceMemory(tables, seed=seed, host_rows=host_rows is not None)
        if where.type == "cuda":
            # Pinned memory goes back to torch at once, but kernels may yet write to it.
            weakref.finalize(self._memory, torch.cuda.synchronize, where).atexit = False
        memory, tickets, host = self._memory, LiveTickets(), None
        if host_rows is not None:
            host = RowsOnHost(tables, memory, tickets, host_rows)
        self._host = host
        self._shapes = CallShapes(tables)
        self._turns = Turns(where)
        self._history = History(tables, memory, self._turns, host)
        self._index = Index(tables, memory, self._history, host, tickets)
        self._reader = Reader(tables, memory, host)
        self._stepper = Stepper(tables, memory, self._reader.plans, self._history, host)
        on_gpu = host is not None and where.type == "cuda"
        self._ahead = torch.cuda.Stream(where) if on_gpu else None  # type: ignore[no-untyped-call]

    __reduce__ = shard_copied

    @property
    def settings(self) -> dict[str, object]:
        """What a copy is made with, besides specs, seed and device."""
        return {"host_rows": self._host_rows}

    def _call(self, groups: IdGroups) -> tuple[CallShape, CallGroups]:
        shape = self._shapes.of(groups)
        return shape, shape.groups(groups.ids_N)

    def _own(self, ticket: object) -> CudaTicket:
        if not isinstance(ticket, CudaTicket) or ticket.shard is not self or not ticket.live:
            raise native.foreign_ticket()
        if ticket.stream is not self._turns.stream:
            places_N = None if ticket.held is None else ticket.held.places_N
            retire(ticket.groups.ids_N, *ticket.parts, *(() if places_N is None else (places_N,)))
        return ticket

    def _settle(self) -> None:
        self._memory.settle(self._turns.stream)

    # Lookups

    def find(self, groups: IdGroups) -> Found:
        """Read rows; never inserts."""
        with self._turns:
            shape, call = self._call(groups)
            return Found(*self._reader.found(shape, call, self.last_step))

    def find_pooled(
        self, groups: IdGroups, plan: PoolPlan, offsets_GB1: Tensor, weights_N: Tensor | None
    ) -> tuple[Tensor, ...]:
        """`find`, pooled: one [B, width] per output."""
        with self._turns:
            shape, call = self._call(groups)
            handles_N, _ = probed(self._memory.layout, call)
            bags = (plan, offsets_GB1, weights_N, self.last_step)
            return self._reader.pooled(shape, call, handles_N, *bags, initial=False)

    def find_or_init(
        self, groups: IdGroups, counts_N: Tensor | None = None, *, ctx: StepContext
    ) -> CudaTicket:
        """Probe, decide admission once, insert admitted ids with their initial value.

        Starts to bring rows on the host to the device. Waits for the device only where a table
        may reach its `capacity_rows` and have to refuse, and, while tables grow, until the device
        is one call behind.
        """
        with self._turns:
            shape, call = self._call(groups)
            checks.one_per_id(counts_N, shape.splits[-1], self.device)
            self._stepper.raise_pending()
            stream = self._turns.stream
            lease = self._stepper.side.lease(shape.splits[-1], shape.rooms, stream)
            handles_N, met_N = self._index.inserted(shape, call, counts_N, ctx, lease=lease)
            runs = self._stepper.start_runs(handles_N, shape.rooms, lease)
            ticket = CudaTicket(
                self,
                self._turns,
                groups,
                shape,
                handles_N,
                met_N,
                occurrences(counts_N),
                ctx.event_time_s,
                runs,
                stream,
                None if self._host is None else self._host.looked_up(runs(stream)),
                lease,
            )
            self._index.tickets.add(ticket)
            return ticket

    def gather(self, ticket: object, *, ctx: StepContext) -> tuple[Tensor, ...]:
        """Read the ticket's rows now: one [n_g, D_g] per group."""
        with self._turns:
            own, call, initial = self._to_read(ticket)
            rows = (own.shape, call, own.handles_N, ctx.global_step)
            return self._reader.rows(*rows, initial=initial, held=own.held)

    def _to_read(self, ticket: object) -> tuple[CudaTicket, CallGroups, bool]:
        """A ticket, its groups, and whether some of its ids may have no row."""
        own = self._own(ticket)
        refused = self._index.may_refuse(own.shape.tables)
        return own, own.shape.groups(own.groups.ids_N), refused

    def gather_pooled(
        self,
        ticket: object,
        plan: PoolPlan,
        offsets_GB1: Tensor,
        weights_N: Tensor | None,
        *,
        ctx: StepContext,
    ) -> tuple[Tensor, ...]:
        """Read and pool the ticket's rows now: one [B, width] per output."""
        with self._turns:
            own, call, initial = self._to_read(ticket)
            bags = (plan, offsets_GB1, weights_N, ctx.global_step)
            return self._reader.pooled(
                own.shape, call, own.handles_N, *bags, initial=initial, held=own.held
            )

    def prefetch(self, groups: IdGroups) -> None:
        """Start to bring rows of a coming batch to the device, next to other work; no inserts.
        Nothing to do for rows that are there.

        The best time is between a batch's gather and its backward: the rows then cross the bus
        while the model computes. Later methods wait for them. Rows of live tickets keep their
        place.
        """
        with self._turns:
            self._shapes.of(groups)
        side = self._ahead
        if side is None:
            self._fetch(groups)
            return
        groups.ids_N.record_stream(side)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            self._fetch(groups)

    def _fetch(self, groups: IdGroups) -> None:
        if self._host is None:
            return
        with self._turns:
            shape, call = self._call(groups)
            handles_N, _ = probed(self._memory.layout, call)
            self._host.prefetch(handles_N, shape.rooms)

    # Steps

    def apply(self, records: Sequence[GradRecord], *, ctx: StepContext) -> None:
        """Sum the gradients per row over all records, one optimizer step per admitted row.

        Waits for the device only where kernels do not know a segment's rule or compressor
        (`step_plan`): plain torch steps it then.
        """
        with self._turns:
            rates_KR = self._stepper.rates(ctx)
            owned = [self._own(record.ticket) for record in records]
            joined = self._stepper.joined(records, owned)
            if joined is not None:
                self._stepper.step(joined, rates_KR, ctx)
            self._stepped(ctx)

    def sum_grads(self, records: Sequence[GradRecord]) -> SummedGrads:
        """The per-row sums `apply` would use, materialised; waits for the device."""
        with self._turns:
            owned = [self._own(record.ticket) for record in records]
            joined = self._stepper.joined(records, owned)
            return self._stepper.summed(joined)

    def apply_summed(
        self, summed: SummedGrads, records: Sequence[GradRecord], *, ctx: StepContext
    ) -> None:
        """`apply` with sums the caller may have changed; ends the records' tickets."""
        with self._turns:
            owned = [self._own(record.ticket) for record in records]
            latest_s = max([ctx.event_time_s, *(ticket.event_time_s for ticket in owned)])
            checks.rates(ctx, self.specs)
            if summed.tables:
                shape, call = self._call(checks.summed_groups(summed))
                counts_N = torch.cat(summed.counts)
                checks.one_per_id(counts_N, shape.splits[-1], self.device)
                sums = checks.grads(summed.sums, shape.grad_shapes, self.device)
                # Tickets end only after the step, so rows that were summed are still there.
                later = dataclasses.replace(ctx, event_time_s=latest_s)
                handles_N, _ = self._index.inserted(shape, call, counts_N, later)
                self._stepper.step_ids(shape, handles_N, sums, counts_N, None, latest_s, ctx)
            for ticket in owned:
                ticket.end()
            self._stepped(ctx)

    def apply_ids(
        self,
        groups: IdGroups,
        grads: Sequence[Tensor],
        counts_N: Tensor | None = None,
        *,
        ctx: StepContext,
        seen_weights: Sequence[Tensor] | None = None,
    ) -> None:
        """`apply` without a ticket: inserts what is missing, sums duplicates."""
        with self._turns:
            shape, call = self._call(groups)
            checks.one_per_id(counts_N, shape.splits[-1], self.device)
            ready = checks.grads(grads, shape.grad_shapes, self.device)
            seen = None
            if seen_weights is not None:
                seen = checks.grads(seen_weights, shape.grad_shapes, self.device)
            checks.rates(ctx, self.specs)
            handles_N, _ = self._index.inserted(shape, call, counts_N, ctx)
            time_s = ctx.event_time_s
            self._stepper.step_ids(shape, handles_N, ready, counts_N, seen, time_s, ctx)
            self._stepped(ctx)

    def _stepped(self, ctx: StepContext) -> None:
        self.last_step = ctx.global_step
        if self._host is not None:
            self._host.stepped()

    def check(self) -> None:
        """Wait for the device and raise what its kernels found since the last call.

        Raises:
            NonFiniteGradient: rows had a NaN or infinite gradient under nan_policy="raise";
                those rows were left as they were.
        """
        with self._turns:
            self._settle()
            self._stepper.raise_pending()

    # Writes by id

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """A turn in which rows are changed where they live; a cache is empty before and after."""
        with self._turns:
            if self._host is None:
                yield
                return
            self._host.cache.empty()
            try:
                yield
            finally:
                self._host.cache.empty()

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """A turn in which whole rows are read where they live: what a cache changed goes there."""
        with self._turns:
            if self._host is not None:
                self._host.cache.flush()
            yield

    def assign(self, groups: IdGroups, weights: Sequence[Tensor], *, ctx: StepContext) -> None:
        """Upsert weights; optimizer state of existing rows untouched. The last duplicate wins."""
        self._write(groups, weights, ctx, add=False)

    def assign_add(self, groups: IdGroups, deltas: Sequence[Tensor], *, ctx: StepContext) -> None:
        """Add to rows; a missing id is initialised first. Duplicates add up."""
        self._write(groups, deltas, ctx, add=True)

    def _write(
        self, groups: IdGroups, values: Sequence[Tensor], ctx: StepContext, *, add: bool
    ) -> None:
        with self._writing():
            shape, call = self._call(groups)
            ready = checks.grads(values, shape.grad_shapes, self.device)
            handles_N, _ = self._index.inserted(shape, call, None, ctx, admit_all=True)
            self._history.keep(handles_N, forms=shape.forms)
            for form in shape.forms:
                mine = [g for g, own in enumerate(shape.forms_G) if own == form]
                spans = [(shape.splits[g], shape.splits[g + 1]) for g in mine]
                write_weights(
                    self._memory.layout,
                    self._tables.forms[form],
                    torch.cat([handles_N[start:stop] for start, stop in spans]),
                    torch.cat([ready[g] for g in mine]),
                    add=add,
                    version=self._history.version,
                    event_time_s=ctx.event_time_s,
                )

    def reinitialize(self, groups: IdGroups, *, ctx: StepContext) -> Tensor:
        """Initial value and state again: int32 [N], 1 existed, 0 inserted, in input order.

        Waits for the device.
        """
        with self._writing():
            shape, call = self._call(groups)
            existed_N = probed(self._memory.layout, call)[1]
            handles_N, _ = self._index.inserted(shape, call, None, ctx, admit_all=True)
            for g, k in enumerate(shape.tables):
                part = slice(shape.splits[g], shape.splits[g + 1])
                again_M = torch.unique(handles_N[part][existed_N[part]])
                if again_M.numel():
                    self._restart_rows(k, again_M, ctx)
            return existed_N.to(torch.int32)

    def _restart_rows(self, table: int, handles_M: Tensor, ctx: StepContext) -> None:
        spec, form, layout = self.specs[table], self._tables.form(table), self._memory.layout
        self._history.keep(handles_M, forms=(self._tables.form_of[table],))
        metadata_4M = read_metadata(layout, handles_M)
        ids_M = metadata_4M[0].cpu()
        weights = _initial_weights(spec, ids_M, self.seed).to(form.dtype)
        state = torch.cat([s.optimizer.init_state(s.dim, form.real) for s in spec.segments])
        state_MS = state.expand(len(ids_M), -1).contiguous()
        write_values(layout, form, handles_M, weights.to(self.device), state_MS.to(self.device))
        versions_M = torch.full_like(metadata_4M[1], self._history.version)
        seen_M = metadata_4M[2].clamp(min=ctx.event_time_s)
        write_metadata(layout, handles_M, versions_M, seen_M, metadata_4M[3])

    # Between batches: all of it waits for the device

    def evict(self, now_s: int) -> int:
        """Drop expired rows, and those over a budget; returns how many. Never pinned ones."""
        scalars.event_time(now_s, "now_s")
        with self._turns:
            return self._index.evict(now_s)

    def export(self, table: int) -> RowChunk:
        """All rows of a table, ordered by hash, on the CPU."""
        checks.table_index(table, len(self.specs))
        with self._reading():
            self._settle()
            form, spec = self._tables.form(table), self.specs[table]
            handles_R = self._index.handles_of(table)
            layout = self._memory.layout
            return export_rows(layout, form, spec.name, handles_R, hashed_as=spec.hash_name)

    def expect(self, table: int, rows: int) -> None:
        """Nothing more than checks: growth on a GPU is quick compared with the way there.

        Raises:
            InputError: rows is negative.
            DTypeError: no int.
        """
        checks.table_index(table, len(self.specs))
        checks.expected_rows(rows)

    def load(self, table: int, chunk: RowChunk) -> None:
        """Upsert rows with their state and metadata.

        Raises:
            TableFull: they would pass `capacity_rows`; loading drops no other rows.
        """
        checks.table_index(table, len(self.specs))
        spec, form = self.specs[table], self._tables.form(table)
        parts = checks.chunk(chunk, spec, form.dtype, form.real)
        ids, versions, last_seen_s, counts, weights, state = (part.cpu() for part in parts)
        with self._writing():
            shape, call = self._call(_one_group(table, ids.to(self.device)))
            counters_C = self._memory.layout.counters_KC[table]
            before = counters_C[words.COUNT_INSERTED] + counters_C[words.COUNT_ISSUED]
            handles_N, _ = self._index.inserted(
                shape, call, None, StepContext(), admit_all=True, may_drop=False
            )
            self._history.keep(handles_N, forms=shape.forms)
            # Rows that are loaded were inserted elsewhere.
            counters_C[words.COUNT_INSERTED] = before - counters_C[words.COUNT_ISSUED]
            loaded = RowChunk(spec.name, ids, weights, state, versions, last_seen_s, counts)
            write_rows(self._memory.layout, form, handles_N, loaded)
            if len(versions):
                self._history.loaded(int(versions.max()))

    def entry(self, table: int, id: int) -> Entry | None:
        """One row in full, or None."""
        checks.table_index(table, len(self.specs))
        scalars.whole("id", id, scalars.MIN_ID, scalars.MAX_ID, remedy="Pass an int64 id.")
        with self._reading():
            _, call = self._call(_one_group(table, torch.tensor([id], device=self.device)))
            handles_1, found_1 = probed(self._memory.layout, call)
            form, name = self._tables.form(table), self.specs[table].name
            found = read_rows(self._memory.layout, form, name, handles_1[found_1])
            return rows.entry_of(found)

    def size(self, table: int) -> int:
        """Rows of a table."""
        checks.table_index(table, len(self.specs))
        with self._turns:
            self._settle()
            return int(self._memory.counters.rows_K[table])

    def clear(self, table: int) -> None:
        """Drop all rows of a table; rows of all tables leave a cache.

        Raises:
            TicketError: a live ticket holds rows.
        """
        checks.table_index(table, len(self.specs))
        with self._writing():
            if any(table in ticket.shape.tables for ticket in self._index.tickets.live()):
                raise native.rows_held(self.specs[table].name)
            if self._history.open_snapshots() or self._history.deletions.kept:
                self._settle()
                self._history.cleared(table, self._index.handles_of(table))
            self._memory.forget(table)
            self._index.admission.clear(table)
            self._settle()

    def flush(self) -> None:
        """Write rows that a cache changed to host memory; they stay in the cache."""
        with self._reading():
            pass

    def admission_state(self, table: int) -> AdmissionState:
        """Counts of ids without a row; survives a restart through `load_admission_state`."""
        checks.table_index(table, len(self.specs))
        with self._turns:
            return self._index.admission.state(table)

    def load_admission_state(self, table: int, state: AdmissionState) -> None:
        """Restore what `admission_state` returned.

        Raises:
            ShapeError: the sketch has another size than the spec's.
        """
        checks.table_index(table, len(self.specs))
        with self._turns:
            self._index.admission.load(table, state)

    def stats(self) -> tuple[TableStats, ...]:
        """Counters of every table."""
        with self._turns:
            self._settle()
            return tuple(self._stats_of(k) for k in range(len(self.specs)))

    def _stats_of(self, k: int) -> TableStats:
        known = self._memory.counters.known_KC[k]
        weights, state, metadata, index = self._memory.bytes_of(k)
        return rows.stats_of(
            self.specs[k].name,
            {
                "rows": int(self._memory.counters.rows_K[k]),
                "slots": int(self._memory.slots_K[k]),
                "weights": weights,
                "state": state,
                "metadata": metadata,
                "index": index + self._index.admission.nbytes(k),
                "inserted": int(known[words.COUNT_INSERTED] + known[words.COUNT_ISSUED]),
                "refused": int(known[words.COUNT_REFUSED]),
                "evicted": int(known[words.COUNT_EVICTED]),
                "nonfinite": int(known[words.COUNT_NONFINITE]),
            },
            on_host=self._host is not None,
        )

    def cache_stats(self) -> CacheStats:
        """What the cache of rows on the host did so far; all 0 without one."""
        with self._turns:
            return CacheStats(0, 0, 0, 0, 0, 0) if self._host is None else self._host.cache.stats()

    # What changed

    @property
    def incarnation(self) -> int:
        """Whose cursors are good; see `shoal.table.shard.Shard`."""
        with self._turns.lock:
            return self._history.incarnation

    def close_version(self) -> int:
        """Close the current version and open the next; returns the closed one. Waits for nothing.

        Raises:
            InputError: the last of 2^32 - 2 versions is open.
        """
        with self._turns:
            return self._history.close_version()

    def release(self, version: int | None, consumer: str = "") -> None:
        """Forget deletions that no consumer wants; see `shoal.table.shard.Shard`.

        Raises:
            InputError: not an int in [0, 2^32).
        """
        closed = None if version is None else released(version)
        with self._turns:
            self._history.release(closed, consumer)

    def snapshot(
        self, since: Cursor | None = None, *, buffer_bytes: int = BUFFER_BYTES
    ) -> CudaSnapshot:
        """Set a snapshot point and keep its rows, whatever methods do to them later.

        buffer_bytes: host memory for rows that change meanwhile; the rest goes to a file.

        Raises:
            InputError: too many snapshots are open, or `since` is of another incarnation or older
                than the deletions that are kept: take a full one.
        """
        check_buffer(buffer_bytes)
        with self._turns:
            self._settle()
            return self._history.snapshot(since, buffer_bytes)

    def resume(self, version: int) -> Cursor:
        """After a load: close all versions up to `version` and keep deletions from here on.

        Raises:
            InputError: a version below one that a row is stamped with, or outside [0, 2^32 - 2].
        """
        with self._turns:
            self._settle()
            return self._history.resume(version)


def _one_group(table: int, ids_N: Tensor) -> IdGroups:
    splits = torch.tensor([0, ids_N.numel()], device="cpu")
    return IdGroups(ids_N, splits, torch.tensor([table], dtype=torch.int32, device="cpu"))


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


def _not_host_rows(got: object) -> ConfigError:
    return ConfigError(
        "host_rows of a shard",
        got=repr(got),
        allowed="HostRows(...), or None for rows on the device",
        remedy="Pass shoal.HostRows(cache_bytes=...).",
    )


def _placed(device: torch.device) -> torch.device:
    """The device with its number; the CPU only where kernels are interpreted."""
    if device.type == "cuda":
        if (missing := missing_device(device)) is not None:
            raise missing
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.device("cuda", index)
    import triton  # type: ignore[import-untyped]

    if device.type == "cpu" and triton.knobs.runtime.interpret:
        return device
    raise DeviceUnavailable(
        "device of a GPU shard",
        got=str(device),
        allowed="cuda, or cpu where Triton interprets its kernels",
        remedy="Use CpuShard, or set TRITON_INTERPRET=1 before triton is imported.",
    )
