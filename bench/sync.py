"""How soon replicas see what is trained: `python bench/sync.py --json out-sync.json`.

A trainer updates 100,000 rows a second and writes the time into one more row every 20 ms. Two
replicas, processes of their own, look that row up: its age is how far they are behind. The
trainer's processor time for the same steps without a publisher is the baseline of its slowdown: of
the training thread, and of the process with the publisher's threads. A replica that begins with a
checkpoint is compared with a plain read of the checkpoint's files, and its memory with that of fp32
rows.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from harness import Case, Measured, add_json, as_row, conclude, percentile

SCRIPT = Path(__file__).resolve()
PACKAGES = ("torch", "pyzmq", "shoal")
ROWS, LOAD_ROWS, DIM, TOUCHED_PER_S, STEP_ROWS = 1_000_000, 10_000_000, 16, 100_000, 10_000
MARK = -1  # the id of the row with the time
FRESH = "an update is visible, {}, 2 replicas, 100 k rows/s"
SLOWED = "processor time of training with a publisher"
SPENT = "processor time of training and publishing, all threads"
LOADED = "loading a checkpoint of D=32 with Adagrad's state, {}"
MEMORY = "memory of a replica with {} rows, D={}"
LOAD_DIM, MEMORY_DIMS = 32, (32, 128)


def cases() -> tuple[Case, ...]:
    """Ages in seconds against the time that is asked for."""
    fresh = [
        Case(name=FRESH.format(name), unit="s", better="lower", peer="asked for",
             peer_value=most, bar=1.0)
        for name, most in (("p50", 0.5), ("p99", 2.0))
    ]  # fmt: skip
    slowed = Case(
        name=SLOWED, unit="ms/step", better="lower", peer="without a publisher", bar=1 / 1.03
    )
    spent = Case(name=SPENT, unit="ms/step", better="lower", peer="without a publisher")
    loaded = [
        Case(name=LOADED.format("from disk"), unit="s", better="lower",
             peer="a plain read of its files", bar=1 / 1.3),
        Case(name=LOADED.format("cached"), unit="s", better="lower",
             peer="a plain read of its files"),
    ]  # fmt: skip
    memory = [
        Case(name=MEMORY.format(dtype, dim), unit="B/row", better="lower",
             peer="fp32 rows with metadata and index")
        for dim in MEMORY_DIMS for dtype in ("float16", "int8")
    ]  # fmt: skip
    return (*fresh, slowed, spent, *loaded, *memory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_json(parser, "sync")
    parser.add_argument("--quick", action="store_true", help="a few seconds")
    parser.add_argument("--rows", type=int, help="of the checkpoint that is loaded")
    parser.add_argument("--replica", metavar="ADDRESS", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.replica:
        _follow(options.replica)
        return
    found = measure(seconds=3.0 if options.quick else 20.0, turns=2 if options.quick else 4)
    rows = options.rows or (ROWS if options.quick else LOAD_ROWS)
    found |= measure_load(rows, turns=2 if options.quick else 4) | measure_memory()
    conclude([as_row(case, found.get(case.name)) for case in cases()], options.json, PACKAGES)


def measure(seconds: float, turns: int) -> dict[str, Measured]:
    """By case."""
    from shoal.sync.publisher import Publisher
    from shoal.table.factory import make_shard
    from shoal.table.hosting import HostedTables

    tables = (_spec(),)
    shard = make_shard(tables)
    _train(shard, 0.0, ROWS)
    with_s: list[tuple[float, float]] = []
    without_s: list[tuple[float, float]] = []
    ages: list[float] = []
    for _ in range(turns):  # in turns: the machine may have other work
        without_s.append(_train(shard, seconds / turns))
        with Publisher(HostedTables(tables, shard)) as publisher:
            server = publisher.serve("tcp://127.0.0.1:0")
            with _replicas(server.address, ages):
                with_s.append(_train(shard, seconds / turns))
            server.stop()
    note = f"{ROWS:,} rows, D={DIM}, Adagrad; a publisher's turn every 0.4 s"
    return {
        FRESH.format("p50"): Measured(ours=percentile(ages, 50), note=note),
        FRESH.format("p99"): Measured(ours=percentile(ages, 99), note=note),
        **{
            name: Measured(
                ours=1e3 * min(one[k] for one in with_s),
                peer_value=1e3 * min(one[k] for one in without_s),
                note=note,
            )
            for k, name in enumerate((SLOWED, SPENT))
        },
    }


def measure_load(rows: int, turns: int) -> dict[str, Measured]:
    """A replica's load, and a plain read of the same files, in turns."""
    import torch

    from shoal import Segment, TableSpec
    from shoal.checkpoint import Contents, save
    from shoal.sync.replica import Replica
    from shoal.table.factory import make_shard
    from shoal.table.hosting import HostedTables
    from work_checkpoint import PLAIN_BLOCK, _forget_cached, _plain_read

    specs = (TableSpec(name="row", segments=(Segment(dim=LOAD_DIM),)),)
    block = memoryview(bytearray(PLAIN_BLOCK))
    torch.set_num_threads(2)
    with tempfile.TemporaryDirectory() as root:
        shard = make_shard(specs)
        for start in range(0, rows, 1 << 20):
            _fill(shard, start, min(start + (1 << 20), rows))
        contents = Contents(tables={"model": HostedTables(specs, shard)})
        save(root, contents, step=1, position=0)
        del shard, contents
        files = [one for one in Path(root).rglob("*") if one.is_file()]
        size = sum(one.stat().st_size for one in files)
        times: dict[str, list[tuple[float, float]]] = {"from disk": [], "cached": []}
        for _ in range(turns):
            for how, found in times.items():
                pair = []
                for load in (True, False):
                    if how == "from disk":
                        _forget_cached(Path(root))
                    else:
                        _read_all(files, block, _plain_read)
                    began_s = time.perf_counter()
                    if load:
                        with Replica(specs, [], checkpoint=root) as replica:
                            pair.append(time.perf_counter() - began_s)
                            assert replica.shard.size(0) == rows
                        del replica
                    else:
                        _read_all(files, block, _plain_read)
                        pair.append(time.perf_counter() - began_s)
                found.append((pair[0], pair[1]))
    note = f"{rows:,} rows, {size / 1e6:,.0f} MB, 2 threads"
    return {
        LOADED.format(how): Measured(
            ours=min(one for one, _ in found), peer_value=min(one for _, one in found), note=note
        )
        for how, found in times.items()
    }


def _read_all(files: list[Path], block: memoryview, read: Any) -> None:
    for file in files:
        read(file, block)


def _fill(shard: Any, start: int, stop: int) -> None:
    import torch

    from shoal.table.shard import IdGroups, StepContext

    ids = IdGroups(
        torch.arange(start, stop),
        torch.tensor([0, stop - start]),
        torch.zeros(1, dtype=torch.int32),
    )
    shard.assign(ids, [torch.randn(stop - start, LOAD_DIM)], ctx=StepContext())


def measure_memory(rows: int = ROWS) -> dict[str, Measured]:
    """Bytes a row of a replica that loaded its rows, index and metadata included."""
    import torch

    from shoal import Segment, TableSpec
    from shoal.sync.replica import serving_spec
    from shoal.table.cpu.shard import CpuShard
    from shoal.table.rows import stored
    from shoal.table.values import RowChunk

    found = {}
    zeros = torch.zeros(rows, dtype=torch.int64)
    for dim in MEMORY_DIMS:
        bytes_of: dict[str, float] = {}
        spec = TableSpec(name="row", segments=(Segment(dim=dim),))
        for dtype in ("float32", "float16", "int8"):
            served = serving_spec(spec, dtype)  # type: ignore[arg-type]
            shard, ids = CpuShard((served,)), torch.arange(rows)
            weights, none = stored(served, torch.zeros(rows, dim)), torch.empty(rows, 0)
            shard.load(0, RowChunk("row", ids, weights, none, zeros + 1, zeros, zeros))
            bytes_of[dtype] = shard.stats()[0].bytes_total / rows
        for dtype in ("float16", "int8"):
            found[MEMORY.format(dtype, dim)] = Measured(
                ours=bytes_of[dtype], peer_value=bytes_of["float32"], note=f"{rows:,} rows"
            )
    return found


def _spec() -> Any:
    from shoal import Segment, TableSpec

    return TableSpec(name="row", segments=(Segment(dim=DIM),))


def _train(shard: Any, seconds: float, rows: int = STEP_ROWS) -> tuple[float, float]:
    """Steps at the pace asked for; processor seconds a step, of the update and the process."""
    import torch

    from shoal.table.shard import IdGroups, StepContext

    torch.set_num_threads(1)
    ctx, ends, steps, spent_s = StepContext(), time.monotonic() + seconds, 0, 0.0
    tables_G = torch.zeros(1, dtype=torch.int32)
    due_s, begun_s = time.monotonic(), time.process_time()
    while steps == 0 or time.monotonic() < ends:
        ids = torch.randint(ROWS, (rows,)) if rows == STEP_ROWS else torch.arange(rows)
        grads = torch.randn(rows, DIM)
        before_s = time.thread_time()
        shard.apply_ids(IdGroups(ids, torch.tensor([0, rows]), tables_G), [grads], ctx=ctx)
        spent_s += time.thread_time() - before_s
        steps += 1
        due_s += rows / TOUCHED_PER_S if rows == STEP_ROWS else 0.0
        while True:
            now = torch.zeros(1, DIM)
            now[0, :2] = torch.tensor(divmod(time.time() % 1e5, 1.0))
            shard.assign(
                IdGroups(torch.tensor([MARK]), torch.tensor([0, 1]), tables_G), [now], ctx=ctx
            )
            left_s = due_s - time.monotonic()
            if left_s <= 0:
                break
            time.sleep(min(0.02, left_s))
    return spent_s / steps, (time.process_time() - begun_s) / steps


@contextmanager
def _replicas(address: str, ages: list[float]) -> Iterator[None]:
    """Two of them, from when both have all rows; the ages that they saw come last."""
    with ExitStack() as held:
        every = [
            held.enter_context(
                subprocess.Popen(
                    [sys.executable, str(SCRIPT), "--replica", address],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            for _ in range(2)
        ]
        for one in every:
            assert one.stdout is not None and one.stdout.readline() == "ready\n"
        for one in every:
            assert one.stdin is not None
            print("training", file=one.stdin, flush=True)
        yield
        for one in every:
            assert one.stdin is not None and one.stdout is not None
            one.stdin.close()
            ages += json.loads(one.stdout.read())


def _follow(address: str) -> None:
    """Print the ages of the mark, looked up every 5 ms from a line of standard input on."""
    import threading

    import torch

    from shoal.sync.replica import Replica
    from shoal.table.shard import IdGroups

    torch.set_num_threads(1)
    mark = IdGroups(torch.tensor([MARK]), torch.tensor([0, 1]), torch.zeros(1, dtype=torch.int32))
    ended, first_s = threading.Event(), [math.inf]

    def wait() -> None:
        sys.stdin.readline()
        first_s[0] = time.monotonic() + 1.0  # before, the mark is from before the training
        sys.stdin.read()
        ended.set()

    threading.Thread(target=wait, daemon=True).start()
    with Replica((_spec(),), [address]) as replica:
        while replica.status()[0].state != "AVAILABLE":
            time.sleep(0.01)
        print("ready", flush=True)
        ages = []
        while not ended.wait(0.005):
            whole, part = replica.find(mark).weights[0][0, :2].tolist()
            if time.monotonic() > first_s[0]:
                ages.append((time.time() % 1e5) - whole - part)
    print(json.dumps(ages))


if __name__ == "__main__":
    main()
