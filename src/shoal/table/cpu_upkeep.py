"""The verbs of a CPU shard that take no ids of a batch: eviction, cuts, whole rows, counters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shoal.address import address
from shoal.table import checks, refusals, rows
from shoal.table.changes import Changes, Cursor, released
from shoal.table.cpu_changes import changes_of, resumed
from shoal.table.cpu_snapshot import CpuSnapshot
from shoal.table.shard import AdmissionState, Entry, RowChunk, TableStats
from shoal.table.snapshot import BUFFER_BYTES
from shoal.table.spec import TableSpec

__all__ = ["CpuUpkeep"]

_CPU = torch.device("cpu")


class CpuUpkeep:
    """What `CpuShard` does between batches; see `shoal.table.shard.Shard` for every verb.

    Args:
        specs: the tables.
        core: the compiled shard that holds them.
        threads: threads a call may use; None follows `torch.get_num_threads()` at each call.
    """

    def __init__(self, specs: Sequence[TableSpec], core: Any, threads: int | None) -> None:
        self._specs = tuple(specs)
        self._core = core
        self._threads = threads

    def _lanes(self) -> int:
        return self._threads or torch.get_num_threads()

    @property
    def specs(self) -> tuple[TableSpec, ...]:
        """The tables, in the order their indices name them."""
        return self._specs

    @property
    def device(self) -> torch.device:
        """The CPU."""
        return _CPU

    def evict(self, now_s: int) -> int:
        """Drop expired rows; returns how many."""
        return int(self._core.evict(now_s))

    def cut(self) -> int:
        """Close the current epoch and open the next; returns the closed one.

        Raises:
            InputError: the last of 2^32 - 2 epochs is open.
        """
        return int(refusals.cut(self._core.cut))

    @property
    def incarnation(self) -> int:
        """Whose cursors are good; see `shoal.table.changes.ChangeFeed`."""
        return int(self._core.incarnation())

    def changes(self, cursor: Cursor, limit: int) -> Changes:
        """The next page of what changed: at most `limit` rows and deleted ids together.

        Raises:
            InputError: limit is below 1, or `to_epoch` is not closed yet.
        """
        return changes_of(self._specs, self._core, cursor, limit)

    def release(self, epoch: int | None) -> None:
        """Forget deletions up to `epoch`; None forgets all and keeps none until `changes`.

        Raises:
            InputError: not an int in [0, 2^32).
        """
        if epoch is None:
            self._core.stop_changes()
        else:
            self._core.release(released(epoch))

    def snapshot(
        self, since: Cursor | None = None, *, buffer_bytes: int = BUFFER_BYTES
    ) -> CpuSnapshot:
        """Make a cut and keep the rows as they are at it; see `shoal.table.shard.Shard`.

        Args:
            since: only what changed after `since.from_epoch`; None: all rows.
            buffer_bytes: memory for copies of rows that change; what is beyond it goes to an
                unlinked file in $TMPDIR.

        Raises:
            InputError: another snapshot is open, `since` is of another incarnation, older than
                the deletions that are kept or not of a closed epoch, or the buffer is negative.
        """
        return CpuSnapshot(self._specs, self._core, since, buffer_bytes, self._lanes)

    def resume(self, epoch: int) -> Cursor:
        """After a load: close all epochs up to `epoch` and keep deletions from here on.

        Raises:
            InputError: an epoch below one that a row is stamped with, or outside [0, 2^32 - 2].
        """
        return resumed(self._core, epoch)

    def export(self, table: int) -> RowChunk:
        """All rows of a table, ordered by hash."""
        checks.table_index(table, len(self._specs))
        return rows.chunk_of(self._specs[table], self._core.export(table))

    def expect(self, table: int, rows: int) -> None:
        """Reserve memory for so many rows in all; what is not filled later is not resident.

        Raises:
            InputError: rows is negative.
            DTypeError: no int.
        """
        checks.table_index(table, len(self._specs))
        self._core.expect(table, checks.expected_rows(rows))

    def load(self, table: int, chunk: RowChunk) -> None:
        """Upsert rows with their state and metadata."""
        checks.table_index(table, len(self._specs))
        spec = self._specs[table]
        ready = checks.chunk(chunk, spec, rows.weight_dtype(spec), rows.real_dtype(spec))
        columns = [address(tensor) for tensor in ready]
        count = ready[0].numel()
        refusals.worded(lambda: self._core.load(table, count, columns, self._lanes()))

    def entry(self, table: int, id: int) -> Entry | None:
        """One row in full, or None."""
        checks.table_index(table, len(self._specs))
        return rows.entry_of(rows.chunk_of(self._specs[table], self._core.entry(table, id)))

    def size(self, table: int) -> int:
        """Rows of a table."""
        checks.table_index(table, len(self._specs))
        return int(self._core.size(table))

    def clear(self, table: int) -> None:
        """Drop all rows of a table.

        Raises:
            TicketError: a live ticket holds rows.
        """
        checks.table_index(table, len(self._specs))
        refusals.cleared(lambda: self._core.clear(table), self._specs[table].name)

    def admission_state(self, table: int) -> AdmissionState:
        """Sights of ids without a row; survives a restart through `load_admission_state`."""
        checks.table_index(table, len(self._specs))
        return rows.admission_of(self._core, table)

    def load_admission_state(self, table: int, state: AdmissionState) -> None:
        """Restore what `admission_state` returned.

        Raises:
            ShapeError: the sketch has another size than the spec's.
        """
        checks.table_index(table, len(self._specs))
        rows.load_admission(self._core, table, self._specs[table], state)

    @property
    def last_step(self) -> int:
        """Global step of the last update: what reads without a step use (OneBit's scale)."""
        return int(self._core.last_step)

    @last_step.setter
    def last_step(self, step: int) -> None:
        self._core.last_step = step

    def stats(self) -> tuple[TableStats, ...]:
        """Counters of every table."""
        return tuple(
            rows.stats_of(spec.name, self._core.stats(table))
            for table, spec in enumerate(self._specs)
        )

    def check(self) -> None:
        """Nothing: what is wrong here is raised by the call itself."""
