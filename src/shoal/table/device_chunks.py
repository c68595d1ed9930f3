"""Chunks of rows: how large they are, how they are allocated, and the columns that name them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.kernels.row_form import RowForm
from shoal.kernels.table_layout import (
    CHUNK_CAPACITY,
    CHUNK_COUNTS,
    CHUNK_IDS,
    CHUNK_ROWS,
    CHUNK_SEEN,
    CHUNK_STATE,
    CHUNK_TABLE,
    CHUNK_VERSIONS,
    CHUNK_WEIGHTS,
    CHUNK_WORDS,
    FIRST_ROWS,
)
from shoal.table.page_locked import PageLocked

__all__ = ["METADATA_BYTES", "Block", "chunk_columns", "chunks_for", "new_block"]

METADATA_BYTES = 20  # of a row: id, version, last-seen time, count


@dataclass(frozen=True, slots=True)
class Block:
    """One allocation of several chunks: bytes of weights and of state, metadata in arrays."""

    weights: Tensor
    state: Tensor
    ids: Tensor
    versions: Tensor
    seen: Tensor
    counts: Tensor

    @property
    def metadata_bytes(self) -> int:
        """Bytes of everything but weights and state."""
        parts = (self.ids, self.versions, self.seen, self.counts)
        return sum(part.numel() * part.element_size() for part in parts)


def chunks_for(present: int, rows: int, target: int) -> list[int]:
    """Sizes of the chunks that take a table from `rows` to at least `target` rows.

    present: chunks it has. The j-th chunk of a table has FIRST_ROWS << j rows, at most CHUNK_ROWS.
    """
    sizes: list[int] = []
    while rows + sum(sizes) < target:
        order = present + len(sizes)
        full = FIRST_ROWS << order >= CHUNK_ROWS if order < 32 else True
        if full:
            missing = target - rows - sum(sizes)
            return sizes + [CHUNK_ROWS] * (-(-missing // CHUNK_ROWS))
        sizes.append(FIRST_ROWS << order)
    return sizes


def new_block(
    form: RowForm, sizes: Sequence[int], device: torch.device, host: PageLocked | None
) -> Block:
    """Allocate chunks; contents are whatever was there.

    host: where weights and state come from if not from the device.

    Raises:
        torch.OutOfMemoryError: no room on the device.
        OutOfDeviceMemory: no more page-locked host memory.
    """
    rows = sum(sizes)

    def large(row_bytes: int) -> Tensor:
        if host is not None:
            return host.take(rows * row_bytes)
        return torch.empty(rows * row_bytes, dtype=torch.uint8, device=device)

    def words(dtype: torch.dtype) -> Tensor:
        return torch.empty(rows, dtype=dtype, device=device)

    return Block(
        large(form.weight_bytes),
        large(form.state_bytes),
        words(torch.int64),
        words(torch.int32),
        words(torch.int32),
        words(torch.int32),
    )


def chunk_columns(
    block: Block, sizes: Sequence[int], form: RowForm, table: int
) -> NDArray[np.int64]:
    """The columns of `ShardLayout.chunks_WC` for the chunks of a block."""
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int64)
    columns = np.zeros((CHUNK_WORDS, len(sizes)), dtype=np.int64)
    columns[CHUNK_WEIGHTS] = block.weights.data_ptr() + starts * form.weight_bytes
    columns[CHUNK_STATE] = block.state.data_ptr() + starts * form.state_bytes
    columns[CHUNK_IDS] = block.ids.data_ptr() + starts * 8
    columns[CHUNK_VERSIONS] = block.versions.data_ptr() + starts * 4
    columns[CHUNK_SEEN] = block.seen.data_ptr() + starts * 4
    columns[CHUNK_COUNTS] = block.counts.data_ptr() + starts * 4
    columns[CHUNK_TABLE] = table
    columns[CHUNK_CAPACITY] = sizes
    return columns
