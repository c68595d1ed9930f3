"""Clipping by the common norm of dense gradients and of sparse ones, over ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import SupportsFloat

import torch
from torch import Tensor, nn

from shoal.embedding.gradients import GradientLedger
from shoal.errors import all_of_kind, of_kind
from shoal.optim.sparse import SparseOptimizer, TableGradient, shared, summed, worst
from shoal.uncompiled import uncompiled


@uncompiled
def clip_grad_norm_(
    dense_params: Tensor | Iterable[Tensor],
    sparse: SparseOptimizer | Iterable[SparseOptimizer],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale dense gradients and per-id sums together so that their common norm fits.

    As `torch.nn.utils.clip_grad_norm_` on a model whose tables are dense: same factor, same
    result for a norm that is not finite. Under a loss scaler, `unscale_` both sides first.

    Where tables are spread over ranks this is a collective call: dense gradients count once (as
    DDP leaves them, equal on every rank, or as FSDP2 splits them), every row counts where it is
    owned, replicated tables on one rank; all ranks scale by the same factor.

    Args:
        dense_params: parameters with a gradient, or none.
        sparse: the optimizers of the tables.
        max_norm: what the common norm is scaled down to.
        norm_type: p of the p-norm; may be infinity.
        error_if_nonfinite: raise, instead of scaling by what is not finite.

    Returns:
        the norm before clipping, a scalar tensor.

    Raises:
        RuntimeError: the norm is not finite and error_if_nonfinite is set.
        ConfigError: the gradients of each sender are applied on their own (per_sender_steps).
    """
    dense = [dense_params] if isinstance(dense_params, Tensor) else dense_params
    dense = all_of_kind("dense_params", dense, Tensor)
    members = [sparse] if isinstance(sparse, SparseOptimizer) else sparse
    members = all_of_kind("sparse", members, SparseOptimizer)
    of_kind("max_norm", max_norm, SupportsFloat)
    # An empty sum has no largest element, which the infinity norm would ask for.
    tables = [
        proxy
        for member in members
        for proxy in member.proxies
        if proxy.grad is not None and proxy.grad.numel()
    ]
    accumulators = [ledger for member in members for ledger in member.accumulators]
    if shared(accumulators) is None:
        return nn.utils.clip_grad_norm_(
            [*dense, *tables], max_norm, norm_type, error_if_nonfinite=error_if_nonfinite
        )
    total = _common_norm(dense, tables, accumulators, float(norm_type))
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"The total norm of order {norm_type} for dense and sparse gradients over all ranks "
            "is non-finite, so it cannot be clipped. To disable this error and scale the "
            "gradients by the non-finite norm anyway, set `error_if_nonfinite=False`"
        )
    # Apart: torch's own loops may not mix tensors that FSDP2 splits with plain ones.
    for params in (dense, tables):
        nn.utils.clip_grads_with_norm_(params, max_norm, total)
    return total


@torch.no_grad()
def _common_norm(
    dense: Sequence[Tensor],
    tables: Sequence[TableGradient],
    accumulators: Sequence[GradientLedger],
    norm_type: float,
) -> Tensor:
    """The norm over all ranks, float64 where the host has it; the same bits on every rank."""
    device = accumulators[0].shard.device
    grads = [param.grad for param in dense if param.grad is not None]
    replicas = nn.utils.get_total_norm(grads, norm_type)
    # FSDP2 splits gradients: their norm is a DTensor that knows of the other ranks' parts.
    whole = getattr(replicas, "full_tensor", None)
    dense_norm = (whole() if whole is not None else replicas).to(device, torch.float64)
    owned = [proxy.grad for proxy in tables if proxy.speaks_for_itself and proxy.grad is not None]
    sparse_norm = nn.utils.get_total_norm(owned, norm_type).to(device, torch.float64)
    if norm_type == float("inf"):
        return torch.maximum(dense_norm, worst(accumulators, sparse_norm))
    powers = summed(accumulators, sparse_norm**norm_type) + dense_norm**norm_type
    return powers ** (1.0 / norm_type)
