"""The threads of a save: files that they write, pauses of the one that reads, how far it is."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from shoal.checkpoint.manifest import SavedFile
from shoal.checkpoint.row_files import Columns, RowFileWriter
from shoal.errors import CheckpointError

# Of a rank's processors, to read rows. Measured on two: rows read at the full speed of one core
# lengthen steps by a fourth, through memory and caches that both share; at a sixth of one core by
# three to eight hundredths.
_PART = 1 / 12

_QUOTA = "/sys/fs/cgroup/cpu.max"
# By torchrun, Open MPI, Slurm.
_RANKS_HERE = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE")


def processors(environ: Mapping[str, str] | None = None) -> float:
    """How many of the machine's processors are this rank's.

    Those it is bound to, at most its container's quota; where it is bound to none, it shares with
    the ranks that its launcher says are here.
    """
    every = os.cpu_count() or 1
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else every
    share = float(bound)
    if bound == every:
        said = os.environ if environ is None else environ
        ranks = next((said[name] for name in _RANKS_HERE if said.get(name, "").isdecimal()), "1")
        share = every / max(int(ranks), 1)
    try:
        with open(_QUOTA, encoding="ascii") as file:
            quota, period = file.read().split()
    except (OSError, ValueError):  # other systems, or an older hierarchy
        return share
    return share if quota == "max" else min(share, int(quota) / int(period))


class Throttle:
    """Pauses of the thread that reads rows, so that it is busy for a part of the time only.

    A rank with twelve processors or more makes none. For one thread; `stop` comes from any.
    """

    def __init__(self) -> None:
        self._share = 1.0
        self._stopped = threading.Event()
        self._since_s = 0.0

    def start(self) -> None:
        """Pause from now on; the thread that pauses calls it."""
        self._share = min(1.0, processors() * _PART)
        self._since_s = time.thread_time()

    def pause(self) -> None:
        """Sleep as long as the work since the last pause asks for."""
        if self._share < 1 and not self._stopped.is_set():
            busy_s = time.thread_time() - self._since_s
            self._stopped.wait(busy_s * (1 / self._share - 1))
            self._since_s = time.thread_time()

    def stop(self) -> None:
        """Pause no more: somebody waits for the end."""
        self._stopped.set()


_WAITING = 4  # pieces that are read but not written yet

_Piece = tuple[int, int, Columns | None]
"""(file, table in it, rows); no rows: the file is whole; file -1: there are no more."""


class FileThreads:
    """Writes files, each wholly on one of some threads, in the order in which they come.

    While one thread waits for the disk another one encodes, and the caller reads. At most
    `_WAITING` pieces lie between.

    Args:
        open_file: begins file number n.
        threads: how many.
    """

    def __init__(self, open_file: Callable[[int], RowFileWriter], threads: int = 2) -> None:
        self._open_file = open_file
        self._failure: Exception | None = None
        self._saved: dict[int, SavedFile] = {}
        self._now: tuple[int, queue.Queue[_Piece]] | None = None
        self._queues = [queue.Queue[_Piece](_WAITING // threads) for _ in range(threads)]
        self._threads = [
            threading.Thread(target=self._work, args=(one,), name="shoal-save-files", daemon=True)
            for one in self._queues
        ]
        for thread in self._threads:
            thread.start()

    def put(self, file: int, table: int, columns: Columns) -> None:
        """Hand over the next piece of a file; waits while many are under way.

        Raises:
            Exception: what a thread failed with.
        """
        if self._failure is not None:
            raise self._failure
        if self._now is None or self._now[0] != file:
            self._end_file()
            self._now = (file, min(self._queues, key=lambda one: one.qsize()))
        self._now[1].put((file, table, columns))

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
        self._failure = self._failure or CheckpointError("the save was aborted")
        self._stop()

    def _end_file(self) -> None:
        if self._now is not None:
            (file, its), self._now = self._now, None
            its.put((file, -1, None))

    def _stop(self) -> None:
        for one in self._queues:
            one.put((-1, -1, None))
        for thread in self._threads:
            thread.join()

    def _work(self, pieces: queue.Queue[_Piece]) -> None:
        open_: RowFileWriter | None = None
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
            del piece, columns  # their memory, before the next one is waited for
        if open_ is not None:
            # What stopped it is reported already; what is left is removed at the next save.
            with contextlib.suppress(CheckpointError):
                open_.abort()


@dataclass(frozen=True, slots=True)
class Progress:
    """How far this rank is.

    Args:
        bytes_done, bytes_total: of rows that this rank writes; total is 0 until they are counted.
        copied_rows, spilled_bytes, waited_s: what keeping the rows of the snapshot point has cost
            training: rows copied before they changed, bytes of those that went to a temporary
            file, and seconds that updates waited for it. 0 where training waits as a whole.
    """

    bytes_done: int
    bytes_total: int
    copied_rows: int = 0
    spilled_bytes: int = 0
    waited_s: float = 0.0
