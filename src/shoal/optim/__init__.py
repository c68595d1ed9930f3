"""The optimizer of sparse rows, with torch's manners: step, zero_grad, loss scaling, clipping.

Rules and rates belong to the tables' specs; here is when they act. `step()` applies everything
that backward recorded since the last one, each touched row once. The per-id gradient sums show
up as `.grad` of proxy parameters, one per table, made when first read: a `GradScaler` or
`torch.nn.utils.clip_grad_norm_` finds them there and may change them.

Where tables are spread over ranks, every rank calls the same methods in the same order; what one
rank finds in its rows, a NaN or the part of a norm, all ranks act upon.
"""

from __future__ import annotations

from shoal.optim.averaging import ParameterAverage
from shoal.optim.clipping import clip_grad_norm_
from shoal.optim.joint import JointOptimizer
from shoal.optim.sparse import FiniteFlag, SparseOptimizer, TableGradient

__all__ = [
    "FiniteFlag",
    "JointOptimizer",
    "ParameterAverage",
    "SparseOptimizer",
    "TableGradient",
    "clip_grad_norm_",
]
