"""`MetaShard`: a shard on torch's meta device, which has shapes and no data.

Code that waits for a device fails there: reading a number of a meta tensor raises. So tests use it
instead of a GPU to check which data are sent where, and whether the host waits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.errors import InputError
from shoal.lookup import PoolPlan
from shoal.table.shard import (
    Found,
    GradRecord,
    IdGroups,
    Snapshot,
    StepContext,
    SummedGrads,
    Ticket,
)
from shoal.table.spec import TableSpec
from shoal.table.values import AdmissionState, Cursor, Entry, RowChunk, TableStats

__all__ = ["MetaShard"]


class MetaTicket:
    def __init__(self, groups: IdGroups) -> None:
        self.groups = groups
        self.admitted_N = torch.ones_like(groups.ids_N, dtype=torch.bool)
        self.found_N = self.admitted_N
        self.ended = False

    def end(self) -> None:
        self.ended = True


class MetaShard:
    """Checks the device of its input, and counts calls; only float32 tables."""

    def __init__(self, specs: Sequence[TableSpec], *, seed: int = 0, device: str = "meta") -> None:
        self.specs = tuple(specs)
        self.seed = seed
        self.device = torch.device(device)
        self.last_step = 0
        self.calls: list[str] = []
        self.tickets: list[MetaTicket] = []

    def find(self, groups: IdGroups) -> Found:
        self._check("find", groups)
        return Found(self._rows(groups), torch.ones_like(groups.ids_N, dtype=torch.bool))

    def find_pooled(
        self, groups: IdGroups, plan: PoolPlan, offsets_GB1: Tensor, weights_N: Tensor | None
    ) -> tuple[Tensor, ...]:
        self._check("find_pooled", groups, offsets_GB1, weights_N)
        return self._pooled(plan, offsets_GB1)

    def find_or_init(
        self, groups: IdGroups, counts_N: Tensor | None = None, *, ctx: StepContext
    ) -> MetaTicket:
        self._check("find_or_init", groups, counts_N)
        self.tickets.append(MetaTicket(groups))
        return self.tickets[-1]

    def gather(self, ticket: Ticket, *, ctx: StepContext) -> tuple[Tensor, ...]:
        self._check("gather", ticket.groups)
        return self._rows(ticket.groups)

    def gather_pooled(
        self,
        ticket: Ticket,
        plan: PoolPlan,
        offsets_GB1: Tensor,
        weights_N: Tensor | None,
        *,
        ctx: StepContext,
    ) -> tuple[Tensor, ...]:
        self._check("gather_pooled", ticket.groups, offsets_GB1, weights_N)
        return self._pooled(plan, offsets_GB1)

    def apply(self, records: Sequence[GradRecord], *, ctx: StepContext) -> None:
        for record in records:
            parts = (record.offsets_GB1, record.weights_N, *record.grads)
            self._check("apply", record.ticket.groups, *parts)
            record.ticket.end()

    def sum_grads(self, records: Sequence[GradRecord]) -> SummedGrads:
        """As if no two positions shared an id."""
        tables, ids, sums, counts = [], [], [], []
        for record in records:
            groups = record.ticket.groups
            self._check("sum_grads", groups, *record.grads)
            cuts = groups.splits_G1.tolist()
            for g, (k, rows) in enumerate(
                zip(groups.tables_G.tolist(), self._rows(groups), strict=True)
            ):
                tables.append(k)
                ids.append(groups.ids_N[cuts[g] : cuts[g + 1]])
                sums.append(rows)
                counts.append(torch.ones_like(ids[-1]))
        return SummedGrads(tuple(tables), tuple(ids), tuple(sums), tuple(counts))

    def apply_summed(
        self, summed: SummedGrads, records: Sequence[GradRecord], *, ctx: StepContext
    ) -> None:
        self.calls.append("apply_summed")
        self._on_device(*summed.ids, *summed.sums, *summed.counts)
        for record in records:
            record.ticket.end()

    def apply_ids(
        self,
        groups: IdGroups,
        grads: Sequence[Tensor],
        counts_N: Tensor | None = None,
        *,
        ctx: StepContext,
        seen_weights: Sequence[Tensor] | None = None,
    ) -> None:
        self._check("apply_ids", groups, counts_N, *grads)

    def assign(self, groups: IdGroups, weights: Sequence[Tensor], *, ctx: StepContext) -> None:
        self._check("assign", groups, *weights)

    def assign_add(self, groups: IdGroups, deltas: Sequence[Tensor], *, ctx: StepContext) -> None:
        self._check("assign_add", groups, *deltas)

    def reinitialize(self, groups: IdGroups, *, ctx: StepContext) -> Tensor:
        self._check("reinitialize", groups)
        return torch.zeros_like(groups.ids_N, dtype=torch.int32)

    def evict(self, now_s: int) -> int:
        return 0

    @property
    def incarnation(self) -> int:
        return 1

    def close_version(self) -> int:
        return 0

    def release(self, version: int | None, consumer: str = "") -> None:
        """Holds nothing."""

    def snapshot(self, since: Cursor | None = None) -> Snapshot:
        raise InputError("no rows to keep")

    def resume(self, version: int) -> Cursor:
        return Cursor(1, version)

    def export(self, table: int) -> RowChunk:
        spec, none = self.specs[table], torch.empty(0, dtype=torch.int64)
        weights, state = torch.empty(0, spec.dim), torch.empty(0, spec.state_width)
        return RowChunk(spec.name, none, weights, state, none, none, none)

    def expect(self, table: int, rows: int) -> None:
        assert rows >= 0

    def load(self, table: int, chunk: RowChunk) -> None:
        assert chunk.ids.is_cpu

    def admission_state(self, table: int) -> AdmissionState:
        none = torch.empty(0, dtype=torch.int64)
        return AdmissionState(none, none, b"")

    def load_admission_state(self, table: int, state: AdmissionState) -> None:
        assert state.ids.is_cpu

    def entry(self, table: int, id: int) -> Entry | None:
        return None

    def size(self, table: int) -> int:
        return 0

    def clear(self, table: int) -> None:
        """Holds nothing."""

    def stats(self) -> tuple[TableStats, ...]:
        return ()

    def check(self) -> None:
        self.calls.append("check")

    def _check(self, verb: str, groups: IdGroups, *others: Tensor | None) -> None:
        self.calls.append(verb)
        assert groups.splits_G1.is_cpu and groups.tables_G.is_cpu
        assert int(groups.splits_G1[-1]) == groups.ids_N.numel()
        self._on_device(groups.ids_N, *others)

    def _on_device(self, *tensors: Tensor | None) -> None:
        for tensor in tensors:
            assert tensor is None or tensor.device == self.device, tensor

    def _rows(self, groups: IdGroups) -> tuple[Tensor, ...]:
        cuts = groups.splits_G1.tolist()
        return tuple(
            torch.empty(cuts[g + 1] - cuts[g], self.specs[k].dim, device=self.device)
            for g, k in enumerate(groups.tables_G.tolist())
        )

    def _pooled(self, plan: PoolPlan, offsets_GB1: Tensor) -> tuple[Tensor, ...]:
        size = (offsets_GB1.numel() - 1) // len(plan.pools)
        return tuple(torch.empty(size, o.width, device=self.device) for o in plan.outputs)
