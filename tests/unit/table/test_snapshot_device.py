"""Snapshots of a GPU shard: the rows of a snapshot, whatever later verbs do to them."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal import Segment, TableSpec, initializers, optimizers
from shoal.errors import CheckpointError, DTypeError, InputError
from shoal.kernels import launch
from shoal.rules.admission import Admission
from shoal.table.cuda import snapshot_rows as device_images
from shoal.table.shard import BUFFER_BYTES, HASHES, GradRecord, Shard, StepContext
from shoal.table.values import Cursor, RowChunk
from support.changed_rows import (
    CHANGES,
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
from support.shards import COMPILED, CUDA, TIERED, TIERED_COMPILED, shard_factory

pytestmark = pytest.mark.slow

ON_GPU = torch.cuda.is_available()
ROWS = 3000 if ON_GPU else 60
TINY = 4096
SOME = [name for name in CHANGES if name != "all"]
DROP = ["evict", "reused rows", "clear"]
# Interpreted, one filled shard serves several cases, one snapshot each.
APART = [[name] for name in SOME] if ON_GPU else [[n for n in SOME if n not in DROP], DROP]
HARD = ["apply", "swapped rows", "load of old versions", "reused rows"]
# Interpreted, rows behind a cache are changed, and read beside a trainer, by some tests only.
both = pytest.mark.parametrize("shard", [CUDA, TIERED], indirect=True)


@pytest.fixture(params=[CUDA, TIERED] if ON_GPU else [CUDA])
def shard(request: pytest.FixtureRequest) -> Shard:
    return shard_factory(request.param)(specs())


@pytest.fixture(autouse=True)
def no_thread_stays() -> Iterator[None]:
    yield
    gc.collect()
    assert "shoal-snapshot" not in [thread.name for thread in threading.enumerate()]


def whole(snapshot: Any) -> list[RowChunk]:
    return [snapshot.read(table, 0, HASHES) for table in range(3)]


def check(snapshot: Any, want: list[RowChunk]) -> None:
    for table, rows in enumerate(want):
        assert int(snapshot.histogram(table, 3).sum()) == len(rows.ids)
        assert_same(snapshot.read(table, 0, HASHES), rows)
        assert_same(in_pieces(snapshot, table, 3), rows)


@pytest.mark.parametrize("shard", [CUDA], indirect=True)
@pytest.mark.parametrize("changes", APART, ids=lambda names: names[0])
def test_rows_are_those_of_the_cut(shard: Shard, changes: list[str]) -> None:
    filled(shard, ROWS)
    for change in changes:
        print(change)  # shown with a failure
        want = exported(shard)
        with shard.snapshot() as snapshot:
            assert snapshot.concurrent
            CHANGES[change](shard)
            if ON_GPU:
                CHANGES[change](shard)
            check(snapshot, want)


@both
@pytest.mark.parametrize("buffer_bytes", [BUFFER_BYTES, 0] if ON_GPU else [0])
def test_after_all_changes(shard: Any, buffer_bytes: int) -> None:
    filled(shard, ROWS)
    want = exported(shard)
    with shard.snapshot(buffer_bytes=buffer_bytes) as snapshot:
        CHANGES["all"](shard)
        check(snapshot, want)
        assert snapshot.stats.copied_rows == sum(len(rows.ids) for rows in want)
        assert (snapshot.stats.spilled_bytes > 0) == (buffer_bytes < BUFFER_BYTES)


@both
@pytest.mark.parametrize(
    "changes", [[name] * 3 for name in HARD] if ON_GPU else [HARD], ids=lambda names: names[0]
)
def test_rows_read_before_and_after_they_change(shard: Shard, changes: list[str]) -> None:
    filled(shard, ROWS)
    want = exported(shard)
    with shard.snapshot() as snapshot:
        histograms = [snapshot.histogram(table, 5) for table in range(3)]
        for turn, change in enumerate(changes):
            table = turn % 3
            assert_same(snapshot.read(table, 0, HASHES), want[table])
            CHANGES[change](shard)
            assert_same(snapshot.read(table, 0, HASHES), want[table])
        for table in range(3):
            assert_same(in_pieces(snapshot, table, 5), want[table])
            assert torch.equal(snapshot.histogram(table, 5), histograms[table])


ORDERS = [*permutations(range(2)), *permutations(range(3))] if ON_GPU else [(0, 2, 1)]


@pytest.mark.parametrize("order", ORDERS)
def test_several_at_once(shard: Shard, order: tuple[int, ...]) -> None:
    filled(shard, ROWS)
    check_several(shard, order, TINY)


def test_small_pieces_and_little_device_memory(shard: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows go through in pieces, and a host that is ahead waits."""
    monkeypatch.setattr(device_images, "_PIECE_BYTES", 1000)
    monkeypatch.setattr(device_images, "_FLYING_BYTES", 2000)
    monkeypatch.setattr(device_images, "_LANDING_BYTES", 400)
    filled(shard, ROWS)
    want = exported(shard)
    with shard.snapshot(buffer_bytes=TINY) as snapshot:
        CHANGES["apply"](shard)
        CHANGES["evict"](shard)
        check(snapshot, want)


def test_a_row_is_kept_once(shard: Any) -> None:
    filled(shard, ROWS)
    with shard.snapshot() as snapshot, shard.snapshot() as younger:
        for _ in range(3):
            train(shard, 0, [*range(30), *range(20), 9999])
        put(shard, 0, range(30))
        for one in (snapshot, younger):
            assert len(one.read(0, 0, HASHES).ids) == ROWS
        assert [one.stats.copied_rows for one in (snapshot, younger)] == [30, 0]
        assert snapshot.stats.waited_s >= 0
        snapshot.close()
        assert len(in_pieces(younger, 0, 3).ids) == ROWS  # copies that it needs are still there


@pytest.mark.parametrize("shard", [COMPILED, TIERED_COMPILED], indirect=True)
def test_many_rows(shard: Any) -> None:
    many = 300_000
    filled(shard, many)
    want = exported(shard)
    with shard.snapshot(buffer_bytes=1 << 20) as snapshot:
        for turn in range(8):
            train(shard, 0, range(turn, many, 5), at_s=120 + turn)
            assert_same(snapshot.read(2, 0, HASHES), want[2])
        shard.evict(155)
        put(shard, 0, range(many, 2 * many), at_s=155)
        check(snapshot, want)


def test_tables_of_many_forms() -> None:
    """Widths, dtypes and state of every size in one call, and an index that is rebuilt."""
    forms = [
        (1, "float32", optimizers.SGD()),
        (2, "bfloat16", optimizers.Adam()),
        (17, "float16", optimizers.Adagrad()),
        (9, "float64", optimizers.Momentum()),
    ]
    tables = [
        TableSpec(
            name=f"t{k}",
            segments=(Segment(dim=dim, initializer=initializers.Normal(), optimizer=rule),),
            dtype=dtype,
            admission=Admission(threshold=2) if k == 0 else None,
        )
        for k, (dim, dtype, rule) in enumerate(forms)
    ]
    shard = shard_factory("cuda")(tables)

    def step(low: int, high: int) -> None:
        groups = groups_of(*((k, range(low, high)) for k in range(4)))
        ticket = shard.find_or_init(groups, ctx=StepContext())
        grads = tuple(torch.ones_like(part) for part in shard.gather(ticket, ctx=StepContext()))
        shard.apply([GradRecord(ticket, grads)], ctx=StepContext())

    for _ in range(2):
        step(0, 24)
    want = [shard.export(k) for k in range(4)]
    with shard.snapshot() as snapshot:
        step(12, 36)
        step(12, 600 if ON_GPU else 90)
        check(snapshot, want)


def test_no_rows(shard: Shard) -> None:
    with shard.snapshot() as snapshot:
        filled(shard, ROWS)
        for chunk in whole(snapshot):
            assert len(chunk.ids) == 0
        assert snapshot.histogram(0, 3).tolist() == [0] * 8
        assert snapshot.deleted(0).tolist() == []


def test_what_changed_since(shard: Shard) -> None:
    filled(shard, ROWS)
    with shard.snapshot() as first:
        start = Cursor(shard.incarnation, first.version)
        put(shard, 0, [1])
    train(shard, 0, [2, 8000], at_s=90)
    shard.close_version()
    put(shard, 2, [7])
    shard.evict(152)  # the 1 of before too: its event time is 0
    put(shard, 0, [3], at_s=90)
    gone = {id_ for id_ in range(ROWS) if id_ % 7 and id_ not in (2, 3)}
    want = {0: {2, 3, 8000}, 1: set[int](), 2: {7}}
    held = {table: shard.export(table) for table in range(3)}
    with shard.snapshot(start) as delta:
        assert delta.since == first.version < delta.version
        for change in ["all"] if ON_GPU else ["apply", "clear"]:
            CHANGES[change](shard)
        for table, ids in want.items():
            chunk = delta.read(table, 0, HASHES)
            assert set(chunk.ids.tolist()) == ids
            where = [held[table].ids.tolist().index(id_) for id_ in chunk.ids.tolist()]
            assert torch.equal(chunk.weights, held[table].weights[where])
            assert torch.equal(chunk.versions, held[table].versions[where])
            assert int(delta.histogram(table, 2).sum()) == len(ids)
        deleted = delta.deleted(0)
        assert set(deleted.tolist()) == gone
        hashes = unsigned_hashes(deleted, "grows")
        assert hashes == sorted(hashes)


def test_verbs_and_releases_go_on(shard: Shard) -> None:
    filled(shard, ROWS)
    shard.snapshot().close()
    put(shard, 0, [1, 2, 3])
    want = exported(shard)
    with shard.snapshot() as snapshot:
        for turn in range(2):
            CHANGES["apply"](shard)
            shard.evict(150 + turn)
            shard.release(shard.close_version())
        for got, wanted in zip(whole(snapshot), want, strict=True):
            assert_same(got, wanted)


def test_closed_in_the_middle(shard: Shard) -> None:
    filled(shard, ROWS)
    ticket = shard.find_or_init(groups_of((0, range(20))), ctx=StepContext())
    snapshot = shard.snapshot()
    train(shard, 0, range(40))
    assert len(snapshot.read(0, 0, 1 << 62).ids) > 0
    snapshot.close()
    snapshot.close()
    shard.apply([GradRecord(ticket, (torch.ones(20, 3),))], ctx=StepContext())
    train(shard, 0, range(40))
    with pytest.raises(InputError, match="a closed one"):
        snapshot.read(0, 0, HASHES)
    want = exported(shard)
    with shard.snapshot() as again:
        train(shard, 0, range(0, 60, 3))
        check(again, want)


def test_one_that_nobody_holds_keeps_nothing(shard: Any) -> None:
    filled(shard, ROWS)
    snapshot = shard.snapshot()
    images = snapshot.images
    train(shard, 0, range(10))
    del snapshot
    gc.collect()
    assert not images.joinable
    train(shard, 0, range(10, 50))
    with shard.snapshot() as again:
        assert again.images is not images


def test_a_step_has_one_launch_more(shard: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(shard, ROWS)
    launched: list[str] = []
    real = launch._parameters  # every launch asks for its kernel's, once these are forgotten

    def seen(kernel: Any) -> Any:
        launched.append(kernel.fn.__name__)
        found = real(kernel)
        launch._PARAMETERS.clear()
        return found

    monkeypatch.setattr(launch, "_parameters", seen)

    def of_a_step() -> list[str]:
        train(shard, 0, range(8))
        launch._PARAMETERS.clear()
        launched.clear()
        train(shard, 0, range(8))
        return sorted(launched)

    before = of_a_step()
    with shard.snapshot() as snapshot, shard.snapshot():
        beside = of_a_step()
        assert sorted([*before, "_keep"]) == beside  # however many are open
        assert len(snapshot.read(0, 0, HASHES).ids) == ROWS
    assert of_a_step() == before


def test_rows_that_cannot_be_kept_fail_the_snapshot_only(
    shard: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(shard, ROWS)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "missing"))
    with shard.snapshot(buffer_bytes=TINY) as snapshot:
        train(shard, 0, range(ROWS))
        with pytest.raises(CheckpointError, match="temporary"):
            snapshot.read(0, 0, HASHES)
        train(shard, 0, range(ROWS))
        with pytest.raises(CheckpointError, match="temporary"):
            snapshot.histogram(1, 3)
    want = exported(shard)
    with shard.snapshot() as snapshot:
        train(shard, 0, range(50))
        check(snapshot, want)


@pytest.mark.parametrize("shard", [CUDA], indirect=True)
def test_no_device_memory_fails_the_snapshot_only(
    shard: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(shard, ROWS)

    def refused(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("none is left")

    with shard.snapshot() as snapshot:
        with monkeypatch.context() as patched:
            patched.setattr(snapshot.images, "_room_for", refused)
            train(shard, 0, range(30))
        train(shard, 0, range(30))
        with pytest.raises(CheckpointError, match="none is left"):
            snapshot.read(0, 0, HASHES)
    assert len(shard.export(0).ids) == ROWS


def test_resume_and_load_beside_one(shard: Shard) -> None:
    filled(shard, ROWS)
    want = exported(shard)
    with shard.snapshot() as snapshot:
        reload(shard, range(5), 9)
        assert shard.resume(9).version == 9
        train(shard, 0, range(10))
        check(snapshot, want)


@pytest.mark.parametrize("buffer_bytes", [-1, 1.5])
def test_bad_buffers(buffer_bytes: Any) -> None:
    shard = shard_factory("cuda")(specs())
    with pytest.raises((InputError, DTypeError), match="buffer_bytes"):
        shard.snapshot(buffer_bytes=buffer_bytes)  # type: ignore[call-arg]
    assert shard.close_version() == 1


@both
def test_a_reader_beside_a_trainer(shard: Any) -> None:
    rows, turns = (20_000, 40) if ON_GPU else (ROWS, 2)
    filled(shard, rows)
    stop, failures = threading.Event(), list[BaseException]()
    hold = (
        threading.Lock()
    )  # nothing may change between the snapshot point and the copy to compare with

    def on_and_on() -> None:
        step = 0
        try:
            while not stop.wait(1e-3):  # a lock is not fair
                step += 1
                with hold:
                    train(shard, 0, range(step % 7, rows, 7), at_s=100 + step)
                    put(shard, 1, range(step % 50, 64), at_s=100 + step)
                    if step % 5 == 0:
                        shard.evict(200 + step)
        except BaseException as error:
            failures.append(error)
            raise

    thread = threading.Thread(target=on_and_on)
    thread.start()
    try:
        for turn in range(turns):
            with hold:
                want = exported(shard)
                snapshot = shard.snapshot(buffer_bytes=64 << 10)
            with snapshot:
                for table in range(3):
                    assert_same(in_pieces(snapshot, table, 1 + turn % 4), want[table])
                    assert int(snapshot.histogram(table, 6).sum()) == len(want[table].ids)
    finally:
        stop.set()
        thread.join()
    assert not failures


@pytest.mark.parametrize("shard", [COMPILED, TIERED_COMPILED], indirect=True)
def test_a_reader_beside_a_trainer_on_another_stream(shard: Any) -> None:
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        test_a_reader_beside_a_trainer(shard)
