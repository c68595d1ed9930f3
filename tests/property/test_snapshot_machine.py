"""Open snapshots against dictionary copies made at their points, under any order of methods."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from shoal import Expiry, Segment, TableSpec, initializers, optimizers
from shoal.table.cpu.shard import CpuShard
from shoal.table.shard import HASHES, GradRecord, Snapshot, StepContext
from shoal.table.values import Cursor, RowChunk
from support.cut_rows import unsigned_hashes
from support.id_groups import groups_of
from support.placed_shard import PlacedCuda, PlacedTiered

OPEN = 3  # snapshots at a time
WHICH = st.integers(0, OPEN - 1)
IDS = st.lists(st.integers(0, 15), min_size=1, max_size=8)
TTL_S = 10
NAMES = ("ttl", "lru")

Row = tuple[tuple[float, ...], tuple[float, ...], int, int, int]
Rows = dict[int, Row]


def rows_of(chunk: RowChunk) -> Rows:
    columns = zip(
        chunk.ids.tolist(),
        chunk.weights.tolist(),
        chunk.state.tolist(),
        chunk.versions.tolist(),
        chunk.last_seen_s.tolist(),
        chunk.counts.tolist(),
        strict=True,
    )
    return {id_: (tuple(w), tuple(s), v, seen, n) for id_, w, s, v, seen, n in columns}


@dataclass
class Opened:
    """A snapshot, and by table: the rows of its span, ids that went in it, ids of its point."""

    snapshot: Snapshot
    want: list[Rows]
    deleted: list[set[int]]
    present: list[set[int]]


class SnapshotMachine(RuleBasedStateMachine):
    """One table that expires, one that evicts; buffers from nothing to plenty."""

    def made(self, specs: Sequence[TableSpec]) -> Any:
        return CpuShard(specs, threads=2)

    def __init__(self) -> None:
        super().__init__()
        segment = Segment(dim=2, initializer=initializers.Zeros(), optimizer=optimizers.Adagrad())
        self.shard = self.made(
            (
                TableSpec(name="ttl", segments=(segment,), expiry=Expiry(ttl_s=TTL_S)),
                TableSpec(name="lru", segments=(segment,), capacity_rows=9, on_full="lru"),
            )
        )
        self.opened: list[Opened] = []
        self.marks: dict[int, list[set[int]]] = {}  # ids of earlier points, for deltas
        self.incarnation = 0
        self.now_s = 0
        self.value = 1.0

    def context(self) -> StepContext:
        return StepContext(event_time_s=self.now_s)

    def tables(self) -> list[Rows]:
        return [rows_of(self.shard.export(table)) for table in range(2)]

    @rule(ids=IDS, table=st.integers(0, 1))
    def train(self, ids: list[int], table: int) -> None:
        if table == 1:
            ids = ids[:4]
        ticket = self.shard.find_or_init(groups_of((table, ids)), ctx=self.context())
        self.shard.apply([GradRecord(ticket, (torch.ones(len(ids), 2),))], ctx=self.context())

    @rule(ids=IDS)
    def apply_ids(self, ids: list[int]) -> None:
        grads = [torch.ones(len(ids), 2)]
        self.shard.apply_ids(groups_of((0, ids)), grads, ctx=self.context())

    @rule(ids=IDS, add=st.booleans())
    def write(self, ids: list[int], add: bool) -> None:
        self.value += 1
        values = [torch.full((len(ids), 2), self.value)]
        verb = self.shard.assign_add if add else self.shard.assign
        verb(groups_of((0, ids)), values, ctx=self.context())

    @rule(ids=IDS)
    def reinitialize(self, ids: list[int]) -> None:
        self.shard.reinitialize(groups_of((0, ids)), ctx=self.context())

    @rule(ids=st.sets(st.integers(0, 15), min_size=1, max_size=3), version=st.integers(0, 6))
    def load(self, ids: set[int], version: int) -> None:
        self.value += 1
        ids_R = torch.tensor(sorted(ids))
        same_R = torch.ones_like(ids_R)
        weights, state = torch.full((len(ids), 2), self.value), torch.ones(len(ids), 2)
        times_R = same_R * self.now_s
        self.shard.load(
            0, RowChunk("ttl", ids_R, weights, state, same_R * version, times_R, same_R)
        )

    @rule(wait_s=st.integers(1, TTL_S))
    def expire(self, wait_s: int) -> None:
        self.now_s += wait_s
        self.shard.evict(self.now_s)

    @rule(table=st.integers(0, 1))
    def clear(self, table: int) -> None:
        self.shard.clear(table)

    @rule()
    def close_version(self) -> None:
        self.shard.close_version()

    @precondition(lambda self: len(self.opened) < OPEN)
    @rule(buffer_bytes=st.sampled_from([0, 300, 1 << 20]), back=st.integers(0, 3))
    def take(self, buffer_bytes: int, back: int) -> None:
        """All rows, or what changed since one of the last points."""
        now = self.tables()
        if self.incarnation != self.shard.incarnation:
            self.marks = {}
        earlier = sorted(self.marks)[-back:] if back else []
        since = Cursor(self.shard.incarnation, earlier[0]) if earlier else None
        snapshot = self.shard.snapshot(since, buffer_bytes=buffer_bytes)
        self.incarnation = self.shard.incarnation
        before = self.marks[earlier[0]] if earlier else [set[int](), set[int]()]
        self.opened.append(
            Opened(
                snapshot,
                [{i: row for i, row in rows.items() if row[2] > snapshot.since} for rows in now],
                [gone - rows.keys() for gone, rows in zip(before, now, strict=True)],
                [set(rows) for rows in now],
            )
        )
        self.marks[snapshot.version] = [set(rows) for rows in now]

    @precondition(lambda self: self.opened)
    @rule(which=WHICH, table=st.integers(0, 1), edges=st.tuples(*[st.integers(0, 16)] * 2))
    def read(self, which: int, table: int, edges: tuple[int, int]) -> None:
        one = self.opened[which % len(self.opened)]
        start, stop = (HASHES * edge // 16 for edge in sorted(edges))
        chunk = one.snapshot.read(table, start, stop)
        hashes = unsigned_hashes(chunk.ids, NAMES[table])
        assert hashes == sorted(hashes)
        ids_U = torch.tensor(sorted(one.want[table]), dtype=torch.int64)
        inside = {
            id_
            for id_, h in zip(ids_U.tolist(), unsigned_hashes(ids_U, NAMES[table]), strict=True)
            if start <= h < stop
        }
        assert rows_of(chunk) == {id_: one.want[table][id_] for id_ in inside}

    @precondition(lambda self: self.opened)
    @rule(which=WHICH, table=st.integers(0, 1))
    def count(self, which: int, table: int) -> None:
        one = self.opened[which % len(self.opened)]
        counts = one.snapshot.histogram(table, 3)
        ids_U = torch.tensor(sorted(one.want[table]), dtype=torch.int64)
        want = [0] * 8
        for h in unsigned_hashes(ids_U, NAMES[table]):
            want[h >> 61] += 1
        assert counts.tolist() == want

    @precondition(lambda self: self.opened)
    @rule(which=WHICH, table=st.integers(0, 1))
    def deletions(self, which: int, table: int) -> None:
        """All that went since; ids that came and went in between may be named too."""
        one = self.opened[which % len(self.opened)]
        gone = one.snapshot.deleted(table).tolist()
        assert len(set(gone)) == len(gone)
        assert one.deleted[table] <= set(gone)
        assert not set(gone) & one.present[table]
        if one.snapshot.since == 0:
            assert gone == []

    @precondition(lambda self: self.opened)
    @rule(which=WHICH)
    def close(self, which: int) -> None:
        self.opened.pop(which % len(self.opened)).snapshot.close()

    def teardown(self) -> None:
        while self.opened:
            for which in range(len(self.opened)):
                for table in range(2):
                    self.read(which, table, (0, 16))
            self.close(1)


class DeviceMachine(SnapshotMachine):
    def made(self, specs: Sequence[TableSpec]) -> Any:
        return PlacedCuda(specs)


class TieredMachine(SnapshotMachine):
    def made(self, specs: Sequence[TableSpec]) -> Any:
        return PlacedTiered(specs)


TestSnapshot = SnapshotMachine.TestCase
TestSnapshot.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


@pytest.mark.slow
class TestLongSnapshot(SnapshotMachine.TestCase):  # type: ignore[name-defined, misc]
    settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


ON_GPU = torch.cuda.is_available()
marks = [pytest.mark.gpu] if ON_GPU else []


@pytest.mark.slow
class TestDevice(DeviceMachine.TestCase):  # type: ignore[name-defined, misc]
    pytestmark = marks
    settings = settings(
        max_examples=60 if ON_GPU else 5, stateful_step_count=30 if ON_GPU else 15, deadline=None
    )


@pytest.mark.slow
class TestTiered(TieredMachine.TestCase):  # type: ignore[name-defined, misc]
    pytestmark = marks
    settings = settings(
        max_examples=60 if ON_GPU else 5, stateful_step_count=30 if ON_GPU else 15, deadline=None
    )
