"""`CpuShard`: the Shard interface over the compiled core."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from shoal import _core
from shoal.address import address, empty_flags, empty_rows, fresh_address
from shoal.errors import ConfigError, InputError
from shoal.lookup import PoolPlan
from shoal.table import checks, native, rows, shard
from shoal.table.cpu.snapshot import CpuSnapshot
from shoal.table.factory import shard_copied
from shoal.table.native import RateList, table_dict
from shoal.table.shard import (
    BUFFER_BYTES,
    Found,
    GradRecord,
    IdGroups,
    StepContext,
    SummedGrads,
    not_copied,
)
from shoal.table.spec import MAX_THREADS, TableSpec
from shoal.table.values import (
    AdmissionState,
    Cursor,
    Entry,
    RowChunk,
    TableStats,
    released,
)
from shoal.uncompiled import uncompiled


@uncompiled
@dataclass(slots=True, eq=False, repr=False)
class CpuTicket:
    """See `shoal.table.shard.Ticket`; ends with this object at the latest."""

    shard: object
    core: Any
    groups: IdGroups
    native: Any

    def __reduce__(self) -> Any:
        raise not_copied("a ticket")

    @property
    def admitted_N(self) -> Tensor:
        """bool [N]: the id has a row."""
        flags_N, place = empty_flags(self.groups.ids_N.numel())
        self.core.admitted(place)
        return flags_N

    @property
    def found_N(self) -> Tensor:
        """bool [N]: the id had a row before this lookup."""
        flags_N, place = empty_flags(self.groups.ids_N.numel())
        self.core.found(place)
        return flags_N

    def end(self) -> None:
        """Release the rows; a second call does nothing."""
        self.core.end()


_NAN_POLICY = {"raise": 0, "skip": 1, "clip": 2}
_ASSIGN, _ADD, _REINITIALIZE = 0, 1, 2


_PLANS_KEPT = 64


@dataclass(frozen=True, slots=True)
class _KeptPlan:
    """A compiled plan; `plan` and `tables_G` are held so that their identities stay theirs."""

    plan: PoolPlan
    tables_G: Tensor
    core: Any
    dtypes: tuple[torch.dtype, ...]


@uncompiled
class CpuShard:
    """Tables in this process's memory; see `shoal.table.shard.Shard` for every method.

    Args:
        specs: the tables; names must be distinct.
        seed: with the table's name and the id, the key of every initial value.
        threads: threads a call may use; None follows `torch.get_num_threads()` at each call.

    Attributes:
        specs: the tables, in the order their indices name them.
        seed: as given.
        device: the CPU.

    Thread-safe. Lookups run in parallel; a method that changes rows has the shard to itself, first
    come first served. Summation order is fixed, whatever the thread count.
    """

    device = torch.device("cpu")

    def __init__(
        self, specs: Sequence[TableSpec], *, seed: int = 0, threads: int | None = None
    ) -> None:
        checks.distinct_names(specs)
        checks.seed(seed)
        if threads is not None and not 1 <= threads <= MAX_THREADS:
            raise ConfigError(
                "threads of a CPU shard",
                got=threads,
                allowed=f"None or 1..{MAX_THREADS}",
                remedy="Leave it out to follow torch.get_num_threads().",
            )
        self.specs = tuple(specs)
        self.seed = seed
        self._core = _core.Shard([table_dict(spec, seed) for spec in specs])
        self._threads = threads
        self._dims = tuple(spec.dim for spec in self.specs)
        self._reals = tuple(rows.real_dtype(spec) for spec in self.specs)
        self._rate_list = RateList(self.specs)
        self._plans: dict[tuple[int, int], _KeptPlan] = {}

    __reduce__ = shard_copied

    def _lanes(self) -> int:
        return self._threads or torch.get_num_threads()

    def _groups(self, groups: IdGroups) -> Any:
        return checks.groups(groups, len(self.specs))

    def _per_group(self, groups: IdGroups) -> list[Tensor]:
        if len(self._dims) == 1 and groups.tables_G.numel() == 1:
            return [empty_rows(groups.ids_N.numel(), self._dims[0], self._reals[0])]
        tables = groups.tables_G.tolist()
        sizes = groups.splits_G1.diff().tolist()
        rooms = [size * self._dims[t] for size, t in zip(sizes, tables, strict=True)]
        # Rows of one dtype lie in one buffer, in group order: an exchange sends it as it is.
        outputs: dict[int, Tensor] = {}
        for real in {self._reals[t] for t in tables}:
            members = [g for g, t in enumerate(tables) if self._reals[t] is real]
            buffer = empty_rows(sum(rooms[g] for g in members), 1, real).view(-1)
            parts = torch.split(buffer, [rooms[g] for g in members])
            for g, part in zip(members, parts, strict=True):
                outputs[g] = part.view(sizes[g], self._dims[tables[g]])
        return [outputs[g] for g in range(len(tables))]

    def _plan(self, plan: PoolPlan, groups: IdGroups) -> tuple[Any, tuple[torch.dtype, ...]]:
        """The compiled plan, checked for the tables of these groups, and its outputs' dtypes."""
        # A collection hands in the same two objects at every call; kept here, they stay distinct.
        key = (id(plan), id(groups.tables_G))
        kept = self._plans.get(key)
        if kept is not None:
            return kept.core, kept.dtypes
        dtypes = checks.plan(plan, groups.tables_G.tolist(), self._dims, self._reals)
        tables = plan.tables
        core = _core.Plan(
            address(tables.features_F),
            tables.features_F.shape[0],
            address(tables.slices_S),
            tables.slices_S.shape[0],
            [output.width for output in plan.outputs],
        )
        if len(self._plans) >= _PLANS_KEPT:
            self._plans.clear()
        self._plans[key] = _KeptPlan(plan, groups.tables_G, core, dtypes)
        return core, dtypes

    def find(self, groups: IdGroups, *, out: Tensor | None = None) -> Found:
        """Read rows; never inserts. `out` [N, D] receives the rows of a single group."""
        core = checks.groups(groups, len(self.specs))
        if out is None:
            outputs = self._per_group(groups)
            places = [fresh_address(o) for o in outputs]
        else:
            checks.single_output(out, groups, self._dims, self._reals)
            outputs, places = [out], [address(out)]
        found_N, flags = empty_flags(groups.ids_N.numel())
        self._core.find(core, places, flags, self._threads or torch.get_num_threads())
        return Found(tuple(outputs), found_N)

    def find_pooled(
        self, groups: IdGroups, plan: PoolPlan, offsets_GB1: Tensor, weights_N: Tensor | None
    ) -> tuple[Tensor, ...]:
        """`find`, pooled: one [B, width] per output."""
        core = self._groups(groups)
        compiled, dtypes = self._plan(plan, groups)
        bags = checks.bags(groups, core, offsets_GB1, weights_N)
        outputs = self._outputs(plan, dtypes, bags[1])
        places = [fresh_address(o) for o in outputs]
        self._core.find_pooled(core, compiled, *bags, places, self._lanes())
        return outputs

    def _outputs(
        self, plan: PoolPlan, dtypes: tuple[torch.dtype, ...], bags: int
    ) -> tuple[Tensor, ...]:
        return tuple(
            empty_rows(bags, output.width, dtype)
            for output, dtype in zip(plan.outputs, dtypes, strict=True)
        )

    def find_or_init(
        self, groups: IdGroups, counts_N: Tensor | None = None, *, ctx: StepContext
    ) -> CpuTicket:
        """Probe, decide admission once, insert admitted ids with their initial value."""
        core = self._groups(groups)
        counts = checks.counts(groups, counts_N)
        step = ctx.global_step, ctx.event_time_s
        try:
            ticket = self._core.find_or_init(core, counts, *step, self._lanes())
        except native.CORE_ERRORS as error:
            raise native.reworded(error) from None
        return CpuTicket(self, ticket, groups, core)

    def _own(self, ticket: object) -> CpuTicket:
        if not isinstance(ticket, CpuTicket) or ticket.shard is not self or not ticket.core.live:
            raise native.foreign_ticket()
        return ticket

    def gather(self, ticket: object, *, ctx: StepContext) -> tuple[Tensor, ...]:
        """Read the ticket's rows now: one [n_g, D_g] per group."""
        own = self._own(ticket)
        outputs = self._per_group(own.groups)
        self._gather(own, None, (0, 0, 0), outputs, ctx)
        return tuple(outputs)

    def _gather(
        self,
        own: CpuTicket,
        plan: Any,
        bags: tuple[int, int, int],
        outputs: Sequence[Tensor],
        ctx: StepContext,
    ) -> None:
        places = [fresh_address(o) for o in outputs]
        try:
            self._core.gather(own.core, plan, *bags, places, ctx.global_step, self._lanes())
        except native.CORE_ERRORS as error:
            raise native.reworded(error) from None

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
        own = self._own(ticket)
        compiled, dtypes = self._plan(plan, own.groups)
        bags = checks.bags(own.groups, own.native, offsets_GB1, weights_N)
        outputs = self._outputs(plan, dtypes, bags[1])
        self._gather(own, compiled, bags, outputs, ctx)
        return outputs

    def _records(self, records: Sequence[GradRecord]) -> tuple[list[Any], list[Tensor]]:
        """Core records, and the contiguous gradients that must outlive the call."""
        made = []
        kept: list[Tensor] = []
        for record in records:
            own = self._own(record.ticket)
            plan, bags = None, (0, 0, 0)
            if record.plan is not None:
                plan, dtypes = self._plan(record.plan, own.groups)
                if record.offsets_GB1 is None:
                    raise native.plan_without_offsets()
                bags = checks.bags(own.groups, own.native, record.offsets_GB1, record.weights_N)
                shapes = [
                    ((bags[1], output.width), dtype)
                    for output, dtype in zip(record.plan.outputs, dtypes, strict=True)
                ]
            else:
                shapes = self._group_shapes(own.groups)
            grads = checks.grads(record.grads, shapes)
            kept.extend(grads)
            places = [address(g) for g in grads]
            made.append(_core.Record(own.core, plan, *bags, places, record.scale))
        return made, kept

    def _group_shapes(self, groups: IdGroups) -> list[tuple[tuple[int, int], torch.dtype]]:
        splits = groups.splits_G1.tolist()
        return [
            ((splits[g + 1] - splits[g], self._dims[t]), self._reals[t])
            for g, t in enumerate(groups.tables_G.tolist())
        ]

    def _step(self, ctx: StepContext) -> tuple[Any, ...]:
        """What the core knows of a step: learning rates, step, time, NaN policy, threads."""
        checks.rates(ctx, self.specs)
        rates = self._rate_list.at(ctx.global_step, ctx.learning_rates)
        policy = (_NAN_POLICY[ctx.nan_policy], ctx.nan_clip)
        return rates, ctx.global_step, ctx.event_time_s, *policy, self._lanes()

    def apply(self, records: Sequence[GradRecord], *, ctx: StepContext) -> None:
        """Sum the gradients per row over all records, one optimizer step per admitted row."""
        made, kept = self._records(records)
        native.worded(lambda: self._core.apply(made, *self._step(ctx)))
        del kept

    def sum_grads(self, records: Sequence[GradRecord]) -> SummedGrads:
        """The per-row sums `apply` would use, materialised; tickets stay live."""
        made, kept = self._records(records)
        tables, ids, sums, counts = [], [], [], []
        for part in self._core.sum(made):
            ids_U = torch.empty(part.n, dtype=torch.int64, device="cpu")
            sums_UD = torch.empty(
                part.n, self._dims[part.table], dtype=self._reals[part.table], device="cpu"
            )
            counts_U = torch.empty(part.n, dtype=torch.int64, device="cpu")
            part.copy_to(address(ids_U), address(sums_UD), address(counts_U))
            tables.append(part.table)
            ids.append(ids_U)
            sums.append(sums_UD)
            counts.append(counts_U)
        del kept
        return SummedGrads(tuple(tables), tuple(ids), tuple(sums), tuple(counts))

    def apply_summed(
        self, summed: SummedGrads, records: Sequence[GradRecord], *, ctx: StepContext
    ) -> None:
        """`apply` with sums the caller may have changed; ends the records' tickets."""
        owned = [self._own(record.ticket) for record in records]
        if summed.tables:
            # Tickets end only after the step, so every row the sums name is still there.
            groups = checks.summed_groups(summed)
            counts_N = torch.cat(summed.counts)
            latest_s = max([ctx.event_time_s, *(ticket.core.event_time_s for ticket in owned)])
            ctx = replace(ctx, event_time_s=latest_s)
            self._apply_ids(groups, summed.sums, counts_N, (), ctx)
        for ticket in owned:
            ticket.end()

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
        self._apply_ids(groups, grads, counts_N, seen_weights or (), ctx)

    def _apply_ids(
        self,
        groups: IdGroups,
        grads: Sequence[Tensor],
        counts_N: Tensor | None,
        seen: Sequence[Tensor],
        ctx: StepContext,
    ) -> None:
        core = self._groups(groups)
        counts = checks.counts(groups, counts_N)
        shapes = self._group_shapes(groups)
        ready = checks.grads(grads, shapes)
        latest = checks.grads(seen, shapes) if seen else []
        native.worded(
            lambda: self._core.apply_ids(
                core,
                counts,
                [address(g) for g in ready],
                [address(s) for s in latest],
                *self._step(ctx),
            )
        )

    def _write(
        self, groups: IdGroups, mode: int, values: Sequence[Tensor], ctx: StepContext
    ) -> Tensor:
        core = self._groups(groups)
        ready = checks.grads(values, self._group_shapes(groups)) if mode != _REINITIALIZE else []
        status_N = torch.empty(
            groups.ids_N.numel() if mode == _REINITIALIZE else 0, dtype=torch.int32, device="cpu"
        )
        native.worded(
            lambda: self._core.write(
                core,
                mode,
                [address(v) for v in ready],
                address(status_N),
                ctx.global_step,
                ctx.event_time_s,
                self._lanes(),
            )
        )
        return status_N

    def assign(self, groups: IdGroups, weights: Sequence[Tensor], *, ctx: StepContext) -> None:
        """Upsert weights; optimizer state of existing rows untouched. The last duplicate wins."""
        self._write(groups, _ASSIGN, weights, ctx)

    def assign_add(self, groups: IdGroups, deltas: Sequence[Tensor], *, ctx: StepContext) -> None:
        """Add to rows; a missing id is initialised first. Duplicates add up."""
        self._write(groups, _ADD, deltas, ctx)

    def reinitialize(self, groups: IdGroups, *, ctx: StepContext) -> Tensor:
        """Initial value and state again: int32 [N], 1 existed, 0 inserted, in input order."""
        return self._write(groups, _REINITIALIZE, (), ctx)

    def evict(self, now_s: int) -> int:
        """Drop expired rows; returns how many."""
        return int(self._core.evict(now_s))

    def remove(self, groups: IdGroups) -> int:
        """Drop rows, but those that a live ticket holds; returns how many."""
        return int(self._core.remove(self._groups(groups)))

    def close_version(self) -> int:
        """Close the current version and open the next; returns the closed one.

        Raises:
            InputError: the last of 2^32 - 2 versions is open.
        """
        return int(native.closing(self._core.close_version))

    @property
    def incarnation(self) -> int:
        """Whose cursors are good; see `shoal.table.shard.Shard`."""
        return int(self._core.incarnation())

    def release(self, version: int | None, consumer: str = "") -> None:
        """Forget deletions that no consumer wants; see `shoal.table.shard.Shard`.

        Raises:
            InputError: not an int in [0, 2^32).
        """
        if version is None:
            self._core.leave(consumer)
        else:
            self._core.release(released(version), consumer)

    def snapshot(
        self, since: Cursor | None = None, *, buffer_bytes: int = BUFFER_BYTES
    ) -> CpuSnapshot:
        """Set a snapshot point and keep its rows; see `shoal.table.shard.Shard`.

        Args:
            since: only what changed after `since.version`; None: all rows.
            buffer_bytes: memory for copies of rows that change; what is beyond it goes to an
                unlinked file in $TMPDIR.

        Raises:
            InputError: too many snapshots are open, `since` is of another incarnation, older than
                the deletions that are kept or not of a closed version, or the buffer is negative.
        """
        return CpuSnapshot(self.specs, self._core, since, buffer_bytes, self._lanes)

    def resume(self, version: int) -> Cursor:
        """After a load: close all versions up to `version` and keep deletions from here on.

        Raises:
            DTypeError: not an int.
            InputError: a version below one that a row is stamped with, or outside [0, 2^32 - 2].
        """
        remedy = "Pass the version that the loaded rows were saved at."
        shard.whole("version to resume at", version, 0, shard.LAST_VERSION, remedy=remedy)
        try:
            return Cursor(*self._core.resume(version))
        except ValueError as error:
            allowed = "at least the version of every row"
            raise InputError(
                "version to resume at", got=version, allowed=allowed, remedy=remedy
            ) from error

    def export(self, table: int) -> RowChunk:
        """All rows of a table, ordered by hash."""
        checks.table_index(table, len(self.specs))
        return self._chunk(table, self._core.export(table))

    def _chunk(self, table: int, exported: Any) -> RowChunk:
        chunk = rows.empty_chunk(self.specs[table], exported.n)
        exported.copy_to(rows.pointers(chunk))
        return chunk

    def expect(self, table: int, rows: int) -> None:
        """Reserve memory for so many rows in all; what is not filled later is not resident.

        Raises:
            InputError: rows is negative.
            DTypeError: no int.
        """
        checks.table_index(table, len(self.specs))
        self._core.expect(table, checks.expected_rows(rows))

    def load(self, table: int, chunk: RowChunk) -> None:
        """Upsert rows with their state and metadata."""
        checks.table_index(table, len(self.specs))
        spec = self.specs[table]
        ready = checks.chunk(chunk, spec, rows.weight_dtype(spec), rows.real_dtype(spec))
        columns = [address(tensor) for tensor in ready]
        count = ready[0].numel()
        native.worded(lambda: self._core.load(table, count, columns, self._lanes()))

    def entry(self, table: int, id: int) -> Entry | None:
        """One row in full, or None."""
        checks.table_index(table, len(self.specs))
        return rows.entry_of(self._chunk(table, self._core.entry(table, id)))

    def size(self, table: int) -> int:
        """Rows of a table."""
        checks.table_index(table, len(self.specs))
        return int(self._core.size(table))

    def clear(self, table: int) -> None:
        """Drop all rows of a table.

        Raises:
            TicketError: a live ticket holds rows.
        """
        checks.table_index(table, len(self.specs))
        try:
            self._core.clear(table)
        except _core.TicketStateError:
            raise native.rows_held(self.specs[table].name) from None

    def admission_state(self, table: int) -> AdmissionState:
        """Counts of ids without a row; survives a restart through `load_admission_state`."""
        checks.table_index(table, len(self.specs))
        return rows.admission_of(self._core, table)

    def load_admission_state(self, table: int, state: AdmissionState) -> None:
        """Restore what `admission_state` returned.

        Raises:
            ShapeError: the sketch has another size than the spec's.
        """
        checks.table_index(table, len(self.specs))
        rows.load_admission(self._core, table, self.specs[table], state)

    @property
    def last_step(self) -> int:
        """Global step of the last update: what reads without a step use (OneBit's scale)."""
        return int(self._core.last_step)

    @last_step.setter
    def last_step(self, step: int) -> None:
        self._core.last_step = step

    def stats(self) -> tuple[TableStats, ...]:
        """Counters of every table."""
        return tuple(
            rows.stats_of(spec.name, self._core.stats(table))
            for table, spec in enumerate(self.specs)
        )

    def check(self) -> None:
        """Nothing: what is wrong here is raised by the call itself."""
