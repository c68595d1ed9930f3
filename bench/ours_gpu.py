"""Shoal's side of the GPU cases: ids on the device, loaded shards, and their steps."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import Tensor

from plan_gpu import Scale

# Decides how Triton runs, so before anything imports it.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from shoal.embedding.collection import EmbeddingCollection
from shoal.embedding.layouts import Feature
from shoal.optim import SparseOptimizer
from shoal.ragged import KeyedRagged
from shoal.rules.initializers import Uniform
from shoal.rules.optimizers import SGD, Adagrad, Adam, Optimizer
from shoal.table.shard import GradRecord, IdGroups, Shard, StepContext
from shoal.table.spec import HostRows, Segment, TableSpec

__all__ = [
    "ModuleStep",
    "ShardStep",
    "check_step",
    "groups",
    "load",
    "make_shard",
    "power_law",
    "rows_in",
    "scrambled",
    "table",
    "tables_of",
]

EXPONENT = 1.05
CHUNK_IDS = 1 << 20
_RULES: dict[str, Optimizer] = {
    "SGD": SGD(lr=0.01),
    "Adagrad": Adagrad(lr=0.01),
    "Adam": Adam(lr=0.001, beta1=0.9, beta2=0.999, eps=1e-8),
}


def make_shard(
    scale: Scale, specs: Sequence[TableSpec], host_rows: HostRows | None = None
) -> Shard:
    """A CUDA shard on the bench's device."""
    from shoal.table.cuda.shard import CudaShard

    return CudaShard(specs, device=scale.device, host_rows=host_rows)


def table(dim: int, rows: int, rule: str = "SGD", *, name: str = "t", **more: object) -> TableSpec:
    """One segment of `dim` float32 weights, with memory for `rows` from the start."""
    segment = Segment(dim=dim, optimizer=_RULES[rule], initializer=Uniform(-0.01, 0.01))
    return TableSpec(name=name, segments=(segment,), expected_rows=rows, **more)  # type: ignore[arg-type]


def tables_of(count: int, dim: int, rows: int, rule: str) -> tuple[TableSpec, ...]:
    """Equal tables t0, t1, ..."""
    return tuple(table(dim, rows, rule, name=f"t{k}") for k in range(count))


def scrambled(index_N: Tensor) -> Tensor:
    """Int64 ids that look random, one to one with the indices (splitmix64's finalizer)."""
    x = index_N
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


def power_law(rows: int, shape: tuple[int, ...], device: str) -> Tensor:
    """Int64 indices 0..rows-1, index r with a chance that falls as (r + 1) ** -1.05."""
    u = torch.rand(shape, dtype=torch.float64, device=device)
    bound = float(rows) ** (1 - EXPONENT)
    ranks = ((bound - 1) * u + 1) ** (1 / (1 - EXPONENT))
    return ranks.floor().clamp_(1, rows).to(torch.int64) - 1


def groups(ids_N: Tensor, tables: int = 1) -> IdGroups:
    """As many ids in each of the first tables."""
    splits_G1 = torch.arange(tables + 1) * (ids_N.numel() // tables)
    return IdGroups(ids_N, splits_G1, torch.arange(tables, dtype=torch.int32))


def load(shard: Shard, rows: int, *, start: int = 0, event_time_s: int = 0) -> None:
    """Give the ids of indices start..start+rows-1 rows in every table of the shard."""
    ctx = StepContext(event_time_s=event_time_s)
    for table_index in range(len(shard.specs)):
        before = shard.size(table_index)
        for begin in range(start, start + rows, CHUNK_IDS):
            stop = min(begin + CHUNK_IDS, start + rows)
            ids_N = scrambled(torch.arange(begin, stop, device=shard.device))
            tables_G = torch.tensor([table_index], dtype=torch.int32)
            call = IdGroups(ids_N, torch.tensor([0, ids_N.numel()]), tables_G)
            shard.find_or_init(call, ctx=ctx).end()
        if shard.size(table_index) - before != rows:
            got = shard.size(table_index) - before
            raise RuntimeError(f"{got} new rows after loading {rows}")


def rows_in(shard: Shard) -> str:
    """Rows and load of the first table's index, for a note."""
    stats = shard.stats()[0]
    return f"{stats.rows:,} rows, load {stats.index_load:.2f}"


class ShardStep:
    """find_or_init, gather and apply of whole rows, through the Shard interface.

    Args:
        shard: the tables; batches: ids of each step, taken in turn.
        dim: row width; the gradients are the same at every step.
    """

    def __init__(self, shard: Shard, batches: Sequence[IdGroups], dim: int) -> None:
        self.shard = shard
        self.batches = batches
        sizes = batches[0].splits_G1.diff().tolist()
        self.grads = tuple(1e-3 * torch.randn(n, dim, device=shard.device) for n in sizes)

    def run(self, number: int) -> None:
        self.step(self.batches[number % len(self.batches)], number)

    def step(self, call: IdGroups, number: int, event_time_s: int = 0) -> None:
        ctx = StepContext(global_step=number, event_time_s=event_time_s)
        ticket = self.shard.find_or_init(call, ctx=ctx)
        self.shard.gather(ticket, ctx=ctx)
        self.shard.apply([GradRecord(ticket, self.grads)], ctx=ctx)


class ModuleStep:
    """The same through `EmbeddingCollection`, autograd and `SparseOptimizer`; bags are summed."""

    def __init__(self, shard: Shard, batches: Sequence[KeyedRagged], dim: int) -> None:
        features = tuple(Feature(spec.name, spec.name) for spec in shard.specs)
        self.module = EmbeddingCollection(shard.specs, features, shard=shard)
        self.optimizer = SparseOptimizer(self.module)
        self.batches = batches
        size = batches[0].batch_size
        grad = 1e-3 * torch.randn(size, dim, device=shard.device)
        self.grads = [grad.clone() for _ in features]

    def run(self, number: int) -> None:
        outputs = self.module(self.batches[number % len(self.batches)])
        torch.autograd.backward(list(outputs.values()), self.grads)
        self.optimizer.step()


def check_step(scale: Scale) -> None:
    """A step of ids with duplicates moves each row by the sum of its gradients."""
    shard = make_shard(scale, (table(8, 0),))
    ids_N = scrambled(torch.arange(24, device=scale.device) % 7)
    call = groups(ids_N)
    step = ShardStep(shard, [call], 8)
    step.grads = (torch.ones(24, 8, device=scale.device),)
    ticket = shard.find_or_init(call, ctx=StepContext())
    start = shard.gather(ticket, ctx=StepContext())[0]
    ticket.end()
    step.run(0)
    found = shard.find(call)
    counts = torch.bincount(torch.arange(24) % 7)[torch.arange(24) % 7]
    want = start.cpu() - 0.01 * counts[:, None]
    if not bool(found.found_N.all()) or not torch.allclose(found.weights[0].cpu(), want, atol=1e-6):
        raise RuntimeError("a step of 24 ids came out wrong")
