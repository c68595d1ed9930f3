"""A CPU shard where it takes other ways for speed: many rows inserted at once, ids that repeat."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from shoal.rules.initializers import Constant, Uniform
from shoal.rules.optimizers import SGD, Adagrad, Adam, Optimizer
from shoal.table.cpu.shard import CpuShard
from shoal.table.shard import IdGroups, StepContext
from shoal.table.spec import Segment, TableSpec

LARGE_BYTES = 8 << 20  # of rows, from which an insert writes past the caches
ITEMS, HOT = 20_000, 300


def one_group(ids: Tensor) -> IdGroups:
    return IdGroups(ids, torch.tensor([0, ids.numel()]), torch.zeros(1, dtype=torch.int32))


def inserted(spec: TableSpec, ids: Tensor, at_once: int, threads: int) -> list[Tensor]:
    shard = CpuShard([spec], seed=3, threads=threads)
    for part in ids.split(at_once):
        shard.find_or_init(one_group(part), ctx=StepContext(event_time_s=5)).end()
    chunk = shard.export(0)
    order = chunk.ids.argsort()
    return [part[order] for part in (chunk.ids, chunk.weights, chunk.state, chunk.last_seen_s)]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dim", [33, 64, 80, 256])
@pytest.mark.parametrize("rule", [SGD(), Adagrad(), Adam()], ids=lambda rule: rule.kind)
def test_one_large_insert_makes_the_rows_of_many_small_ones(
    rule: Optimizer, dim: int, threads: int
) -> None:
    spec = TableSpec(
        name="t", segments=(Segment(dim=dim, optimizer=rule, initializer=Uniform(-1, 1)),)
    )
    rows = LARGE_BYTES // (4 * (spec.dim + rule.state_width(dim))) + 77
    ids = torch.arange(rows) * 0x9E3779B97F4A7C1
    large, small = (inserted(spec, ids, at_once, threads) for at_once in (rows, 9_999))
    assert len(large[0]) == rows
    assert all(torch.equal(*parts) for parts in zip(large, small, strict=True))


@pytest.mark.parametrize("dim", [1, 17, 64])
def test_state_is_counted_without_what_fills_lines_up(dim: int) -> None:
    segment = Segment(dim=dim, optimizer=Adagrad())
    shard = CpuShard([TableSpec(name="t", segments=(segment,))])
    shard.find_or_init(one_group(torch.arange(100)), ctx=StepContext()).end()
    stats = shard.stats()[0]
    assert stats.bytes_state == 100 * 4 * dim <= stats.bytes_weights


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("dim", [1, 3, 16, 17, 33, 80])
def test_gradients_of_an_id_are_summed_in_the_order_of_positions(
    dim: int, dtype: str, threads: int
) -> None:
    segment = Segment(dim=dim, optimizer=SGD(lr=1.0), initializer=Constant(0.0))
    shard = CpuShard([TableSpec(name="t", segments=(segment,), dtype=dtype)], threads=threads)  # type: ignore[arg-type]
    want = torch.zeros(HOT, dim, dtype=getattr(torch, dtype))
    generator = torch.Generator().manual_seed(dim)
    for step in range(2):
        # A few ids have most positions, most ids a few.
        at = (torch.rand(ITEMS, generator=generator) ** 4 * HOT).long()
        grads = torch.randn(ITEMS, dim, generator=generator, dtype=want.dtype)
        sums = np.zeros(want.shape, dtype=dtype)
        np.add.at(sums, at.numpy(), grads.numpy())
        want -= torch.from_numpy(sums)
        shard.apply_ids(one_group(at), [grads], ctx=StepContext(global_step=step))
    found = shard.find(one_group(torch.arange(HOT)))
    assert torch.equal(found.weights[0], want)
