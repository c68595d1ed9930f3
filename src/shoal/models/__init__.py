"""Ranking models as plain modules: dense features and pooled embeddings in, logits [B] out.

Each is built from `(num_dense, num_features, dim)` and called as
`model(dense_B, embeddings_BFD, first_order_BF)`. A pooled history is one more of the F features.
"""

from __future__ import annotations

from shoal.models.dcn import DCN, CrossMixture, CrossNetwork
from shoal.models.deepfm import DeepFM, fm_second_order
from shoal.models.dlrm import DLRM, dot_interaction
from shoal.models.mlp import MLP, Inputs
from shoal.models.wide import LogisticRegression, Wide

__all__ = [
    "DCN",
    "DLRM",
    "MLP",
    "CrossMixture",
    "CrossNetwork",
    "DeepFM",
    "Inputs",
    "LogisticRegression",
    "Wide",
    "dot_interaction",
    "fm_second_order",
]
