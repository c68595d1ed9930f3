"""Saving a job: take its snapshot point, write it stage by stage on all ranks, commit it."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import platform
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast, get_args

import torch
from torch import Tensor

from shoal import _core
from shoal.checkpoint import dense, job_state
from shoal.checkpoint.job_state import Contents
from shoal.checkpoint.manifest import (
    MANIFEST,
    SCHEMA,
    FileKind,
    Kind,
    Manifest,
    Parent,
    SavedFile,
    SavedTable,
    commit,
)
from shoal.checkpoint.row_files import RowFileWriter, RowLayout, sketch_path, write_whole
from shoal.checkpoint.sharded_rows import (
    OtherRankFailed,
    ShardedRows,
    ShardedTable,
    SliceSource,
    ids_of,
    rows_of,
    slices_of,
)
from shoal.checkpoint.snapshot_point import CONSUMER, SnapshotPoint, take_snapshot_point
from shoal.checkpoint.storage import Storage
from shoal.checkpoint.store import CheckpointStore, Claim, folder_name
from shoal.checkpoint.table_match import saved_table
from shoal.checkpoint.writing import FileThreads, Progress, Throttle
from shoal.checkpoint.writing_plan import plan_writing, split
from shoal.comm.collectives import Collectives, LocalCollectives
from shoal.comm.consensus import reduced, together
from shoal.errors import CheckpointError, CollectiveFailed, InputError, ShoalError
from shoal.table.hosting import HostedTables
from shoal.table.shard import MAX_ID, whole
from shoal.table.spec import TableSpec
from shoal.table.values import AdmissionState, Cursor

T = TypeVar("T")


class Saving:
    """One rank's part of a checkpoint under way; `begin` returns it.

    Args:
        url: the store's folder.
        tables: the job's, by collection.
        taken: its snapshot point, held until its rows are read.
        folder: of the checkpoint; without a manifest.
        draft: the manifest but for tables and files; the same on every rank.
        collectives: nobody else's until it is done.
        claims: on the checkpoint's folder, held on one rank until it is done.
    """

    def __init__(
        self,
        url: str,
        tables: Mapping[str, HostedTables],
        taken: SnapshotPoint,
        folder: Storage,
        draft: Manifest,
        collectives: Collectives,
        claims: Sequence[Claim] = (),
    ) -> None:
        self.url, self.name = url, folder.name
        self.id, self.version = draft.id, draft.version
        self.collectives = collectives
        self._tables, self._taken, self._folder = tables, taken, folder
        self._draft, self._claims = draft, tuple(claims)
        self._bytes_done = self._bytes_total = 0
        self._rows: dict[tuple[FileKind, str], int] = {}  # of all ranks, by kind and table
        self._last: Progress | None = None
        self._throttle = Throttle()
        self._manifest: Manifest | None = None
        self._failure: CheckpointError | None = None
        self._aborted, self._done = threading.Event(), threading.Event()

    def start(self, *, concurrent: bool) -> None:
        """Write before it returns, or in a thread where training may continue meanwhile.

        `begin` and `save` call it.
        """
        if concurrent and self._taken.concurrent:
            name = "shoal-save"
            threading.Thread(target=self._run, args=(True,), name=name, daemon=True).start()
        else:
            self._run(False)

    @property
    def done(self) -> bool:
        """Whether `wait` would return or raise at once. Ranks may differ for a moment."""
        return self._done.is_set()

    @property
    def aborted(self) -> bool:
        """Whether `abort` was called."""
        return self._aborted.is_set()

    def join(self, timeout_s: float | None = None) -> None:
        """Wait until it is done, well or not. It is throttled no more."""
        self.stop_throttling()
        self._done.wait(timeout_s)

    def stop_throttling(self) -> None:
        """Let it take what it can get: while training continues it pauses between rows, on a
        machine with few processors."""
        self._throttle.stop()

    def wait(self, timeout_s: float | None = None) -> Manifest:
        """Wait until it is committed. It is throttled no more.

        Raises:
            CheckpointError: a rank failed, and which; on every rank. There is no checkpoint then,
                and its leftovers are removed by the next save. Only where a rank was gone when
                the others had written everything there may be one: a whole one.
            TimeoutError: it is still under way.
        """
        self.stop_throttling()
        if not self._done.wait(timeout_s):
            raise TimeoutError(f"checkpoint {self.url}/{self.name} is still under way")
        if self._failure is not None:
            raise self._failure
        assert self._manifest is not None
        return self._manifest

    @property
    def cursors(self) -> Mapping[str, Cursor]:
        """What a delta on top of this checkpoint passes as `since`; waits until it is committed.

        Raises:
            CheckpointError: as `wait`.
        """
        self.wait()
        return self.point

    @property
    def point(self) -> Mapping[str, Cursor]:
        """Cursors of its snapshot point by collection, whether or not it will be committed."""
        return self._taken.cursors

    def abort(self) -> None:
        """Let it fail soon, on all ranks; `wait` reports it. Does nothing once all is written."""
        self._aborted.set()
        self._throttle.stop()

    def release(self) -> None:
        """Let this rank's shards forget deletions that are in this checkpoint or older ones.

        Call it once the next delta builds on this checkpoint. Those that another consumer known
        to a shard (see `Shard.release`) still wants stay.

        Raises:
            CheckpointError: as `wait`.
        """
        self.wait()
        for shard in {id(one.shard): one.shard for one in self._tables.values()}.values():
            shard.release(self.version, CONSUMER)

    def progress(self) -> Progress:
        """How far this rank is, and what the snapshot point costs; from any thread."""
        if self._last is not None:
            return self._last
        snapshots = {id(one): one for one in self._taken.snapshots.values()}.values()
        costs = [stats for one in snapshots if (stats := getattr(one, "stats", None)) is not None]
        names = ("copied_rows", "spilled_bytes", "waited_s")
        spent = (sum(getattr(one, name) for one in costs) for name in names)
        return Progress(self._bytes_done, self._bytes_total, *spent)

    def _run(self, concurrent: bool) -> None:
        try:
            self._manifest = self._write_all(concurrent)
        except CheckpointError as error:
            self._failure = error
        except Exception as error:  # noqa: BLE001 - raised where it is waited for
            what = f"checkpoint {self.url}/{self.name}"
            got = " ".join(f"{type(error).__name__}: {error}".split())
            failure = CheckpointError(
                what, got=got, allowed="all ranks to write it", remedy="Save again."
            )
            failure.__cause__ = error
            self._failure = failure
        finally:
            for one in self._claims:
                one.release(keep=self._manifest is None)
            self._done.set()

    def _write_all(self, concurrent: bool) -> Manifest:
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
            self._taken.close()
        admission = self._stage("admission counters", lambda: self._write("admission"))
        sketches = self._stage("admission sketches", self._write_sketches)
        dense_files = self._stage(
            "dense part", lambda: dense.write(self._taken.dense, self._folder, self.collectives)
        )[0]
        rank_states = self._stage("states of ranks", lambda: self._taken.rank_state)
        state = self._stage("state of the job", lambda: self._write_state(rank_states))[0]
        kinds = (rows, deleted, admission, sketches)
        files = [one for kind in kinds for one in _in_order(kind)] + [*dense_files, *state]
        manifest = replace(self._draft, tables=tuple(self._saved_tables()), files=tuple(files))
        self._stage("manifest", lambda: self._commit(manifest), last=True)
        return manifest

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

        where = f"writing the {what} of checkpoint {self._folder.url}"
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
            for snapshot in self._taken.snapshots.values():
                snapshot.give_way()
        return self._write("rows")

    def _write(self, kind: FileKind) -> dict[int, SavedFile]:
        """This rank's files of rows or ids, by their numbers; all ranks call it alike."""
        tables = [] if (kind, self._draft.kind) == ("deleted", "full") else [*self._sharded(kind)]
        if not tables:
            return {}
        rows = ShardedRows(tables, self.collectives)
        counted = rows.counted()
        self._rows |= {(kind, one.key): one.rows for one in counted}
        files = split(counted, kind)
        plan = plan_writing(files, counted, self.collectives.world_size)
        mine = [n for n, writer in enumerate(plan.writers) if writer == self.collectives.rank]
        self._bytes_total += sum(files[n].rows * files[n].layout.row_bytes for n in mine)

        def opened(number: int) -> RowFileWriter:
            one = files[number]
            ranges = (one.start, one.stop)
            return RowFileWriter(self._folder, one.path, one.layout, one.tables, ranges, kind)

        threads = FileThreads(opened)
        try:
            for file, table, columns in rows.pieces(plan):
                self._check_aborted()
                threads.put(file, files[file].tables.index(tables[table].key), columns)
                self._bytes_done += len(columns[0]) * files[file].layout.row_bytes
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
            key, snapshot = f"{name}/{spec.name}", self._taken.snapshots[name]
            slices = slices_of(hosted, spec, self.collectives.rank)
            if kind == "rows":
                layout = RowLayout.rows(spec.dim, spec.state_width, spec.dtype)
                rows = (None if k.table is None else rows_of(snapshot, k.table) for k in slices)
                yield ShardedTable(key, spec, layout, slices, tuple(rows))
                continue
            if kind == "admission" and _counter(spec) != "exact":
                continue
            layout = RowLayout.ids(counted=kind == "admission")
            source = self._ids(kind, name, spec, slices[0].table)
            yield ShardedTable(key, spec, layout, slices[:1], (source,))

    def _ids(
        self, kind: FileKind, name: str, spec: TableSpec, first: int | None
    ) -> SliceSource | None:
        """Deleted or counted ids that this rank has of a table; read when they are asked for."""
        if kind == "deleted":
            snapshot = self._taken.snapshots[name]
            if first is not None:
                return ids_of(spec.hash_name, lambda: (snapshot.deleted(first),))
        elif (here := self._taken.admission.get((name, spec.name))) is not None:
            return ids_of(spec.hash_name, lambda: (here.ids, here.counts))
        return None

    def _write_sketches(self) -> dict[int, SavedFile]:
        """Of the sketches of all ranks the largest cells: never less than an id was seen, and the
        same again when all ranks that loaded it save it."""
        saved: dict[int, SavedFile] = {}
        failures: list[Exception] = []
        ranks = self.collectives
        tables = [(name, spec) for name, _, spec in self._specs() if _counter(spec) == "sketch"]
        for number, (name, spec) in enumerate(tables):
            cells = _cells(spec, self._taken.admission.get((name, spec.name)))
            cells = reduced(ranks, cells, "max", what="sketches of a checkpoint")
            if number % ranks.world_size == ranks.rank and not failures:
                path, data = sketch_path(name, spec.name), cells.to(torch.uint32).numpy()
                try:
                    key = f"{name}/{spec.name}"
                    saved[number] = write_whole(self._folder, path, "sketch", data, [key])
                except Exception as error:  # noqa: BLE001 - the other ranks are in the next round
                    failures.append(error)
        if failures:
            raise failures[0]
        return saved

    def _write_state(self, rank_states: Sequence[Mapping[str, Any]]) -> tuple[SavedFile, ...]:
        if self.collectives.rank != 0:
            return ()
        return (job_state.write(self._folder, self._taken.state, rank_states),)

    def _commit(self, manifest: Manifest) -> None:
        if self.collectives.rank == 0:
            commit(self._folder, manifest)

    def _saved_tables(self) -> Iterator[SavedTable]:
        for name, _, spec in self._specs():
            key = f"{name}/{spec.name}"
            rows, deleted = self._rows["rows", key], self._rows.get(("deleted", key), 0)
            yield saved_table(name, spec, rows=rows, deleted=deleted)

    def _specs(self) -> Iterator[tuple[str, HostedTables, TableSpec]]:
        for name, hosted in self._tables.items():
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


_ABORTED_S = 5.0  # to wait for one that was aborted, at exit: ranks that it waits for are gone

_log = logging.getLogger(__name__)
_begun: weakref.WeakSet[Saving] = weakref.WeakSet()
os.register_at_fork(after_in_child=_begun.clear)  # a child has none of the threads that write


def begin(
    url: str | Path,
    contents: Contents,
    *,
    step: int,
    position: int,
    kind: Kind = "full",
    parent: Manifest | None = None,
    since: Mapping[str, Cursor] | None = None,
    collectives: Collectives | None = None,
    concurrent: bool = True,
) -> Saving:
    """Begin to save a job into a store. Every rank calls it between the same two steps.

    It takes a snapshot point of the job (all shards at one version; dense parts, admission
    counters and state copied) and returns; a thread writes. Where a snapshot does not let training
    continue meanwhile, it writes before it returns. A save into the same store, or over the same
    collectives, that is still under way is waited for first. Leftovers of interrupted saves are
    removed.

        saving = begin(url, contents, step=100, position=6400, collectives=ranks)
        ... train ...
        manifest = saving.wait()
        later = begin(url, contents, step=200, position=12800, collectives=ranks,
                      kind="delta", parent=manifest, since=saving.cursors)

    Args:
        url: the store's folder.
        contents: the job; the same names on every rank.
        step: optimizer steps done.
        position: global samples consumed.
        kind: "full", or "delta": what changed since `parent`.
        parent: of a delta, in the same store.
        since: of a delta, this rank's cursors at its parent, by collection: `Saving.cursors`, or
            after a load `Loaded.cursors`.
        collectives: of all ranks, for checkpoints only: they are in use until the save is done.
            None: this rank alone.
        concurrent: write while training continues, if snapshots let it; False: before it returns,
            with all threads of the shards, as `save` does.

    Raises:
        DTypeError, InputError: arguments that contradict each other, or no such number or tables;
            nothing is held.
        CheckpointError: the storage refuses, the folder holds a checkpoint, the parent is another
            one, or a rank has no snapshot; on every rank.
    """
    ranks = LocalCollectives() if collectives is None else collectives
    contents.check_placed(ranks.world_size)
    root = Storage(url)
    for other in list(_begun):
        if other.collectives is ranks or other.url == root.url:
            other.join()
    name = folder_name(step, kind)
    whole("position of a checkpoint", position, 0, MAX_ID, remedy="Count samples; use int(x).")
    parts = (contents.tables, contents.modules, contents.optimizers)
    wanted = (name, position, None if parent is None else parent.id, *map(tuple, parts))

    claims: list[Claim] = []
    with contextlib.ExitStack() as undone:

        def prepare() -> tuple[object, tuple[str, int]]:
            _check_kind(kind, step, parent, since, contents)
            if ranks.rank == 0:
                claims.append(_claimed(CheckpointStore(root), name, parent))
                undone.callback(claims[0].release)
            return wanted, (uuid.uuid4().hex, int(time.time()))

        said = together(ranks, f"beginning checkpoint {name}", prepare)
        if any(other != wanted for other, _ in said):
            raise _differ([other for other, _ in said])
        point = take_snapshot_point(contents, since, ranks)
        shards = {name: tables.shard for name, tables in contents.tables.items()}
        undone.callback(point.close)
        steps = together(
            ranks,
            f"last steps of checkpoint {name}",
            lambda: {name: one.last_step for name, one in shards.items()},
        )
        undone.pop_all()
    draft = Manifest(
        schema=SCHEMA,
        id=said[0][1][0],
        kind=kind,
        step=step,
        position=position,
        version=point.version,
        parent=None
        if parent is None
        else Parent(folder=folder_name(parent.step, parent.kind), id=parent.id),
        seed=next((shard.seed for shard in shards.values()), 0),
        last_steps={key: max(one[key] for one in steps) for key in contents.tables},
        world_size=ranks.world_size,
        created_s=said[0][1][1],
        packages={"torch": torch.__version__, "python": platform.python_version()},
        modules=point.dense.modules,
        optimizers=point.dense.optimizers,
    )
    saving = Saving(root.url, contents.tables, point, root.child(name), draft, ranks, claims)
    _begun.add(saving)
    saving.start(concurrent=concurrent)
    return saving


def save(
    url: str | Path,
    contents: Contents,
    *,
    step: int,
    position: int,
    kind: Kind = "full",
    parent: Manifest | None = None,
    since: Mapping[str, Cursor] | None = None,
    collectives: Collectives | None = None,
) -> Manifest:
    """As `begin`, but it writes before it returns, with all threads of the shards.

    Raises:
        InputError, CheckpointError: as `begin` and `Saving.wait`.
    """
    return begin(**locals(), concurrent=False).wait()


@atexit.register
def _finish() -> None:
    """Let saves end before the interpreter does, which would stop their threads midway."""
    for saving in list(_begun):
        if saving.done:
            continue
        saving.join(_ABORTED_S if saving.aborted else None)
        if not saving.aborted:
            try:
                saving.wait()
            except CheckpointError as error:
                _log.error("when the process ended: %s", error)


def _claimed(store: CheckpointStore, name: str, parent: Manifest | None) -> Claim:
    """On one rank: an empty folder to write into."""
    if parent is not None:
        there = folder_name(parent.step, parent.kind)
        found = store.manifest(there).id if store.folder(there).exists(MANIFEST) else "none"
        if found != parent.id:
            what, got = f"parent of a delta in {store.url}", f"{there} of id {found}"
            remedy = "Save a delta into the store of its parent, or a full checkpoint."
            raise CheckpointError(what, got, f"id {parent.id}", remedy)
        store.chain(there)  # one of which a link is gone could never be loaded
    return store.claim(name)


def _check_kind(
    kind: str,
    step: int,
    parent: Manifest | None,
    since: Mapping[str, Cursor] | None,
    contents: Contents,
) -> None:
    if kind not in get_args(Kind):
        raise _wrong("kind of a checkpoint", repr(kind), ", ".join(get_args(Kind)))
    if kind == "full":
        if parent is not None or since is not None:
            raise _wrong("parent and cursors of a full checkpoint", "some", "none")
        return
    if parent is None or since is None:
        raise _wrong("parent and cursors of a delta", "none", "those of its parent")
    if since.keys() != contents.tables.keys():
        raise _wrong("collections of cursors", sorted(since), sorted(contents.tables))
    if step <= parent.step:  # of one step the full one counts as the newest
        raise _wrong("step of a delta", step, f"more than its parent's, {parent.step}")
    for name, cursor in since.items():
        if cursor.version != parent.version:
            got, allowed = f"version {cursor.version}", f"its parent's, {parent.version}"
            raise _wrong(f"cursor of collection {name!r}", got, allowed)


def _differ(said: Sequence[object]) -> CheckpointError:
    return CheckpointError(
        "checkpoint that all ranks begin",
        got="; ".join(f"on rank {rank}: {one}" for rank, one in enumerate(said)),
        allowed="one step, kind, position, parent, and names of collections, modules and "
        "optimizers",
        remedy="Call it alike on every rank, between the same steps.",
    )


def _wrong(what: str, got: object, allowed: object) -> InputError:
    remedy = "See `shoal.checkpoint.begin`."
    return InputError(what, got=got, allowed=allowed, remedy=remedy)
