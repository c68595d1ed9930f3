"""Checkpoints: full and delta, written by all ranks, loaded by any number of them."""

from __future__ import annotations

from shoal.checkpoint.compaction import compact
from shoal.checkpoint.comparing import TableDiff, TableDiffs, diff
from shoal.checkpoint.contents import Contents
from shoal.checkpoint.job_writing import Progress
from shoal.checkpoint.loading import Loaded, load
from shoal.checkpoint.manifest import Manifest, read_manifest
from shoal.checkpoint.matching import LoadOptions
from shoal.checkpoint.saving import Saving
from shoal.checkpoint.store import CheckpointStore, Entry
from shoal.checkpoint.verifying import Problem, Report, verify
from shoal.checkpoint.writing import begin, save

__all__ = [
    "CheckpointStore",
    "Contents",
    "Entry",
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
    "read_manifest",
    "save",
    "verify",
]
