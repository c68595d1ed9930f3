"""Rows of device tables, written directly: their ids and metadata."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from shoal.kernels.tables import CHUNK_BITS, COUNT_FRESH

from .device_tables import DeviceTables

__all__ = ["DEVICE", "LANE", "Meta", "fill", "filled"]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LANE = [pytest.param(DEVICE, marks=pytest.mark.gpu if DEVICE == "cuda" else ())]
"""Interpreted without a GPU, compiled with one."""


@dataclass(frozen=True)
class Meta:
    """Metadata of one row."""

    id: int
    seen: int = 0
    count: int = 0
    version: int = 1


def filled(tables: DeviceTables, table: int, rows: Sequence[Meta]) -> Tensor:
    """Allocate rows in order and write their content; returns their handles, int32 [R]."""
    fields = ([getattr(row, name) for row in rows] for name in ("id", "seen", "count", "version"))
    return fill(tables, table, *(torch.tensor(field, dtype=torch.int64) for field in fields))


def fill(
    tables: DeviceTables,
    table: int,
    ids_R: Tensor,
    seen_R: Tensor,
    counts_R: Tensor,
    versions_R: Tensor,
) -> Tensor:
    handles, start = [], 0
    for number, chunk in enumerate(tables.chunks):
        if chunk.table != table:
            continue
        size = min(len(chunk.ids), len(ids_R) - start)
        part = slice(start, start + size)
        chunk.ids[:size] = ids_R[part].to(tables.device)
        columns = ((chunk.seen, seen_R), (chunk.counts, counts_R), (chunk.versions, versions_R))
        for column, values_R in columns:
            column[:size] = values_R[part].to(torch.int32).to(tables.device)
        handles.append(torch.arange(size, dtype=torch.int32) | number << CHUNK_BITS)
        start += size
    tables.layout.counters_KC[table, COUNT_FRESH] = len(ids_R)
    return torch.cat(handles).to(tables.device)
