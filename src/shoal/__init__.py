"""Shoal: train models whose embedding tables keep growing.

The public API. Nothing inside the package imports it. Needs torch and numpy only; `shoal.config`,
`shoal.data`, `shoal.train` and `shoal.cli` bring what they need when they are imported.
"""

from __future__ import annotations

from shoal import comm, errors, ids, metrics, models, optim, placement
from shoal.distributed import DistributedModelParallel
from shoal.embedding.collection import EmbeddingCollection
from shoal.embedding.combiners import FirstN, ReduceMean, ReduceSum
from shoal.embedding.layouts import Feature, Layout, LayoutSlice
from shoal.optim import JointOptimizer, SparseOptimizer, clip_grad_norm_
from shoal.pipeline import create_predict_pipeline, create_train_pipeline
from shoal.ragged import KeyedRagged, Ragged
from shoal.rules import admission, compressors, expiry, initializers, optimizers, schedules
from shoal.rules.admission import Admission
from shoal.rules.expiry import Expiry
from shoal.table.facade import Table
from shoal.table.shard import StepContext
from shoal.table.spec import HostRows, Segment, TableSpec

__version__ = "0.1.0"

__all__ = [
    "Admission",
    "DistributedModelParallel",
    "EmbeddingCollection",
    "Expiry",
    "Feature",
    "FirstN",
    "HostRows",
    "JointOptimizer",
    "KeyedRagged",
    "Layout",
    "LayoutSlice",
    "Ragged",
    "ReduceMean",
    "ReduceSum",
    "Segment",
    "SparseOptimizer",
    "StepContext",
    "Table",
    "TableSpec",
    "__version__",
    "admission",
    "clip_grad_norm_",
    "comm",
    "compressors",
    "create_predict_pipeline",
    "create_train_pipeline",
    "errors",
    "expiry",
    "ids",
    "initializers",
    "metrics",
    "models",
    "optim",
    "optimizers",
    "placement",
    "schedules",
]
