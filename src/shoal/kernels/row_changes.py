"""Rows of device tables whose version lies in a span of epochs, and a log of rows that go.

A scan reads the versions of all rows that a table has handed out, 4 bytes a row as they lie, twice:
it counts those of each block, and lists them in order once the host knows how many there are.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from shoal.kernels.launching import launch
from shoal.kernels.row_scan import directory_of, id_of, uint32_of
from shoal.kernels.row_tiles import blocks_of
from shoal.kernels.table_layout import (
    CHUNK_TABLE,
    CHUNK_VERSIONS,
    ShardLayout,
    chunk_word,
    handle_of,
)

__all__ = ["LOG_WORDS", "SPAN_ROWS", "SPAN_WORDS", "count_changed", "list_changed", "log_deleted"]

SPAN_ROWS = 1024  # that one program looks at
SPAN_WORDS = 3  # of a span: table, first sequence number, the one after its last
LOG_WORDS = 2  # of a record: id, and table << 32 | epoch

_LOG_BLOCK = 256

_SPAN_WORDS, _LOG_WORDS = tl.constexpr(SPAN_WORDS), tl.constexpr(LOG_WORDS)
_VERSIONS, _TABLE = tl.constexpr(CHUNK_VERSIONS), tl.constexpr(CHUNK_TABLE)


@triton.jit(do_not_specialize=["columns", "from_epoch", "to_epoch", "room"])  # type: ignore[untyped-decorator]
def _changed(  # type: ignore[no-untyped-def]
    tables_ptr,
    chunks_ptr,
    columns,
    spans_ptr,
    ends_ptr,
    out_ptr,
    last_ptr,
    from_epoch,
    to_epoch,
    room,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    span = tl.program_id(0).to(tl.int64)
    words = spans_ptr + span * _SPAN_WORDS
    # Blocks without a row to list are over at once.
    count = 1
    end = tl.full((), 0, tl.int64)
    if not COUNT:
        end = tl.load(ends_ptr + span)
        count = (end - tl.load(ends_ptr + span - 1, mask=span > 0, other=0)).to(tl.int32)
    if count > 0:
        at = tl.load(words + 1) + tl.arange(0, BLOCK)
        live = at < tl.load(words + 2)
        handle = handle_of(directory_of(tables_ptr, tl.load(words)), at, live)
        version = uint32_of(chunks_ptr, columns, handle, live, _VERSIONS)
        live = live & (version > from_epoch) & (version <= to_epoch)
        found = tl.sum(live.to(tl.int32), axis=0)
        if COUNT:
            tl.store(ends_ptr + span, found.to(tl.int64))
        else:
            rank = end - found + tl.cumsum(live.to(tl.int32), axis=0) - 1
            live = live & (rank < room)
            tl.store(out_ptr + rank, handle, mask=live)
            tl.store(last_ptr + at * 0, at, mask=live & (rank == room - 1))


@triton.jit(do_not_specialize=["n", "columns", "room", "epoch"])  # type: ignore[untyped-decorator]
def _log(  # type: ignore[no-untyped-def]
    handles_ptr,
    size_ptr,
    chunks_ptr,
    columns,
    log_ptr,
    n,
    room,
    epoch,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = (at < n) & (at < tl.load(size_ptr))
    handle = tl.load(handles_ptr + at, mask=live, other=-1)
    live = live & (handle >= 0)
    count = tl.sum(live.to(tl.int32), axis=0)
    if count > 0:
        first = tl.atomic_add(log_ptr, count.to(tl.int64), sem="relaxed")
        place = first + tl.cumsum(live.to(tl.int32), axis=0) - 1
        live = live & (place < room)
        table = chunk_word(chunks_ptr, columns, handle, live, _TABLE)
        record = log_ptr + 1 + place * _LOG_WORDS
        tl.store(record, id_of(chunks_ptr, columns, handle, live), mask=live)
        tl.store(record + 1, (table << 32) | epoch, mask=live)


def count_changed(layout: ShardLayout, spans_BW: Tensor, from_epoch: int, to_epoch: int) -> Tensor:
    """Rows with `from_epoch < version <= to_epoch` up to the end of each span: int64 [B].

    spans_BW: int64 [B, SPAN_WORDS] on the device, of SPAN_ROWS rows at most, all handed out.
    """
    counts_B = torch.empty(len(spans_BW), dtype=torch.int64, device=spans_BW.device)
    if len(spans_BW):
        _scan(layout, spans_BW, counts_B, counts_B, counts_B, (from_epoch, to_epoch, 0), True)
    return counts_B.cumsum(0)


def list_changed(
    layout: ShardLayout,
    spans_BW: Tensor,
    ends_B: Tensor,
    from_epoch: int,
    to_epoch: int,
    room: int,
) -> tuple[Tensor, Tensor]:
    """Handles int32 [room] of the first `room` of these rows in the order of their numbers.

    Args:
        spans_BW, ends_B: what `count_changed` was given, and gave.
        room: 1 or more.

    Returns:
        the handles, -1 behind the last; and, if there are `room` rows or more, the sequence number
        of the last one, int64 [1].
    """
    out_R = torch.full((room,), -1, dtype=torch.int32, device=spans_BW.device)
    last_1 = torch.empty(1, dtype=torch.int64, device=spans_BW.device)
    _scan(layout, spans_BW, ends_B, out_R, last_1, (from_epoch, to_epoch, room), False)
    return out_R, last_1


def _scan(
    layout: ShardLayout,
    spans_BW: Tensor,
    ends_B: Tensor,
    out_R: Tensor,
    last_1: Tensor,
    numbers: tuple[int, int, int],
    counting: bool,
) -> None:
    launch(
        _changed,
        (len(spans_BW),),
        layout.tables_KT,
        layout.chunks_WC,
        layout.chunks_WC.shape[1],
        spans_BW,
        ends_B,
        out_R,
        last_1,
        *numbers,
        COUNT=counting,
        BLOCK=SPAN_ROWS,
    )


def log_deleted(
    layout: ShardLayout, handles_M: Tensor, size_1: Tensor, log_L: Tensor, epoch: int
) -> None:
    """Append (id, table, epoch) of rows that are about to be erased. One launch.

    Args:
        handles_M, size_1: as `table_erase.erase` takes them.
        log_L: int64 [1 + LOG_WORDS * room]: how many records there are, then the records. Those
            without room are counted and left out.
    """
    n = handles_M.numel()
    if n == 0:
        return
    launch(
        _log,
        (blocks_of(n, _LOG_BLOCK),),
        handles_M,
        size_1,
        layout.chunks_WC,
        layout.chunks_WC.shape[1],
        log_L,
        n,
        (log_L.numel() - 1) // LOG_WORDS,
        epoch,
        BLOCK=_LOG_BLOCK,
    )
