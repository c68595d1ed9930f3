"""Rows and admission counters of a chain of checkpoints into the tables that a rank hosts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import chain as joined
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from shoal.checkpoint.chain import Chain, ChainFile, Link, Newer, runs
from shoal.checkpoint.manifest import SavedFile
from shoal.checkpoint.row_files import (
    Columns,
    ReadBuffer,
    check_sizes,
    chunk_of,
    read_checked,
    selected,
    tallied,
)
from shoal.checkpoint.sharded_rows import slices_of
from shoal.checkpoint.table_match import SegmentMatch, TableMatch
from shoal.errors import CheckpointError, TableFull
from shoal.placement import Hosted, hash_ids, owners
from shoal.rules.initializers import initial_values
from shoal.table.hosting import HostedTables, hosted_admission, hosted_rows
from shoal.table.rows import real_dtype, stored
from shoal.table.shard import HASHES, Shard
from shoal.table.spec import OnFull
from shoal.table.values import AdmissionState, RowChunk


@dataclass(frozen=True, slots=True)
class Adapted:
    """Rows of a whole table as its spec wants them.

    Args:
        chunk: rows that are kept.
        expired_U: ids of rows that are left out, int64 [U].
        unfit: finite numbers of kept rows that the table's dtype cannot hold.
    """

    chunk: RowChunk
    expired_U: Tensor
    unfit: int


def adapt(match: TableMatch, chunk: RowChunk, *, seed: int, now_s: int | None) -> Adapted:
    """Rows of `match.saved` as rows of `match.spec`.

    Columns go to the segment of their name. A segment that was not saved gets the initial value
    of each id, and its rule's initial state. Weights are cast to nearest, ties to even.

    Args:
        match: what goes where.
        chunk: rows as they were saved.
        seed: of initial values.
        now_s: rows expired at this event time are dropped; None keeps all.
    """
    spec = match.spec
    expired_U = chunk.ids[:0]
    if now_s is not None and spec.expiry is not None and chunk.ids.numel():
        gone_R = spec.expiry.expired_N(chunk.ids, chunk.last_seen_s, now_s)
        if bool(gone_R.any()):
            expired_U, chunk = chunk.ids[gone_R], _kept(chunk, ~gone_R)
    weights, state = chunk.weights, chunk.state
    if not match.same_weights:
        weights = _weights(match, chunk, seed)
    if not spec.state_width:
        state = state[:, :0]
    elif not match.same_columns:
        state = torch.cat([_state(match, one, chunk) for one in match.segments], dim=1)
    cast = stored(spec, weights), state.to(real_dtype(spec))
    whole = replace(chunk, table=spec.name, weights=cast[0], state=cast[1])
    return Adapted(whole, expired_U, unfit(weights, cast[0]) + unfit(state, cast[1]))


def _weights(match: TableMatch, chunk: RowChunk, seed: int) -> Tensor:
    """Weights [R, D] of the table, not yet in its dtype."""
    parts = []
    for one in match.segments:
        dim = one.segment.dim
        if one.source is not None:
            parts.append(chunk.weights[:, one.source : one.source + dim])
            continue
        initial = initial_values(
            one.segment.initializer,
            chunk.ids,
            seed=seed,
            table=match.spec.hash_name,
            column_start=match.spec.first_column + one.start,
            dim=dim,
        )
        parts.append(initial)
    return torch.cat(parts, dim=1)


def _state(match: TableMatch, one: SegmentMatch, chunk: RowChunk) -> Tensor:
    width = one.segment.state_width
    if one.state_source is not None:
        return chunk.state[:, one.state_source : one.state_source + width]
    fresh = one.segment.optimizer.init_state(one.segment.dim, dtype=real_dtype(match.spec))
    return fresh.expand(chunk.ids.numel(), width)


def unfit(before: Tensor, after: Tensor) -> int:
    """Finite numbers that are not, once they have another dtype."""
    if after.dtype is torch.int8 or torch.finfo(before.dtype).max <= torch.finfo(after.dtype).max:
        return 0
    return int((before.isfinite() & ~after.isfinite()).sum())


def _kept(chunk: RowChunk, kept_R: Tensor) -> RowChunk:
    return chunk_of(chunk.table, selected(chunk.columns, kept_R))


class Trim:
    """Chooses the most recently ("lru") or most frequently ("lfu") used rows of a table.

    All rows are weighed first, then asked about in the same order. Of rows that are alike in
    that, those that come first are kept. It remembers how many rows have each value, not rows.

    Args:
        capacity_rows: rows to keep.
        on_full: the table's policy.
    """

    def __init__(self, capacity_rows: int, on_full: OnFull) -> None:
        self._capacity, self._recent = capacity_rows, on_full == "lru"
        self._values_V = torch.empty(0, dtype=torch.int64, device="cpu")  # ascending
        self._rows_V = torch.empty(0, dtype=torch.int64, device="cpu")
        self._threshold = -1  # all are kept
        self._room = 0  # for rows at the threshold; those above are all kept

    def weigh(self, chunk: RowChunk) -> None:
        """Count rows."""
        value_R = self._value(chunk)
        every = torch.cat([self._values_V, value_R])
        rows = torch.cat([self._rows_V, torch.ones_like(value_R)])
        self._values_V, self._rows_V = tallied(every, rows)

    def weighed(self) -> None:
        """All rows were counted: `kept` may be called."""
        above = self._rows_V.flip(0).cumsum(0).flip(0)  # rows of this value or a larger one
        fits = above <= self._capacity
        if not bool(fits.all()):
            last = int((~fits).nonzero()[-1])
            self._threshold = int(self._values_V[last])
            self._room = self._capacity - int(above[last] - self._rows_V[last])

    def kept(self, chunk: RowChunk) -> Tensor:
        """bool [R]: rows to keep."""
        value_R = self._value(chunk)
        equal_R = value_R == self._threshold
        taken_R = equal_R & (equal_R.cumsum(0) <= self._room)
        self._room -= int(taken_R.sum())
        return (value_R > self._threshold) | taken_R

    def _value(self, chunk: RowChunk) -> Tensor:
        return chunk.last_seen_s if self._recent else chunk.counts


T = TypeVar("T")
U = TypeVar("U")


@dataclass(slots=True, eq=False)
class Target:
    """A table of this rank's shard that gets rows of a matched one: a slice, or all of it.

    trim: chooses rows where the table has no room for all; None: it has, or did not say yet.
    """

    match: TableMatch
    shard: Shard
    table: int
    hosted: Hosted
    trim: Trim | None = None

    def meets(self, file: SavedFile, rank: int) -> bool:
        """Whether a file may have rows for it."""
        ranges = (file.start, file.stop) if self.match.same_hash else (0, HASHES)
        return any(holder == rank for holder, _ in self.hosted.holders(*ranges))

    @property
    def whole(self) -> bool:
        """Whether it gets all rows and columns."""
        hosted = self.hosted
        return hosted.shares == 1 and hosted.stop - hosted.start == self.match.spec.dim

    def rows(self, chunk: RowChunk, rank: int) -> RowChunk:
        """What it gets of rows of the whole table."""
        return chunk if self.whole else hosted_rows(self.match.spec, self.hosted, rank, chunk)

    def owned(self, ids_U: Tensor, rank: int) -> int:
        """How many of these ids have rows that are this rank's."""
        if self.hosted.shares == 1:
            return ids_U.numel()
        hashes_U = hash_ids(self.match.spec.hash_name, ids_U)
        return int((owners(self.hosted, hashes_U) == rank).sum())


@dataclass(frozen=True, slots=True)
class LoadTally:
    """Rows loaded and rows left out as expired, by key; each counted on one rank.

    trimmed: rows were left out since an evicting table has no room for them.
    """

    rows: Mapping[str, int]
    expired: Mapping[str, int]
    trimmed: bool


def targets_of(
    matches: Sequence[TableMatch], tables: Mapping[str, HostedTables], rank: int
) -> tuple[Target, ...]:
    """The tables of a rank's shards that get rows."""
    return tuple(
        Target(match, tables[match.collection].shard, one.table, one.hosted)
        for match in matches
        for one in slices_of(tables[match.collection], match.spec, rank)
        if one.table is not None
    )


class RowLoader:
    """Loads a rank's rows: one thread reads and checks a file while another one loads the last.

    Args:
        chains: what is loaded; no row is in two of them.
        targets: empty tables.
        rank: this one.
        alone: no other rank reads the files.
        now_s: rows expired at it are left out; None keeps all.
    """

    def __init__(
        self,
        chains: Sequence[Chain],
        targets: Sequence[Target],
        *,
        rank: int,
        alone: bool,
        now_s: int | None,
    ) -> None:
        self._chains, self._rank, self._alone, self._now_s = chains, rank, alone, now_s
        self._targets: dict[str, list[Target]] = {}
        for target in targets:
            self._targets.setdefault(target.match.saved.key, []).append(target)
        self._rows: Counter[str] = Counter()
        self._expired: Counter[str] = Counter()
        self._unfit: Counter[str] = Counter()

    def load(self) -> LoadTally:
        """Load everything.

        Raises:
            CheckpointError: a file is missing or damaged, or numbers do not fit the tables'
                dtypes. Rows may be loaded already.
            TableFull: a table has no room. As above.
        """
        for link in joined.from_iterable(chain.links for chain in self._chains):
            check_sizes(link.storage, filter(self._wanted, link.manifest.files))
        trims: list[Trim] = []
        try:
            self._pass()
        except TableFull:
            # A table at its budget, split over other ranks, has more rows here and fewer there.
            trims = _choose(joined.from_iterable(self._targets.values()))
            if not trims:
                raise
            self.clear()
            self._pass(weigh=True)
            for trim in trims:
                trim.weighed()
            self._pass()
        if self._unfit:
            raise does_not_fit(self._unfit)
        self._load_admission()
        return LoadTally(dict(self._rows), dict(self._expired), bool(trims))

    def clear(self) -> None:
        """Empty the tables again."""
        for target in joined.from_iterable(self._targets.values()):
            target.shard.clear(target.table)
            if target.match.admission:
                cells = bytes(len(target.shard.admission_state(target.table).cells))
                none = torch.empty(0, dtype=torch.int64, device="cpu")
                target.shard.load_admission_state(
                    target.table, AdmissionState(none, none.clone(), cells)
                )

    def _pass(self, *, weigh: bool = False) -> None:
        """Once over all files, from the newest to the oldest of each run.

        weigh: have rows weighed by those who choose some of them; none is loaded.
        """
        for counter in (self._rows, self._expired, self._unfit):
            counter.clear()
        self._expect()
        found = (filter(lambda one: self._wanted(one.saved), chain.files) for chain in self._chains)
        parts = [run for files in found for run in runs(files)]
        every = list(joined.from_iterable(parts))
        with closing(_ahead(every, _read_whole, once=self._alone)) as ahead:
            for run in parts:
                newer: dict[str, Newer] = {}
                oldest = min(one.number for one in run)
                for one in run:
                    for table, columns in next(ahead):
                        key = one.saved.tables[table]
                        if key in self._targets:
                            seen, remember = newer.setdefault(key, Newer()), one.number > oldest
                            fresh = seen.unseen(one.number, columns[0], remember=remember)
                            if one.saved.kind == "rows":
                                rows = columns if fresh is None else selected(columns, fresh)
                                self._load_rows(self._targets[key], chunk_of(key, rows), weigh)

    def _expect(self) -> None:
        """Announce the number of rows to tables: about as many as the largest link has.

        Not where many may be left out as expired.
        """
        for key, targets in self._targets.items():
            saved = sum(max(one.rows for one in chain.along(key)) for chain in self._chains)
            for target in targets:
                if self._now_s is None or target.match.spec.expiry is None:
                    target.shard.expect(target.table, -(-saved // target.hosted.shares))

    def _wanted(self, file: SavedFile) -> bool:
        return any(
            target.meets(file, self._rank)
            for key in file.tables
            for target in self._targets.get(key, ())
        )

    def _load_rows(self, targets: Sequence[Target], chunk: RowChunk, weigh: bool) -> None:
        adapted: Adapted | None = None
        last: TableMatch | None = None
        for target in targets:
            if adapted is None or last is not target.match:  # not a further slice of the same
                last = target.match
                adapted = adapt(last, chunk, seed=target.shard.seed, now_s=self._now_s)
                if adapted.unfit:
                    self._unfit[last.key] += adapted.unfit
            rows = target.rows(adapted.chunk, self._rank)
            trim = target.trim
            if weigh:
                if trim is not None:
                    trim.weigh(rows)
                continue
            if trim is not None:
                rows = _kept(rows, trim.kept(rows))
            target.shard.load(target.table, rows)
            if target.hosted.answers(self._rank):
                self._rows[target.match.key] += rows.ids.numel()
                self._expired[target.match.key] += target.owned(adapted.expired_U, self._rank)

    def _load_admission(self) -> None:
        """Admission counters are whole in every checkpoint: the newest has all."""
        parts: dict[str, list[AdmissionState]] = {}
        for chain in self._chains:
            for key, state in self._admission(chain.last):
                parts.setdefault(key, []).append(state)
        for target in joined.from_iterable(self._targets.values()):
            spec, hosted = target.match.spec, target.hosted
            own = [
                hosted_admission(spec, hosted, self._rank, one)
                for one in parts.get(target.match.saved.key, ())
            ]
            if target.match.admission and own:
                ids = torch.cat([one.ids for one in own])
                counts = torch.cat([one.counts for one in own])
                cells = _largest([one.cells for one in own if one.cells])
                target.shard.load_admission_state(target.table, AdmissionState(ids, counts, cells))

    def _admission(self, link: Link) -> Iterator[tuple[str, AdmissionState]]:
        """Admission counters of a checkpoint, a part at a time, with their table's key."""
        none = torch.empty(0, dtype=torch.int64, device="cpu")
        for file in filter(self._wanted, link.manifest.files):
            if file.kind == "sketch":
                cells = read_checked(link.storage, file).numpy().tobytes()
                yield file.tables[0], AdmissionState(none, none, cells)
            elif file.kind == "admission":
                for index, (ids_P, counts_P) in link.read(file):
                    yield file.tables[index], AdmissionState(ids_P, counts_P, b"")


def _read_whole(file: ChainFile, buffer: ReadBuffer) -> Iterator[tuple[int, Columns]]:
    """Rows or deleted ids of a file; it is read and checked when this returns."""
    return file.link.read(file.saved, buffer)


def _ahead(
    files: Sequence[T], begin: Callable[[T, ReadBuffer], U], *, once: bool
) -> Generator[U, None, None]:
    """`begin` of each file, called in another thread while the last one's result is in use.

    Two buffers take turns: a result is good until the next but one is asked for.

    Args:
        once: nobody else reads these files soon.
    """
    buffers = ReadBuffer(once=once), ReadBuffer(once=once)
    with ThreadPoolExecutor(1, thread_name_prefix="shoal-load") as pool:
        pending = pool.submit(begin, files[0], buffers[0]) if files else None
        for number in range(1, len(files) + 1):
            assert pending is not None
            result = pending.result()
            if number < len(files):
                pending = pool.submit(begin, files[number], buffers[number % 2])
            yield result


def _largest(sketches: Sequence[bytes]) -> bytes:
    """Each cell's largest count: counters only grow, and who does not own a cell has an old one."""
    cells = [np.frombuffer(one, dtype="<u4") for one in sketches]
    return bytes(np.maximum.reduce(cells)) if cells else b""


def _choose(targets: Iterable[Target]) -> list[Trim]:
    """Have rows chosen for each table that may leave some out."""
    found = []
    for target in targets:
        spec = target.shard.specs[target.table]
        if spec.capacity_rows is not None and spec.on_full != "raise":
            target.trim = Trim(spec.capacity_rows, spec.on_full)
            found.append(target.trim)
    return found


def does_not_fit(found: Mapping[str, int]) -> CheckpointError:
    """The error of numbers that are too large for a table's dtype, counted by table."""
    got = "; ".join(f"{n} that are too large for table {key!r}" for key, n in found.items())
    remedy = "Load them into tables of a wider dtype (bfloat16 has the range of float32)."
    return CheckpointError("numbers of rows", got, "those within the tables' dtypes", remedy)
