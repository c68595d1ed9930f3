"""Numbers of Monolith's distributed-table tests (spec/monolith-training.md 3.2), one process."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from shoal.embedding.collection import EmbeddingCollection
from shoal.embedding.layouts import Feature, Layout, LayoutSlice
from shoal.errors import UnknownName
from shoal.optim import SparseOptimizer
from shoal.placement import floormod
from shoal.ragged import KeyedRagged
from shoal.rules.initializers import Zeros
from shoal.rules.optimizers import FTRL, Adagrad, Optimizer
from shoal.rules.schedules import Schedule
from shoal.table.facade import Table
from shoal.table.spec import Segment, TableSpec
from support.monolith import GROWING, near, rows, slots, spec, table
from support.shards import SHARD_KINDS, ShardFactory, interpreted_too, shard_factory


@pytest.fixture(params=SHARD_KINDS)
def make_shard(request: pytest.FixtureRequest) -> ShardFactory:
    return shard_factory(request.param)


class TestDistributedHashTable:
    """3.2, one process: SGD with rate 1, rows start at zero."""

    def test_basic(self, make_shard: ShardFactory) -> None:
        one = table(make_shard, dim=2)
        one.assign_add([1, 2, 3], rows(1, 2, 3, dim=2))
        near(one.lookup([1, 2, 3]), rows(1, 2, 3, dim=2))

    def test_assign(self, make_shard: ShardFactory) -> None:
        one = table(make_shard, dim=2)
        one.assign([1, 2, 3], rows(1, 2, 3, dim=2))
        near(one.lookup([1, 2, 3]), rows(1, 2, 3, dim=2))
        one.assign([2, 3, 4], rows(1, 2, 3, dim=2))
        near(one.lookup([1, 2, 3, 4]), rows(1, 1, 2, 3, dim=2))

    def test_lookup_of_duplicates(self, make_shard: ShardFactory) -> None:
        one = table(make_shard, dim=2)
        one.assign([1, 3], rows(1, 3, dim=2))
        near(one.lookup([1, 1, 3]), rows(1, 1, 3, dim=2))

    @pytest.mark.parametrize(
        ("ids", "back_ids", "grad", "expected"),
        [
            ([0, 1], [0, 1], 2.0, (-2, -2)),
            ([0, 3, 0, 1], [0, 3, 0, 1], 2.0, (-4, -2, -4, -2)),
            ([1, 0], [1, 1], -2.0, (4, 0)),
        ],
    )
    def test_gradients(
        self,
        make_shard: ShardFactory,
        ids: list[int],
        back_ids: list[int],
        grad: float,
        expected: tuple[float, ...],
    ) -> None:
        one = table(make_shard)
        one.apply(back_ids, rows(*[grad] * len(back_ids)))
        near(one.lookup(ids), rows(*expected))

    def test_rate_of_the_step(self, make_shard: ShardFactory) -> None:
        one = table(make_shard, lr=GROWING)
        for step, expected in enumerate((-2.0, -4.2)):
            one.apply([0, 1], rows(2, 2), global_step=step)
            near(one.lookup([0, 1]), rows(expected, expected))

    def test_benchmark_values(self, make_shard: ShardFactory) -> None:
        one = table(make_shard, dim=16)
        ids = torch.arange(200) // 2
        one.assign(torch.arange(100), rows(*[1.0] * 100, dim=16))
        one.apply(ids, torch.full((200, 16), 0.3))
        near(one.lookup(ids), torch.full((200, 16), 0.4))


class TestDistributedMultiTypeHashTable:
    """3.2: slot "1" has width 1, slot "2" width 2."""

    def start(self, make_shard: ShardFactory, lr: float | Schedule = 1.0) -> dict[str, Table]:
        tables = slots(make_shard, spec("1", 1, lr), spec("2", 2))
        tables["1"].assign_add([1, 2], rows(-1, -2))
        tables["2"].assign_add([3], rows(-3, dim=2))
        return tables

    def halve(self, tables: dict[str, Table], step: int = 0) -> None:
        tables["1"].apply([1, 2], rows(-0.5, -1), global_step=step, event_time_s=0)
        tables["2"].apply([3], rows(-1.5, dim=2), global_step=step, event_time_s=0)

    def test_basic(self, make_shard: ShardFactory) -> None:
        tables = self.start(make_shard)
        near(tables["1"].lookup([1, 2]), [[-1], [-2]])
        near(tables["2"].lookup([3]), [[-3, -3]])
        self.halve(tables)
        near(tables["1"].lookup([1, 2]), [[-0.5], [-1]])
        near(tables["2"].lookup([3]), [[-1.5, -1.5]])

    @interpreted_too
    def test_assign_and_reinitialize(self, make_shard: ShardFactory) -> None:
        specs = [spec("1", 1), spec("2", 2)]
        features = [Feature("a", "1"), Feature("b", "2")]
        owner = EmbeddingCollection(specs, features, shard=make_shard(specs))
        one, two = owner.table("1"), owner.table("2")
        for factor in (1.0, 0.5):
            one.assign([1, 2], rows(-1 * factor, -2 * factor))
            two.assign([3], rows(-3 * factor, dim=2))
            near(one.lookup([1, 2]), rows(-1 * factor, -2 * factor))
        assert one.reinitialize([1, 2, 3]).tolist() == [1, 1, 0]
        near(one.lookup([1, 2, 3]), rows(0, 0, 0))
        near(two.lookup([3]), [[-1.5, -1.5]])
        with pytest.raises(UnknownName, match="'3'"):
            owner.table("3")

    def test_rate_of_the_step(self, make_shard: ShardFactory) -> None:
        tables = self.start(make_shard, GROWING)
        self.halve(tables, step=0)
        near(tables["1"].lookup([1, 2]), [[-0.5], [-1]])
        near(tables["2"].lookup([3]), [[-1.5, -1.5]])
        self.halve(tables, step=1)
        near(tables["1"].lookup([1, 2]), [[0.05], [0.1]])
        near(tables["2"].lookup([3]), [[0, 0]])

    @interpreted_too
    def test_half_precision(self, make_shard: ShardFactory) -> None:
        tables = slots(make_shard, spec("1", 1, dtype="float16"), spec("2", 2, dtype="float16"))
        tables["1"].apply([1, 2], rows(2, 2))
        tables["2"].apply([3], rows(3, dim=2))
        near(tables["1"].lookup([1, 2]), [[-2], [-2]])
        near(tables["2"].lookup([3]), [[-3, -3]])


class TestPartitionedHashTable:
    """3.2: three features, segment 0 by FTRL, others by Adagrad; concat layouts over slices."""

    WIDTHS: Mapping[str, tuple[int, ...]] = {"uid": (1, 4), "gid": (1, 4, 8), "cid": (1, 4, 8)}
    BATCH = KeyedRagged.from_lists(
        {name: [[3 * i + at] for i in range(6)] for at, name in enumerate(("uid", "gid", "cid"))}
    )

    def owner(self, make_shard: ShardFactory) -> EmbeddingCollection:
        rules: list[Optimizer] = [FTRL(lr=1.0, beta=0.0, initial_accumulator=0.1)]
        rules += [Adagrad(lr=1.0, initial_accumulator=0.1)] * 2
        names = ("bias", "vec", "deep")
        specs = [
            TableSpec(
                name=table_name,
                segments=tuple(
                    Segment(name=name, dim=dim, optimizer=rule, initializer=Zeros())
                    for name, dim, rule in zip(names, widths, rules, strict=False)
                ),
            )
            for table_name, widths in self.WIDTHS.items()
        ]
        layouts = [
            Layout(name, "concat", tuple(LayoutSlice(f, name) for f in features))
            for name, features in (
                ("bias", ("uid", "gid", "cid")),
                ("vec", ("uid", "gid", "cid")),
                ("deep", ("gid", "cid")),
            )
        ]
        features = [Feature(name, name) for name in self.WIDTHS]
        return EmbeddingCollection(specs, features, layouts, shard=make_shard(specs))

    def ids(self, name: str) -> list[int]:
        """Ids p + 2j of both servers p: j below the row's width."""
        return sorted(p + 2 * j for p in range(2) for j in range(sum(self.WIDTHS[name])))

    def fill(self, owner: EmbeddingCollection, value: float) -> None:
        for name, widths in self.WIDTHS.items():
            ids = self.ids(name)
            owner.table(name).assign(ids, rows(*[value] * len(ids), dim=sum(widths)))

    def test_basic(self, make_shard: ShardFactory) -> None:
        owner = self.owner(make_shard)
        generator = torch.Generator().manual_seed(0)
        for name, widths in self.WIDTHS.items():
            ids = self.ids(name)
            one, two = torch.rand(2, len(ids), sum(widths), generator=generator)
            owner.table(name).assign(ids, one)
            owner.table(name).assign_add(ids, two)
            near(owner.table(name).lookup(ids), one + two)

    def test_lookup(self, make_shard: ShardFactory) -> None:
        owner = self.owner(make_shard).eval()
        self.fill(owner, 2.0)
        out = owner(self.BATCH)
        near(out["bias"], [[2, 2, 2]] * 4 + [[0, 2, 2]] * 2)
        near(out["vec"], [[2] * 12] * 4 + [[0] * 4 + [2] * 8] * 2)
        near(out["deep"], [[2] * 16] * 6)

    @pytest.mark.parametrize("init_on_lookup", [True, False])
    def test_gradients(self, make_shard: ShardFactory, init_on_lookup: bool) -> None:
        owner = self.owner(make_shard)
        owner = EmbeddingCollection(
            list(owner.tables.values()),
            owner.features,
            owner.layouts,
            shard=owner.shard,
            init_on_lookup=init_on_lookup,
        )
        self.fill(owner, 3.0)
        optimizer = SparseOptimizer(owner)
        sum(2.0 * value.sum() for value in owner(self.BATCH).values()).backward()
        optimizer.step()
        for name, widths in self.WIDTHS.items():
            ids = [id_ for id_ in self.BATCH[name].values.tolist() if id_ in self.ids(name)]
            row = [1.5437492] + [2.0122704] * (sum(widths) - 1)
            near(owner.table(name).lookup(ids), [row] * len(ids))

    def test_where_ids_would_be_served(self) -> None:
        served = {
            f"{name}:{p}": [
                i for i in self.BATCH[name].values.tolist() if floormod(torch.tensor(i), 2) == p
            ]
            for name in self.WIDTHS
            for p in range(2)
        }
        assert served == {
            "uid:0": [0, 6, 12],
            "uid:1": [3, 9, 15],
            "cid:0": [2, 8, 14],
            "cid:1": [5, 11, 17],
            "gid:0": [4, 10, 16],
            "gid:1": [1, 7, 13],
        }
