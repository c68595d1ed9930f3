"""From recorded gradients to stepped rows of a GPU shard."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shoal.errors import NonFiniteGradient
from shoal.kernels import gradients, step
from shoal.kernels.gradients import GradGroups, Runs
from shoal.kernels.host_copies import retire, staged
from shoal.kernels.step_sums import sum_runs
from shoal.kernels.step_tiles import Stamp
from shoal.kernels.tables import COUNT_ALARMED
from shoal.table import checks, native
from shoal.table.cuda.calls import CallShape, PlanCache, ShardTables, occurrences
from shoal.table.cuda.host_rows import RowsOnHost
from shoal.table.cuda.memory import DeviceMemory
from shoal.table.cuda.side_stream import Lease, SideStream
from shoal.table.cuda.snapshots import History
from shoal.table.cuda.ticket import CudaTicket
from shoal.table.native import RateList
from shoal.table.shard import GradRecord, StepContext, SummedGrads


@dataclass(frozen=True, slots=True)
class JoinedGrads:
    """The records of a step as one call: their runs, sources and counts."""

    runs: Runs
    sources: gradients.Sources
    counts_N: Tensor | None
    tickets: tuple[CudaTicket, ...]


class Stepper:
    """Sums gradients and applies rules.

    Args:
        tables, memory, plans: the shard's.
        history: is called for rows that are stepped.
        host: where rows are on the host; else None.

    Attributes:
        side: where lookups' positions are sorted.
    """

    def __init__(
        self,
        tables: ShardTables,
        memory: DeviceMemory,
        plans: PlanCache,
        history: History,
        host: RowsOnHost | None,
    ) -> None:
        self._tables = tables
        self._memory = memory
        self._plans = plans
        self._history = history
        self._host = host
        self.side = SideStream(tables.device)
        self._rate_list = RateList(tables.specs)
        self._rates_kept: tuple[list[float], Tensor] | None = None
        self._alarms_reported = 0

    def raise_pending(self) -> None:
        """Raise for gradients that were not finite, by the counters at hand.

        Raises:
            NonFiniteGradient: under nan_policy="raise"; those rows were left as they were.
        """
        found_K = self._memory.counters.known_KC[:, COUNT_ALARMED]
        total = int(found_K.sum())
        new, self._alarms_reported = total - self._alarms_reported, total
        if new:
            worst = self._tables.specs[int(np.argmax(found_K))].name
            raise NonFiniteGradient(
                "gradient",
                got=f"NaN or infinity for {new} rows, most ever in table {worst!r}",
                allowed="finite values under nan_policy='raise'",
                remedy="Find the overflow (loss scale, learning rate), or choose "
                "nan_policy='skip' or 'clip'. Those rows were left as they were.",
            )

    def start_runs(
        self,
        handles_N: Tensor,
        rooms: Sequence[int],
        lease: Lease | None,
    ) -> Callable[[torch.cuda.Stream | None], Runs]:
        """Start to sort a lookup's positions by row; see `SideStream.start`."""
        layout = self._memory.layout
        # Growth replaces the columns of chunks while the side may still read the old ones.
        read = (handles_N, layout.chunks_WC) if len(self._tables.forms) > 1 else (handles_N,)
        main = self._history.turns.stream
        return self.side.start(
            lambda: self._tables.runs_of(layout, handles_N, rooms), read, lease, main
        )

    def step(self, joined: JoinedGrads, rates_KR: Tensor, ctx: StepContext) -> None:
        """One optimizer step per admitted row; ends the tickets."""
        latest_s = max(ctx.event_time_s, *(ticket.event_time_s for ticket in joined.tickets))
        for ticket in joined.tickets:
            self._history.keep(ticket.handles_N, forms=ticket.shape.forms)
        step.apply(
            self._memory.layout,
            self._tables.forms,
            joined.runs,
            joined.sources,
            rates_KR,
            self._stamp(ctx, latest_s),
            counts_N=joined.counts_N,
            payload_H=self._payload_of(joined.runs),
        )
        for ticket in joined.tickets:
            ticket.end()

    def summed(self, joined: JoinedGrads | None) -> SummedGrads:
        """The per-row sums that `step` would use; waits for the device."""
        if joined is None:
            return SummedGrads((), (), (), ())
        layout, runs, sources = self._memory.layout, joined.runs, joined.sources
        found = list[tuple[int, Tensor, Tensor, Tensor]]()
        for number, form in enumerate(self._tables.forms):
            found += sum_runs(layout, number, form, runs, sources, counts_N=joined.counts_N)
        found.sort(key=lambda table: table[0])
        return SummedGrads(*zip(*found, strict=True)) if found else SummedGrads((), (), (), ())

    def step_ids(
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
        self._history.keep(handles_N, forms=shape.forms)
        runs = self._tables.runs_of(self._memory.layout, handles_N, shape.rooms)
        sources = gradients.sources_of(runs, [gradients.per_position(grads, forms=shape.forms_G)])
        seen_sources = None
        if seen is not None:
            seen_sources = gradients.sources_of(
                runs, [gradients.per_position(seen, forms=shape.forms_G)]
            )
        step.apply(
            self._memory.layout,
            self._tables.forms,
            runs,
            sources,
            self.rates(ctx),
            self._stamp(ctx, event_time_s),
            counts_N=occurrences(counts_N),
            seen=seen_sources,
            payload_H=self._payload_of(runs),
        )

    def _stamp(self, ctx: StepContext, event_time_s: int) -> Stamp:
        return Stamp(
            version=self._history.version,
            event_time_s=event_time_s,
            global_step=ctx.global_step,
            nan_policy=ctx.nan_policy,
            nan_clip=ctx.nan_clip,
        )

    def _payload_of(self, runs: Runs) -> Tensor | None:
        """Where rows are that are about to change: a cache's handles by handle."""
        return None if self._host is None else self._host.cache.written(runs)

    def rates(self, ctx: StepContext) -> Tensor:
        """Rates of every table's segments, float64 [K, most segments]; sent when they change.

        Raises:
            InputError, ShapeError: rates that do not fit the tables.
        """
        specs = self._tables.specs
        checks.rates(ctx, specs)
        flat = self._rate_list.at(ctx.global_step, ctx.learning_rates)
        if self._rates_kept is None or self._rates_kept[0] != flat:
            counts = [len(spec.segments) for spec in specs]
            rates_KR = np.zeros((len(specs), max(counts, default=1)))
            rates_KR[np.arange(rates_KR.shape[1]) < np.array(counts)[:, None]] = flat
            if self._rates_kept is not None:
                retire(self._rates_kept[1])
            words = staged(rates_KR.reshape(-1).view(np.int64), self._tables.device)
            self._rates_kept = (flat, words.view(torch.float64).view(rates_KR.shape))
        return self._rates_kept[1]

    def joined(
        self, records: Sequence[GradRecord], owned: Sequence[CudaTicket]
    ) -> JoinedGrads | None:
        """The records as one call; None when there is none. owned: the ticket of each record."""
        groups = [
            self._grad_groups(record, ticket) for record, ticket in zip(records, owned, strict=True)
        ]
        tickets = tuple({id(ticket): ticket for ticket in owned}.values())
        if not owned:
            return None
        if len(owned) == 1:
            runs, counts_N = owned[0].runs(self._history.turns.stream), owned[0].counts_N
        else:
            handles_N = torch.cat([ticket.handles_N for ticket in owned])
            rooms = [sum(parts) for parts in zip(*(t.shape.rooms for t in owned), strict=True)]
            runs = self._tables.runs_of(self._memory.layout, handles_N, rooms)
            counts_N = _counts(owned)
        return JoinedGrads(runs, gradients.sources_of(runs, groups), counts_N, tickets)

    def _grad_groups(self, record: GradRecord, ticket: CudaTicket) -> GradGroups:
        shape = ticket.shape
        if record.plan is None:
            grads = checks.grads(record.grads, shape.grad_shapes, self._tables.device)
            return gradients.per_position(grads, scale=record.scale, forms=shape.forms_G)
        if record.offsets_GB1 is None:
            raise native.plan_without_offsets()
        compiled = self._plans.of(record.plan, shape.tables)
        bags = checks.bag_count(
            len(shape.tables),
            shape.splits[-1],
            record.offsets_GB1,
            record.weights_N,
            self._tables.device,
        )
        widths = [output.width for output in record.plan.outputs]
        shapes = [((bags, w), d) for w, d in zip(widths, compiled.dtypes, strict=True)]
        grads = checks.grads(record.grads, shapes, self._tables.device)
        return gradients.pooled(
            compiled.groups,
            grads,
            record.offsets_GB1,
            shape.sizes,
            bags_N=ticket.bags_of(record.offsets_GB1, bags),
            weights_N=record.weights_N,
            scale=record.scale,
        )


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
