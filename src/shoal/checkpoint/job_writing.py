"""Writes a cut of a job, stage by stage, on all ranks; then commits it."""

from __future__ import annotations

import contextlib
import functools
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal import _core
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
from shoal.checkpoint.pacing import Pace
from shoal.checkpoint.row_files import sketch_path, write_whole
from shoal.checkpoint.row_layout import IdLayout, RowLayout
from shoal.checkpoint.sharded_rows import (
    ShardedRows,
    ShardedTable,
    joined_ids,
    joined_rows,
)
from shoal.checkpoint.slice_sources import IdSlice, RowSlice, id_columns, row_columns
from shoal.checkpoint.splitting import FilePlan, TableRows, split
from shoal.checkpoint.stages import Stages
from shoal.checkpoint.storage import Storage
from shoal.checkpoint.writing_plan import plan_writing
from shoal.comm.collectives import Collectives
from shoal.errors import CheckpointError, CollectiveFailed, describe
from shoal.placement import Hosted
from shoal.table.hosting import HostedTables
from shoal.table.shard import AdmissionState
from shoal.table.snapshot import Snapshot
from shoal.table.spec import TableSpec

__all__ = ["Facts", "JobWriter", "Progress"]


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
        describe(
            f"rows of {plan.path}",
            got=saved.rows,
            allowed=f"{plan.rows}, as were counted",
            remedy="A snapshot did not keep its rows: report it.",
        )
    )
