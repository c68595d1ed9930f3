"""Ranking and retrieval models as plain modules: dense features and embeddings in, logits out.

Each is built from `Inputs`, or a plain `(num_dense, num_features, dim)`, and called as
`model(dense_B, embeddings_BFD, first_order_BF)`. A pooled history is one more of the F features.
Models that take sequences get two more arguments: their rows [B, S, L, D] and lengths [B, S].
`MODELS` has the spec of each by the kind that configs name.
"""

from __future__ import annotations

from shoal.models.crosses import (
    DCN,
    DLRM,
    CrossMixture,
    CrossNetwork,
    DcnSettings,
    DlrmSettings,
    LowRankCrossNetwork,
    cross_network,
    dot_interaction,
)
from shoal.models.deepfm import (
    DeepFM,
    DeepFMSettings,
    FMSettings,
    LogisticRegression,
    LogisticSettings,
    Wide,
    WideAndDeepSettings,
    fm_second_order,
)
from shoal.models.mlp import BIAS, MLP, VEC, Inputs, ModelSpec
from shoal.models.multi_task import (
    PLE,
    DBMTLSettings,
    MMoE,
    MMoESettings,
    PLESettings,
    SharedBottom,
    TaskTowers,
)
from shoal.models.tasks import (
    InBatchSoftmax,
    Objective,
    Pointwise,
    Predicted,
    Task,
    TaskSettings,
)
from shoal.models.user_item import (
    DIN,
    HSTU,
    DinSettings,
    HSTULayer,
    HstuSettings,
    InBatchScores,
    ItemFrequency,
    TargetAttention,
    TwoTower,
    TwoTowerSettings,
)

MODELS: dict[str, type[ModelSpec]] = {
    cls.kind: cls
    for cls in (
        LogisticSettings,
        WideAndDeepSettings,
        FMSettings,
        DeepFMSettings,
        DlrmSettings,
        DcnSettings,
        DinSettings,
        HstuSettings,
        TwoTowerSettings,
        MMoESettings,
        PLESettings,
        DBMTLSettings,
    )
}

__all__ = [
    "BIAS",
    "DCN",
    "DIN",
    "DLRM",
    "HSTU",
    "MLP",
    "MODELS",
    "PLE",
    "VEC",
    "CrossMixture",
    "CrossNetwork",
    "DeepFM",
    "DeepFMSettings",
    "HSTULayer",
    "InBatchScores",
    "InBatchSoftmax",
    "Inputs",
    "ItemFrequency",
    "LogisticRegression",
    "LogisticSettings",
    "LowRankCrossNetwork",
    "MMoE",
    "ModelSpec",
    "Objective",
    "Pointwise",
    "Predicted",
    "SharedBottom",
    "TargetAttention",
    "Task",
    "TaskSettings",
    "TaskTowers",
    "TwoTower",
    "Wide",
    "cross_network",
    "dot_interaction",
    "fm_second_order",
]
