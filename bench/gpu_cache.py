"""Transfer rates of rows between a GPU's cache and host memory: only kernels, no shard.

`python bench/gpu_cache.py --json out.json` on a machine with a GPU. Baselines are pinned copies of
the same bytes, contiguous and one way (cudaMemcpy). Rows are scattered, and swaps go both ways at
once. `--sweep` also tries other numbers of programs and tile sizes. Without a GPU, `--quick` runs
it interpreted on a few rows, to show that it runs.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from harness import Case, Measured, as_row, median, table_lines, write_json

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

from shoal.kernels import cache as row_moves  # noqa: E402
from shoal.kernels.gradients import Runs, runs_of  # noqa: E402
from shoal.kernels.tables import (  # noqa: E402
    CHUNK_BITS,
    CHUNK_ROWS,
    CHUNK_STATE,
    CHUNK_TABLE,
    CHUNK_WEIGHTS,
    CHUNK_WORDS,
    COUNT_WORDS,
    TABLE_WORDS,
    RowForm,
    ShardLayout,
)
from shoal.table.cuda.cache import CachedForm, RowCache  # noqa: E402
from shoal.table.cuda.memory import PageLocked  # noqa: E402

ROUNDS = 9
# (name, D, S): the step of the speed table with SGD and with Adam, and narrow rows
FORMS = (("D=128", 128, 0), ("D=128 Adam", 128, 256), ("D=16", 16, 0))
SETTINGS = [(1, 8192), (2, 4096), (2, 8192), (2, 16384), (4, 8192), (8, 8192)]


def _cases() -> Iterator[Case]:
    yield Case(name="copy, host to device", unit="GB/s", peer="none")
    yield Case(name="copy, device to host", unit="GB/s", peer="none")
    for name, _, state in FORMS:
        bar = None if name == "D=16" or state else 0.85
        yield Case(name=f"rows in, {name}", unit="GB/s", peer="copy in", bar=bar, stretch=0.95)
        yield Case(name=f"rows out, {name}", unit="GB/s", peer="copy out", bar=bar, stretch=0.95)
        yield Case(name=f"swap, {name}, one way", unit="GB/s", peer="copy in", bar=bar)
        yield Case(name=f"admission, all hits, {name}", unit="ms", peer="none", better="lower")


class Host:
    """One table of rows in pinned chunks, like the memory of a tiered shard."""

    def __init__(self, form: RowForm, rows: int) -> None:
        self.chunks = 0
        self._columns_WC = np.zeros((CHUNK_WORDS, 16 + 4 * (rows // CHUNK_ROWS + 1)), np.int64)
        self._tables_KT = torch.zeros(1, TABLE_WORDS, dtype=torch.int64, device=DEVICE)
        self._counters_KC = torch.zeros(1, COUNT_WORDS, dtype=torch.int64, device=DEVICE)
        memory = PageLocked(DEVICE)
        self.kept: list[Tensor] = []
        handles = []
        for start in range(0, rows, CHUNK_ROWS):
            size = min(CHUNK_ROWS, rows - start)
            parts = memory.take(size * form.weight_bytes), memory.take(size * form.state_bytes)
            self.kept.extend(part.zero_() for part in parts)
            column = np.zeros((CHUNK_WORDS, 1), dtype=np.int64)
            column[CHUNK_WEIGHTS, 0], column[CHUNK_STATE, 0] = (p.data_ptr() for p in parts)
            column[CHUNK_TABLE] = 0
            chunk = self._added(column)
            handles.append(torch.arange(size, dtype=torch.int32) + (chunk << CHUNK_BITS))
        self.handles = torch.cat(handles).to(DEVICE)
        self._send()

    @property
    def layout(self) -> ShardLayout:
        return self._layout

    def lend(self, columns_WC: np.ndarray) -> int:
        first = self._added(columns_WC)
        self._send()
        return first

    def _added(self, columns_WC: np.ndarray) -> int:
        first = self.chunks
        self.chunks += columns_WC.shape[1]
        self._columns_WC[:, first : self.chunks] = columns_WC
        return first

    def _send(self) -> None:
        columns_WC = torch.from_numpy(self._columns_WC.copy()).to(DEVICE)
        self._layout = ShardLayout(self._tables_KT, self._counters_KC, columns_WC)


def timed(work: Callable[[], object], before: Callable[[], object] | None = None) -> float:
    """Median time in seconds of single runs; `before` runs untimed ahead of each."""
    times = []
    for _ in range(ROUNDS + 2):
        if before is not None:
            before()
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return median(times[2:])


def copies(size: int) -> tuple[float, float]:
    """GB/s of pinned copies to and from the device."""
    host = torch.zeros(size, dtype=torch.uint8, pin_memory=DEVICE.type == "cuda")
    there = torch.zeros(size, dtype=torch.uint8, device=DEVICE)
    into = timed(lambda: there.copy_(host, non_blocking=True))
    out = timed(lambda: host.copy_(there, non_blocking=True))
    return size / into / 1e9, size / out / 1e9


def rows_of(name: str, dim: int, state: int, rows: int) -> Iterator[tuple[str, float, float]]:
    """Case, value, and bytes that crossed one way, of one row form; batches of `rows` rows."""
    form = RowForm(dim, state, torch.float32, ())
    cached = CachedForm(form, 0, 1.0)
    host = Host(form, 2 * rows)
    size = rows * cached.row_bytes
    cache = RowCache(host, [cached], cache_bytes=size, policy="lru", device=DEVICE)
    shuffled = host.handles[torch.randperm(2 * rows, device=DEVICE)]
    batches = [runs_of(part.contiguous()) for part in shuffled.split(rows)]
    turn = [0]

    def admit(runs: Runs) -> None:
        cache.admit(runs, None, most_F=[rows])

    def swap() -> None:
        turn[0] = 1 - turn[0]
        admit(batches[turn[0]])

    yield f"rows in, {name}", timed(lambda: admit(batches[0]), cache.empty), size
    yield f"admission, all hits, {name}", timed(lambda: admit(batches[0])), 0
    yield f"rows out, {name}", timed(cache.flush, lambda: cache.written(batches[0])), size
    turn[0] = 0
    yield f"swap, {name}, one way", timed(swap, lambda: cache.written(batches[turn[0]])), size


def measured(rows: int) -> dict[str, Measured]:
    size = rows * 512
    into, out = copies(size)
    found = {
        "copy, host to device": Measured(ours=into),
        "copy, device to host": Measured(ours=out),
    }
    for form in FORMS:
        for case, seconds, moved in rows_of(*form, rows):
            if moved == 0:
                found[case] = Measured(ours=1e3 * seconds)
                continue
            rate, peer = moved / seconds / 1e9, out if case.startswith("rows out") else into
            note = f"{moved / 1e6:.0f} MB in {1e3 * seconds:.2f} ms"
            found[case] = Measured(ours=rate, peer_value=peer, note=note)
    return found


def sweep(rows: int) -> None:
    """Print the rates of each number of programs on a multiprocessor and each tile size."""
    for programs, tile in SETTINGS:
        row_moves._PROGRAMS, row_moves._TILE_BYTES = programs, tile
        for form in FORMS:
            line = [f"programs {programs} tile {tile:5} {form[0]:10}"]
            for case, seconds, moved in rows_of(*form, rows):
                if moved:
                    line.append(f"{case.split(',')[0]} {moved / seconds / 1e9:.1f}")
            print("; ".join(line), "GB/s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="a few rows: shows that it runs")
    parser.add_argument("--sweep", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    rows = 100 if options.quick else 330_000
    found = measured(rows)
    lines = [as_row(case, found.get(case.name)) for case in _cases()]
    print(torch.cuda.get_device_name() if DEVICE.type == "cuda" else "interpreted")
    print("\n".join(table_lines(lines)))
    if options.json:
        write_json(options.json, lines, ["torch", "triton", "shoal"])
    if options.sweep:
        sweep(rows)


if __name__ == "__main__":
    main()
