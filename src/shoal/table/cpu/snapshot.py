"""`CpuSnapshot`: the rows of a CPU shard as they were at a snapshot point."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from shoal import _core
from shoal.address import address
from shoal.errors import InputError
from shoal.table import checks, native, rows
from shoal.table.shard import SnapshotStats, check_bits, check_buffer, check_range, not_copied
from shoal.table.spec import TableSpec
from shoal.table.values import Cursor, RowChunk
from shoal.uncompiled import uncompiled

_WINDOW_ROWS = 1 << 21  # of the hash space, indexed at a time: 16 bytes each


@uncompiled
class CpuSnapshot:
    """See `shoal.table.shard.Snapshot`. Methods that change rows continue while it is open.

    A row that a method is about to change is copied first, once for all open snapshots that need
    it, by the oldest of them: into at most `buffer_bytes` of its memory and then into an unlinked
    file. If that fails, the method continues, and the snapshots that have rows there are lost:
    their reads raise. Besides, an index of at most 32 MiB is kept of the hashes read last.

    Args:
        specs: the tables.
        core: the compiled shard that holds them.
        since: only what changed after `since.version`; None: all rows.
        buffer_bytes: memory for copied rows.
        lanes: threads a read may use, asked at each.

    Raises:
        InputError: too many snapshots are open, or `since` cannot be served.
    """

    def __init__(
        self,
        specs: tuple[TableSpec, ...],
        core: Any,
        since: Cursor | None,
        buffer_bytes: int,
        lanes: Callable[[], int],
    ) -> None:
        check_buffer(buffer_bytes)
        self._specs = specs
        self._lanes = lanes
        at = None if since is None else (since.incarnation, since.version)
        try:
            self._core = native.closing(lambda: core.snapshot(at, buffer_bytes, _WINDOW_ROWS))
        except _core.SnapshotRefused as error:
            raise _refused(str(error), since) from None
        self._version, self._since = int(self._core.version), int(self._core.since)
        self._cost: SnapshotStats | None = None  # once closed
        self._new_locks()
        _open.add(self)

    def __reduce__(self) -> Any:
        raise not_copied("a snapshot")

    def _new_locks(self) -> None:
        self._reading, self._closing = threading.Lock(), threading.Lock()

    @property
    def version(self) -> int:
        """The closed version it shows."""
        return self._version

    @property
    def since(self) -> int:
        """Rows stamped in `(since, version]` are in it."""
        return self._since

    @property
    def concurrent(self) -> bool:
        """True: methods that change rows continue."""
        return True

    @property
    def stats(self) -> SnapshotStats:
        """What it has cost so far; rows that an older snapshot copied for both are not counted."""
        with self._closing:
            return self._cost or SnapshotStats(*self._core.stats())

    def histogram(self, table: int, bits: int) -> Tensor:
        """Rows by the top `bits` of their hash: int64 [2^bits], bits in [0, 20].

        Raises:
            InputError: no such table, bits outside, or the snapshot is closed.
            CheckpointError: copies of changed rows could not be kept.
        """
        check_bits(bits)
        counts = torch.zeros(1 << bits, dtype=torch.int64, device="cpu")
        with self._reading:
            self._check(table)
            native.kept(lambda: self._core.histogram(table, bits, address(counts), self._lanes()))
        return counts

    def read(self, table: int, start: int, stop: int, *, state: bool = True) -> RowChunk:
        """Rows with `start <= h < stop`, ordered by h; 0 <= start <= stop <= HASHES.

        state: with it; without, the chunk's state has no columns.

        Raises:
            InputError: no such table, a range outside, or the snapshot is closed.
            CheckpointError: copies of changed rows could not be kept.
        """
        check_range(start, stop)
        with self._reading:  # the core fills what it found last; rows are kept until close()
            self._check(table)
            return self._read(table, start, stop, self._lanes(), state)

    def _read(self, table: int, start: int, stop: int, lanes: int, state: bool) -> RowChunk:
        count = 0
        if start < stop:
            count = native.kept(lambda: self._core.find(table, start, stop - 1, lanes))
        chunk = rows.empty_chunk(self._specs[table], count, state=state)
        if count > 0:
            columns = rows.pointers(chunk)
            if not state:
                columns[-1] = 0
            native.kept(lambda: self._core.read(columns, lanes))
        return chunk

    def deleted(self, table: int) -> Tensor:
        """Ids int64 [U], ordered by h, deleted in `(since, version]`, without a row at `version`.

        Raises:
            InputError: no such table, or the snapshot is closed.
            CheckpointError: the log of deletions, or copies of changed rows, could not be kept.
        """
        with self._reading:
            self._check(table)
            count = native.kept(lambda: self._core.deleted_count(table))
            ids_U = torch.empty(count, dtype=torch.int64, device="cpu")
            self._core.copy_deleted(table, address(ids_U))
        return ids_U

    def give_way(self) -> None:
        """Later reads use the calling thread only."""
        self._lanes = _one_lane

    def close(self) -> None:
        """Forget it, and let go of what it kept and no other open snapshot needs; nothing is
        copied for it from now on. Waits for a read. May be called twice."""
        with self._reading:
            with self._closing:
                self._cost = self._cost or SnapshotStats(*self._core.stats())
            self._core.close()

    def __enter__(self) -> CpuSnapshot:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _check(self, table: int) -> None:
        checks.table_index(table, len(self._specs))
        if self._cost is not None:
            raise native.closed_snapshot()


def _refused(why: str, since: Cursor | None) -> InputError:
    if why == "full":
        return native.too_many_snapshots()
    if why == "incarnation":
        return native.snapshot_since(str(since), "a cursor of the shard's incarnation")
    return native.snapshot_since(str(since), native.KEPT_VERSION)


def _one_lane() -> int:
    return 1


_open: weakref.WeakSet[CpuSnapshot] = weakref.WeakSet()


def _after_fork() -> None:
    for snapshot in list(_open):
        snapshot._new_locks()  # no thread of the parent is here to let go of them


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
