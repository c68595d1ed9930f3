"""Sparse gradients between backward and the optimizer's step."""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from shoal.comm.collectives import Collectives
from shoal.errors import ConfigError, InputError, ShapeError, describe
from shoal.exchange.local import PendingRecords, Route
from shoal.lookup import Pool, PoolPlan
from shoal.ops import segment_sum
from shoal.ragged import KeyedRagged
from shoal.table.rows import real_dtype
from shoal.table.shard import GradRecord, IdGroups, ReadTicket, Shard, StepContext, SummedGrads


def position_grads(record: GradRecord, dims_G: Sequence[int]) -> list[Tensor]:
    """One [n_g, D_g] per group: what each looked-up row gets; the record's scale is in it.

    dims_G: row dim of each group's table.
    """
    if record.plan is None or record.offsets_GB1 is None:
        return [grad * record.scale for grad in record.grads]
    offsets_GB1, pools = record.offsets_GB1, record.plan.pools
    batch_size = (offsets_GB1.numel() - 1) // len(pools)
    cuts = record.ticket.groups.splits_G1.tolist()
    parts = []
    for g, (pool, dim) in enumerate(zip(pools, dims_G, strict=True)):
        offsets_B1 = offsets_GB1[g * batch_size : (g + 1) * batch_size + 1]
        rows = _rows_of(pool, record.grads, offsets_B1, (cuts[g + 1] - cuts[g], dim))
        if record.weights_N is not None:
            weights = record.weights_N[cuts[g] : cuts[g + 1]]
            rows = rows * weights.to(rows.dtype)[:, None]
        parts.append(rows * record.scale if record.scale != 1.0 else rows)
    return parts


def _rows_of(
    pool: Pool, grads: Sequence[Tensor], offsets_B1: Tensor, shape: tuple[int, int]
) -> Tensor:
    count, device = shape[0], offsets_B1.device
    lengths_B = offsets_B1.diff()
    bags_B = torch.arange(lengths_B.numel(), device=device)
    # The size is known on the host: a device need not be asked for it.
    bags_N = bags_B.repeat_interleave(lengths_B, output_size=count)
    # Outputs differ in dtype where tables do.
    like = next((part.output for part in pool.slices), 0)
    rows = grads[like].new_zeros(shape)
    for part in pool.slices:
        width = part.stop - part.start
        reach = (pool.lanes - 1) * part.stride + width
        block = grads[part.output][:, part.column : part.column + reach]
        if pool.pooling == "first_n":
            lane_N = torch.arange(count, device=device) + offsets_B1[0] - offsets_B1[bags_N]
            lanes = block.unfold(1, width, part.stride)
            taken = lanes[bags_N, lane_N.clamp(max=pool.length - 1)]
            rows[:, part.start : part.stop] += taken.where(lane_N[:, None] < pool.length, 0)
        else:
            rows[:, part.start : part.stop] += block[bags_N]
    if pool.pooling == "mean":
        rows = rows / lengths_B[bags_N, None]
    return rows


def sum_by_id(records: Sequence[GradRecord], dims_K: Sequence[int]) -> SummedGrads:
    """Sums and counts per id over all records, whether the id has a row or not.

    Every table a record names is in the result, also with no ids. Ids come in rising order.
    dims_K: row dim of each table of the shard.
    """
    found: dict[int, list[tuple[Tensor, Tensor, Tensor]]] = {}  # ids, gradients, counts
    counted: set[int] = set()
    for record in records:
        groups = record.ticket.groups
        tables, cuts = groups.tables_G.tolist(), groups.splits_G1.tolist()
        rows = position_grads(record, [dims_K[k] for k in tables])
        # One lookup is one occurrence of its ids, however many losses read it, unless others
        # counted them.
        known = record.ticket.counts_N if isinstance(record.ticket, ReadTicket) else None
        counts_N = torch.ones_like(groups.ids_N) if known is None else known
        if id(record.ticket) in counted:
            counts_N = torch.zeros_like(groups.ids_N)
        counted.add(id(record.ticket))
        for g, k in enumerate(tables):
            own = slice(cuts[g], cuts[g + 1])
            found.setdefault(k, []).append((groups.ids_N[own], rows[g], counts_N[own]))
    return _summed_of(
        {k: _sum(*map(torch.cat, zip(*found[k], strict=True))) for k in sorted(found)}
    )


Sums = dict[int, tuple[Tensor, Tensor, Tensor]]
"""Of each table its ids [U], sums [U, D] and counts [U]."""


def _by_table(summed: SummedGrads) -> Sums:
    columns = zip(summed.ids, summed.sums, summed.counts, strict=True)
    return dict(zip(summed.tables, columns, strict=True))


def _summed_of(parts: Sums) -> SummedGrads:
    ids, sums, counts = zip(*parts.values(), strict=True) if parts else ((), (), ())
    return SummedGrads(tuple(parts), ids, sums, counts)


def sums_finite(records: Sequence[GradRecord]) -> bool | None:
    """Whether sums per row over records are finite, whatever rows their ids have; fast.

    False where a gradient is not finite, None where it is not sure: then form the sums.
    """
    total, limit = 0.0, torch.finfo(torch.float64).max
    for record in records:
        factor = abs(record.scale) * record.ticket.groups.ids_N.numel()
        if record.weights_N is not None and record.weights_N.numel():
            factor *= max(1.0, float(record.weights_N.abs().max()))
        pools = () if record.plan is None else record.plan.pools
        factor *= max([1, *(len(pool.slices) for pool in pools)])
        grads = [grad for grad in record.grads if grad.numel()]
        # Least and largest in one pass: a norm takes eight times as long on a CPU.
        found = [max(abs(float(end)) for end in torch.aminmax(grad)) for grad in grads]
        if not all(map(math.isfinite, found)):
            return False
        total += factor * max([1.0, *found])
        limit = min([limit, *(torch.finfo(grad.dtype).max for grad in grads)])
    # A quarter: rounding may add to a sum as it grows.
    return True if total <= limit / 4 else None


def _sum(ids_N: Tensor, rows_ND: Tensor, counts_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    # Sorted runs instead of atomic adds: the order of a sum is that of the positions.
    order_N = ids_N.argsort(stable=True)
    ids_U, lengths_U = torch.unique_consecutive(ids_N[order_N], return_counts=True)
    offsets_U1 = pad(lengths_U.cumsum(0), (1, 0))
    sums_UD = segment_sum(rows_ND[order_N], offsets_U1)
    counts_U = pad(counts_N[order_N].cumsum(0), (1, 0))[offsets_U1].diff()
    return ids_U, sums_UD, counts_U


_MANY = 1024  # backward passes that hardly anybody means to add up


class GradientLedger:
    """Open routes and gradient records of one shard within the present step.

    Args:
        shard: the shard whose rows the records are about.
        inserts: lookups insert unknown ids; else rows come into being when records are applied.
        collectives: of the ranks that share the tables, for what a step decides together; None
            in one process. It must not be the one that batches travel through.
        silent: tables of the shard, by name, that another rank speaks for: replicas.

    Attributes:
        global_step: optimizer steps done; the optimizer keeps it current.
        generation: times `apply` ended tickets.
        revision: times something was written or cleared.
        event_time_s: latest event time of the step's lookups that have a gradient.
    """

    def __init__(
        self,
        shard: Shard,
        *,
        inserts: bool = True,
        collectives: Collectives | None = None,
        silent: Collection[str] = (),
    ) -> None:
        self.shard = shard
        self.inserts = inserts
        self.collectives = collectives
        self.silent = frozenset(silent)
        self.global_step = 0
        self.generation = 0
        self.revision = 0
        self._claim: weakref.WeakMethod[Callable[[int], None]] | None = None
        self._resumed = 0
        self._warned = False
        self._context = StepContext()
        # Weak: a route lives as long as a graph or a record holds it, so that dropping a graph
        # ends its ticket.
        self._routes: weakref.WeakValueDictionary[tuple[int, int], Route] = (
            weakref.WeakValueDictionary()
        )
        self._forget()

    def _forget(self) -> None:
        """Begin with nothing recorded."""
        self._written: list[tuple[Route, PendingRecords]] = []
        self._resolved = 0
        # Records that are applied together; several lists where each sender steps on its own.
        self._turns: list[list[GradRecord]] = []
        self._versions: list[tuple[GradRecord, tuple[int, ...]]] = []
        self.event_time_s = 0
        self._summed: SummedGrads | None = None
        self._summed_records = 0

    def __len__(self) -> int:
        """Backward passes of the step; the same on every rank."""
        return len(self._written)

    @property
    def busy(self) -> bool:
        """Whether a lookup or a gradient of the present step is open."""
        return bool(self._written) or bool(self._routes)

    @property
    def is_claimed(self) -> bool:
        """Whether an optimizer that still exists steps these rows."""
        return self._claim is not None and self._claim() is not None

    def claim(self, resume: Callable[[int], None]) -> int:
        """Note who steps these rows; the number of steps that a load before it set.

        resume: its method that sets its steps; held weakly.
        """
        self._claim = weakref.WeakMethod(resume)
        step, self._resumed = self._resumed, 0
        return step

    def resume(self, step: int) -> None:
        """The rows were loaded as they were after so many steps: their optimizer continues."""
        resume = None if self._claim is None else self._claim()
        if resume is None:
            self.global_step = self._resumed = step
        else:
            resume(step)

    @property
    def world_size(self) -> int:
        """Ranks that share the tables."""
        return 1 if self.collectives is None else self.collectives.world_size

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
        """Remember a route until its gradient is applied or dropped, or its graph goes away.

        Gradients of earlier lookups that no optimizer is there to apply are dropped.
        """
        if self._written and not self.is_claimed:
            self._drop_unclaimed()
        self._routes[id(route.request.batch), id(route.request.plan)] = route

    def _drop_unclaimed(self) -> None:
        self._warn(
            "a backward pass, and no SparseOptimizer over them: these rows do not train, and their "
            "gradients are dropped when the next forward begins",
            "one that steps them; torch's own optimizers do not see rows",
            "Make a SparseOptimizer(model) and step it, alone or in a JointOptimizer; or look up "
            "in eval() or under no_grad.",
        )
        self.clear()

    def _warn(self, got: str, allowed: str, remedy: str) -> None:
        if not self._warned:
            self._warned = True
            what = f"gradients of tables {', '.join(repr(spec.name) for spec in self.shard.specs)}"
            text = describe(what, got=got, allowed=allowed, remedy=remedy)
            warnings.warn(text, UserWarning, stacklevel=3)

    def write(self, route: Route, pending: PendingRecords) -> None:
        """Add what one backward pass sent back; it may still be on its way."""
        self._written.append((route, pending))
        if len(self._written) == _MANY:
            self._warn(
                f"{_MANY} backward passes since the last step, all of which take memory",
                "a step, or zero_grad of the SparseOptimizer, now and then",
                "Call its step(), alone or in a JointOptimizer; a model's zero_grad() does not "
                "reach rows.",
            )
        self.revision += 1
        if self.collectives is None:
            self._resolve()
        self.event_time_s = max(self.event_time_s, route.event_time_s)

    def take_over(self, other: GradientLedger) -> None:
        """Add another accumulator's records and routes of the same shard, and empty it."""
        for route, pending in other._written:
            self.write(route, pending)
        self._routes.update(other._routes)
        self._resumed = max(self._resumed, other._resumed)
        other.clear()

    def summed(self) -> SummedGrads:
        """Sums per id over all records so far; what is changed in them is what gets applied.

        Raises:
            ConfigError: each sender steps on its own, so nothing is summed over them.
            InputError: a gradient was changed in place since backward.
        """
        self._resolve()
        if len(self._turns) > 1:
            raise ConfigError(
                "summed gradients of tables",
                got="per_sender_steps=True, whose senders' gradients are applied one by one",
                allowed="one step for the gradients of all ranks",
                remedy="Clip and scale losses with per_sender_steps=False.",
            )
        records = self._turns[0] if self._turns else []
        if self._summed is None or self._summed_records < len(records):
            self._check_unchanged()
            fresh = self._sum(records[self._summed_records :])
            if self._summed is not None and self._summed_records:
                fresh = _merge(self._summed, fresh, self._sum(records))
            self._summed = fresh
            self._summed_records = len(records)
        return self._summed

    def sums_of(self, table: int) -> Tensor | None:
        """Sums [U, D] of one table; None before any backward, or when they were dropped."""
        if not self._written:
            return None
        summed = self.summed()
        return summed.sums[summed.tables.index(table)] if table in summed.tables else None

    def replace_sums(self, table: int, sums_UD: Tensor | None) -> None:
        """Put other sums in the place of a table's; None drops its gradients.

        Raises:
            ShapeError: not the shape of the sums they replace.
        """
        if not self._written and sums_UD is None:
            return
        parts = _by_table(self.summed()) if self._written else {}
        old = parts.get(table)
        if sums_UD is None:
            parts.pop(table, None)
        elif old is None or old[1].shape != sums_UD.shape:
            got, remedy = tuple(sums_UD.shape), "Read .grad first and change it in place."
            allowed = "the shape of the gradient it replaces"
            raise ShapeError(f"sums of table {table}", got, allowed, remedy)
        else:
            parts[table] = (old[0], sums_UD, old[2])
        self._summed = _summed_of(parts)

    def finite(self) -> bool:
        """Whether this rank's gradients and their sums per row, as applied, are finite.

        Waits for the device.
        """
        self._resolve()
        if self._summed is not None:
            return bool(self.all_finite())
        self._check_unchanged()
        return all(self._turn_finite(turn) for turn in self._turns)

    def all_finite(self) -> Tensor:
        """Whether all sums are finite: a bool scalar on the shard's device, not waited for."""
        sums = self.summed().sums
        return _finite(sums) if sums else torch.ones((), dtype=torch.bool, device=self.shard.device)

    def _turn_finite(self, records: list[GradRecord]) -> bool:
        known = sums_finite(records)
        return bool(_finite(self._sum(records).sums)) if known is None else known

    def apply(self, ctx: StepContext) -> None:
        """One optimizer step of every row that has a gradient, or one per sender; ends the tickets.

        Raises:
            NonFiniteGradient: under the policy "raise"; nothing was changed. A CUDA shard raises
                it later (`StepContext.nan_policy`).
            InputError: a gradient was changed in place since backward.
        """
        if not self._written:
            self.shard.last_step = ctx.global_step
            return
        self._resolve()
        if self._summed is None:
            self._check_unchanged()
        for turn in self._turns:
            if self._summed is None and self.inserts:
                self.shard.apply(turn, ctx=ctx)
                continue
            summed = self._sum(turn) if self._summed is None else self.summed()
            if self.inserts:
                self.shard.apply_summed(summed, turn, ctx=ctx)
            else:
                self._apply_ids(summed, ctx)
        # Also where no gradient came to this rank: later reads are as on the others.
        self.shard.last_step = ctx.global_step
        self.generation += 1
        self.clear()

    def clear(self) -> None:
        """Drop all records and sums. A ticket ends unless a retained graph still holds it."""
        for route, _ in self._written:
            self._routes.pop((id(route.request.batch), id(route.request.plan)), None)
        self.revision += 1
        self._forget()

    def _resolve(self) -> None:
        """Wait for what was written since the last time."""
        while self._resolved < len(self._written):
            records = self._written[self._resolved][1].wait()
            while len(self._turns) < len(records):
                self._turns.append([])
            # A rank that has no table of a request gets no record of it.
            for turn, record in zip(self._turns, records, strict=False):
                turn.append(record)
                if self.collectives is None:
                    # Autograd may share this gradient; one that was received is ours alone.
                    versions = tuple([grad._version for grad in record.grads])
                    self._versions.append((record, versions))
            self._resolved += 1

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
        parts, none = _by_table(summed), _no_ids(self.shard)
        for k in missing:
            spec = self.shard.specs[k]
            sums_UD = torch.empty(0, spec.dim, dtype=real_dtype(spec), device=none.device)
            parts[k] = (none, sums_UD, none.clone())
        return _summed_of(parts)

    def _apply_ids(self, summed: SummedGrads, ctx: StepContext) -> None:
        sizes = torch.tensor([0, *(ids.numel() for ids in summed.ids)], device="cpu")
        groups = IdGroups(
            torch.cat(summed.ids) if summed.ids else _no_ids(self.shard),
            sizes.cumsum(0),
            torch.tensor(summed.tables, dtype=torch.int32, device="cpu"),
        )
        counts = torch.cat(summed.counts) if summed.counts else None
        self.shard.apply_ids(groups, summed.sums, counts, ctx=ctx)

    def _check_unchanged(self) -> None:
        for record, versions in self._versions:
            if tuple([grad._version for grad in record.grads]) != versions:
                raise InputError(
                    "gradient of an embedding output",
                    got="a change in place between backward and step",
                    allowed="reading it",
                    remedy="Change a clone: autograd may share one gradient among tensors.",
                )


def _finite(parts: Sequence[Tensor]) -> Tensor:
    return torch.stack([part.isfinite().all() for part in parts]).all()


def _no_ids(shard: Shard) -> Tensor:
    return torch.empty(0, dtype=torch.int64, device=shard.device)


def _merge(old: SummedGrads, fresh: SummedGrads, whole: SummedGrads) -> SummedGrads:
    """Add fresh sums to old ones that may have been changed; `whole` has all ids and counts."""
    before, after, parts = _by_table(old), _by_table(fresh), {}
    for k, (ids_U, sums_UD, counts_U) in _by_table(whole).items():
        if k in before and k in after:
            joined, (sorted_U, order_U) = torch.zeros_like(sums_UD), ids_U.sort()
            for ids_V, sums_VD, _ in (before[k], after[k]):
                joined[order_U[torch.searchsorted(sorted_U, ids_V)]] += sums_VD
            parts[k] = (ids_U, joined, counts_U)
        elif k in before or k in after:
            parts[k] = before.get(k) or after[k]
    return _summed_of(parts)
