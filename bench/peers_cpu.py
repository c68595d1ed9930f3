"""The baselines, each at its best: int64 indices of a static table, one id a bag, warm memory.

Every baseline has `run(i)` for batch i, gets its batches when built, and is checked once against
arithmetic written out here before it is timed (`check_*`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

__all__ = ["EmbeddingBagStep", "FbgemmStep", "IndexSelect", "check_peer", "step_peer"]

LR = 0.01
INITIAL_ACCUMULATOR = 0.1
BETA1 = 0.9
BETA2 = 0.999
EPS = 1e-8
FILL = 0.01


class IndexSelect:
    """`torch.index_select(table, 0, index, out=)` into one preallocated output."""

    def __init__(self, rows: int, dim: int, batches: Sequence[Tensor]) -> None:
        self.weight = torch.empty(rows, dim).fill_(FILL)
        self.batches = batches
        self.out = torch.empty(batches[0].numel(), dim)

    def run(self, i: int) -> None:
        torch.index_select(self.weight, 0, self.batches[i], out=self.out)


class EmbeddingBagStep:
    """`nn.EmbeddingBag(mode="sum", sparse=True)` with `torch.optim.Adagrad` or `SparseAdam`."""

    def __init__(self, rows: int, dim: int, batches: Sequence[Tensor], optimizer: str) -> None:
        weight = torch.empty(rows, dim).fill_(FILL)
        self.bag = nn.EmbeddingBag(
            rows, dim, mode="sum", sparse=True, include_last_offset=True, _weight=weight
        )
        self.batches = batches
        self.offsets_B1 = torch.arange(batches[0].numel() + 1)
        self.grad_BD = torch.randn(batches[0].numel(), dim)
        self.optimizer: torch.optim.Optimizer
        if optimizer == "adagrad":
            self.optimizer = torch.optim.Adagrad(
                self.bag.parameters(),
                lr=LR,
                initial_accumulator_value=INITIAL_ACCUMULATOR,
                eps=EPS,
            )
        else:
            self.optimizer = torch.optim.SparseAdam(
                list(self.bag.parameters()), lr=LR, betas=(BETA1, BETA2), eps=EPS
            )

    def run(self, i: int) -> None:
        self.optimizer.zero_grad()
        self.bag(self.batches[i], self.offsets_B1).backward(self.grad_BD)
        self.optimizer.step()

    def touch(self) -> None:
        """Write every page of the optimizer state, which is created lazily as untouched zeros."""
        self.run(0)
        for state in self.optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor) and value.dim() == 2:
                    value.mul_(1.0)

    def forward(self, index_N: Tensor, offsets_B1: Tensor) -> Tensor:
        return self.bag(index_N, offsets_B1)

    @property
    def weight(self) -> Tensor:
        return self.bag.weight.detach()


class FbgemmStep:
    """FBGEMM's CPU table-batched embedding, element-wise Adagrad fused into backward.

    Sum pooling of one id a bag (its unpooled mode is 4-10x slower), bounds check off.
    """

    def __init__(self, rows: int, dim: int, batches: Sequence[Tensor]) -> None:
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
            BoundsCheckMode,
            EmbeddingLocation,
            PoolingMode,
        )
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            OptimType,
            SplitTableBatchedEmbeddingBagsCodegen,
        )

        self.table = SplitTableBatchedEmbeddingBagsCodegen(
            [(rows, dim, EmbeddingLocation.HOST, ComputeDevice.CPU)],
            optimizer=OptimType.EXACT_ADAGRAD,
            learning_rate=LR,
            eps=EPS,
            stochastic_rounding=False,
            pooling_mode=PoolingMode.SUM,
            bounds_check_mode=BoundsCheckMode.NONE,
        )
        self.table.split_embedding_weights()[0].fill_(FILL)
        for states in self.table.split_optimizer_states():
            for state in states:
                state.fill_(INITIAL_ACCUMULATOR)
        self.batches = batches
        self.offsets_B1 = torch.arange(batches[0].numel() + 1)
        self.grad_BD = torch.randn(batches[0].numel(), dim)

    def run(self, i: int) -> None:
        self.table(self.batches[i], self.offsets_B1).backward(self.grad_BD)

    def touch(self) -> None:
        """Nothing: weights and state were written when built."""

    def forward(self, index_N: Tensor, offsets_B1: Tensor) -> Tensor:
        return self.table(index_N, offsets_B1)

    @property
    def weight(self) -> Tensor:
        return self.table.split_embedding_weights()[0]


def step_peer(
    peer: str, rows: int, dim: int, batches: Sequence[Tensor]
) -> EmbeddingBagStep | FbgemmStep:
    """The baseline of a step case: "fbgemm", "torch_adagrad" or "torch_adam"."""
    # torch warns that sparse gradients are not checked; checking would only slow the baseline.
    warnings.filterwarnings("ignore", message="Sparse invariant checks")
    if peer == "fbgemm":
        return FbgemmStep(rows, dim, batches)
    return EmbeddingBagStep(rows, dim, batches, peer.removeprefix("torch_"))


def check_peer(peer: str, dim: int) -> None:
    """Run a small sample, with duplicate ids, against the arithmetic below.

    Raises:
        AssertionError: the baseline does not compute the case's result.
    """
    rows, n = 50, 64
    batches = [torch.randint(0, rows, (n,)) for _ in range(3)]
    if peer == "index_select":
        lookup = IndexSelect(rows, dim, batches)
        lookup.weight.normal_()
        lookup.run(1)
        expected = torch.stack([lookup.weight[int(i)] for i in batches[1]])
        assert torch.equal(lookup.out, expected), "index_select differs from rows read one by one"
        return
    contender = step_peer(peer, rows, dim, batches)
    # Of one sign: duplicates that nearly cancel would leave little but rounding.
    contender.grad_BD.uniform_(0.5, 1.5)
    weight = torch.full((rows, dim), FILL, dtype=torch.float64)
    advance = _adam(weight) if peer == "torch_adam" else _adagrad(weight)
    for i, index_N in enumerate(batches):
        contender.run(i)
        grad = torch.zeros_like(weight)
        grad.index_add_(0, index_N, contender.grad_BD.double())
        advance(index_N.unique(), grad)
    difference = (contender.weight.double() - weight).abs().max().item()
    assert difference < 1e-5, f"{peer} differs from the reference by {difference:.2g}"


def _adagrad(weight: Tensor) -> Callable[[Tensor, Tensor], None]:
    total = torch.full_like(weight, INITIAL_ACCUMULATOR)

    def advance(index_U: Tensor, grad: Tensor) -> None:
        g = grad[index_U]
        total[index_U] += g * g
        weight[index_U] -= LR * g / (total[index_U].sqrt() + EPS)

    return advance


def _adam(weight: Tensor) -> Callable[[Tensor, Tensor], None]:
    # SparseAdam corrects its bias by the step of the whole table, not of the row.
    first, second = torch.zeros_like(weight), torch.zeros_like(weight)
    steps = 0

    def advance(index_U: Tensor, grad: Tensor) -> None:
        nonlocal steps
        steps += 1
        g = grad[index_U]
        first[index_U] = BETA1 * first[index_U] + (1 - BETA1) * g
        second[index_U] = BETA2 * second[index_U] + (1 - BETA2) * g * g
        rate = LR * (1 - BETA2**steps) ** 0.5 / (1 - BETA1**steps)
        weight[index_U] -= rate * first[index_U] / (second[index_U].sqrt() + EPS)

    return advance
