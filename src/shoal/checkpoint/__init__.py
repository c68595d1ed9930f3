"""Checkpoints: full and delta, written by all ranks, loaded by any number of them."""

from __future__ import annotations

from shoal.checkpoint.contents import Contents
from shoal.checkpoint.manifest import Manifest

__all__ = ["Contents", "Manifest"]
