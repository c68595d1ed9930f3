"""Eviction, admission and whole rows of GPU tables, against the rules and a Python dictionary."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal import Expiry
from shoal.errors import ShapeError
from shoal.hashing import mix64, salt
from shoal.kernels import row_select
from shoal.kernels.table_layout import CHUNK_BITS, COUNT_EVICTED, COUNT_FRESH, COUNT_REFUSED
from shoal.rules.admission import (
    Admission,
    Counter,
    ExactCounter,
    SketchCounter,
    make_counter,
)
from shoal.table.device_admission import Sights, count_refused
from shoal.table.device_evict import (
    Lives,
    Scored,
    expired,
    expired_many,
    lowest,
    lowest_many,
    pin_marks,
    scored_jobs,
)
from support.device_tables import DeviceTables, TableSize, make_tables

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LANE = [pytest.param(DEVICE, marks=pytest.mark.gpu if DEVICE == "cuda" else ())]
SALT = salt("t")
SIZE = TableSize(salt=SALT)


@dataclass(frozen=True)
class Meta:
    """Metadata of one row."""

    id: int
    seen: int = 0
    count: int = 0
    version: int = 1


def filled(tables: DeviceTables, table: int, rows: Sequence[Meta]) -> Tensor:
    """Hand out rows in order and write their ids and metadata; returns their handles."""
    own = [i for i, chunk in enumerate(tables.chunks) if chunk.table == table]
    handles = [
        number << CHUNK_BITS | place
        for number in own
        for place in range(len(tables.chunks[number].ids))
    ][: len(rows)]
    tables.layout.counters_KC[table, COUNT_FRESH] = len(rows)
    for handle, row in zip(handles, rows, strict=True):
        chunk, place = tables.chunk_of(handle)
        chunk.ids[place], chunk.versions[place] = row.id, as_int32(row.version)
        chunk.seen[place], chunk.counts[place] = as_int32(row.seen), as_int32(row.count)
    return torch.tensor(handles, dtype=torch.int32, device=tables.device)


def as_int32(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word


def dropped(tables: DeviceTables, result: tuple[Tensor, Tensor]) -> list[int]:
    """Ids of the handles that came back, sorted; each must be marked as free."""
    handles = result[0][: int(result[1])].tolist()
    assert len(set(handles)) == len(handles)
    for handle in handles:
        chunk, place = tables.chunk_of(handle)
        assert chunk.versions[place] == 0
    return sorted(tables.id_of(handle) for handle in handles)


def core_order(rows: Sequence[Meta], kind: str) -> list[int]:
    """Ids in the order in which the compiled core evicts them."""

    def key(row: Meta) -> tuple[int, int, int]:
        scores = (row.seen, row.count) if kind == "lru" else (row.count, row.seen)
        return (*scores, mix64(row.id ^ SALT))

    return [row.id for row in sorted(rows, key=key)]


def drawn(rng: random.Random, number: int, seconds: int, counts: int) -> list[Meta]:
    """Rows with many equal scores; some at the ends of uint32."""
    ids = [*rng.sample(range(-(10**12), 10**12), number - 2), -(2**63), -(2**63) + 1]
    top = 2**32 - 1
    return [
        Meta(
            id_,
            rng.choice((0, top)) if rng.random() < 0.05 else 1_700_000_000 + rng.randrange(seconds),
            rng.choice((0, top)) if rng.random() < 0.05 else rng.randrange(counts),
        )
        for id_ in ids
    ]


@pytest.mark.parametrize("device", LANE)
class TestLowest:
    @pytest.mark.parametrize("kind", ["lru", "lfu"])
    @pytest.mark.parametrize("drop", [0, 1, 7, 99, 100, 200])
    def test_order_of_the_core(self, device: str, kind: str, drop: int) -> None:
        rows = drawn(random.Random(drop), 100, seconds=4, counts=3)
        tables = make_tables([SIZE], device)
        filled(tables, 0, rows)
        jobs = scored_jobs([Scored(0, kind)], torch.device(device))
        result = lowest_many(tables.layout, jobs, 256, [drop])
        assert dropped(tables, result) == sorted(core_order(rows, kind)[:drop])
        assert tables.count(0, COUNT_EVICTED) == min(drop, 100)

    @pytest.mark.parametrize("seconds", [1, 3, 1000])
    @pytest.mark.parametrize("drop", [1, 20, 140, 299])
    def test_with_a_sample(
        self, device: str, seconds: int, drop: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(row_select, "_SMALL", 8)
        monkeypatch.setattr(row_select, "_SAMPLES", 128)
        rows = drawn(random.Random(seconds), 300, seconds=seconds, counts=2)
        tables = make_tables([TableSize(rows=500, slots=1024, salt=SALT)], device)
        filled(tables, 0, rows)
        jobs = scored_jobs([Scored(0, "lru")], torch.device(device))
        drops_E = torch.tensor([drop], device=device)
        result = lowest_many(tables.layout, jobs, 300, drops_E, most=300)
        assert dropped(tables, result) == sorted(core_order(rows, "lru")[:drop])

    def test_several_tables_at_once(self, device: str) -> None:
        rng = random.Random(1)
        parts = [drawn(rng, number, 5, 5) for number in (40, 30, 50)]
        tables = make_tables([SIZE] * 3, device)
        for table, rows in enumerate(parts):
            filled(tables, table, rows)
        scored = [Scored(2, "lfu"), Scored(0, "lru")]
        jobs = scored_jobs(scored, torch.device(device))
        result = lowest_many(tables.layout, jobs, 64, [10, 5])
        expected = core_order(parts[2], "lfu")[:10] + core_order(parts[0], "lru")[:5]
        assert dropped(tables, result) == sorted(expected)
        assert [tables.count(table, COUNT_EVICTED) for table in range(3)] == [5, 0, 10]

    def test_pinned_and_free_rows_are_passed(self, device: str) -> None:
        rows = [Meta(id_, seen=id_) for id_ in range(20)]
        rows[4] = Meta(4, seen=4, version=0)
        tables = make_tables([SIZE], device)
        handles_N = filled(tables, 0, rows)
        held_N = handles_N[[0, 2, 7, 0]].clone()
        held_N[3] = -1
        marks = pin_marks([held_N, handles_N[3:4]], len(tables.chunks))
        jobs = scored_jobs([Scored(0, "lru")], torch.device(device))
        result = lowest_many(tables.layout, jobs, 32, [4], marks)
        assert dropped(tables, result) == [1, 5, 6, 8]

    def test_among_a_list(self, device: str) -> None:
        rows = [Meta(id_, seen=50 - id_) for id_ in range(20)]
        tables = make_tables([SIZE], device)
        handles_N = filled(tables, 0, rows)
        size_1 = torch.tensor([10], device=device)
        result = lowest(tables.layout, 0, handles_N, size_1, 3, "lru")
        assert dropped(tables, result) == [7, 8, 9]


@pytest.mark.parametrize("device", LANE)
class TestExpired:
    EXPIRIES = (
        Expiry(ttl_s=5),
        Expiry(ttl_s=0),
        Expiry(ttl_s=10, per_slot=((1, 0), (3, 4))),
        Expiry(per_slot=((2, 7),)),
        Expiry(ttl_s=3, per_slot=((1023, 1 << 40),), fid_layout="v1"),
    )

    @pytest.mark.parametrize("expiry", EXPIRIES, ids=str)
    def test_rows_that_the_rule_drops(self, device: str, expiry: Expiry) -> None:
        rng = random.Random(3)
        ids = [rng.getrandbits(48) | slot << 48 for slot in (0, 1, 2, 3) for _ in range(8)]
        ids += [-1, -(2**63), -(2**63) + 1]
        # Some were seen after `now_s`: events come out of order.
        rows = [Meta(id_, seen=rng.choice((93, 95, 96, 99, 100, 101, 2**32 - 1))) for id_ in ids]
        tables = make_tables([SIZE, SIZE], device)
        filled(tables, 1, rows)
        gone_N = expiry.expired_N(
            torch.tensor(ids), torch.tensor([row.seen for row in rows]), now_s=100
        )
        expected = sorted(row.id for row, gone in zip(rows, gone_N.tolist(), strict=True) if gone)
        lives = Lives([(0, Expiry(ttl_s=0)), (1, expiry)], torch.device(device))
        assert dropped(tables, expired_many(tables.layout, lives, 64, 100)) == expected
        assert tables.count(1, COUNT_EVICTED) == len(expected)

    def test_pinned_rows_stay(self, device: str) -> None:
        tables = make_tables([SIZE], device)
        handles_N = filled(tables, 0, [Meta(id_, seen=10) for id_ in range(8)])
        marks = pin_marks([handles_N[2:5]], len(tables.chunks))
        size_1 = torch.tensor([7], dtype=torch.int32, device=device)
        result = expired(tables.layout, 0, handles_N, size_1, Expiry(ttl_s=1), 11, marks)
        assert dropped(tables, result) == [0, 1, 5, 6]


RULES = (
    Admission(threshold=3, per_slot=((1, 0),)),
    Admission(threshold=2, on="after", per_slot=((0, 0), (1, 4))),
    Admission(threshold=0, per_slot=((1, 5),)),
    Admission(threshold=3, per_slot=((1, 1), (2, 6)), counter="sketch", sketch_width=1 << 4),
    Admission(threshold=2, on="after", counter="sketch", sketch_width=1 << 6, sketch_depth=2),
)
IDS = (*range(9), -1, 2**63 - 1, -(2**63), -(2**63) + 1, *(1 << 48 | i for i in range(5)), 2 << 48)


def reference_totals(
    rule: Admission, counter: Counter, sights: Mapping[int, int]
) -> dict[int, bool]:
    """Decisions on a call's distinct ids by the rule's own counter."""
    ids_U = torch.tensor(list(sights), dtype=torch.int64)
    needed_U = rule.required_N(ids_U)
    kept = needed_U > 1
    totals_U = torch.full_like(needed_U, 1)
    counts_U = torch.tensor(list(sights.values()), dtype=torch.int64)
    totals_U[kept] = counter.add(ids_U[kept], counts_U[kept])
    return dict(zip(ids_U.tolist(), (totals_U >= needed_U).tolist(), strict=True))


def kept_state(counter: Counter) -> tuple[dict[int, int], bytes]:
    if isinstance(counter, SketchCounter):
        return {}, counter._cells.to(torch.uint32).numpy().tobytes()
    assert isinstance(counter, ExactCounter)
    return {id_: count for id_, count in counter._counts.items() if count}, b""


def state_of(sights: Sights, table: int) -> tuple[dict[int, int], bytes]:
    state = sights.state(table)
    return dict(zip(state.ids.tolist(), state.counts.tolist(), strict=True)), state.cells


@pytest.mark.parametrize("device", LANE)
class TestSights:
    @pytest.mark.parametrize("rule", RULES, ids=range(len(RULES)))
    def test_decisions_of_the_rule(self, device: str, rule: Admission) -> None:
        rng = random.Random(5)
        tables = make_tables([SIZE, SIZE], device)
        sights = Sights([("other", None), ("t", rule)], device)
        counter = make_counter(rule, "t")
        rows: set[int] = set()
        refused = 0
        for _ in range(8):
            ids = rng.choices(IDS, k=20)
            counts = [rng.choice((0, 1, 1, 2)) for _ in ids]
            call = tables.groups((0, [7, 7]), (1, ids))
            wanted = [True, True, *(id_ not in rows for id_ in ids)]
            wanted_N = torch.tensor(wanted, device=device)
            counts_N = torch.tensor([1, 1, *counts], device=device)
            admitted_N = sights.add(call, counts_N, wanted_N, {0: 2, 1: len(ids)})
            fresh: dict[int, int] = {}
            for id_, count in zip(ids, counts, strict=True):
                if id_ not in rows:
                    fresh[id_] = fresh.get(id_, 0) + count
            decided = reference_totals(rule, counter, fresh)
            assert admitted_N.tolist() == [True, True, *(decided.get(id_, False) for id_ in ids)]
            count_refused(tables.layout, call, wanted_N, admitted_N)
            refused += sum(not yes for yes in decided.values())
            assert tables.count(1, COUNT_REFUSED) == refused
            assert tables.count(0, COUNT_REFUSED) == 0
            sights.forget(call, admitted_N)
            new = [id_ for id_, yes in decided.items() if yes]
            counter.forget(torch.tensor(new, dtype=torch.int64))
            rows.update(new)
            assert state_of(sights, 1) == kept_state(counter)

    @pytest.mark.parametrize("kind", ["exact", "sketch"])
    def test_counts_stop_at_the_largest(self, device: str, kind: Any) -> None:
        top = 2**32 - 1
        rule = Admission(threshold=top - 1, counter=kind, sketch_width=4)
        sights, counter = Sights([("t", rule)], device), make_counter(rule, "t")
        tables = make_tables([SIZE], device)
        for counts in ([top - 3, 1, 0], [1, 5, 7], [top, top, top], [1, 1, 1]):
            call = tables.groups((0, [9, 9, 11]))
            wanted_N = torch.ones(3, dtype=torch.bool, device=device)
            counts_N = torch.tensor(counts, device=device)
            admitted_N = sights.add(call, counts_N, wanted_N, {0: 3})
            decided = reference_totals(rule, counter, {9: sum(counts[:2]), 11: counts[2]})
            assert admitted_N.tolist() == [decided[9], decided[9], decided[11]]
        assert state_of(sights, 0) == kept_state(counter)

    def test_growth_keeps_counts(self, device: str) -> None:
        rule = Admission(threshold=3)
        sights, tables = Sights([("t", rule)], device), make_tables([SIZE], device)
        rng = random.Random(2)
        seen: dict[int, int] = {}
        for part in range(5):
            # One id in four gets its row and is forgotten again.
            ids = [*rng.sample(range(-500, 500), 300), -(2**63), -(2**63) + 1]
            call = tables.groups((0, ids))
            wanted_N = torch.ones(len(ids), dtype=torch.bool, device=device)
            admitted_N = sights.add(call, None, wanted_N, {0: len(ids)})
            for id_ in ids:
                seen[id_] = seen.get(id_, 0) + 1
            assert admitted_N.tolist() == [seen[id_] >= 3 for id_ in ids], part
            sights.forget(call, admitted_N)
            seen = {id_: count for id_, count in seen.items() if count < 3}
            assert state_of(sights, 0) == (seen, b"")
        assert sights.nbytes(0) < 1 << 17

    def test_undo(self, device: str) -> None:
        rules = [("a", Admission(threshold=4)), ("b", RULES[3])]
        sights, tables = Sights(rules, device), make_tables([SIZE, SIZE], device)
        call = tables.groups((0, [1, 2, 1]), (1, [1, 5, 5]))
        wanted_N = torch.ones(6, dtype=torch.bool, device=device)
        sights.add(call, None, wanted_N, {0: 3, 1: 3})
        before = [state_of(sights, table) for table in range(2)]
        other = tables.groups((0, [1, 3, 3]), (1, [1, 5, 8]))
        sights.add(other, None, wanted_N, {0: 3, 1: 3})
        sights.undo(other, None, wanted_N)
        assert [state_of(sights, table) for table in range(2)] == before

    @pytest.mark.parametrize("rule", RULES, ids=range(len(RULES)))
    def test_state_round_trip(self, device: str, rule: Admission) -> None:
        tables = make_tables([SIZE], device)
        sights = Sights([("t", rule)], device)
        ids = [*IDS, *IDS[:4]]
        call = tables.groups((0, ids))
        wanted_N = torch.ones(len(ids), dtype=torch.bool, device=device)
        sights.add(call, None, wanted_N, {0: len(ids)})
        other = Sights([("t", rule)], device)
        other.load(0, sights.state(0))
        assert state_of(other, 0) == state_of(sights, 0)
        for one in (sights, other):
            one.add(call, None, wanted_N, {0: len(ids)})
        assert state_of(other, 0) == state_of(sights, 0)
        other.clear(0)
        assert not any(state_of(other, 0)[0]) and not any(state_of(other, 0)[1])

    def test_a_sketch_of_another_size_is_refused(self, device: str) -> None:
        small = Sights([("t", Admission(threshold=2, counter="sketch", sketch_width=8))], device)
        large = Sights([("t", Admission(threshold=2, counter="sketch", sketch_width=16))], device)
        with pytest.raises(ShapeError, match="sketch_width"):
            large.load(0, small.state(0))
