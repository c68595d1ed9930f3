"""Rows of a cut, told from others by stamps, and copied by the launch before one that changes them.

At a cut every row of it gets a stamp, its version, in arrays of their own that lie like the chunks'
arrays of versions: `stamped_WC` is `chunks_WC` as it was then, with addresses of stamps in their
place, so that whatever reads versions by it reads stamps. A stamp of 0 says that the row is not of
the cut, or has been copied: whoever changes a row takes its stamp first, by an exchange, so that
each is copied once however often its handle comes.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from shoal.kernels.launching import launch
from shoal.kernels.row_changes import SPAN_ROWS, SPAN_WORDS
from shoal.kernels.row_scan import directory_of, id_of, uint32_of
from shoal.kernels.row_tiles import blocks_of
from shoal.kernels.table_layout import (
    CHUNK_BITS,
    CHUNK_COUNTS,
    CHUNK_SEEN,
    CHUNK_STATE,
    CHUNK_TABLE,
    CHUNK_VERSIONS,
    CHUNK_WEIGHTS,
    TABLE_STATE_BYTES,
    TABLE_WEIGHT_BYTES,
    ShardLayout,
    chunk_word,
    handle_of,
    row_address,
    table_word,
)

__all__ = [
    "HEAD_WORDS",
    "IMAGE_CURSORS",
    "IMAGE_VERSION",
    "keep_rows",
    "stamp_rows",
    "still_stamped",
]

HEAD_WORDS = 4  # of a record: id; last seen and count; version; handle. Weights and state follow.
IMAGE_VERSION = 2
IMAGE_CURSORS = 2  # words before the places of records: how many records, how many words of them

_ROWS, _WARPS = 128, 4  # a thread a row: each takes one stamp
_BLOCK = 8  # words of a row that a program copies at a time
_STILL_BLOCK = 256

_HEAD = tl.constexpr(HEAD_WORDS)
_SPAN_WORDS = tl.constexpr(SPAN_WORDS)
_BITS = tl.constexpr(CHUNK_BITS)
_WEIGHTS, _STATE = tl.constexpr(CHUNK_WEIGHTS), tl.constexpr(CHUNK_STATE)
_VERSIONS, _TABLE = tl.constexpr(CHUNK_VERSIONS), tl.constexpr(CHUNK_TABLE)
_SEEN, _COUNTS = tl.constexpr(CHUNK_SEEN), tl.constexpr(CHUNK_COUNTS)
_WEIGHT_BYTES, _STATE_BYTES = tl.constexpr(TABLE_WEIGHT_BYTES), tl.constexpr(TABLE_STATE_BYTES)


@triton.jit(do_not_specialize=["columns", "stamped", "from_epoch", "to_epoch"])  # type: ignore[untyped-decorator]
def _stamp(  # type: ignore[no-untyped-def]
    tables_ptr,
    chunks_ptr,
    columns,
    stamped_ptr,
    stamped,
    spans_ptr,
    from_epoch,
    to_epoch,
    BLOCK: tl.constexpr,
):
    words = spans_ptr + tl.program_id(0).to(tl.int64) * _SPAN_WORDS
    at = tl.load(words + 1) + tl.arange(0, BLOCK)
    live = at < tl.load(words + 2)
    handle = handle_of(directory_of(tables_ptr, tl.load(words)), at, live)
    version = uint32_of(chunks_ptr, columns, handle, live, _VERSIONS)
    live = live & (version > from_epoch) & (version <= to_epoch)
    stamp = row_address(stamped_ptr, stamped, handle, 4, live, _VERSIONS)
    tl.store(stamp.to(tl.pointer_type(tl.int32)), version.to(tl.int32), mask=live)


@triton.jit(do_not_specialize=["stamped", "chunks", "n"])  # type: ignore[untyped-decorator]
def _still(handles_ptr, stamped_ptr, stamped, chunks, out_ptr, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    handle = tl.load(handles_ptr + at, mask=at < n, other=-1)
    live = (handle >= 0) & ((handle >> _BITS) < chunks)
    stamp = uint32_of(stamped_ptr, stamped, handle, live, _VERSIONS)
    tl.store(out_ptr + at, tl.where(live & (stamp != 0), handle, -1), mask=at < n)


@triton.jit(do_not_specialize=["columns", "stamped", "chunks", "first", "n", "room"])  # type: ignore[untyped-decorator]
def _keep(  # type: ignore[no-untyped-def]
    handles_ptr,
    size_ptr,
    payloads_ptr,
    tables_ptr,
    chunks_ptr,
    columns,
    stamped_ptr,
    stamped,
    chunks,
    out_ptr,
    first,
    n,
    room,
    HAS_SIZE: tl.constexpr,
    CACHED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`out`: two cursors, `room` places, then records; see `keep_rows`."""
    at = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = at < n
    at += first
    if HAS_SIZE:
        live = live & (at < tl.load(size_ptr))
    handle = tl.load(handles_ptr + at, mask=live, other=-1)
    live = live & (handle >= 0) & ((handle >> _BITS) < chunks)
    address = row_address(stamped_ptr, stamped, handle, 4, live, _VERSIONS)
    stamps = address.to(tl.pointer_type(tl.int32))
    live = live & (tl.load(stamps, mask=live, other=0) != 0)
    if tl.max(live.to(tl.int32), axis=0) > 0:
        stamp = tl.atomic_xchg(stamps, handle * 0, mask=live, sem="relaxed")
        kept = live & (stamp != 0)
        table = chunk_word(chunks_ptr, columns, handle, kept, _TABLE)
        weight_bytes = table_word(tables_ptr, table, kept, _WEIGHT_BYTES)
        state_bytes = table_word(tables_ptr, table, kept, _STATE_BYTES)
        words = tl.where(kept, (weight_bytes + state_bytes) >> 3, 0)
        sizes = tl.where(kept, words + _HEAD, 0)
        ones = kept.to(tl.int32)
        rank = tl.atomic_add(out_ptr, tl.sum(ones, axis=0).to(tl.int64), sem="relaxed")
        place = tl.atomic_add(out_ptr + 1, tl.sum(sizes, axis=0), sem="relaxed")
        rank += tl.cumsum(ones, axis=0) - 1
        place += tl.cumsum(sizes, axis=0) - sizes
        tl.store(out_ptr + 2 + rank, (table << 32) | place, mask=kept)
        record = out_ptr + 2 + room + place
        seen = uint32_of(chunks_ptr, columns, handle, kept, _SEEN)
        count = uint32_of(chunks_ptr, columns, handle, kept, _COUNTS)
        tl.store(record, id_of(chunks_ptr, columns, handle, kept), mask=kept)
        tl.store(record + 1, (count << 32) | seen, mask=kept)
        version = stamp.to(tl.uint32, bitcast=True)
        tl.store(record + 2, version.to(tl.int64), mask=kept)
        tl.store(record + 3, handle.to(tl.int64), mask=kept)
        payload = handle
        if CACHED:
            slot = tl.load(payloads_ptr + handle.to(tl.int64), mask=kept, other=-1)
            payload = tl.where(slot >= 0, slot, handle)
        weights = row_address(chunks_ptr, columns, payload, weight_bytes, kept, _WEIGHTS)
        state = row_address(chunks_ptr, columns, payload, state_bytes, kept, _STATE) - weight_bytes
        for start in range(0, tl.max(words, axis=0).to(tl.int32), BLOCK):
            column = (start + tl.arange(0, BLOCK)).to(tl.int64)[None, :]
            inside = kept[:, None] & (column < words[:, None])
            of_weights = 8 * column < weight_bytes[:, None]
            source = tl.where(of_weights, weights[:, None], state[:, None]) + 8 * column
            value = tl.load(source.to(tl.pointer_type(tl.int64)), mask=inside, other=0)
            tl.store(record[:, None] + _HEAD + column, value, mask=inside)


def stamp_rows(
    layout: ShardLayout, stamped_WC: Tensor, spans_BW: Tensor, from_epoch: int, to_epoch: int
) -> None:
    """Stamp rows with `from_epoch < version <= to_epoch`; others' stamps stay. One launch.

    Args:
        stamped_WC: int64 [CHUNK_WORDS, C], see above; stamps are 0 before.
        spans_BW: as `row_changes.count_changed` takes them.
    """
    if len(spans_BW) == 0:
        return
    launch(
        _stamp,
        (len(spans_BW),),
        layout.tables_KT,
        layout.chunks_WC,
        layout.chunks_WC.shape[1],
        stamped_WC,
        stamped_WC.shape[1],
        spans_BW,
        from_epoch,
        to_epoch,
        BLOCK=SPAN_ROWS,
    )


def still_stamped(stamped_WC: Tensor, chunks: int, handles_R: Tensor) -> Tensor:
    """Handles int32 [R] of rows that lie as they did at the cut; -1 for others. One launch.

    chunks: that `stamped_WC` tells of.
    """
    n = handles_R.numel()
    out_R = torch.empty_like(handles_R)
    if n:
        launch(
            _still,
            (blocks_of(n, _STILL_BLOCK),),
            handles_R,
            stamped_WC,
            stamped_WC.shape[1],
            chunks,
            out_R,
            n,
            BLOCK=_STILL_BLOCK,
        )
    return out_R


def keep_rows(
    layout: ShardLayout,
    stamped_WC: Tensor,
    chunks: int,
    handles_M: Tensor,
    rows: slice,
    room: int,
    out_L: Tensor,
    *,
    size_1: Tensor | None = None,
    payload_H: Tensor | None = None,
) -> None:
    """Copy whole rows that bear a stamp, and take it from them. One launch.

    Args:
        chunks: that `stamped_WC` tells of; rows of later ones are not of the cut.
        handles_M: int32 [M], of any tables; -1 is passed over, and any may come twice.
        rows: the part of them to look at.
        room: records that `out_L` has room for.
        out_L: int64: two cursors, 0 before; `room` places, table << 32 | word; then the records,
            which start at those words from here on: HEAD_WORDS, weights and state as stored.
        size_1: int32 [1], how many of the handles count; None: all.
        payload_H: int32 by handle, a row's handle in a cache, or -1 where it has none.
    """
    n = rows.stop - rows.start
    if n <= 0:
        return
    launch(
        _keep,
        (blocks_of(n, _ROWS),),
        handles_M,
        handles_M if size_1 is None else size_1,
        handles_M if payload_H is None else payload_H,
        layout.tables_KT,
        layout.chunks_WC,
        layout.chunks_WC.shape[1],
        stamped_WC,
        stamped_WC.shape[1],
        chunks,
        out_L,
        rows.start,
        n,
        room,
        HAS_SIZE=size_1 is not None,
        CACHED=payload_H is not None,
        ROWS=_ROWS,
        BLOCK=_BLOCK,
        num_warps=_WARPS,
    )
