"""How fast a GPU shard's index finds, inserts, erases and rebuilds: kernels alone, no shard.

`python bench/gpu_index.py --json out.json` on a machine with a GPU; `--sweep` also tries other
block sizes and prints what each gives. Rates are 10^9 ids a second. Without a GPU, `--quick` runs
it interpreted on a tiny index, to show that it runs.
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from harness import Case, Measured, as_row, median, table_lines, write_json

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

from shoal.kernels import index as table_index  # noqa: E402
from shoal.kernels.index import erase, list_handles, new_entries, probe, rebuild  # noqa: E402
from shoal.kernels.tables import (  # noqa: E402
    CHUNK_IDS,
    CHUNK_ROWS,
    CHUNK_TABLE,
    CHUNK_WORDS,
    COUNT_WORDS,
    TABLE_DIRECTORY,
    TABLE_ENTRIES,
    TABLE_FREE,
    TABLE_MASK,
    TABLE_SALT,
    TABLE_WORDS,
    CallGroups,
    ShardLayout,
)

SETTINGS = [(32, 1), (64, 1), (128, 1), (64, 2), (128, 2), (128, 4), (256, 4), (256, 8)]
ROUNDS = 9
TABLES = 10
CASES = (
    Case(name="insert, load 0 to 0.5", unit="G/s", peer="bar", bar=1, stretch=1.5, peer_value=2.0),
    Case(name="find, load 0.5", unit="G/s", peer="aim", bar=1, peer_value=12.0),
    Case(name="insert, load 0.5 to 0.75", unit="G/s", peer="bar", bar=1, peer_value=2.0),
    Case(name="find, load 0.75", unit="G/s", peer="aim", bar=1, peer_value=8.0),
    Case(name="find, load 0.75, half missing", unit="G/s", peer="all there", bar=2 / 3),
    Case(name="find-or-insert, load 0.75, all there", unit="G/s", peer="find"),
    Case(name="erase, half of all rows", unit="G/s", peer="none"),
    Case(name="find, load 0.75, half erased", unit="G/s", peer="before", bar=1 / 1.3),
    Case(name="rebuild, rows into twice the slots", unit="G/s", peer="none"),
    Case(name="list handles, slots", unit="G/s", peer="none"),
    Case(name="find, power law, 10 tables", unit="G/s", peer="none"),
    Case(name="find-or-insert, power law, 10 tables", unit="G/s", peer="none"),
)


class Index:
    """Tables of one size with free rows: ids in their chunks, no weights."""

    def __init__(self, tables: int, slots: int, rows: int) -> None:
        self.slots = slots
        # The first six chunks of a table together are one full chunk, nearly.
        each = rows // CHUNK_ROWS + 7
        self.entries = [new_entries(slots, DEVICE) for _ in range(tables)]
        self.ids = torch.empty(tables * each, CHUNK_ROWS, dtype=torch.int64, device=DEVICE)
        self.free = torch.empty(tables, rows, dtype=torch.int32, device=DEVICE)
        numbers = torch.arange(tables * each, dtype=torch.int32)
        self.directory = numbers.to(DEVICE)
        chunks = torch.zeros(CHUNK_WORDS, len(numbers), dtype=torch.int64)
        chunks[CHUNK_IDS] = self.ids.data_ptr() + numbers.long() * CHUNK_ROWS * 8
        chunks[CHUNK_TABLE] = numbers.long() // each
        words = torch.zeros(tables, TABLE_WORDS, dtype=torch.int64)
        for table, entries in enumerate(self.entries):
            words[table, TABLE_ENTRIES] = entries.data_ptr()
            words[table, TABLE_DIRECTORY] = self.directory[table * each :].data_ptr()
            words[table, TABLE_FREE] = self.free[table].data_ptr()
            words[table, TABLE_SALT] = 1 + table
        words[:, TABLE_MASK] = slots - 1
        counters = torch.zeros(tables, COUNT_WORDS, dtype=torch.int64, device=DEVICE)
        self.layout = ShardLayout(words.to(DEVICE), counters, chunks.to(DEVICE))

    def clear(self) -> None:
        for entries in self.entries:
            entries.copy_(new_entries(self.slots, DEVICE))
        self.layout.counters_KC.zero_()

    def call(self, ids: Tensor, *, insert: bool = False) -> Callable[[], Tensor]:
        """What looks up these ids, split evenly over the tables, and returns their handles."""
        tables, n = len(self.entries), ids.numel()
        splits = torch.arange(tables + 1, device=DEVICE) * (n // tables)
        groups = CallGroups(ids, splits, torch.arange(tables, dtype=torch.int32, device=DEVICE))
        handles = torch.empty(n, dtype=torch.int32, device=DEVICE)

        def run() -> Tensor:
            probe(self.layout, groups, handles, None, None, insert=insert)
            return handles

        return run


def seconds(*runs: Callable[[], object]) -> list[float]:
    """Seconds of each run, timed on the device."""
    if DEVICE == "cpu":
        stamps = [time.perf_counter()]
        for run in runs:
            run()
            stamps.append(time.perf_counter())
        return [after - before for before, after in itertools.pairwise(stamps)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(len(runs) + 1)]
    events[0].record()
    for run, event in zip(runs, events[1:], strict=True):
        run()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(events)]


def rate(count: int, run: Callable[[], object]) -> float:
    """10^9 ids a second, of a run that can be repeated."""
    run()
    return count / median(seconds(*[run] * ROUNDS)) / 1e9


def random_ids(count: int) -> Tensor:
    """Distinct ids that look random, and as many more that are never inserted."""
    return (torch.arange(2 * count, device=DEVICE) + 1) * -0x61C8864680B583EB


def inserted(index: Index, ids: Tensor, batch: int) -> float:
    """Rate of inserting new ids in batches, the first one aside."""
    parts = ids.split(batch)
    spent = seconds(*[index.call(part, insert=True) for part in parts])
    return (len(ids) - len(parts[0])) / sum(spent[1:]) / 1e9


def one_table(slots: int, batch: int) -> Iterator[tuple[str, Measured]]:
    rows = slots * 3 // 4
    index, ids = Index(1, slots, rows), random_ids(rows)
    there, missing = ids[:rows], ids[rows:]
    sample = torch.randint(slots // 2, (2 * batch,), device=DEVICE)
    half = there[: slots // 2]
    yield "insert, load 0 to 0.5", Measured(ours=inserted(index, half, batch))
    query = half[sample]
    find = rate(len(query), index.call(query))
    yield "find, load 0.5", Measured(ours=find)
    more = inserted(index, there[slots // 2 :], batch)
    yield "insert, load 0.5 to 0.75", Measured(ours=more)
    query = there[torch.randint(rows, (2 * batch,), device=DEVICE)]
    find = rate(len(query), index.call(query))
    yield "find, load 0.75", Measured(ours=find)
    both = rate(len(query), index.call(query, insert=True))
    yield "find-or-insert, load 0.75, all there", Measured(ours=both, peer_value=find)
    mixed = torch.where(torch.rand(len(query), device=DEVICE) < 0.5, query, missing[: len(query)])
    part = rate(len(query), index.call(mixed))
    yield "find, load 0.75, half missing", Measured(ours=part, peer_value=find)
    yield from taken_out(index, query, find)


def taken_out(index: Index, query: Tensor, find: float) -> Iterator[tuple[str, Measured]]:
    """List a full index, erase half of its rows, find the others, rebuild it."""
    rows = index.free.shape[1]
    listed = rate(index.slots + 8, lambda: list_handles(index.entries[0]))
    yield "list handles, slots", Measured(ours=listed)
    handles = list_handles(index.entries[0])
    known = index.call(query)()
    gone = handles[torch.randperm(rows, device=DEVICE)[: rows // 2]].contiguous()
    warm, rest = gone[:1], gone[1:]
    erase(index.layout, warm, None)
    spent = seconds(lambda: erase(index.layout, rest, None))[0]
    yield "erase, half of all rows", Measured(ours=len(rest) / spent / 1e9)
    left = query[torch.isin(known, gone, invert=True)]
    after = rate(len(left), index.call(left))
    yield "find, load 0.75, half erased", Measured(ours=after, peer_value=find)
    bigger = new_entries(2 * index.slots, DEVICE)
    rebuild(index.entries[0], bigger, 1)
    bigger.copy_(new_entries(2 * index.slots, DEVICE))
    spent = seconds(lambda: rebuild(index.entries[0], bigger, 1))[0]
    moved = (rows - rows // 2) / spent / 1e9
    yield "rebuild, rows into twice the slots", Measured(ours=moved)


def power_law(slots: int, lookups: int) -> Iterator[tuple[str, Measured]]:
    """Batches like a training step's: ten tables, exponent 1.05, half as many ids as slots."""
    index, ids = Index(TABLES, slots, slots // 2), random_ids(slots // 2)
    index.call(ids[: slots // 2].repeat(TABLES), insert=True)()
    uniform = torch.rand(lookups // TABLES * TABLES, device=DEVICE, dtype=torch.float64)
    ranks = ((slots // 2) ** -0.05 - 1) * uniform + 1
    ranks = (ranks**-20.0).long().clamp(1, slots // 2) - 1
    query = ids[ranks]
    for name, insert in (("find", False), ("find-or-insert", True)):
        found = rate(len(query), index.call(query, insert=insert))
        yield f"{name}, power law, 10 tables", Measured(ours=found)


def sweep(slots: int, batch: int) -> None:
    """Print the rates of each block size and number of warps."""
    rows = slots // 2
    index, ids = Index(1, slots, rows), random_ids(rows)[:rows]
    query = ids[torch.randint(rows, (2 * batch,), device=DEVICE)]
    for block, warps in SETTINGS:
        table_index._FIND_BLOCK, table_index._FIND_WARPS = block, warps
        table_index._INSERT_BLOCK, table_index._INSERT_WARPS = block, warps
        index.clear()
        index.call(ids[:64], insert=True)()
        new = inserted(index, ids, batch)
        find = rate(len(query), index.call(query))
        both = rate(len(query), index.call(query, insert=True))
        print(
            f"block {block:3} warps {warps}: insert {new:.2f}, find {find:.2f}, "
            f"find-or-insert of known ids {both:.2f} G/s",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="a tiny index: shows that it runs")
    parser.add_argument("--sweep", action="store_true")
    options = parser.parse_args()
    slots, batch = (1 << 10, 64) if options.quick else (1 << 26, 1 << 20)
    torch.manual_seed(0)
    found = dict(one_table(slots, batch))
    found |= dict(power_law(*((1 << 7, 100) if options.quick else (1 << 21, 1_048_570))))
    rows = [as_row(case, found.get(case.name)) for case in CASES]
    print(torch.cuda.get_device_name() if DEVICE == "cuda" else "interpreted")
    print("\n".join(table_lines(rows)))
    if options.json:
        write_json(options.json, rows, ["torch", "triton", "shoal"])
    if options.sweep:
        sweep(slots, batch)


if __name__ == "__main__":
    main()
