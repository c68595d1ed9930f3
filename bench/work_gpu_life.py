"""Workers of the GPU cases about a table's life: a full budget, long churn, growth."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from clock_gpu import Clock, Times
from harness import Measured, median, percentile
from ours_gpu import ShardStep, groups, load, make_shard, rows_in, scrambled, table
from plan_gpu import Scale
from shoal.table.shard import Shard, StepContext

__all__ = ["budget", "churned", "growth"]

BATCHES = 8
FRESH_PART = 20  # one id in so many is new


def budget(*, scale: Scale) -> dict[str, Measured]:
    """A step with 5 % new ids in a full table, over the same step with none; LRU, D=64, Adagrad.

    The ids that stay are drawn from a seventh of the table, which the steps keep in use, so that
    it is the others that go.
    """
    dim, n = 64, scale.call_ids
    clock = Clock(scale.device, scale.copy_bytes)
    hot, new = n, max(n // FRESH_PART, 1)
    calls = clock.calls(scale.repeats)
    rows = hot + calls * new + 3 * n
    spec = table(dim, rows, "Adagrad", capacity_rows=rows, on_full="lru")
    shard = make_shard(scale, (spec,))
    load(shard, rows)
    kept = [_among(hot, n, scale) for _ in range(BATCHES)]
    run = ShardStep(shard, [groups(scrambled(index_N)) for index_N in kept], dim)
    now_s = 1
    still = clock.measure(lambda i: run.step(run.batches[i % BATCHES], i, now_s), scale.repeats)

    def fresh(number: int) -> Tensor:
        start = rows + number * new
        arrived = torch.arange(start, start + new, device=scale.device)
        index_N = torch.cat([kept[number % BATCHES][new:], arrived])
        return scrambled(index_N[torch.randperm(n, device=scale.device)])

    arriving = [groups(fresh(number)) for number in range(calls)]
    moving = clock.measure(lambda i: run.step(arriving[i], i, now_s + i), scale.repeats)
    if shard.size(0) > rows or not bool(shard.find(arriving[-1]).found_N.all()):
        raise RuntimeError(f"{shard.size(0)} rows in a table of at most {rows}")
    evicted = shard.stats()[0].evicted
    note = f"none new: {still.note()}; {evicted:,} evicted; 5 % new"
    name = "5 % new ids at a full budget over none new"
    return {name: moving.row(moving.ms / still.ms, note)}


def churned(*, scale: Scale) -> dict[str, Measured]:
    """The same find in a fresh table, there with half the ids missing, and in a worn one; D=32.

    By the device's time: a find is launched slower than it runs.
    """
    dim, n = 32, scale.call_ids
    clock = Clock(scale.device, scale.copy_bytes)
    slots = max(scale.slots // 8, 256)
    rows = slots * 3 // 4 - slots // 256
    fresh = make_shard(scale, (table(dim, slots // 2),))
    load(fresh, rows)
    draws = [_among(rows, n, scale) for _ in range(BATCHES)]
    whole = _find_times(clock, scale, fresh, draws)
    half = [index_N + rows * (index_N & 1) for index_N in draws]
    missing = _find_times(clock, scale, fresh, half)
    spec = table(dim, slots // 2, capacity_rows=rows, on_full="lru")
    worn = make_shard(scale, (spec,))
    load(worn, rows)
    steps = _churn(scale, worn, rows)
    # The latest ids are there; an eviction may drop a few more than necessary.
    last, span = rows + steps * scale.churn_ids, min(rows * 9 // 10, steps * scale.churn_ids)
    there = [last - 1 - index_N % span for index_N in draws]
    present = worn.find(groups(scrambled(there[0]))).found_N
    if float(present.double().mean()) < 0.99:
        raise RuntimeError(f"{float(present.double().mean()):.2%} of the latest ids are there")
    after = _find_times(clock, scale, worn, there)
    least = _device_ms(whole)
    shown = f"fresh: {rows_in(fresh)}, {least:.3f} ms"
    worn_now = f"worn: {rows_in(worn)}, after {steps:,} steps of {scale.churn_ids:,} new ids"
    return {
        "find after 10,000 steps of churn over fresh": after.row(
            _device_ms(after) / least, f"{shown}; {worn_now}"
        ),
        "find with half the ids missing over all there": missing.row(
            _device_ms(missing) / least, f"{shown}; half missing"
        ),
    }


def _churn(scale: Scale, shard: Shard, rows: int) -> int:
    """Insert new ids into the full table, step by step; how many steps were made."""
    n, began = scale.churn_ids, time.perf_counter()
    for number in range(scale.churn_steps):
        start = rows + number * n
        ids_N = scrambled(torch.arange(start, start + n, device=scale.device))
        ctx = StepContext(global_step=number, event_time_s=1 + number)
        shard.find_or_init(groups(ids_N), ctx=ctx).end()
        if number % 100 == 99:
            shard.check()
            if time.perf_counter() - began > scale.patience_s:
                return number + 1
    return scale.churn_steps


def _find_times(clock: Clock, scale: Scale, shard: Shard, indices: list[Tensor]) -> Times:
    calls = [groups(scrambled(index_N)) for index_N in indices]
    return clock.measure(lambda i: shard.find(calls[i % len(calls)]), scale.repeats)


def _device_ms(times: Times) -> float:
    """Of the interpreter, which has no device, its only time."""
    return times.ms if times.device_ms is None else times.device_ms


def growth(*, scale: Scale) -> dict[str, Measured]:
    """Steps by the clock, each alone, half of their ids new; nothing reserved ahead; SGD, D=8."""
    dim, new = 8, scale.grow_ids
    clock = Clock(scale.device, scale.copy_bytes)
    shard = make_shard(scale, (table(dim, 0),))
    load(shard, scale.grow_from)
    run: ShardStep | None = None
    took: list[float] = []
    host: list[float] = []
    began = time.perf_counter()
    sizes = range(scale.grow_from, scale.grow_to - new + 1, new)
    for number, size in enumerate(sizes):
        arrived = torch.arange(size, size + new, device=scale.device)
        index_N = torch.cat([arrived, _among(size, new, scale)])
        call = groups(scrambled(index_N[torch.randperm(2 * new, device=scale.device)]))
        run = run or ShardStep(shard, [call], dim)
        returned, done = clock.apart(lambda i, c=call, r=run: r.step(c, i), number)
        host.append(returned)
        took.append(done)
        if time.perf_counter() - began > scale.patience_s:
            break
    settled = took[5:] or took
    middle = percentile(settled, 50)
    last = sorted(settled)[-12:]
    note = (
        f"{len(settled)} steps to {shard.size(0):,} rows, p50 {middle:.3f} ms, p99 "
        f"{percentile(settled, 99):.3f}, longest {', '.join(f'{ms:.2f}' for ms in last)}; "
        f"p50 of the last tenth {median(settled[-max(len(settled) // 10, 1) :]):.3f}; p99 of the "
        f"host {percentile(host, 99):.3f}"
    )
    ours = percentile(settled, 99) / middle
    measured = Measured(ours=ours, host_ms=median(host), note=note)
    return {"p99/p50 of a step while growing": measured}


def _among(rows: int, ids: int, scale: Scale) -> Tensor:
    return torch.randint(0, rows, (ids,), device=scale.device)
