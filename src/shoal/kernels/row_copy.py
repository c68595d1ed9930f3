"""Whole rows by handle: weights as stored, optimizer state and metadata, out of chunks and in."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from shoal.kernels.launching import launch
from shoal.kernels.row_form import RowForm
from shoal.kernels.row_rounding import row_pointers
from shoal.kernels.row_tiles import blocks_of, power_of_2
from shoal.kernels.table_layout import (
    CHUNK_COUNTS,
    CHUNK_IDS,
    CHUNK_SEEN,
    CHUNK_STATE,
    CHUNK_VERSIONS,
    CHUNK_WEIGHTS,
    ShardLayout,
    row_address,
)

__all__ = [
    "Metadata",
    "read_ids",
    "read_metadata",
    "read_values",
    "write_metadata",
    "write_values",
]

_TILE = 4096  # elements of a program's block
_MOST_COLUMNS = 256
_BLOCK = 256
# Rows move as words of their elements' size: a copy must not change the bits of a NaN.
_WORDS = {2: (torch.int16, tl.int16), 4: (torch.int32, tl.int32), 8: (torch.int64, tl.int64)}

_IDS, _VERSIONS = tl.constexpr(CHUNK_IDS), tl.constexpr(CHUNK_VERSIONS)
_SEEN, _COUNTS = tl.constexpr(CHUNK_SEEN), tl.constexpr(CHUNK_COUNTS)


@dataclass(frozen=True, slots=True)
class Metadata:
    """int64 [R] each; what is None is not written."""

    versions: Tensor | None = None
    last_seen_s: Tensor | None = None
    counts: Tensor | None = None


@triton.jit(do_not_specialize=["n", "columns"])  # type: ignore[untyped-decorator]
def _values(  # type: ignore[no-untyped-def]
    handles_ptr,
    dense_ptr,
    chunks_ptr,
    columns,
    n,
    width,
    row_bytes,
    CHUNK_WORD: tl.constexpr,
    ELEMENT: tl.constexpr,
    READ: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    handle = tl.load(handles_ptr + at, mask=at < n, other=-1)
    there = handle >= 0
    address = row_address(chunks_ptr, columns, handle, row_bytes, there, CHUNK_WORD)
    stored = row_pointers(address, column, ELEMENT)
    dense = dense_ptr + at[:, None] * width + column[None, :]
    inside = (column < width)[None, :]
    if READ:
        values = tl.load(stored, mask=there[:, None] & inside, other=0)
        tl.store(dense, values, mask=(at < n)[:, None] & inside)
    else:
        values = tl.load(dense, mask=there[:, None] & inside, other=0)
        tl.store(stored, values, mask=there[:, None] & inside)


@triton.jit  # type: ignore[untyped-decorator]
def _read_word(  # type: ignore[no-untyped-def]
    chunks_ptr, columns, handle, there, out_ptr, at, live, WORD: tl.constexpr
):
    address = row_address(chunks_ptr, columns, handle, 4, there, WORD)
    value = tl.load(address.to(tl.pointer_type(tl.uint32)), mask=there, other=0)
    tl.store(out_ptr + at, value.to(tl.int64), mask=live)


@triton.jit  # type: ignore[untyped-decorator]
def _write_word(  # type: ignore[no-untyped-def]
    chunks_ptr, columns, handle, there, source_ptr, at, WORD: tl.constexpr
):
    address = row_address(chunks_ptr, columns, handle, 4, there, WORD)
    value = tl.load(source_ptr + at, mask=there, other=0)
    tl.store(address.to(tl.pointer_type(tl.int32)), value.to(tl.int32), mask=there)


@triton.jit(do_not_specialize=["n", "columns"])  # type: ignore[untyped-decorator]
def _read_metadata(  # type: ignore[no-untyped-def]
    handles_ptr, out_ptr, chunks_ptr, columns, n, IDS_ONLY: tl.constexpr, BLOCK: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = at < n
    handle = tl.load(handles_ptr + at, mask=live, other=-1)
    there = handle >= 0
    address = row_address(chunks_ptr, columns, handle, 8, there, _IDS)
    ids = tl.load(address.to(tl.pointer_type(tl.int64)), mask=there, other=0)
    tl.store(out_ptr + at, ids, mask=live)
    if not IDS_ONLY:
        size = at * 0 + n
        _read_word(chunks_ptr, columns, handle, there, out_ptr, at + size, live, _VERSIONS)
        _read_word(chunks_ptr, columns, handle, there, out_ptr, at + 2 * size, live, _SEEN)
        _read_word(chunks_ptr, columns, handle, there, out_ptr, at + 3 * size, live, _COUNTS)


@triton.jit(do_not_specialize=["n", "columns"])  # type: ignore[untyped-decorator]
def _write_metadata(  # type: ignore[no-untyped-def]
    handles_ptr,
    versions_ptr,
    seen_ptr,
    counts_ptr,
    chunks_ptr,
    columns,
    n,
    HAS_VERSIONS: tl.constexpr,
    HAS_SEEN: tl.constexpr,
    HAS_COUNTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    handle = tl.load(handles_ptr + at, mask=at < n, other=-1)
    there = handle >= 0
    if HAS_VERSIONS:
        _write_word(chunks_ptr, columns, handle, there, versions_ptr, at, _VERSIONS)
    if HAS_SEEN:
        _write_word(chunks_ptr, columns, handle, there, seen_ptr, at, _SEEN)
    if HAS_COUNTS:
        _write_word(chunks_ptr, columns, handle, there, counts_ptr, at, _COUNTS)


def _copy(
    layout: ShardLayout, handles_R: Tensor, dense: Tensor, row_bytes: int, word: int, *, read: bool
) -> None:
    rows, width = dense.shape
    if rows == 0 or width == 0:
        return
    torch_word, element = _WORDS[dense.element_size()]
    block = min(power_of_2(width), _MOST_COLUMNS)
    tile_rows = max(_TILE // block, 1)
    launch(
        _values,
        (blocks_of(rows, tile_rows), blocks_of(width, block)),
        handles_R,
        dense.view(torch_word),
        layout.chunks_WC,
        layout.chunks_WC.shape[1],
        rows,
        width,
        row_bytes,
        CHUNK_WORD=word,
        ELEMENT=element,
        READ=read,
        ROWS=tile_rows,
        BLOCK=block,
    )


def read_values(layout: ShardLayout, form: RowForm, handles_R: Tensor) -> tuple[Tensor, Tensor]:
    """Weights [R, D] as stored and state [R, S] of rows of one form; zeros for handle -1."""
    rows, device = len(handles_R), handles_R.device
    weights = torch.empty(rows, form.dim, dtype=form.dtype, device=device)
    state = torch.empty(rows, form.state_width, dtype=form.real, device=device)
    _copy(layout, handles_R, weights, form.weight_bytes, CHUNK_WEIGHTS, read=True)
    _copy(layout, handles_R, state, form.state_bytes, CHUNK_STATE, read=True)
    return weights, state


def write_values(
    layout: ShardLayout, form: RowForm, handles_R: Tensor, weights: Tensor, state: Tensor
) -> None:
    """Put weights [R, D] as stored and state [R, S] into distinct rows; -1 is passed over."""
    _copy(layout, handles_R, weights.contiguous(), form.weight_bytes, CHUNK_WEIGHTS, read=False)
    _copy(layout, handles_R, state.contiguous(), form.state_bytes, CHUNK_STATE, read=False)


def read_metadata(layout: ShardLayout, handles_R: Tensor) -> Tensor:
    """int64 [4, R]: ids, versions, last-seen seconds, counts; zeros for handle -1."""
    return _metadata(layout, handles_R, words=4)


def read_ids(layout: ShardLayout, handles_R: Tensor) -> Tensor:
    """Ids int64 [R]; zeros for handle -1."""
    return _metadata(layout, handles_R, words=1)[0]


def _metadata(layout: ShardLayout, handles_R: Tensor, *, words: int) -> Tensor:
    rows = len(handles_R)
    out_WR = torch.empty(words, rows, dtype=torch.int64, device=handles_R.device)
    if rows:
        launch(
            _read_metadata,
            (blocks_of(rows, _BLOCK),),
            handles_R,
            out_WR,
            layout.chunks_WC,
            layout.chunks_WC.shape[1],
            rows,
            IDS_ONLY=words == 1,
            BLOCK=_BLOCK,
        )
    return out_WR


def write_metadata(layout: ShardLayout, handles_R: Tensor, metadata: Metadata) -> None:
    """Put metadata into rows; rows that come twice must get the same. -1 is passed over."""
    rows, unused = len(handles_R), handles_R
    parts = (metadata.versions, metadata.last_seen_s, metadata.counts)
    if rows == 0 or all(part is None for part in parts):
        return
    launch(
        _write_metadata,
        (blocks_of(rows, _BLOCK),),
        handles_R,
        *(unused if part is None else part for part in parts),
        layout.chunks_WC,
        layout.chunks_WC.shape[1],
        rows,
        HAS_VERSIONS=parts[0] is not None,
        HAS_SEEN=parts[1] is not None,
        HAS_COUNTS=parts[2] is not None,
        BLOCK=_BLOCK,
    )
