"""Writes a snapshot point of a job, stage by stage, on all ranks; then commits it."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from shoal import _core
from shoal.checkpoint import dense, job_state
from shoal.checkpoint.manifest import FileKind, Manifest, SavedFile, SavedTable, commit
from shoal.checkpoint.row_files import Columns, RowFileWriter, RowLayout, sketch_path, write_whole
from shoal.checkpoint.sharded_rows import (
    IdSlice,
    OtherRankFailed,
    RowSlice,
    ShardedRows,
    ShardedTable,
    slices_of,
)
from shoal.checkpoint.snapshot_point import SnapshotPoint
from shoal.checkpoint.storage import Storage
from shoal.checkpoint.table_match import saved_table
from shoal.checkpoint.writing_plan import plan_writing, split
from shoal.comm.collectives import Collectives
from shoal.comm.consensus import reduced, together
from shoal.errors import CheckpointError, CollectiveFailed, ShoalError
from shoal.table.hosting import HostedTables
from shoal.table.spec import TableSpec
from shoal.table.values import AdmissionState

T = TypeVar("T")

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


class JobWriter:
    """One rank's part in writing a checkpoint.

    Args:
        tables: the job's, by collection.
        point: held until its rows are read; `run` closes it.
        folder: of the checkpoint; without a manifest.
        draft: the manifest but for tables and files; the same on every rank.
        collectives: nobody else's until it is done.
    """

    def __init__(
        self,
        tables: Mapping[str, HostedTables],
        point: SnapshotPoint,
        folder: Storage,
        draft: Manifest,
        collectives: Collectives,
    ) -> None:
        self.tables, self.point, self.folder = tables, point, folder
        self.draft, self.collectives = draft, collectives
        self._done = self._total = 0
        self._rows: dict[tuple[FileKind, str], int] = {}  # of all ranks, by kind and table
        self._last: Progress | None = None
        self._throttle = Throttle()
        self._aborted = threading.Event()

    def stop_throttling(self) -> None:
        """Pause no more between rows; from any thread."""
        self._throttle.stop()

    def run(self, *, concurrent: bool = False) -> Manifest:
        """Write everything; the manifest last, when all that it names is durable on all ranks.

        Args:
            concurrent: leave cores to training, which continues: this thread and those that it
                starts give way to others, and it pauses between rows.

        Raises:
            CheckpointError: a rank failed: which, and why. There is no manifest then.
            CollectiveFailed: a rank died or did not come in time.
        """
        try:
            rows = self._stage("row files", lambda: self._write_rows(concurrent))
            deleted = self._stage("deletions", lambda: self._write("deleted"))
            self._last = self.progress()
        finally:
            self.point.close()
        admission = self._stage("admission counters", lambda: self._write("admission"))
        sketches = self._stage("admission sketches", self._write_sketches)
        dense_files = self._stage(
            "dense part", lambda: dense.write(self.point.dense, self.folder, self.collectives)
        )[0]
        rank_states = self._stage("states of ranks", lambda: self.point.rank_state)
        state = self._stage("state of the job", lambda: self._write_state(rank_states))[0]
        kinds = (rows, deleted, admission, sketches)
        files = [one for kind in kinds for one in _in_order(kind)] + [*dense_files, *state]
        manifest = replace(self.draft, tables=tuple(self._saved_tables()), files=tuple(files))
        self._stage("manifest", lambda: self._commit(manifest), last=True)
        return manifest

    def progress(self) -> Progress:
        """See `Progress`; from any thread."""
        if self._last is not None:
            return self._last
        snapshots = {id(one): one for one in self.point.snapshots.values()}.values()
        costs = [stats for one in snapshots if (stats := getattr(one, "stats", None)) is not None]
        names = ("copied_rows", "spilled_bytes", "waited_s")
        spent = (sum(getattr(one, name) for one in costs) for name in names)
        return Progress(self._done, self._total, *spent)

    def abort(self) -> None:
        """Fail soon, on all ranks; from any thread."""
        self._aborted.set()
        self._throttle.stop()

    def _stage(self, what: str, work: Callable[[], T], *, last: bool = False) -> list[T]:
        """Do a stage on all ranks or fail on all; what it gave on every rank.

        Args:
            what: is written.
            work: this rank's part. Where it makes collective calls, they are the same on every
                rank whatever fails.
            last: what it does cannot be taken back, so that it is not aborted any more.
        """

        def part() -> T:
            try:
                value = work()
            except OtherRankFailed:
                return cast(T, None)  # of no use: that rank says why, and all raise
            if not last:
                self._check_aborted()  # not before: other ranks may be in a call of the work
            return value

        where = f"writing the {what} of checkpoint {self.folder.url}"
        try:
            return together(self.collectives, where, part)
        except (ShoalError, MemoryError) as error:
            if isinstance(error, CollectiveFailed) or str(error).startswith(where):
                raise
            raise CheckpointError(  # this rank's own, as the others hear of it
                where,
                got=f"on rank {self.collectives.rank}: {type(error).__name__}: {error}",
                allowed="success on every rank",
                remedy="Mend what is named; the next save removes what this one left.",
            ) from error

    def _check_aborted(self) -> None:
        if self._aborted.is_set():
            raise CheckpointError(
                "a save under way", got="abort()", allowed="to continue", remedy="Save again."
            )

    def _write_rows(self, concurrent: bool) -> dict[int, SavedFile]:
        if concurrent:
            _core.give_way()
            self._throttle.start()
            for snapshot in self.point.snapshots.values():
                snapshot.give_way()
        return self._write("rows")

    def _write(self, kind: FileKind) -> dict[int, SavedFile]:
        """This rank's files of rows or ids, by their numbers; all ranks call it alike."""
        tables = [] if (kind, self.draft.kind) == ("deleted", "full") else [*self._sharded(kind)]
        if not tables:
            return {}
        rows = ShardedRows(tables, self.collectives)
        counted = rows.counted()
        self._rows |= {(kind, one.key): one.rows for one in counted}
        files = split(counted, kind)
        plan = plan_writing(files, counted, self.collectives.world_size)
        mine = [n for n, writer in enumerate(plan.writers) if writer == self.collectives.rank]
        self._total += sum(files[n].rows * files[n].layout.row_bytes for n in mine)

        def opened(number: int) -> RowFileWriter:
            one = files[number]
            ranges = (one.start, one.stop)
            return RowFileWriter(self.folder, one.path, one.layout, one.tables, ranges, kind)

        threads = FileThreads(opened)
        try:
            for file, table, columns in rows.pieces(plan):
                self._check_aborted()
                threads.put(file, files[file].tables.index(tables[table].key), columns)
                self._done += len(columns[0]) * files[file].layout.row_bytes
                self._throttle.pause()
            saved = threads.finish()
        except BaseException:
            threads.abort()
            with contextlib.suppress(CollectiveFailed):  # what follows fails with it
                rows.abandon()
            raise
        for number in mine:
            if saved[number].rows != files[number].rows:
                what, allowed = f"rows of {files[number].path}", f"{files[number].rows}, as counted"
                remedy = "A snapshot did not keep its rows: report it."
                raise CheckpointError(what, saved[number].rows, allowed, remedy)
        return saved

    def _sharded(self, kind: FileKind) -> Iterator[ShardedTable]:
        """What there is of a kind on this rank. Every slice has all ids: the first one's count."""
        for name, hosted, spec in self._specs():
            key, snapshot = f"{name}/{spec.name}", self.point.snapshots[name]
            slices = slices_of(hosted, spec, self.collectives.rank)
            if kind == "rows":
                layout = RowLayout.rows(spec.dim, spec.state_width, spec.dtype)
                rows = (None if k.table is None else RowSlice(snapshot, k.table) for k in slices)
                yield ShardedTable(key, spec, layout, slices, tuple(rows))
                continue
            if kind == "admission" and _counter(spec) != "exact":
                continue
            layout = RowLayout.ids(counted=kind == "admission")
            source = self._ids(kind, name, spec, slices[0].table)
            yield ShardedTable(key, spec, layout, slices[:1], (source,))

    def _ids(self, kind: FileKind, name: str, spec: TableSpec, first: int | None) -> IdSlice | None:
        """Deleted or counted ids that this rank has of a table; read when they are asked for."""
        if kind == "deleted":
            snapshot = self.point.snapshots[name]
            if first is not None:
                return IdSlice(spec.hash_name, lambda: (snapshot.deleted(first),))
        elif (here := self.point.admission.get((name, spec.name))) is not None:
            return IdSlice(spec.hash_name, lambda: (here.ids, here.counts))
        return None

    def _write_sketches(self) -> dict[int, SavedFile]:
        """Of the sketches of all ranks the largest cells: never less than an id was seen, and the
        same again when all ranks that loaded it save it."""
        saved: dict[int, SavedFile] = {}
        failures: list[Exception] = []
        ranks = self.collectives
        tables = [(name, spec) for name, _, spec in self._specs() if _counter(spec) == "sketch"]
        for number, (name, spec) in enumerate(tables):
            cells = _cells(spec, self.point.admission.get((name, spec.name)))
            cells = reduced(ranks, cells, "max", what="sketches of a checkpoint")
            if number % ranks.world_size == ranks.rank and not failures:
                path, data = sketch_path(name, spec.name), cells.to(torch.uint32).numpy()
                try:
                    key = f"{name}/{spec.name}"
                    saved[number] = write_whole(self.folder, path, "sketch", data, [key])
                except Exception as error:  # noqa: BLE001 - the other ranks are in the next round
                    failures.append(error)
        if failures:
            raise failures[0]
        return saved

    def _write_state(self, rank_states: Sequence[Mapping[str, Any]]) -> tuple[SavedFile, ...]:
        if self.collectives.rank != 0:
            return ()
        return (job_state.write(self.folder, self.point.state, rank_states),)

    def _commit(self, manifest: Manifest) -> None:
        if self.collectives.rank == 0:
            commit(self.folder, manifest)

    def _saved_tables(self) -> Iterator[SavedTable]:
        for name, _, spec in self._specs():
            key = f"{name}/{spec.name}"
            rows, deleted = self._rows["rows", key], self._rows.get(("deleted", key), 0)
            yield saved_table(name, spec, rows=rows, deleted=deleted)

    def _specs(self) -> Iterator[tuple[str, HostedTables, TableSpec]]:
        for name, hosted in self.tables.items():
            for spec in hosted.specs:
                yield name, hosted, spec


def _cells(spec: TableSpec, here: AdmissionState | None) -> Tensor:
    """Cells of a table's sketch, int64; zeros where this rank has none."""
    assert spec.admission is not None
    if here is None:
        cells = spec.admission.sketch_width * spec.admission.sketch_depth
        return torch.zeros(cells, dtype=torch.int64, device="cpu")
    return torch.frombuffer(bytearray(here.cells), dtype=torch.uint32).to(torch.int64)


def _counter(spec: TableSpec) -> str | None:
    return None if spec.admission is None else spec.admission.counter


def _in_order(written: Sequence[Mapping[int, SavedFile]]) -> list[SavedFile]:
    files = {number: file for one in written for number, file in one.items()}
    return [files[number] for number in sorted(files)]
