"""One optimizer step of device rows, launch by launch, and the copy bandwidth.

    python bench/gpu_step.py --json out.json [--quick] [--sweep]

10 tables, 1,048,570 power-law lookups (about 330,000 rows), D=128 float32, one gradient row per
lookup; SGD and Adam. Needs torch, Triton and the package, no index: handles are drawn directly.
`--sweep` also tries other tile shapes and prints each. Without a GPU (TRITON_INTERPRET=1) it only
shows that it runs.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from harness import Case, Measured, as_row, table_lines, write_json
from shoal.kernels import step_tiles
from shoal.kernels.gradients import Runs, Sources, per_position, runs_of, sources_of
from shoal.kernels.step import apply
from shoal.kernels.step_sums import add_pieces
from shoal.kernels.step_tiles import FormCall, Stamp
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
    TABLE_STATE_BYTES,
    TABLE_WEIGHT_BYTES,
    TABLE_WORDS,
    RowForm,
    SegmentForm,
    ShardLayout,
)
from shoal.rules.compressors import Float32
from shoal.rules.initializers import Constant
from shoal.rules.optimizers import SGD, Adam, Optimizer

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
ALPHA = 1.05
BATCHES = 4
# Targets for runs, addresses and step together, ms; the floors are the bytes of peers.md.
AIMS = {"sgd": 0.36, "adam": 0.60}
LAUNCHES = ("_list_runs", "_write_sources", "_add_pieces", "_step")
TILE_BYTES, WARPS, PROGRAMS = (2048, 4096, 8192), (1, 2, 4), (16, 64)


@dataclass(frozen=True)
class Sizes:
    """lookups: per table; rows: that ids are drawn from, per table; repeats: of each timing."""

    tables: int
    lookups: int
    rows: int
    dim: int
    copy_bytes: int
    repeats: int


FULL = Sizes(10, 104_857, 1_000_000, 128, 4 << 30, 40)
QUICK = Sizes(10, 104_857, 1_000_000, 128, 1 << 30, 8)
DRY = Sizes(2, 60, 100, 8, 1 << 16, 1)


def milliseconds(run: Callable[[int], object], repeats: int) -> float:
    """Median time of a call, batches in turn, host and device together; each call waited for."""
    times = []
    for turn in range(repeats + 3):
        if ON_GPU:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run(turn % BATCHES)
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end))
        else:
            start = time.perf_counter()
            run(turn % BATCHES)
            times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times[3:])


def streamed(run: Callable[[int], object], repeats: int) -> float:
    """Milliseconds of a call among many that follow one another without a wait."""
    if not ON_GPU:
        return milliseconds(run, repeats)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    for turn in range(repeats):
        run(turn % BATCHES)
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / repeats


def by_launch(run: Callable[[int], object], repeats: int) -> dict[str, float]:
    """Device milliseconds of a call by kernel; those of torch together under "torch"."""
    if not ON_GPU:
        return {}
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for turn in range(repeats):
            run(turn % BATCHES)
        torch.cuda.synchronize()
    spent: dict[str, float] = dict.fromkeys((*LAUNCHES, "torch"), 0.0)
    for event in profile.key_averages():
        name = event.key if event.key in LAUNCHES else "torch"
        spent[name] += event.self_device_time_total / 1e3 / repeats
    return spent


def copy_bandwidth(size: int, repeats: int) -> float:
    """Bytes a second that a copy reads and writes."""
    source = torch.ones(size // 8, device=DEVICE)
    target = torch.empty_like(source)
    taken = milliseconds(lambda _: target.copy_(source), max(repeats // 2, 1))
    return 2 * source.nbytes / taken * 1e3


def drawn_rows(sizes: Sizes) -> list[Tensor]:
    """Row numbers per batch, int64 [tables, lookups]: numbered as ids first appeared."""
    shape = (sizes.tables, BATCHES * sizes.lookups)
    uniform = torch.rand(shape, dtype=torch.float64, device=DEVICE)
    power = 1 - ALPHA
    rank = ((float(sizes.rows) ** power - 1) * uniform + 1) ** (1 / power)
    rank = rank.floor().long().clamp(1, sizes.rows) - 1
    numbered = []
    for line in rank:
        _, inverse = torch.unique(line, return_inverse=True)
        at = torch.arange(len(line), device=DEVICE)
        first = torch.full((int(inverse.max()) + 1,), len(line), device=DEVICE)
        first.scatter_reduce_(0, inverse, at, "amin")
        numbered.append(first.argsort().argsort()[inverse])
    return list(torch.stack(numbered).chunk(BATCHES, dim=1))


class Store:
    """Tables of one form in device memory; chunks of the tables take turns."""

    def __init__(self, sizes: Sizes, rule: Optimizer, most_rows: int) -> None:
        width = rule.state_width(sizes.dim)
        segment = SegmentForm(0, sizes.dim, 0, width, 0, Constant(0.0), rule, Float32())
        self.form = RowForm(sizes.dim, width, torch.float32, (segment,))
        per_table = -(-most_rows // CHUNK_ROWS)
        chunks = per_table * sizes.tables
        kinds = {
            CHUNK_WEIGHTS: self.form.weight_bytes,
            CHUNK_STATE: self.form.state_bytes,
            CHUNK_IDS: 8,
            CHUNK_VERSIONS: 4,
            CHUNK_SEEN: 4,
            CHUNK_COUNTS: 4,
        }
        number = torch.arange(chunks)
        chunks_WC = torch.zeros(CHUNK_WORDS, chunks, dtype=torch.int64)
        self.memory = {}
        for kind, size in kinds.items():
            words = chunks * CHUNK_ROWS * size // 4
            self.memory[kind] = torch.zeros(words, dtype=torch.int32, device=DEVICE)
            chunks_WC[kind] = self.memory[kind].data_ptr() + number * CHUNK_ROWS * size
        chunks_WC[CHUNK_TABLE], chunks_WC[CHUNK_CAPACITY] = number % sizes.tables, CHUNK_ROWS
        tables_KT = torch.zeros(sizes.tables, TABLE_WORDS, dtype=torch.int64)
        tables_KT[:, TABLE_WEIGHT_BYTES] = self.form.weight_bytes
        tables_KT[:, TABLE_STATE_BYTES] = self.form.state_bytes
        counters_KC = torch.zeros(sizes.tables, COUNT_WORDS, dtype=torch.int64)
        self.layout = ShardLayout(*(t.to(DEVICE) for t in (tables_KT, counters_KC, chunks_WC)))
        self.rates_KR = torch.full((sizes.tables, 1), 0.01, dtype=torch.float64, device=DEVICE)
        table = torch.arange(sizes.tables, device=DEVICE)[:, None]
        self.handles: Callable[[Tensor], Tensor] = lambda rows: (
            ((rows // CHUNK_ROWS * sizes.tables + table) << CHUNK_BITS) + rows % CHUNK_ROWS
        ).to(torch.int32).flatten()  # fmt: skip

    @property
    def weights(self) -> Tensor:
        """float32 [all rows, D]; a handle is a row number here."""
        return self.memory[CHUNK_WEIGHTS].view(torch.float32).view(-1, self.form.dim)


class Contender:
    """The step of one rule on drawn batches."""

    def __init__(self, sizes: Sizes, rule: Optimizer, batches: list[Tensor]) -> None:
        self.store = Store(sizes, rule, int(max(batch.max() for batch in batches)) + 1)
        self.handles = [self.store.handles(batch) for batch in batches]
        self.grads = [
            torch.randn(sizes.lookups, sizes.dim, device=DEVICE) for _ in range(sizes.tables)
        ]
        self.runs = [runs_of(handles) for handles in self.handles]
        self.sources = [self.source(i) for i in range(BATCHES)]
        self.stamp = Stamp(version=2, event_time_s=9, global_step=0)

    def source(self, i: int, runs: Runs | None = None) -> Sources:
        return sources_of(self.runs[i] if runs is None else runs, [per_position(self.grads)])

    def step(self, runs: Runs, sources: Sources) -> None:
        store = self.store
        apply(store.layout, [store.form], runs, sources, store.rates_KR, self.stamp)

    def parts(self) -> dict[str, Callable[[int], object]]:
        """The timed functions, by name; each takes the number of a batch."""
        form = self.store.form
        return {
            "sort": lambda i: torch.sort(self.handles[i], stable=True),
            "runs, sort included": lambda i: runs_of(self.handles[i]),
            "addresses": self.source,
            "pieces": lambda i: add_pieces(FormCall(0, form, self.runs[i], self.sources[i])),
            "step, pieces included": lambda i: self.step(self.runs[i], self.sources[i]),
            "apply (addresses, pieces, step)": lambda i: self.step(self.runs[i], self.source(i)),
            "all": self.whole,
        }

    def whole(self, i: int) -> None:
        runs = runs_of(self.handles[i])
        self.step(runs, self.source(i, runs))

    def unique(self) -> int:
        return int(self.runs[0].cursors_FW[0, :2].sum())

    def moved_bytes(self) -> int:
        """What a step must move: gradients once, rows and their state twice."""
        form = self.store.form
        n = self.handles[0].numel()
        return n * form.weight_bytes + 2 * self.unique() * (form.weight_bytes + form.state_bytes)

    def check(self) -> None:
        """Check an SGD step of the first batch against float64."""
        weights, handles = self.store.weights, self.handles[0].long()
        weights.normal_(std=0.01)
        chosen, inverse = torch.unique(handles, return_inverse=True)
        want = weights[chosen].double()
        want.index_add_(0, inverse, torch.cat(self.grads).double(), alpha=-0.01)
        self.whole(0)
        gap = (weights[chosen].double() - want).abs().max().item()
        print(f"SGD step against float64: largest gap {gap:.2e}")
        assert gap < 1e-4, gap


def rows_of(
    name: str, contender: Contender, bandwidth: float, repeats: int
) -> Iterator[tuple[Case, Measured]]:
    """Cases of one rule: each part alone, then the device time of each launch."""
    floor_ms = contender.moved_bytes() / bandwidth * 1e3
    for part, run in contender.parts().items():
        aimed = part.startswith("apply")
        case = Case(
            name=f"{name}: {part}", unit="ms", better="lower",
            peer="aim" if aimed else "bytes of the step at copy speed",
            peer_value=AIMS[name] if aimed else floor_ms, bar=1.0 if aimed else None,
        )  # fmt: skip
        taken = milliseconds(run, repeats)
        follows = streamed(run, repeats)
        fraction = floor_ms / follows if "step" in part or part == "all" else None
        note = f"{follows:.3f} ms among calls without a wait"
        yield case, Measured(ours=taken, limit_fraction=fraction, note=note)
    for launch, spent in by_launch(contender.whole, repeats).items():
        case = Case(
            name=f"{name}: device time of {launch}", unit="ms", better="lower",
            peer="bytes of the step at copy speed", peer_value=floor_ms,
        )  # fmt: skip
        yield case, Measured(ours=spent)


def sweep(name: str, contender: Contender, repeats: int) -> None:
    """Print device times of the step for other tile shapes, best first."""
    usual = step_tiles._TILE_BYTES, step_tiles._WARPS, step_tiles._PROGRAMS
    found = []
    for shape in itertools.product(TILE_BYTES, WARPS, PROGRAMS):
        step_tiles._TILE_BYTES, step_tiles._WARPS, step_tiles._PROGRAMS = shape
        step_tiles.forget_forms()
        for i in range(BATCHES):
            contender.whole(i)
        spent = by_launch(contender.whole, repeats)
        found.append((spent.get("_step", 0.0), spent.get("_add_pieces", 0.0), shape))
    step_tiles._TILE_BYTES, step_tiles._WARPS, step_tiles._PROGRAMS = usual
    step_tiles.forget_forms()
    for step_ms, pieces_ms, shape in sorted(found):
        print(f"{name} tile bytes, warps, programs {shape}: step {step_ms:.4f}, "
              f"pieces {pieces_ms:.4f} ms")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--sweep", action="store_true")
    options = parser.parse_args()
    sizes = (QUICK if options.quick else FULL) if ON_GPU else DRY
    torch.manual_seed(0)
    print(torch.cuda.get_device_name() if ON_GPU else "interpreted")
    bandwidth = copy_bandwidth(sizes.copy_bytes, sizes.repeats)
    print(f"copy: {bandwidth / 1e9:.0f} GB/s")
    batches = drawn_rows(sizes)
    rows = []
    for name, rule in (("sgd", SGD()), ("adam", Adam())):
        contender = Contender(sizes, rule, batches)
        if name == "sgd":
            print(f"{contender.handles[0].numel():,} lookups, {contender.unique():,} rows")
            contender.check()
        measured = rows_of(name, contender, bandwidth, sizes.repeats)
        rows += [as_row(case, value) for case, value in measured]
        if options.sweep and ON_GPU:
            sweep(name, contender, max(sizes.repeats // 4, 1))
        del contender
    print("\n".join(table_lines(rows)))
    if options.json:
        write_json(options.json, rows, ("torch", "triton", "numpy", "shoal"))


if __name__ == "__main__":
    main()
