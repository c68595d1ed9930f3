"""Workers of the GPU cases that are rates: copy, find, insert, and steps of many tables."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from clock_gpu import Clock, Times
from harness import Measured, median
from limits_cpu import find_bytes, insert_bytes
from ours_gpu import (
    CHUNK_IDS,
    ModuleStep,
    ShardStep,
    check_step,
    groups,
    load,
    make_shard,
    power_law,
    rows_in,
    scrambled,
    table,
    tables_of,
)
from plan_gpu import DIMS, INSERT_DIMS, THREADS, Scale
from shoal.ragged import KeyedRagged
from shoal.table.shard import IdGroups, Shard, StepContext
from shoal.table.spec import HostRows

__all__ = ["copy", "find", "insert", "pooled", "step", "tier"]

BATCHES = 8
STEP_DIM = 128
POOLED_DIM = 64
LONGEST_BAG = 5


def copy(*, scale: Scale) -> dict[str, Measured]:
    """Bytes read plus written by a plain copy."""
    clock = Clock(scale.device, scale.copy_bytes)
    rate = clock.copy_bytes_per_s()
    return {"copy bandwidth": Measured(ours=rate / 1e9, note=f"{scale.copy_bytes >> 20} MiB")}


def find(*, scale: Scale) -> dict[str, Measured]:
    """Rows of known ids, uniformly drawn, from indices loaded to 0.75."""
    clock = Clock(scale.device, scale.copy_bytes)
    bandwidth = clock.copy_bytes_per_s()
    found = {}
    for dim in DIMS:
        # Half the slots promised gives that many slots under any policy up to 0.75.
        shard = make_shard(scale, (table(dim, scale.slots // 2),))
        load(shard, scale.loaded_rows)
        name = f"find and copy out, load 0.75, D={dim}"
        limit = bandwidth / find_bytes(dim) / 1e9
        times = _find_times(scale, clock, shard, scale.call_ids)
        rate = scale.call_ids / times.ms / 1e6
        found[name] = times.row(rate, rows_in(shard), limit_fraction=rate / limit)
        if dim == DIMS[0]:
            found[f"{name}, against HKV"] = found[name]
            times = _find_times(scale, clock, shard, 8 * scale.call_ids)
            large = 8 * scale.call_ids / times.ms / 1e6
            found[f"{name}, eight times as many ids a call"] = times.row(
                large, rows_in(shard), peer_value=rate, limit_fraction=large / limit
            )
            stats = shard.stats()[0]
            beside = (stats.bytes_index + stats.bytes_metadata) / stats.rows
            name = "index and metadata bytes a row at load 0.75"
            found[name] = Measured(ours=beside, note=rows_in(shard))
    return found


def _find_times(scale: Scale, clock: Clock, shard: Shard, ids: int) -> Times:
    calls = [groups(scrambled(_uniform(scale.loaded_rows, ids, scale))) for _ in range(BATCHES)]
    if not bool(shard.find(calls[0]).found_N.all()):
        raise RuntimeError("ids are missing from the loaded table")
    return clock.measure(lambda i: shard.find(calls[i % BATCHES]), scale.repeats)


def insert(*, scale: Scale) -> dict[str, Measured]:
    """New ids into a table with free rows, initial weights written; nothing is evicted."""
    clock = Clock(scale.device, scale.copy_bytes)
    bandwidth = clock.copy_bytes_per_s()
    n = scale.call_ids
    found = {}
    for dim in INSERT_DIMS:
        total = clock.calls(scale.repeats)
        shard = make_shard(scale, (table(dim, total * n),))
        calls = [
            groups(scrambled(torch.arange(i * n, (i + 1) * n, device=scale.device)))
            for i in range(total)
        ]
        ctx = StepContext()
        times = clock.measure(_insertion(shard, calls, ctx), scale.repeats)
        if shard.size(0) != total * n:
            raise RuntimeError(f"{shard.size(0)} rows after inserting {total * n}")
        rate = n / times.ms / 1e6
        limit = bandwidth / insert_bytes(dim, 0) / 1e9
        measured = times.row(rate, rows_in(shard), limit_fraction=rate / limit)
        found[f"insert new ids D={dim}"] = measured
        if dim == INSERT_DIMS[0]:
            found[f"insert new ids D={dim}, against HKV"] = measured
        del shard, calls
    return found


def _insertion(shard: Shard, calls: list[IdGroups], ctx: StepContext) -> Callable[[int], None]:
    return lambda i: shard.find_or_init(calls[i], ctx=ctx).end()


def step(*, scale: Scale, rule: str) -> dict[str, Measured]:
    """The big step: every id present, power-law ids, whole rows (one id a bag in modules)."""
    check_step(scale)
    clock = Clock(scale.device, scale.copy_bytes)
    bandwidth = clock.copy_bytes_per_s()
    count, n = scale.step_tables, scale.step_ids
    shard = make_shard(scale, tables_of(count, STEP_DIM, scale.step_rows, rule))
    load(shard, scale.step_rows)
    ids = _step_ids(scale)
    unique = _unique(ids[0], count)
    least_ms = 1e3 * _step_bytes(count * n, unique, rule) / bandwidth
    bare = ShardStep(shard, [groups(ids_N, count) for ids_N in ids], STEP_DIM)
    times = clock.measure(bare.run, scale.repeats)
    more = f"{unique:,} of {count * n:,} ids distinct, least {least_ms:.2f} ms"
    prefix = f"{rule} step, 10 tables,"
    found = {
        f"{prefix} {rest}": times.row(times.ms, more, limit_fraction=least_ms / times.ms)
        for rest in ("1.05 M ids, D=128", "against FBGEMM", "against dynamicemb")
    }
    keys = tuple(spec.name for spec in shard.specs)
    lengths = torch.ones(count * n, dtype=torch.int64)
    bags = [KeyedRagged.from_lengths(keys, x.cpu(), lengths).to(scale.device) for x in ids]
    modules = ModuleStep(shard, bags, STEP_DIM)
    for threads, how in THREADS.items():
        with torch.autograd.set_multithreading_enabled(threads):
            times = clock.measure(modules.run, scale.repeats)
        name = f"{prefix} through modules{how}"
        found[name] = times.row(times.ms, limit_fraction=least_ms / times.ms)
        found[f"{name}, host"] = times.row(times.host_ms)
    return found


def _step_ids(scale: Scale) -> list[Tensor]:
    shape = (scale.step_tables, scale.step_ids)
    return [
        scrambled(power_law(scale.step_rows, shape, scale.device)).reshape(-1)
        for _ in range(BATCHES)
    ]


def _unique(ids_N: Tensor, tables: int) -> int:
    return sum(part.unique().numel() for part in ids_N.view(tables, -1))


def _step_bytes(ids: int, unique: int, rule: str) -> float:
    """Least bytes: ids, distinct rows read, all rows written; gradients read, rows changed."""
    row = 4 * STEP_DIM
    forward = 8 * ids + row * unique + row * ids
    state = 2 * row if rule == "Adam" else 0
    return forward + row * ids + 2 * unique * (row + state)


def tier(*, scale: Scale, cache: str) -> dict[str, Measured]:
    """The big SGD step with rows in host memory, a part of them cached on the device."""
    name = f"SGD step, rows in host memory, {cache}"
    clock = Clock(scale.device, scale.copy_bytes)
    count = scale.step_tables
    payload = count * scale.step_rows * 4 * STEP_DIM
    specs = tables_of(count, STEP_DIM, scale.step_rows, "SGD")
    cache_bytes = 0 if cache == "no cache" else int(0.8 * payload)
    shard = make_shard(scale, specs, HostRows(cache_bytes=cache_bytes))
    load(shard, scale.step_rows)
    batches = [groups(ids_N, count) for ids_N in _step_ids(scale)]
    run = ShardStep(shard, batches, STEP_DIM)
    times = clock.measure(run.run, max(2, min(scale.repeats, 30)))
    return {name: times.row(times.ms, f"cache {cache_bytes / 1e9:.2f} of {payload / 1e9:.2f} GB")}


def pooled(*, scale: Scale) -> dict[str, Measured]:
    """26 features of 1 to 5 ids, summed, Adam; torch's sparse modules take turns.

    Both sides are timed by the clock, each step alone: neither hides its launches behind the
    other's work.
    """
    clock = Clock(scale.device, scale.copy_bytes)
    count, size, dim = scale.bag_tables, scale.bag_batch, POOLED_DIM
    shard = make_shard(scale, tables_of(count, dim, scale.bag_rows, "Adam"))
    load(shard, scale.bag_rows)
    keys = tuple(spec.name for spec in shard.specs)
    generator = torch.Generator().manual_seed(1)
    bags, indices = [], []
    for _ in range(3):
        lengths = torch.randint(1, LONGEST_BAG + 1, (count * size,), generator=generator)
        index_N = power_law(scale.bag_rows, (int(lengths.sum()),), scale.device)
        batch = KeyedRagged.from_lengths(keys, index_N.cpu(), lengths).to(scale.device)
        indices.append(batch)
        hashed = KeyedRagged.from_lengths(keys, scrambled(index_N).cpu(), lengths)
        bags.append(hashed.to(scale.device))
    ours = ModuleStep(shard, bags, dim)
    peer = _SparseBags(scale, indices)
    seconds: dict[str, list[float]] = {"ours": [], "peer": []}
    runs: dict[str, Callable[[int], object]] = {"ours": ours.run, "peer": peer.run}
    turns = max(2, min(scale.repeats, 30))
    for turn in range(-3, turns):
        order = list(runs) if turn % 2 == 0 else list(reversed(runs))
        for name in order:
            took = clock.once(runs[name], turn % 3)
            if turn >= 0:
                seconds[name].append(took)
    events = clock.measure(ours.run, turns)
    note = f"{bags[0].values_N.numel():,} ids; both alone; ours"
    name = "Adam step, 26 tables, batch 65,536, pooled, D=64"
    figures = {who: median(values) for who, values in seconds.items()}
    return {name: events.row(figures["ours"], note, peer_value=figures["peer"])}


class _SparseBags:
    """One `nn.EmbeddingBag(sparse=True)` a feature and one `SparseAdam` over all of them."""

    def __init__(self, scale: Scale, batches: list[KeyedRagged]) -> None:
        dim, device = POOLED_DIM, scale.device
        form = {"mode": "sum", "sparse": True, "include_last_offset": True, "device": device}
        self.bags = nn.ModuleList(
            nn.EmbeddingBag(scale.bag_rows, dim, **form) for _ in range(scale.bag_tables)
        )
        self.optimizer = torch.optim.SparseAdam(list(self.bags.parameters()), lr=0.001)
        self.grad_BD = 1e-3 * torch.randn(scale.bag_batch, dim, device=device)
        self.inputs = [
            [(batch[key].values, batch[key].offsets_B1) for key in batch.keys] for batch in batches
        ]

    def run(self, number: int) -> None:
        self.optimizer.zero_grad()
        outputs = [
            bag(values, offsets_B1)
            for bag, (values, offsets_B1) in zip(self.bags, self.inputs[number], strict=True)
        ]
        torch.autograd.backward(outputs, [self.grad_BD] * len(outputs))
        self.optimizer.step()


def _uniform(rows: int, ids: int, scale: Scale) -> Tensor:
    parts = [
        torch.randint(0, rows, (min(CHUNK_IDS, ids - begin),), device=scale.device)
        for begin in range(0, ids, CHUNK_IDS)
    ]
    return torch.cat(parts)
