"""Batch normalisation whose batch is that of all ranks, on any device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from shoal.comm.collectives import Collectives
from shoal.errors import InputError
from shoal.uncompiled import uncompiled


@uncompiled
class BatchNormOverRanks(_NormBase):
    """`torch.nn.BatchNorm*` over the examples of all ranks, in training; names are the same.

    A rank may have one example, or none. torch's `SyncBatchNorm` wants CUDA and two examples a
    rank. In training every forward and every backward is a collective call.

    Args:
        like: the layer to take over, parameters and buffers themselves.
        collectives: of all ranks, on the layer's device.
        lone: take fewer than two values a channel, too, as examples may be missing: their variance
            is 0, and running statistics stay.
    """

    def __init__(self, like: _BatchNorm, collectives: Collectives, *, lone: bool = False) -> None:
        super().__init__(
            like.num_features, like.eps, like.momentum, like.affine, like.track_running_stats
        )
        self.weight, self.bias = like.weight, like.bias
        self.running_mean, self.running_var = like.running_mean, like.running_var
        self.num_batches_tracked = like.num_batches_tracked
        self._collectives, self._lone = collectives, lone

    def forward(self, batch: Tensor) -> Tensor:
        """Normalise [B, C] or [B, C, ...].

        Raises:
            InputError: in training, fewer than two values a channel over all ranks, unless `lone`;
                on CUDA, where looking would wait for the device, they pass in any case.
        """
        tracked = self.running_mean is not None
        if not self.training and tracked:
            seen = self.running_mean, self.running_var
            return nn.functional.batch_norm(batch, *seen, self.weight, self.bias, eps=self.eps)
        normal: Tensor = _Normalise.apply(  # type: ignore[no-untyped-call]
            batch, self.weight, self.bias, self
        )
        return normal

    def moments(self, shifted: Tensor, shift_C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(mean [C], variance [C], values a channel) over all ranks, float64, of values that are
        given less `shift_C`, each rank's own, so that their squares do not cancel; running
        statistics follow.
        """
        dims = [0, *range(2, shifted.ndim)]
        here = shifted.new_full((1,), shifted.numel() // self.num_features, dtype=torch.float64)
        sum_C, squares_C = shifted.sum(dims).double(), (shifted * shifted).sum(dims).double()
        moved_C = here * shift_C
        squares_C = squares_C + shift_C * (2.0 * sum_C + moved_C)
        sums = torch.cat([sum_C + moved_C, squares_C, here])
        sums = self.summed(sums, "moments of batch normalisation")
        count = sums[-1]
        mean_C, square_C = (sums[:-1] / count.clamp_min(1.0)).chunk(2)
        var_C = (square_C - mean_C * mean_C).clamp_min(0.0)
        self._track(mean_C, var_C, count)
        return mean_C, var_C, count

    def summed(self, values: Tensor, what: str) -> Tensor:
        """Added up over ranks; a collective call."""
        (found,) = self._collectives.all_reduce(values, "sum", what=what).wait()
        return found

    @torch.no_grad()
    def _track(self, mean_C: Tensor, var_C: Tensor, count: Tensor) -> None:
        if count.device.type == "cpu" and count < 2 and not self._lone:
            raise InputError(
                "values of a channel in batch normalisation over all ranks",
                got=int(count),
                allowed="2 or more in training",
                remedy="Use larger batches.",
            )
        if self.running_mean is None or self.running_var is None or not self.training:
            return
        assert self.num_batches_tracked is not None
        counts = count >= 2
        self.num_batches_tracked.add_(counts)
        share = self.momentum
        if share is None:
            share = 1.0 / max(float(self.num_batches_tracked), 1.0)
        unbiased_C = var_C * (count / (count - 1).clamp_min(1.0))
        for running, now_C in ((self.running_mean, mean_C), (self.running_var, unbiased_C)):
            running.lerp_(now_C.to(running.dtype), (share * counts).to(running.dtype))


class _Normalise(torch.autograd.Function):
    """y = (x - mean) scale weight + bias, where mean and scale come from the x of all ranks.

    Each is one multiplication and one addition an element: constants of a channel are put
    together first. With d = x - shift, y = d a + e.
    """

    @staticmethod
    def forward(
        ctx: Any,
        batch: Tensor,
        weight_C: Tensor | None,
        bias_C: Tensor | None,
        layer: BatchNormOverRanks,
    ) -> Tensor:
        shape = [1, -1] + [1] * (batch.ndim - 2)
        values = _wide(batch)
        # The mean of a rank's values; running means are far off until many steps are done.
        dims = [0, *range(2, batch.ndim)]
        shift_C = values.mean(dims) if values.numel() else values.new_zeros(layer.num_features)
        shifted = values - shift_C.view(shape)
        mean_C, var_C, count = layer.moments(shifted, shift_C.double())
        scale_C = (var_C + layer.eps).rsqrt()
        off_C = shift_C - mean_C  # float64
        slope_C = scale_C if weight_C is None else scale_C * weight_C
        start_C = off_C * slope_C if bias_C is None else off_C * slope_C + bias_C
        ctx.save_for_backward(shifted, scale_C, off_C, slope_C, count)
        ctx.layer, ctx.dtype, ctx.shape = layer, batch.dtype, shape
        slope, start = (x.to(shifted.dtype).view(shape) for x in (slope_C, start_C))
        return torch.addcmul(start, shifted, slope).to(batch.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        shifted, scale_C, off_C, slope_C, count = ctx.saved_tensors
        dims, shape = [0, *range(2, grad.ndim)], ctx.shape
        grad = _wide(grad)
        plain_C = grad.sum(dims).double()
        # of the gradient times the normalised values
        along_C = ((grad * shifted).sum(dims).double() + off_C * plain_C) * scale_C
        sums = ctx.layer.summed(torch.cat([plain_C, along_C]), "gradient of batch normalisation")
        mean_C, mean_along_C = (sums / count.clamp_min(1.0)).chunk(2)
        curve_C = -slope_C * mean_along_C * scale_C
        start_C = curve_C * off_C - slope_C * mean_C
        slope, curve, start = (x.to(shifted.dtype).view(shape) for x in (slope_C, curve_C, start_C))
        back = torch.addcmul(start, grad, slope).addcmul_(shifted, curve)
        wanted = ctx.needs_input_grad
        return (
            back.to(ctx.dtype),
            along_C.to(shifted.dtype) if wanted[1] else None,
            plain_C.to(shifted.dtype) if wanted[2] else None,
            None,
        )


def _wide(values: Tensor) -> Tensor:
    """Float64 as it is, anything else as float32."""
    return values if values.dtype is torch.float64 else values.float()


def normalise_over_ranks(
    module: nn.Module, collectives: Collectives, *, lone: bool = False
) -> nn.Module:
    """Make all batch normalisation in a module count the examples of all ranks.

    lone: as of `BatchNormOverRanks`.

    Returns:
        the module; another one only if it is itself a batch normalisation.
    """
    if _is_of_one_rank(module):
        return BatchNormOverRanks(module, collectives, lone=lone)
    for name, child in module.named_children():
        setattr(module, name, normalise_over_ranks(child, collectives, lone=lone))
    return module


@contextmanager
def resting(module: nn.Module) -> Iterator[None]:
    """Batch normalisation of one rank as in eval, so that its statistics stay.

    Synchronised statistics are other ranks' too: there the examples count.
    """
    parts = [part for part in module.modules() if _is_of_one_rank(part) and part.training]
    for part in parts:
        part.eval()
    try:
        yield
    finally:
        for part in parts:
            part.train()


def _is_of_one_rank(module: nn.Module) -> TypeGuard[_BatchNorm]:
    return isinstance(module, _BatchNorm) and not isinstance(module, nn.SyncBatchNorm)
