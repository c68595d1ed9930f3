"""Sparse gradients between backward and the optimizer's step.

The embedding writes here, the sparse optimizer drains. Backward only adds records: nothing is
summed or applied. Per-id sums come into being when somebody reads them (a loss scaler, clipping,
a person); if nobody does, the shard reduces and applies all records of the step in one pass.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from shoal.errors import InputError, ShapeError, describe
from shoal.exchange import Route
from shoal.ragged import KeyedRagged
from shoal.table.shard import GradRecord, IdGroups, PoolPlan, Shard, StepContext, SummedGrads
from shoal.table.unpool import sum_by_id

__all__ = ["GradientLedger"]


class GradientLedger:
    """Open routes and gradient records of one shard within the present step.

    Args:
        shard: the shard whose rows the records are about.
        inserts: lookups insert unknown ids; else rows come into being when records are applied.

    Attributes:
        global_step: optimizer steps done; the optimizer keeps it current.
        generation: times `apply` ended tickets.
    """

    __slots__ = (
        "_context",
        "_event_time_s",
        "_records",
        "_routes",
        "_summed",
        "_summed_records",
        "_versions",
        "_written",
        "generation",
        "global_step",
        "inserts",
        "shard",
    )

    def __init__(self, shard: Shard, *, inserts: bool = True) -> None:
        self.shard = shard
        self.inserts = inserts
        self.global_step = 0
        self.generation = 0
        self._context = StepContext()
        # Weak: a route lives as long as a graph or a record holds it, so that dropping a graph
        # ends its ticket.
        self._routes: weakref.WeakValueDictionary[tuple[int, int], Route] = (
            weakref.WeakValueDictionary()
        )
        self._written: list[Route] = []
        self._records: list[GradRecord] = []
        self._versions: list[tuple[int, ...]] = []
        self._event_time_s = 0
        self._summed: SummedGrads | None = None
        self._summed_records = 0

    def __len__(self) -> int:
        return len(self._records)

    @property
    def records(self) -> tuple[GradRecord, ...]:
        """The step's records, in the order backward wrote them."""
        return tuple(self._records)

    @property
    def event_time_s(self) -> int:
        """Latest event time of the step's lookups that have a gradient."""
        return self._event_time_s

    def context(self, event_time_s: int) -> StepContext:
        """The context of a lookup at this time in the present step."""
        last = self._context
        if last.event_time_s != event_time_s or last.global_step != self.global_step:
            last = StepContext(global_step=self.global_step, event_time_s=event_time_s)
            self._context = last
        return last

    def route_of(self, batch: KeyedRagged, plan: PoolPlan) -> Route | None:
        """The open route of this very batch: a forward that is computed again reuses it."""
        return self._routes.get((id(batch), id(plan)))

    def opened(self, route: Route) -> None:
        """Remember a route until its gradient is applied or dropped, or its graph goes away."""
        self._routes[id(route.request.batch), id(route.request.plan)] = route

    def write(self, route: Route, record: GradRecord) -> None:
        """Add what one backward pass sent back."""
        self._records.append(record)
        self._written.append(route)
        self._versions.append(tuple([grad._version for grad in record.grads]))
        if route.event_time_s > self._event_time_s:
            self._event_time_s = route.event_time_s

    def take_over(self, other: GradientLedger) -> None:
        """Add another ledger's records and routes of the same shard, and empty it."""
        for route, record in zip(other._written, other._records, strict=True):
            self.write(route, record)
        for route in list(other._routes.values()):
            self.opened(route)
        other.clear()

    def summed(self) -> SummedGrads:
        """Sums per id over all records so far; what is changed in them is what gets applied."""
        if self._summed is None or self._summed_records < len(self._records):
            self._check_unchanged()
            fresh = self._sum(self._records[self._summed_records :])
            if self._summed is not None and self._summed_records:
                fresh = _merge(self._summed, fresh, self._sum(self._records))
            self._summed = fresh
            self._summed_records = len(self._records)
        return self._summed

    def sums_of(self, table: int) -> Tensor | None:
        """Sums [U, D] of one table; None before any backward, or when they were dropped."""
        if not self._records:
            return None
        summed = self.summed()
        return summed.sums[summed.tables.index(table)] if table in summed.tables else None

    def replace_sums(self, table: int, sums_UD: Tensor | None) -> None:
        """Put other sums in the place of a table's; None drops its gradients.

        Raises:
            ShapeError: not the shape of the sums they replace.
        """
        if not self._records:
            if sums_UD is None:
                return
            raise _no_sums(table, sums_UD)
        summed = self.summed()
        kept = [i for i, k in enumerate(summed.tables) if sums_UD is not None or k != table]
        sums = [sums_UD if summed.tables[i] == table else summed.sums[i] for i in kept]
        if sums_UD is not None:
            old = self.sums_of(table)
            if old is None or old.shape != sums_UD.shape:
                raise _no_sums(table, sums_UD)
        self._summed = SummedGrads(
            tables=tuple(summed.tables[i] for i in kept),
            ids=tuple(summed.ids[i] for i in kept),
            sums=tuple(part for part in sums if part is not None),
            counts=tuple(summed.counts[i] for i in kept),
        )

    def finite(self) -> bool:
        """Whether every recorded gradient is finite; sums are read where they exist.

        Waits for the device, once.
        """
        self._check_unchanged()
        parts = [grad for record in self._records for grad in record.grads]
        if self._summed is not None:
            parts = list(self.summed().sums)
        return not parts or bool(torch.stack([part.isfinite().all() for part in parts]).all())

    def apply(self, ctx: StepContext) -> None:
        """One optimizer step of every row that has a gradient; ends the tickets.

        Raises:
            NonFiniteGradient: under the policy "raise"; nothing was changed. A CUDA shard raises
                it later (`StepContext.nan_policy`).
            InputError: a gradient was changed in place since backward.
        """
        if not self._records:
            return
        if not self.inserts:
            self._apply_ids(self.summed(), ctx)
        elif self._summed is None:
            self._check_unchanged()
            self.shard.apply(self._records, ctx=ctx)
        else:
            self.shard.apply_summed(self.summed(), self._records, ctx=ctx)
        self.generation += 1
        self.clear()

    def clear(self) -> None:
        """Drop all records and sums. A ticket ends unless a retained graph still holds it."""
        for route in self._written:
            self._routes.pop((id(route.request.batch), id(route.request.plan)), None)
        self._written = []
        self._records = []
        self._versions = []
        self._event_time_s = 0
        self._summed = None
        self._summed_records = 0

    def _sum(self, records: list[GradRecord]) -> SummedGrads:
        if self.inserts:
            summed = self.shard.sum_grads(records)
        else:
            summed = sum_by_id(records, [spec.dim for spec in self.shard.specs])
        named = {k for record in records for k in record.ticket.groups.tables_G.tolist()}
        missing = sorted(named - set(summed.tables))
        if not missing:
            return summed
        # A lookup without ids has an empty gradient, not none.
        like = records[0].grads[0]
        none = tuple(like.new_empty(0, dtype=torch.int64) for _ in missing)
        sums = []
        for spec in (self.shard.specs[k] for k in missing):
            dtype = torch.float64 if spec.dtype == "float64" else torch.float32
            sums.append(like.new_empty(0, spec.dim, dtype=dtype))
        return SummedGrads(
            tables=summed.tables + tuple(missing),
            ids=summed.ids + none,
            sums=summed.sums + tuple(sums),
            counts=summed.counts + none,
        )

    def _apply_ids(self, summed: SummedGrads, ctx: StepContext) -> None:
        sizes = torch.tensor([0, *(ids.numel() for ids in summed.ids)])
        groups = IdGroups(
            torch.cat(summed.ids) if summed.ids else _no_ids(self.shard),
            sizes.cumsum(0),
            torch.tensor(summed.tables, dtype=torch.int32),
        )
        counts = torch.cat(summed.counts) if summed.counts else None
        self.shard.apply_ids(groups, summed.sums, counts, ctx=ctx)

    def _check_unchanged(self) -> None:
        for record, versions in zip(self._records, self._versions, strict=True):
            if tuple([grad._version for grad in record.grads]) != versions:
                raise InputError(
                    describe(
                        "gradient of an embedding output",
                        got="a change in place between backward and step",
                        allowed="reading it",
                        remedy="Change a clone: autograd may share one gradient among tensors.",
                    )
                )


def _no_ids(shard: Shard) -> Tensor:
    return torch.empty(0, dtype=torch.int64, device=shard.device)


def _merge(old: SummedGrads, fresh: SummedGrads, whole: SummedGrads) -> SummedGrads:
    """Add fresh sums to old ones that may have been changed; `whole` has all ids and counts."""
    tables, ids, sums, counts = [], [], [], []
    for k, ids_U, sums_UD, counts_U in zip(
        whole.tables, whole.ids, whole.sums, whole.counts, strict=True
    ):
        if k in old.tables and k in fresh.tables:
            i, j = old.tables.index(k), fresh.tables.index(k)
            joined = torch.zeros_like(sums_UD)
            joined[_positions(ids_U, old.ids[i])] += old.sums[i]
            joined[_positions(ids_U, fresh.ids[j])] += fresh.sums[j]
            part = (ids_U, joined, counts_U)
        elif k in old.tables or k in fresh.tables:
            source = old if k in old.tables else fresh
            i = source.tables.index(k)
            part = (source.ids[i], source.sums[i], source.counts[i])
        else:
            continue
        tables.append(k)
        ids.append(part[0])
        sums.append(part[1])
        counts.append(part[2])
    return SummedGrads(tuple(tables), tuple(ids), tuple(sums), tuple(counts))


def _positions(ids_U: Tensor, wanted_V: Tensor) -> Tensor:
    """Where each wanted id stands among distinct ids."""
    sorted_U, order_U = ids_U.sort()
    return order_U[torch.searchsorted(sorted_U, wanted_V)]


def _no_sums(table: int, sums_UD: Tensor) -> ShapeError:
    return ShapeError(
        describe(
            f"sums of table {table}",
            got=tuple(sums_UD.shape),
            allowed="the shape of the gradient it replaces",
            remedy="Read .grad first and change it in place.",
        )
    )
