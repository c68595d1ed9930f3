"""Children that are forked while other threads use a table, and while none does."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

import pytest
import torch

from shoal import Segment, TableSpec, initializers, optimizers
from shoal.errors import ShoalError
from shoal.table.cpu.shard import CpuShard
from shoal.table.shard import StepContext
from support.id_groups import groups_of

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here"),
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),
]

ROWS = 4000
RIGHT, REFUSED, AT_REST = 0, 3, 5  # AT_REST: no call was under way


def table() -> CpuShard:
    segment = Segment(dim=8, initializer=initializers.Zeros(), optimizer=optimizers.SGD(lr=1.0))
    shard = CpuShard([TableSpec(name="t", segments=(segment,))], threads=2)
    ids = groups_of((0, list(range(ROWS))))
    shard.assign(ids, (torch.ones(ROWS, 8),), ctx=StepContext())
    return shard


def outcome(child: Callable[[], bool]) -> int:
    """How a forked child ends: RIGHT, REFUSED (with the remedy in the error), or a signal."""
    process = os.fork()
    if process == 0:
        code = 1
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(120)  # one that hangs ends by it
            code = RIGHT if child() else 2
        except ShoalError as error:
            code = REFUSED if "forkserver" in str(error) else 4
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def used(shard: CpuShard) -> bool:
    """Reads and writes of a few ids; values are 1 plus what threads have added."""
    few = groups_of((0, [1, 2, 3]))
    before = shard.find(few).weights[0].tolist()
    shard.assign_add(few, (torch.ones(3, 8),), ctx=StepContext())
    ticket = shard.find_or_init(few, ctx=StepContext())
    after = shard.gather(ticket, ctx=StepContext())[0].tolist()
    del ticket
    return after == [[x + 1 for x in row] for row in before] and shard.size(0) == ROWS


def test_a_child_forked_at_rest_works() -> None:
    shard = table()
    assert outcome(lambda: used(shard)) == RIGHT
    assert used(shard)


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["reads", "writes", "lookups", "snapshots"])
def test_children_forked_under_load_work_or_say_why_not(verb: str) -> None:
    shard, stop = table(), threading.Event()
    ids, rows = groups_of((0, list(range(ROWS)))), (torch.zeros(ROWS, 8),)
    running = [threading.Event() for _ in range(2)]

    def work(begun: threading.Event) -> None:
        while not stop.is_set():
            if verb == "reads":
                shard.find(ids)
            elif verb == "writes":
                shard.assign_add(ids, rows, ctx=StepContext())
            elif verb == "lookups":
                shard.gather(shard.find_or_init(ids, ctx=StepContext()), ctx=StepContext())
            elif begun is running[0]:
                shard.assign_add(ids, rows, ctx=StepContext())
            else:
                with shard.snapshot(buffer_bytes=64 << 10) as snapshot:
                    snapshot.read(0, 0, 1 << 64)
            begun.set()

    threads = [threading.Thread(target=work, args=(begun,)) for begun in running]
    try:
        for thread in threads:
            thread.start()
        for begun in running:
            assert begun.wait(60)
        outcomes = [outcome(lambda: used(shard)) for _ in range(30)]
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert set(outcomes) <= {RIGHT, REFUSED}, outcomes
    assert used(shard)


@pytest.mark.slow
def test_another_table_works_where_one_cannot() -> None:
    """What was in use is refused for good, and only that."""
    busy, idle, stop = table(), table(), threading.Event()
    ids = groups_of((0, list(range(ROWS)) * 20))

    def work() -> None:
        while not stop.is_set():
            busy.find(ids)

    def child() -> bool:
        right = used(idle)
        try:
            used(busy)
        except ShoalError:
            with pytest.raises(ShoalError, match="forkserver"):
                used(busy)
            return right and used(idle)
        os._exit(AT_REST)

    # Several: this thread may run only while one of them has no call under way.
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        outcomes = [outcome(child)]
        while RIGHT not in outcomes and len(outcomes) < 300:
            time.sleep(0.001 * (len(outcomes) % 7))  # another moment of their calls
            outcomes.append(outcome(child))
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert RIGHT in outcomes
    assert set(outcomes) <= {RIGHT, AT_REST}, outcomes
