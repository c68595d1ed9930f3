"""`PlacedShard`: a shard on a device, spoken to with CPU tensors, so that one test serves all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from shoal.lookup import PoolPlan
from shoal.table.factory import shard_copied
from shoal.table.shard import Found, GradRecord, IdGroups, Shard, StepContext, SummedGrads, Ticket
from shoal.table.spec import HostRows, TableSpec

__all__ = ["PlacedCuda", "PlacedShard", "PlacedTicket", "PlacedTiered"]


class PlacedTicket:
    """A ticket whose flags are on the CPU."""

    def __init__(self, inner: Ticket, groups: IdGroups) -> None:
        self.inner = inner
        self.groups = groups

    @property
    def admitted_N(self) -> Tensor:
        return self.inner.admitted_N.cpu()

    @property
    def found_N(self) -> Tensor:
        return self.inner.found_N.cpu()

    def end(self) -> None:
        self.inner.end()


class PlacedShard:
    """Moves ids, rows and gradients to the device and back; forwards all other methods."""

    def __init__(self, inner: Shard) -> None:
        self.inner = inner

    __reduce__ = shard_copied
    settings: ClassVar[dict[str, object]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def last_step(self) -> int:
        return self.inner.last_step

    @last_step.setter
    def last_step(self, step: int) -> None:
        self.inner.last_step = step

    def there(self, value: Tensor) -> Tensor:
        return value.to(self.inner.device)

    def groups(self, groups: IdGroups) -> IdGroups:
        return groups._replace(ids_N=self.there(groups.ids_N))

    def some(self, value: Tensor | None) -> Tensor | None:
        return None if value is None else self.there(value)

    def all(self, values: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return tuple(self.there(value) for value in values)

    def record(self, record: GradRecord) -> GradRecord:
        return replace(
            record,
            ticket=bare(record.ticket),
            grads=self.all(record.grads),
            offsets_GB1=self.some(record.offsets_GB1),
            weights_N=self.some(record.weights_N),
        )

    def find(self, groups: IdGroups) -> Found:
        found = self.inner.find(self.groups(groups))
        return Found(back(found.weights), found.found_N.cpu())

    def find_pooled(
        self, groups: IdGroups, plan: PoolPlan, offsets_GB1: Tensor, weights_N: Tensor | None
    ) -> tuple[Tensor, ...]:
        inputs = self.there(offsets_GB1), self.some(weights_N)
        return back(self.inner.find_pooled(self.groups(groups), plan, *inputs))

    def find_or_init(
        self, groups: IdGroups, counts_N: Tensor | None = None, *, ctx: StepContext
    ) -> PlacedTicket:
        placed = self.groups(groups)
        return PlacedTicket(self.inner.find_or_init(placed, self.some(counts_N), ctx=ctx), groups)

    def gather(self, ticket: Any, *, ctx: StepContext) -> tuple[Tensor, ...]:
        return back(self.inner.gather(bare(ticket), ctx=ctx))

    def gather_pooled(
        self,
        ticket: Any,
        plan: PoolPlan,
        offsets_GB1: Tensor,
        weights_N: Tensor | None,
        *,
        ctx: StepContext,
    ) -> tuple[Tensor, ...]:
        inputs = self.there(offsets_GB1), self.some(weights_N)
        return back(self.inner.gather_pooled(bare(ticket), plan, *inputs, ctx=ctx))

    def apply(self, records: Sequence[GradRecord], *, ctx: StepContext) -> None:
        self.inner.apply([self.record(record) for record in records], ctx=ctx)

    def sum_grads(self, records: Sequence[GradRecord]) -> SummedGrads:
        summed = self.inner.sum_grads([self.record(record) for record in records])
        return SummedGrads(summed.tables, back(summed.ids), back(summed.sums), back(summed.counts))

    def apply_summed(
        self, summed: SummedGrads, records: Sequence[GradRecord], *, ctx: StepContext
    ) -> None:
        placed = SummedGrads(
            summed.tables, self.all(summed.ids), self.all(summed.sums), self.all(summed.counts)
        )
        self.inner.apply_summed(placed, [self.record(record) for record in records], ctx=ctx)

    def apply_ids(
        self,
        groups: IdGroups,
        grads: Sequence[Tensor],
        counts_N: Tensor | None = None,
        *,
        ctx: StepContext,
        seen_weights: Sequence[Tensor] | None = None,
    ) -> None:
        self.inner.apply_ids(
            self.groups(groups),
            self.all(grads),
            self.some(counts_N),
            ctx=ctx,
            seen_weights=None if seen_weights is None else self.all(seen_weights),
        )

    def assign(self, groups: IdGroups, weights: Sequence[Tensor], *, ctx: StepContext) -> None:
        self.inner.assign(self.groups(groups), self.all(weights), ctx=ctx)

    def assign_add(self, groups: IdGroups, deltas: Sequence[Tensor], *, ctx: StepContext) -> None:
        self.inner.assign_add(self.groups(groups), self.all(deltas), ctx=ctx)

    def reinitialize(self, groups: IdGroups, *, ctx: StepContext) -> Tensor:
        return self.inner.reinitialize(self.groups(groups), ctx=ctx).cpu()


class PlacedCuda(PlacedShard):
    """A GPU's shard; where there is no GPU its kernels are interpreted, on CPU tensors."""

    def __init__(self, specs: Sequence[TableSpec], *, seed: int = 0) -> None:
        # Only here, since other shards are tested where Triton is missing.
        from shoal.table.cuda.shard import CudaShard

        where = "cuda" if torch.cuda.is_available() else "cpu"
        super().__init__(CudaShard(specs, seed=seed, device=where))


class PlacedTiered(PlacedShard):
    """A GPU shard with rows in host memory, behind a cache of a few rows."""

    def __init__(self, specs: Sequence[TableSpec], *, seed: int = 0) -> None:
        from shoal.table.cuda.shard import CudaShard

        where = "cuda" if torch.cuda.is_available() else "cpu"
        rows = HostRows(cache_bytes=1 << 10)
        super().__init__(CudaShard(specs, seed=seed, device=where, host_rows=rows))


def bare(ticket: Any) -> Any:
    return ticket.inner if isinstance(ticket, PlacedTicket) else ticket


def back(values: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(value.cpu() for value in values)
