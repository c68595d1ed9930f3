"""The memory of a GPU shard: indexes, chunks of rows, and how kernels are led to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.errors import OutOfDeviceMemory
from shoal.ids import salt, to_signed
from shoal.kernels import index
from shoal.kernels import tables as words
from shoal.kernels.host_copies import retire, sent
from shoal.kernels.tables import RowForm, ShardLayout
from shoal.table import native
from shoal.table.cuda.calls import ShardTables, together
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
_UINT32 = words.CHUNK_VERSIONS, words.CHUNK_SEEN, words.CHUNK_COUNTS
_METADATA = ((words.CHUNK_IDS, 8), *((word, 4) for word in _UINT32))
METADATA_BYTES = sum(size for _, size in _METADATA)


def chunks_for(present: int, rows: int, target: int) -> list[int]:
    """Sizes of the chunks that take a table from `rows` to at least `target` rows.

    present: chunks it has. The j-th chunk of a table has FIRST_ROWS << j rows, at most CHUNK_ROWS.
    """
    sizes: list[int] = []
    while rows + sum(sizes) < target:
        order = present + len(sizes)
        full = words.FIRST_ROWS << order >= words.CHUNK_ROWS if order < 32 else True
        if full:
            missing = target - rows - sum(sizes)
            return sizes + [words.CHUNK_ROWS] * (-(-missing // words.CHUNK_ROWS))
        sizes.append(words.FIRST_ROWS << order)
    return sizes


def new_block(
    form: RowForm,
    sizes: Sequence[int],
    device: torch.device,
    own: RowMemory | None,
    host: PageLocked | None,
) -> tuple[Counts, tuple[Tensor, ...]]:
    """Allocate chunks of so many rows each; contents are whatever was there.

    Args:
        own: has addresses for them, with nothing behind; None: torch's allocator gives memory.
        host: where weights and state come from if not from the device.

    Returns:
        their columns of `ShardLayout.chunks_WC`, without their table; and the memory, if `own` does
        not have it. In a part of memory, chunks follow each other, each with its arrays one after
        the other: memory behind the first addresses is enough for the first chunks.

    Raises:
        torch.OutOfMemoryError: no room on the device.
        OutOfDeviceMemory: no more pinned host memory.
    """
    weights, state = (words.CHUNK_WEIGHTS, form.weight_bytes), (words.CHUNK_STATE, form.state_bytes)
    rows_C = np.array(sizes, dtype=np.int64)
    rows, owned = int(rows_C.sum()), tuple[Tensor, ...]()
    parts = [(weights, state, *_METADATA)] if host is None else [(weights,), (state,), _METADATA]
    if host is not None:
        owned = (host.take(rows * weights[1]), host.take(rows * state[1]))
    if host is not None or own is None:
        size = rows * sum(size for _, size in parts[-1])
        owned += (torch.empty(size, dtype=torch.uint8, device=device),)
        addresses = [part.data_ptr() for part in owned]
    else:
        addresses = [own.take(rows * bytes_of_row(form))]
    columns = np.zeros((words.CHUNK_WORDS, len(sizes)), dtype=np.int64)
    for address, arrays in zip(addresses, parts, strict=True):
        at_C = address + (np.cumsum(rows_C) - rows_C) * sum(size for _, size in arrays)
        for word, size in arrays:
            columns[word] = at_C
            at_C = at_C + rows_C * size
    columns[words.CHUNK_CAPACITY] = rows_C
    return columns, owned


_FIRST_SLOTS = 64


@dataclass(frozen=True, slots=True, eq=False)
class TableMemory:
    """What one table has allocated; replaced when it grows.

    owned: memory of chunks that is not the shard's RowMemory. chunks: their numbers; the last ones
    may be addresses only, of rows to come. reach: rows of all chunks. ready: how many chunks have
    memory behind them; rows: that these have room for.
    """

    form: RowForm
    entries: Tensor
    chunks: tuple[int, ...]
    directory: Tensor
    owned: tuple[Tensor, ...]
    free_list: Tensor
    reach: int = 0
    ready: int = 0
    rows: int = 0

    @property
    def slots(self) -> int:
        """Of its index."""
        return (len(self.entries) - 1) * words.BUCKET_SLOTS

    @property
    def places(self) -> dict[int, int]:
        """Words of its line that change as it grows."""
        return {
            words.TABLE_ENTRIES: self.entries.data_ptr(),
            words.TABLE_MASK: self.slots - 1,
            words.TABLE_DIRECTORY: self.directory.data_ptr(),
            words.TABLE_FREE: self.free_list.data_ptr(),
        }


@dataclass(frozen=True, slots=True)
class Growth:
    """What a table lacks: sizes of further chunks, and slots of another index or 0; `ready` of its
    chunks have memory then, and `rows` more rows.
    """

    sizes: tuple[int, ...]
    slots: int
    ready: int
    rows: int


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
MOST_CHUNKS = 1 << (31 - words.CHUNK_BITS)  # a handle is an int32 that is not negative


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
        rows_room_K: rows that each table's chunks have room for.
        slots_K: index slots of each table.
        chunks: how many all tables have.
    """

    def __init__(self, tables: ShardTables, *, seed: int, host_rows: bool = False) -> None:
        device = self.device = tables.device
        specs, forms, form_of = tables.specs, tables.forms, tables.form_of
        self._host = PageLocked(device) if host_rows else None
        self._own = None if host_rows else row_memory(device)
        self._tables = [_first_memory(forms[form], device) for form in form_of]
        limits = [_NO_LIMIT if spec.capacity_rows is None else spec.capacity_rows for spec in specs]
        self._given_K: Counts = np.minimum(np.array(limits, dtype=np.int64), _NO_LIMIT)
        self._limits_K: Counts = self._given_K
        self._lines_KT = np.zeros((len(specs), words.TABLE_WORDS), dtype=np.int64)
        self._columns_WC: Counts = np.zeros((words.CHUNK_WORDS, 64), dtype=np.int64)
        self.chunks = 0
        self.rows_room_K: Counts = np.zeros(len(specs), dtype=np.int64)
        for k, spec in enumerate(specs):
            form, line = forms[form_of[k]], self._lines_KT[k]
            line[words.TABLE_SALT] = to_signed(salt(spec.hash_name))
            line[words.TABLE_SEED] = to_signed(seed)
            line[words.TABLE_WEIGHT_BYTES] = form.weight_bytes
            line[words.TABLE_STATE_BYTES] = form.state_bytes
            line[words.TABLE_FORM], line[words.TABLE_FIRST_COLUMN] = form_of[k], spec.first_column
        counters_KC = torch.zeros(len(specs), words.COUNT_WORDS, dtype=torch.int64, device=device)
        self.counters = CounterReader(counters_KC)
        self.layout = ShardLayout(
            torch.empty(self._lines_KT.shape, dtype=torch.int64, device=device),
            counters_KC,
            torch.empty(self._columns_WC.shape, dtype=torch.int64, device=device),
        )
        self._replace(dict(enumerate(self._tables)))
        expected_K = np.array([max(spec.expected_rows, 1) for spec in specs], dtype=np.int64)
        self._make_room(expected_K, expected_K)

    @property
    def columns_WC(self) -> Counts:
        """The columns of all chunks, as in `layout.chunks_WC`."""
        return self._columns_WC[:, : self.chunks]

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
        more, first = columns_WC.shape[1], self.chunks
        self._check_chunks(more)
        wider_WC = self._wider(more)
        self._append(columns_WC, sent(torch.from_numpy(columns_WC.copy()), self.device), wider_WC)
        return first

    def _wider(self, more: int) -> Tensor | None:
        """Memory for the columns of all chunks and so many more; None where there is room."""
        last, wide = self.chunks + more, self._columns_WC.shape[1]
        if last <= wide:
            return None
        wide = max(2 * wide, _power(last))
        return torch.zeros(words.CHUNK_WORDS, wide, dtype=torch.int64, device=self.device)

    def _append(self, columns_WC: Counts, sent_WC: Tensor, wider_WC: Tensor | None) -> None:
        """Have kernels see further chunks; allocates nothing on the device.

        Columns that are there stay as they are: another stream may be reading them.
        """
        first, last = self.chunks, self.chunks + columns_WC.shape[1]
        if wider_WC is not None:
            layout, host_WC = self.layout, np.zeros(wider_WC.shape, dtype=np.int64)
            host_WC[:, :first] = self._columns_WC[:, :first]
            wider_WC[:, :first] = layout.chunks_WC[:, :first]
            retire(layout.chunks_WC)
            self._columns_WC = host_WC
            self.layout = ShardLayout(layout.tables_KT, layout.counters_KC, wider_WC)
        self._columns_WC[:, first:last] = columns_WC
        self.layout.chunks_WC[:, first:last] = sent_WC
        self.chunks = last

    def reserve(self, new_K: Counts) -> None:
        """Make sure that `new_K` more ids of each table can be inserted, and count them.

        Raises:
            OutOfDeviceMemory: no room on the device; nothing has changed.
        """
        counters = self.counters
        counters.poll()
        lacking_K, crowded_K = self._short(counters.flying_K + new_K)
        if (lacking_K | crowded_K).any():
            # A host that is ahead knows little. It loses nothing by waiting until two calls are
            # left under way: the device has those to do.
            counters.wait(but=2)
            self._make_room(counters.rows_bound_K + new_K, new_K)
        counters.launched_K += new_K

    def _short(self, flying_K: Counts) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Which tables lack room for so many rows more than are known, and whose index is full."""
        counters = self.counters
        lacking_K = np.minimum(counters.rows_K + flying_K, self._limits_K) > self.rows_room_K
        used_K = counters.used_K
        return lacking_K, (used_K + flying_K > self._hard_K) | (used_K > self._soft_K)

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
        wanted = 0
        for k, growth in self._growths(rows_K, least=True).items():
            buckets = growth.slots // words.BUCKET_SLOTS + 1 if growth.slots else 0
            wanted += growth.rows * bytes_of_row(self._tables[k].form)
            wanted += buckets * words.BUCKET_BYTES
        return native.out_of_memory("rows of a GPU shard", wanted, self.device)

    def _grow(self, rows_K: Counts, *, least: bool = False) -> None:
        """Allocate first, then take effect: a failed allocation leaves everything as it was.

        rows_K: rows in use and ids that may come; `capacity_rows` bounds what they all take.
        """
        growths = self._growths(rows_K, least=least)
        if not growths:
            return
        more = sum(len(growth.sizes) for growth in growths.values())
        self._check_chunks(more)
        used, news, wider_WC = 0 if self._own is None else self._own.used, None, None
        try:
            grown, columns_WC = self._allocated(growths)
            if self._own is not None:
                self._own.back(self._without_memory(grown, columns_WC))
            if more or any(growth.slots for growth in growths.values()):
                lines_KT = self._lines_with(grown)
                numbers = np.arange(self.chunks, self.chunks + more)
                parts = [lines_KT.reshape(-1), columns_WC.reshape(-1), numbers]
                news = lines_KT, together(parts, self.device)
                wider_WC = self._wider(more)
        except Exception:
            if self._own is not None:
                self._own.take_back(used)
            raise
        if news is None:  # what kernels see is the same
            for k, table in grown.items():
                self._tables[k] = table
        else:
            lines_KT, (lines, columns, numbers_C) = news
            self._fill_directories(grown, numbers_C)
            self._append(columns_WC, columns.view(columns_WC.shape), wider_WC)
            self._move_indexes(grown)
            self._replace(grown, (lines_KT, lines.view(lines_KT.shape)))
        self.rows_room_K = np.array([table.rows for table in self._tables], dtype=np.int64)

    def _allocated(self, growths: Mapping[int, Growth]) -> tuple[dict[int, TableMemory], Counts]:
        """Tables as they will be, and the columns of their further chunks."""
        grown, first = dict[int, TableMemory](), self.chunks
        columns = [np.zeros((words.CHUNK_WORDS, 0), dtype=np.int64)]
        for k, growth in growths.items():
            table, owned = self._tables[k], list[Tensor]()
            for sizes in self._groups_of(table.form, growth.sizes):
                part, memory = new_block(table.form, sizes, self.device, self._own, self._host)
                part[words.CHUNK_TABLE] = k
                columns.append(part)
                owned.extend(memory)
            chunks = (*table.chunks, *range(first, first + len(growth.sizes)))
            first += len(growth.sizes)
            directory, entries = table.directory, table.entries
            if len(chunks) > directory.numel():
                directory = torch.zeros(_power(len(chunks)), dtype=torch.int32, device=self.device)
            if growth.slots:
                entries = index.new_entries(growth.slots, self.device)
            grown[k] = replace(
                table,
                entries=entries,
                directory=directory,
                owned=(*table.owned, *owned),
                chunks=chunks,
                reach=table.reach + sum(growth.sizes),
                ready=growth.ready,
                rows=table.rows + growth.rows,
            )
        return grown, np.concatenate(columns, axis=1)

    def _without_memory(
        self, grown: Mapping[int, TableMemory], columns_WC: Counts
    ) -> list[tuple[int, int]]:
        """Addresses and bytes of the chunks that are to have memory; columns_WC: of new ones."""
        wanted = [words.CHUNK_WEIGHTS, words.CHUNK_CAPACITY]
        starts_C, rows_C = np.concatenate([self.columns_WC[wanted], columns_WC[wanted]], axis=1)
        found: list[tuple[int, int]] = []
        for k, table in grown.items():
            chunks = list(table.chunks[self._tables[k].ready : table.ready])
            sizes_C = rows_C[chunks] * bytes_of_row(table.form)
            found += zip(starts_C[chunks].tolist(), sizes_C.tolist(), strict=True)
        return found

    def _fill_directories(self, grown: Mapping[int, TableMemory], numbers_C: Tensor) -> None:
        """numbers_C: of all further chunks, on the device."""
        at = 0
        for k, table in grown.items():
            old, present = self._tables[k].directory, len(self._tables[k].chunks)
            if table.directory is not old:
                table.directory[:present] = old[:present]
            more = len(table.chunks) - present
            table.directory[present : present + more] = numbers_C[at : at + more]
            at += more

    def _move_indexes(self, grown: Mapping[int, TableMemory]) -> None:
        for k, table in grown.items():
            if table.entries is not self._tables[k].entries:
                salt_ = int(self._lines_KT[k, words.TABLE_SALT])
                index.rebuild(self._tables[k].entries, table.entries, salt_)
                self.layout.counters_KC[k, words.COUNT_ERASED].zero_()
                self.counters.rebuilt(k)

    def _lines_with(self, tables: Mapping[int, TableMemory]) -> Counts:
        """Lines of all tables, with these in the place of those of their numbers."""
        lines_KT = self._lines_KT.copy()
        for k, table in tables.items():
            lines_KT[k, list(table.places)] = list(table.places.values())
        return lines_KT

    def _replace(
        self, tables: Mapping[int, TableMemory], lines: tuple[Counts, Tensor] | None = None
    ) -> None:
        """Put tables in the place of those of their numbers, and have kernels see it.

        lines: `_lines_with` them, and a copy that the device can read: then nothing is allocated.

        Raises:
            torch.OutOfMemoryError: nothing has changed.
        """
        if lines is None:
            lines_KT = self._lines_with(tables)
            lines = lines_KT, _staged(lines_KT, self.device)
        for k, table in tables.items():
            old = self._tables[k]
            for part in ("entries", "directory", "free_list"):
                if getattr(old, part) is not getattr(table, part):
                    retire(getattr(old, part))
            self._tables[k] = table
        self._lines_KT = lines[0]
        self.slots_K: Counts = np.array([table.slots for table in self._tables], dtype=np.int64)
        self._hard_K: Counts = self.slots_K * _HARD_SHARE[0] // _HARD_SHARE[1]
        self._soft_K: Counts = self.slots_K * _SOFT_SHARE[0] // _SOFT_SHARE[1]
        self.layout.tables_KT.copy_(lines[1], non_blocking=True)

    def _growths(self, rows_K: Counts, *, least: bool) -> dict[int, Growth]:
        """What tables lack for so many rows."""
        growths = {}
        # Steady tables are many and cost nothing here.
        lacking_K, crowded_K = self._short(np.maximum(rows_K - self.counters.rows_K, 0))
        for k in np.flatnonzero(lacking_K | crowded_K).tolist():
            slots = self._slots_for(k, int(rows_K[k])) if crowded_K[k] else 0
            growths[k] = self._growth(k, int(rows_K[k]), slots, least=least)
        return growths

    def _growth(self, k: int, rows: int, slots: int, *, least: bool) -> Growth:
        table, limit = self._tables[k], int(self._limits_K[k])
        target = min(rows, limit)
        if target > table.rows and not least:
            ahead = min(table.rows // _GROWTH, _GROWTH_BYTES // bytes_of_row(table.form))
            target = min(max(target, table.rows + ahead), limit)
        reach = target
        if self._own is not None and not least and self.chunks < MOST_CHUNKS // 2:
            # Addresses cost nothing: chunks become more when the index does, seldom.
            filled = _share(slots or table.slots, _HARD_SHARE)
            reach = max(target, min(filled, limit))
        sizes = chunks_for(len(table.chunks), table.reach, reach)
        backed = chunks_for(table.ready, table.rows, target)
        ready = table.ready + len(backed)
        return Growth(tuple(sizes), slots, ready, sum(backed))

    def _slots_for(self, k: int, rows: int) -> int:
        """Slots of the index to rebuild into: it leaves erased marks behind."""
        known, slots = int(self.counters.rows_K[k]), self._tables[k].slots
        while rows > _share(slots, _HARD_SHARE) or known > _share(slots, _FRESH_SHARE):
            slots *= 2
        return slots

    def _check_chunks(self, more: int) -> None:
        if self.chunks + more <= MOST_CHUNKS:
            return
        raise OutOfDeviceMemory(
            "chunks of rows of a GPU shard",
            got=f"{more} wanted on top of {self.chunks}",
            allowed=f"{MOST_CHUNKS} in all, of {words.CHUNK_ROWS} rows and less",
            remedy="Spread the tables over more shards, or give them a row budget "
            "(capacity_rows with on_full='lru' or 'lfu').",
        )

    def _groups_of(self, form: RowForm, sizes: tuple[int, ...]) -> list[Sequence[int]]:
        """Chunks that share an allocation."""
        if self._host is None:
            return [sizes] if sizes else []
        return [*grouped(sizes, max(form.weight_bytes, form.state_bytes))]

    def make_free_lists(self, tables: Sequence[int]) -> None:
        """Make the free lists of these tables long enough for all their rows; before an erase.

        Raises:
            torch.OutOfMemoryError: nothing has changed.
        """
        longer = {
            k: replace(table, free_list=longer_list(table.free_list, table.rows))
            for k, table in ((k, self._tables[k]) for k in tables)
            if table.free_list.numel() < table.rows
        }
        if longer:
            self._replace(longer)

    def forget(self, k: int) -> None:
        """Empty a table: its index is new, its chunks stay.

        Raises:
            torch.OutOfMemoryError: nothing has changed.
        """
        table = self._tables[k]
        entries = index.new_entries(table.slots, self.device)
        self._replace({k: replace(table, entries=entries)})
        counters_C = self.layout.counters_KC[k]
        counters_C[words.COUNT_INSERTED] += counters_C[words.COUNT_ISSUED]
        counters_C[: words.COUNT_INSERTED].zero_()  # ISSUED to ERASED

    def settle(self, stream: torch.cuda.Stream | None) -> None:
        """Have the device's counters at hand; waits for it.

        stream: the present one.
        """
        self.counters.send(self.layout, stream)
        self.counters.wait()

    def entries_of(self, k: int) -> Tensor:
        """A table's index, as `kernels.index.new_entries` makes one."""
        return self._tables[k].entries

    def bytes_of(self, k: int) -> tuple[int, int, int, int]:
        """Bytes a table has allocated: weights, state, metadata, index."""
        table = self._tables[k]
        rows, form = table.rows, table.form
        parts = rows * form.weight_bytes, rows * form.state_bytes, rows * METADATA_BYTES
        lists = 4 * (table.free_list.numel() + table.directory.numel())
        return (*parts, 8 * table.entries.numel() + lists)


def _first_memory(form: RowForm, device: torch.device) -> TableMemory:
    directory, free_list = torch.zeros(2, 1, dtype=torch.int32, device=device)
    return TableMemory(form, index.new_entries(_FIRST_SLOTS, device), (), directory, (), free_list)


def _staged(lines_KT: Counts, device: torch.device) -> Tensor:
    """A copy on the host from which the device takes its own without waiting."""
    staged_KT = torch.from_numpy(lines_KT.copy())
    return staged_KT.pin_memory() if device.type == "cuda" else staged_KT


def _share(slots: int, share: tuple[int, int]) -> int:
    return slots * share[0] // share[1]
