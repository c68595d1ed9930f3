"""From recorded gradients to stepped rows of a GPU shard."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shoal.kernels import gradients, step
from shoal.kernels.gradients import GradGroups, Runs, runs_of
from shoal.kernels.step_sums import sum_runs
from shoal.kernels.step_tiles import Stamp
from shoal.table import checks, native
from shoal.table.cuda.calls import CallShape, check_bags, check_counts, occurrences
from shoal.table.cuda.reader import CudaRead
from shoal.table.cuda.ticket import CudaTicket
from shoal.table.shard import GradRecord, IdGroups, StepContext, SummedGrads


@dataclass(frozen=True, slots=True)
class _Joined:
    """The records of a step as one call: their runs, sources and counts."""

    runs: Runs
    sources: gradients.Sources
    counts_N: Tensor | None
    tickets: tuple[CudaTicket, ...]

    @property
    def event_time_s(self) -> int:
        return max((ticket.event_time_s for ticket in self.tickets), default=0)


class CudaStep(CudaRead):
    """Sums gradients and applies rules. Arguments as `CudaShard`'s."""

    def apply(self, records: Sequence[GradRecord], *, ctx: StepContext) -> None:
        """Sum the gradients per row over all records, one optimizer step per admitted row.

        Waits for the device only where kernels do not know a segment's rule or compressor
        (`step_plan`): plain torch steps it then.
        """
        with self._turn():
            rates_KR = self._rates(ctx)
            joined = self._joined(records)
            if joined is not None:
                stamp = self._stamp(ctx, max(ctx.event_time_s, joined.event_time_s))
                for ticket in joined.tickets:
                    self._keep(ticket.handles_N, forms=ticket.shape.forms)
                step.apply(
                    self._layout,
                    self._forms,
                    joined.runs,
                    joined.sources,
                    rates_KR,
                    stamp,
                    counts_N=joined.counts_N,
                    payload_H=self._payload_of(joined.runs),
                )
                for ticket in joined.tickets:
                    ticket.end()
            self._stepped(ctx)

    def sum_grads(self, records: Sequence[GradRecord]) -> SummedGrads:
        """The per-row sums `apply` would use, materialised; waits for the device."""
        with self._turn():
            joined = self._joined(records)
            tables: list[int] = []
            ids: list[Tensor] = []
            sums: list[Tensor] = []
            counts: list[Tensor] = []
            if joined is not None:
                for number, room in enumerate(joined.runs.rooms):
                    if room:
                        self._sum_form(number, room, joined, (tables, ids, sums, counts))
            order = sorted(range(len(tables)), key=tables.__getitem__)
            return SummedGrads(
                tuple(tables[i] for i in order),
                tuple(ids[i] for i in order),
                tuple(sums[i] for i in order),
                tuple(counts[i] for i in order),
            )

    def _sum_form(
        self,
        number: int,
        room: int,
        joined: _Joined,
        found: tuple[list[int], list[Tensor], list[Tensor], list[Tensor]],
    ) -> None:
        form, device = self._forms[number], self._device
        sums_UD = torch.empty(room, form.dim, dtype=form.real, device=device)
        ids_U = torch.empty(room, dtype=torch.int64, device=device)
        counts_U = torch.empty(room, dtype=torch.int64, device=device)
        tables_U = torch.empty(room, dtype=torch.int32, device=device)
        size_0 = sum_runs(
            self._layout,
            number,
            form,
            joined.runs,
            joined.sources,
            sums_UD,
            ids_U,
            counts_U,
            tables_U,
            counts_N=joined.counts_N,
        )
        size = int(size_0)
        owners_U = tables_U[:size]
        for k in torch.unique(owners_U).tolist():
            mine_U = owners_U == k
            found[0].append(k)
            found[1].append(ids_U[:size][mine_U])
            found[2].append(sums_UD[:size][mine_U])
            found[3].append(counts_U[:size][mine_U])

    def apply_summed(
        self, summed: SummedGrads, records: Sequence[GradRecord], *, ctx: StepContext
    ) -> None:
        """`apply` with sums the caller may have changed; ends the records' tickets."""
        with self._turn():
            owned = [self._own(record.ticket) for record in records]
            latest_s = max([ctx.event_time_s, *(ticket.event_time_s for ticket in owned)])
            checks.rates(ctx, self._specs)
            if summed.tables:
                groups = checks.summed_groups(summed)
                shape, call = self._call(groups)
                counts_N = torch.cat(summed.counts)
                check_counts(shape, counts_N, self._device)
                sums = checks.grads(summed.sums, self._group_shapes(shape), self._device)
                # Tickets end only after the step, so rows that were summed are still there.
                later = replace(ctx, event_time_s=latest_s)
                handles_N, _ = self._inserted(shape, call, counts_N, later)
                self._step_ids(shape, handles_N, sums, counts_N, None, latest_s, ctx)
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
        with self._turn():
            shape, call = self._call(groups)
            check_counts(shape, counts_N, self._device)
            shapes = self._group_shapes(shape)
            ready = checks.grads(grads, shapes, self._device)
            seen = (
                None if seen_weights is None else checks.grads(seen_weights, shapes, self._device)
            )
            checks.rates(ctx, self._specs)
            handles_N, _ = self._inserted(shape, call, counts_N, ctx)
            self._step_ids(shape, handles_N, ready, counts_N, seen, ctx.event_time_s, ctx)
            self._stepped(ctx)

    def _step_ids(
        self,
        shape: CallShape,
        handles_N: Tensor,
        grads: Sequence[Tensor],
        counts_N: Tensor | None,
        seen: Sequence[Tensor] | None,
        event_time_s: int,
        ctx: StepContext,
    ) -> None:
        """One step from a gradient row per position."""
        self._keep(handles_N, forms=shape.forms)
        runs = self._runs_of(handles_N, shape.rooms)
        forms_G = [self._form_of[k] for k in shape.tables]
        sources = gradients.sources_of(runs, [gradients.per_position(grads, forms=forms_G)])
        seen_sources = None
        if seen is not None:
            seen_sources = gradients.sources_of(runs, [gradients.per_position(seen, forms=forms_G)])
        step.apply(
            self._layout,
            self._forms,
            runs,
            sources,
            self._rates(ctx),
            self._stamp(ctx, event_time_s),
            counts_N=occurrences(counts_N),
            seen=seen_sources,
            payload_H=self._payload_of(runs),
        )

    def _runs_of(self, handles_N: Tensor, rooms: Sequence[int]) -> Runs:
        return runs_of(handles_N, self._layout if len(self._forms) > 1 else None, rooms)

    def _stamp(self, ctx: StepContext, event_time_s: int) -> Stamp:
        return Stamp(
            epoch=self._epoch,
            event_time_s=event_time_s,
            global_step=ctx.global_step,
            nan_policy=ctx.nan_policy,
            nan_clip=ctx.nan_clip,
        )

    def _payload_of(self, runs: Runs) -> Tensor | None:
        """Where rows are that a step is about to change: a cache's handles by handle."""
        return None

    def _stepped(self, ctx: StepContext) -> None:
        self._last_step = ctx.global_step

    def _joined(self, records: Sequence[GradRecord]) -> _Joined | None:
        """The records as one call; None when they hold no id."""
        owned = [self._own(record.ticket) for record in records]
        groups = [
            self._grad_groups(record, ticket) for record, ticket in zip(records, owned, strict=True)
        ]
        tickets = tuple({id(ticket): ticket for ticket in owned}.values())
        if not owned:
            return None
        if len(owned) == 1:
            runs, counts_N = owned[0].runs(self._stream), owned[0].counts_N
        else:
            handles_N = torch.cat([ticket.handles_N for ticket in owned])
            rooms = [sum(parts) for parts in zip(*(t.shape.rooms for t in owned), strict=True)]
            runs, counts_N = self._runs_of(handles_N, rooms), _counts(owned)
        return _Joined(runs, gradients.sources_of(runs, groups), counts_N, tickets)

    def _grad_groups(self, record: GradRecord, ticket: CudaTicket) -> GradGroups:
        shape = ticket.shape
        forms_G = [self._form_of[k] for k in shape.tables]
        if record.plan is None:
            grads = checks.grads(record.grads, self._group_shapes(shape), self._device)
            return gradients.per_position(grads, scale=record.scale, forms=forms_G)
        if record.offsets_GB1 is None:
            raise native.plan_without_offsets()
        compiled = self._plans.of(record.plan, shape.tables)
        bags = check_bags(shape, record.offsets_GB1, record.weights_N, self._device)
        widths = [output.width for output in record.plan.outputs]
        shapes = [((bags, w), d) for w, d in zip(widths, compiled.dtypes, strict=True)]
        grads = checks.grads(record.grads, shapes, self._device)
        return gradients.pooled(
            compiled.groups,
            grads,
            record.offsets_GB1,
            shape.sizes,
            bags_N=ticket.bags_of(record.offsets_GB1, bags),
            weights_N=record.weights_N,
            scale=record.scale,
        )

    def _group_shapes(self, shape: CallShape) -> list[tuple[tuple[int, int], torch.dtype]]:
        return [
            ((size, self._dims[k]), self._forms[self._form_of[k]].real)
            for size, k in zip(shape.sizes, shape.tables, strict=True)
        ]


def _counts(tickets: Sequence[CudaTicket]) -> Tensor | None:
    """Occurrences of all positions: a ticket counts once, however many records it has."""
    if all(ticket.counts_N is None for ticket in tickets) and len(set(map(id, tickets))) == len(
        tickets
    ):
        return None
    parts, counted = [], set()
    for ticket in tickets:
        like = ticket.handles_N
        ones = torch.ones_like(like) if ticket.counts_N is None else ticket.counts_N
        parts.append(torch.zeros_like(like) if id(ticket) in counted else ones)
        counted.add(id(ticket))
    return torch.cat(parts)
