"""Embeddings of growing tables as a torch module: ids in, model inputs out, gradients back."""

from __future__ import annotations

from shoal.embedding.collection import EmbeddingCollection
from shoal.layouts import Feature, Layout, LayoutSlice
from shoal.ledger import GradientLedger

__all__ = ["EmbeddingCollection", "Feature", "GradientLedger", "Layout", "LayoutSlice"]
