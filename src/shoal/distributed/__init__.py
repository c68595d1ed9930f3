"""A model on many ranks: tables placed, the dense part replicated or split, in one wrapper."""

from __future__ import annotations

from shoal.distributed.model import DenseWrapper, DistributedModelParallel

__all__ = ["DenseWrapper", "DistributedModelParallel"]
