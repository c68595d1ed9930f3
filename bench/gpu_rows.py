"""Rows on one GPU: reads by handle and by id, initial values, pooled reads, and a plain copy.

    python bench/gpu_rows.py --json out.json [--quick] [--sweep]

Needs torch, Triton and the package, nothing else. `--sweep` also tries other block shapes for the
reads and prints each. Without a GPU (TRITON_INTERPRET=1) it only shows that it runs.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from harness import Case, Measured, as_row, table_lines, write_json
from shoal.ids import mix64, salt, to_signed
from shoal.kernels import rows as row_read
from shoal.kernels.index import new_entries, probe
from shoal.kernels.initial_values import initialise, settle
from shoal.kernels.pool import gather_pooled, pool_lines
from shoal.kernels.rows import gather
from shoal.kernels.tables import (
    CHUNK_BITS,
    CHUNK_CAPACITY,
    CHUNK_COUNTS,
    CHUNK_IDS,
    CHUNK_ROWS,
    CHUNK_SEEN,
    CHUNK_STATE,
    CHUNK_TABLE,
    CHUNK_VERSIONS,
    CHUNK_WEIGHTS,
    CHUNK_WORDS,
    COUNT_WORDS,
    FIRST_ROWS,
    TABLE_DIRECTORY,
    TABLE_ENTRIES,
    TABLE_MASK,
    TABLE_SALT,
    TABLE_STATE_BYTES,
    TABLE_WEIGHT_BYTES,
    TABLE_WORDS,
    CallGroups,
    RowForm,
    SegmentForm,
    ShardLayout,
)
from shoal.lookup import Output, Pool, PoolPlan, Slice
from shoal.rules.compressors import Float32
from shoal.rules.initializers import Normal, Uniform
from shoal.rules.optimizers import SGD

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
SCRATCH = {8: 15.1, 16: 12.0, 32: 8.8, 64: 5.0, 128: 2.64, 256: 1.37}
FOUND = {8: (5.5, 7.5), 16: (6.9, None), 32: (4.5, 5.5), 64: (3.3, 3.75), 128: (2.1, 2.4)}
SHAPES = ((2048, 2), (2048, 4), (4096, 4), (4096, 8), (8192, 4), (8192, 8))
FIND_SHAPES = ((16, 1), (32, 1), (64, 1), (32, 2), (64, 2), (128, 4))


@dataclass(frozen=True)
class Sizes:
    """table_bytes: weights of the tables read; positions: of one call, at most."""

    table_bytes: int
    positions: int
    copy_bytes: int
    bags: int
    tables: int
    rounds: int


FULL = Sizes(8 << 30, 1 << 23, 4 << 30, 65536, 26, 15)
QUICK = Sizes(1 << 30, 1 << 21, 1 << 30, 16384, 8, 5)
DRY = Sizes(1 << 16, 64, 1 << 16, 16, 2, 1)


def seconds(run: Callable[[], object], rounds: int) -> float:
    """Median seconds of one run; on a GPU by events, after two that do not count."""
    if not ON_GPU:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    times = []
    for turn in range(rounds + 2):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        run()
        last.record()
        torch.cuda.synchronize()
        if turn >= 2:
            times.append(first.elapsed_time(last) / 1e3)
    return statistics.median(times)


class Store:
    """Equal tables of up to `rows` float32 rows each, and an index at load 0.75."""

    def __init__(self, dim: int, rows: int, tables: int = 1, normal: bool = False) -> None:
        law = Normal(0.0, 0.1) if normal else Uniform()
        segment = SegmentForm(0, dim, 0, 0, 0, law, SGD(), Float32())
        self.form = RowForm(dim, 0, torch.float32, (segment,))
        capacities, room = [], 0
        while room < rows:
            capacities.append(min(FIRST_ROWS << len(capacities), CHUNK_ROWS))
            room += capacities[-1]
        self.rows, self.full = rows, len(capacities) > CHUNK_BITS - 8
        row_bytes = self.form.weight_bytes
        kinds = {CHUNK_WEIGHTS: row_bytes, CHUNK_IDS: 8}
        kinds |= dict.fromkeys((CHUNK_VERSIONS, CHUNK_SEEN, CHUNK_COUNTS), 4)
        self.memory = {
            kind: torch.zeros(tables * room * size // 4, dtype=torch.int32, device=DEVICE)
            for kind, size in kinds.items()
        }
        starts = torch.tensor([0, *capacities]).cumsum(0)[:-1]
        first = torch.cat([starts + table * room for table in range(tables)])
        self.chunks = len(capacities)
        chunks_WC = torch.zeros(CHUNK_WORDS, tables * self.chunks, dtype=torch.int64)
        for kind, size in kinds.items():
            chunks_WC[kind] = self.memory[kind].data_ptr() + first * size
        chunks_WC[CHUNK_STATE] = chunks_WC[CHUNK_WEIGHTS]
        chunks_WC[CHUNK_TABLE] = torch.arange(tables).repeat_interleave(self.chunks)
        chunks_WC[CHUNK_CAPACITY] = torch.tensor(capacities).repeat(tables)
        self.directory = torch.arange(tables * self.chunks, dtype=torch.int32, device=DEVICE).view(
            tables, self.chunks
        )
        slots = 1 << max((rows * 4 // 3 - 1).bit_length(), 3)
        self.entries = [new_entries(slots, DEVICE) for _ in range(tables)]
        tables_KT = torch.zeros(tables, TABLE_WORDS, dtype=torch.int64)
        tables_KT[:, TABLE_ENTRIES] = torch.tensor([e.data_ptr() for e in self.entries])
        tables_KT[:, TABLE_MASK] = slots - 1
        tables_KT[:, TABLE_SALT] = torch.tensor([to_signed(salt(f"t{t}")) for t in range(tables)])
        tables_KT[:, TABLE_DIRECTORY] = self.directory.data_ptr() + 4 * self.chunks * torch.arange(
            tables
        )
        tables_KT[:, TABLE_WEIGHT_BYTES] = row_bytes
        tables_KT[:, TABLE_STATE_BYTES] = 0
        counters_KC = torch.zeros(tables, COUNT_WORDS, dtype=torch.int64, device=DEVICE)
        self.layout = ShardLayout(tables_KT.to(DEVICE), counters_KC, chunks_WC.to(DEVICE))

    def ids(self, count: int) -> Tensor:
        """Ids of random rows, once inserted."""
        return mix64(torch.randint(0, self.rows, (count,), device=DEVICE))

    def insert(self) -> None:
        """Give the ids of all rows of all tables their rows; values are not written."""
        step = 1 << 24
        for table in range(len(self.entries)):
            for start in range(0, self.rows, step):
                stop = min(start + step, self.rows)
                ids_N = mix64(torch.arange(start, stop, device=DEVICE))
                handles_N = torch.empty(stop - start, dtype=torch.int32, device=DEVICE)
                probe(self.layout, call_of(ids_N, table), handles_N, None, None, insert=True)

    def handles(self, count: int) -> Tensor:
        """int32 handles of random rows of the first table's full chunks."""
        first = CHUNK_BITS - 8 if self.full else self.chunks - 1
        room = CHUNK_ROWS if self.full else FIRST_ROWS << first
        chunk = torch.randint(first, self.chunks, (count,), device=DEVICE)
        place = torch.randint(0, room, (count,), device=DEVICE)
        return ((chunk << CHUNK_BITS) | place).to(torch.int32)


def call_of(ids_N: Tensor, table: int) -> CallGroups:
    splits_G1 = torch.tensor([0, ids_N.numel()], device=DEVICE)
    return CallGroups(ids_N, splits_G1, torch.tensor([table], dtype=torch.int32, device=DEVICE))


class Bench:
    def __init__(self, sizes: Sizes, sweep: bool) -> None:
        self.sizes, self.sweep = sizes, sweep
        self.rows: list[dict[str, object]] = []
        source = torch.zeros(sizes.copy_bytes // 4, device=DEVICE)
        target = torch.empty_like(source)
        taken = seconds(lambda: target.copy_(source), sizes.rounds)
        self.copy_rate = 2 * sizes.copy_bytes / taken
        self.add(Case(name="copy", unit="GB/s", peer="-"), self.copy_rate / 1e9)

    def add(self, case: Case, value: float, rate: float | None = None) -> None:
        part = None if rate is None else rate / self.copy_rate
        self.rows.append(as_row(case, Measured(ours=value, limit_fraction=part)))
        print(table_lines(self.rows[-1:])[1], flush=True)

    def time(self, run: Callable[[], object]) -> float:
        return seconds(run, self.sizes.rounds)

    def run(self) -> None:
        for dim in SCRATCH:
            self.reads(dim)
            tidy()
        for dim in FOUND:
            self.finds(dim)
            tidy()
        for dim, normal in ((8, False), (64, False), (64, True)):
            self.first_values(dim, normal)
            tidy()
        self.no_news()
        self.pooled(64)

    def reads(self, dim: int) -> None:
        store = Store(dim, self.sizes.table_bytes // (4 * dim))
        count = self.sizes.positions
        handles_N, call = store.handles(count), call_of(torch.empty(0, dtype=torch.int64), 0)
        out = torch.empty(count, dim, device=DEVICE)

        def read() -> None:
            gather(store.layout, store.form, call, out, handles_N=handles_N)

        case = Case(
            name=f"gather, D={dim}", unit="G rows/s", peer="scratch gather", bar=0.9,
            peer_value=SCRATCH[dim],
        )  # fmt: skip
        taken = self.time(read)
        self.add(case, count / taken / 1e9, count * (8 * dim + 4) / taken)
        for tile, warps in SHAPES if self.sweep else ():
            block_d = row_read._shape(dim, False, True)[1]
            shape = max(min(tile // block_d, 1024), 8), block_d, warps
            print(f"  {shape}: {count / self.shaped(shape, read) / 1e9:.2f} G rows/s", flush=True)

    def finds(self, dim: int) -> None:
        bar, stretch = FOUND[dim]
        slots = 1 << (self.sizes.table_bytes // (4 * dim)).bit_length() - 1
        store = Store(dim, slots * 3 // 4)
        store.insert()
        count = self.sizes.positions
        call = call_of(store.ids(count), 0)
        found_N = torch.empty(count, dtype=torch.bool, device=DEVICE)
        handles_N = torch.empty(count, dtype=torch.int32, device=DEVICE)
        out = torch.empty(count, dim, device=DEVICE)

        def fused() -> None:
            gather(store.layout, store.form, call, out, found_N=found_N)

        def apart() -> None:
            probe(store.layout, call, handles_N, None, None, insert=False)
            gather(store.layout, store.form, call, out, handles_N=handles_N)

        case = Case(
            name=f"find + copy out, load 0.75, D={dim}", unit="G rows/s", peer="bar", bar=1.0,
            peer_value=bar, stretch=None if stretch is None else stretch / bar,
        )  # fmt: skip
        taken = self.time(fused)
        self.add(case, count / taken / 1e9, count * (8 * dim + 40) / taken)
        assert bool(found_N.all())
        two = Case(name=f"the same in two launches, D={dim}", unit="G rows/s", peer="-")
        self.add(two, count / self.time(apart) / 1e9)
        block_d = row_read._shape(dim, True, True)[1]
        for rows, warps in FIND_SHAPES if self.sweep else ():
            if rows * block_d <= 4096 * warps:
                taken = self.shaped((rows, block_d, warps), fused)
                print(f"  {(rows, warps)}: {count / taken / 1e9:.2f} G rows/s", flush=True)

    def shaped(self, shape: tuple[int, int, int], run: Callable[[], object]) -> float:
        kept = row_read._shape
        row_read._shape = lambda dim, find, light: shape
        try:
            return self.time(run)
        finally:
            row_read._shape = kept

    def first_values(self, dim: int, normal: bool) -> None:
        store = Store(dim, self.sizes.table_bytes // (8 * dim), normal=normal)
        store.insert()

        def write() -> None:
            initialise(store.layout, store.form, 0, store.rows, version=1, event_time_s=0)

        taken = self.time(write)
        law = "normal" if normal else "uniform"
        case = Case(name=f"first values, {law}, D={dim}", unit="G rows/s", peer="-")
        self.add(case, store.rows / taken / 1e9, store.rows * (4 * dim + 20) / taken)

    def no_news(self) -> None:
        for tables in (1, 1000 if ON_GPU else 3):
            store = Store(8, FIRST_ROWS, tables)
            host = torch.zeros(tables, COUNT_WORDS, dtype=torch.int64)
            host = host.pin_memory() if ON_GPU else host

            def step(store: Store = store) -> None:
                initialise(store.layout, store.form, 0, 1 << 20, version=1, event_time_s=0)

            def end(store: Store = store, host: Tensor = host) -> None:
                settle(store.layout, host)

            for name, run in (("first values of nothing", step), ("settle", end)):
                case = Case(name=f"{name}, {tables} tables", unit="us", peer="-", better="lower")
                self.add(case, self.time(lambda run=run: [run() for _ in range(20)]) * 1e6 / 20)

    def pooled(self, dim: int) -> None:
        tables, bags = self.sizes.tables, self.sizes.bags
        store = Store(dim, self.sizes.table_bytes // (4 * dim * tables), tables)
        pools = tuple(Pool("sum", (Slice(0, dim, 0, t * dim),)) for t in range(tables))
        plan = PoolPlan(pools, (Output(tables * dim),))
        lines = pool_lines(plan, [store.form] * tables, DEVICE)
        for length in (1, 8):
            count = tables * bags * length
            table = torch.arange(tables, device=DEVICE).repeat_interleave(bags * length)
            handles_N = store.handles(count) + (table * store.chunks << CHUNK_BITS).to(torch.int32)
            offsets_GB1 = torch.arange(0, count + 1, length, device=DEVICE)
            call = CallGroups(
                torch.empty(0, dtype=torch.int64, device=DEVICE),
                offsets_GB1[::bags].contiguous(),
                torch.arange(tables, dtype=torch.int32, device=DEVICE),
            )
            taken = self.time(
                lambda call=call, handles_N=handles_N, offsets_GB1=offsets_GB1: gather_pooled(
                    store.layout, lines, call, handles_N, offsets_GB1
                )
            )
            name = f"pooled, {tables} tables x {bags} bags of {length}, D={dim}"
            moved = count * (4 * dim + 4) + tables * bags * (4 * dim + 8)
            case = Case(name=name, unit="G rows/s", peer="-")
            self.add(case, count / taken / 1e9, moved / taken)


def tidy() -> None:
    gc.collect()
    if ON_GPU:
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--sweep", action="store_true")
    options = parser.parse_args()
    print(torch.cuda.get_device_name() if ON_GPU else "no GPU: a dry run")
    sizes = (QUICK if options.quick else FULL) if ON_GPU else DRY
    bench = Bench(sizes, options.sweep)
    bench.run()
    print("\n".join(table_lines(bench.rows)))
    if options.json:
        write_json(options.json, bench.rows, ("torch", "triton"))


if __name__ == "__main__":
    main()
