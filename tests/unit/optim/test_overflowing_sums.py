"""What is applied is what is checked: sums that overflow where no gradient does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn

from shoal.embedding.collection import EmbeddingCollection
from shoal.embedding.combiners import ReduceMean
from shoal.embedding.layouts import Feature, Layout, LayoutSlice
from shoal.errors import NonFiniteGradient
from shoal.optim import JointOptimizer, SparseOptimizer, clip_grad_norm_
from shoal.ragged import KeyedRagged
from shoal.rules.admission import Admission
from shoal.rules.optimizers import SGD, Adagrad, DelayCompensated
from shoal.table.cpu.shard import CpuShard
from shoal.table.facade import Table
from shoal.table.spec import Segment, TableSpec
from support.shards import ShardFactory, shard_factory

BIG = {"float32": 3e38, "float64": 1.5e308}
"""Numbers that overflow when they are added to themselves."""


@dataclass(frozen=True)
class Kind:
    """A shard and the dtype of its tables."""

    make_shard: ShardFactory
    dtype: str

    @property
    def big(self) -> float:
        return BIG[self.dtype]

    @property
    def spec(self) -> TableSpec:
        segments = (Segment(dim=2, optimizer=SGD(lr=1.0)),)
        return TableSpec(name="t", segments=segments, dtype=self.dtype)  # type: ignore[arg-type]

    def of(
        self, *features: Feature, layouts: list[Layout] | None = None, init_on_lookup: bool = True
    ) -> EmbeddingCollection:
        """A collection over table t, and another one for feature c."""
        tables = [self.spec, replace(self.spec, name="other")]
        return EmbeddingCollection(
            tables,
            features,
            layouts,
            shard=self.make_shard(tables),
            init_on_lookup=init_on_lookup,
        )


@pytest.fixture(params=["cpu float32", "cpu float64", "reference float64"])
def kind(request: pytest.FixtureRequest) -> Kind:
    shard, dtype = request.param.split()
    return Kind(shard_factory(shard), dtype)


THREE = (Feature("a", "t"), Feature("b", "t"), Feature("c", "other"))


def look(
    owner: EmbeddingCollection, a: list[list[int]], b: list[list[int]] | None = None
) -> Tensor:
    """The sum over all that a batch reads; its example 0 reads id 5 of the other table."""
    none: list[list[int]] = [[] for _ in a]
    batch = {"a": a, "b": none if b is None else b, "c": [[5], *none[1:]]}
    found = owner(KeyedRagged.from_lists(batch))
    small = 1 / max(BIG.values())
    return found["a"].sum() + found["b"].sum() + found["c"].sum() * small


def twice(owner: EmbeddingCollection, big: float) -> None:
    (big * look(owner, [[1], [1]])).backward()


def in_one_bag(owner: EmbeddingCollection, big: float) -> None:
    (big * look(owner, [[1, 1]])).backward()


def two_features(owner: EmbeddingCollection, big: float) -> None:
    (big * look(owner, [[1]], [[1]])).backward()


def accumulated(owner: EmbeddingCollection, big: float) -> None:
    for _ in range(2):
        (big * look(owner, [[1]])).backward()


def two_losses(owner: EmbeddingCollection, big: float) -> None:
    found = look(owner, [[1]])
    (big * found).backward(retain_graph=True)
    (big * found).backward()


def read_sums(owner: EmbeddingCollection, big: float) -> None:
    accumulated(owner, big)
    assert owner.ledger.sums_of(0) is not None


Act = Callable[[EmbeddingCollection, float], None]
OVERFLOWS: list[Act] = [
    twice,
    in_one_bag,
    two_features,
    accumulated,
    two_losses,
    read_sums,
]


def state(owner: EmbeddingCollection) -> list[Tensor]:
    return [owner.table(name).lookup([1, 2, 5]) for name in owner.tables]


@pytest.mark.parametrize("init_on_lookup", [True, False])
@pytest.mark.parametrize("act", OVERFLOWS)
def test_no_table_changes(kind: Kind, act: Act, init_on_lookup: bool) -> None:
    owner = kind.of(*THREE, init_on_lookup=init_on_lookup)
    head = nn.Linear(2, 1)
    sparse = SparseOptimizer(owner)
    joint = JointOptimizer([torch.optim.SGD(head.parameters(), lr=1.0), sparse])
    owner.table("t").find_or_init([1, 2]).end()
    owner.table("other").find_or_init([5]).end()
    before, weight = state(owner), head.weight.detach().clone()
    for optimizer in (sparse, joint):
        head(torch.ones(1, 2)).sum().backward()
        act(owner, kind.big)
        with pytest.raises(NonFiniteGradient):
            optimizer.step()
        assert all(map(torch.equal, state(owner), before))
        assert torch.equal(head.weight, weight) and sparse.global_step == 0
        joint.zero_grad()
    look(owner, [[1], [1, 2]]).backward()
    sparse.step()
    assert torch.equal(
        owner.table("t").lookup([1, 2]), before[0][:2] - torch.tensor([[2.0], [1.0]])
    )


@pytest.mark.parametrize(("policy", "want"), [("skip", 0.0), ("clip", -7.0)])
@pytest.mark.parametrize("act", OVERFLOWS)
def test_other_policies(kind: Kind, act: Act, policy: str, want: float) -> None:
    owner = kind.of(*THREE)
    sparse = SparseOptimizer(owner, nan_policy=policy, nan_clip=7.0)  # type: ignore[arg-type]
    owner.table("t").find_or_init([1]).end()
    before = owner.table("t").lookup([1])
    act(owner, kind.big)
    sparse.step()
    assert torch.equal(owner.table("t").lookup([1]), before + want)
    assert owner.table("t").stats().nonfinite_skipped == (policy == "skip")


def test_weights_of_ids_count(kind: Kind) -> None:
    owner = kind.of(Feature("a", "t"))
    sparse = SparseOptimizer(owner)
    heavy = torch.tensor([8.0])
    batch = KeyedRagged(("a",), torch.tensor([1]), torch.tensor([0, 1]), weights_N=heavy)
    (kind.big / 3 * owner(batch)["a"]).sum().backward()
    with pytest.raises(NonFiniteGradient):
        sparse.step()


def test_two_slices_of_one_column(kind: Kind) -> None:
    layouts = [Layout("x", "none", (LayoutSlice("a"),)), Layout("y", "concat", (LayoutSlice("a"),))]
    owner = kind.of(Feature("a", "t"), layouts=layouts)
    sparse = SparseOptimizer(owner)
    found = owner(KeyedRagged.from_lists({"a": [[1]]}))
    (kind.big * sum(part.sum() for part in found.values())).backward()
    with pytest.raises(NonFiniteGradient):
        sparse.step()


def test_large_sums_that_fit_are_applied(kind: Kind) -> None:
    owner = kind.of(Feature("a", "t", ReduceMean()))
    sparse = SparseOptimizer(owner)
    for sign in (1.0, -1.0, 1.0):
        (
            sign * kind.big * owner(KeyedRagged.from_lists({"a": [[1, 2], [3]]}))["a"]
        ).sum().backward()
    sparse.step()
    found = owner.table("t").lookup([1, 2, 3])
    want = torch.tensor([[kind.big / 2], [kind.big / 2], [kind.big]], dtype=found.dtype)
    assert torch.equal(found, -want.expand(-1, 2))


def test_a_norm_that_is_clipped_keeps_an_infinite_sum_out(kind: Kind) -> None:
    owner = kind.of(*THREE)
    sparse = SparseOptimizer(owner)
    twice(owner, kind.big)
    before = state(owner)
    assert clip_grad_norm_([], sparse, 1.0).isinf()
    with pytest.raises(NonFiniteGradient):
        sparse.step()
    assert all(map(torch.equal, state(owner), before))


def test_table_apply_of_new_ids_inserts_none(kind: Kind) -> None:
    one = replace(kind.spec, admission=Admission(threshold=2))
    table = Table(one, shard=kind.make_shard([one]))
    grads = torch.full((3, 2), kind.big, dtype=getattr(torch, kind.dtype))
    with pytest.raises(NonFiniteGradient):
        table.apply([9, 9, 9], grads)
    table.apply([9], grads[:1])
    assert len(table) == 0  # what was refused was no occurrence


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rows_of_16_bits(dtype: str) -> None:
    """Their gradients are float32, and so are the sums."""
    one = replace(Kind(shard_factory("cpu"), "float32").spec, dtype=dtype)  # type: ignore[arg-type]
    table = Table(one)
    table.find_or_init([1]).end()
    before = table.lookup([1])
    with pytest.raises(NonFiniteGradient):
        table.apply([1, 1], torch.full((2, 2), BIG["float32"]))
    assert torch.equal(table.lookup([1]), before)
    table.apply([1, 1], torch.tensor([[BIG["float32"]] * 2, [1 - BIG["float32"]] * 2]))


@pytest.mark.parametrize("rule", [Adagrad(), DelayCompensated(inner=SGD(lr=1.0))])
def test_many_rows_on_several_threads(rule: object) -> None:
    """A single row of thousands in parts of their own has a sum that overflows."""
    one = TableSpec(name="t", segments=(Segment(dim=3, optimizer=rule),))  # type: ignore[arg-type]
    table = Table(one, shard=CpuShard([one], threads=2))
    ids = torch.arange(60_000) % 20_000
    table.find_or_init(ids).end()
    before = table.lookup(ids[:20_000])
    grads = torch.zeros(60_000, 3)
    grads[[123, 20_123], 1] = BIG["float32"]
    with pytest.raises(NonFiniteGradient):
        table.apply(ids, grads)
    assert torch.equal(table.lookup(ids[:20_000]), before)
    grads[20_123, 1] = -BIG["float32"]
    table.apply(ids, grads)
