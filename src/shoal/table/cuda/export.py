"""Rows that leave or enter a GPU shard whole, in pieces through pinned memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.kernels.host_copies import HostCopy, copy_to_host, sent
from shoal.kernels.row_changes import SPAN_ROWS, SPAN_WORDS
from shoal.kernels.rows import (
    read_ids,
    read_metadata,
    read_values,
    write_metadata,
    write_values,
)
from shoal.kernels.tables import RowForm, ShardLayout
from shoal.placement import hash_ids, sort_key
from shoal.table.values import RowChunk


@dataclass(frozen=True, slots=True)
class Span:
    """Rows [first, stop) of a table, by the numbers in which it handed them out."""

    table: int
    first: int
    stop: int

    @property
    def blocks(self) -> int:
        """How many programs look at it."""
        return -(-(self.stop - self.first) // SPAN_ROWS)


def blocks_of_spans(spans: Sequence[Span], device: torch.device) -> Tensor:
    """Spans split into the part of one program: int64 [B, SPAN_WORDS] on the device."""
    parts = [_blocks(span) for span in spans]
    words_BW = np.concatenate(parts) if parts else np.empty((0, SPAN_WORDS), dtype=np.int64)
    return sent(torch.from_numpy(words_BW), device)


def _blocks(span: Span) -> NDArray[np.int64]:
    firsts_B = np.arange(span.first, span.stop, SPAN_ROWS, dtype=np.int64)
    words_BW = np.empty((len(firsts_B), SPAN_WORDS), dtype=np.int64)
    words_BW[:, 0], words_BW[:, 1] = span.table, firsts_B
    words_BW[:, 2] = np.minimum(firsts_B + SPAN_ROWS, span.stop)
    return words_BW


_PIECE_BYTES = 32 << 20

Parts = tuple[Tensor, Tensor, Tensor]


def export_rows(
    layout: ShardLayout,
    form: RowForm,
    name: str,
    handles_R: Tensor,
    *,
    hashed_as: str | None = None,
) -> RowChunk:
    """Rows in full, on the CPU, ordered by hash. Waits for the device.

    Besides ids and handles, the device holds no more of them than two pieces.

    Args:
        name: of the table.
        handles_R: int32 [R], distinct, of rows of one table.
        hashed_as: the name that salts the hash; None means `name`.
    """
    keys_R = sort_key(hash_ids(hashed_as or name, read_ids(layout, handles_R)))
    return read_rows(layout, form, name, handles_R[keys_R.argsort()])


def read_rows(layout: ShardLayout, form: RowForm, name: str, handles_R: Tensor) -> RowChunk:
    """Rows of these handles, in full and in this order, on the CPU. Waits for the device."""

    def gather(piece: slice) -> Parts:
        own_R = handles_R[piece]
        return *read_values(layout, form, own_R), read_metadata(layout, own_R)

    return gathered_rows(form, name, len(handles_R), gather)


def gathered_rows(
    form: RowForm, name: str, rows: int, gather: Callable[[slice], Parts]
) -> RowChunk:
    """So many rows, in full, on the CPU. Waits for the device.

    gather: weights, state and metadata of a piece, good for the present stream: as `read_values`
        and `read_metadata` give them.
    """
    weights = torch.empty(rows, form.dim, dtype=form.dtype, device="cpu")
    state = torch.empty(rows, form.state_width, dtype=form.real, device="cpu")
    metadata = torch.empty(4, rows, dtype=torch.int64, device="cpu")

    def take(piece: slice, parts: list[HostCopy]) -> None:
        for part in parts:
            part.arrived(wait=True)
        weights[piece], state[piece], metadata[:, piece] = (part.host for part in parts)

    before: tuple[slice, list[HostCopy]] | None = None
    for piece in _pieces(form, rows):
        parts = [copy_to_host(part) for part in gather(piece)]
        if before is not None:
            take(*before)
        before = piece, parts
    if before is not None:
        take(*before)
    ids, versions, last_seen_s, counts = metadata.unbind()
    return RowChunk(name, ids, weights, state, versions, last_seen_s, counts)


def write_rows(layout: ShardLayout, form: RowForm, handles_R: Tensor, chunk: RowChunk) -> None:
    """Put rows in full into rows that have their ids already; version 0 becomes 1.

    Args:
        handles_R: int32 [R] on the device, distinct, in the order of `chunk`, whose tensors are
            checked and on the CPU.
    """
    device = handles_R.device
    for piece in _pieces(form, len(handles_R)):
        own_R = handles_R[piece]
        weights, state = sent(chunk.weights[piece], device), sent(chunk.state[piece], device)
        write_values(layout, form, own_R, weights, state)
        stamps = (chunk.versions.clamp(min=1), chunk.last_seen_s, chunk.counts)
        write_metadata(layout, own_R, *(sent(part[piece], device) for part in stamps))


def _pieces(form: RowForm, rows: int) -> Iterator[slice]:
    step = max(_PIECE_BYTES // (form.weight_bytes + form.state_bytes + 32), 1)
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))
