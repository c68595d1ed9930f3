"""Random verbs on a `CpuShard` and on the reference shard: same answers, same errors, same rows."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from shoal import Expiry, Segment, TableSpec, initializers, optimizers
from shoal.errors import ShoalError
from shoal.rules.admission import Admission
from shoal.table.cpu import CpuShard
from shoal.table.shard import (
    GradRecord,
    IdGroups,
    Output,
    Pool,
    PoolPlan,
    Shard,
    Slice,
    StepContext,
    SummedGrads,
    Ticket,
)
from support.reference_shard import ReferenceShard

SEEDS, VERBS_A_RUN = range(16), 32

NON_FINITE = (float("nan"), float("inf"), float("-inf"))
SLOT_1 = 1 << 48
IDS = (*range(9), -1, 2**63 - 1, -(2**63), *(SLOT_1 + i for i in range(5)), 2 * SLOT_1 + 77)
RULES = (optimizers.SGD(lr=0.1), optimizers.Adagrad(lr=0.1), optimizers.Adam(lr=0.01))
INITIALIZERS = (initializers.Uniform(-0.5, 0.5), initializers.Normal(0.0, 0.3))
EXPIRIES = (None, Expiry(ttl_s=5), Expiry(per_slot=((1, 0), (0, 7))))
ADMISSIONS = (
    None,
    Admission(threshold=3, per_slot=((1, 0),)),
    Admission(threshold=2, on="after", per_slot=((0, 0), (1, 4))),
    Admission(threshold=0, per_slot=((1, 5),)),
    Admission(threshold=0, per_slot=((1, 5),), counter="sketch", sketch_width=1 << 12),
    Admission(threshold=3, on="after", per_slot=((1, 0),), counter="sketch", sketch_width=1 << 12),
)

T = TypeVar("T")


@dataclass
class Bags:
    """Ids of some groups, each cut into the same number of bags."""

    groups: IdGroups
    offsets_GB1: Tensor
    weights_N: Tensor | None
    counts_N: Tensor | None
    tables: list[int]
    sizes: list[int]


@dataclass
class Lookup:
    """One training lookup on both shards: tickets and what they gave."""

    tickets: tuple[Ticket, Ticket]
    bags: Bags
    plan: PoolPlan | None
    gathered: tuple[Tensor, ...]

    def end(self) -> None:
        for ticket in self.tickets:
            ticket.end()


class Fuzz:
    """Two shards, a source of random verbs, and the lookups that are still open."""

    def __init__(self, seed: int, dtype: str) -> None:
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        names = ["float32", "float64"] if dtype == "mixed" else [dtype]
        number = self.random.randint(2, 3)
        self.specs = [self.spec(k, names[k % len(names)]) for k in range(number)]
        self.core = CpuShard(self.specs, seed=seed, threads=self.random.randint(1, 3))
        self.reference = ReferenceShard(self.specs, seed=seed)
        self.open: list[Lookup] = []
        self.ctx = StepContext()

    def spec(self, k: int, dtype: str) -> TableSpec:
        choose = self.random.choice
        segments = tuple(
            Segment(
                name=f"s{j}",
                dim=choose((1, 2, 3, 5, 8, 17)),
                initializer=choose(INITIALIZERS),
                optimizer=choose(RULES),
            )
            for j in range(self.random.randint(1, 3))
        )
        return TableSpec(
            name=f"t{k}",
            segments=segments,
            dtype=dtype,  # type: ignore[arg-type]
            capacity_rows=choose((None, None, 12)),
            admission=choose(ADMISSIONS),
            expiry=choose(EXPIRIES),
        )

    def run(self) -> None:
        verbs: tuple[Callable[[], None], ...] = (
            *(self.find, self.find_pooled, self.apply_ids, self.summed, self.apply_open),
            *(self.train, self.train, self.train, self.train_twice, self.open_ticket),
            *(self.close_ticket, self.assign, self.assign_add, self.reinitialize),
            *(self.evict, self.cut),
        )
        now_s = 0
        for step in range(VERBS_A_RUN):
            now_s += self.random.choice((0, 0, 1, 2))
            self.ctx = StepContext(
                global_step=step,
                event_time_s=max(0, now_s - self.random.choice((0, 0, 3))),
                nan_policy=self.random.choice(("raise", "skip", "clip")),
                nan_clip=0.5,
            )
            verb = self.random.choice(verbs)
            verb()
            self.check_rows(f"step {step}, {verb.__name__}")
        self.check_load()

    # Material.

    def bags(self) -> Bags:
        choose = self.random.choice
        tables = [self.random.randrange(len(self.specs)) for _ in range(self.random.randint(0, 4))]
        batch = choose((0, 1, 2, 4))
        lengths = [[choose((0, 0, 1, 1, 2, 3, 5)) for _ in range(batch)] for _ in tables]
        sizes = [sum(row) for row in lengths]
        number = sum(sizes)
        groups = IdGroups(
            torch.tensor([choose(IDS) for _ in range(number)], dtype=torch.int64),
            torch.tensor(list(accumulate(sizes, initial=0))),
            torch.tensor(tables, dtype=torch.int32),
        )
        offsets = torch.tensor(list(accumulate(chain(*lengths), initial=0)))
        weights = self.values(number).float() if self.random.random() < 0.4 else None
        counts = torch.tensor([choose((1, 2, 5)) for _ in range(number)], dtype=torch.int64)
        with_counts = self.random.random() < 0.3
        return Bags(groups, offsets, weights, counts if with_counts else None, tables, sizes)

    def plan(self, tables: Sequence[int]) -> PoolPlan:
        """Each group on outputs of its own, or added to an earlier one of the same shape."""
        pools, outputs = [], list[tuple[int, str]]()
        for k in tables:
            dim = self.specs[k].dim
            pooling = self.random.choice(("sum", "mean", "first_n"))
            length = self.random.choice((1, 2, 4)) if pooling == "first_n" else 1
            cut = self.random.randrange(dim)
            slices = []
            for start, stop in [(0, cut), (cut, dim)] if cut else [(0, dim)]:
                shape = length * (stop - start), self.specs[k].dtype
                add = shape in outputs and self.random.random() < 0.5
                if not add:
                    outputs.append(shape)
                output = outputs.index(shape) if add else len(outputs) - 1
                slices.append(Slice(start, stop, output, 0, add))
            pools.append(Pool(pooling, tuple(slices), length))  # type: ignore[arg-type]
        return PoolPlan(tuple(pools), tuple(Output(width) for width, _ in outputs))

    def values(self, *shape: int) -> Tensor:
        """Away from zero, where sums that cancel would make rounding matter."""
        drawn = torch.randn(*shape, generator=self.generator, dtype=torch.float64)
        return drawn.sign() * (drawn.abs() + 0.2)

    def rows(self, bags: Bags) -> list[Tensor]:
        """One [n_g, D_g] per group."""
        return [
            self.values(size, self.specs[k].dim).to(getattr(torch, self.specs[k].dtype))
            for k, size in zip(bags.tables, bags.sizes, strict=True)
        ]

    def poisoned(self, grads: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Sometimes with a NaN or an infinity in some of them."""
        if self.random.random() < 0.2:
            for grad in grads:
                if grad.numel() and self.random.random() < 0.7:
                    at = self.random.randrange(grad.numel())
                    grad.view(-1)[at] = self.random.choice(NON_FINITE)
        return tuple(grads)

    # Comparison.

    def both(self, verb: Callable[[Shard], T]) -> tuple[T, T] | None:
        """Both results; None where both shards refused with the same class of error."""
        try:
            ours = verb(self.core)
        except ShoalError as error:
            with pytest.raises(type(error)):
                verb(self.reference)
            return None
        return ours, verb(self.reference)

    def near(self, ours: Tensor, theirs: Tensor, what: str, dtype: str = "float32") -> None:
        tolerance = 1e-9 if dtype == "float64" else 3e-4
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
        wide = all(spec.dtype == "float64" for spec in self.specs)
        for ours, theirs in zip(*pair, strict=True):
            self.near(ours, theirs, what, "float64" if wide else "float32")

    def check_rows(self, when: str) -> None:
        for k, spec in enumerate(self.specs):
            ours, theirs = self.core.export(k), self.reference.export(k)
            assert torch.equal(ours.ids, theirs.ids), when
            assert self.core.size(k) == self.reference.size(k) == len(ours.ids), when
            self.near(ours.weights, theirs.weights, f"{when}, weights", spec.dtype)
            self.near(ours.state, theirs.state, f"{when}, state", spec.dtype)
            for name in ("versions", "last_seen_s", "counts"):
                assert torch.equal(getattr(ours, name), getattr(theirs, name)), f"{when}, {name}"
            pair = self.core.stats()[k], self.reference.stats()[k]
            for name in ("rows", "inserted", "evicted", "refused", "nonfinite_skipped"):
                assert getattr(pair[0], name) == getattr(pair[1], name), f"{when}, {name}"

    def check_load(self) -> None:
        """What one shard exports, another holds after loading it, to the bit."""
        for k in range(len(self.specs)):
            chunk = self.core.export(k)
            copy = CpuShard(self.specs)
            copy.load(k, chunk)
            loaded = copy.export(k)
            for name in ("ids", "weights", "state", "last_seen_s", "counts"):
                assert torch.equal(getattr(loaded, name), getattr(chunk, name)), name

    # Verbs.

    def find(self) -> None:
        bags = self.bags()
        ours, theirs = self.core.find(bags.groups), self.reference.find(bags.groups)
        assert torch.equal(ours.found_N, theirs.found_N)
        self.all_near((ours.weights, theirs.weights), "find")

    def find_pooled(self) -> None:
        bags = self.bags()
        if bags.tables:
            inputs = bags.groups, self.plan(bags.tables), bags.offsets_GB1, bags.weights_N
            self.all_near(self.both(lambda shard: shard.find_pooled(*inputs)), "find_pooled")

    def lookup(self) -> Lookup | None:
        bags = self.bags()
        pair = self.both(lambda s: s.find_or_init(bags.groups, bags.counts_N, ctx=self.ctx))
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
        shards, bags, plan = (self.core, self.reference), lookup.bags, lookup.plan
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
        self.both(lambda s: s.apply(ours if s is self.core else theirs, ctx=self.ctx))

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
        sums = by_id(self.core.sum_grads(ours)), by_id(self.reference.sum_grads(theirs))
        assert sums[0].keys() == sums[1].keys()
        for key, (total, count) in sums[0].items():
            expected = sums[1][key]
            self.near(total, expected[0], "sum_grads", self.specs[key[0]].dtype)
            assert count == expected[1]
        pairs = {id(self.core): ours, id(self.reference): theirs}

        def apply(shard: Shard) -> None:
            records = pairs[id(shard)]
            shard.apply_summed(shard.sum_grads(records), records, ctx=self.ctx)

        self.both(apply)
        lookup.end()

    def apply_ids(self) -> None:
        bags = self.bags()
        grads = self.poisoned(self.rows(bags))
        self.both(lambda s: s.apply_ids(bags.groups, grads, bags.counts_N, ctx=self.ctx))

    def assign(self) -> None:
        bags = self.bags()
        rows = self.rows(bags)
        self.both(lambda s: s.assign(bags.groups, rows, ctx=self.ctx))

    def assign_add(self) -> None:
        bags = self.bags()
        rows = self.rows(bags)
        self.both(lambda s: s.assign_add(bags.groups, rows, ctx=self.ctx))

    def reinitialize(self) -> None:
        groups = self.bags().groups
        pair = self.both(lambda s: s.reinitialize(groups, ctx=self.ctx))
        assert pair is None or torch.equal(*pair)

    def evict(self) -> None:
        now_s = self.ctx.event_time_s
        pair = self.both(lambda s: s.evict(now_s))
        assert pair is not None and pair[0] == pair[1]

    def cut(self) -> None:
        pair = self.both(lambda s: s.cut())
        assert pair is not None and pair[0] == pair[1]


def by_id(summed: SummedGrads) -> dict[tuple[int, int], tuple[Tensor, int]]:
    parts = zip(summed.tables, summed.ids, summed.sums, summed.counts, strict=True)
    return {
        (k, id_): (total, count)
        for k, ids, sums, counts in parts
        for id_, total, count in zip(ids.tolist(), sums, counts.tolist(), strict=True)
    }


@pytest.mark.parametrize("dtype", ["float32", "float64", "mixed"])
@pytest.mark.parametrize("seed", SEEDS)
def test_random_verbs_follow_the_reference(seed: int, dtype: str) -> None:
    Fuzz(seed, dtype).run()
