"""Shoal: train models whose embedding tables keep growing.

The public API. Nothing inside the package imports it. Needs torch and numpy only; `shoal.config`,
`shoal.data`, `shoal.train` and `shoal.cli` bring what they need when they are imported. A name is
imported when it is first used: commands that need no torch do not wait for it.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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

_HOMES = {
    "distributed": "DistributedModelParallel",
    "embedding.collection": "EmbeddingCollection",
    "embedding.combiners": "FirstN ReduceMean ReduceSum",
    "embedding.layouts": "Feature Layout LayoutSlice",
    "optim": "JointOptimizer SparseOptimizer clip_grad_norm_",
    "pipeline": "create_predict_pipeline create_train_pipeline",
    "ragged": "KeyedRagged Ragged",
    "rules": "admission compressors expiry initializers optimizers schedules",
    "rules.admission": "Admission",
    "rules.expiry": "Expiry",
    "table.facade": "Table",
    "table.shard": "StepContext",
    "table.spec": "HostRows Segment TableSpec",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}

if not TYPE_CHECKING:  # type checkers read the imports above

    def __getattr__(name):
        """A public name from its module, or a module of this package."""
        if name in _HOME_OF:
            found = getattr(import_module(f"shoal.{_HOME_OF[name]}"), name)
        elif name.isidentifier() and not name.startswith("_") and _is_module(name):
            found = import_module(f"shoal.{name}")
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = found
        return found

    def _is_module(name):
        found = find_spec(f"shoal.{name}")
        return found is not None and found.origin is not None  # the folder of examples has none

    def __dir__():
        return sorted({*globals(), *__all__})
