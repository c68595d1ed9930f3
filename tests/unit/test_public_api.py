"""The public face is what it says: `__all__`, importable, and frozen here on purpose."""

from __future__ import annotations

import subprocess
import sys

import shoal

FROZEN = [
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


def test_the_face_is_frozen() -> None:
    assert shoal.__all__ == FROZEN
    for name in FROZEN:
        assert getattr(shoal, name) is not None


def test_every_public_error_is_in_the_tree() -> None:
    for name in shoal.errors.__all__:
        value = getattr(shoal.errors, name)
        if isinstance(value, type):
            assert issubclass(value, shoal.errors.ShoalError)
            assert name in (shoal.errors.__doc__ or "")


def test_import_needs_torch_and_numpy_only() -> None:
    heavy = ["pyarrow", "pydantic", "hydra", "omegaconf", "rich", "typer", "fsspec", "tensorboard"]
    code = f"import sys, shoal; print([m for m in {heavy} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
