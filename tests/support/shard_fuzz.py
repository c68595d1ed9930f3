"""Random calls on two shards: same answers, same errors, same rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from shoal.errors import NonFiniteGradient, ShoalError
from shoal.lookup import PoolPlan
from shoal.table.shard import GradRecord, Shard, StepContext, SummedGrads, Ticket
from shoal.table.spec import TableSpec

from .change_consumer import Consumer, contents
from .fuzz_material import PLAIN, Bags, Material, Menu

__all__ = ["Fuzz", "MakeShard"]

MakeShard = Callable[[Sequence[TableSpec], int], Shard]
"""(specs, seed) -> shard"""

TOLERANCES = {"float64": 1e-9, "float32": 3e-4, "float16": 8e-3, "bfloat16": 6e-2}

T = TypeVar("T")


@dataclass
class Lookup:
    """One training lookup on both shards: tickets and results."""

    tickets: tuple[Ticket, Ticket]
    bags: Bags
    plan: PoolPlan | None
    gathered: tuple[Tensor, ...]

    def end(self) -> None:
        for ticket in self.tickets:
            ticket.end()


class Fuzz(Material):
    """Two shards, a source of random calls, and the lookups that are still open.

    Args:
        make_ours, make_theirs: the shard under test and its oracle; both on the CPU, or placed.
        late: ours reports non-finite gradients in `check`, and steps the other rows.
    """

    def __init__(
        self,
        seed: int,
        dtype: str,
        make_ours: MakeShard,
        make_theirs: MakeShard,
        *,
        late: bool = False,
        menu: Menu = PLAIN,
    ) -> None:
        super().__init__(seed, dtype, menu)
        self.seed = seed
        self.make_ours = make_ours
        self.ours = make_ours(self.specs, seed)
        self.theirs = make_theirs(self.specs, seed)
        self.late = late
        self.told = 0
        self.open: list[Lookup] = []
        self.consumers = Consumer(), Consumer()
        self.ctx = StepContext()

    def run(self, verbs_a_run: int) -> None:
        verbs: tuple[Callable[[], None], ...] = (
            *(self.find, self.find_pooled, self.apply_ids, self.summed, self.apply_open),
            *(self.train, self.train, self.train, self.train_twice, self.open_ticket),
            *(self.close_ticket, self.assign, self.assign_add, self.reinitialize),
            *(
                self.evict,
                self.close_version,
                self.scan,
                *((self.clear,) if self.menu.clears else ()),
            ),
        )
        now_s = 0
        for step in range(verbs_a_run):
            now_s += self.random.choice((0, 0, 1, 2))
            self.ctx = StepContext(
                global_step=step,
                event_time_s=max(0, now_s - self.random.choice((0, 0, 3))),
                nan_policy=self.random.choice(("raise", "skip", "clip")),
                nan_clip=0.5,
            )
            verb = self.random.choice(verbs)
            verb()
            when = f"step {step}, {verb.__name__}"
            self.check_alarm(when)
            self.check_rows(when)
        self.check_load()

    def ctx_of(self, shard: Shard) -> StepContext:
        """What "raise" means on a shard that raises late, for one that does not."""
        waits = self.late and shard is self.theirs and self.ctx.nan_policy == "raise"
        return replace(self.ctx, nan_policy="skip") if waits else self.ctx

    # Comparison.

    def both(self, verb: Callable[[Shard], T]) -> tuple[T, T] | None:
        """Both results; None where both shards refused with the same class of error."""
        try:
            ours = verb(self.ours)
        except ShoalError as error:
            with pytest.raises(type(error)):
                verb(self.theirs)
            return None
        return ours, verb(self.theirs)

    def near(self, ours: Tensor, theirs: Tensor, what: str, dtype: str = "float32") -> None:
        tolerance = TOLERANCES[dtype]
        torch.testing.assert_close(
            ours.double(),
            theirs.double(),
            rtol=tolerance,
            atol=tolerance,
            equal_nan=True,
            msg=lambda text: f"{what}: {text}",
        )

    def all_near(self, pair: tuple[Sequence[Tensor], Sequence[Tensor]] | None, what: str) -> None:
        assert pair is not None
        coarsest = max((spec.dtype for spec in self.specs), key=TOLERANCES.__getitem__)
        for ours, theirs in zip(*pair, strict=True):
            self.near(ours, theirs, what, coarsest)

    def check_rows(self, when: str) -> None:
        for k, spec in enumerate(self.specs):
            ours, theirs = self.ours.export(k), self.theirs.export(k)
            assert torch.equal(ours.ids, theirs.ids), when
            assert self.ours.size(k) == self.theirs.size(k) == len(ours.ids), when
            self.near(ours.weights, theirs.weights, f"{when}, weights", spec.dtype)
            self.near(ours.state, theirs.state, f"{when}, state", spec.dtype)
            for name in ("versions", "last_seen_s", "counts"):
                assert torch.equal(getattr(ours, name), getattr(theirs, name)), f"{when}, {name}"
            pair = self.ours.stats()[k], self.theirs.stats()[k]
            for name in ("rows", "inserted", "evicted", "refused", "nonfinite_skipped"):
                assert getattr(pair[0], name) == getattr(pair[1], name), f"{when}, {name}"

    def check_alarm(self, when: str) -> None:
        """A shard that raises late reports exactly the rows that a step left unchanged."""
        bad = sum(stats.nonfinite_skipped for stats in self.theirs.stats())
        new, self.told = bad - self.told, bad
        if self.late and new and self.ctx.nan_policy == "raise":
            with pytest.raises(NonFiniteGradient, match=f"for {new} rows"):
                self.ours.check()
        self.ours.check()

    def check_load(self) -> None:
        """What one shard exports, another holds after loading it, to the bit."""
        for k in range(len(self.specs)):
            chunk = self.ours.export(k)
            copy = self.make_ours(self.specs, self.seed)
            copy.load(k, chunk)
            loaded = copy.export(k)
            for name in ("ids", "weights", "state", "last_seen_s", "counts"):
                assert torch.equal(getattr(loaded, name), getattr(chunk, name)), name

    # Calls.

    def find(self) -> None:
        bags = self.bags()
        ours, theirs = self.ours.find(bags.groups), self.theirs.find(bags.groups)
        assert torch.equal(ours.found_N, theirs.found_N)
        self.all_near((ours.weights, theirs.weights), "find")

    def find_pooled(self) -> None:
        bags = self.bags()
        if bags.tables:
            inputs = bags.groups, self.plan(bags.tables), bags.offsets_GB1, bags.weights_N
            self.all_near(self.both(lambda shard: shard.find_pooled(*inputs)), "find_pooled")

    def lookup(self) -> Lookup | None:
        bags = self.bags()
        pair = self.both(lambda s: s.find_or_init(bags.groups, bags.counts_N, ctx=self.ctx_of(s)))
        if pair is None:
            return None
        assert torch.equal(pair[0].found_N, pair[1].found_N)
        assert torch.equal(pair[0].admitted_N, pair[1].admitted_N)
        plan = self.plan(bags.tables) if bags.tables and self.random.random() < 0.6 else None
        lookup = Lookup(pair, bags, plan, ())
        lookup.gathered = self.gather(lookup)
        return lookup

    def gather(self, lookup: Lookup) -> tuple[Tensor, ...]:
        """The core's rows, or pooled rows, once they agree with the reference's."""
        shards, bags, plan = (self.ours, self.theirs), lookup.bags, lookup.plan
        pairs = list(zip(shards, lookup.tickets, strict=True))
        rows = [shard.gather(ticket, ctx=self.ctx) for shard, ticket in pairs]
        self.all_near((rows[0], rows[1]), "gather")
        if plan is None:
            return rows[0]
        inputs = plan, bags.offsets_GB1, bags.weights_N
        sums = [shard.gather_pooled(ticket, *inputs, ctx=self.ctx) for shard, ticket in pairs]
        self.all_near((sums[0], sums[1]), "gather_pooled")
        return sums[0]

    def records(self, lookup: Lookup, number: int) -> tuple[list[GradRecord], list[GradRecord]]:
        """The same gradients, once for each shard's ticket."""
        pooled = None, None, None
        if lookup.plan is not None:
            pooled = lookup.plan, lookup.bags.offsets_GB1, lookup.bags.weights_N
        both: tuple[list[GradRecord], list[GradRecord]] = [], []
        for _ in range(number):
            grads = self.poisoned([self.values(*g.shape).to(g.dtype) for g in lookup.gathered])
            scale = self.random.choice((1.0, 0.5))
            for records, ticket in zip(both, lookup.tickets, strict=True):
                records.append(GradRecord(ticket, grads, *pooled, scale))
        return both

    def apply(self, ours: list[GradRecord], theirs: list[GradRecord]) -> None:
        self.both(lambda s: s.apply(ours if s is self.ours else theirs, ctx=self.ctx_of(s)))

    def train(self, number: int = 1) -> None:
        lookup = self.lookup()
        if lookup is not None:
            self.apply(*self.records(lookup, number))
            lookup.end()

    def train_twice(self) -> None:
        self.train(2)

    def open_ticket(self) -> None:
        lookup = self.lookup()
        if lookup is not None:
            self.open.append(lookup)

    def close_ticket(self) -> None:
        if self.open:
            lookup = self.open.pop(0)
            self.gather(lookup)
            lookup.end()

    def apply_open(self) -> None:
        """One step over all open lookups, some of them with two gradients."""
        ours, theirs = list[GradRecord](), list[GradRecord]()
        for lookup in self.open:
            parts = self.records(lookup, self.random.randint(1, 2))
            ours += parts[0]
            theirs += parts[1]
        self.apply(ours, theirs)
        for lookup in self.open:
            lookup.end()
        self.open.clear()

    def summed(self) -> None:
        lookup = self.lookup()
        if lookup is None:
            return
        ours, theirs = self.records(lookup, 1)
        sums = by_id(self.ours.sum_grads(ours)), by_id(self.theirs.sum_grads(theirs))
        assert sums[0].keys() == sums[1].keys()
        for key, (total, count) in sums[0].items():
            expected = sums[1][key]
            self.near(total, expected[0], "sum_grads", self.specs[key[0]].dtype)
            assert count == expected[1]
        pairs = {id(self.ours): ours, id(self.theirs): theirs}

        def apply(shard: Shard) -> None:
            records = pairs[id(shard)]
            shard.apply_summed(shard.sum_grads(records), records, ctx=self.ctx_of(shard))

        self.both(apply)
        lookup.end()

    def apply_ids(self) -> None:
        bags = self.bags()
        grads = self.poisoned(self.rows(bags))
        self.both(lambda s: s.apply_ids(bags.groups, grads, bags.counts_N, ctx=self.ctx_of(s)))

    def assign(self) -> None:
        bags = self.bags()
        rows = self.rows(bags)
        self.both(lambda s: s.assign(bags.groups, rows, ctx=self.ctx_of(s)))

    def assign_add(self) -> None:
        bags = self.bags()
        rows = self.rows(bags)
        self.both(lambda s: s.assign_add(bags.groups, rows, ctx=self.ctx_of(s)))

    def reinitialize(self) -> None:
        groups = self.bags().groups
        pair = self.both(lambda s: s.reinitialize(groups, ctx=self.ctx_of(s)))
        assert pair is None or torch.equal(*pair)

    def evict(self) -> None:
        now_s = self.ctx.event_time_s
        pair = self.both(lambda s: s.evict(now_s))
        assert pair is not None and pair[0] == pair[1]

    def clear(self) -> None:
        table = self.random.randrange(len(self.specs))
        self.both(lambda s: s.clear(table))

    def close_version(self) -> None:
        pair = self.both(lambda s: s.close_version())
        assert pair is not None and pair[0] == pair[1]

    def scan(self) -> None:
        """Consumers of both shards' changes end with the tables, and heard of the same ids."""
        self.close_version()
        heard = []
        for shard, consumer in zip((self.ours, self.theirs), self.consumers, strict=True):
            heard.append(consumer.drain(shard))
            chunks = [shard.export(k) for k in range(len(self.specs))]
            assert consumer.held == contents(*chunks)
            assert consumer.restarts == 1
        assert heard[0] == heard[1]


def by_id(summed: SummedGrads) -> dict[tuple[int, int], tuple[Tensor, int]]:
    parts = zip(summed.tables, summed.ids, summed.sums, summed.counts, strict=True)
    return {
        (k, id_): (total, count)
        for k, ids, sums, counts in parts
        for id_, total, count in zip(ids.tolist(), sums, counts.tolist(), strict=True)
    }
