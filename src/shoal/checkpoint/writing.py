"""Writes a snapshot point of a job, stage by stage, on all ranks; then commits it."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from shoal import _core
from shoal.checkpoint import contents, dense
from shoal.checkpoint.manifest import (
    SCHEMA,
    FileKind,
    Kind,
    Manifest,
    Parent,
    SavedFile,
    SavedTable,
    commit,
)
from shoal.checkpoint.matching import saved_table
from shoal.checkpoint.plan import FilePlan, TableRows, plan_writing, split
from shoal.checkpoint.rank_rows import (
    IdSlice,
    OtherRankFailed,
    RowSlice,
    ShardedRows,
    ShardedTable,
    id_columns,
    joined_ids,
    joined_rows,
    row_columns,
)
from shoal.checkpoint.row_files import IdFileWriter, RowFileWriter, sketch_path, write_whole
from shoal.checkpoint.row_layout import IdLayout, RowLayout
from shoal.checkpoint.snapshot_point import Cut, slices_of
from shoal.checkpoint.storage import Storage
from shoal.comm.collectives import Collectives
from shoal.errors import CheckpointError, CollectiveFailed
from shoal.placement import Hosted
from shoal.table.hosting import HostedTables
from shoal.table.shard import Snapshot
from shoal.table.spec import TableSpec
from shoal.table.values import AdmissionState, RowChunk

T = TypeVar("T")


class Stages:
    """Votes of a save.

    Args:
        where: what is written, for messages.
        collectives: nobody else's meanwhile.
    """

    def __init__(self, where: str, collectives: Collectives) -> None:
        self._where, self._collectives = where, collectives
        self._given_up = threading.Event()

    def give_up(self) -> None:
        """Let the stage under way fail, on all ranks; from any thread."""
        self._given_up.set()

    def check(self) -> None:
        """Raise if it was given up: in a loop that tells other ranks when it ends early."""
        if self._given_up.is_set():
            remedy = "Save again."
            what = "a save under way"
            raise CheckpointError(what, got="abort()", allowed="to go on", remedy=remedy)

    def run(self, what: str, work: Callable[[], T], *, last: bool = False) -> list[T]:
        """Do a stage; what it gave on every rank.

        Args:
            what: names it.
            work: this rank's part. Where it makes collective calls, they are the same on every
                rank whatever fails.
            last: what it does cannot be taken back, so that it is not given up any more.

        Raises:
            CheckpointError: a rank failed, or gave up; on every rank.
            CollectiveFailed: a rank is gone.
        """
        value: T | None = None
        failure: Exception | None = None
        try:
            value = work()
            if not last:
                self.check()  # not before: other ranks may be in a collective call of the work
        except CollectiveFailed:
            raise
        except Exception as error:  # noqa: BLE001 - every rank hears of it, whatever it is
            failure = error
        told = None if failure is None else _told(failure)
        said: list[tuple[str | None, Any]] = self._collectives.gather_objects(
            (told, value), what=f"vote on the {what} of a checkpoint"
        )
        wrong = [(rank, text) for rank, (text, _) in enumerate(said) if text is not None]
        if wrong:
            got = "; ".join(f"on rank {rank}: {text}" for rank, text in wrong if text)
            raise CheckpointError(
                f"writing the {what} of {self._where}",
                got=got,
                allowed="success on every rank",
                remedy="Mend what is named; the next save removes what this one left.",
            ) from failure
        return [one for _, one in said]


def _told(failure: Exception) -> str:
    """For the vote; nothing of one that only follows from another rank's."""
    if isinstance(failure, OtherRankFailed):
        return ""
    name = "" if isinstance(failure, CheckpointError) else f"{type(failure).__name__}: "
    return " ".join(f"{name}{failure}".split())


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


class Pace:
    """Rests of the thread that reads rows, so that it is busy for a part of the time only.

    A rank with twelve processors or more takes none. For one thread; `hurry` comes from any.
    """

    def __init__(self) -> None:
        self._share = 1.0
        self._hurried = threading.Event()
        self._since_s = 0.0

    def begin(self) -> None:
        """Rest from now on; the thread that rests calls it."""
        self._share = min(1.0, processors() * _PART)
        self._since_s = time.thread_time()

    def rest(self) -> None:
        """Sleep as long as the work since the last rest asks for."""
        if self._share < 1 and not self._hurried.is_set():
            busy_s = time.thread_time() - self._since_s
            self._hurried.wait(busy_s * (1 / self._share - 1))
            self._since_s = time.thread_time()

    def hurry(self) -> None:
        """Rest no more: somebody waits for the end."""
        self._hurried.set()


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a manifest says besides what is in its files."""

    id: str
    kind: Kind
    step: int
    position: int
    parent: Parent | None
    created_s: int
    last_steps: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Progress:
    """How far this rank is.

    Args:
        bytes_done, bytes_total: of rows that this rank writes; total is 0 until they are counted.
        copied_rows, spilled_bytes, waited_s: what keeping the rows of the cut has cost training:
            rows copied before they changed, bytes of those that went to a temporary file, and
            seconds that updates waited for it. 0 where training waits as a whole.
    """

    bytes_done: int
    bytes_total: int
    copied_rows: int = 0
    spilled_bytes: int = 0
    waited_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Written:
    """Files of one kind: this rank's by their numbers, and rows of all ranks by key."""

    saved: Mapping[int, SavedFile]
    rows: Mapping[str, int]


class JobWriter:
    """One rank's part in writing a checkpoint.

    Args:
        tables: the job's, by collection.
        cut: held still until its rows are read; `run` closes it.
        folder: of the checkpoint; without a manifest.
        facts: for the manifest; the same on every rank.
        collectives: nobody else's meanwhile.
    """

    def __init__(
        self,
        tables: Mapping[str, HostedTables],
        cut: Cut,
        folder: Storage,
        facts: Facts,
        collectives: Collectives,
    ) -> None:
        self._tables, self._cut, self._folder = tables, cut, folder
        self._facts, self._collectives = facts, collectives
        self._done = self._total = 0
        self._stages = Stages(f"checkpoint {folder.url}", collectives)
        self._last: Progress | None = None
        self._pace = Pace()

    @property
    def concurrent(self) -> bool:
        """Whether training may go on while it runs."""
        return self._cut.concurrent

    def hurry(self) -> None:
        """Rest no more between rows; from any thread."""
        self._pace.hurry()

    def run(self, *, beside: bool = False) -> Manifest:
        """Write everything; the manifest last, when all that it names is durable on all ranks.

        Args:
            beside: leave cores to training, which goes on: this thread and those that it starts
                give way to others, and it rests between rows.

        Raises:
            CheckpointError: a rank failed: which, and why. There is no manifest then.
            CollectiveFailed: a rank died or did not come in time.
        """
        try:
            rows = self._stages.run("row files", lambda: self._write_rows(beside))
            deleted = self._stages.run("deletions", self._write_deleted)
            self._last = self.progress()
        finally:
            self._cut.close()
        sights = self._stages.run("sights", self._write_sights)
        sketches = self._stages.run("sketches of sights", self._write_sketches)
        dense_files = self._stages.run("dense part", self._write_dense)[0]
        rank_states = self._stages.run("states of ranks", lambda: self._cut.rank_state)
        state = self._stages.run("state of the job", lambda: self._write_state(rank_states))[0]
        files = [
            *(file for kind in (rows, deleted, sights, sketches) for file in _in_order(kind)),
            *dense_files,
            *state,
        ]
        manifest = self._manifest(files, rows[0].rows, deleted[0].rows)
        self._stages.run("manifest", lambda: self._commit(manifest), last=True)
        return manifest

    def progress(self) -> Progress:
        """See `Progress`; from any thread."""
        if self._last is not None:
            return self._last
        snapshots = {id(one): one for one in self._cut.snapshots.values()}.values()
        costs = [stats for one in snapshots if (stats := getattr(one, "stats", None)) is not None]
        return Progress(
            self._done,
            self._total,
            sum(one.copied_rows for one in costs),
            sum(one.spilled_bytes for one in costs),
            sum(one.waited_s for one in costs),
        )

    def abort(self) -> None:
        """Fail soon, on all ranks; from any thread."""
        self._stages.give_up()
        self._pace.hurry()

    def _write_rows(self, beside: bool) -> _Written:
        if beside:
            _core.give_way()
            self._pace.begin()
            for snapshot in self._cut.snapshots.values():
                snapshot.give_way()
        tables, layouts = [], []
        for name, hosted, spec in self._specs():
            snapshot = self._cut.snapshots[name]
            slices = slices_of(hosted, spec, self._collectives.rank)
            tables.append(
                ShardedTable(
                    key=f"{name}/{spec.name}",
                    slices=tuple(one.hosted for one in slices),
                    columns=tuple(row_columns(_layout(one.spec)) for one in slices),
                    sources=tuple(
                        None if one.table is None else RowSlice(snapshot, one.table)
                        for one in slices
                    ),
                    join=joined_rows(spec),
                )
            )
            layouts.append(_layout(spec))

        def open_file(plan: FilePlan, numbers: Mapping[int, int]) -> OpenFile:
            return PlannedRows(self._folder, plan, numbers)

        return self._write_sharded(tables, layouts, "rows", open_file)

    def _write_deleted(self) -> _Written:
        if self._facts.kind == "full":
            return _Written({}, {})
        tables = []
        for name, hosted, spec in self._specs():
            first = slices_of(hosted, spec, self._collectives.rank)[0]
            source = None
            if first.table is not None:
                read = functools.partial(_deleted, self._cut.snapshots[name], first.table)
                source = IdSlice(spec.hash_name, read)
            tables.append(_id_table(name, spec, first.hosted, source, counted=False))
        return self._write_ids(tables, "deleted")

    def _write_sights(self) -> _Written:
        tables = []
        for name, hosted, spec in self._specs():
            if spec.admission is not None and spec.admission.counter == "exact":
                first = slices_of(hosted, spec, self._collectives.rank)[0]
                here = self._cut.sights.get((name, spec.name))
                source = None
                if here is not None:
                    source = IdSlice(spec.hash_name, functools.partial(_sights, here))
                tables.append(_id_table(name, spec, first.hosted, source, counted=True))
        return self._write_ids(tables, "sights")

    def _write_ids(self, tables: Sequence[ShardedTable], folder: str) -> _Written:
        layout = IdLayout(counted=folder == "sights")

        def open_file(plan: FilePlan, numbers: Mapping[int, int]) -> OpenFile:
            return PlannedIds(self._folder, plan, numbers, counted=layout.counted)

        return self._write_sharded(tables, [layout] * len(tables), folder, open_file)

    def _write_sharded(
        self,
        tables: Sequence[ShardedTable],
        layouts: Sequence[RowLayout | IdLayout],
        folder: str,
        open_file: Callable[[FilePlan, Mapping[int, int]], OpenFile],
    ) -> _Written:
        """This rank's files of tables; all ranks call it alike."""
        if not tables:
            return _Written({}, {})
        rows = ShardedRows(tables, self._collectives)
        placed = rows.placed()
        counted = [
            TableRows(one.key, layout, one.counts)
            for one, layout in zip(placed, layouts, strict=True)
        ]
        files = split(counted, folder)
        plan = plan_writing(files, placed, self._collectives.world_size)
        mine = [n for n, writer in enumerate(plan.writers) if writer == self._collectives.rank]
        self._total += sum(files[n].rows * files[n].layout.row_bytes for n in mine)
        numbers = {table.key: number for number, table in enumerate(tables)}

        def opened(file: int) -> OpenFile:
            keys = files[file].tables
            return open_file(files[file], {numbers[key]: n for n, key in enumerate(keys)})

        threads = FileThreads(opened)
        try:
            for file, table, columns in rows.pieces(plan):
                self._stages.check()
                threads.put(file, table, columns)
                self._done += len(columns[0]) * layouts[table].row_bytes
                self._pace.rest()
            saved = threads.finish()
        except BaseException:
            threads.abort()
            with contextlib.suppress(CollectiveFailed):  # the vote that follows fails with it
                rows.abandon()
            raise
        for number in mine:
            if saved[number].rows != files[number].rows:
                raise _other_rows(files[number], saved[number])
        return _Written(saved, {one.key: one.rows for one in counted})

    def _write_dense(self) -> tuple[SavedFile, ...]:
        return dense.write(self._cut.dense, self._folder, self._collectives)

    def _write_sketches(self) -> _Written:
        """Of the sketches of all ranks the largest cells: never less than an id was seen, and the
        same again when all ranks that loaded it save it."""
        saved: dict[int, SavedFile] = {}
        failures: list[Exception] = []
        ranks = self._collectives
        tables = [
            (name, spec)
            for name, _, spec in self._specs()
            if spec.admission is not None and spec.admission.counter == "sketch"
        ]
        for number, (name, spec) in enumerate(tables):
            here = self._cut.sights.get((name, spec.name))
            cells = _cells(spec, here).to(ranks.device)
            (cells,) = ranks.all_reduce(cells, "max", what="sketches of a checkpoint").wait()
            if number % ranks.world_size == ranks.rank and not failures:
                path, key = sketch_path(name, spec.name), f"{name}/{spec.name}"
                data = cells.cpu().to(torch.uint32).numpy().tobytes()
                try:
                    saved[number] = write_whole(self._folder, path, "sketch", data, [key])
                except Exception as error:  # noqa: BLE001 - the other ranks are in the next round
                    failures.append(error)
        if failures:
            raise failures[0]
        return _Written(saved, {})

    def _write_state(self, rank_states: Sequence[Mapping[str, Any]]) -> tuple[SavedFile, ...]:
        if self._collectives.rank != 0:
            return ()
        return (contents.write(self._folder, self._cut.state, rank_states),)

    def _commit(self, manifest: Manifest) -> None:
        if self._collectives.rank == 0:
            commit(self._folder, manifest)

    def _manifest(
        self, files: Sequence[SavedFile], rows: Mapping[str, int], deleted: Mapping[str, int]
    ) -> Manifest:
        facts = self._facts
        return Manifest(
            schema=SCHEMA,
            id=facts.id,
            kind=facts.kind,
            step=facts.step,
            position=facts.position,
            epoch=self._cut.epoch,
            parent=facts.parent,
            seed=self._cut.seed,
            last_steps=dict(facts.last_steps),
            world_size=self._collectives.world_size,
            created_s=facts.created_s,
            versions={"torch": torch.__version__, "python": platform.python_version()},
            tables=tuple(self._saved_tables(rows, deleted)),
            modules=self._cut.dense.modules,
            optimizers=self._cut.dense.optimizers,
            files=tuple(files),
        )

    def _saved_tables(
        self, rows: Mapping[str, int], deleted: Mapping[str, int]
    ) -> Iterator[SavedTable]:
        for name, _, spec in self._specs():
            key = f"{name}/{spec.name}"
            yield saved_table(name, spec, rows=rows[key], deleted=deleted.get(key, 0))

    def _specs(self) -> Iterator[tuple[str, HostedTables, TableSpec]]:
        for name, hosted in self._tables.items():
            for spec in hosted.specs:
                yield name, hosted, spec


def _layout(spec: TableSpec) -> RowLayout:
    return RowLayout(spec.dim, spec.state_width, spec.dtype)


def _id_table(
    collection: str, spec: TableSpec, first: Hosted, source: IdSlice | None, *, counted: bool
) -> ShardedTable:
    """Ids of a table; every slice has them all, so that the first one's are read."""
    key = f"{collection}/{spec.name}"
    return ShardedTable(key, (first,), (id_columns(counted),), (source,), joined_ids)


def _cells(spec: TableSpec, here: AdmissionState | None) -> Tensor:
    """Cells of a table's sketch, int64; zeros where this rank has none."""
    assert spec.admission is not None
    if here is None:
        cells = spec.admission.sketch_width * spec.admission.sketch_depth
        return torch.zeros(cells, dtype=torch.int64, device="cpu")
    return torch.frombuffer(bytearray(here.cells), dtype=torch.uint32).to(torch.int64)


def _deleted(snapshot: Snapshot, table: int) -> tuple[Tensor, ...]:
    return (snapshot.deleted(table),)


def _sights(state: AdmissionState) -> tuple[Tensor, ...]:
    return state.ids, state.counts


def _in_order(written: Sequence[_Written]) -> list[SavedFile]:
    files = {number: file for one in written for number, file in one.saved.items()}
    return [files[number] for number in sorted(files)]


def _other_rows(plan: FilePlan, saved: SavedFile) -> CheckpointError:
    return CheckpointError(
        f"rows of {plan.path}",
        got=saved.rows,
        allowed=f"{plan.rows}, as were counted",
        remedy="A snapshot did not keep its rows: report it.",
    )
