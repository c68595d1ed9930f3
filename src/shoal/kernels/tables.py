"""How a GPU shard's tables and their rows lie in device memory, and how kernels find them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from shoal.rules.compressors import Compressor
from shoal.rules.initializers import Initializer
from shoal.rules.optimizers import Optimizer

CHUNK_BITS = 14
CHUNK_ROWS = 1 << CHUNK_BITS
FIRST_BITS = 8
FIRST_ROWS = 1 << FIRST_BITS

BUCKET_SLOTS = 8
BUCKET_BYTES = 96
EMPTY_KEY = -(1 << 63)
ERASED_KEY = EMPTY_KEY + 1
SIDE_KEY = 0

TABLE_WORDS = 16
TABLE_ENTRIES, TABLE_MASK, TABLE_SALT, TABLE_SEED = 0, 1, 2, 3
TABLE_DIRECTORY = 4  # int32 chunk numbers of the table, in the order of their sequence numbers
TABLE_FREE = 5  # int32 handles, a stack
TABLE_WEIGHT_BYTES, TABLE_STATE_BYTES = 6, 7
TABLE_FORM = 8  # index of the table's row form
TABLE_FIRST_COLUMN = 9  # of the row that random words are counted in, where this row starts

COUNT_WORDS = 16
COUNT_ISSUED, COUNT_FREE, COUNT_FRESH = 0, 1, 2
COUNT_READY = 3  # ISSUED as it was when rows were last given their initial values
COUNT_ERASED = 4  # slots that hold the erased marker
COUNT_INSERTED = 5  # rows ever inserted, but for ISSUED
COUNT_REFUSED, COUNT_EVICTED, COUNT_NONFINITE = 6, 7, 8
COUNT_ALARMED = 9  # of NONFINITE, what was counted under nan_policy="raise"

CHUNK_WORDS = 8
CHUNK_WEIGHTS, CHUNK_STATE = 0, 1
CHUNK_IDS, CHUNK_VERSIONS, CHUNK_SEEN, CHUNK_COUNTS = 2, 3, 4, 5  # int64, then uint32 each
CHUNK_TABLE, CHUNK_CAPACITY = 6, 7

# The same for kernels, which read no other globals.
EMPTY, ERASED = tl.constexpr(EMPTY_KEY), tl.constexpr(ERASED_KEY)
TABLE_LINE, COUNT_LINE = tl.constexpr(TABLE_WORDS), tl.constexpr(COUNT_WORDS)
ENTRIES_AT, MASK_AT, SALT_AT, SEED_AT, DIRECTORY_AT = map(tl.constexpr, range(5))
FREE_LIST_AT, WEIGHT_BYTES_AT, STATE_BYTES_AT, FORM_AT, FIRST_COLUMN_AT = map(
    tl.constexpr, range(5, 10)
)
ISSUED_AT, FREE_AT, FRESH_AT, READY_AT, ERASED_AT = map(tl.constexpr, range(5))
INSERTED_AT, REFUSED_AT, EVICTED_AT, NONFINITE_AT, ALARMED_AT = map(tl.constexpr, range(5, 10))
WEIGHTS_AT, STATE_AT, IDS_AT, VERSIONS_AT, SEEN_AT, COUNTS_AT, TABLE_AT = map(
    tl.constexpr, range(7)
)

_CHUNK_BITS = tl.constexpr(CHUNK_BITS)
_CHUNK_ROWS = tl.constexpr(CHUNK_ROWS)
_PLACES = tl.constexpr(CHUNK_ROWS - 1)
_FIRST_BITS = tl.constexpr(FIRST_BITS)
_FIRST_ROWS = tl.constexpr(FIRST_ROWS)
_FULL = tl.constexpr(CHUNK_BITS - FIRST_BITS - 1)  # chunks before the first full one, less one


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """The three arrays through which kernels see a shard; int64, contiguous, on its device.

    tables_KT: [K, TABLE_WORDS]; counters_KC: [K, COUNT_WORDS]; chunks_WC: [CHUNK_WORDS, C], C
    columns of which those of present chunks are filled. chunks: chunks_WC and C, as kernels take
    them.
    """

    tables_KT: Tensor
    counters_KC: Tensor
    chunks_WC: Tensor
    chunks: tuple[Tensor, int] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "chunks", (self.chunks_WC, self.chunks_WC.shape[1]))


class CallGroups(NamedTuple):
    """The ids of one call on the device.

    ids_N: int64 [N]; splits_G1: int64 [G+1]; tables_G: int32 [G].
    """

    ids_N: Tensor
    splits_G1: Tensor
    tables_G: Tensor


def tables_of(layout: ShardLayout, handles_N: Tensor) -> Tensor:
    """Table of each handle's row, int64 [N]; any for -1."""
    chunks_N = handles_N.clamp(min=0) >> CHUNK_BITS
    return layout.chunks_WC[CHUNK_TABLE].index_select(0, chunks_N)


def search_steps(groups: int) -> int:
    """Steps that `group_of` needs for G groups."""
    return max(groups - 1, 0).bit_length()


@triton.jit
def mix64(word):  # type: ignore[no-untyped-def]
    """`shoal.ids.mix64` of int64 words."""
    word = (word ^ ((word >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    word = (word ^ ((word >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return word ^ ((word >> 31) & 0x1FFFFFFFF)


@triton.jit  # type: ignore[untyped-decorator]
def group_of(splits_ptr, groups, at, live, STEPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Group of each position: the last one that starts at or before it."""
    group = at * 0
    for step in tl.static_range(STEPS):
        further = group + (1 << (STEPS - 1 - step))
        start = tl.load(splits_ptr + further, mask=live & (further < groups), other=0)
        group = tl.where((further < groups) & (start <= at), further, group)
    return group


@triton.jit  # type: ignore[untyped-decorator]
def table_word(tables_ptr, table, live, WORD: tl.constexpr):  # type: ignore[no-untyped-def]
    """A word of each lane's table."""
    return tl.load(tables_ptr + table.to(tl.int64) * TABLE_LINE + WORD, mask=live, other=0)


@triton.jit  # type: ignore[untyped-decorator]
def chunk_word(chunks_ptr, columns, handle, live, WORD: tl.constexpr):  # type: ignore[no-untyped-def]
    """A word of the chunk of each handle; `columns` is C, the width of `chunks_WC`."""
    chunk = (handle >> _CHUNK_BITS).to(tl.int64)
    return tl.load(chunks_ptr + WORD * columns + chunk, mask=live, other=0)


@triton.jit  # type: ignore[untyped-decorator]
def row_address(chunks_ptr, columns, handle, row_bytes, live, WORD: tl.constexpr):  # type: ignore[no-untyped-def]
    """Byte address of each handle's row in one of its chunk's arrays; 0 + x for dead lanes."""
    place = (handle & _PLACES).to(tl.int64)
    return chunk_word(chunks_ptr, columns, handle, live, WORD) + place * row_bytes


@triton.jit
def id_of(chunks_ptr, columns, handle, live):  # type: ignore[no-untyped-def]
    address = row_address(chunks_ptr, columns, handle, 8, live, IDS_AT)
    return tl.load(address.to(tl.pointer_type(tl.int64)), mask=live, other=0)


@triton.jit  # type: ignore[untyped-decorator]
def uint32_ptr(chunks_ptr, columns, handle, live, WORD: tl.constexpr):  # type: ignore[no-untyped-def]
    """Pointer to a uint32 of each row, in the array of its chunk that WORD leads to."""
    address = row_address(chunks_ptr, columns, handle, 4, live, WORD)
    return address.to(tl.pointer_type(tl.uint32))


@triton.jit  # type: ignore[untyped-decorator]
def uint32_of(chunks_ptr, columns, handle, live, WORD: tl.constexpr):  # type: ignore[no-untyped-def]
    """A uint32 of each row, as int64."""
    pointer = uint32_ptr(chunks_ptr, columns, handle, live, WORD)
    return tl.load(pointer, mask=live, other=0).to(tl.int64)


@triton.jit  # type: ignore[untyped-decorator]
def set_uint32(chunks_ptr, columns, handle, live, value, WORD: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store a uint32 of each row: the low bits of an integer, one for all or one a row."""
    pointer = uint32_ptr(chunks_ptr, columns, handle, live, WORD)
    tl.store(pointer, (handle.to(tl.int64) * 0 + value).to(tl.uint32), mask=live)


@triton.jit  # type: ignore[untyped-decorator]
def payload_of(payloads_ptr, handle, live, CACHED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Handles that lead to rows' weights and state: a cache's where it holds the row."""
    payload = handle
    if CACHED:
        cached = tl.load(payloads_ptr + handle, mask=live, other=-1)
        payload = tl.where(cached >= 0, cached, handle)
    return payload


@triton.jit
def handle_of(directory, sequence, live):  # type: ignore[no-untyped-def]
    """Handle of each fresh row; `directory` is the table's word of that name."""
    shifted = sequence.to(tl.int64) + _FIRST_ROWS
    small = shifted < _CHUNK_ROWS
    bits = tl.where(small, shifted, 1).to(tl.float32).to(tl.int32, bitcast=True)
    order = ((bits >> 23) - 127).to(tl.int64)
    chunk = tl.where(small, order - _FIRST_BITS, _FULL + (shifted >> _CHUNK_BITS))
    place = tl.where(
        small,
        shifted - (tl.full(order.shape, 1, tl.int64) << order),
        shifted & _PLACES,
    )
    chunks = directory.to(tl.pointer_type(tl.int32))
    number = tl.load(chunks + chunk, mask=live, other=0)
    return (number << _CHUNK_BITS) | place.to(tl.int32)


@triton.jit
def issued_handle(tables_ptr, counters_ptr, table, issue, live):  # type: ignore[no-untyped-def]
    """Handle of the row that a table hands out at each count of `COUNT_ISSUED`."""
    counts = counters_ptr + table.to(tl.int64) * COUNT_LINE
    free = tl.load(counts + FREE_AT, mask=live, other=0)
    fresh = tl.load(counts + FRESH_AT, mask=live, other=0)
    freed = live & (issue < free)
    stack = table_word(tables_ptr, table, live, FREE_LIST_AT).to(tl.pointer_type(tl.int32))
    reused = tl.load(stack + free - 1 - issue, mask=freed, other=0)
    directory = table_word(tables_ptr, table, live, DIRECTORY_AT)
    taken = handle_of(directory, fresh + issue - free, live & (issue >= free))
    return tl.where(freed, reused, taken)


@dataclass(frozen=True, slots=True)
class SegmentForm:
    """Columns [column, column + dim) of a row and [state_column, + state_width) of its state.

    `rate` is the segment's place among its table's learning rates. Rules that differ in `lr`
    alone are equal here: rates come with each step.
    """

    column: int
    dim: int
    state_column: int
    state_width: int
    rate: int
    initializer: Initializer
    optimizer: Optimizer
    compressor: Compressor


@dataclass(frozen=True, slots=True)
class RowForm:
    """Row dim D, optimizer-state width S, storage dtype, segments from left to right.

    shift: the tables' first column modulo 4, 0..3: where their rows start in a block of random
    words.
    """

    dim: int
    state_width: int
    dtype: torch.dtype
    segments: tuple[SegmentForm, ...]
    shift: int = 0

    @property
    def real(self) -> torch.dtype:
        """Dtype of arithmetic, optimizer state and gradients: float32, float64 for float64 rows."""
        return torch.float64 if self.dtype is torch.float64 else torch.float32

    @property
    def weight_bytes(self) -> int:
        """Bytes from one row's weights to the next's, a multiple of 16."""
        return _padded(self.dim * self.dtype.itemsize)

    @property
    def state_bytes(self) -> int:
        """Bytes from one row's state to the next's, a multiple of 16; 0 without state."""
        return _padded(self.state_width * self.real.itemsize)


def _padded(size: int) -> int:
    return (size + 15) // 16 * 16
