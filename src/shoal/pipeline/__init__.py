"""Training whose stages overlap, without changing what is trained.

`scheduler` says, as a pure function, when each stage of each batch runs; `executor` runs it;
`train_pipeline` makes pipelines of models.
"""

from __future__ import annotations

from shoal.pipeline.scheduler import Settings
from shoal.pipeline.stages import Step
from shoal.pipeline.train_pipeline import (
    PredictPipeline,
    RunHook,
    TrainPipeline,
    create_predict_pipeline,
    create_train_pipeline,
)

__all__ = [
    "PredictPipeline",
    "RunHook",
    "Settings",
    "Step",
    "TrainPipeline",
    "create_predict_pipeline",
    "create_train_pipeline",
]
