"""`ReferenceShard`: the Shard protocol over one dictionary per table, one row at a time.

The oracle of every faster shard, and a replacement for it in tests. It computes in any float dtype,
independent of the spec's, so that whole runs can be compared without rounding.
"""

from __future__ import annotations

import copy
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from shoal.errors import TicketError
from shoal.lookup import PoolPlan
from shoal.rules.admission import Admission
from shoal.table.factory import shard_copied
from shoal.table.native import table_full
from shoal.table.shard import Found, GradRecord, IdGroups, StepContext, SummedGrads, Ticket
from shoal.table.spec import TableSpec
from shoal.table.values import Entry, RowChunk, TableStats
from support.admission_counters import Counter as AdmissionCounter
from support.admission_counters import make_counter

from .pooling import pool_rows, position_gradients
from .reference_admission import AdmissionVerbs
from .reference_changes import ChangeVerbs
from .reference_row import (
    Key,
    ReferenceTicket,
    Row,
    by_table,
    check_finite,
    check_records,
    expired,
    fresh_state,
    initial_row,
    keys_of,
    retrieved,
    step_row,
    table_stats,
)

__all__ = ["ReferenceShard", "ReferenceTicket"]


class ReferenceShard(AdmissionVerbs, ChangeVerbs):
    device = torch.device("cpu")

    def __init__(
        self,
        specs: Sequence[TableSpec],
        *,
        seed: int = 0,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        self.specs = tuple(specs)
        self.seed = seed
        self.dtype = dtype
        self._rows: list[dict[int, Row]] = [{} for _ in self.specs]
        self._counters = [make_counter(s.admission or Admission(), s.hash_name) for s in self.specs]
        self._tallies: list[Counter[str]] = [Counter() for _ in self.specs]
        self._version = 1
        self._global_step = 0
        self._live: weakref.WeakSet[ReferenceTicket] = weakref.WeakSet()
        self._start()

    __reduce__ = shard_copied

    @property
    def last_step(self) -> int:
        return self._global_step

    @last_step.setter
    def last_step(self, step: int) -> None:
        self._global_step = step

    def find(self, groups: IdGroups) -> Found:
        keys = list(keys_of(groups))
        rows = [self._read(key, self._global_step) for key in keys]
        return Found(self._by_group(groups, rows), self._present(keys))

    def find_pooled(
        self, groups: IdGroups, plan: PoolPlan, offsets_GB1: Tensor, weights_N: Tensor | None
    ) -> tuple[Tensor, ...]:
        rows = [self._read(key, self._global_step) for key in keys_of(groups)]
        return pool_rows(rows, plan, offsets_GB1, weights_N, self.dtype)

    def find_or_init(
        self, groups: IdGroups, counts_N: Tensor | None = None, *, ctx: StepContext
    ) -> ReferenceTicket:
        self._check_still()
        keys = list(keys_of(groups))
        ticket = ReferenceTicket(self, groups, keys)
        ticket.found_N = self._present(keys)
        ticket.event_time_s = ctx.event_time_s
        if counts_N is not None:
            ticket.counts = [int(count) for count in counts_N]
        self._admit(keys, ticket.counts, ctx)
        ticket.admitted_N = self._present(keys)
        self._live.add(ticket)
        return ticket

    def gather(self, ticket: Ticket, *, ctx: StepContext) -> tuple[Tensor, ...]:
        return self._by_group(ticket.groups, self._ticket_rows(ticket, ctx))

    def gather_pooled(
        self,
        ticket: Ticket,
        plan: PoolPlan,
        offsets_GB1: Tensor,
        weights_N: Tensor | None,
        *,
        ctx: StepContext,
    ) -> tuple[Tensor, ...]:
        rows = self._ticket_rows(ticket, ctx)
        return pool_rows(rows, plan, offsets_GB1, weights_N, self.dtype)

    def apply(self, records: Sequence[GradRecord], *, ctx: StepContext) -> None:
        if ctx.nan_policy == "raise":
            check_records(records)
        self.apply_summed(self.sum_grads(records), records, ctx=ctx)

    def sum_grads(self, records: Sequence[GradRecord]) -> SummedGrads:
        sums: dict[Key, Tensor] = {}
        counts: Counter[Key] = Counter()
        counted: set[int] = set()
        for record in records:
            ticket = self._own(record.ticket)
            rows = position_gradients(record, [self.specs[k].dim for k, _ in ticket.keys])
            admitted = ticket.admitted_N.tolist()
            for i, (key, grad) in enumerate(zip(ticket.keys, rows, strict=True)):
                if not admitted[i]:
                    continue
                sums[key] = sums.get(key, 0) + grad.to(self.dtype) * record.scale
                if id(ticket) not in counted:
                    counts[key] += ticket.counts[i]
            counted.add(id(ticket))
        return by_table(sums, counts)

    def apply_summed(
        self, summed: SummedGrads, records: Sequence[GradRecord], *, ctx: StepContext
    ) -> None:
        self._check_still()
        tickets = [self._own(record.ticket) for record in records]
        last_s = max([ctx.event_time_s, *(ticket.event_time_s for ticket in tickets)])
        self._step(summed, replace(ctx, event_time_s=last_s), {})
        for ticket in tickets:
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
        self._check_still()
        keys = list(keys_of(groups))
        flat = [row for part in grads for row in part]
        if ctx.nan_policy == "raise":
            given = list(zip(keys, flat, strict=True))
            sums_of_all: dict[Key, Tensor] = {}
            for key, grad in given:
                sums_of_all[key] = sums_of_all.get(key, 0) + grad.to(self.dtype)
            check_finite(self.specs, [*given, *sums_of_all.items()])
        counts = [1] * len(keys) if counts_N is None else [int(c) for c in counts_N]
        self._admit(keys, counts, ctx)
        sums: dict[Key, Tensor] = {}
        tally: Counter[Key] = Counter()
        for key, grad, count in zip(keys, flat, counts, strict=True):
            if key[1] in self._rows[key[0]]:
                sums[key] = sums.get(key, 0) + grad.to(self.dtype)
                tally[key] += count
        seen = {}
        if seen_weights is not None:
            rows = [row for part in seen_weights for row in part]
            seen = dict(reversed(list(zip(keys, rows, strict=True))))
        self._step(by_table(sums, tally), ctx, seen)

    def assign(self, groups: IdGroups, weights: Sequence[Tensor], *, ctx: StepContext) -> None:
        self._check_still()
        for key, row in self._upserts(groups, weights, ctx):
            self._rows[key[0]][key[1]].weights = row

    def assign_add(self, groups: IdGroups, deltas: Sequence[Tensor], *, ctx: StepContext) -> None:
        self._check_still()
        for key, row in self._upserts(groups, deltas, ctx):
            self._rows[key[0]][key[1]].weights = self._rows[key[0]][key[1]].weights + row

    def reinitialize(self, groups: IdGroups, *, ctx: StepContext) -> Tensor:
        self._check_still()
        keys = list(keys_of(groups))
        existed = self._present(keys)
        self._make_room({key for key in keys if key[1] not in self._rows[key[0]]}, set(keys))
        for key in keys:
            self._insert(key, ctx)
        return existed.to(torch.int32)

    def evict(self, now_s: int) -> int:
        self._check_still()
        held, dropped = self._held(), 0
        for k, spec in enumerate(self.specs):
            rows = self._rows[k]
            old = [id_ for id_, row in rows.items() if expired(spec, id_, row, now_s)]
            for id_ in old:
                if (k, id_) not in held:
                    self._remove(k, id_)
                    self._tallies[k]["evicted"] += 1
                    dropped += 1
            dropped += self._drop_worst(k, max(self._over(k, 0), 0), held)
        return dropped

    def expect(self, table: int, rows: int) -> None:
        pass

    def load(self, table: int, chunk: RowChunk) -> None:
        self._check_still()
        for i, id_ in enumerate(chunk.ids.tolist()):
            self._rows[table][id_] = Row(
                chunk.weights[i].to(self.dtype, copy=True),
                chunk.state[i].to(self.dtype, copy=True),
                max(int(chunk.versions[i]), 1),
                int(chunk.last_seen_s[i]),
                int(chunk.counts[i]),
            )
        if len(chunk.ids):
            self._version = max(self._version, int(chunk.versions.max()))
            self._renew()

    def entry(self, table: int, id: int) -> Entry | None:
        row = self._rows[table].get(id)
        if row is None:
            return None
        weights, state = row.weights.clone(), row.state.clone()
        return Entry(id, weights, state, row.version, row.last_seen_s, row.count)

    def size(self, table: int) -> int:
        return len(self._rows[table])

    def clear(self, table: int) -> None:
        self._check_still()
        if any(key[0] == table for key in self._held()):
            raise TicketError("clear of a table under a live ticket")
        for id_ in list(self._rows[table]):
            self._remove(table, id_)

    def check(self) -> None:
        """Errors are raised by the call itself."""

    def stats(self) -> tuple[TableStats, ...]:
        parts = zip(self.specs, self._rows, self._tallies, strict=True)
        return tuple(table_stats(spec, len(rows), t, self.dtype) for spec, rows, t in parts)

    def _present(self, keys: list[Key]) -> Tensor:
        return torch.tensor([id_ in self._rows[k] for k, id_ in keys], dtype=torch.bool)

    def _own(self, ticket: Ticket) -> ReferenceTicket:
        if not isinstance(ticket, ReferenceTicket) or ticket.shard is not self or ticket.ended:
            what = "ended" if getattr(ticket, "ended", False) else "of another shard"
            remedy = "Look the ids up again."
            raise TicketError("ticket", got=what, allowed="a live one", remedy=remedy)
        return ticket

    def _held(self) -> set[Key]:
        return set().union(*(ticket.held() for ticket in self._live))

    def _stack(self, rows: list[Tensor], width: int) -> Tensor:
        return torch.stack(rows) if rows else torch.empty(0, width, dtype=self.dtype)

    def _by_group(self, groups: IdGroups, rows: list[Tensor]) -> tuple[Tensor, ...]:
        cuts, tables = groups.splits_G1.tolist(), groups.tables_G.tolist()
        return tuple(
            self._stack(rows[cuts[g] : cuts[g + 1]], self.specs[k].dim)
            for g, k in enumerate(tables)
        )

    def _initial(self, key: Key) -> Tensor:
        return initial_row(self.specs[key[0]], key[1], self.seed, self.dtype)

    def _read(self, key: Key, global_step: int) -> Tensor:
        row = self._rows[key[0]].get(key[1])
        if row is None:
            return torch.zeros(self.specs[key[0]].dim, dtype=self.dtype)
        return retrieved(self.specs[key[0]], row.weights, global_step)

    def _ticket_rows(self, ticket: Ticket, ctx: StepContext) -> list[Tensor]:
        own = self._own(ticket)
        return [
            self._read(key, ctx.global_step)
            if admitted
            else retrieved(self.specs[key[0]], self._initial(key), ctx.global_step)
            for key, admitted in zip(own.keys, own.admitted_N.tolist(), strict=True)
        ]

    def _insert(self, key: Key, ctx: StepContext) -> None:
        k, id_ = key
        old = self._rows[k].get(id_)
        row = Row(self._initial(key), fresh_state(self.specs[k], self.dtype), self._version)
        row.last_seen_s = max(ctx.event_time_s, old.last_seen_s if old else 0)
        row.count = old.count if old else 0
        self._rows[k][id_] = row
        self._counters[k].forget(torch.tensor([id_]))
        self._tallies[k]["inserted"] += old is None

    def _admit(self, keys: list[Key], counts: list[int], ctx: StepContext) -> None:
        """One decision per id and call, then free slots for all admitted ids, then the inserts."""
        occurrences: Counter[Key] = Counter()
        for key, count in zip(keys, counts, strict=True):
            if key[1] not in self._rows[key[0]]:
                occurrences[key] += count
        counters = copy.deepcopy(self._counters)
        admitted = {
            key for key, count in occurrences.items() if self._reaches(counters, key, count)
        }
        self._make_room(admitted, set(keys))
        self._counters = counters
        for key in occurrences:
            if key in admitted:
                self._insert(key, ctx)
            self._tallies[key[0]]["refused"] += key not in admitted

    def _reaches(self, counters: list[AdmissionCounter], key: Key, count: int) -> bool:
        k, id_U = key[0], torch.tensor([key[1]])
        admission = self.specs[k].admission
        if admission is None or int(admission.required_N(id_U)) <= 1:
            return True
        total = counters[k].add(id_U, torch.tensor([count]))
        return int(total) >= int(admission.required_N(id_U))

    def _make_room(self, fresh: set[Key], keep: set[Key]) -> None:
        wanted = Counter(k for k, _ in fresh)
        kept = self._held() | keep
        for k, new in wanted.items():
            spec, over = self.specs[k], self._over(k, new)
            free = sum((k, id_) not in kept for id_ in self._rows[k])
            if over > 0 and (spec.on_full == "raise" or over > free):
                stays = len(self._rows[k]) - (0 if spec.on_full == "raise" else free)
                capacity = spec.capacity_rows or 0
                raise table_full(spec.name, spec.on_full, capacity, kept=stays, wanted=new)
        for k, new in wanted.items():
            if self._over(k, new) > 0:
                self._drop_worst(k, self._over(k, new), kept)

    def _over(self, k: int, new: int) -> int:
        capacity = self.specs[k].capacity_rows
        return 0 if capacity is None else len(self._rows[k]) + new - capacity

    def _drop_worst(self, k: int, number: int, kept: set[Key]) -> int:
        field = "count" if self.specs[k].on_full == "lfu" else "last_seen_s"
        free = [id_ for id_ in self._rows[k] if (k, id_) not in kept]
        free.sort(key=lambda id_: (getattr(self._rows[k][id_], field), id_))
        for id_ in free[:number]:
            self._remove(k, id_)
        self._tallies[k]["evicted"] += len(free[:number])
        return len(free[:number])

    def _upserts(
        self, groups: IdGroups, values: Sequence[Tensor], ctx: StepContext
    ) -> list[tuple[Key, Tensor]]:
        keys = list(keys_of(groups))
        rows = [row.to(self.dtype, copy=True) for part in values for row in part]
        self._make_room({key for key in keys if key[1] not in self._rows[key[0]]}, set(keys))
        for key in keys:
            if key[1] not in self._rows[key[0]]:
                self._insert(key, ctx)
            row = self._rows[key[0]][key[1]]
            row.version, row.last_seen_s = self._version, max(row.last_seen_s, ctx.event_time_s)
        return list(zip(keys, rows, strict=True))

    def _step(self, summed: SummedGrads, ctx: StepContext, seen: dict[Key, Tensor]) -> None:
        self._global_step = ctx.global_step
        parts = list(zip(summed.tables, summed.ids, summed.sums, summed.counts, strict=True))
        if ctx.nan_policy == "raise":
            named = [
                ((k, int(i)), g)
                for k, ids, sums, _ in parts
                for i, g in zip(ids, sums, strict=True)
            ]
            check_finite(self.specs, named)
        for k, ids, sums, counts in parts:
            for id_, grad, count in zip(ids.tolist(), sums, counts.tolist(), strict=True):
                if ctx.nan_policy == "skip" and not grad.isfinite().all():
                    self._tallies[k]["nonfinite_skipped"] += 1
                    continue
                clip = ctx.nan_clip
                clipped = grad.nan_to_num(0.0, clip, -clip) if ctx.nan_policy == "clip" else grad
                row = self._rows[k][id_]
                step_row(self.specs[k], row, clipped.to(self.dtype), ctx, seen.get((k, id_)))
                row.version, row.count = self._version, row.count + count
                row.last_seen_s = max(row.last_seen_s, ctx.event_time_s)
