"""Collectives that count the time they take are the collectives that they count."""

from __future__ import annotations

from itertools import count

import torch

from shoal.comm.collectives import LocalCollectives, Part, WaitClock


def test_calls_and_waits_are_counted() -> None:
    ticks = count()
    waiting = WaitClock(clock=lambda: float(next(ticks)))
    timed = LocalCollectives()
    timed.clock = waiting
    pending = timed.all_to_all([Part(torch.arange(3), (3,), (3,))], what="rows")
    assert waiting.total_s == 1.0
    assert pending.wait()[0].tolist() == [0, 1, 2]
    assert waiting.total_s == 2.0
    sizes = timed.exchange_sizes(torch.tensor([[4, 5]]), what="sizes").wait()
    assert sizes.received_WX.tolist() == [[4, 5]]
    assert timed.all_reduce(torch.ones(2), "sum", what="sum").wait()[0].tolist() == [1.0, 1.0]
    assert timed.gather_objects("a", what="word") == ["a"]
    timed.broadcast(torch.zeros(1), 0, what="value")
    timed.barrier(what="end")
    assert waiting.total_s == 9.0
