"""Rows from other systems, and to them: Parquet, Monolith's dumps, torch embeddings, text."""

from __future__ import annotations

from shoal.checkpoint.interchange.dumps import open_npz, open_text
from shoal.checkpoint.interchange.embedding import open_embeddings
from shoal.checkpoint.interchange.entries import Entries, Offered, Source, TableForm, form_of
from shoal.checkpoint.interchange.monolith import open_monolith
from shoal.checkpoint.interchange.parquet import open_parquet, write_parquet
from shoal.checkpoint.interchange.receiving import receive

__all__ = [
    "Entries",
    "Offered",
    "Source",
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
