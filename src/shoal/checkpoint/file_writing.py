"""Threads that write a rank's files while its next rows are read."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Mapping
from typing import Protocol

from torch import Tensor

from shoal.checkpoint.manifest import FileKind, SavedFile
from shoal.checkpoint.row_files import IdFileWriter, RowFileWriter
from shoal.checkpoint.row_layout import RowLayout
from shoal.checkpoint.splitting import FilePlan
from shoal.checkpoint.storage import Storage
from shoal.errors import CheckpointError
from shoal.table.shard import RowChunk

__all__ = ["FileThreads", "OpenFile", "PlannedIds", "PlannedRows"]

_WAITING = 4  # pieces that are read but not written yet


_Piece = tuple[int, int, tuple[Tensor, ...] | None]
"""(file, table, columns); no columns: the file is whole; file -1: there are no more."""


class OpenFile(Protocol):
    """A file being written, piece after piece."""

    def add(self, table: int, columns: tuple[Tensor, ...]) -> None:
        """Append columns of a table, which is an index into the plan's tables."""
        ...

    def close(self) -> SavedFile: ...
    def abort(self) -> None: ...


class FileThreads:
    """Writes files, each wholly on one of some threads, in the order in which they come.

    While one thread waits for the disk another one encodes, and the caller reads. At most
    `_WAITING` pieces lie between.

    Args:
        open_file: begins file number n.
        threads: how many.
    """

    def __init__(self, open_file: Callable[[int], OpenFile], threads: int = 2) -> None:
        self._open_file = open_file
        self._room = threading.Semaphore(_WAITING)
        self._failure: Exception | None = None
        self._saved: dict[int, SavedFile] = {}
        self._now: tuple[int, int] | None = None
        self._queues: list[queue.SimpleQueue[_Piece]] = [
            queue.SimpleQueue() for _ in range(threads)
        ]
        self._threads = [
            threading.Thread(target=self._work, args=(one,), name="shoal-save-files", daemon=True)
            for one in self._queues
        ]
        for thread in self._threads:
            thread.start()

    def put(self, file: int, table: int, columns: tuple[Tensor, ...]) -> None:
        """Hand over the next piece of a file; waits while many are on their way.

        Raises:
            Exception: what a thread failed with.
        """
        self._room.acquire()
        if self._failure is not None:
            self._room.release()
            raise self._failure
        if self._now is None or self._now[0] != file:
            self._end_file()
            lane = min(range(len(self._queues)), key=lambda k: self._queues[k].qsize())
            self._now = (file, lane)
        self._queues[self._now[1]].put((file, table, columns))

    def finish(self) -> dict[int, SavedFile]:
        """Wait until all files are durable.

        Raises:
            Exception: what a thread failed with.
        """
        self._end_file()
        self._stop()
        if self._failure is not None:
            raise self._failure
        return self._saved

    def abort(self) -> None:
        """Stop soon; what is written stays or not."""
        self._failure = self._failure or CheckpointError("the save was given up")
        self._stop()

    def _end_file(self) -> None:
        if self._now is not None:
            file, lane = self._now
            self._now = None
            self._queues[lane].put((file, -1, None))

    def _stop(self) -> None:
        for one in self._queues:
            one.put((-1, -1, None))
        for thread in self._threads:
            thread.join()

    def _work(self, pieces: queue.SimpleQueue[_Piece]) -> None:
        open_: OpenFile | None = None
        while (piece := pieces.get())[0] >= 0:
            file, table, columns = piece
            try:
                if self._failure is None:
                    if columns is None:
                        assert open_ is not None
                        self._saved[file], open_ = open_.close(), None
                    else:
                        open_ = open_ or self._open_file(file)
                        open_.add(table, columns)
            except Exception as error:  # noqa: BLE001 - raised in the thread that hands over
                self._failure = self._failure or error
            finally:
                if columns is not None:
                    self._room.release()
                del piece, columns
        if open_ is not None:
            # What stopped it is told already; what is left is removed at the next save.
            with contextlib.suppress(CheckpointError):
                open_.abort()


class PlannedRows:
    """A row file that gets columns of the plan's tables."""

    def __init__(self, folder: Storage, plan: FilePlan, numbers: Mapping[int, int]) -> None:
        assert isinstance(plan.layout, RowLayout)
        self._tables, self._numbers = plan.tables, numbers
        ranges = (plan.start, plan.stop)
        self._writer = RowFileWriter(folder, plan.path, plan.layout, plan.tables, ranges)
        self.close, self.abort = self._writer.close, self._writer.abort

    def add(self, table: int, columns: tuple[Tensor, ...]) -> None:
        ids, versions, last_seen_s, counts, state, weights = columns
        number = self._numbers[table]
        key = self._tables[number]
        chunk = RowChunk(key, ids, weights, state, versions, last_seen_s, counts)
        self._writer.add(number, chunk)


class PlannedIds:
    """A file of deletions or sights that gets columns of the plan's tables."""

    def __init__(
        self, folder: Storage, plan: FilePlan, numbers: Mapping[int, int], *, counted: bool
    ) -> None:
        self._numbers = numbers
        ranges = (plan.start, plan.stop)
        kind: FileKind = "sights" if counted else "deleted"
        self._writer = IdFileWriter(folder, plan.path, kind, plan.tables, ranges)
        self.close, self.abort = self._writer.close, self._writer.abort

    def add(self, table: int, columns: tuple[Tensor, ...]) -> None:
        self._writer.add(self._numbers[table], *columns)
