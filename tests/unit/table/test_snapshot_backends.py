"""Snapshots of every shard: the rows of the point, by hash range, and what was deleted since."""

from __future__ import annotations

import contextlib
import gc
import itertools
import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from shoal import Expiry, Segment, TableSpec, initializers, optimizers
from shoal.errors import InputError, NonFiniteGradient
from shoal.placement import hash_ids
from shoal.table.cuda import export
from shoal.table.shard import HASHES, GradRecord, NanPolicy, Shard, Snapshot, StepContext
from shoal.table.values import Cursor, RowChunk
from support.change_consumer import Consumer, contents
from support.id_groups import groups_of
from support.shards import COMPILED, CUDA, TIERED, TIERED_COMPILED, shard_factory

KINDS = ("cpu", "reference", CUDA, TIERED)
"""Rows of the last three may stand still: `test_snapshot.py` and `test_snapshot_device.py` change
them beside a snapshot."""


def specs() -> tuple[TableSpec, ...]:
    segment = Segment(dim=3, initializer=initializers.Zeros(), optimizer=optimizers.Adagrad(lr=1.0))
    return (
        TableSpec(name="grows", segments=(segment,), expiry=Expiry(ttl_s=100)),
        TableSpec(name="full", segments=(segment,), capacity_rows=8, on_full="lru"),
        TableSpec(name="slice[1:4]", segments=(segment,), hashed_as="grows", dtype="float16"),
    )


@pytest.fixture(params=KINDS)
def shard(request: pytest.FixtureRequest) -> Shard:
    return shard_factory(request.param)(specs())


def put(shard: Shard, ids: Sequence[int], value: float, *, table: int = 0, at_s: int = 0) -> None:
    rows_N3 = torch.arange(3 * len(ids), dtype=torch.float32).reshape(-1, 3) + value
    shard.assign(groups_of((table, ids)), [rows_N3], ctx=StepContext(event_time_s=at_s))


def train(shard: Shard, ids: Sequence[int], at_s: int = 0) -> None:
    ctx = StepContext(event_time_s=at_s)
    ticket = shard.find_or_init(groups_of((0, ids)), ctx=ctx)
    shard.apply([GradRecord(ticket, (torch.ones(len(ids), 3),))], ctx=ctx)


def hashes(table: int, ids: Tensor) -> list[int]:
    return [h % HASHES for h in hash_ids(specs()[table].hash_name, ids).tolist()]


def same(one: RowChunk, other: RowChunk) -> bool:
    names = ("ids", "weights", "state", "versions", "last_seen_s", "counts")
    return one.table == other.table and all(
        torch.equal(getattr(one, name), getattr(other, name)) for name in names
    )


def after(shard: Shard, snapshot: Snapshot) -> Cursor:
    """Who holds what a snapshot shows."""
    return Cursor(shard.incarnation, snapshot.version)


def test_it_shows_all_rows_by_hash(shard: Shard) -> None:
    source = random.Random(1)
    many = [source.randrange(-(1 << 63), 1 << 63) for _ in range(60)]
    put(shard, [*many, -1, 0, (1 << 63) - 1, -(1 << 63)], 1.0)
    train(shard, many[:9], at_s=7)
    put(shard, many[:5], 2.0, table=2)
    with shard.snapshot() as snapshot:
        assert snapshot.since == 0
        for table in range(3):
            whole = snapshot.read(table, 0, HASHES)
            assert same(whole, shard.export(table))
            in_order = hashes(table, whole.ids)
            assert in_order == sorted(in_order)
            cuts = [0, 0, 1 << 61, 1 << 63, (1 << 63) + 12345, HASHES - 1, HASHES, HASHES]
            for start, stop in itertools.pairwise(cuts):
                part = snapshot.read(table, start, stop)
                assert part.ids.tolist() == [
                    id_
                    for id_, h in zip(whole.ids.tolist(), in_order, strict=True)
                    if start <= h < stop
                ]
            assert snapshot.deleted(table).tolist() == []
    assert all(chunk.weights.is_cpu and chunk.ids.is_cpu for chunk in (whole, part))


def test_a_range_starts_at_a_hash_and_ends_before_one(shard: Shard) -> None:
    put(shard, range(9), 1.0)
    with shard.snapshot() as snapshot:
        whole = snapshot.read(0, 0, HASHES)
        low, high = (hashes(0, whole.ids)[i] for i in (2, 6))
        assert torch.equal(snapshot.read(0, low, high).ids, whole.ids[2:6])
        assert torch.equal(snapshot.read(0, low + 1, high + 1).ids, whole.ids[3:7])


@pytest.mark.parametrize("bits", [0, 1, 3, 20])
def test_a_histogram_counts_top_bits(shard: Shard, bits: int) -> None:
    put(shard, range(50), 1.0)
    with shard.snapshot() as snapshot:
        want = [0] * (1 << bits)
        for h in hashes(0, torch.arange(50)):
            want[h >> (64 - bits)] += 1
        assert snapshot.histogram(0, bits).tolist() == want
        assert snapshot.histogram(1, bits).tolist() == [0] * (1 << bits)


def test_pieces_do_not_show(shard: Shard, monkeypatch: pytest.MonkeyPatch) -> None:
    put(shard, range(50), 1.0)
    monkeypatch.setattr(export, "_PIECE_BYTES", 400)
    with shard.snapshot() as snapshot:
        assert same(snapshot.read(0, 0, HASHES), shard.export(0))


@pytest.mark.parametrize("shard", ["cpu", COMPILED, TIERED_COMPILED], indirect=True)
def test_large_tables(shard: Shard) -> None:
    many = 200_000
    put(shard, range(many), 1.0)
    with shard.snapshot() as full:
        want = shard.export(0)
        sizes = full.histogram(0, 4).tolist()
        parts = [full.read(0, k << 60, (k + 1) << 60) for k in range(16)]
        assert [len(part.ids) for part in parts] == sizes
        assert torch.equal(torch.cat([part.ids for part in parts]), want.ids)
        assert torch.equal(torch.cat([part.weights for part in parts]), want.weights)
    put(shard, range(0, many, 3), 2.0, at_s=150)
    assert shard.evict(150) == many - len(range(0, many, 3))
    with shard.snapshot(after(shard, full)) as delta:
        assert same(delta.read(0, 0, HASHES), shard.export(0))
        assert sorted(delta.deleted(0).tolist()) == [i for i in range(many) if i % 3]


@pytest.mark.slow
def test_a_delta_shows_what_changed_and_what_went(shard: Shard) -> None:
    put(shard, range(20), 1.0)
    put(shard, range(8), 1.0, table=1)
    with shard.snapshot() as full:
        pass
    put(shard, [3], 5.0, at_s=150)
    train(shard, [4, 40], at_s=150)
    assert shard.evict(150) == 18
    put(shard, [6], 7.0, at_s=150)
    put(shard, range(100, 104), 2.0, table=1, at_s=150)
    shard.clear(2)
    with shard.snapshot(after(shard, full)) as delta:
        assert (delta.since, delta.version) == (full.version, full.version + 1)
        assert sorted(delta.read(0, 0, HASHES).ids.tolist()) == [3, 4, 6, 40]
        assert int(delta.histogram(0, 2).sum()) == 4
        gone = delta.deleted(0)
        assert sorted(gone.tolist()) == [i for i in range(20) if i not in (3, 4, 6)]
        assert hashes(0, gone) == sorted(hashes(0, gone))
        assert delta.deleted(1).numel() == delta.read(1, 0, HASHES).ids.numel() == 4
        assert delta.deleted(2).numel() == 0
    shard.release(delta.version)
    with shard.snapshot(after(shard, delta)) as nothing:
        assert all(nothing.read(k, 0, HASHES).ids.numel() == 0 for k in range(3))
        assert all(nothing.deleted(k).numel() == 0 for k in range(3))


def test_a_cleared_table_is_deleted(shard: Shard) -> None:
    put(shard, range(6), 1.0)
    with shard.snapshot() as full:
        pass
    shard.clear(0)
    put(shard, [2], 1.0)
    with shard.snapshot(after(shard, full)) as delta:
        assert sorted(delta.deleted(0).tolist()) == [0, 1, 3, 4, 5]
        assert delta.read(0, 0, HASHES).ids.tolist() == [2]


def test_released_deletions_stay_with_a_snapshot(shard: Shard) -> None:
    put(shard, [1, 2], 1.0)
    with shard.snapshot() as full:
        pass
    shard.evict(100)
    with shard.snapshot(after(shard, full)) as delta:
        shard.release(None)
        assert sorted(delta.deleted(0).tolist()) == [1, 2]


def test_an_id_deleted_twice_is_named_once(shard: Shard) -> None:
    put(shard, [1, 2], 1.0)
    with shard.snapshot() as full:
        pass
    shard.evict(100)
    put(shard, [1], 1.0, at_s=100)
    shard.evict(200)
    with shard.snapshot(after(shard, full)) as delta:
        assert sorted(delta.deleted(0).tolist()) == [1, 2]


def test_a_closed_one_is_not_read(shard: Shard) -> None:
    snapshot = shard.snapshot()
    snapshot.close()
    snapshot.close()
    for verb in (
        lambda: snapshot.read(0, 0, HASHES),
        lambda: snapshot.histogram(0, 1),
        lambda: snapshot.deleted(0),
    ):
        with pytest.raises(InputError, match="a closed one"):
            verb()


@pytest.mark.parametrize("shard", ["cpu", CUDA], indirect=True)
@pytest.mark.parametrize("nan_policy", ["skip", "raise"])
def test_a_row_that_a_step_leaves_alone_is_there_once(shard: Shard, nan_policy: NanPolicy) -> None:
    put(shard, [1, 2, 3], 1.0)
    with shard.snapshot() as first:
        ticket = shard.find_or_init(groups_of((0, [1])), ctx=StepContext())
        bad = GradRecord(ticket, (torch.full((1, 3), float("nan")),))
        with contextlib.suppress(NonFiniteGradient):
            shard.apply([bad], ctx=StepContext(nan_policy=nan_policy))
            shard.check()
        ticket.end()
        with shard.snapshot() as second:
            train(shard, [1])
            for snapshot in (first, second):
                assert sorted(snapshot.read(0, 0, HASHES).ids.tolist()) == [1, 2, 3]
                assert int(snapshot.histogram(0, 0)[0]) == 3


@pytest.mark.slow
def test_eight_at_once(shard: Shard) -> None:
    put(shard, range(9), 1.0)
    held = [shard.snapshot() for _ in range(8)]
    assert [one.version for one in held] == list(range(held[0].version, held[0].version + 8))
    with pytest.raises(InputError, match="8 open ones"):
        shard.snapshot()
    held.pop(3).close()
    held.append(shard.snapshot())
    for one in held:
        assert same(one.read(0, 0, HASHES), shard.export(0))
    del one, held[2:]  # forgotten, not closed
    gc.collect()
    with shard.snapshot(), shard.snapshot():
        held[1].close()
        assert held[0].read(0, 0, HASHES).ids.numel() == 9


def test_one_that_nobody_holds_is_closed(shard: Shard) -> None:
    shard.snapshot()
    gc.collect()
    put(shard, [1], 1.0)


def test_a_cursor_that_is_no_good(shard: Shard) -> None:
    put(shard, [1], 1.0)
    other = Cursor(shard.incarnation, shard.close_version())
    with pytest.raises(InputError, match="full snapshot"):
        shard.snapshot(other)  # deletions were not kept
    with shard.snapshot() as first:
        pass
    good = after(shard, first)
    put(shard, [2], 1.0)
    shard.release(shard.close_version())
    with pytest.raises(InputError, match="full snapshot"):
        shard.snapshot(good)
    with shard.snapshot() as second:
        assert second.read(0, 0, HASHES).ids.numel() == 2
    with pytest.raises(InputError, match="full snapshot"):
        shard.snapshot(Cursor(good.incarnation ^ 1, second.version))
    with pytest.raises(InputError, match="full snapshot"):
        shard.snapshot(Cursor(good.incarnation, second.version + 1))
    with pytest.raises(InputError, match="full snapshot"):
        shard.snapshot(Cursor())


@pytest.mark.parametrize("span", [(-1, 1), (2, 1), (0, HASHES + 1)])
def test_bad_ranges(shard: Shard, span: tuple[int, int]) -> None:
    with shard.snapshot() as snapshot:
        with pytest.raises(InputError, match="range of hashes"):
            snapshot.read(0, *span)
        for bits in (-1, 21):
            with pytest.raises(InputError, match="bits"):
                snapshot.histogram(0, bits)


def loaded(shard: Shard) -> RowChunk:
    put(shard, [1, 2, 3], 1.0)
    shard.close_version()
    put(shard, [3], 2.0)
    chunk = shard.export(0)
    shard.clear(0)
    shard.load(0, chunk)
    return chunk


def test_resume_goes_on_from_the_saved_version(shard: Shard) -> None:
    chunk = loaded(shard)
    cursor = shard.resume(7)
    assert cursor.version == 7
    consumer = Consumer()
    consumer.cursor, consumer.held = cursor, contents(chunk)
    put(shard, [9], 3.0, at_s=200)
    assert shard.evict(150) == 3
    assert shard.close_version() == 8
    assert consumer.drain(shard) == {("grows", id_) for id_ in (1, 2, 3, 9)}
    assert consumer.restarts == 0
    assert consumer.held == contents(shard.export(0))
    with shard.snapshot(cursor) as delta:
        assert sorted(delta.deleted(0).tolist()) == [1, 2, 3]
        assert delta.read(0, 0, HASHES).ids.tolist() == [9]


def test_resume_refuses_an_version_that_rows_have_passed(shard: Shard) -> None:
    loaded(shard)
    for version in (1, -1, (1 << 32) - 1):
        with pytest.raises(InputError, match="version to resume at"):
            shard.resume(version)
    cursor = shard.resume(2)
    assert cursor.version == 2
    put(shard, [1], 1.0)
    with shard.snapshot(cursor) as delta:
        assert delta.read(0, 0, HASHES).ids.tolist() == [1]


def test_resume_makes_a_new_incarnation(shard: Shard) -> None:
    loaded(shard)
    before = shard.incarnation
    assert shard.resume(5).incarnation == shard.incarnation != before
