"""A pool plan with groups it was not made for, and plans over tables of both precisions."""

from __future__ import annotations

import pytest
import torch

from shoal import Segment, TableSpec, initializers, optimizers
from shoal.embedding.collection import EmbeddingCollection
from shoal.embedding.layouts import Feature
from shoal.errors import DTypeError, NonFiniteGradient, ShapeError
from shoal.lookup import Output, Pool, PoolPlan, Slice
from shoal.optim import SparseOptimizer
from shoal.ragged import KeyedRagged
from shoal.table.cpu.shard import CpuShard
from shoal.table.shard import GradRecord, IdGroups, StepContext

OFFSETS_GB1 = torch.tensor([0, 1, 3])
IDS = torch.tensor([5, 6, 7])
CTX = StepContext()


def spec(name: str, dim: int, value: float, dtype: str = "float32") -> TableSpec:
    segment = Segment(
        dim=dim, initializer=initializers.Constant(value), optimizer=optimizers.SGD(lr=1.0)
    )
    return TableSpec(name=name, segments=(segment,), dtype=dtype)  # type: ignore[arg-type]


def groups(table: int) -> IdGroups:
    return IdGroups(IDS, torch.tensor([0, 3]), torch.tensor([table], dtype=torch.int32))


def summed(dim: int) -> PoolPlan:
    return PoolPlan((Pool("sum", (Slice(0, dim, 0, 0),)),), (Output(dim),))


class TestReuse:
    """Tables 0 and 1 are wide and narrow; 2 is wide again; 3 is wide in float64."""

    WIDE, NARROW, SAME, DOUBLE = range(4)

    @pytest.fixture
    def shard(self) -> CpuShard:
        return CpuShard(
            [
                spec("wide", 8, 1.0),
                spec("narrow", 2, 2.0),
                spec("same", 8, 3.0),
                spec("double", 8, 4.0, "float64"),
            ]
        )

    def test_narrower_tables_are_refused(self, shard: CpuShard) -> None:
        plan = summed(8)
        ticket = shard.find_or_init(groups(self.WIDE), ctx=CTX)
        shard.gather_pooled(ticket, plan, OFFSETS_GB1, None, ctx=CTX)
        other = shard.find_or_init(groups(self.NARROW), ctx=CTX)
        with pytest.raises(ShapeError):
            shard.find_pooled(groups(self.NARROW), plan, OFFSETS_GB1, None)
        with pytest.raises(ShapeError):
            shard.gather_pooled(other, plan, OFFSETS_GB1, None, ctx=CTX)
        record = GradRecord(other, (torch.ones(2, 8),), plan, OFFSETS_GB1)
        with pytest.raises(ShapeError):
            shard.apply([record], ctx=CTX)
        assert (shard.find(groups(self.NARROW)).weights[0] == 2.0).all()

    def test_another_number_of_groups_is_refused(self, shard: CpuShard) -> None:
        plan = summed(8)
        shard.find_or_init(groups(self.WIDE), ctx=CTX).end()
        shard.find_pooled(groups(self.WIDE), plan, OFFSETS_GB1, None)
        two = IdGroups(IDS, torch.tensor([0, 1, 3]), torch.tensor([0, 0], dtype=torch.int32))
        with pytest.raises(ShapeError):
            shard.find_pooled(two, plan, torch.tensor([0, 1, 3]), None)

    @pytest.mark.parametrize("tables", [(WIDE, DOUBLE), (DOUBLE, WIDE)])
    def test_another_precision_works_or_is_refused(
        self, shard: CpuShard, tables: tuple[int, int]
    ) -> None:
        plan = summed(8)
        for table in (self.WIDE, self.DOUBLE):
            shard.find_or_init(groups(table), ctx=CTX).end()
        shard.find_pooled(groups(tables[0]), plan, OFFSETS_GB1, None)
        try:
            pooled = shard.find_pooled(groups(tables[1]), plan, OFFSETS_GB1, None)[0]
        except (ShapeError, DTypeError):
            return
        value, dtype = {
            self.WIDE: (1.0, torch.float32),
            self.DOUBLE: (4.0, torch.float64),
        }[tables[1]]
        assert pooled.dtype == dtype
        assert pooled[:, 0].tolist() == [value, 2 * value]

    def test_tables_of_the_same_shape_share_a_plan(self, shard: CpuShard) -> None:
        plan = summed(8)
        for table, value in ((self.WIDE, 1.0), (self.SAME, 3.0), (self.WIDE, 0.0)):
            ticket = shard.find_or_init(groups(table), ctx=CTX)
            pooled = shard.gather_pooled(ticket, plan, OFFSETS_GB1, None, ctx=CTX)[0]
            expected = torch.tensor([[value], [2 * value]]).expand(2, 8)
            assert torch.equal(pooled, expected)
            record = GradRecord(ticket, (torch.ones(2, 8),), plan, OFFSETS_GB1)
            shard.apply([record], ctx=CTX)
            assert (shard.find(groups(table)).weights[0] == value - 1.0).all()


@pytest.mark.parametrize("tables", [("float32", "float64"), ("float64", "float32")])
@pytest.mark.parametrize("features", [("float32", "float64"), ("float64", "float32")])
@pytest.mark.parametrize("poisoned", ["float32", "float64"])
def test_a_nan_in_one_precision_stops_both(
    tables: tuple[str, str], features: tuple[str, str], poisoned: str
) -> None:
    """Tables, and features, in both orders; each table is named by its dtype."""
    owner = EmbeddingCollection(
        [spec(dtype, 2, 1.0, dtype) for dtype in tables],
        [Feature(f"of_{dtype}", dtype) for dtype in features],
    )
    optimizer = SparseOptimizer(owner)
    out = owner(KeyedRagged.from_lists({f"of_{dtype}": [[1], [2]] for dtype in features}))
    grads = {dtype: torch.ones(2, 2, dtype=getattr(torch, dtype)) for dtype in tables}
    grads[poisoned][0, 1] = float("nan")
    torch.autograd.backward(
        [out[f"of_{dtype}"] for dtype in features], [grads[dtype] for dtype in features]
    )
    with pytest.raises(NonFiniteGradient):
        optimizer.step()
    for dtype in tables:
        assert (owner.table(dtype).lookup([1, 2]) == 1.0).all()
    assert optimizer.global_step == 0
