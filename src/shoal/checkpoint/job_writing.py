"""Writes a cut of a job, stage by stage, on all ranks; then commits it."""

from __future__ import annotations

import contextlib
import platform
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from shoal.checkpoint import dense, job_state
from shoal.checkpoint.cutting import Cut, slices_of
from shoal.checkpoint.file_writing import FileThreads, OpenFile, PlannedIds, PlannedRows
from shoal.checkpoint.manifest import (
    SCHEMA,
    Kind,
    Manifest,
    Parent,
    SavedFile,
    SavedTable,
    commit,
)
from shoal.checkpoint.matching import saved_table
from shoal.checkpoint.row_files import sketch_path, write_whole
from shoal.checkpoint.row_layout import IdLayout, RowLayout
from shoal.checkpoint.sharded_rows import (
    OtherRankFailed,
    ShardedRows,
    ShardedTable,
    joined_ids,
    joined_rows,
)
from shoal.checkpoint.slice_sources import IdSlice, RowSlice, id_columns, row_columns
from shoal.checkpoint.splitting import FilePlan, TableRows, split
from shoal.checkpoint.storage import Storage
from shoal.checkpoint.writing_plan import plan_writing
from shoal.comm.collectives import Collectives
from shoal.errors import CheckpointError, CollectiveFailed, describe
from shoal.placement import Hosted
from shoal.table.hosting import HostedTables
from shoal.table.spec import TableSpec

__all__ = ["Facts", "JobWriter", "Progress"]

T = TypeVar("T")


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
        self._given_up = threading.Event()
        self._last: Progress | None = None

    def run(self) -> Manifest:
        """Write everything; the manifest last, when all that it names is durable on all ranks.

        Raises:
            CheckpointError: a rank failed: which, and why. There is no manifest then.
            CollectiveFailed: a rank died or did not come in time.
        """
        try:
            rows = self._stage("row files", self._write_rows)
            deleted = self._stage("deletions", self._write_deleted)
            self._last = self.progress()
        finally:
            self._cut.close()
        sights = self._stage("sights", self._write_sights)
        sketches = self._stage("sketches of sights", self._write_sketches)
        captured, ranks = self._cut.dense, self._collectives
        dense_files = self._stage("dense part", lambda: dense.write(captured, self._folder, ranks))[
            0
        ]
        rank_states = self._stage("states of ranks", lambda: self._cut.rank_state)
        state = self._stage("state of the job", lambda: self._write_state(rank_states))[0]
        files = [
            *(file for kind in (rows, deleted, sights, sketches) for file in _in_order(kind)),
            *dense_files,
            *state,
        ]
        manifest = self._manifest(files, rows[0].rows, deleted[0].rows)
        self._stage("manifest", lambda: self._commit(manifest))
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
        self._given_up.set()

    def _stage(self, what: str, work: Callable[[], T]) -> list[T]:
        """One rank's part of a stage, then a vote: what it gave on every rank."""
        value: T | None = None
        failure: Exception | None = None
        try:
            if self._given_up.is_set():
                raise _given_up()
            value = work()
        except Exception as error:  # noqa: BLE001 - every rank hears of it, whatever it is
            failure = error
        if isinstance(failure, CollectiveFailed):
            raise failure
        told = None if failure is None else _told(failure)
        said: list[tuple[str | None, Any]] = self._collectives.gather_objects(
            (told, value), what=f"vote on the {what} of a checkpoint"
        )
        wrong = [(rank, text) for rank, (text, _) in enumerate(said) if text is not None]
        if wrong:
            got = "; ".join(f"on rank {rank}: {text}" for rank, text in wrong if text)
            raise CheckpointError(
                describe(
                    f"writing the {what} of checkpoint {self._folder.url}",
                    got=got,
                    allowed="success on every rank",
                    remedy="Mend what is named; the next save removes what this one left.",
                )
            ) from failure
        return [one for _, one in said]

    def _write_rows(self) -> _Written:
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
                ids_U = self._cut.snapshots[name].deleted(first.table)
                source = IdSlice(spec.hash_name, ids_U)
            tables.append(_id_table(name, spec, first.hosted, source, counted=False))
        return self._write_ids(tables, "deleted")

    def _write_sights(self) -> _Written:
        tables = []
        for name, hosted, spec in self._specs():
            if spec.admission is not None and spec.admission.counter == "exact":
                first = slices_of(hosted, spec, self._collectives.rank)[0]
                here = self._cut.sights.get((name, spec.name))
                source = None if here is None else IdSlice(spec.hash_name, here.ids, here.counts)
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
                if self._given_up.is_set():
                    raise _given_up()
                threads.put(file, table, columns)
                self._done += len(columns[0]) * layouts[table].row_bytes
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

    def _write_sketches(self) -> _Written:
        """The largest cells of any rank's sketches: never less than an id was seen, and the same
        again when ranks that all loaded it save it."""
        saved = {}
        ranks = self._collectives
        tables = [
            (name, spec)
            for name, _, spec in self._specs()
            if spec.admission is not None and spec.admission.counter == "sketch"
        ]
        for number, (name, spec) in enumerate(tables):
            assert spec.admission is not None
            here = self._cut.sights.get((name, spec.name))
            cells = torch.zeros(
                spec.admission.sketch_width * spec.admission.sketch_depth, dtype=torch.int64
            )
            if here is not None:
                words = torch.frombuffer(bytearray(here.cells), dtype=torch.uint32)
                cells = words.to(torch.int64)
            what = "sketches of a checkpoint"
            (cells,) = ranks.all_reduce(cells.to(ranks.device), "max", what=what).wait()
            if number % ranks.world_size == ranks.rank:
                data = cells.cpu().to(torch.uint32).numpy().tobytes()
                path, key = sketch_path(name, spec.name), f"{name}/{spec.name}"
                saved[number] = write_whole(self._folder, path, "sketch", data, [key])
        return _Written(saved, {})

    def _write_state(self, rank_states: Sequence[Mapping[str, Any]]) -> tuple[SavedFile, ...]:
        if self._collectives.rank != 0:
            return ()
        return (job_state.write(self._folder, self._cut.state, rank_states),)

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


def _in_order(written: Sequence[_Written]) -> list[SavedFile]:
    files = {number: file for one in written for number, file in one.saved.items()}
    return [files[number] for number in sorted(files)]


def _told(failure: Exception) -> str:
    """For the vote; nothing of one that only follows from another rank's."""
    if isinstance(failure, OtherRankFailed):
        return ""
    name = "" if isinstance(failure, CheckpointError) else f"{type(failure).__name__}: "
    return " ".join(f"{name}{failure}".split())


def _given_up() -> CheckpointError:
    remedy = "Save again."
    what = "a save under way"
    return CheckpointError(describe(what, got="abort()", allowed="to go on", remedy=remedy))


def _other_rows(plan: FilePlan, saved: SavedFile) -> CheckpointError:
    return CheckpointError(
        describe(
            f"rows of {plan.path}",
            got=saved.rows,
            allowed=f"{plan.rows}, as were counted",
            remedy="A snapshot did not keep its rows: report it.",
        )
    )
