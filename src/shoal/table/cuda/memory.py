"""The memory of a GPU shard: indexes, chunks of rows, and how kernels are led to them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.errors import OutOfDeviceMemory
from shoal.ids import salt, to_signed
from shoal.kernels import index
from shoal.kernels.host_copies import retire, sent, staged
from shoal.kernels.tables import (
    BUCKET_BYTES,
    BUCKET_SLOTS,
    CHUNK_BITS,
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
    COUNT_ERASED,
    COUNT_WORDS,
    FIRST_ROWS,
    TABLE_DIRECTORY,
    TABLE_ENTRIES,
    TABLE_FIRST_COLUMN,
    TABLE_FORM,
    TABLE_FREE,
    TABLE_MASK,
    TABLE_SALT,
    TABLE_SEED,
    TABLE_STATE_BYTES,
    TABLE_WEIGHT_BYTES,
    TABLE_WORDS,
    RowForm,
    ShardLayout,
)
from shoal.table import native
from shoal.table.cuda.calls import ShardTables
from shoal.table.cuda.counters import CounterReader, Counts
from shoal.table.cuda.mapped import RowMemory, row_memory

PIECE_BYTES = 64 << 20
_FIRST_PIECE_BYTES = 1 << 20
_ALIGNED = 512


class PageLocked:
    """Hands out pinned memory; each part lives as long as the tensor that views it.

    torch's allocator rounds pinned sizes up to powers of two, so memory is taken from it in
    pieces of such sizes, growing with what is in use up to PIECE_BYTES, and split here.

    device: where kernels read it; on the CPU, where they are interpreted, any memory will do.
    """

    def __init__(self, device: torch.device) -> None:
        self._pinned = device.type == "cuda"
        self._piece = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._used = 0
        self.bytes_held = 0  # of all pieces ever taken

    def take(self, size: int) -> Tensor:
        """uint8 [size], at a multiple of 512 bytes; contents are whatever was there.

        Raises:
            OutOfDeviceMemory: the system gives no more; nothing has changed.
        """
        if self._used + size > self._piece.numel():
            wanted = min(max(_FIRST_PIECE_BYTES, _power(self.bytes_held + 1) // 2), PIECE_BYTES)
            piece = self._allocated(max(_power(size), wanted))
            self.bytes_held += piece.numel()
            if piece.numel() - size < self._piece.numel() - self._used:
                return piece[:size]  # what the present piece has left is more than this one's
            self._piece, self._used = piece, 0
        start = self._used
        self._used = (start + size + _ALIGNED - 1) // _ALIGNED * _ALIGNED
        return self._piece[start : start + size]

    def _allocated(self, size: int) -> Tensor:
        try:
            return torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned, device="cpu")
        except RuntimeError as error:  # torch.OutOfMemoryError is one, too
            raise OutOfDeviceMemory(
                "pinned host memory for rows",
                got=f"{size} bytes wanted, {self.bytes_held} held, {_reason(error)}",
                allowed="what the system lets a process lock",
                remedy="Free host memory, raise the limit of locked memory (ulimit -l, or the "
                "container's), give the tables a row budget (capacity_rows with "
                "on_full='lru'), or spread them over more processes.",
            ) from error


def grouped(sizes: Sequence[int], row_bytes: int) -> list[list[int]]:
    """Split chunks, given in rows, into runs whose bytes fit a piece: so that little is wasted."""
    groups: list[list[int]] = []
    room = 0
    for rows in sizes:
        if rows * row_bytes > room:
            groups.append([])
            room = PIECE_BYTES
        groups[-1].append(rows)
        room -= rows * row_bytes
    return groups


def _power(size: int) -> int:
    """The least power of two that is no less."""
    return 1 << max(size - 1, 0).bit_length()


def _reason(error: RuntimeError) -> str:
    return str(error).partition("\n")[0] or type(error).__name__


# Of a row: the words of its chunk that lead to them, and their bytes.
_METADATA = ((CHUNK_IDS, 8), (CHUNK_VERSIONS, 4), (CHUNK_SEEN, 4), (CHUNK_COUNTS, 4))
METADATA_BYTES = sum(size for _, size in _METADATA)


@dataclass(frozen=True)
class ChunkBlock:
    """Memory, or addresses only, of several chunks, and what owns it if not a RowMemory.

    parts: each an address, and arrays as `_METADATA` has them. A chunk has its arrays of a part one
    after the other, and chunks follow each other: memory behind the first addresses is enough for
    the first chunks.
    """

    parts: tuple[tuple[int, tuple[tuple[int, int], ...]], ...]
    owned: tuple[Tensor, ...] = ()


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
    form: RowForm, rows: int, device: torch.device, own: RowMemory | None, host: PageLocked | None
) -> ChunkBlock:
    """Allocate chunks of so many rows; contents are whatever was there.

    Args:
        own: has addresses for them, with nothing behind; None: torch's allocator gives memory.
        host: where weights and state come from if not from the device.

    Raises:
        torch.OutOfMemoryError: no room on the device.
        OutOfDeviceMemory: no more pinned host memory.
    """
    weights, state = (CHUNK_WEIGHTS, form.weight_bytes), (CHUNK_STATE, form.state_bytes)
    arrays = weights, state, *_METADATA
    if host is not None:
        parts = [host.take(rows * size) for _, size in (weights, state)]
        parts.append(torch.empty(rows * METADATA_BYTES, dtype=torch.uint8, device=device))
        addresses = [part.data_ptr() for part in parts]
        of_each = ((weights,), (state,), _METADATA)
        return ChunkBlock(tuple(zip(addresses, of_each, strict=True)), tuple(parts))
    size = rows * bytes_of_row(form)
    if own is not None:
        return ChunkBlock(((own.take(size), arrays),))
    made = torch.empty(size, dtype=torch.uint8, device=device)
    return ChunkBlock(((made.data_ptr(), arrays),), (made,))


def chunk_columns(block: ChunkBlock, sizes: Sequence[int], table: int) -> NDArray[np.int64]:
    """The columns of `ShardLayout.chunks_WC` for the chunks of a block."""
    rows_C = np.array(sizes, dtype=np.int64)
    columns = np.zeros((CHUNK_WORDS, len(sizes)), dtype=np.int64)
    for address, arrays in block.parts:
        at_C = address + (np.cumsum(rows_C) - rows_C) * sum(size for _, size in arrays)
        for word, size in arrays:
            columns[word] = at_C
            at_C = at_C + rows_C * size
    columns[CHUNK_TABLE] = table
    columns[CHUNK_CAPACITY] = rows_C
    return columns


_FIRST_SLOTS = 64


class TableMemory:
    """What one table has allocated.

    Attributes:
        chunks: their numbers. The last ones may be addresses only, of rows to come.
        reach: rows of all chunks.
        ready: how many chunks have memory behind them. rows: that these have room for.
    """

    __slots__ = (
        "chunks",
        "directory",
        "entries",
        "form",
        "free_list",
        "owned",
        "reach",
        "ready",
        "rows",
        "slots",
    )

    def __init__(self, form: RowForm, device: torch.device) -> None:
        self.form = form
        self.slots = _FIRST_SLOTS
        self.entries: Tensor = index.new_entries(_FIRST_SLOTS, device)
        self.directory: Tensor = torch.zeros(1, dtype=torch.int32, device=device)
        self.free_list: Tensor = torch.zeros(1, dtype=torch.int32, device=device)
        self.owned: list[Tensor] = []  # memory of chunks that is not the shard's RowMemory
        self.chunks: list[int] = []
        self.reach = self.ready = self.rows = 0

    @property
    def index_bytes(self) -> int:
        return 8 * self.entries.numel() + 4 * (self.free_list.numel() + self.directory.numel())


@dataclass(frozen=True, slots=True)
class Growth:
    """What a table lacks: sizes of further chunks, and slots of another index or 0; `ready` of its
    chunks have memory then, and `rows` more rows.
    """

    table: int
    form: RowForm
    sizes: tuple[int, ...]
    slots: int
    ready: int
    rows: int

    @property
    def bytes_wanted(self) -> int:
        """Bytes of its rows and its index."""
        buckets = self.slots // BUCKET_SLOTS + 1 if self.slots else 0
        return self.rows * bytes_of_row(self.form) + buckets * BUCKET_BYTES


@dataclass(frozen=True, slots=True)
class AllocatedGrowth:
    """A growth, the number of its first chunk, and what was allocated for it.

    blocks: each with the sizes of its chunks, in their order; directory: a longer one, where the
    table's has no room for them.
    """

    growth: Growth
    first: int
    blocks: tuple[tuple[ChunkBlock, tuple[int, ...]], ...]
    directory: Tensor | None
    entries: Tensor | None


@dataclass(frozen=True, slots=True)
class _News:
    """Lines of all tables and columns of further chunks; the same, and the numbers of these chunks,
    on the device; memory for the columns of all chunks, where there is too little.
    """

    lines_KT: Counts
    columns_WC: Counts
    staged_KT: Tensor
    sent_WC: Tensor
    numbers_C: Tensor
    wider_WC: Tensor | None


def bytes_of_row(form: RowForm) -> int:
    """Bytes that a row takes in its chunk."""
    return form.weight_bytes + form.state_bytes + METADATA_BYTES


def longer_list(handles: Tensor, size: int) -> Tensor:
    """A list of handles with room for `size` of them, and those of a shorter one at its head."""
    longer = torch.zeros(size, dtype=torch.int32, device=handles.device)
    longer[: handles.numel()] = handles
    return longer


# An index may fill to this share of its slots before walks get long; it is rebuilt well before.
_HARD_SHARE = (7, 8)
_SOFT_SHARE = (3, 4)
_FRESH_SHARE = (5, 8)  # of slots, right after a rebuild at most: else the next is soon due again
_NO_LIMIT = 1 << 31
_GROWTH = 16  # a table grows by one such part of its rows at least
_GROWTH_BYTES = 16 << 20  # at most
MOST_CHUNKS = 1 << (31 - CHUNK_BITS)  # a handle is an int32 that is not negative


class DeviceMemory:
    """Everything a GPU shard allocates for its tables.

    Args:
        tables: what the shard hosts, and where.
        seed: of the initial values.
        host_rows: keep weights and state in pinned host memory, which kernels reach through
            the same addresses.

    Attributes:
        layout: what kernels get; replaced when it grows.
        counters: what the host knows of the device's counters.
    """

    def __init__(self, tables: ShardTables, *, seed: int, host_rows: bool = False) -> None:
        device = self.device = tables.device
        specs, forms, form_of = tables.specs, tables.forms, tables.form_of
        self._host = PageLocked(device) if host_rows else None
        self._own = None if host_rows else row_memory(device)
        self._tables = [TableMemory(forms[form], device) for form in form_of]
        limits = [_NO_LIMIT if spec.capacity_rows is None else spec.capacity_rows for spec in specs]
        self._given_K: Counts = np.minimum(np.array(limits, dtype=np.int64), _NO_LIMIT)
        self._limits_K: Counts = self._given_K
        self._lines_KT = np.zeros((len(specs), TABLE_WORDS), dtype=np.int64)
        self._columns_WC: Counts = np.zeros((CHUNK_WORDS, 64), dtype=np.int64)
        self._chunks = 0
        self._room_K: Counts = np.zeros(len(specs), dtype=np.int64)
        for k, spec in enumerate(specs):
            form, line = forms[form_of[k]], self._lines_KT[k]
            line[TABLE_SALT], line[TABLE_SEED] = to_signed(salt(spec.hash_name)), to_signed(seed)
            line[TABLE_WEIGHT_BYTES], line[TABLE_STATE_BYTES] = form.weight_bytes, form.state_bytes
            line[TABLE_FORM], line[TABLE_FIRST_COLUMN] = form_of[k], spec.first_column
        counters_KC = torch.zeros(len(specs), COUNT_WORDS, dtype=torch.int64, device=device)
        self.counters = CounterReader(counters_KC)
        self.layout = ShardLayout(
            torch.empty(self._lines_KT.shape, dtype=torch.int64, device=device),
            counters_KC,
            torch.empty(self._columns_WC.shape, dtype=torch.int64, device=device),
        )
        for k, table in enumerate(self._tables):
            line = self._lines_KT[k]
            line[TABLE_ENTRIES], line[TABLE_MASK] = table.entries.data_ptr(), table.slots - 1
            line[TABLE_DIRECTORY] = table.directory.data_ptr()
            line[TABLE_FREE] = table.free_list.data_ptr()
        self._show(self._lines_KT, _staged(self._lines_KT, device))
        expected_K = np.array([max(spec.expected_rows, 1) for spec in specs], dtype=np.int64)
        self._make_room(expected_K, expected_K)

    @property
    def rows_room_K(self) -> Counts:
        """Rows that each table's chunks have room for."""
        return self._room_K

    @property
    def slots_K(self) -> Counts:
        """Index slots of each table."""
        return self._slots_K

    @property
    def chunks(self) -> int:
        """Chunks of all tables."""
        return self._chunks

    @property
    def columns_WC(self) -> Counts:
        """The columns of all chunks, as in `layout.chunks_WC`."""
        return self._columns_WC[:, : self._chunks]

    @property
    def chunks_ready(self) -> int:
        """Chunks up to the last one of a table that has memory: no row is in a later one."""
        return max((t.chunks[t.ready - 1] + 1 for t in self._tables if t.ready), default=0)

    def overdraw(self, rows_K: Counts) -> None:
        """Let tables hold so many rows beyond their limits for a while, within one method."""
        self._limits_K = np.minimum(np.maximum(self._limits_K, self._given_K + rows_K), _NO_LIMIT)

    def lend(self, columns_WC: Counts) -> int:
        """Add chunks that are no table's rows, a cache's; returns the number of the first.

        Raises:
            OutOfDeviceMemory: handles have no room for so many chunks; nothing has changed.
        """
        more, first = columns_WC.shape[1], self._chunks
        self._check_chunks(more)
        wider_WC = self._wider(more)
        self._append(columns_WC, sent(torch.from_numpy(columns_WC.copy()), self.device), wider_WC)
        return first

    def _wider(self, more: int) -> Tensor | None:
        """Memory for the columns of all chunks and so many more; None where there is room."""
        last, wide = self._chunks + more, self._columns_WC.shape[1]
        if last <= wide:
            return None
        wide = max(2 * wide, _power(last))
        return torch.zeros(CHUNK_WORDS, wide, dtype=torch.int64, device=self.device)

    def _append(self, columns_WC: Counts, sent_WC: Tensor, wider_WC: Tensor | None) -> None:
        """Have kernels see further chunks; allocates nothing on the device.

        Columns that are there stay as they are: another stream may be reading them.
        """
        first, last = self._chunks, self._chunks + columns_WC.shape[1]
        if wider_WC is not None:
            layout, host_WC = self.layout, np.zeros(wider_WC.shape, dtype=np.int64)
            host_WC[:, :first] = self._columns_WC[:, :first]
            wider_WC[:, :first] = layout.chunks_WC[:, :first]
            retire(layout.chunks_WC)
            self._columns_WC = host_WC
            self.layout = ShardLayout(layout.tables_KT, layout.counters_KC, wider_WC)
        self._columns_WC[:, first:last] = columns_WC
        self.layout.chunks_WC[:, first:last] = sent_WC
        self._chunks = last

    def reserve(self, new_K: Counts) -> None:
        """Make sure that `new_K` more ids of each table can be inserted, and count them.

        Raises:
            OutOfDeviceMemory: no room on the device; nothing has changed.
        """
        counters = self.counters
        counters.poll()
        if not self._roomy(new_K):
            # A host that is ahead knows little. It loses nothing by waiting until two calls are
            # left under way: the device has those to do.
            counters.wait(but=2)
            if not self._roomy(new_K):
                self._make_room(counters.rows_bound_K + new_K, new_K)
        counters.launched_K += new_K

    def _roomy(self, new_K: Counts) -> bool:
        """Whether so many more ids fit as things are."""
        counters = self.counters
        flying_K, used_K = counters.flying_K + new_K, counters.used_K
        lacking_K = np.minimum(counters.rows_K + flying_K, self._limits_K) > self._room_K
        crowded_K = (used_K + flying_K > self._hard_K) | (used_K > self._soft_K)
        return not (lacking_K | crowded_K).any()

    def _make_room(self, rows_K: Counts, new_K: Counts) -> None:
        with suppress(torch.OutOfMemoryError, OutOfDeviceMemory):
            self._grow(rows_K)
            return
        # Out here, since an error holds what was allocated before it as long as it is handled.
        # Bounds are loose while counters are under way: wait for them, ask for the least.
        self.counters.wait()
        least_K = self.counters.rows_bound_K + new_K
        try:
            self._grow(least_K, least=True)
        except torch.OutOfMemoryError as error:
            raise self._refused(least_K) from error

    def _refused(self, rows_K: Counts) -> OutOfDeviceMemory:
        wanted = sum(growth.bytes_wanted for growth in self._growths(rows_K, least=True))
        return native.out_of_memory("rows of a GPU shard", wanted, self.device)

    def _grow(self, rows_K: Counts, *, least: bool = False) -> None:
        """Allocate first, then take effect: a failed allocation leaves everything as it was.

        rows_K: rows in use and ids that may come; `capacity_rows` bounds what they all take.
        """
        growths = self._growths(rows_K, least=least)
        if not growths:
            return
        more = sum(len(growth.sizes) for growth in growths)
        self._check_chunks(more)
        used, news = 0 if self._own is None else self._own.used, None
        try:
            parts = self._allocated_all(growths)
            columns_WC = self._columns_of(parts)
            if self._own is not None:
                self._own.back(self._without_memory(parts, columns_WC))
            if more or any(growth.slots for growth in growths):
                news = self._news_of(parts, columns_WC)
        except Exception:
            if self._own is not None:
                self._own.take_back(used)
            raise
        if news is not None:
            self._take_all(parts, news)
        for growth in growths:
            table = self._tables[growth.table]
            table.ready, table.rows = growth.ready, table.rows + growth.rows
        self._room_K = np.array([table.rows for table in self._tables], dtype=np.int64)

    def _without_memory(
        self, parts: Sequence[AllocatedGrowth], columns_WC: Counts
    ) -> list[tuple[int, int]]:
        """Addresses and bytes of the chunks that are to have memory; columns_WC: of new ones."""
        found: list[tuple[int, int]] = []
        for part in parts:
            growth, table = part.growth, self._tables[part.growth.table]
            old = table.chunks[table.ready : growth.ready]
            new = part.first - self._chunks
            new_WC = columns_WC[:, new : new + growth.ready - table.ready - len(old)]
            both_WC = np.concatenate([self._columns_WC[:, old], new_WC], axis=1)
            sizes_C = both_WC[CHUNK_CAPACITY] * bytes_of_row(growth.form)
            found += zip(both_WC[CHUNK_WEIGHTS].tolist(), sizes_C.tolist(), strict=True)
        return found

    def _news_of(self, parts: Sequence[AllocatedGrowth], columns_WC: Counts) -> _News:
        """What kernels are to know of growths, sent to the device."""
        more, lines_KT = columns_WC.shape[1], self._lines_with(parts)
        numbers = np.arange(self._chunks, self._chunks + more)
        words = [lines_KT.reshape(-1), columns_WC.reshape(-1), numbers]
        on_device = staged(np.concatenate(words), self.device)
        staged_KT, sent_WC, numbers_C = torch.split(on_device, [part.size for part in words])
        sent = staged_KT.view(lines_KT.shape), sent_WC.view(CHUNK_WORDS, more), numbers_C
        return _News(lines_KT, columns_WC, *sent, self._wider(more))

    def _take_all(self, parts: Sequence[AllocatedGrowth], news: _News) -> None:
        """Give tables what was allocated for them; allocates nothing on the device."""
        old = [self._tables[part.growth.table].entries for part in parts]
        for part in parts:
            at = part.first - self._chunks
            self._take(part, news.numbers_C[at : at + len(part.growth.sizes)])
        self._append(news.columns_WC, news.sent_WC, news.wider_WC)
        for entries, part in zip(old, parts, strict=True):
            if part.entries is not None:
                self._move_index(part.growth.table, entries, part.entries)
        retire(*old)
        self._show(news.lines_KT, news.staged_KT)

    def _allocated_all(self, growths: Sequence[Growth]) -> list[AllocatedGrowth]:
        """Everything on the device that growths need."""
        parts, first = [], self._chunks
        for growth in growths:
            parts.append(self._allocated(growth, first))
            first += len(growth.sizes)
        return parts

    def _growths(self, rows_K: Counts, *, least: bool) -> list[Growth]:
        """What tables lack for so many rows."""
        growths = []
        # Steady tables are many and cost nothing here.
        lacking_K = np.minimum(rows_K, self._limits_K) > self._room_K
        flying_K = np.maximum(rows_K - self.counters.rows_K, 0)
        used_K = self.counters.used_K
        crowded_K = (used_K + flying_K > self._hard_K) | (used_K > self._soft_K)
        for k in np.flatnonzero(lacking_K | crowded_K).tolist():
            slots = self._slots_for(k, int(rows_K[k])) if crowded_K[k] else 0
            growths.append(self._growth(k, int(rows_K[k]), slots, least=least))
        return growths

    def _growth(self, k: int, rows: int, slots: int, *, least: bool) -> Growth:
        table, limit = self._tables[k], int(self._limits_K[k])
        target = min(rows, limit)
        if target > table.rows and not least:
            ahead = min(table.rows // _GROWTH, _GROWTH_BYTES // bytes_of_row(table.form))
            target = min(max(target, table.rows + ahead), limit)
        reach = target
        if self._own is not None and not least and self._chunks < MOST_CHUNKS // 2:
            # Addresses cost nothing: chunks become more when the index does, seldom.
            filled = _share(slots or table.slots, _HARD_SHARE)
            reach = max(target, min(filled, limit))
        sizes = chunks_for(len(table.chunks), table.reach, reach)
        backed = chunks_for(table.ready, table.rows, target)
        ready = table.ready + len(backed)
        return Growth(k, table.form, tuple(sizes), slots, ready, sum(backed))

    def _slots_for(self, k: int, rows: int) -> int:
        """Slots of the index to rebuild into: it leaves erased marks behind."""
        known, slots = int(self.counters.rows_K[k]), self._tables[k].slots
        while rows > _share(slots, _HARD_SHARE) or known > _share(slots, _FRESH_SHARE):
            slots *= 2
        return slots

    def _check_chunks(self, more: int) -> None:
        if self._chunks + more <= MOST_CHUNKS:
            return
        raise OutOfDeviceMemory(
            "chunks of rows of a GPU shard",
            got=f"{more} wanted on top of {self._chunks}",
            allowed=f"{MOST_CHUNKS} in all, of {CHUNK_ROWS} rows and less",
            remedy="Spread the tables over more shards, or give them a row budget "
            "(capacity_rows with on_full='lru' or 'lfu').",
        )

    def _allocated(self, growth: Growth, first: int) -> AllocatedGrowth:
        """What one growth needs; its chunks are numbered from `first`."""
        table, form, directory = self._tables[growth.table], growth.form, None
        blocks = tuple(
            (new_block(form, sum(sizes), self.device, self._own, self._host), sizes)
            for sizes in self._groups_of(growth)
        )
        last = len(table.chunks) + len(growth.sizes)
        if last > table.directory.numel():
            directory = torch.zeros(_power(last), dtype=torch.int32, device=self.device)
        entries = index.new_entries(growth.slots, self.device) if growth.slots else None
        return AllocatedGrowth(growth, first, blocks, directory, entries)

    def _groups_of(self, growth: Growth) -> list[tuple[int, ...]]:
        """Chunks that share an allocation."""
        if not growth.sizes:
            return []
        if self._host is None:
            return [growth.sizes]
        row_bytes = max(growth.form.weight_bytes, growth.form.state_bytes)
        return [tuple(sizes) for sizes in grouped(growth.sizes, row_bytes)]

    def _columns_of(self, parts: Sequence[AllocatedGrowth]) -> Counts:
        columns = [
            chunk_columns(block, sizes, part.growth.table)
            for part in parts
            for block, sizes in part.blocks
        ]
        return np.concatenate([np.zeros((CHUNK_WORDS, 0), dtype=np.int64), *columns], axis=1)

    def _lines_with(self, parts: Sequence[AllocatedGrowth]) -> Counts:
        lines_KT = self._lines_KT.copy()
        for part in parts:
            line = lines_KT[part.growth.table]
            if part.directory is not None:
                line[TABLE_DIRECTORY] = part.directory.data_ptr()
            if part.entries is not None:
                line[TABLE_ENTRIES] = part.entries.data_ptr()
                line[TABLE_MASK] = part.growth.slots - 1
        return lines_KT

    def _take(self, part: AllocatedGrowth, numbers_C: Tensor) -> None:
        """Give a table what was allocated; numbers_C: of its chunks, on the device."""
        table, growth = self._tables[part.growth.table], part.growth
        present = len(table.chunks)
        if part.directory is not None:
            part.directory[:present] = table.directory[:present]
            retire(table.directory)
            table.directory = part.directory
        if growth.sizes:
            table.owned.extend(tensor for block, _ in part.blocks for tensor in block.owned)
            table.chunks.extend(range(part.first, part.first + len(growth.sizes)))
            table.reach += sum(growth.sizes)
            table.directory[present : len(table.chunks)] = numbers_C
        if part.entries is not None:
            table.entries, table.slots = part.entries, growth.slots

    def _move_index(self, k: int, old_entries: Tensor, entries: Tensor) -> None:
        index.rebuild(old_entries, entries, int(self._lines_KT[k, TABLE_SALT]))
        self.layout.counters_KC[k, COUNT_ERASED].zero_()
        self.counters.rebuilt(k)

    def _show(self, lines_KT: Counts, staged_KT: Tensor) -> None:
        """Have kernels see new lines; allocates nothing on the device."""
        self._lines_KT = lines_KT
        self._slots_K: Counts = np.array([table.slots for table in self._tables], dtype=np.int64)
        self._hard_K: Counts = self._slots_K * _HARD_SHARE[0] // _HARD_SHARE[1]
        self._soft_K: Counts = self._slots_K * _SOFT_SHARE[0] // _SOFT_SHARE[1]
        self.layout.tables_KT.copy_(staged_KT, non_blocking=True)

    def make_free_lists(self, tables: Sequence[int]) -> None:
        """Make the free lists of these tables long enough for all their rows; before an erase.

        Raises:
            torch.OutOfMemoryError: nothing has changed.
        """
        longer: dict[int, Tensor] = {}
        lines_KT = self._lines_KT.copy()
        for k in tables:
            table = self._tables[k]
            if table.free_list.numel() < table.rows:
                longer[k] = longer_list(table.free_list, table.rows)
                lines_KT[k, TABLE_FREE] = longer[k].data_ptr()
        if longer:
            staged_KT = _staged(lines_KT, self.device)
            for k, free_list in longer.items():
                retire(self._tables[k].free_list)
                self._tables[k].free_list = free_list
            self._show(lines_KT, staged_KT)

    def forget(self, k: int) -> None:
        """Empty a table's index; its chunks stay. The caller resets the counters.

        Raises:
            torch.OutOfMemoryError: nothing has changed.
        """
        table, lines_KT = self._tables[k], self._lines_KT.copy()
        entries = index.new_entries(table.slots, self.device)
        lines_KT[k, TABLE_ENTRIES] = entries.data_ptr()
        staged_KT = _staged(lines_KT, self.device)
        retire(table.entries)
        table.entries = entries
        self._show(lines_KT, staged_KT)

    def settle(self, stream: torch.cuda.Stream | None) -> None:
        """Have the device's counters at hand; waits for it.

        stream: the present one.
        """
        self.counters.send(self.layout, stream)
        self.counters.wait()

    def bytes_of(self, k: int) -> tuple[int, int, int, int]:
        """Bytes a table has allocated: weights, state, metadata, index."""
        table = self._tables[k]
        rows, form = table.rows, table.form
        parts = rows * form.weight_bytes, rows * form.state_bytes, rows * METADATA_BYTES
        return (*parts, table.index_bytes)


def _staged(lines_KT: Counts, device: torch.device) -> Tensor:
    """A copy on the host from which the device takes its own without waiting."""
    staged_KT = torch.from_numpy(lines_KT.copy())
    return staged_KT.pin_memory() if device.type == "cuda" else staged_KT


def _share(slots: int, share: tuple[int, int]) -> int:
    return slots * share[0] // share[1]
