"""Numbers of Monolith's hash-table tests, through `Table` and `EmbeddingCollection`.

Sections are those of spec/monolith-training.md. Duplicates are summed before the one step an id
takes; the other deliberate differences are listed in docs/coming-from-monolith.md.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from shoal.embedding.collection import EmbeddingCollection
from shoal.embedding.layouts import Feature
from shoal.optim import SparseOptimizer, clip_grad_norm_
from shoal.ragged import KeyedRagged
from shoal.rules.admission import Admission
from shoal.rules.expiry import Expiry
from shoal.rules.initializers import BatchSoftmaxInit
from shoal.rules.optimizers import BatchSoftmax
from shoal.rules.schedules import Polynomial
from shoal.table.facade import Table
from shoal.table.shard import IdGroups, Shard, StepContext
from shoal.table.spec import Segment, TableSpec
from support.monolith import near, rows, spec, table
from support.shards import SHARD_KINDS, ShardFactory, interpreted_too, shard_factory

DAY_S = 86_400


@pytest.fixture(params=SHARD_KINDS)
def make_shard(request: pytest.FixtureRequest) -> ShardFactory:
    return shard_factory(request.param)


class TestExpiry:
    """2.8; an absolute time takes the place of the table's largest update time."""

    NOW_S = 10_000_000

    def kept(
        self, make_shard: ShardFactory, ages_s: Mapping[int, int], expiry: Expiry
    ) -> list[int]:
        one = table(make_shard, expiry=expiry)
        for id_, age_s in ages_s.items():
            one.assign([id_], rows(1.0), event_time_s=self.NOW_S - age_s)
        one.evict(self.NOW_S)
        return [id_ for id_, found in zip(ages_s, one.find(list(ages_s))[1], strict=True) if found]

    def test_one_day(self, make_shard: ShardFactory) -> None:
        ages_s = {1: DAY_S + 1, 2: DAY_S, 3: DAY_S - 1}
        assert self.kept(make_shard, ages_s, Expiry(ttl_s=DAY_S)) == [3]

    def test_nothing_lives_zero_seconds(self, make_shard: ShardFactory) -> None:
        assert self.kept(make_shard, {1: 0, 2: 5}, Expiry(ttl_s=0)) == []

    @interpreted_too
    def test_per_slot(self, make_shard: ShardFactory) -> None:
        first, second = 1 << 48, 2 << 48
        expiry = Expiry(per_slot=((1, 0), (2, DAY_S)))
        assert self.kept(make_shard, {first: 10, second: 10}, expiry) == [second]


class TestAdmission:
    """2.9 with threshold 3, which Monolith passes on the fourth occurrence."""

    RULE = Admission(threshold=3, on="after")

    def test_gradients_one_at_a_time(self, make_shard: ShardFactory) -> None:
        one = table(make_shard, lr=0.1, admission=self.RULE)
        for expected in ((0, 0), (0.1, 0), (0.3, 0), (0.5, 0.1)):
            for id_ in (0, 0, 1):
                one.apply([id_], rows(-1.0))
            near(one.lookup([0, 1]), rows(*expected))

    def test_one_decision_for_all_occurrences_of_a_step(self, make_shard: ShardFactory) -> None:
        one = table(make_shard, lr=0.1, admission=self.RULE)
        for expected in ((0, 0), (0.2, 0), (0.4, 0), (0.6, 0.1)):
            one.apply([0, 0, 1], rows(-1.0, -1.0, -1.0))
            near(one.lookup([0, 1]), rows(*expected))

    @pytest.mark.slow
    @interpreted_too
    def test_intercepted_gradients(self, make_shard: ShardFactory) -> None:
        one = table(make_shard, admission=self.RULE)
        for expected in ((0, 0, 0), (0, 0, 1), (1, 0, 1), (1, 1, 1)):
            ids = (1, 3 << 17, 1)
            passed = [bool(one.find_or_init([id_]).admitted_N) for id_ in ids]
            assert passed == [bool(flag) for flag in expected]

    def test_counts_stand_for_occurrences(self, make_shard: ShardFactory) -> None:
        one = table(make_shard, admission=self.RULE)
        one.apply([5, 6], rows(1.0, 1.0), counts=[3, 4])
        near(one.lookup([5, 6]), rows(0, -1))


class TestDuplicates:
    """2.11"""

    def test_one_step_with_the_sum(self, make_shard: ShardFactory) -> None:
        one = table(make_shard)
        one.apply([0, 3, 0, 1], rows(2, 2, 2, 2))
        near(one.lookup([0, 3, 0, 1]), rows(-4, -2, -4, -2))

    @pytest.mark.parametrize(
        ("ids", "expected"),
        [([0, 0, 1], (0.2, 0.1)), ([0, 1, 0, 1, 0], (0.3, 0.2)), ([1, 0, 1], (0.1, 0.2))],
    )
    def test_plain_gradients(
        self, make_shard: ShardFactory, ids: list[int], expected: tuple[float, float]
    ) -> None:
        one = table(make_shard, lr=0.1)
        one.lookup([0, 1])
        one.apply(ids, rows(*[-1.0] * len(ids)))
        near(one.lookup([0, 1]), rows(*expected))

    def test_a_rate_that_depends_on_the_step(self, make_shard: ShardFactory) -> None:
        one = table(make_shard, lr=Polynomial(0.01, 10, end=0.11))
        one.apply([0, 1, 0], rows(-1, -1, -1), global_step=1)
        near(one.lookup([0, 1]), rows(0.04, 0.02))

    def test_batch_softmax_learns_how_often_an_id_comes(self, make_shard: ShardFactory) -> None:
        segment = Segment(dim=1, optimizer=BatchSoftmax(lr=0.1), initializer=BatchSoftmaxInit())
        one = TableSpec(name="t", segments=(segment,))
        counter = Table(one, shard=make_shard([one]))
        for step in range(1, 1001):
            ids = [id_ for id_, every in ((0, 5), (1, 10)) if step % every == 0]
            counter.apply(ids, rows(*[0.0] * len(ids)), global_step=step)
        near(1 / counter.lookup([0, 1]).clamp(min=1), rows(0.2, 0.1), atol=0.01)


class Groups:
    """Ids of several tables in one call, shard-major, as Monolith's fused operations take them."""

    def __init__(self, shard: Shard, ids: list[int], sizes: list[int], num_shards: int) -> None:
        tables = list(range(len(shard.specs))) * num_shards
        splits = torch.tensor([0, *sizes]).cumsum(0)
        self.shard, self.num_shards = shard, num_shards
        self.groups = IdGroups(torch.tensor(ids), splits, torch.tensor(tables, dtype=torch.int32))
        dims = torch.tensor([shard.specs[k].dim for k in tables])
        floats = torch.tensor(sizes) * dims
        self.emb_offsets = torch.tensor([0, *floats.tolist()]).cumsum(0).tolist()
        self.id_offsets = splits.tolist()
        self.emb_splits = floats.view(num_shards, -1).sum(1).tolist()
        self.shapes = [(int(n), int(d)) for n, d in zip(sizes, dims, strict=True)]

    def lookup(self) -> list[float]:
        found = self.shard.find(self.groups).weights
        return [value for part in found for value in part.flatten().tolist()]

    def split(self, flat: list[float]) -> list[Tensor]:
        pieces = torch.tensor(flat, dtype=torch.float32).split([n * d for n, d in self.shapes])
        return [piece.view(shape) for piece, shape in zip(pieces, self.shapes, strict=True)]

    def assign(self, flat: list[float]) -> None:
        self.shard.assign(self.groups, self.split(flat), ctx=StepContext())

    def apply(self, flat: list[float], **ctx: object) -> None:
        self.shard.apply_ids(self.groups, self.split(flat), ctx=StepContext(**ctx))  # type: ignore[arg-type]


def hosted(make_shard: ShardFactory, *dims: int, lr: float = 1.0) -> Shard:
    return make_shard([spec(f"slot{k}", dim, lr) for k, dim in enumerate(dims)])


class TestFused:
    """2.12 and the native multi-table tests of 3.1."""

    def test_lookup(self, make_shard: ShardFactory) -> None:
        calls = Groups(hosted(make_shard, 1, 1, 2), [0, 4, 6, 1, 3, 7], [1] * 6, 2)
        wanted = [1, 0, 1, 1, 1, 0, 1, 1]
        calls.assign([float(value) for value in wanted])
        assert calls.lookup() == wanted and calls.emb_splits == [4, 4]
        assert calls.id_offsets == [0, 1, 2, 3, 4, 5, 6]
        assert calls.emb_offsets == [0, 1, 2, 4, 5, 6, 8]

    def test_optimize(self, make_shard: ShardFactory) -> None:
        calls = Groups(hosted(make_shard, 1, 2, lr=0.1), [0, 4, 1, 3], [1] * 4, 2)
        calls.assign([1.0, 0.0, 0.0, 1.0, 0.0, 0.0])
        calls.apply([-1.0, -2.0, -2.0, -1.0, -2.0, -2.0])
        assert calls.lookup() == pytest.approx([1.1, 0.2, 0.2, 1.1, 0.2, 0.2])
        assert calls.emb_splits == [3, 3] and calls.id_offsets == [0, 1, 2, 3, 4]
        assert calls.emb_offsets == [0, 1, 3, 4, 6]

    @pytest.mark.parametrize(
        ("ids", "sizes", "num_shards", "wanted", "splits", "id_offsets", "emb_offsets"),
        [
            ([0, 1, 2, 3], [1, 1, 2], 1, [1, 2, 2, 4, 4, 8, 8], [7], [0, 1, 2, 4], [0, 1, 3, 7]),
            (
                [0, 2, 1, 3],
                [1, 0, 1, 0, 1, 1],
                2,
                [1, 4, 4, 2, 2, 8, 8],
                [3, 4],
                [0, 1, 1, 2, 2, 3, 4],
                [0, 1, 1, 3, 3, 5, 7],
            ),
        ],
    )
    def test_native_lookup(
        self,
        make_shard: ShardFactory,
        ids: list[int],
        sizes: list[int],
        num_shards: int,
        wanted: list[float],
        splits: list[int],
        id_offsets: list[int],
        emb_offsets: list[int],
    ) -> None:
        shard = hosted(make_shard, 1, 2, 2)
        Groups(shard, [0, 1, 2, 3], [1, 1, 2], 1).assign([1.0, 2.0, 2.0, 4.0, 4.0, 8.0, 8.0])
        calls = Groups(shard, ids, sizes, num_shards)
        assert calls.lookup() == wanted and calls.emb_splits == splits
        assert (calls.id_offsets, calls.emb_offsets) == (id_offsets, emb_offsets)

    @pytest.mark.parametrize(
        ("dims", "ids", "sizes", "num_shards", "grads", "wanted"),
        [
            ((1, 2), [0, 1, 2], [1, 2], 1, [2.0, 1.0, 3.0, 2.0, 4.0], [-2, -1, -3, -2, -4]),
            ((1, 1), [1, 1], [1, 0, 1, 0], 2, [1.0, 2.0], [-3, -3]),
            ((2,), [2, 2], [2], 1, [1.1, 3.1, 2.2, 4.2], [-3.3, -7.3] * 2),
        ],
    )
    def test_native_apply(
        self,
        make_shard: ShardFactory,
        dims: tuple[int, ...],
        ids: list[int],
        sizes: list[int],
        num_shards: int,
        grads: list[float],
        wanted: list[float],
    ) -> None:
        calls = Groups(hosted(make_shard, *dims), ids, sizes, num_shards)
        calls.apply(grads)
        assert calls.lookup() == pytest.approx(wanted)

    @interpreted_too
    def test_native_rates(self, make_shard: ShardFactory) -> None:
        calls = Groups(hosted(make_shard, 1, 2), [0, 1, 2], [1, 2], 1)
        calls.apply([2.0, 1.0, 3.0, 2.0, 4.0], learning_rates={"slot0": (0.1,), "slot1": (0.1,)})
        assert calls.lookup() == pytest.approx([-0.2, -0.1, -0.3, -0.2, -0.4])

    def test_native_reinitialize(self, make_shard: ShardFactory) -> None:
        one = table(make_shard, dim=2)
        one.assign([2, 3], rows(1, 1, dim=2))
        assert one.reinitialize([1, 2, 3]).tolist() == [0, 1, 1]


class TestMergedSlots:
    """3.1: slots of one configuration share a table, here because their features name it."""

    def test_equal_ids_of_two_slots_are_one_row(self, make_shard: ShardFactory) -> None:
        specs = [spec("slot0", 1), spec("slot1+slot2", 2)]
        features = [Feature("0", "slot0"), Feature("1", "slot1+slot2"), Feature("2", "slot1+slot2")]
        owner = EmbeddingCollection(specs, features, shard=make_shard(specs))
        owner.table("slot0").assign_add([1], rows(1))
        for value in (2.0, 4.0):
            owner.table("slot1+slot2").assign_add([1], rows(value, dim=2))
        batch = KeyedRagged.from_lists({"0": [[1]], "1": [[1]], "2": [[1]]})
        out = owner(batch)
        near(torch.cat([out["1"], out["2"]]), [[6, 6], [6, 6]])
        (out["1"].sum() + out["2"].sum() - out["0"].sum()).backward()
        SparseOptimizer(owner).step()
        near(owner.table("slot1+slot2").lookup([1]), [[4, 4]])
        near(owner.table("slot0").lookup([1]), [[2]])


def test_clipping_by_the_global_norm(make_shard: ShardFactory) -> None:
    """2.7: gradients (-3, 0, 0) and (4, 0, 0) with norm 5, clipped to 4."""
    specs = [spec("a", 3), spec("b", 3)]
    features = [Feature("a", "a"), Feature("b", "b")]
    owner = EmbeddingCollection(specs, features, shard=make_shard(specs))
    optimizer = SparseOptimizer(owner)
    out = owner(KeyedRagged.from_lists({"a": [[1]], "b": [[1]]}))
    (-3 * out["a"][0, 0] + 4 * out["b"][0, 0]).backward()
    near(clip_grad_norm_([], optimizer, 4.0), torch.tensor(5.0))
    optimizer.step()
    near(owner.table("a").lookup([1]), [[2.4, 0, 0]])
    near(owner.table("b").lookup([1]), [[-3.2, 0, 0]])
