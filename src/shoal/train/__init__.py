"""Training a model, evaluating it, and using it afterwards."""

from __future__ import annotations

from shoal.train.observing import profiler
from shoal.train.runs import evaluate, predict, run
from shoal.train.summary import RunResult

__all__ = ["RunResult", "evaluate", "predict", "profiler", "run"]
