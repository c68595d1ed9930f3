"""The memory of a GPU shard: indexes, chunks of rows, and the lines that lead kernels to them.

Growth never stalls the step. Before a launch that may insert, `reserve` makes room for a proven
upper bound: the rows in use at the last counters that have arrived from the device, plus every
id launched since, plus those of this call. An index that has to grow is rebuilt in the stream;
rows never move.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.errors import OutOfDeviceMemory, describe
from shoal.hashing import salt, to_signed
from shoal.kernels import table_erase, table_index
from shoal.kernels.row_form import RowForm
from shoal.kernels.table_layout import (
    CHUNK_TABLE,
    CHUNK_WORDS,
    COUNT_ERASED,
    COUNT_WORDS,
    TABLE_DIRECTORY,
    TABLE_ENTRIES,
    TABLE_FORM,
    TABLE_FREE,
    TABLE_MASK,
    TABLE_SALT,
    TABLE_SEED,
    TABLE_STATE_BYTES,
    TABLE_WEIGHT_BYTES,
    TABLE_WORDS,
    ShardLayout,
)
from shoal.kernels.transfer import sent
from shoal.table.device_chunks import Block, chunk_columns, chunks_for, new_block
from shoal.table.device_counters import CounterReader, Counts
from shoal.table.page_locked import PageLocked, grouped
from shoal.table.spec import TableSpec

__all__ = ["DeviceMemory"]

# An index may fill to this share of its slots before walks get long; it is rebuilt well before.
_HARD_SHARE = (7, 8)
_SOFT_SHARE = (3, 4)
_FRESH_SHARE = (5, 8)  # of slots, right after a rebuild at most: else the next is soon due again
_FIRST_SLOTS = 64
_NO_LIMIT = 1 << 31


class _TableMemory:
    """What one table has allocated."""

    __slots__ = ("blocks", "chunks", "directory", "entries", "form", "free_list", "rows", "slots")

    def __init__(self, form: RowForm, device: torch.device) -> None:
        self.form = form
        self.slots = _FIRST_SLOTS
        self.entries: Tensor = table_index.new_entries(_FIRST_SLOTS, device)
        self.directory: Tensor = torch.zeros(1, dtype=torch.int32, device=device)
        self.free_list: Tensor = torch.zeros(1, dtype=torch.int32, device=device)
        self.blocks: list[Block] = []
        self.chunks: list[int] = []
        self.rows = 0  # that its chunks have room for

    @property
    def index_bytes(self) -> int:
        return 8 * self.entries.numel() + 4 * (self.free_list.numel() + self.directory.numel())


class DeviceMemory:
    """Everything a GPU shard allocates for its tables.

    Args:
        specs: the tables.
        forms, form_of: distinct row forms, and the index of each table's.
        seed: of the initial values.
        device: where.
        host_rows: keep weights and state in page-locked host memory, which kernels reach through
            the same addresses.

    Attributes:
        layout: what kernels get; replaced when it grows.
        counters: what the host knows of the device's counters.
    """

    def __init__(
        self,
        specs: Sequence[TableSpec],
        forms: Sequence[RowForm],
        form_of: Sequence[int],
        *,
        seed: int,
        device: torch.device,
        host_rows: bool = False,
    ) -> None:
        self.device = device
        self._host = PageLocked(device) if host_rows else None
        self._tables = [_TableMemory(forms[form], device) for form in form_of]
        limits = [_NO_LIMIT if spec.capacity_rows is None else spec.capacity_rows for spec in specs]
        self._limits_K: Counts = np.minimum(np.array(limits, dtype=np.int64), _NO_LIMIT)
        self._lines_KT = np.zeros((len(specs), TABLE_WORDS), dtype=np.int64)
        self._columns_WC = np.zeros((CHUNK_WORDS, 64), dtype=np.int64)
        self._chunks = 0
        for k, spec in enumerate(specs):
            form, line = forms[form_of[k]], self._lines_KT[k]
            line[TABLE_SALT], line[TABLE_SEED] = to_signed(salt(spec.name)), to_signed(seed)
            line[TABLE_WEIGHT_BYTES], line[TABLE_STATE_BYTES] = form.weight_bytes, form.state_bytes
            line[TABLE_FORM] = form_of[k]
        counters_KC = torch.zeros(len(specs), COUNT_WORDS, dtype=torch.int64, device=device)
        self.counters = CounterReader(counters_KC)
        self.layout = ShardLayout(
            torch.empty(self._lines_KT.shape, dtype=torch.int64, device=device),
            counters_KC,
            torch.empty(self._columns_WC.shape, dtype=torch.int64, device=device),
        )
        self._refresh()
        self._grow(np.array([max(spec.expected_rows, 1) for spec in specs], dtype=np.int64))

    @property
    def rows_room_K(self) -> Counts:
        """Rows that each table's chunks have room for."""
        return np.array([table.rows for table in self._tables], dtype=np.int64)

    @property
    def slots_K(self) -> Counts:
        """Index slots of each table."""
        return self._slots_K

    @property
    def chunks(self) -> int:
        """Chunks of all tables."""
        return self._chunks

    @property
    def tables_of_chunks(self) -> Counts:
        """The table of each chunk."""
        return self._columns_WC[CHUNK_TABLE, : self._chunks]

    def lend(self, columns_WC: NDArray[np.int64]) -> int:
        """Add chunks that are no table's rows, a cache's; returns the number of the first."""
        first = self._number(columns_WC)
        self._refresh()
        return first

    def _number(self, columns_WC: NDArray[np.int64]) -> int:
        first = self._chunks
        self._chunks += columns_WC.shape[1]
        while self._chunks > self._columns_WC.shape[1]:
            self._columns_WC = np.pad(self._columns_WC, ((0, 0), (0, self._columns_WC.shape[1])))
        self._columns_WC[:, first : self._chunks] = columns_WC
        return first

    def entries(self, table: int) -> Tensor:
        """The index of a table."""
        return self._tables[table].entries

    def reserve(self, new_K: Counts) -> None:
        """Make sure that `new_K` more ids of each table can be inserted, and count them.

        Raises:
            OutOfDeviceMemory: no room on the device; nothing has changed.
        """
        counters = self.counters
        counters.poll()
        flying_K = counters.flying_K + new_K
        rows_K = counters.rows_K + flying_K
        used_K = counters.used_K
        crowded_K = (used_K + flying_K > self._hard_K) | (used_K > self._soft_K)
        if ((rows_K > self._room_K) & (self._room_K < self._limits_K)).any() or crowded_K.any():
            self._make_room(rows_K, new_K)
        counters.launched_K += new_K

    def _make_room(self, rows_K: Counts, new_K: Counts) -> None:
        try:
            self._grow(rows_K)
        except (torch.OutOfMemoryError, OutOfDeviceMemory):
            # Bounds are loose while counters are under way: wait for them, ask for the least.
            self.counters.wait()
            try:
                self._grow(self.counters.rows_bound_K + new_K, least=True)
            except torch.OutOfMemoryError as error:
                raise self._refused(rows_K) from error

    def _refused(self, rows_K: Counts) -> OutOfDeviceMemory:
        wanted = sum(
            int(max(rows - table.rows, 0)) * (table.form.weight_bytes + table.form.state_bytes + 20)
            for rows, table in zip(rows_K, self._tables, strict=True)
        )
        free = torch.cuda.mem_get_info(self.device)[0] if self.device.type == "cuda" else 0
        return OutOfDeviceMemory(
            describe(
                "memory for rows of a GPU shard",
                got=f"about {wanted} bytes wanted, {free} free on {self.device}",
                allowed="what the device has free",
                remedy="Keep rows in host memory (a tiered shard), give the tables a row budget "
                "(capacity_rows with on_full='lru'), or use smaller batches.",
            )
        )

    def _grow(self, rows_K: Counts, *, least: bool = False) -> None:
        """Allocate first, then take effect: a failed allocation leaves everything as it was."""
        rows_K = np.minimum(rows_K, self._limits_K)
        made: list[tuple[int, Block, list[int]]] = []
        indexes: list[tuple[int, int, Tensor]] = []
        for k, table in enumerate(self._tables):
            want = int(rows_K[k])
            if want > table.rows:
                target = want if least else max(want, table.rows + table.rows // 8)
                target = min(target, int(self._limits_K[k]))
                sizes = chunks_for(len(table.chunks), table.rows, target)
                made.extend(
                    (k, new_block(table.form, part, self.device, self._host), part)
                    for part in self._parts(table.form, sizes)
                )
            slots = self._slots_wanted(k, want)
            if slots:
                indexes.append((k, slots, table_index.new_entries(slots, self.device)))
        for k, block, sizes in made:
            self._add_block(k, block, sizes)
        for k, slots, entries in indexes:
            self._move_index(k, slots, entries)
        self._refresh()

    def _parts(self, form: RowForm, sizes: list[int]) -> list[list[int]]:
        """Chunks that share an allocation."""
        if self._host is None:
            return [sizes]
        return grouped(sizes, max(form.weight_bytes, form.state_bytes))

    def _slots_wanted(self, k: int, rows: int) -> int:
        """Slots of the index to rebuild into, or 0 when the present one will do."""
        table, counters = self._tables[k], self.counters
        known, used = int(counters.rows_K[k]), int(counters.used_K[k])
        flying = max(rows - known, 0)
        if used + flying <= _share(table.slots, _HARD_SHARE) and used <= _share(
            table.slots, _SOFT_SHARE
        ):
            return 0
        slots = table.slots
        while rows > _share(slots, _HARD_SHARE) or known > _share(slots, _FRESH_SHARE):
            slots *= 2
        return slots

    def _add_block(self, k: int, block: Block, sizes: list[int]) -> None:
        table = self._tables[k]
        first = self._number(chunk_columns(block, sizes, table.form, k))
        table.blocks.append(block)
        table.chunks.extend(range(first, self._chunks))
        table.rows += sum(sizes)
        table.directory = sent(torch.tensor(table.chunks, dtype=torch.int32), self.device)

    def _move_index(self, k: int, slots: int, entries: Tensor) -> None:
        table = self._tables[k]
        table_erase.rebuild(table.entries, entries, int(self._lines_KT[k, TABLE_SALT]))
        table.entries, table.slots = entries, slots
        self.layout.counters_KC[k, COUNT_ERASED].zero_()
        self.counters.rebuilt(k)

    def _refresh(self) -> None:
        """Write the lines anew, and send them and the chunks' columns to the device."""
        for k, table in enumerate(self._tables):
            line = self._lines_KT[k]
            line[TABLE_ENTRIES], line[TABLE_MASK] = table.entries.data_ptr(), table.slots - 1
            line[TABLE_DIRECTORY] = table.directory.data_ptr()
            line[TABLE_FREE] = table.free_list.data_ptr()
        self._slots_K: Counts = np.array([table.slots for table in self._tables], dtype=np.int64)
        self._room_K: Counts = self.rows_room_K
        self._hard_K: Counts = self._slots_K * _HARD_SHARE[0] // _HARD_SHARE[1]
        self._soft_K: Counts = self._slots_K * _SOFT_SHARE[0] // _SOFT_SHARE[1]
        layout = self.layout
        layout.tables_KT.copy_(sent(torch.from_numpy(self._lines_KT.copy()), self.device))
        columns_WC = sent(torch.from_numpy(self._columns_WC.copy()), self.device)
        self.layout = ShardLayout(layout.tables_KT, layout.counters_KC, columns_WC)

    def make_free_lists(self) -> None:
        """Make each table's free list long enough for all its rows; before an erase."""
        changed = False
        for table in self._tables:
            if table.free_list.numel() < table.rows:
                longer = torch.zeros(table.rows, dtype=torch.int32, device=self.device)
                longer[: table.free_list.numel()] = table.free_list
                table.free_list, changed = longer, True
        if changed:
            self._refresh()

    def forget(self, k: int) -> None:
        """Empty a table's index; its chunks stay. The caller resets the counters."""
        table = self._tables[k]
        table.entries = table_index.new_entries(table.slots, self.device)
        self._refresh()

    def bytes_of(self, k: int) -> tuple[int, int, int, int]:
        """Bytes a table has allocated: weights, state, metadata, index."""
        table = self._tables[k]
        return (
            sum(block.weights.numel() for block in table.blocks),
            sum(block.state.numel() for block in table.blocks),
            sum(block.metadata_bytes for block in table.blocks),
            table.index_bytes,
        )


def _share(slots: int, share: tuple[int, int]) -> int:
    return slots * share[0] // share[1]
