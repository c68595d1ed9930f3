"""How a GPU shard's tables lie in device memory, and how kernels find their way in it.

Everything a kernel needs to know about a shard is in three int64 arrays (`ShardLayout`):

- `tables_KT`, one line of `TABLE_*` words a table: where its index and its lists are;
- `counters_KC`, one line of `COUNT_*` words a table: what kernels count;
- `chunks_WC`, one column of `CHUNK_*` words a chunk of rows: where its rows are.

**Index.** A bucket is 96 bytes, eight int64 keys and then eight int32 handles; slot s is lane
s & 7 of bucket s >> 3. Slots are a power of two; an id's walk starts at the first slot of the
bucket of slot mix64(id ^ salt) & mask and goes on slot by slot, around the end. One more bucket
stands behind the last: its first two slots belong to the two ids whose values are the markers, so
that all 2^64 ids are legal; taken, they hold the keys `SIDE_KEY` and `SIDE_KEY` + 1.

**Rows.** A handle is int32, chunk << CHUNK_BITS | place, and means one row of the whole shard;
-1 is none. The j-th chunk of a table has room for FIRST_ROWS << j rows until chunks are full
(1 << CHUNK_BITS rows). Chunks never move. A row's weights are at the chunk's weights address
plus place times the table's `TABLE_WEIGHT_BYTES`, and so on; metadata are arrays of their own.

**Row numbers.** A table hands out rows by counting `COUNT_ISSUED` up: the q-th since the last
erase is, for q < `COUNT_FREE`, the free list's entry FREE - 1 - q, else the fresh row of sequence
number `COUNT_FRESH` + q - FREE. So FRESH + ISSUED - FREE rows are in use.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

__all__ = [
    "BUCKET_BYTES",
    "BUCKET_SLOTS",
    "CHUNK_BITS",
    "CHUNK_ROWS",
    "EMPTY_KEY",
    "ERASED_KEY",
    "FIRST_ROWS",
    "SIDE_KEY",
    "CallGroups",
    "ShardLayout",
    "chunk_word",
    "group_of",
    "handle_of",
    "issued_handle",
    "mix64",
    "row_address",
    "search_steps",
    "table_word",
]

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

_CHUNK_BITS = tl.constexpr(CHUNK_BITS)
_CHUNK_ROWS = tl.constexpr(CHUNK_ROWS)
_PLACES = tl.constexpr(CHUNK_ROWS - 1)
_FIRST_BITS = tl.constexpr(FIRST_BITS)
_FIRST_ROWS = tl.constexpr(FIRST_ROWS)
_FULL = tl.constexpr(CHUNK_BITS - FIRST_BITS - 1)  # chunks before the first full one, less one
_TABLE_WORDS = tl.constexpr(TABLE_WORDS)
_COUNT_WORDS = tl.constexpr(COUNT_WORDS)
_DIRECTORY = tl.constexpr(TABLE_DIRECTORY)
_FREE_LIST = tl.constexpr(TABLE_FREE)
_FREE = tl.constexpr(COUNT_FREE)
_FRESH = tl.constexpr(COUNT_FRESH)


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """The three arrays through which kernels see a shard; int64, contiguous, on its device.

    tables_KT: [K, TABLE_WORDS]; counters_KC: [K, COUNT_WORDS]; chunks_WC: [CHUNK_WORDS, C], C
    columns of which those of present chunks are filled.
    """

    tables_KT: Tensor
    counters_KC: Tensor
    chunks_WC: Tensor


@dataclass(frozen=True, slots=True)
class CallGroups:
    """The ids of one call on the device.

    ids_N: int64 [N]; splits_G1: int64 [G+1]; tables_G: int32 [G].
    """

    ids_N: Tensor
    splits_G1: Tensor
    tables_G: Tensor


def search_steps(groups: int) -> int:
    """Steps that `group_of` needs for G groups."""
    return max(groups - 1, 0).bit_length()


@triton.jit
def mix64(word):  # type: ignore[no-untyped-def]
    """`shoal.hashing.mix64` of int64 words."""
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
    return tl.load(tables_ptr + table.to(tl.int64) * _TABLE_WORDS + WORD, mask=live, other=0)


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
    counts = counters_ptr + table.to(tl.int64) * _COUNT_WORDS
    free = tl.load(counts + _FREE, mask=live, other=0)
    fresh = tl.load(counts + _FRESH, mask=live, other=0)
    freed = live & (issue < free)
    stack = table_word(tables_ptr, table, live, _FREE_LIST).to(tl.pointer_type(tl.int32))
    reused = tl.load(stack + free - 1 - issue, mask=freed, other=0)
    directory = table_word(tables_ptr, table, live, _DIRECTORY)
    taken = handle_of(directory, fresh + issue - free, live & (issue >= free))
    return tl.where(freed, reused, taken)
