"""A table against a dictionary: any order of verbs gives the same rows."""

from __future__ import annotations

import math
from dataclasses import dataclass

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shoal import Expiry, Segment, Table, TableSpec, initializers, optimizers
from shoal.table.cuda.shard import CudaShard
from support.shares import share_of

DIM = 3
TTL_S = 50
INITIAL = 0.5
# Few ids, so that they meet; the extremes, because every int64 is an id.
IDS = st.sampled_from([0, 1, 2, 3, 5, -1, 7, 2**63 - 1, -(2**63), 1 << 48, 11, 13])
ID_LISTS = st.lists(IDS, max_size=12)
VALUES = st.sampled_from([-2.0, -1.0, -0.5, 0.25, 1.0, 4.0])


@dataclass
class Row:
    """All columns of a row are equal, so one number stands for them."""

    value: float
    last_seen_s: int
    count: int


class TableMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        segment = Segment(
            dim=DIM, initializer=initializers.Constant(INITIAL), optimizer=optimizers.SGD(lr=0.5)
        )
        spec = TableSpec(name="machine", segments=(segment,), expiry=Expiry(ttl_s=TTL_S))
        self.table = self.make_table(spec)
        self.model: dict[int, Row] = {}
        self.now_s = 0
        self.open: list[tuple[object, list[int]]] = []

    def make_table(self, spec: TableSpec) -> Table:
        return Table(spec)

    def touch(self, ids: list[int]) -> None:
        for id in ids:
            self.model.setdefault(id, Row(INITIAL, self.now_s, 0))

    def rows(self, values: list[float]) -> torch.Tensor:
        return torch.tensor(values).reshape(-1, 1).repeat(1, DIM)

    @rule(seconds=st.integers(0, 40))
    def time_passes(self, seconds: int) -> None:
        self.now_s += seconds

    @rule(ids=ID_LISTS)
    def find(self, ids: list[int]) -> None:
        weights, found = self.table.find(ids)
        assert found.tolist() == [id in self.model for id in ids]
        want = [self.model[id].value if id in self.model else 0.0 for id in ids]
        assert torch.equal(weights, self.rows(want))

    @rule(ids=ID_LISTS, value=VALUES)
    def apply(self, ids: list[int], value: float) -> None:
        self.table.apply(ids, self.rows([value] * len(ids)), event_time_s=self.now_s)
        self.touch(ids)
        for id in set(ids):
            row = self.model[id]
            row.value -= 0.5 * value * ids.count(id)
            row.count += ids.count(id)
            row.last_seen_s = max(row.last_seen_s, self.now_s)

    @rule(ids=st.lists(IDS, unique=True), value=VALUES)
    def assign(self, ids: list[int], value: float) -> None:
        self.table.assign(ids, self.rows([value] * len(ids)), event_time_s=self.now_s)
        self.touch(ids)
        for id in ids:
            self.model[id].value = value
            self.model[id].last_seen_s = max(self.model[id].last_seen_s, self.now_s)

    @rule(ids=ID_LISTS, value=VALUES)
    def assign_add(self, ids: list[int], value: float) -> None:
        self.table.assign_add(ids, self.rows([value] * len(ids)), event_time_s=self.now_s)
        self.touch(ids)
        for id in ids:
            self.model[id].value += value
            self.model[id].last_seen_s = max(self.model[id].last_seen_s, self.now_s)

    @rule(ids=st.lists(IDS, unique=True))
    def reinitialize(self, ids: list[int]) -> None:
        status = self.table.reinitialize(ids, event_time_s=self.now_s)
        assert status.tolist() == [int(id in self.model) for id in ids]
        self.touch(ids)
        for id in ids:
            self.model[id].value = INITIAL
            self.model[id].last_seen_s = max(self.model[id].last_seen_s, self.now_s)

    @rule(ids=ID_LISTS)
    def open_ticket(self, ids: list[int]) -> None:
        ticket = self.table.find_or_init(ids, event_time_s=self.now_s)
        assert ticket.found_N.tolist() == [id in self.model for id in ids]
        self.touch(ids)
        assert ticket.admitted_N.all()
        want = [self.model[id].value for id in ids]
        assert torch.equal(self.table.gather(ticket), self.rows(want))
        self.open.append((ticket, ids))

    @precondition(lambda self: self.open)
    @rule()
    def close_ticket(self) -> None:
        ticket, _ = self.open.pop(0)
        ticket.end()  # type: ignore[attr-defined]

    @rule()
    def evict(self) -> None:
        pinned = {id for _, ids in self.open for id in ids}
        gone = {
            id
            for id, row in self.model.items()
            if self.now_s - row.last_seen_s >= TTL_S and id not in pinned
        }
        assert self.table.evict(self.now_s) == len(gone)
        for id in gone:
            del self.model[id]

    @rule(id=IDS)
    def entry(self, id: int) -> None:
        entry = self.table.entry(id)
        assert (entry is not None) == (id in self.model)
        if entry is not None:
            row = self.model[id]
            assert torch.equal(entry.weights, torch.full((DIM,), row.value))
            assert (entry.last_seen_s, entry.count) == (row.last_seen_s, row.count)

    @rule()
    def export_and_load(self) -> None:
        chunk = self.table.export()
        assert sorted(chunk.ids.tolist()) == sorted(self.model)
        copy = self.make_table(self.table.spec)
        copy.load(chunk)
        weights, found = copy.find(chunk.ids)
        assert found.all()
        assert torch.equal(weights, chunk.weights)

    @invariant()
    def sizes_agree(self) -> None:
        assert len(self.table) == len(self.model)
        assert math.isclose(self.table.stats().rows, len(self.model))


TestTable = TableMachine.TestCase
TestTable.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


class CudaTableMachine(TableMachine):
    """On a GPU shard, whose kernels are interpreted: a verb takes a tenth of a second."""

    def make_table(self, spec: TableSpec) -> Table:
        return Table(spec, shard=CudaShard([spec], device="cpu"))


TestCudaTable = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")(
    CudaTableMachine.TestCase
)
TestCudaTable.settings = settings(max_examples=2, stateful_step_count=10, deadline=None)


class SlowCudaTableMachine(CudaTableMachine):
    pass


TestSlowCudaTable = pytest.mark.slow(SlowCudaTableMachine.TestCase)
TestSlowCudaTable.settings = settings(
    max_examples=share_of(30, 1), stateful_step_count=30, deadline=None
)
