"""Snapshots of changes against a dictionary: put together they are the table."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shoal import Expiry, Segment, TableSpec, initializers, optimizers
from shoal.table.shard import StepContext
from shoal.table.values import RowChunk
from support.change_consumer import Consumer, contents
from support.id_groups import groups_of
from support.shards import shard_factory

IDS = st.lists(st.integers(0, 12), min_size=1, max_size=6, unique=True)
TTL_S = 10


class ChangesMachine(RuleBasedStateMachine):
    """One table that expires, one that evicts; consumers at their own paces."""

    kind = "cpu"
    open_at_once = 3

    def __init__(self) -> None:
        super().__init__()
        segment = Segment(dim=1, initializer=initializers.Zeros(), optimizer=optimizers.SGD())
        self.shard = shard_factory(self.kind)(
            (
                TableSpec(name="ttl", segments=(segment,), expiry=Expiry(ttl_s=TTL_S)),
                TableSpec(name="lru", segments=(segment,), capacity_rows=6, on_full="lru"),
            )
        )
        self.consumers = [Consumer() for _ in range(3)]
        self.reading: dict[int, dict[int, float]] = {}  # by consumer: values at its open point
        for k in range(3):
            self.shard.release(0, f"consumer {k}")
        self.values: dict[int, float] = {}
        self.seen_s: dict[int, int] = {}
        self.version = 1
        self.now_s = 0
        self.next_value = 1.0
        self.loads = 0

    @rule(ids=IDS)
    def assign(self, ids: list[int]) -> None:
        weights = torch.arange(len(ids), dtype=torch.float32)[:, None] + self.next_value
        ctx = StepContext(event_time_s=self.now_s)
        self.shard.assign(groups_of((0, ids), (1, ids)), [weights, weights], ctx=ctx)
        for id_, value in zip(ids, weights[:, 0].tolist(), strict=True):
            self.values[id_] = value
            self.seen_s[id_] = self.now_s
        self.next_value += len(ids)

    @rule(wait_s=st.integers(1, TTL_S))
    def expire(self, wait_s: int) -> None:
        self.now_s += wait_s
        self.shard.evict(self.now_s)
        for id_ in [id_ for id_ in self.values if self.now_s - self.seen_s[id_] >= TTL_S]:
            del self.values[id_]

    @rule(table=st.integers(0, 1))
    def clear(self, table: int) -> None:
        self.shard.clear(table)
        if table == 0:
            self.values.clear()

    @rule()
    def close_version(self) -> None:
        assert self.shard.close_version() == self.version
        self.version += 1

    @precondition(lambda self: len(self.reading) < self.open_at_once)
    @rule(k=st.integers(0, 2))
    def open(self, k: int) -> None:
        if k not in self.reading:
            self.consumers[k].open(self.shard)
            assert self.consumers[k].next.version == self.version
            self.version += 1
            self.reading[k] = dict(self.values)

    @precondition(lambda self: self.reading)
    @rule(k=st.integers(0, 2))
    def finish(self, k: int) -> None:
        k = sorted(self.reading)[k % len(self.reading)]
        self.consumers[k].finish(self.shard)
        held = self.consumers[k].held.items()
        assert {id_: row[0] for (table, id_), row in held if table == "ttl"} == self.reading.pop(k)

    @rule(k=st.integers(0, 2))
    def read(self, k: int) -> None:
        if k not in self.reading:
            self.open(k)
        while k in self.reading:
            self.finish(sorted(self.reading).index(k))

    @rule(k=st.integers(0, 2))
    def release(self, k: int) -> None:
        if (cursor := self.consumers[k].cursor) is not None:
            self.shard.release(cursor.version, f"consumer {k}")

    @precondition(lambda self: self.loads < 2)
    @rule(id_=st.integers(0, 12), ahead=st.integers(0, 2))
    def load(self, id_: int, ahead: int) -> None:
        version = max(1, self.version - 1 + ahead)
        one = torch.ones(1, dtype=torch.int64)
        weight = torch.full((1, 1), self.next_value)
        chunk = RowChunk(
            "ttl", one * id_, weight, torch.zeros(1, 0), one * version, one * self.now_s, one
        )
        self.shard.load(0, chunk)
        self.values[id_] = self.next_value
        self.seen_s[id_] = self.now_s
        self.version = max(self.version, version)
        self.next_value += 1
        self.loads += 1

    @invariant()
    def no_needless_restart(self) -> None:
        assert all(consumer.restarts <= 1 + self.loads for consumer in self.consumers)

    def teardown(self) -> None:
        while self.reading:
            self.finish(0)
        for consumer in self.consumers:
            consumer.drain(self.shard)
            assert consumer.held == contents(self.shard.export(0), self.shard.export(1))


class CudaChangesMachine(ChangesMachine):
    """Where kernels are interpreted a verb takes a tenth of a second."""

    kind = "cuda"


class TieredChangesMachine(ChangesMachine):
    kind = "tiered"


class ReferenceChangesMachine(ChangesMachine):
    kind = "reference"
    open_at_once = 0  # nothing may change while a snapshot is open


TestChangesModel = pytest.mark.slow(ChangesMachine.TestCase)
TestChangesModel.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)

TestReferenceChangesModel = ReferenceChangesMachine.TestCase
TestReferenceChangesModel.settings = settings(
    max_examples=20, stateful_step_count=30, deadline=None
)

ON_GPU = torch.cuda.is_available()
SHORT = settings(
    max_examples=100 if ON_GPU else 6, stateful_step_count=40 if ON_GPU else 16, deadline=None
)
TestCudaChangesModel = pytest.mark.slow(CudaChangesMachine.TestCase)
TestCudaChangesModel.settings = SHORT
TestTieredChangesModel = pytest.mark.slow(TieredChangesMachine.TestCase)
TestTieredChangesModel.settings = SHORT
if ON_GPU:
    pytest.mark.gpu(TestCudaChangesModel)
    pytest.mark.gpu(TestTieredChangesModel)
