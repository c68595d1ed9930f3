"""`CpuSnapshot`: the rows of a CPU shard as they were at a snapshot point."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shoal import _core
from shoal.address import address
from shoal.errors import InputError
from shoal.table import native, rows
from shoal.table.shard import Snapshot, SnapshotStats, check_buffer
from shoal.table.spec import TableSpec
from shoal.table.values import Cursor, RowChunk
from shoal.uncompiled import uncompiled

_WINDOW_ROWS = 1 << 21  # of the hash space, indexed at a time: 16 bytes each


@uncompiled
class CpuSnapshot(Snapshot):
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
        self._lanes = lanes
        at = None if since is None else (since.incarnation, since.version)
        try:
            self._core = native.closing(lambda: core.snapshot(at, buffer_bytes, _WINDOW_ROWS))
        except _core.SnapshotRefused as error:
            raise _refused(str(error), since) from None
        super().__init__(specs, int(self._core.since), int(self._core.version))
        self._cost: SnapshotStats | None = None  # once closed
        self._new_locks()
        _open.add(self)

    def _new_locks(self) -> None:
        self._reading, self._closing = threading.Lock(), threading.Lock()

    @property
    def stats(self) -> SnapshotStats:
        """What it has cost so far; rows that an older snapshot copied for both are not counted."""
        with self._closing:
            return self._cost or SnapshotStats(*self._core.stats())

    def _histogram(self, table: int, bits: int) -> Tensor:
        counts = torch.zeros(1 << bits, dtype=torch.int64, device="cpu")
        native.kept(lambda: self._core.histogram(table, bits, address(counts), self._threads()))
        return counts

    def _read(self, table: int, start: int, stop: int, state: bool) -> RowChunk:
        count, lanes = 0, self._threads()
        if start < stop:
            count = native.kept(lambda: self._core.find(table, start, stop - 1, lanes))
        chunk = rows.empty_chunk(self._specs[table], count, state=state)
        if count > 0:
            columns = rows.pointers(chunk)
            if not state:
                columns[-1] = 0
            native.kept(lambda: self._core.read(columns, lanes))
        return chunk

    def _threads(self) -> int:
        return 1 if self._gives_way else self._lanes()

    def _deleted(self, table: int) -> Tensor:
        count = native.kept(lambda: self._core.deleted_count(table))
        ids_U = torch.empty(count, dtype=torch.int64, device="cpu")
        self._core.copy_deleted(table, address(ids_U))
        return ids_U

    def _close(self) -> None:
        with self._closing:
            self._cost = SnapshotStats(*self._core.stats())
        self._core.close()


def _refused(why: str, since: Cursor | None) -> InputError:
    if why == "full":
        return native.too_many_snapshots()
    if why == "incarnation":
        return native.snapshot_since(str(since), "a cursor of the shard's incarnation")
    return native.snapshot_since(str(since), native.KEPT_VERSION)


_open: weakref.WeakSet[CpuSnapshot] = weakref.WeakSet()


def _after_fork() -> None:
    for snapshot in list(_open):
        snapshot._new_locks()  # no thread of the parent is here to let go of them


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
