"""Eviction from GPU tables: rows of lowest score and rows out of time, in the core's order."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from shoal import Expiry, Segment, TableSpec
from shoal.ids import mix64, salt, to_signed
from shoal.kernels import lowest_rows
from shoal.kernels.index import erase, probe
from shoal.kernels.row_changes import Scan, expired_rows, pin_marks
from shoal.kernels.rows import read_metadata
from shoal.table.cpu.shard import CpuShard
from shoal.table.cuda import eviction_order, index
from shoal.table.cuda.eviction_order import Lives, scored_jobs
from shoal.table.cuda.shard import CudaShard
from shoal.table.shard import StepContext
from support.device_fill import DEVICE, LANE, Meta, fill, filled
from support.device_tables import DeviceTables, TableSize, make_tables
from support.id_groups import groups_of

SALT = salt("t")
SIZE = TableSize(salt=SALT)


def dropped(tables: DeviceTables, result: tuple[Tensor, Tensor]) -> list[int]:
    """Ids of the handles that came back, sorted; each must be marked as free."""
    handles = result[0][: int(result[1])].tolist()
    assert len(set(handles)) == len(handles)
    for handle in handles:
        chunk, place = tables.chunk_of(handle)
        assert chunk.versions[place] == 0
    return sorted(tables.id_of(handle) for handle in handles)


def lowest(
    tables: DeviceTables,
    jobs_EW: Tensor,
    rows: int,
    drops: Sequence[int],
    marks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    scan, drops_E = Scan(jobs_EW, rows, marks=marks), torch.tensor(drops, device=jobs_EW.device)
    return lowest_rows.lowest_rows(tables.layout, scan, drops_E, sum(drops))


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


@pytest.mark.parametrize("least", [1, 1 << 25])
@pytest.mark.parametrize("seed", range(5))
def test_scans_take_twice_the_memory_of_their_tables_at_most(
    least: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eviction_order, "_ROWS_AT_LEAST", least)
    rng = random.Random(seed)
    rooms = [1 << rng.randrange(8, 30) for _ in range(26)]
    parts = eviction_order.scanned_together(rooms)
    assert sorted(index for part in parts for index in part) == list(range(26))
    for part in parts:
        own = [rooms[index] for index in part]
        assert len(own) * max(own) <= max(least, 2 * sum(own))
    assert eviction_order.scanned_together([1000] * 26) == [list(range(26))]
    assert eviction_order.scanned_together([]) == []


@pytest.mark.parametrize("device", LANE)
class TestLowest:
    @pytest.mark.parametrize("kind", ["lru", "lfu"])
    @pytest.mark.parametrize("drop", [0, 1, 7, 99, 100, 200])
    def test_order_of_the_core(self, device: str, kind: str, drop: int) -> None:
        rows = drawn(random.Random(drop), 100, seconds=4, counts=3)
        tables = make_tables([SIZE], device)
        filled(tables, 0, rows)
        jobs = scored_jobs([(0, kind)], torch.device(device))
        result = lowest(tables, jobs, 256, [drop])
        assert dropped(tables, result) == sorted(core_order(rows, kind)[:drop])

    @pytest.mark.parametrize("seconds", [1, 3, 1000] if DEVICE == "cuda" else [3, 1000])
    @pytest.mark.parametrize("drop", [1, 20, 140, 299] if DEVICE == "cuda" else [1, 140, 299])
    def test_with_a_sample(
        self, device: str, seconds: int, drop: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(lowest_rows, "_SMALL", 8)
        monkeypatch.setattr(lowest_rows, "_SAMPLES", 128)
        rows = drawn(random.Random(seconds), 300, seconds=seconds, counts=2)
        tables = make_tables([TableSize(rows=500, slots=1024, salt=SALT)], device)
        filled(tables, 0, rows)
        jobs = scored_jobs([(0, "lru")], torch.device(device))
        drops_E = torch.tensor([drop], device=device)
        result = lowest_rows.lowest_rows(tables.layout, Scan(jobs, 300), drops_E, 300)
        assert dropped(tables, result) == sorted(core_order(rows, "lru")[:drop])

    def test_several_tables_at_once(self, device: str) -> None:
        rng = random.Random(1)
        parts = [drawn(rng, number, 5, 5) for number in (40, 30, 50)]
        tables = make_tables([SIZE] * 3, device)
        for table, rows in enumerate(parts):
            filled(tables, table, rows)
        scored = [(2, "lfu"), (0, "lru")]
        jobs = scored_jobs(scored, torch.device(device))
        result = lowest(tables, jobs, 64, [10, 5])
        expected = core_order(parts[2], "lfu")[:10] + core_order(parts[0], "lru")[:5]
        assert dropped(tables, result) == sorted(expected)

    def test_pinned_and_free_rows_are_passed(self, device: str) -> None:
        rows = [Meta(id_, seen=id_) for id_ in range(20)]
        rows[4] = Meta(4, seen=4, version=0)
        tables = make_tables([SIZE], device)
        handles_N = filled(tables, 0, rows)
        held_N = handles_N[[0, 2, 7, 0]].clone()
        held_N[3] = -1
        marks = pin_marks([held_N, handles_N[3:4]], len(tables.chunks))
        jobs = scored_jobs([(0, "lru")], torch.device(device))
        result = lowest(tables, jobs, 32, [4], marks)
        assert dropped(tables, result) == [1, 5, 6, 8]


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
        assert (
            dropped(tables, expired_rows(tables.layout, Scan(lives.jobs_EW, 64), 100)) == expected
        )

    def test_pinned_rows_stay(self, device: str) -> None:
        tables = make_tables([SIZE], device)
        handles_N = filled(tables, 0, [Meta(id_, seen=10) for id_ in range(8)])
        marks = pin_marks([handles_N[2:5]], len(tables.chunks))
        lives = Lives([(0, Expiry(ttl_s=1))], torch.device(device))
        result = expired_rows(tables.layout, Scan(lives.jobs_EW, 64, marks=marks), 11)
        assert dropped(tables, result) == [0, 1, 5, 6, 7]


@pytest.mark.parametrize("device", LANE)
def test_what_goes_can_be_erased_and_comes_back(device: str) -> None:
    tables = make_tables([SIZE], device)
    ids = list(range(100, 140))
    call = tables.groups((0, ids))
    handles_N = torch.empty(len(ids), dtype=torch.int32, device=device)
    probe(tables.layout, call, handles_N, None, None, insert=True)
    chunk = tables.chunks[0]
    chunk.versions[:40], chunk.counts[:40] = 1, 0
    chunk.seen[handles_N.long()] = torch.arange(40, dtype=torch.int32, device=device)
    jobs = scored_jobs([(0, "lru")], torch.device(device))
    for step in range(3):
        gone = lowest(tables, jobs, 64, [5])
        erase(tables.layout, *gone)
        probe(tables.layout, call, handles_N, None, None, insert=False)
        missing = [id_ for id_, handle in zip(ids, handles_N.tolist(), strict=True) if handle < 0]
        assert missing == ids[: 5 * (step + 1)]
    fresh_N = torch.empty(6, dtype=torch.int32, device=device)
    call = tables.groups((0, range(6)))
    probe(tables.layout, call, fresh_N, None, None, insert=True)
    # New rows are the freed ones, which hold nothing yet: five of the list's end and the next.
    chunk.versions[fresh_N.long()], chunk.seen[fresh_N.long()] = 2, 0
    assert dropped(tables, lowest(tables, jobs, 64, [7])) == [*range(6), 115]


@pytest.mark.parametrize(
    ("device", "rows"),
    [
        pytest.param("cpu", 600, marks=pytest.mark.skipif(DEVICE != "cpu", reason="compiled")),
        pytest.param("cuda", 1_000_000, marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize("seconds", [1, 40, 100_000])
@pytest.mark.parametrize("kind", ["lru", "lfu"])
def test_large_tables(
    device: str, rows: int, seconds: int, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device == "cpu":
        monkeypatch.setattr(lowest_rows, "_SMALL", 16)
        monkeypatch.setattr(lowest_rows, "_SAMPLES", 64)
    drops, rng = (rows // 50, 1, rows // 2), np.random.default_rng(seconds)
    tables = make_tables([TableSize(rows=rows, slots=8, dim=1, salt=SALT)] * 3, device)
    expected = []
    for table, drop in enumerate(drops):
        ids = rng.permutation(1 << 40 | np.arange(rows))
        seen = 1_700_000_000 + np.minimum(rng.geometric(2 / (1 + seconds), rows), 1 << 30)
        counts, versions = rng.geometric(0.4, rows), (rng.random(rows) > 0.1).astype(np.int64)
        fill(tables, table, *(torch.from_numpy(x) for x in (ids, seen, counts, versions)))
        hashes = mix64(torch.from_numpy(ids) ^ to_signed(SALT)).numpy().view(np.uint64)
        order = np.lexsort((hashes, counts, seen) if kind == "lru" else (hashes, seen, counts))
        expected += ids[order[versions[order] != 0]][:drop].tolist()
    jobs = scored_jobs([(table, kind) for table in range(3)], torch.device(device))
    out_M, size_1 = lowest(tables, jobs, rows, drops)
    got = read_metadata(tables.layout, out_M[: int(size_1)])[0]
    assert sorted(got.tolist()) == sorted(expected)


@pytest.mark.slow
@pytest.mark.parametrize("device", LANE)
def test_tables_that_are_scanned_apart(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def apart(rooms: Sequence[int]) -> list[list[int]]:
        return [[index] for index in reversed(range(len(rooms)))]

    monkeypatch.setattr(index, "scanned_together", apart)
    specs = [
        TableSpec(name=f"t{k}", segments=(Segment(dim=1),), capacity_rows=8 + k, **more)
        for k, more in enumerate(({"on_full": "lru"}, {"on_full": "lfu"}, {}))
    ]
    specs += [TableSpec(name="old", segments=(Segment(dim=1),), expiry=Expiry(ttl_s=2))]
    specs += [TableSpec(name="new", segments=(Segment(dim=1),), expiry=Expiry(ttl_s=3))]
    shards: list[Any] = [CpuShard(specs), CudaShard(specs, device=device)]
    for turn in range(4):
        ids = [range(5 * turn, 5 * turn + 7), range(4 * turn, 4 * turn + 6), range(3)]
        parts = [(k, part) for k, part in enumerate((*ids, [turn], [turn]))]
        for shard in shards:
            where = str(shard.device)
            shard.find_or_init(groups_of(*parts, device=where), ctx=StepContext(event_time_s=turn))
    assert len({shard.evict(4) for shard in shards}) == 1
    for k in range(len(specs)):
        theirs, ours = (shard.export(k).ids.tolist() for shard in shards)
        assert ours == theirs
    assert [shards[1].size(k) for k in range(5)] == [8, 9, 3, 1, 2]
