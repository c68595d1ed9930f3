"""Saving and loading a whole model: dense weights, and every table in full."""

from __future__ import annotations

from shoal.checkpoint.store import Manifest, RowFile, Rows, attend, load, read_manifest, save

__all__ = ["Manifest", "RowFile", "Rows", "attend", "load", "read_manifest", "save"]
