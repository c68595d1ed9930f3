"""Shoal's side of the cases, through the modules a user has; nothing a user would not reuse."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import embedding

from ids import to_ids
from peers_cpu import BETA1, BETA2, EPS, FILL, INITIAL_ACCUMULATOR, LR
from shoal.embedding.collection import EmbeddingCollection
from shoal.embedding.layouts import Feature
from shoal.optim import SparseOptimizer
from shoal.ragged import KeyedRagged
from shoal.rules.expiry import Expiry
from shoal.rules.optimizers import Adagrad, Adam, Optimizer
from shoal.table.cpu.shard import CpuShard
from shoal.table.shard import IdGroups, StepContext
from shoal.table.spec import OnFull, Segment, TableSpec

__all__ = [
    "TABLE",
    "FindRun",
    "InsertRun",
    "StepRun",
    "assign",
    "bags",
    "check_step",
    "collection",
    "groups",
    "loaded_shard",
    "table_spec",
]

TABLE = "ids"
CHUNK_IDS = 1 << 18


def table_spec(
    dim: int,
    optimizer: str = "adagrad",
    *,
    name: str = TABLE,
    capacity_rows: int | None = None,
    on_full: OnFull = "raise",
    ttl_s: int | None = None,
) -> TableSpec:
    """One segment of `dim` float32 weights with the baselines' optimizer settings."""
    rule: Optimizer = Adam(lr=LR, beta1=BETA1, beta2=BETA2, eps=EPS)
    if optimizer == "adagrad":
        rule = Adagrad(lr=LR, initial_accumulator=INITIAL_ACCUMULATOR, eps=EPS)
    return TableSpec(
        name=name,
        segments=(Segment(dim=dim, optimizer=rule),),
        capacity_rows=capacity_rows,
        on_full=on_full,
        expiry=None if ttl_s is None else Expiry(ttl_s=ttl_s),
    )


def groups(ids_N: Tensor) -> IdGroups:
    """All ids in the first table."""
    splits = torch.tensor([0, ids_N.numel()])
    return IdGroups(ids_N, splits, torch.zeros(1, dtype=torch.int32))


def assign(shard: CpuShard, index_N: Tensor, *, event_time_s: int = 0) -> None:
    """Give the ids of these indices rows with the baselines' weights, a chunk at a time."""
    dim = shard.specs[0].dim
    weights = torch.full((min(CHUNK_IDS, index_N.numel()), dim), FILL)
    context = StepContext(event_time_s=event_time_s)
    for chunk in index_N.split(CHUNK_IDS):
        shard.assign(groups(to_ids(chunk)), [weights[: chunk.numel()]], ctx=context)


def loaded_shard(rows: int, dim: int, optimizer: str = "adagrad") -> CpuShard:
    """A shard whose one table holds the ids of indices 0..rows-1."""
    shard = CpuShard((table_spec(dim, optimizer),))
    assign(shard, torch.arange(rows))
    if shard.size(0) != rows:
        raise RuntimeError(f"{shard.size(0)} rows after loading {rows}")
    return shard


def bags(ids_N: Tensor) -> KeyedRagged:
    """One feature, one id a bag."""
    return KeyedRagged(keys=("f",), values_N=ids_N, offsets_FB1=torch.arange(ids_N.numel() + 1))


def collection(shard: CpuShard) -> EmbeddingCollection:
    """One feature "f" over the shard's one table."""
    return EmbeddingCollection(shard.specs, (Feature("f", shard.specs[0].name),), shard=shard)


class FindRun:
    """`CpuShard.find(out=)` of known ids into one preallocated output."""

    def __init__(self, shard: CpuShard) -> None:
        self.shard = shard
        self.batches: list[IdGroups] = []
        self.out = torch.empty(0)

    def use(self, ids: Sequence[Tensor], *, complete: bool = True) -> None:
        """Take these batches, and check the table's answer for the first."""
        self.batches = [groups(ids_N) for ids_N in ids]
        self.out = torch.empty(ids[0].numel(), self.shard.specs[0].dim)
        found_N = self.shard.find(self.batches[0], out=self.out).found_N
        if complete and not bool(found_N.all()):
            raise RuntimeError("ids are missing from the loaded table")

    def run(self, i: int) -> None:
        self.shard.find(self.batches[i], out=self.out)


class StepRun:
    """`EmbeddingCollection`, autograd and `SparseOptimizer`, as a training loop calls them."""

    def __init__(
        self, shard: CpuShard | None, module: EmbeddingCollection | None = None, key: str = "f"
    ) -> None:
        if module is None:
            assert shard is not None
            module = collection(shard)
        self.module = module.train()
        self.key = key
        self.optimizer = SparseOptimizer([self.module])
        self.batches: list[KeyedRagged] = []
        self.grad_BD = torch.empty(0)

    def use(self, ids: Sequence[Tensor]) -> None:
        """Take these batches of ids, one id a bag."""
        self.use_bags([bags(ids_N) for ids_N in ids])

    def use_bags(self, batches: Sequence[KeyedRagged]) -> None:
        self.batches = list(batches)
        self.grad_BD = torch.randn_like(self.forward(self.batches[0]))

    def forward(self, batch: KeyedRagged) -> Tensor:
        return self.module(batch)[self.key]

    def run(self, i: int) -> None:
        self.step(self.batches[i])

    def step(self, batch: KeyedRagged, event_time_s: int = 0) -> None:
        self.optimizer.zero_grad()
        self.module(batch, event_time_s=event_time_s)[self.key].backward(self.grad_BD)
        self.optimizer.step()

    def lookup(self, i: int) -> None:
        """Forward alone, as evaluation calls it."""
        with torch.no_grad():
            self.forward(self.batches[i])


class InsertRun:
    """`Shard.find_or_init` of ids that are new, which draws their initial rows."""

    def __init__(self, dim: int) -> None:
        self.shard = CpuShard((table_spec(dim),))
        self.batches: list[IdGroups] = []
        self.context = StepContext()

    def use(self, ids: Sequence[Tensor]) -> None:
        self.batches = [groups(ids_N) for ids_N in ids]

    def run(self, i: int) -> None:
        self.shard.find_or_init(self.batches[i], ctx=self.context).end()

    def check(self, rows: int) -> None:
        if self.shard.size(0) != rows:
            raise RuntimeError(f"{self.shard.size(0)} rows after inserting {rows}")

    def clear(self) -> None:
        """Drop all rows; the table keeps the memory it has."""
        self.shard.clear(0)


def check_step(dim: int, optimizer: str) -> None:
    """Steps of a small sample with duplicate ids against torch's own sparse optimizer.

    Adam takes one step: SparseAdam corrects its bias by the table's step, ours by the row's.

    Raises:
        AssertionError: the step's result differs from the baselines'.
    """
    rows, n = 50, 64
    indices = [torch.randint(0, rows, (n,)) for _ in range(2 if optimizer == "adagrad" else 1)]
    run = StepRun(loaded_shard(rows, dim, optimizer))
    run.use([to_ids(index_N) for index_N in indices])
    # Of one sign: duplicates that nearly cancel would leave little but rounding.
    run.grad_BD = torch.rand(n, dim) + 0.5
    weight = torch.full((rows, dim), FILL).requires_grad_()
    sparse: torch.optim.Optimizer = torch.optim.SparseAdam(
        [weight], lr=LR, betas=(BETA1, BETA2), eps=EPS
    )
    if optimizer == "adagrad":
        sparse = torch.optim.Adagrad(
            [weight], lr=LR, eps=EPS, initial_accumulator_value=INITIAL_ACCUMULATOR
        )
    for i, index_N in enumerate(indices):
        run.run(i)
        sparse.zero_grad()
        embedding(index_N, weight, sparse=True).backward(run.grad_BD)
        sparse.step()
    rows_UD = run.module.shard.find(groups(to_ids(torch.arange(rows)))).weights[0]
    difference = (rows_UD - weight.detach()).abs().max().item()
    assert difference < 1e-5, f"a step differs from torch's {optimizer} by {difference:.2g}"
