"""Lookups that begin ahead, exchanges that change, and gradients that arrive late; one process."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from shoal.comm.collectives import LocalCollectives
from shoal.embedding.collection import EmbeddingCollection
from shoal.embedding.gradients import GradientLedger
from shoal.embedding.layouts import Feature
from shoal.errors import ConfigError, InputError, TicketError
from shoal.exchange.all_to_all import AllToAllExchange
from shoal.exchange.local import LocalExchange, PendingRecords, Route
from shoal.optim import SparseOptimizer
from shoal.placement import Placement, column_wise, row_wise
from shoal.ragged import KeyedRagged
from shoal.rules.initializers import Zeros
from shoal.rules.optimizers import SGD, Adagrad, Adam
from shoal.table.facade import Table
from shoal.table.factory import make_shard
from shoal.table.hosting import hosted_rows, hosted_spec, hosted_specs
from shoal.table.shard import GradRecord, Shard
from shoal.table.spec import Segment, TableSpec
from support.shards import shard_factory
from support.toy_collections import IDS, batch, columns, moved, one_table, table


@pytest.fixture
def owner() -> EmbeddingCollection:
    return one_table(shard_factory("cpu"))


class TestStages:
    @pytest.mark.parametrize("stages", [0, 1, 2, 3])
    def test_forward_goes_on_from_where_they_got(
        self, owner: EmbeddingCollection, stages: int
    ) -> None:
        twin, ids = copy.deepcopy(owner), batch([1, 2], [2])
        acts: list[Callable[[], None]] = [
            lambda: owner.begin(ids, event_time_s=7),
            lambda: owner.probe(ids),
            lambda: owner.fetch(ids),
        ]
        for act in acts[:stages]:
            act()
        out, want = owner(ids, event_time_s=7)["a"], twin(batch([1, 2], [2]))["a"]
        assert torch.equal(out, want)
        optimizer = SparseOptimizer(owner)
        out.sum().backward()
        optimizer.step()
        entry = owner.table("t").entry(2)
        assert entry is not None and (entry.count, entry.last_seen_s) == (2, 7)

    def test_a_batch_begins_once(self, owner: EmbeddingCollection) -> None:
        ids = batch([1])
        owner.begin(ids)
        with pytest.raises(InputError, match="begun"):
            owner.begin(ids)
        owner(ids)
        with pytest.raises(TicketError, match="begin"):
            owner.probe(ids)
        owner.begin(ids)
        owner.drop_begun()
        with pytest.raises(TicketError):
            owner.fetch(ids)

    def test_dropped_lookups_let_go_of_rows(self, owner: EmbeddingCollection) -> None:
        ids = batch([1])
        owner.begin(ids)
        owner.probe(ids)
        with pytest.raises(TicketError):
            owner.table("t").clear()
        owner.drop_begun()
        owner.table("t").clear()

    def test_nothing_begins_in_eval(self, owner: EmbeddingCollection) -> None:
        owner.eval()
        ids = batch([1])
        owner.begin(ids)
        owner.probe(ids)
        owner.fetch(ids)
        assert not owner(ids)["a"].any() and len(owner.table("t")) == 0

    def test_bad_input_begins_nothing(self, owner: EmbeddingCollection) -> None:
        with pytest.raises(InputError):
            owner.begin(KeyedRagged.from_lists({"b": [[1]]}))
        with pytest.raises(InputError):
            owner.begin(batch([1]), event_time_s=-1)
        assert len(owner.table("t")) == 0


def flat(name: str) -> TableSpec:
    segments = tuple(
        Segment(name=part, dim=dim, initializer=Zeros(), optimizer=SGD(lr=1.0))
        for part, dim in (("left", 6), ("right", 2))
    )
    return TableSpec(name=name, segments=segments)


WIDE, OTHER = flat("t"), flat("o")


def wide(shard: Shard) -> EmbeddingCollection:
    return EmbeddingCollection([WIDE], [Feature("a", "t")], shard=shard)


def spread(owner: EmbeddingCollection) -> AllToAllExchange:
    """An exchange over a world of one, with a shard of its own."""
    specs = tuple(owner.tables.values())
    placement = Placement(1, tuple(h for spec in specs for h in row_wise(spec.name, spec.dim, 1)))
    return AllToAllExchange(make_shard(specs, seed=9), placement, specs, LocalCollectives())


class TestDistribute:
    def test_another_exchange(self, owner: EmbeddingCollection) -> None:
        owner.distribute(spread(owner), collectives=LocalCollectives())
        assert owner.distributed
        optimizer = SparseOptimizer(owner)

        def act() -> None:
            (2 * owner(batch([1, 2], [2]))["a"]).sum().backward()
            optimizer.step()

        torch.testing.assert_close(moved(owner, act), columns(2, 4, 0))

    def test_a_recomputed_forward_reads_the_rows_that_were_fetched(
        self, owner: EmbeddingCollection
    ) -> None:
        owner.distribute(spread(owner))
        optimizer, ids = SparseOptimizer(owner), batch([1])
        owner(batch([1]))["a"].sum().backward()
        owner.begin(ids)
        owner.fetch(ids)
        optimizer.step()
        first, again = owner(ids)["a"], owner(ids)["a"]
        assert torch.equal(first, again)
        assert not torch.equal(first, owner(batch([1]))["a"])

    def test_rates_of_column_slices_in_a_world_of_one(self) -> None:
        tables = wide(make_shard([WIDE]))
        placement = Placement(1, column_wise("t", 8, (0, 0)))
        shard = make_shard(hosted_specs([WIDE], placement, 0))
        tables.distribute(AllToAllExchange(shard, placement, [WIDE], LocalCollectives()))
        optimizer = SparseOptimizer(tables, rates={"t": 0.5, ("t", "right"): 0.25})
        tables(batch([1]))["a"].sum().backward()
        optimizer.step()
        assert tables.table("t").lookup([1]).tolist() == [[-0.5] * 6 + [-0.25] * 2]

    def test_other_specs_over_the_same_shard(self) -> None:
        """Tables are counted as the new exchange counts them."""
        shard = make_shard([WIDE, OTHER])
        tables = wide(shard)
        specs = (OTHER, WIDE)
        placement = Placement(1, (*row_wise("t", 8, 1), *row_wise("o", 8, 1)))
        tables.distribute(AllToAllExchange(shard, placement, specs, LocalCollectives()))
        tables(batch([1]))["a"].sum().backward()
        assert (shard.size(0), shard.size(1)) == (1, 0)

    def test_collectives_over_the_same_shard(self) -> None:
        shard, votes = make_shard([WIDE]), LocalCollectives()
        tables = wide(shard)
        placement = Placement(1, row_wise("t", 8, 1))
        exchange = AllToAllExchange(shard, placement, [WIDE], LocalCollectives())
        tables.distribute(exchange, collectives=votes)
        assert tables.ledger.collectives is votes
        optimizer = SparseOptimizer(tables)
        tables.distribute(exchange)
        assert tables.ledger is optimizer.accumulators[0]
        assert tables.ledger.collectives is votes

    def test_ranks_need_collectives_for_what_a_step_decides(self) -> None:
        two = LocalCollectives()
        two.world_size = 2
        placement = Placement(2, row_wise("t", 8, 2))
        shard = make_shard(hosted_specs([WIDE], placement, 0))
        exchange = AllToAllExchange(shard, placement, [WIDE], two)
        tables = wide(make_shard([WIDE]))
        with pytest.raises(ConfigError, match="collectives"):
            tables.distribute(exchange)
        assert not tables.distributed
        tables.distribute(exchange, collectives=two)
        assert tables.ledger.world_size == 2

    def test_not_in_the_middle_of_a_step(self, owner: EmbeddingCollection) -> None:
        exchange, ids = spread(owner), batch([1])
        owner.begin(ids)
        with pytest.raises(TicketError, match="not done"):
            owner.distribute(exchange)
        out = owner(ids)["a"]
        with pytest.raises(TicketError, match="not done"):
            owner.distribute(exchange)
        out.sum().backward()
        del out
        with pytest.raises(TicketError, match="not done"):
            owner.distribute(exchange)
        owner.ledger.clear()
        owner.distribute(exchange)

    def test_not_under_an_optimizer(self, owner: EmbeddingCollection) -> None:
        optimizer = SparseOptimizer(owner)
        with pytest.raises(ConfigError, match="SparseOptimizer"):
            owner.distribute(spread(owner))
        del optimizer

    def test_the_same_shard_keeps_everything(self, owner: EmbeddingCollection) -> None:
        optimizer, ledger = SparseOptimizer(owner), owner.ledger
        owner.distribute(LocalExchange(owner.shard))
        assert owner.ledger is ledger and optimizer.accumulators == (ledger,)

    def test_no_copies(self, owner: EmbeddingCollection) -> None:
        owner.distribute(spread(owner), collectives=LocalCollectives())
        with pytest.raises(ConfigError, match="checkpoint"):
            copy.deepcopy(nn.Sequential(owner))


class Late:
    """Records that arrive when they are waited for."""

    def __init__(self, pending: PendingRecords, split: bool) -> None:
        self.pending, self.split, self.waits = pending, split, 0

    def wait(self) -> tuple[GradRecord, ...]:
        self.waits += 1
        (record,) = self.pending.wait()
        return (record, record) if self.split else (record,)


class LateExchange(LocalExchange):
    """A local exchange whose gradients are on their way until somebody asks."""

    split = False

    def __init__(self, owner: EmbeddingCollection) -> None:
        super().__init__(owner.shard)
        self.sent: list[Late] = []

    def back(self, route: Route, grads: tuple[Tensor, ...]) -> PendingRecords:
        self.sent.append(Late(super().back(route, grads), self.split))
        return self.sent[-1]


def late(owner: EmbeddingCollection) -> LateExchange:
    exchange = LateExchange(owner)
    owner.distribute(exchange)
    owner.ledger = GradientLedger(owner.shard, collectives=LocalCollectives())
    return exchange


class TestPending:
    @pytest.mark.parametrize("read", [False, True])
    def test_waited_for_once_and_not_before_it_is_needed(
        self, owner: EmbeddingCollection, read: bool
    ) -> None:
        exchange = late(owner)
        optimizer = SparseOptimizer(owner)

        def act() -> None:
            for factor in (1.0, 2.0):
                (factor * owner(batch([1], [2]))["a"]).sum().backward()
            assert len(owner.ledger) == 2
            assert [sent.waits for sent in exchange.sent] == [0, 0]
            if read:
                torch.testing.assert_close(optimizer.proxies[0].grad, columns(3, 3))
            optimizer.step()
            assert [sent.waits for sent in exchange.sent] == [1, 1]

        torch.testing.assert_close(moved(owner, act), columns(3, 3, 0))

    def test_dropped_gradients_are_not_waited_for(self, owner: EmbeddingCollection) -> None:
        exchange = late(owner)
        optimizer = SparseOptimizer(owner)
        owner(batch(IDS))["a"].sum().backward()
        optimizer.zero_grad()
        optimizer.step()
        assert exchange.sent[0].waits == 0

    def test_several_turns_are_not_summed(self, owner: EmbeddingCollection) -> None:
        exchange = late(owner)
        exchange.split = True
        optimizer = SparseOptimizer(owner)
        owner(batch([1]))["a"].sum().backward()
        with pytest.raises(ConfigError, match="per_sender_steps"):
            _ = optimizer.proxies[0].grad
        assert owner.ledger.finite() and len(owner.ledger._turns) == 2


class TestRowsOfParts:
    def test_parts_have_all_rows_of_the_whole(self) -> None:
        spec = table("t", 4, 4)
        owner = EmbeddingCollection([spec], [Feature("a", "t")])
        ids = list(range(50))
        owner(batch(ids))
        chunk = owner.table("t").export()
        parts = [
            hosted_rows(spec, hosted, rank, chunk)
            for hosted in row_wise("t", 8, 3)
            for rank in range(3)
        ]
        assert sorted(i for part in parts for i in part.ids.tolist()) == ids
        assert all(part.ids.numel() for part in parts)
        assert torch.equal(torch.cat([part.weights for part in parts]), chunk.weights)

    @pytest.mark.parametrize("rule", ["adam", "adagrad", "sgd"])
    def test_column_slices_take_their_state(self, rule: str) -> None:
        rules = {"adam": Adam(), "adagrad": Adagrad(), "sgd": SGD()}
        segments = tuple(Segment(name=n, dim=4, optimizer=rules[rule]) for n in ("a", "b"))
        spec = TableSpec(name="t", segments=segments, dtype="float64")
        whole = Table(spec)
        grads = torch.arange(16).reshape(2, 8).double() / 8
        whole.apply([1, 2], grads)
        for hosted in column_wise("t", 8, (0, 1, 2)):
            part = Table(hosted_spec(spec, hosted))
            rank = hosted.ranks[0]
            part.load(hosted_rows(spec, hosted, rank, whole.export()))
            part.apply([1, 2], grads[:, hosted.start : hosted.stop])
            fresh = Table(spec)
            fresh.load(whole.export())
            fresh.apply([1, 2], grads)
            want = fresh.lookup([1, 2])[:, hosted.start : hosted.stop]
            assert torch.equal(part.lookup([1, 2]), want)
