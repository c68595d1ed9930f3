"""Snapshots read while other threads train, evict and cut; and in a forked process."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from shoal import Expiry, Segment, TableSpec, initializers, optimizers
from shoal.errors import CheckpointError, InputError
from shoal.table.cpu.shard import CpuShard
from shoal.table.shard import HASHES, GradRecord, StepContext
from shoal.table.values import RowChunk
from support.cut_rows import assert_same, in_pieces
from support.id_groups import groups_of

ROWS = 6000
BATCH = 500


@pytest.mark.slow
@pytest.mark.parametrize("readers", [1, 3])
@pytest.mark.parametrize("buffer_bytes", [64 << 20, 64 << 10])
def test_readers_beside_trainers(buffer_bytes: int, readers: int) -> None:
    segment = Segment(dim=8, initializer=initializers.Zeros(), optimizer=optimizers.Adagrad())
    shard = CpuShard([TableSpec(name="t", segments=(segment,), expiry=Expiry(ttl_s=40))], threads=2)
    stop = threading.Event()
    hold = (
        threading.Lock()
    )  # nothing may change between the snapshot point and the copy to compare with
    failures: list[BaseException] = []
    steps = [0, 0]

    def train(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        step = 0
        while not stop.is_set():
            step += 1
            ids = torch.randint(0, ROWS, (BATCH,), generator=generator).tolist()
            ctx = StepContext(event_time_s=step)
            with hold:
                ticket = shard.find_or_init(groups_of((0, ids)), ctx=ctx)
                shard.apply([GradRecord(ticket, (torch.ones(BATCH, 8),))], ctx=ctx)
                if step % 5 == 0:
                    shard.evict(step)
                    shard.close_version()
                steps[seed] = step

    copied = []

    def read(pace: int) -> None:
        for turn in range(8 // readers):
            with hold:
                want = shard.export(0)
                snapshot, before = shard.snapshot(buffer_bytes=buffer_bytes), sum(steps)
            with snapshot:
                while turn == 0 and sum(steps) < before + 2 and not failures:
                    time.sleep(0.001)  # until trainers have changed some
                for _ in range(pace):
                    assert_same(in_pieces(snapshot, 0, 1 + 5 * turn), want)
                assert int(snapshot.histogram(0, 6).sum()) == len(want.ids)
                assert_same(snapshot.read(0, 0, HASHES), want)
                copied.append(snapshot.stats.copied_rows)

    def guarded(call: Callable[[int], None], argument: int) -> None:
        try:
            call(argument)
        except BaseException as error:
            failures.append(error)
            raise

    def started(call: Callable[[int], None], argument: int) -> threading.Thread:
        thread = threading.Thread(target=guarded, args=(call, argument))
        thread.start()
        return thread

    trainers = [started(train, seed) for seed in range(2)]
    others = [started(read, 3 * k) for k in range(1, readers)]
    try:
        read(3)
        for thread in others:
            thread.join()
    finally:
        stop.set()
        for thread in trainers:
            thread.join()
    assert not failures
    assert max(copied) > 0


@pytest.mark.slow
def test_a_reader_beside_sums_of_gradients() -> None:
    """They borrow the versions of rows, and change nothing."""
    segment = Segment(dim=8, initializer=initializers.Zeros(), optimizer=optimizers.Adagrad())
    shard = CpuShard([TableSpec(name="t", segments=(segment,))], threads=2)
    ids, ctx = groups_of((0, list(range(20_000)))), StepContext()
    while shard.close_version() < 7:
        pass
    records = [GradRecord(shard.find_or_init(ids, ctx=ctx), (torch.ones(20_000, 8),))]
    want = shard.export(0)
    stop = threading.Event()

    def sum_up() -> None:
        while not stop.is_set():
            shard.sum_grads(records)

    thread = threading.Thread(target=sum_up)
    with shard.snapshot() as snapshot:
        thread.start()
        try:
            for _ in range(150):
                assert_same(snapshot.read(0, 0, HASHES), want)
        finally:
            stop.set()
            thread.join()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_trains_on_without_the_snapshot() -> None:
    """The thread that empties the memory for copied rows is not there."""
    rows = 20_000
    segment = Segment(dim=8, initializer=initializers.Zeros(), optimizer=optimizers.Adagrad())
    shard = CpuShard([TableSpec(name="t", segments=(segment,))], threads=2)
    ids, ones, ctx = groups_of((0, list(range(rows)))), (torch.ones(rows, 8),), StepContext()
    shard.assign(ids, ones, ctx=ctx)
    want = shard.export(0)
    snapshot = shard.snapshot(buffer_bytes=64 << 10)
    younger = shard.snapshot()  # which has copies of its own, and some of the older one's
    half = groups_of((0, list(range(rows // 2))))
    shard.assign(half, (ones[0][: rows // 2],), ctx=ctx)
    assert snapshot.stats.spilled_bytes > 0  # that thread waits
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(120)
            shard.assign_add(ids, ones, ctx=ctx)
            try:
                younger.read(0, 0, HASHES)
            except CheckpointError:
                younger.close()
            try:
                snapshot.read(0, 0, HASHES)
            except CheckpointError as error:
                snapshot.close()
                del snapshot, younger
                entry = shard.entry(0, 9)  # few numbers: torch's own threads are gone, too
                right = "forked" in str(error) and entry and entry.weights.tolist() == [2.0] * 8
                code = 0 if right else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    for one in (snapshot, younger):
        with one:
            assert_same(one.read(0, 0, HASHES), want)


def test_closing_waits_for_a_read() -> None:
    segment = Segment(dim=8, initializer=initializers.Zeros(), optimizer=optimizers.Adagrad())
    shard = CpuShard([TableSpec(name="t", segments=(segment,))])
    ids, ctx = groups_of((0, list(range(100)))), StepContext()
    shard.assign(ids, (torch.ones(100, 8),), ctx=ctx)
    want = shard.export(0)
    snapshot = shard.snapshot()
    core, found, read = snapshot._core, threading.Event(), threading.Event()

    class Slow:
        """Its rows are found, and then read."""

        close = staticmethod(core.close)
        stats = staticmethod(core.stats)
        find = staticmethod(core.find)

        def read(self, *arguments: Any) -> None:
            found.set()
            read.wait(0.5)
            core.read(*arguments)

    snapshot._core = Slow()
    got: list[RowChunk] = []
    reader = threading.Thread(target=lambda: got.append(snapshot.read(0, 0, HASHES)))
    reader.start()
    assert found.wait(60)
    snapshot.close()
    read.set()
    shard.assign_add(ids, (torch.ones(100, 8),), ctx=ctx)
    reader.join()
    assert_same(got[0], want)
    with pytest.raises(InputError, match="closed"):
        snapshot.read(0, 0, HASHES)
