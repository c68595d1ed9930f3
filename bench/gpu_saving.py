"""The cost of a save for training on a GPU: steps during a save against steps without.

`PYTHONPATH=src python bench/gpu_saving.py --json out.json` on a machine with a GPU. One table,
D=32 with Adagrad, Zipf ids; each step waits for the device, so that its time is that of the step.
The baseline of `mean` and `worst` is the same loop without a save; that of the write is a file
with one fsync. Without a GPU, `--quick` runs it interpreted on a few rows, to show that it runs.
"""

from __future__ import annotations

import argparse
import gc
import os
import tempfile
import time
from pathlib import Path

import torch

from harness import Case, Measured, add_json, as_row, median, table_lines, write_json

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

from shoal import Segment, TableSpec, optimizers  # noqa: E402
from shoal.checkpoint.job_state import Contents  # noqa: E402
from shoal.checkpoint.saving import begin  # noqa: E402
from shoal.table.cuda.shard import CudaShard  # noqa: E402
from shoal.table.hosting import HostedTables  # noqa: E402
from shoal.table.shard import GradRecord, IdGroups, StepContext  # noqa: E402

DIM, ROW_BYTES = 32, 276
SPEC = TableSpec(name="items", segments=(Segment(dim=DIM, optimizer=optimizers.Adagrad()),))
WITHOUT_STEPS = 200
CASES = (
    Case(name="saving, mean step", unit="ms", peer="1.1x without", better="lower", bar=1.0),
    Case(name="saving, worst step", unit="ms", peer="4x without", better="lower", bar=1.0),
    Case(name="saving, begin", unit="ms", peer="none", better="lower"),
    Case(name="saving, write", unit="GB/s", peer="plain sequential file, fsync"),
)


class Job:
    """A table on the device and a loop that trains it."""

    def __init__(self, rows: int, batch: int) -> None:
        self.rows, self.batch, self.steps = rows, batch, 0
        self.shard = CudaShard((SPEC,), seed=1, device=DEVICE)
        self.grads = torch.ones(batch, DIM, device=DEVICE)
        for first in range(0, rows, batch):
            self._train(torch.arange(first, first + batch, device=DEVICE))
        wanted = 32 * batch
        # Zipf with exponent 1: the inverse of its distribution, ids scattered.
        drawn = torch.exp(torch.rand(wanted, dtype=torch.float64, device=DEVICE) * _log(rows))
        self.ids = (drawn.to(torch.int64) * 7919) % rows
        self.wait()

    def _train(self, ids_N: torch.Tensor) -> None:
        groups = IdGroups(ids_N, torch.tensor([0, len(ids_N)]), torch.zeros(1, dtype=torch.int32))
        ctx = StepContext(global_step=self.steps)
        ticket = self.shard.find_or_init(groups, ctx=ctx)
        self.shard.gather(ticket, ctx=ctx)
        self.shard.apply([GradRecord(ticket, (self.grads,))], ctx=ctx)
        self.steps += 1

    def wait(self) -> None:
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()

    def timed(self) -> float:
        """Seconds of one step."""
        at = self.steps % 32 * self.batch
        start = time.perf_counter()
        self._train(self.ids[at : at + self.batch])
        if DEVICE.type == "cuda":
            torch.cuda.current_stream().synchronize()
        return time.perf_counter() - start


def _log(rows: int) -> float:
    return float(torch.log(torch.tensor(float(rows))))


def plain(folder: Path, size: int) -> float:
    """Bytes a second of a plain sequential write with one sync."""
    block = os.urandom(1 << 20) * 8
    start = time.perf_counter()
    with (folder / "plain").open("wb") as file:
        for _ in range(max(size // len(block), 1)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    took = time.perf_counter() - start
    (folder / "plain").unlink()
    return max(size // len(block), 1) * len(block) / took


def measured(rows: int, batch: int, folder: Path) -> dict[str, Measured]:
    job = Job(rows, batch)
    contents = Contents(tables={"main": HostedTables((SPEC,), job.shard)})
    begin(folder / "warm", contents, step=1, position=1).wait()
    size = rows * ROW_BYTES
    rate = plain(folder, size)
    gc.collect()
    gc.freeze()  # as runs do while they train
    for _ in range(10):
        job.timed()
    without = [job.timed() for _ in range(WITHOUT_STEPS if DEVICE.type == "cuda" else 5)]
    start = time.perf_counter()
    saving = begin(folder / "save", contents, step=2, position=2)
    began = time.perf_counter() - start
    beside = [job.timed()]
    while not saving.done:
        beside.append(job.timed())
    saving.wait()
    took = time.perf_counter() - start
    done = saving.progress()
    note = (
        f"{len(beside)} steps of {batch} ids with {rows} rows; {done.copied_rows} rows copied,"
        f" {done.spilled_bytes >> 20} MiB in the file, waited {done.waited_s:.2f} s; median step"
        f" {1e3 * median(without):.2f} ms without, {1e3 * median(beside):.2f} ms during the save"
    )
    mean = [1e3 * sum(part) / len(part) for part in (beside, without)]
    worst = [1e3 * max(part) for part in (beside, without)]
    return {
        "saving, mean step": Measured(ours=mean[0], peer_value=1.1 * mean[1], note=note),
        "saving, worst step": Measured(ours=worst[0], peer_value=4 * worst[1], note=note),
        "saving, begin": Measured(ours=1e3 * began),
        "saving, write": Measured(ours=size / took / 1e9, peer_value=rate / 1e9),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_json(parser, "gpu-saving")
    parser.add_argument("--quick", action="store_true", help="few rows")
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--batch", type=int, default=262_144, help="ids of a step")
    parser.add_argument("--dir", type=Path, metavar="DIR", help="where to write; the disk measured")
    options = parser.parse_args()
    rows, batch = options.rows, options.batch
    if options.quick:
        rows, batch = (1_000_000, 65_536) if DEVICE.type == "cuda" else (512, 64)
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        found = measured(rows // batch * batch, batch, Path(folder))
    lines = [as_row(case, found.get(case.name)) for case in CASES]
    print("\n".join(table_lines(lines)))
    for one in found.values():
        if one.note:
            print(one.note)
            break
    if options.json:
        write_json(options.json, lines, ("torch", "triton", "numpy", "shoal"))


if __name__ == "__main__":
    main()
