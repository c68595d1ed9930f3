"""Inputs and contenders of the segment operations, by offsets and by index."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from ops_work import Work
from shoal import ops

__all__ = ["backward", "forward", "reduce_backward", "reduce_forward"]

WORD = 8  # bytes of an offset or an index
FLOAT = 4
ROWS_A_SEGMENT = 4
MODE_OF = {
    "reduce_sum": "sum",
    "reduce_mean": "mean",
    "reduce_mean_sqrtn": "sqrtn",
    "reduce_sqrtn": "l2",  # Monolith's name
}

Contender = Callable[[], Tensor]


class _Segments:
    """Rows that fill `value_bytes`, segments of 4 rows in the mean, and places for results."""

    def __init__(
        self, device: str, mode: str, dim: int, value_bytes: int, in_order: bool = True
    ) -> None:
        self.mode, self.device = mode, device
        self.rows = value_bytes // (FLOAT * dim)
        self.segments = self.rows // ROWS_A_SEGMENT
        self.index_N = torch.randint(self.segments, (self.rows,), device=device).sort().values
        self.edges_B1 = torch.arange(self.segments + 1, device=device)
        self.offsets_B1 = torch.searchsorted(self.index_N, self.edges_B1)
        if not in_order:
            self.index_N = self.index_N[torch.randperm(self.rows, device=device)]
        self.values_ND = torch.rand(self.rows, dim, device=device)
        self.range_N = torch.arange(self.rows, device=device)
        self.sums_BD = torch.empty(self.segments, dim, device=device)
        # The squares of a norm, or a gradient.
        self.spare_ND = torch.empty_like(self.values_ND)

    def factors_B1(self, counts_B: Tensor) -> Tensor:
        """What a sum is multiplied by."""
        counts_B1 = counts_B.clamp(min=1).unsqueeze(1).float()
        return counts_B1.rsqrt() if self.mode == "sqrtn" else counts_B1.reciprocal()

    def source(self) -> Tensor:
        """The summed values: the rows, or their squares."""
        if self.mode != "l2":
            return self.values_ND
        return torch.mul(self.values_ND, self.values_ND, out=self.spare_ND)

    def finished(self, sums_BD: Tensor, factors_B1: Tensor | None) -> Tensor:
        """Sums as the mode wants them, in place."""
        if self.mode == "l2":
            return sums_BD.sqrt_()
        return sums_BD if factors_B1 is None else sums_BD.mul_(factors_B1)

    def added(self) -> Tensor:
        return self.sums_BD.zero_().index_add_(0, self.index_N, self.source())

    def bagged(self, order_N: Tensor, offsets_B1: Tensor) -> Tensor:
        return functional.embedding_bag(
            order_N, self.source(), offsets_B1, mode="sum", include_last_offset=True
        )

    def spread(self, grads_BD: Tensor, pooled_BD: Tensor) -> Contender:
        """The gradient by torch alone; what the forward pass could have kept is ready."""
        scaled_BD = torch.empty_like(grads_BD)
        factors_B1 = self.factors_B1(torch.bincount(self.index_N, minlength=self.segments))

        def run() -> Tensor:
            source_BD = grads_BD
            if self.mode == "l2":
                source_BD = torch.div(grads_BD, pooled_BD, out=scaled_BD)
            elif self.mode != "sum":
                source_BD = torch.mul(grads_BD, factors_B1, out=scaled_BD)
            torch.index_select(source_BD, 0, self.index_N, out=self.spare_ND)
            return self.spare_ND.mul_(self.values_ND) if self.mode == "l2" else self.spare_ND

        return run

    def moved(self, *, back: bool, by_index: bool) -> int:
        """Rows and pooled rows once, a norm's gradient both twice, and their index."""
        twice = 2 if back and self.mode == "l2" else 1
        floats = twice * (self.values_ND.numel() + self.sums_BD.numel())
        return FLOAT * floats + WORD * (self.rows if by_index else self.segments + 1)


def forward(*, device: str, mode: str, dim: int, value_bytes: int) -> Work:
    """Segments by offsets; the baseline has each row's segment and the divisors ready."""
    x = _Segments(device, mode, dim, value_bytes)
    factors_B1 = x.factors_B1(x.offsets_B1.diff()) if mode in ("mean", "sqrtn") else None

    def by_reduce() -> Tensor:
        return torch.segment_reduce(x.source(), "sum", offsets=x.offsets_B1, axis=0, unsafe=True)

    peers: dict[str, Contender] = {
        "index_add_": lambda: x.finished(x.added(), factors_B1),
        "embedding_bag": lambda: x.finished(x.bagged(x.range_N, x.offsets_B1), factors_B1),
    }
    if device == "cuda":
        peers["segment_reduce"] = lambda: x.finished(by_reduce(), factors_B1)
    pooled = getattr(ops, f"segment_{mode}")
    return Work(
        ours=lambda: pooled(x.values_ND, x.offsets_B1),
        peers=peers,
        moved=x.moved(back=False, by_index=False),
    )


def backward(*, device: str, mode: str, dim: int, value_bytes: int) -> Work:
    """The gradient alone, of a forward pass done before."""
    x = _Segments(device, mode, dim, value_bytes)
    values_ND = x.values_ND.detach().requires_grad_()
    pooled_BD = getattr(ops, f"segment_{mode}")(values_ND, x.offsets_B1)
    return _gradient(x, values_ND, pooled_BD, by_index=False)


def reduce_forward(*, device: str, name: str, dim: int, value_bytes: int, in_order: bool) -> Work:
    """Segments by the index of each row, sorted or in any order."""
    x = _Segments(device, MODE_OF[name], dim, value_bytes, in_order)
    divided = x.mode in ("mean", "sqrtn")
    sorted_N, order_N = torch.empty_like(x.index_N), torch.empty_like(x.index_N)
    offsets_B1 = torch.empty_like(x.offsets_B1)

    def by_index() -> Tensor:
        sums_BD = x.added()
        counts = torch.bincount(x.index_N, minlength=x.segments) if divided else None
        return x.finished(sums_BD, None if counts is None else x.factors_B1(counts))

    def by_offsets() -> Tensor:
        if in_order:
            index_N, rows_N = x.index_N, x.range_N
        else:
            torch.sort(x.index_N, stable=True, out=(sorted_N, order_N))
            index_N, rows_N = sorted_N, order_N
        torch.searchsorted(index_N, x.edges_B1, out=offsets_B1)
        factors_B1 = x.factors_B1(offsets_B1.diff()) if divided else None
        return x.finished(x.bagged(rows_N, offsets_B1), factors_B1)

    reduced = getattr(ops, name)
    return Work(
        ours=lambda: reduced(x.index_N, x.values_ND, x.segments, indices_sorted=in_order),
        peers={"index_add_": by_index, "embedding_bag": by_offsets},
        moved=x.moved(back=False, by_index=True),
    )


def reduce_backward(*, device: str, name: str, dim: int, value_bytes: int, in_order: bool) -> Work:
    """The gradient alone, of a forward pass done before."""
    x = _Segments(device, MODE_OF[name], dim, value_bytes, in_order)
    values_ND = x.values_ND.detach().requires_grad_()
    pooled_BD = getattr(ops, name)(x.index_N, values_ND, x.segments, indices_sorted=in_order)
    return _gradient(x, values_ND, pooled_BD, by_index=True)


def _gradient(x: _Segments, values_ND: Tensor, pooled_BD: Tensor, *, by_index: bool) -> Work:
    grads_BD = torch.rand_like(pooled_BD)

    def ours() -> Tensor:
        (grads_ND,) = torch.autograd.grad(pooled_BD, values_ND, grads_BD, retain_graph=True)
        return grads_ND

    return Work(
        ours=ours,
        peers={"index_select": x.spread(grads_BD, pooled_BD.detach())},
        moved=x.moved(back=True, by_index=by_index),
    )
