"""Workers of the cases next to throughput: eviction, saving, freed memory, missing ids, churn."""

from __future__ import annotations

import threading

import torch

from harness import Measured, Runner, interleave, median
from ids import to_ids
from limits_cpu import resident_bytes
from ours_cpu import FindRun, StepRun, assign, bags, loaded_shard, table_spec
from plan_cpu import BATCH_IDS
from shoal.ragged import KeyedRagged
from shoal.table.cpu.shard import CpuShard
from work_growth import tail, trim_allocator

__all__ = ["churned", "evicting", "given_back", "half_missing", "saving"]

DIM = 16
THREADS = 2
FIND_BATCHES = 21


def evicting(*, rows: int, steps: int) -> dict[str, Measured]:
    """A table at its budget that evicts the least recently used; half of each step's ids are new.

    Old ids are drawn from the newest half of those seen, so most are still there.
    """
    torch.set_num_threads(THREADS)
    budget = max(rows, 4 * BATCH_IDS)
    shard = CpuShard((table_spec(DIM, capacity_rows=budget, on_full="lru"),))
    assign(shard, torch.arange(budget))
    run = StepRun(shard)
    run.grad_BD = torch.randn(BATCH_IDS, DIM)
    new = BATCH_IDS // 2
    clock = iter(range(1, steps + 2))

    def prepare(size: int) -> KeyedRagged:
        old = torch.randint(size - budget // 2, size, (new,))
        return bags(to_ids(torch.cat([torch.arange(size, size + new), old])))

    def step(batch: KeyedRagged) -> None:
        run.step(batch, event_time_s=next(clock))

    turns = range(budget, budget + steps * new, new)
    return {"p99/p50 of a step while evicting D=16": tail(turns, prepare, step)}


def saving(*, rows: int, steps: int) -> dict[str, Measured]:
    """Steps on known ids while another thread exports the table over and over."""
    torch.set_num_threads(THREADS)
    run = StepRun(loaded_shard(rows, DIM))
    run.grad_BD = torch.randn(BATCH_IDS, DIM)
    done = threading.Event()
    exports = []

    def export() -> None:
        while not done.is_set():
            exports.append(run.module.shard.export(0).ids.numel())

    saver = threading.Thread(target=export)
    saver.start()
    try:
        found = tail(
            range(steps), lambda _: bags(to_ids(torch.randint(0, rows, (BATCH_IDS,)))), run.step
        )
    finally:
        done.set()
        saver.join()
    note = f"{found.note}; {len(exports)} exports of {rows} rows"
    return {"p99/p50 of a step while saving D=16": Measured(ours=found.ours, note=note)}


def given_back(*, rows: int, steps: int) -> dict[str, Measured]:
    """Nine tenths of the rows expire at once; the part of their memory the process loses."""
    del steps
    torch.set_num_threads(THREADS)
    rows *= 4
    shard = CpuShard((table_spec(DIM, ttl_s=10),))
    assign(shard, torch.arange(BATCH_IDS))
    trim_allocator()
    before = resident_bytes()
    assign(shard, torch.arange(BATCH_IDS, rows))
    assign(shard, torch.arange(0, rows, 10), event_time_s=100)
    trim_allocator()
    full = resident_bytes()
    dropped = shard.evict(now_s=100)
    trim_allocator()
    part = (full - resident_bytes()) / (full - before)
    note = f"{dropped} of {rows} rows expired"
    name = "resident bytes given back after mass expiry D=16"
    return {name: Measured(ours=max(part, 0.0), note=note)}


def half_missing(*, rows: int, steps: int) -> dict[str, Measured]:
    """Batches in which every second id has no row, against batches that are all found."""
    del steps
    torch.set_num_threads(THREADS)
    shard = loaded_shard(rows, DIM)
    present, absent = FindRun(shard), FindRun(shard)
    indices = [torch.randint(0, rows, (BATCH_IDS,)) for _ in range(FIND_BATCHES)]
    present.use([to_ids(x) for x in indices])
    for x in indices:
        x[::2] += rows
    absent.use([to_ids(x) for x in indices], complete=False)
    return {"find with half the ids missing D=16": _compare(absent, present)}


def churned(*, rows: int, steps: int) -> dict[str, Measured]:
    """A table whose rows were replaced twenty times over by expiry, against a fresh one."""
    del steps
    torch.set_num_threads(THREADS)
    old = CpuShard((table_spec(DIM, ttl_s=3),))
    rounds = 40
    part = max(rows // 2, 1)
    for turn in range(rounds):
        assign(old, torch.arange(turn * part, (turn + 1) * part), event_time_s=turn)
        old.evict(now_s=turn + 1)
    first, last = (rounds - 2) * part, rounds * part
    fresh = CpuShard((table_spec(DIM),))
    assign(fresh, torch.arange(first, last))
    runs = FindRun(old), FindRun(fresh)
    ids = [to_ids(torch.randint(first, last, (BATCH_IDS,))) for _ in range(FIND_BATCHES)]
    for run in runs:
        run.use(ids)
    found = _compare(*runs)
    note = f"{old.size(0)} rows after {rounds} rounds of {part} in, {part} out"
    return {
        "find after long churn D=16": Measured(
            ours=found.ours, peer_value=found.peer_value, note=note
        )
    }


def _compare(ours: FindRun, peer: FindRun) -> Measured:
    runners = [Runner(name="ours", run=ours.run), Runner(name="peer", run=peer.run)]
    seconds = interleave(runners, batches=FIND_BATCHES, passes=4)
    return Measured(
        ours=BATCH_IDS / median(seconds["ours"]) / 1e6,
        peer_value=BATCH_IDS / median(seconds["peer"]) / 1e6,
    )
