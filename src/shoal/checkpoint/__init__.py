"""Checkpoints: full and delta, written by all ranks, loaded by any number of them."""

from __future__ import annotations

from shoal.checkpoint.job_state import Contents
from shoal.checkpoint.loading import Loaded, load, load_share
from shoal.checkpoint.maintenance import (
    Problem,
    Report,
    TableDiff,
    TableDiffs,
    compact,
    diff,
    verify,
)
from shoal.checkpoint.manifest import Manifest, read_manifest
from shoal.checkpoint.saving import Saving, begin, save
from shoal.checkpoint.store import CheckpointEntry, CheckpointStore
from shoal.checkpoint.table_match import LoadOptions
from shoal.checkpoint.writing import Progress

__all__ = [
    "CheckpointEntry",
    "CheckpointStore",
    "Contents",
    "LoadOptions",
    "Loaded",
    "Manifest",
    "Problem",
    "Progress",
    "Report",
    "Saving",
    "TableDiff",
    "TableDiffs",
    "begin",
    "compact",
    "diff",
    "load",
    "load_share",
    "read_manifest",
    "save",
    "verify",
]
