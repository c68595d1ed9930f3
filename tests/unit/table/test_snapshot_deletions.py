"""Which ids a delta's snapshot names as deleted, while verbs and other consumers go on."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence

import pytest
import torch

from shoal import Expiry, Segment, TableSpec, _core, initializers, optimizers
from shoal.table.cpu.shard import CpuShard
from shoal.table.shard import HASHES, StepContext
from shoal.table.values import Cursor, RowChunk
from support.id_groups import groups_of

MANY = 20_000  # the log is read in several pieces


def filled() -> tuple[CpuShard, Cursor]:
    """Rows 0 to MANY, and the cursor of a consumer that has them."""
    segment = Segment(dim=2, initializer=initializers.Zeros(), optimizer=optimizers.SGD(lr=1.0))
    spec = TableSpec(name="t", segments=(segment,), expiry=Expiry(ttl_s=100))
    shard = CpuShard([spec], threads=1)
    put(shard, range(MANY), 0)
    with shard.snapshot() as full:
        return shard, Cursor(shard.incarnation, full.version)


def put(shard: CpuShard, ids: Sequence[int], at_s: int) -> None:
    values = torch.ones(len(ids), 2)
    shard.assign(groups_of((0, ids)), [values], ctx=StepContext(event_time_s=at_s))


def load(shard: CpuShard) -> None:
    whole = torch.full((1,), 2, dtype=torch.int64)
    shard.load(0, RowChunk("t", whole * MANY, torch.ones(1, 2), torch.ones(1, 0), *[whole] * 3))


LOSES_THE_LOG: dict[str, Callable[[CpuShard], object]] = {
    "released": lambda shard: shard.release(shard.close_version()),
    "stopped": lambda shard: shard.release(None),
    "resumed": lambda shard: shard.resume(shard.close_version()),
    "loaded": load,
}


def test_what_is_put_in_and_deleted_after_the_cut_changes_nothing() -> None:
    shard, start = filled()
    shard.evict(200)
    put(shard, [1, 2], 200)
    with shard.snapshot(start) as delta:
        put(shard, [2, 3, 4], 500)
        shard.evict(500)  # 1, which had a row at the snapshot point
        assert sorted(delta.deleted(0).tolist()) == [0, *range(3, MANY)]
        assert sorted(delta.read(0, 0, HASHES).ids.tolist()) == [1, 2]


@pytest.mark.parametrize("how", LOSES_THE_LOG)
def test_a_log_that_goes_is_read_before(how: str) -> None:
    shard, start = filled()
    shard.evict(200)
    put(shard, [5], 200)
    with shard.snapshot(start) as delta:
        LOSES_THE_LOG[how](shard)
        put(shard, [6], 200)
        assert sorted(delta.deleted(0).tolist()) == [i for i in range(MANY) if i != 5]


@pytest.mark.skipif(sys.platform != "linux", reason="a thread has no niceness of its own")
def test_a_thread_gives_way_alone() -> None:
    found: list[tuple[int, int]] = []

    def work() -> None:
        _core.give_way()
        thread = threading.get_native_id()
        found.append((os.getpriority(os.PRIO_PROCESS, thread), os.sched_getscheduler(thread)))

    before = os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found[0][0] == max(10, before[0])
    assert found[0][1] in (os.SCHED_BATCH, before[1])
    assert (os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0)) == before
