"""Snapshots read while other threads train, evict and cut."""

from __future__ import annotations

import threading

import pytest
import torch

from shoal import Expiry, Segment, TableSpec, initializers, optimizers
from shoal.table.cpu import CpuShard
from shoal.table.shard import GradRecord, StepContext
from shoal.table.snapshot import HASHES
from support.cut_rows import assert_same, in_pieces
from support.id_groups import groups_of

ROWS = 6000
BATCH = 500


@pytest.mark.parametrize("buffer_bytes", [64 << 20, 64 << 10])
def test_readers_beside_trainers(buffer_bytes: int) -> None:
    segment = Segment(dim=8, initializer=initializers.Zeros(), optimizer=optimizers.Adagrad())
    shard = CpuShard([TableSpec(name="t", segments=(segment,), expiry=Expiry(ttl_s=40))], threads=2)
    stop = threading.Event()
    hold = threading.Lock()  # nothing may change between the cut and the copy to compare with
    failures: list[BaseException] = []

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
                    shard.cut()

    def guarded(seed: int) -> None:
        try:
            train(seed)
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=guarded, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    copied = 0
    try:
        for turn in range(8):
            with hold:
                want = shard.export(0)
                snapshot = shard.snapshot(buffer_bytes=buffer_bytes)
            with snapshot:
                for _ in range(3):
                    assert_same(in_pieces(snapshot, 0, 1 + 5 * turn), want)
                assert int(snapshot.histogram(0, 6).sum()) == len(want.ids)
                assert_same(snapshot.read(0, 0, HASHES), want)
                copied += snapshot.stats.copied_rows
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not failures
    assert copied > 0
