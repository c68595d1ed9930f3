"""Many programs that claim the same ids at once, then an audit: one row an id, none lost.

Only a GPU runs programs at the same time; interpreted, the same tests run small, in sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from shoal.kernels.index import erase, list_handles, new_entries, probe, rebuild
from shoal.kernels.tables import (
    CHUNK_BITS,
    CHUNK_ROWS,
    COUNT_ERASED,
    COUNT_FREE,
    COUNT_FRESH,
    COUNT_ISSUED,
    EMPTY_KEY,
    ERASED_KEY,
    CallGroups,
)
from support.device_tables import DEVICES, TableSize, ids_from, make_tables


@pytest.fixture(params=DEVICES)
def stress(request: pytest.FixtureRequest) -> Stress:
    return Stress(str(request.param))


class Stress:
    """Large calls, audited on their device. `share` of their size is left when interpreted."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.generator = torch.Generator(device).manual_seed(0)

    def sized(self, large: int, small: int) -> int:
        return large if self.device == "cuda" else small

    def use(self, *sizes: TableSize) -> None:
        self.tables = make_tables(sizes, self.device)
        lengths = [len(chunk.ids) for chunk in self.tables.chunks]
        self.places = torch.tensor([0, *lengths], device=self.device).cumsum(0)

    def below(self, end: int, count: int) -> Tensor:
        """Random numbers 0..end-1."""
        return torch.randint(end, (count,), device=self.device, generator=self.generator)

    def distinct_ids(self, count: int) -> Tensor:
        """Distinct ids that look random, zero and the markers among them."""
        ids = self.below(1 << 62, count) - (1 << 61)
        ids[:3] = torch.tensor([0, EMPTY_KEY, ERASED_KEY], device=self.device)
        return ids.unique()

    def one_group(self, table: int, ids: Tensor) -> CallGroups:
        splits = torch.tensor([0, len(ids)], device=self.device)
        return CallGroups(ids, splits, torch.tensor([table], dtype=torch.int32).to(self.device))

    def insert(self, call: CallGroups) -> Tensor:
        """Insert and check that each id got a row that holds it; returns the handles."""
        handles = self.handles(call, insert=True)
        assert torch.equal(self.ids_of(handles), call.ids_N)
        return handles

    def handles(self, call: CallGroups, *, insert: bool) -> Tensor:
        handles = torch.full_like(call.ids_N, -7, dtype=torch.int32)
        probe(self.tables.layout, call, handles, None, None, insert=insert)
        return handles

    def listed(self, table: int) -> Tensor:
        return list_handles(self.tables.entries[table])

    def ids_of(self, handles: Tensor) -> Tensor:
        assert int(handles.min()) >= 0
        every = torch.cat([chunk.ids for chunk in self.tables.chunks])
        places = self.places[handles.long() >> CHUNK_BITS] + (handles.long() & (CHUNK_ROWS - 1))
        return every[places]

    def audit(self, table: int, distinct: Tensor) -> None:
        """Exactly these ids are in, once each, with rows of their own that hold their ids."""
        handles = self.listed(table)
        assert torch.equal(self.ids_of(handles).sort().values, distinct.sort().values)
        assert len(handles.unique()) == len(handles)
        words = (COUNT_ISSUED, COUNT_FREE, COUNT_FRESH)
        issued, free, fresh = (self.tables.count(table, word) for word in words)
        assert fresh + issued - free == len(distinct)
        found = self.handles(self.one_group(table, distinct), insert=False)
        assert torch.equal(self.ids_of(found), distinct)


@pytest.mark.slow
def test_millions_of_colliding_inserts_leave_one_row_an_id(stress: Stress) -> None:
    rows = stress.sized(1_000_000, 200)
    stress.use(TableSize(rows=rows, slots=stress.sized(1 << 21, 1 << 9), salt=11))
    pool = stress.distinct_ids(rows)
    for _ in range(4):
        places = stress.below(len(pool), 2 * rows)
        # Half of all lanes ask for one of a hundred ids.
        places[::2] %= 100
        stress.insert(stress.one_group(0, pool[places]))
    again = stress.insert(stress.one_group(0, pool.repeat(3))).view(3, -1)
    assert torch.equal(again[0], again[2])
    stress.audit(0, pool)
    assert stress.tables.count(0, COUNT_ISSUED) == len(pool)


def test_ids_of_a_few_start_slots_leave_one_row_an_id(stress: Stress) -> None:
    slots, each = stress.sized(1 << 13, 1 << 7), stress.sized(1000, 20)
    stress.use(TableSize(rows=slots, slots=slots))
    starts = (0, 5, slots - 1, slots // 2)
    pool = torch.tensor([id_ for start in starts for id_ in ids_from(start, slots, each)])
    for count in (stress.sized(400_000, 200), 50):
        places = stress.below(len(pool), count)
        ids = pool.to(stress.device)[places]
        stress.insert(stress.one_group(0, ids))
    known = stress.listed(0)
    stress.insert(stress.one_group(0, ids))
    assert torch.equal(stress.listed(0), known)
    stress.audit(0, stress.ids_of(known))
    assert len(known) == stress.tables.count(0, COUNT_ISSUED)


@pytest.mark.slow
def test_churn_in_many_small_groups_leaves_one_row_an_id(stress: Stress) -> None:
    rows, slots = stress.sized(40_000, 40), stress.sized(1 << 17, 1 << 8)
    sizes = [TableSize(rows=rows, slots=slots, salt=table) for table in range(5)]
    stress.use(*sizes)
    pools = [stress.distinct_ids(rows * 3 // 4) for _ in sizes]
    inside: list[set[int]] = [set() for _ in sizes]
    for turn in range(stress.sized(12, 4)):
        call = small_groups(stress, pools, stress.sized(20_000, 12))
        stress.insert(call)
        owners = call.tables_G.repeat_interleave(call.splits_G1.diff())
        gone = []
        for table in range(len(sizes)):
            inside[table] |= set(call.ids_N[owners == table].tolist())
            stress.audit(table, torch.tensor(sorted(inside[table])).to(stress.device))
            live = stress.listed(table)
            leaves = stress.below(2, len(live)) > 0
            gone.append(torch.where(leaves, live, -1))
            inside[table] -= set(stress.ids_of(live)[leaves].tolist())
        erase(stress.tables.layout, torch.cat(gone), None)
        if turn % 3 == 2:
            for table, size in enumerate(sizes):
                entries = new_entries(size.slots, stress.device)
                rebuild(stress.tables.entries[table], entries, size.salt)
                stress.tables.replace_entries(table, entries)
                stress.tables.layout.counters_KC[table, COUNT_ERASED] = 0


def small_groups(stress: Stress, pools: Sequence[Tensor], groups: int) -> CallGroups:
    """Groups of 0 to 39 ids, each of some table, so that most programs see several tables."""
    lengths = stress.below(40, groups)
    tables = stress.below(len(pools), groups)
    owners = tables.repeat_interleave(lengths)
    picks = stress.below(1 << 30, len(owners))
    ids = torch.empty_like(owners)
    for table, pool in enumerate(pools):
        ids = torch.where(owners == table, pool[picks % len(pool)], ids)
    splits = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    return CallGroups(ids, splits, tables.int())
