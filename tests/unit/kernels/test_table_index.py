"""The index of a GPU shard against dictionaries: interpreted here, compiled on a GPU."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from shoal.kernels import index as table_index
from shoal.kernels.index import erase, fold, list_handles, new_entries, probe, rebuild
from shoal.kernels.tables import (
    BUCKET_SLOTS,
    CHUNK_BITS,
    COUNT_ERASED,
    COUNT_EVICTED,
    COUNT_FREE,
    COUNT_FRESH,
    COUNT_INSERTED,
    COUNT_ISSUED,
    COUNT_READY,
    EMPTY_KEY,
    ERASED_KEY,
    FIRST_ROWS,
)
from support.device_tables import DEVICES, DeviceTables, TableSize, ids_from, make_tables

MARKERS = [EMPTY_KEY, ERASED_KEY]
Groups = Sequence[tuple[int, Sequence[int]]]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Index:
    """Calls the kernels on small tables and holds what they do against a dictionary a table."""

    def __init__(self, device: str, *sizes: TableSize) -> None:
        self.tables = make_tables(sizes, device)
        self.rows: list[dict[int, int]] = [{} for _ in sizes]
        self.free: list[list[int]] = [[] for _ in sizes]
        self.fresh = [0] * len(sizes)

    def probe(
        self, groups: Groups, *, insert: bool, wanted: Sequence[bool] | None = None
    ) -> tuple[list[int], list[bool]]:
        call = self.tables.groups(*groups)
        n = call.ids_N.numel()
        handles = torch.full((n,), -7, dtype=torch.int32, device=self.tables.device)
        found = torch.ones(n, dtype=torch.bool, device=self.tables.device)
        mask = None if wanted is None else torch.tensor(wanted, device=self.tables.device)
        probe(self.tables.layout, call, handles, found, mask, insert=insert)
        return handles.tolist(), found.tolist()

    def find(self, groups: Groups) -> None:
        handles, found = self.probe(groups, insert=False)
        expected = [self.rows[table].get(id_, -1) for table, ids in groups for id_ in ids]
        assert handles == expected
        assert found == [handle >= 0 for handle in expected]

    def insert(self, groups: Groups, wanted: Sequence[bool] | None = None) -> list[int]:
        """Insert and check; returns the handles."""
        keys = [(table, id_) for table, ids in groups for id_ in ids]
        handles, found = self.probe(groups, insert=True, wanted=wanted)
        everywhere: dict[tuple[int, int], bool] = {}
        for key, met in zip(keys, found, strict=True):
            everywhere[key] = everywhere.get(key, True) and met
        assert everywhere == {(table, id_): id_ in self.rows[table] for table, id_ in keys}
        asks = [True] * len(keys) if wanted is None else wanted
        asked = {key for key, asks_too in zip(keys, asks, strict=True) if asks_too}
        got: dict[tuple[int, int], int] = {}
        for (table, id_), handle, asks_too in zip(keys, handles, asks, strict=True):
            known = self.rows[table].get(id_, -1)
            if known < 0 and asks_too:
                known = got.setdefault((table, id_), handle)
                assert known >= 0
            assert handle == known
        assert set(got) == {(table, id_) for table, id_ in asked if id_ not in self.rows[table]}
        for table in range(len(self.rows)):
            mine = {id_: handle for (owner, id_), handle in got.items() if owner == table}
            assert sorted(mine.values()) == sorted(self.issued(table, len(mine)))
            self.rows[table] |= mine
        self.audit()
        return handles

    def issued(self, table: int, count: int) -> list[int]:
        """The handles that a table hands out next: freed ones, last in first out, then fresh."""
        reused = [self.free[table].pop() for _ in range(min(count, len(self.free[table])))]
        fresh = range(self.fresh[table], self.fresh[table] + count - len(reused))
        self.fresh[table] = fresh.stop
        return reused + [fresh_handle(self.tables, table, sequence) for sequence in fresh]

    def erase(self, handles: Sequence[int], size: int | None = None) -> None:
        before = [self.tables.count(table, COUNT_EVICTED) for table in range(len(self.rows))]
        sizes = None if size is None else torch.tensor([size], dtype=torch.int32)
        erase(
            self.tables.layout,
            torch.tensor(handles, dtype=torch.int32, device=self.tables.device),
            None if sizes is None else sizes.to(self.tables.device),
        )
        gone = set(handles[:size])
        for table, rows in enumerate(self.rows):
            freed = [handle for handle in rows.values() if handle in gone]
            self.rows[table] = {i: h for i, h in rows.items() if h not in gone}
            stack = self.tables.free_lists[table].tolist()
            height = self.tables.count(table, COUNT_FREE)
            assert stack[: height - len(freed)] == self.free[table]
            assert sorted(stack[height - len(freed) : height]) == sorted(freed)
            self.free[table] = stack[:height]
            assert self.tables.count(table, COUNT_EVICTED) == before[table] + len(freed)
        self.audit()

    def rebuild(self, table: int, slots: int) -> None:
        entries = new_entries(slots, self.tables.device)
        rebuild(self.tables.entries[table], entries, self.tables.sizes[table].salt)
        self.tables.replace_entries(table, entries)
        self.tables.layout.counters_KC[table, COUNT_ERASED] = 0
        self.audit()

    def audit(self) -> None:
        for table, rows in enumerate(self.rows):
            assert contents(self.tables, table) == rows
            assert all(self.tables.id_of(handle) == id_ for id_, handle in rows.items())
            keys = self.tables.entries[table][:-1, :BUCKET_SLOTS]
            assert self.tables.count(table, COUNT_ERASED) == int((keys == ERASED_KEY).sum())
            issued, free, fresh = (
                self.tables.count(table, word) for word in (COUNT_ISSUED, COUNT_FREE, COUNT_FRESH)
            )
            assert fresh + issued - free == len(rows)


def fresh_handle(tables: DeviceTables, table: int, sequence: int) -> int:
    """Handle of a table's fresh row of a sequence number, by walking its chunks."""
    for chunk in tables.directories[table].tolist():
        capacity = len(tables.chunks[chunk].ids)
        if sequence < capacity:
            return chunk << CHUNK_BITS | sequence
        sequence -= capacity
    raise AssertionError("no room")


def contents(tables: DeviceTables, table: int) -> dict[int, int]:
    """Id -> handle of all that a table's entries hold, read by the host; no id may stand twice."""
    found: dict[int, int] = {}
    entries = tables.entries[table].cpu()
    handles = entries[:, BUCKET_SLOTS:].contiguous().view(torch.int32).tolist()
    for bucket, keys in enumerate(entries[:, :BUCKET_SLOTS].tolist()):
        for lane, key in enumerate(keys):
            side = bucket == len(entries) - 1
            if key == EMPTY_KEY:
                assert handles[bucket][lane] == -1
            if key == EMPTY_KEY or (key == ERASED_KEY and not side):
                continue
            id_ = MARKERS[lane] if side else key
            assert id_ not in found
            found[id_] = handles[bucket][lane]
    return found


def test_a_new_index_is_empty(device: str) -> None:
    entries = new_entries(16, device)
    assert entries.shape == (3, 12)
    assert entries[:, :8].eq(EMPTY_KEY).all()
    assert entries[:, 8:].contiguous().view(torch.int32).eq(-1).all()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_calls_of_several_tables_behave_like_dictionaries(device: str, seed: int) -> None:
    draw = random.Random(seed)
    index = Index(
        device,
        TableSize(rows=600, slots=1024, salt=7),
        TableSize(rows=300, slots=512, salt=draw.randrange(1 << 64)),
        TableSize(rows=300, slots=512),
    )
    pool = [*MARKERS, *range(-3, 4), *(draw.randrange(-(1 << 63), 1 << 63) for _ in range(60))]
    for _ in range(4):
        groups = [
            (draw.randrange(3), draw.choices(pool, k=draw.choice([0, 0, 1, 9, 40])))
            for _ in range(draw.randrange(1, 6))
        ]
        index.insert(groups)
        index.find([(table, pool) for table in (2, 0)])
        live = [handle for rows in index.rows for handle in rows.values()]
        index.erase(draw.sample(live, len(live) // 3))
        index.rebuild(draw.randrange(2), draw.choice([256, 512]))
        index.find([(table, pool[::3]) for table in range(3)])


def test_both_markers_and_zero_are_ids_like_others(device: str) -> None:
    index = Index(device, TableSize(slots=64), TableSize(slots=64))
    ids = [ERASED_KEY, 0, 1, EMPTY_KEY, -1, (1 << 63) - 1]
    index.insert([(0, [ERASED_KEY]), (1, [0, 1])])
    index.find([(0, ids), (1, ids)])
    index.insert([(0, [*ids, *ids])])
    index.erase([index.rows[0][EMPTY_KEY]])
    index.find([(0, ids)])
    index.insert([(0, [EMPTY_KEY, EMPTY_KEY]), (1, [EMPTY_KEY])])
    index.erase([index.rows[0][id_] for id_ in MARKERS])
    assert index.tables.count(0, COUNT_ERASED) == 0
    index.find([(0, ids), (1, ids)])


def test_walks_go_on_around_the_end(device: str) -> None:
    salt = 1 << 63
    index = Index(device, TableSize(slots=32, salt=salt))
    ids = ids_from(27, 32, 21, salt)
    index.insert([(0, ids[:5])])
    index.insert([(0, ids[:19] + ids[:3])])
    index.find([(0, ids)])
    assert ids[18] in index.tables.entries[0][:2, :BUCKET_SLOTS].flatten().tolist()


def test_erased_slots_are_walked_past_and_not_claimed(device: str) -> None:
    index = Index(device, TableSize(slots=32))
    ids = ids_from(8, 32, 14)
    index.insert([(0, ids[:11])])
    index.erase([index.rows[0][id_] for id_ in ids[:9]])
    index.find([(0, ids)])
    index.insert([(0, [ids[0], ids[13], ids[10]])])
    assert index.tables.count(0, COUNT_ERASED) == 9
    index.find([(0, ids)])


def test_freed_handles_are_taken_last_in_first_out(device: str) -> None:
    index = Index(device, TableSize(slots=64))
    handles = index.insert([(0, range(10))])
    index.erase([handles[3], handles[8], handles[5]])
    assert index.free[0] == [handles[3], handles[8], handles[5]]
    for id_, handle in zip(range(20, 23), [handles[5], handles[8], handles[3]], strict=True):
        assert index.insert([(0, [id_])]) == [handle]
    assert index.insert([(0, [30])]) == [10]
    index.erase([handles[0]])
    assert [index.tables.count(0, word) for word in (COUNT_FREE, COUNT_FRESH)] == [1, 11]
    assert index.tables.count(0, COUNT_INSERTED) == 14


def test_rows_go_on_in_the_next_chunk(device: str) -> None:
    index = Index(device, TableSize(rows=300, slots=1024), TableSize(rows=300, slots=1024))
    index.tables.layout.counters_KC[:, COUNT_FRESH] = FIRST_ROWS - 2
    index.tables.layout.counters_KC[:, COUNT_FREE] = 0
    handles, _ = index.probe([(1, range(5))], insert=True)
    assert sorted(handles) == [fresh_handle(index.tables, 1, FIRST_ROWS - 2 + n) for n in range(5)]


def test_only_wanted_ids_are_inserted(device: str) -> None:
    index = Index(device, TableSize(slots=64))
    index.insert([(0, [1, 2])])
    handles = index.insert([(0, [1, 3, 4, 2, 5])], wanted=[False, True, False, True, False])
    assert [handle >= 0 for handle in handles] == [True, True, False, True, False]
    index.insert([(0, [4, 4, EMPTY_KEY])], wanted=[True, True, False])
    index.insert([(0, [9])], wanted=[False])


def test_without_an_empty_slot_a_walk_ends(device: str) -> None:
    index = Index(device, TableSize(slots=16), TableSize(slots=8))
    index.insert([(0, range(16)), (1, range(8))])
    index.find([(0, range(-20, 20)), (1, range(-20, 20))])
    handles, _ = index.probe([(0, [77, 3]), (1, [77])], insert=True)
    assert handles == [-1, index.rows[0][3], -1]
    index.audit()


def test_erase_reads_as_many_as_the_device_says_and_skips_what_is_not_live(device: str) -> None:
    index = Index(device, TableSize(slots=64), TableSize(slots=64))
    index.insert([(0, range(8)), (1, range(8))])
    zero, one = ([rows[id_] for id_ in range(8)] for rows in index.rows)
    index.erase([zero[1], -1, one[2], zero[3], one[4]], size=4)
    index.erase([zero[1], one[2], one[6]])
    assert index.insert([(0, [1])]) == [zero[3]]
    index.erase([zero[1]])
    index.erase([one[1]], size=0)


def test_fold_keeps_the_rows_in_use(device: str) -> None:
    tables = make_tables([TableSize()] * 3, device)
    counters = tables.layout.counters_KC
    words = [COUNT_ISSUED, COUNT_FREE, COUNT_FRESH, COUNT_READY, COUNT_INSERTED]
    for table, values in enumerate([(3, 5, 9, 3, 10), (7, 2, 9, 6, 1), (0, 0, 0, 0, 0)]):
        counters[table, words] = torch.tensor(values, device=device)
    fold(tables.layout)
    assert counters[:, words].tolist() == [[0, 2, 9, 0, 13], [0, 0, 14, 0, 8], [0] * 5]


@pytest.mark.parametrize("slots", [64, 128, 512])
def test_rebuild_keeps_rows_and_drops_erased_slots(device: str, slots: int) -> None:
    index = Index(device, TableSize(slots=128, salt=3))
    ids = [*ids_from(120, 128, 30, 3), *range(40), EMPTY_KEY]
    index.insert([(0, ids)])
    index.erase([index.rows[0][id_] for id_ in ids[::3]])
    index.rebuild(0, slots)
    assert not index.tables.entries[0][:-1, :BUCKET_SLOTS].eq(ERASED_KEY).any()
    index.find([(0, ids)])
    index.insert([(0, ids[::2])])


def test_handles_are_listed_in_the_order_of_their_slots(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = Index(device, TableSize(slots=64), TableSize(slots=2048))
    index.insert([(1, [*range(90), *MARKERS]), (0, range(5))])
    index.erase([index.rows[1][id_] for id_ in (5, ERASED_KEY, 40)])
    expected = list(contents(index.tables, 1).values())
    listed = list_handles(index.tables.entries[1])
    assert (listed.dtype, listed.tolist()) == (torch.int32, expected)
    assert len(expected) == 89
    assert len(list_handles(index.tables.entries[0])) == 5
    monkeypatch.setattr(table_index, "_LIST_BUCKETS", 7)
    assert list_handles(index.tables.entries[1]).tolist() == expected


def test_nothing_is_asked_nothing_happens(device: str) -> None:
    index = Index(device, TableSize(slots=64))
    index.insert([(0, [])])
    index.insert([])
    index.find([(0, []), (0, [])])
    index.erase([])
    assert list_handles(index.tables.entries[0]).tolist() == []
