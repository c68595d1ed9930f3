"""Batch normalisation whose batch is that of all ranks, on any device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from shoal.comm.collectives import Collectives
from shoal.errors import InputError, describe

__all__ = ["BatchNormOverRanks", "normalise_over_ranks"]


class BatchNormOverRanks(_NormBase):
    """`torch.nn.BatchNorm*` over the examples of all ranks, in training; names are the same.

    A rank may have one example, or none. torch's `SyncBatchNorm` wants CUDA and two examples a
    rank. In training every forward and every backward is a collective call.

    Args:
        like: the layer to take over, parameters and buffers themselves.
        collectives: of all ranks, on the layer's device.
    """

    def __init__(self, like: _BatchNorm, collectives: Collectives) -> None:
        super().__init__(
            like.num_features, like.eps, like.momentum, like.affine, like.track_running_stats
        )
        self.weight, self.bias = like.weight, like.bias
        self.running_mean, self.running_var = like.running_mean, like.running_var
        self.num_batches_tracked = like.num_batches_tracked
        self._collectives = collectives

    def forward(self, batch: Tensor) -> Tensor:
        """Normalise [B, C] or [B, C, ...].

        Raises:
            InputError: in training, fewer than two values a channel over all ranks.
        """
        tracked = self.running_mean is not None
        if not self.training and tracked:
            return nn.functional.batch_norm(
                batch,
                self.running_mean,
                self.running_var,
                self.weight,
                self.bias,
                False,
                0.0,
                self.eps,
            )
        dims = [0, *range(2, batch.ndim)]
        wide = batch.detach().double()
        here = torch.full((1,), batch.numel() // self.num_features, dtype=torch.float64)
        moments = torch.cat([wide.sum(dims), (wide * wide).sum(dims), here.to(batch.device)])
        (moments,) = self._collectives.all_reduce(
            moments, "sum", what="moments of batch normalisation"
        ).wait()
        count = moments[-1]
        total, squares = moments[:-1].chunk(2)
        mean_C = total / count
        var_C = (squares / count - mean_C * mean_C).clamp_min(0.0)
        self._track(mean_C, var_C, count)
        shape = [1, self.num_features] + [1] * (batch.ndim - 2)
        normal: Tensor = _Normalise.apply(  # type: ignore[no-untyped-call]
            batch,
            mean_C.float().view(shape),
            (var_C + self.eps).rsqrt().float().view(shape),
            count.float(),
            self._collectives,
        )
        if self.affine:
            normal = normal * self.weight.view(shape) + self.bias.view(shape)
        return normal.to(batch.dtype)

    @torch.no_grad()
    def _track(self, mean_C: Tensor, var_C: Tensor, count: Tensor) -> None:
        if count.device.type == "cpu" and count < 2:
            raise InputError(
                describe(
                    "values of a channel in batch normalisation over all ranks",
                    got=int(count),
                    allowed="2 or more in training",
                    remedy="Use larger batches.",
                )
            )
        if self.running_mean is None or self.running_var is None or not self.training:
            return
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        share = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        unbiased_C = var_C * (count / (count - 1))
        self.running_mean.lerp_(mean_C.to(self.running_mean.dtype), share)
        self.running_var.lerp_(unbiased_C.to(self.running_var.dtype), share)


class _Normalise(torch.autograd.Function):
    """(x - mean) * scale, where mean and scale come from the x of all ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        batch: Tensor,
        mean: Tensor,
        scale: Tensor,
        count: Tensor,
        collectives: Collectives,
    ) -> Tensor:
        normal = (batch.float() - mean) * scale
        ctx.save_for_backward(normal, scale, count)
        ctx.collectives = collectives
        ctx.dtype = batch.dtype
        return normal

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        normal, scale, count = ctx.saved_tensors
        dims = [0, *range(2, grad.ndim)]
        wide = grad.double()
        sums = torch.cat([wide.sum(dims), (wide * normal).sum(dims)])
        (sums,) = ctx.collectives.all_reduce(
            sums, "sum", what="gradient of batch normalisation"
        ).wait()
        mean, along = (part.view(scale.shape) for part in (sums.float() / count).chunk(2))
        return ((grad - mean - normal * along) * scale).to(ctx.dtype), None, None, None, None


def normalise_over_ranks(module: nn.Module, collectives: Collectives) -> nn.Module:
    """Make all batch normalisation in a module count the examples of all ranks.

    Returns:
        the module; another one only if it is itself a batch normalisation.
    """
    if isinstance(module, _BatchNorm) and not isinstance(module, nn.SyncBatchNorm):
        return BatchNormOverRanks(module, collectives)
    for name, child in module.named_children():
        setattr(module, name, normalise_over_ranks(child, collectives))
    return module
