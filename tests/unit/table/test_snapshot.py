"""Snapshots of a CPU shard: the rows of a snapshot, whatever later verbs do to them."""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable
from itertools import permutations
from pathlib import Path

import pytest
import torch

from shoal.errors import CheckpointError, DTypeError, InputError
from shoal.table.cpu.shard import CpuShard
from shoal.table.cpu.snapshot import CpuSnapshot
from shoal.table.shard import BUFFER_BYTES, HASHES, GradRecord, IdGroups, StepContext
from shoal.table.values import Cursor, RowChunk
from support.change_consumer import Consumer, contents
from support.changed_rows import (
    CHANGES,
    apply_twice_named,
    check_several,
    exported,
    filled,
    put,
    reload,
    specs,
    train,
)
from support.cut_rows import assert_same, in_pieces, unsigned_hashes
from support.id_groups import groups_of

TINY = 4096


@pytest.fixture(params=[1, 3])
def shard(request: pytest.FixtureRequest) -> CpuShard:
    return CpuShard(specs(), threads=request.param)


def whole(snapshot: CpuSnapshot) -> list[RowChunk]:
    return [snapshot.read(table, 0, HASHES) for table in range(3)]


@pytest.mark.parametrize("buffer_bytes", [BUFFER_BYTES, TINY, 0])
@pytest.mark.parametrize("change", CHANGES)
def test_rows_are_those_of_the_cut(shard: CpuShard, change: str, buffer_bytes: int) -> None:
    filled(shard)
    want = exported(shard)
    with shard.snapshot(buffer_bytes=buffer_bytes) as snapshot:
        CHANGES[change](shard)
        CHANGES[change](shard)
        for table in range(3):
            assert_same(snapshot.read(table, 0, HASHES), want[table])
            assert_same(in_pieces(snapshot, table, 7), want[table])
            assert int(snapshot.histogram(table, 0)) == len(want[table].ids)


@pytest.mark.parametrize("change", CHANGES)
def test_rows_read_before_and_after_they_change(shard: CpuShard, change: str) -> None:
    filled(shard)
    want = exported(shard)
    with shard.snapshot(buffer_bytes=TINY) as snapshot:
        histograms = [snapshot.histogram(table, 5) for table in range(3)]
        for table in range(3):
            assert_same(snapshot.read(table, 0, HASHES), want[table])
        CHANGES[change](shard)
        for table in range(3):
            assert_same(snapshot.read(table, 0, HASHES), want[table])
            assert torch.equal(snapshot.histogram(table, 5), histograms[table])


def test_a_histogram_counts_ranges(shard: CpuShard) -> None:
    filled(shard)
    with shard.snapshot() as snapshot:
        apply_twice_named(shard)
        shard.evict(155)
        counts = snapshot.histogram(0, 4)
        assert counts.dtype == torch.int64
        width = HASHES >> 4
        sizes = [len(snapshot.read(0, k * width, (k + 1) * width).ids) for k in range(16)]
        assert counts.tolist() == sizes
        assert snapshot.histogram(0, 20).sum() == 3000


def test_any_range_in_any_order(shard: CpuShard) -> None:
    filled(shard)
    want = shard.export(0)
    hashes = unsigned_hashes(want.ids, "grows")
    assert hashes == sorted(hashes)
    with shard.snapshot() as snapshot:
        train(shard, 0, range(0, 3000, 2))
        for first, last in ((100, 2000), (0, 0), (2999, 2999), (50, 60), (0, 2999)):
            got = snapshot.read(0, hashes[first], hashes[last] + 1)
            assert torch.equal(got.ids, want.ids[first : last + 1])
            assert torch.equal(got.state, want.state[first : last + 1])
        assert len(snapshot.read(0, hashes[7] + 1, hashes[8]).ids) == 0
        assert len(snapshot.read(0, 5, 5).ids) == 0
        assert len(snapshot.read(0, HASHES, HASHES).ids) == 0


def test_no_rows(shard: CpuShard) -> None:
    with shard.snapshot() as snapshot:
        filled(shard)
        for chunk in whole(snapshot):
            assert len(chunk.ids) == 0
        assert snapshot.histogram(0, 3).tolist() == [0] * 8
        assert snapshot.deleted(0).tolist() == []


def test_what_changed_since(shard: CpuShard) -> None:
    filled(shard)
    with shard.snapshot() as first:
        start = Cursor(shard.incarnation, first.version)
        assert (first.since, first.concurrent) == (0, True)
        put(shard, 0, [1])
    train(shard, 0, [2, 8000], at_s=90)
    shard.close_version()
    put(shard, 2, [7])
    shard.evict(152)  # the 1 of before too: its event time is 0
    put(shard, 0, [3], at_s=90)
    gone = {id_ for id_ in range(3000) if id_ % 7 and id_ not in (2, 3)}
    want = {0: {2, 3, 8000}, 1: set[int](), 2: {7}}
    held = {table: shard.export(table) for table in range(3)}
    with shard.snapshot(start) as delta:
        assert delta.since == first.version < delta.version
        CHANGES["all"](shard)
        for table, ids in want.items():
            chunk = delta.read(table, 0, HASHES)
            assert set(chunk.ids.tolist()) == ids
            where = [held[table].ids.tolist().index(id_) for id_ in chunk.ids.tolist()]
            assert torch.equal(chunk.weights, held[table].weights[where])
            assert torch.equal(chunk.versions, held[table].versions[where])
            assert int(delta.histogram(table, 2).sum()) == len(ids)
        deleted = delta.deleted(0)
        assert set(deleted.tolist()) == gone
        assert len(deleted) == len(gone)
        hashes = unsigned_hashes(deleted, "grows")
        assert hashes == sorted(hashes)
        assert delta.deleted(1).tolist() == delta.deleted(2).tolist() == []


def test_a_deleted_id_is_named_once(shard: CpuShard) -> None:
    put(shard, 0, [1, 2, 3])
    snapshot = shard.snapshot()
    start = Cursor(shard.incarnation, snapshot.version)
    snapshot.close()
    for turn in range(1, 4):
        shard.evict(turn * 1000)
        put(shard, 0, [1, 2], at_s=turn * 1000)
    shard.evict(9000)
    put(shard, 0, [2], at_s=9000)
    with shard.snapshot(start) as delta:
        shard.evict(20_000)
        assert sorted(delta.deleted(0).tolist()) == [1, 3]
        assert delta.read(0, 0, HASHES).ids.tolist() == [2]


@pytest.mark.parametrize("buffer_bytes", [BUFFER_BYTES, TINY])
@pytest.mark.parametrize("order", [*permutations(range(2)), *permutations(range(3))])
def test_several_at_once(shard: CpuShard, order: tuple[int, ...], buffer_bytes: int) -> None:
    filled(shard)
    check_several(shard, order, buffer_bytes)


def open_files() -> int:
    """Unnamed ones, without those that garbage of other tests still holds."""
    gc.collect()
    links = (Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd"))
    return sum(link.is_symlink() and "(deleted)" in os.readlink(link) for link in links)


@pytest.mark.skipif(sys.platform != "linux", reason="lists of open files are Linux's")
@pytest.mark.parametrize("needed", [True, False])
def test_rows_are_copied_once_for_all_that_need_them(needed: bool) -> None:
    shard, before = filled(CpuShard(specs())), open_files()
    want = shard.export(0)
    oldest = shard.snapshot(buffer_bytes=TINY)
    if not needed:
        train(shard, 0, range(2000), at_s=80)
        want = shard.export(0)
    younger = shard.snapshot(buffer_bytes=TINY)
    if needed:
        train(shard, 0, range(2000), at_s=80)
    while not oldest.stats.spilled_bytes:
        time.sleep(1e-3)
    train(shard, 0, range(2000), at_s=81)
    copied = [one.stats.copied_rows for one in (oldest, younger)]
    assert copied == ([2000, 0] if needed else [2000, 2000])
    oldest.close()
    assert open_files() - before == 1  # the younger one's, or what it needs of the other's
    assert_same(in_pieces(younger, 0, 3), want)
    train(shard, 0, range(1000, 3000), at_s=82)
    assert younger.stats.copied_rows == (1000 if needed else 3000)
    assert_same(in_pieces(younger, 0, 3), want)
    younger.close()
    assert open_files() == before


def test_cursors_that_cannot_be_served(shard: CpuShard) -> None:
    put(shard, 0, [1])
    with pytest.raises(InputError, match="full snapshot"):
        shard.snapshot(Cursor(shard.incarnation, 0))  # nothing is kept yet
    first = shard.snapshot()
    start = Cursor(shard.incarnation, first.version)
    first.close()
    with pytest.raises(InputError, match="closed version"):
        shard.snapshot(Cursor(shard.incarnation, first.version + 1))
    with pytest.raises(InputError, match="incarnation"):
        shard.snapshot(Cursor(start.incarnation ^ 1, start.version))
    assert shard.close_version() == first.version + 1  # refusals close none
    shard.snapshot(start).close()
    shard.release(shard.close_version())
    with pytest.raises(InputError, match="closed version"):
        shard.snapshot(start)
    shard.snapshot().close()
    reload(shard, [5], 1)
    with pytest.raises(InputError, match="incarnation"):
        shard.snapshot(start)


def test_verbs_and_releases_go_on(shard: CpuShard) -> None:
    filled(shard)
    shard.snapshot().close()
    put(shard, 0, [1, 2, 3])
    want = exported(shard)
    with shard.snapshot() as snapshot:
        for turn in range(3):
            CHANGES["apply"](shard)
            shard.evict(150 + turn)
            shard.release(shard.close_version())
        for got, wanted in zip(whole(snapshot), want, strict=True):
            assert_same(got, wanted)


def test_what_it_costs_is_told(shard: CpuShard) -> None:
    filled(shard)
    with shard.snapshot() as snapshot:
        assert snapshot.stats.copied_rows == 0
        train(shard, 0, [*range(1000), *range(500), 9999])
        train(shard, 0, range(1000))
        assert snapshot.stats.copied_rows == 1000
        assert snapshot.stats.spilled_bytes == 0
    with shard.snapshot(buffer_bytes=TINY) as snapshot:
        train(shard, 0, range(1000))
        assert snapshot.stats.copied_rows == 1000
        snapshot.read(0, 0, HASHES)
        assert snapshot.stats.spilled_bytes > 10_000


def test_a_full_folder_fails_snapshots_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard, other = filled(CpuShard(specs())), filled(CpuShard(specs()))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "missing"))
    with shard.snapshot(buffer_bytes=TINY) as snapshot, shard.snapshot() as sharing:
        for one in (shard, other):
            train(one, 0, range(3000))
        want = shard.export(0)
        with shard.snapshot() as unharmed:
            for one in (shard, other):
                train(one, 0, range(3000))
            for lost in (snapshot, sharing):
                with pytest.raises(CheckpointError, match="temporary"):
                    lost.read(0, 0, HASHES)
                with pytest.raises(CheckpointError, match="temporary"):
                    lost.histogram(1, 3)
            assert_same(unharmed.read(0, 0, HASHES), want)
    assert torch.equal(shard.export(0).state, other.export(0).state)
    with shard.snapshot() as snapshot:
        assert len(snapshot.read(0, 0, HASHES).ids) == 3000


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda s: s.read(3, 0, 1), InputError),
        (lambda s: s.read(-1, 0, 1), InputError),
        (lambda s: s.read(0, 2, 1), InputError),
        (lambda s: s.read(0, -1, 1), InputError),
        (lambda s: s.read(0, 0, HASHES + 1), InputError),
        (lambda s: s.read(0, 0.0, 1), DTypeError),
        (lambda s: s.histogram(0, 21), InputError),
        (lambda s: s.histogram(0, True), DTypeError),
        (lambda s: s.deleted(9), InputError),
    ],
)
def test_bad_calls(call: Callable[[CpuSnapshot], object], error: type[Exception]) -> None:
    with CpuShard(specs()).snapshot() as snapshot, pytest.raises(error):
        call(snapshot)


def test_bad_buffers() -> None:
    shard = CpuShard(specs())
    with pytest.raises(InputError):
        shard.snapshot(buffer_bytes=-1)
    with pytest.raises(DTypeError):
        shard.snapshot(buffer_bytes=1.5)  # type: ignore[arg-type]
    assert shard.close_version() == 1


def test_resume_after_a_load(shard: CpuShard) -> None:
    consumer = Consumer()
    filled(shard)
    shard.close_version()
    reload(shard, range(10), 7)
    with pytest.raises(InputError, match="version of every row"):
        shard.resume(6)
    cursor = shard.resume(9)
    assert cursor == Cursor(shard.incarnation, 9)
    consumer.cursor = cursor
    consumer.held = contents(*exported(shard))
    put(shard, 0, [5000])
    shard.evict(155)
    with shard.snapshot(cursor) as delta:
        assert (delta.since, delta.version) == (9, 10)
        assert delta.read(0, 0, HASHES).ids.tolist() == []
        assert len(delta.deleted(0)) > 2000
    consumer.drain(shard)
    assert consumer.restarts == 0
    assert consumer.held == contents(*exported(shard))


def test_resume_where_rows_are_gone(shard: CpuShard) -> None:
    reload(shard, [1], 9)
    shard.evict(10_000)
    assert shard.resume(3).version == 3
    assert shard.close_version() == 9  # versions never fall
    for bad, error in ((-1, InputError), (2**32 - 1, InputError), (1.0, DTypeError)):
        with pytest.raises(error):
            shard.resume(bad)  # type: ignore[arg-type]


def test_versions_leave_room_for_a_cut(shard: CpuShard) -> None:
    with pytest.raises(InputError, match=str(2**32 - 2)):
        reload(shard, [1], 2**32 - 1)
    assert shard.size(0) == 0
    reload(shard, [1], 2**32 - 2)
    assert shard.close_version() == 2**32 - 2
    for call in (shard.close_version, shard.snapshot):
        with pytest.raises(InputError, match="versions"):
            call()
    assert shard.size(0) == 1


def test_many_groups_under_a_snapshot(shard: CpuShard) -> None:
    """One step over all tables and several tickets."""
    filled(shard)
    want = exported(shard)
    groups: IdGroups = groups_of((0, range(600)), (1, range(64)), (2, range(50)), (0, range(300)))
    with shard.snapshot(buffer_bytes=TINY) as snapshot:
        for _ in range(3):
            ticket = shard.find_or_init(groups, ctx=StepContext())
            dims = [shard.specs[t].dim for t in (0, 1, 2, 0)]
            sizes = groups.splits_G1.diff().tolist()
            grads = tuple(torch.ones(n, d) for n, d in zip(sizes, dims, strict=True))
            shard.apply([GradRecord(ticket, grads)], ctx=StepContext())
        for got, wanted in zip(whole(snapshot), want, strict=True):
            assert_same(got, wanted)
