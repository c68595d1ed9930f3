"""Tables of rows that grow: specs, the Shard interface, the shards, and the one-table facade."""

from __future__ import annotations

from shoal.table.facade import Table
from shoal.table.factory import make_shard
from shoal.table.shard import Entry, RowChunk, Shard, StepContext, TableStats, Ticket
from shoal.table.spec import Segment, TableSpec

__all__ = [
    "Entry",
    "RowChunk",
    "Segment",
    "Shard",
    "StepContext",
    "Table",
    "TableSpec",
    "TableStats",
    "Ticket",
    "make_shard",
]
