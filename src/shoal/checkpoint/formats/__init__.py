"""Rows from other systems, and to them: Parquet, Monolith's dumps, torch embeddings, text."""

from __future__ import annotations

from shoal.checkpoint.formats.dumps import open_embeddings, open_npz, open_text
from shoal.checkpoint.formats.foreign import (
    Entries,
    ForeignSource,
    Offered,
    TableForm,
    form_of,
    receive,
)
from shoal.checkpoint.formats.monolith import open_monolith
from shoal.checkpoint.formats.parquet import open_parquet, write_parquet

__all__ = [
    "Entries",
    "ForeignSource",
    "Offered",
    "TableForm",
    "form_of",
    "open_embeddings",
    "open_monolith",
    "open_npz",
    "open_parquet",
    "open_text",
    "receive",
    "write_parquet",
]
