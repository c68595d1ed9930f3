"""Large and wide outputs are written past the caches; grouping borrows the versions of rows."""

from __future__ import annotations

import pytest
import torch

from shoal.embedding.collection import EmbeddingCollection
from shoal.embedding.layouts import Feature, Layout, LayoutSlice
from shoal.ragged import KeyedRagged
from shoal.rules.initializers import Uniform
from shoal.rules.optimizers import Adagrad
from shoal.table.cpu.shard import CpuShard
from shoal.table.facade import Table
from shoal.table.shard import GradRecord, IdGroups, StepContext
from shoal.table.spec import Segment, TableSpec


def spec(dim: int, name: str = "t") -> TableSpec:
    segment = Segment(dim=dim, optimizer=Adagrad(lr=0.1), initializer=Uniform(-1.0, 1.0))
    return TableSpec(name=name, segments=(segment,))


@pytest.mark.parametrize("dim", [33, 64, 128])
def test_a_large_find_equals_many_small_ones(dim: int) -> None:
    table = Table(spec(dim))
    ids_N = torch.arange(40_000) * 7919
    table.find_or_init(ids_N[::2].contiguous()).end()
    whole_ND, found_N = table.find(ids_N)
    parts = [table.find(part) for part in ids_N.split(1000)]
    assert dim < 64 or whole_ND.numel() * 4 > 8 << 20
    assert torch.equal(whole_ND, torch.cat([weights for weights, _ in parts]))
    assert torch.equal(found_N, torch.arange(40_000) % 2 == 0)
    assert not whole_ND[1::2].any()
    assert whole_ND[::2].abs().min() > 0


@pytest.mark.parametrize("threads", [1, 2])
def test_a_wide_output_holds_each_feature_in_its_columns(threads: int) -> None:
    names = [f"f{k}" for k in range(100)]
    features = tuple(Feature(name, "t") for name in names)
    wide = Layout("all", "concat", tuple(LayoutSlice(name) for name in names))
    shard = CpuShard((spec(16),), threads=threads)
    apart = EmbeddingCollection(shard.specs, features, shard=shard)
    joined = EmbeddingCollection(shard.specs, features, (wide,), shard=shard)
    ids_N = torch.randint(0, 500, (100 * 50,))
    batch = KeyedRagged(tuple(names), ids_N, torch.arange(100 * 50 + 1))
    expected = torch.cat(list(apart(batch).values()), dim=1)
    out_BD = joined(batch)["all"]
    assert out_BD.stride(0) * 4 >= 4096
    assert torch.equal(out_BD, expected)


def lookup(shard: CpuShard, ids_N: torch.Tensor, grads_ND: torch.Tensor) -> list[GradRecord]:
    groups = IdGroups(ids_N, torch.tensor([0, ids_N.numel()]), torch.zeros(1, dtype=torch.int32))
    ticket = shard.find_or_init(groups, ctx=StepContext())
    return [GradRecord(ticket=ticket, grads=(grads_ND,))]


def test_summing_leaves_versions_as_they_were() -> None:
    shard = CpuShard((spec(4),))
    table = Table(shard.specs[0], shard=shard)
    ids_N = torch.tensor([5, 6, 5, 7, 6, 5])
    records = lookup(shard, ids_N, torch.ones(6, 4))
    before = [table.entry(id_).version for id_ in (5, 6, 7)]
    for _ in range(3):
        shard.close_version()
    sums = shard.sum_grads(records)
    assert dict(zip(sums.ids[0].tolist(), sums.sums[0][:, 0].tolist(), strict=True)) == {
        5: 3.0,
        6: 2.0,
        7: 1.0,
    }
    assert [table.entry(id_).version for id_ in (5, 6, 7)] == before


def test_a_skipped_row_keeps_its_version_and_a_stepped_one_is_stamped() -> None:
    shard = CpuShard((spec(4),))
    table = Table(shard.specs[0], shard=shard)
    grads_ND = torch.ones(3, 4)
    grads_ND[1, 2] = float("nan")
    records = lookup(shard, torch.tensor([5, 6, 7]), grads_ND)
    before = table.entry(6).version
    shard.close_version()
    shard.apply(records, ctx=StepContext(nan_policy="skip"))
    assert table.entry(6).version == before
    assert table.entry(5).version == table.entry(7).version == before + 1
