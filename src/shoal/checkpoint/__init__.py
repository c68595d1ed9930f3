"""Checkpoints: full and delta, written by all ranks, loaded by any number of them."""

from __future__ import annotations

from shoal.checkpoint.compaction import compact
from shoal.checkpoint.comparing import TableDiff, TableDiffs, diff
from shoal.checkpoint.contents import Contents
from shoal.checkpoint.manifest import Manifest, read_manifest
from shoal.checkpoint.store import CheckpointStore, Entry
from shoal.checkpoint.verifying import Problem, Report, verify

__all__ = [
    "CheckpointStore",
    "Contents",
    "Entry",
    "Manifest",
    "Problem",
    "Report",
    "TableDiff",
    "TableDiffs",
    "compact",
    "diff",
    "read_manifest",
    "verify",
]
