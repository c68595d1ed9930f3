"""Workers of the cases that are not rates: call overhead, tails, memory, many small tables."""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable

import torch
from torch import Tensor

from harness import Measured, Runner, interleave, median, percentile
from ids import to_ids
from limits_cpu import METADATA_BYTES, resident_bytes, resident_peak_bytes
from ours_cpu import (
    StepRun,
    bags,
    collection,
    loaded_shard,
    table_spec,
)
from peers_cpu import EmbeddingBagStep, FbgemmStep
from plan_cpu import BATCH_IDS, case_name
from shoal.embedding.collection import EmbeddingCollection
from shoal.embedding.layouts import Feature, Layout, LayoutSlice
from shoal.ragged import KeyedRagged
from shoal.table.cpu.shard import CpuShard
from shoal.table.facade import Table

__all__ = ["growth", "many_tables", "overhead", "resident", "tail", "trim_allocator"]

TABLES = 1_000
BAGS_A_TABLE = 65
SETTLE_STEPS = 5


def overhead(*, rows: int, calls: int) -> dict[str, Measured]:
    """Microseconds of one call of 64 ids from Python, and of the baselines' forward of 64 bags.

    The ceiling is for consecutive calls. In turns with the baselines caches are cold, and every
    side takes longer.
    """
    dim, n = 16, 64
    torch.set_num_threads(1)
    indices = [torch.randint(0, rows, (n,)) for _ in range(32)]
    offsets = torch.arange(n + 1)
    shard = loaded_shard(rows, dim)
    table = Table(shard.specs[0], shard=shard)
    ids = [to_ids(x) for x in indices]
    bag = EmbeddingBagStep(rows, dim, indices, "adagrad")
    fbgemm = FbgemmStep(rows, dim, indices)
    runners = [
        Runner(name="ours", run=lambda i: table.find(ids[i % 32])),
        Runner(name="fbgemm", run=lambda i: fbgemm.forward(indices[i % 32], offsets)),
        Runner(name="bag", run=lambda i: bag.forward(indices[i % 32], offsets)),
    ]
    with torch.no_grad():
        alone = interleave(runners[:1], batches=calls, passes=1, warmup=100)["ours"]
        seconds = interleave(runners, batches=calls, passes=1, warmup=100)
    micros = {name: 1e6 * median(values) for name, values in seconds.items()}
    name = "one lookup call of 64 ids"
    return {
        name: Measured(ours=1e6 * median(alone)),
        f"{name} vs FBGEMM": Measured(ours=micros["ours"], peer_value=micros["fbgemm"]),
        f"{name} vs EmbeddingBag": Measured(ours=micros["ours"], peer_value=micros["bag"]),
    }


def growth(*, start: int, stop: int, threads: int) -> dict[str, Measured]:
    """A table of `start` rows trained to `stop` rows: half of each step's ids are new.

    Nothing is reserved ahead. The note gives the same figure of a fixed copy, timed after each
    step: it shows the noise of the machine.
    """
    torch.set_num_threads(threads)
    dim, new = 16, BATCH_IDS // 2
    run = StepRun(loaded_shard(start, dim))
    run.use([to_ids(torch.randint(0, start, (BATCH_IDS,))) for _ in range(SETTLE_STEPS)])
    for i in range(SETTLE_STEPS):
        run.run(i)

    def batch(size: int) -> Tensor:
        index_N = torch.cat([torch.arange(size, size + new), torch.randint(0, size, (new,))])
        return to_ids(index_N[torch.randperm(BATCH_IDS)])

    sizes = range(start, max(stop, start + new + 1) - new, new)
    found = tail(sizes, lambda size: bags(batch(size)), run.step)
    name = case_name("p99/p50 of a step while growing", dim, None, threads)
    return {name: found}


def tail(
    turns: range, prepare: Callable[[int], KeyedRagged], step: Callable[[KeyedRagged], object]
) -> Measured:
    """p99 over p50 of `step`, one prepared batch a turn, and of a fixed copy."""
    source = torch.ones(1 << 20)
    target = torch.empty_like(source)
    seconds, control = [], []
    for turn in turns:
        prepared = prepare(turn)
        begin = time.perf_counter()
        step(prepared)
        end = time.perf_counter()
        target.copy_(source)
        control.append(time.perf_counter() - end)
        seconds.append(end - begin)
    middle = percentile(seconds, 50)
    unrest = percentile(control, 99) / percentile(control, 50)
    note = (
        f"{len(seconds)} steps, p50 {1e3 * middle:.1f} ms, longest {max(seconds) / middle:.1f} x; "
        f"p99/p50 of a fixed copy: {unrest:.1f}"
    )
    return Measured(ours=percentile(seconds, 99) / middle, note=note)


def resident(*, rows: int) -> dict[str, Measured]:
    """Resident memory a table adds to a fresh process, trained up from nothing, Adagrad D=16."""
    dim = 16
    warm = StepRun(loaded_shard(BATCH_IDS, dim))
    warm.use([to_ids(torch.arange(BATCH_IDS))])
    warm.run(0)
    del warm
    trim_allocator()
    before = resident_bytes()
    run = StepRun(None, collection(CpuShard((table_spec(dim),))))
    run.grad_BD = torch.randn(BATCH_IDS, dim)
    for begin in range(0, rows, BATCH_IDS):
        index_N = torch.arange(begin, min(begin + BATCH_IDS, rows))
        run.grad_BD = run.grad_BD[: index_N.numel()]
        run.step(bags(to_ids(index_N)))
    peak = resident_peak_bytes() - before
    trim_allocator()
    grown = resident_bytes() - before
    held = run.module.shard.size(0)
    if held != rows:
        raise RuntimeError(f"{held} rows after training {rows}")
    payload = rows * (4 * dim + 4 * dim + METADATA_BYTES)
    note = f"{grown / rows:.0f} bytes a row, payload {payload / rows:.0f}"
    return {
        "resident bytes over payload D=16 Adagrad": Measured(ours=grown / payload, note=note),
        "peak resident bytes over payload D=16 Adagrad": Measured(ours=peak / payload),
    }


def many_tables(
    *, rows_a_table: int, batches: int, passes: int, threads: int
) -> dict[str, Measured]:
    """1,000 features over 1,000 tables, concatenated, against one feature over one table.

    Both sides look up the same 65,000 ids a step, one a bag, and hold the same ids in all.
    """
    torch.set_num_threads(threads)
    dim = 16
    rows = TABLES * rows_a_table
    indices = [
        torch.randint(0, rows_a_table, (TABLES, BAGS_A_TABLE))
        + rows_a_table * torch.arange(TABLES).unsqueeze(1)
        for _ in range(batches)
    ]
    ids = [to_ids(x.reshape(-1)) for x in indices]
    one = StepRun(loaded_shard(rows, dim))
    one.use(ids)

    names = tuple(f"t{k}" for k in range(TABLES))
    specs = tuple(table_spec(dim, name=name) for name in names)
    features = tuple(Feature(name, name) for name in names)
    layout = Layout("all", "concat", tuple(LayoutSlice(name) for name in names))
    many = StepRun(
        None, EmbeddingCollection(specs, features, (layout,), shard=CpuShard(specs)), "all"
    )
    everything = to_ids(torch.arange(rows))
    many.use_bags([KeyedRagged(names, everything, torch.arange(rows + 1))])
    many.run(0)
    offsets = torch.arange(TABLES * BAGS_A_TABLE + 1)
    many.use_bags([KeyedRagged(names, ids_N, offsets) for ids_N in ids])

    found = {}
    for what in ("step", "lookup"):
        for run in (one, many):
            run.module.train(what == "step")
        runners = [
            Runner(name="peer", run=one.run if what == "step" else one.lookup),
            Runner(name="ours", run=many.run if what == "step" else many.lookup),
        ]
        seconds = interleave(runners, batches=batches, passes=passes)
        found[case_name(f"1,000 tables over one, {what}", dim, None, threads)] = Measured(
            ours=1e3 * median(seconds["ours"]), peer_value=1e3 * median(seconds["peer"])
        )
    return found


def trim_allocator() -> None:
    """Hand the C allocator's free memory back, so that resident memory is what tables hold."""
    gc.collect()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
