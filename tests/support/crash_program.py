"""Trains and saves until it is killed: full checkpoints, deltas, compactions, retention.

Run as a program it reads orders from its input, one JSON object a line, forks a child for each
and prints the child's pid, then how the child ended. The child resumes from the newest checkpoint
in the store and appends a line to the order's log whenever something is done. It takes a signal
from outside at any moment, or kills itself at a point of a save that the order names.
"""

from __future__ import annotations

import functools
import json
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from shoal.checkpoint import CheckpointStore, compact, storage, writing_plan
from shoal.checkpoint import saving as job_saving
from shoal.checkpoint.loading import load
from shoal.checkpoint.saving import begin
from support.crashing_job import CrashingJob

__all__ = ["KEEP_FULL", "POINTS", "Order"]

KEEP_FULL = 2
POINTS = ("created", "half written", "closing", "closed", "renaming", "renamed", "removing")
_MOST_SAVES, _EVERY, _MOST_BESIDE = 8, 3, 24


@dataclass(frozen=True)
class Order:
    """What a child does.

    Args:
        root: the store.
        log: file that it appends to.
        job: seed of the job; the same for all children of a store.
        seed: of the kinds and times of saves.
        point: one of POINTS at whose `nth` time it kills itself; "": it waits for a signal.
    """

    root: str
    log: str
    job: int
    seed: int
    point: str = ""
    nth: int = 0


def main() -> None:
    torch.set_num_threads(1)
    for line in sys.stdin:
        order = Order(**json.loads(line))
        pid = os.fork()
        if pid == 0:
            _child(order)
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def written(order: Order) -> str:
    """The line that orders it."""
    return json.dumps(asdict(order)) + "\n"


def _child(order: Order) -> None:
    log = os.open(order.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def report(*said: object) -> None:
        os.write(log, (" ".join(map(str, said)) + "\n").encode())

    try:
        _small_files()
        if order.point:
            _dies_at(order.point, order.nth, report)
        _train(order, report)
        report("idle")
        while True:
            time.sleep(60)
    except BaseException:  # noqa: BLE001 - the log reports any error
        report("failed", traceback.format_exc().replace("\n", " | "))
    finally:
        os._exit(1)


def _train(order: Order, report: Callable[..., None]) -> None:
    chosen = random.Random(order.seed)
    job = CrashingJob(order.job)
    store = CheckpointStore(order.root, keep_full=KEEP_FULL)
    parent, since = None, None
    if store.latest() is not None:
        loaded = load(order.root, job.contents())
        job.steps, parent, since = loaded.state["steps"], loaded.manifest, loaded.cursors
    report("ready", job.steps)
    for _ in range(_MOST_SAVES):
        for _ in range(_EVERY):
            job.step()
        full = parent is None or chosen.random() < 0.25
        options: Any = {} if full else {"kind": "delta", "parent": parent, "since": since}
        saving = begin(order.root, job.contents(), step=job.steps, position=job.steps, **options)
        step = job.steps
        report("begun", step, *_leftovers(store, saving.name))
        for _ in range(_MOST_BESIDE):
            if not saving.done:
                job.step()
        parent, since = saving.wait(), saving.cursors
        saving.release()
        report("committed", step, saving.name)
        if not full and chosen.random() < 0.5:
            _compacted(store, saving.name, job)
            report("committed", step, "compacted")
        if chosen.random() < 0.5:
            report("removed", *store.retain())


def _compacted(store: CheckpointStore, name: str, job: CrashingJob) -> None:
    """Compact a delta during training."""
    failed: list[BaseException] = []

    def work() -> None:
        try:
            compact(store, name)
        except BaseException as error:  # noqa: BLE001 - raised below
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    for _ in range(_MOST_BESIDE):
        if thread.is_alive():
            job.step()
    thread.join()
    if failed:
        raise failed[0]


def _leftovers(store: CheckpointStore, own: str) -> list[str]:
    there = {entry.name for entry in store.list()}
    return [name for name in store.storage.folders() if name not in there and name != own]


def _small_files() -> None:
    """Several files of a table that has few rows, which reach the disk in several writes."""
    storage._BLOCK = 4096
    for module in (job_saving, writing_plan):
        smaller = functools.partial(module.split, file_bytes=40_000, small_bytes=20_000)
        module.split = smaller  # type: ignore[attr-defined]


def _dies_at(point: str, nth: int, report: Callable[..., None]) -> None:
    left = [nth]

    def passed() -> None:
        left[0] -= 1
        if left[0] == 0:
            report("dies", point, nth)
            os.kill(os.getpid(), signal.SIGKILL)

    def around(owner: Any, name: str, *, before: bool = False, after: bool = False) -> None:
        inner = getattr(owner, name)

        @functools.wraps(inner)
        def outer(*args: Any, **kwargs: Any) -> Any:
            if before:
                passed()
            value = inner(*args, **kwargs)
            if after:
                passed()
            return value

        setattr(owner, name, outer)

    sink = storage.LocalSink
    match point:
        case "created":
            around(sink, "__init__", after=True)
        case "half written":
            inner = sink.write

            def half(self: storage.LocalSink, part: memoryview, crc32: int) -> int:
                if left[0] == 1:
                    inner(self, part[: part.nbytes // 2], crc32)
                    self._cached()
                    self._put()
                passed()
                return inner(self, part, crc32)

            sink.write = half  # type: ignore[method-assign]
        case "closing":
            around(sink, "commit", before=True)
        case "closed":
            around(sink, "commit", after=True)
        case "renaming":
            around(os, "replace", before=True)
        case "renamed":
            around(os, "replace", after=True)
        case "removing":
            for name in ("unlink", "rmdir"):
                around(os, name, before=True)
        case _:
            raise ValueError(point)


if __name__ == "__main__":
    main()
