"""Saves or loads a large table and prints the memory it took beyond the table, as JSON.

Run as a program: `memory_program.py save|load FOLDER ROWS`.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import torch

from shoal.checkpoint.job_state import Contents
from shoal.checkpoint.loading import load
from shoal.checkpoint.saving import begin
from shoal.rules.optimizers import Adagrad
from shoal.table.cpu.shard import CpuShard
from shoal.table.hosting import HostedTables
from shoal.table.shard import IdGroups, StepContext
from shoal.table.spec import Segment, TableSpec

__all__ = ["ROW_BYTES"]

SPEC = TableSpec(name="users", segments=(Segment(dim=32, optimizer=Adagrad()),))
ROW_BYTES = 276
_BATCH, _MIB = 20_000, 1 << 20


class Resident:
    """Memory of this process, looked at every few milliseconds."""

    def __init__(self) -> None:
        self.before = self.peak = _resident()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Resident:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._stopped.wait(0.003):
            self.peak = max(self.peak, _resident())


def main(what: str, root: str, rows: int) -> None:
    torch.set_num_threads(2)
    shard = CpuShard((SPEC,), seed=1)
    contents = Contents(tables={"main": HostedTables(specs=(SPEC,), shard=shard)})
    found = (
        _saved(root, rows, shard, contents) if what == "save" else _loaded(root, shard, contents)
    )
    print(json.dumps({"rows": shard.size(0), **found}))


def _saved(root: str, rows: int, shard: CpuShard, contents: Contents) -> dict[str, Any]:
    importlib.import_module("pyarrow.ipc")
    for _ in range(2):  # the second time nothing grows
        for first in range(0, rows, _BATCH):
            _train(shard, first, 0)
    with Resident() as resident:
        saving = begin(root, contents, step=1, position=1)
        touched = 0
        while not saving.done and touched < rows:
            _train(shard, touched, 1)
            touched += _BATCH
        saving.wait()
    done = saving.progress()
    return {
        "extra_mib": (resident.peak - resident.before) / _MIB,
        "touched": touched,
        "copied_rows": done.copied_rows,
        "spilled_mib": done.spilled_bytes / _MIB,
    }


def _loaded(root: str, shard: CpuShard, contents: Contents) -> dict[str, Any]:
    importlib.import_module("pyarrow.ipc")  # its code is no memory of a load's
    with Resident() as resident:
        load(root, contents)
    (table,) = shard.stats()
    extra = resident.peak - resident.before - table.bytes_total
    return {"extra_mib": extra / _MIB, "table_mib": table.bytes_total / _MIB}


def _train(shard: CpuShard, first: int, step: int) -> None:
    ids_U = torch.arange(first, first + _BATCH) * 7919
    groups = IdGroups(ids_U, torch.tensor([0, _BATCH]), torch.zeros(1, dtype=torch.int32))
    ctx = StepContext(global_step=step, event_time_s=step)
    shard.apply_ids(groups, [torch.ones(_BATCH, SPEC.dim)], ctx=ctx)


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
