"""Parameter servers as processes: they are killed and come back, and training goes on."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.checkpoint import CheckpointStore
from support.ranks import free_port
from support.small_runs import small_run


class Job:
    """A folder with a config, servers and workers; whatever is left at the end is killed."""

    def __init__(self, folder: Path, servers: int) -> None:
        self.folder, self.servers = folder, servers
        self.config = small_run(folder, examples=24_000, eval_examples=8_000)
        self.addresses = [f"tcp://127.0.0.1:{free_port()}" for _ in range(servers)]
        self.running: list[subprocess.Popen[str]] = []

    def _start(self, *arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self.running.append(process)
        return process

    def server(self, index: int) -> subprocess.Popen[str]:
        process = self._start(
            *("-m", "shoal.cli", "ps", str(self.config)),
            *("--index", str(index), "--of", str(self.servers)),
            *("--address", self.addresses[index], "--store", "store", "--save-every-s", "0.3"),
        )
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line == f"server {index} of {self.servers} at {self.addresses[index]}\n", (
            line + process.stdout.read()
        )
        return process

    def worker(self, *overrides: str, ranks: int = 1) -> subprocess.Popen[str]:
        launched = ["-m", "shoal.cli"]
        if ranks > 1:
            launched = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), *launched]
        return self._start(
            *launched,
            *("train", str(self.config), "distributed.path=ps", "threads=1"),
            f"distributed.servers.addresses=[{','.join(self.addresses)}]",
            "distributed.servers.reply_s=20",
            *overrides,
        )

    def metrics(self) -> dict[str, Any]:
        (found,) = sorted(self.folder.glob("runs/*/metrics.json"))
        return dict(json.loads(found.read_text()))

    def auc(self) -> float:
        return float(self.metrics()["models"]["deepfm"]["auc"])

    def end(self) -> None:
        for process in self.running:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path, 2)
    try:
        yield made
    finally:
        made.end()


def done(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output
    return output


@pytest.mark.slow
def test_a_worker_trains_on_two_servers(job: Job) -> None:
    servers = [job.server(index) for index in range(2)]
    done(job.worker())
    assert job.auc() > 0.55
    for server in servers:
        server.send_signal(signal.SIGTERM)
        done(server)
    for index in range(2):
        store = CheckpointStore(job.folder / f"store/server-{index}-of-2")
        manifests = [store.manifest(entry.name) for entry in store.list()]
        assert sum(table.rows for one in manifests for table in one.tables) > 1000
        assert {one.kind for one in manifests} == {"full", "delta"}


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_a_server_that_is_killed_comes_back_with_its_rows(job: Job, killed: int) -> None:
    servers = [job.server(index) for index in range(2)]
    worker = job.worker("data.epochs=4")
    store = CheckpointStore(job.folder / f"store/server-{killed}-of-2")
    deadline = time.monotonic() + 120
    while len(store.list()) < 3:
        assert time.monotonic() < deadline
        assert worker.poll() is None
        time.sleep(0.1)
    servers[killed].kill()
    servers[killed].wait()
    job.server(killed)
    done(worker)
    assert job.auc() > 0.55


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.parametrize("stale_updates", [0, 2])
def test_two_workers_share_the_rows(job: Job, stale_updates: int) -> None:
    for index in range(2):
        job.server(index)
    saves = "checkpoint.every_steps=20", "checkpoint.background=false", "checkpoint.keep_full=9"
    done(job.worker(f"distributed.servers.stale_updates={stale_updates}", *saves, ranks=2))
    assert job.auc() > 0.55
    # 2,000 of the vocabulary and some fresh ones: counted once, not by each worker.
    assert max(job.metrics()["rows_by_table"].values()) < 4000
    # Workers wait for each other at a save: each has the parts of both, after the same step.
    (folder,) = job.folder.glob("runs/*/checkpoints")
    store = CheckpointStore(folder)
    saved = [store.manifest(entry.name) for entry in store.list()]
    assert [(one.step, one.world_size) for one in saved] == [(k, 2) for k in (20, 40, 60, 80, 94)]


@pytest.mark.slow
def test_a_run_without_servers_says_so(job: Job) -> None:
    worker = job.worker("distributed.servers.reply_s=0.2", "distributed.servers.repeats=1")
    output, _ = worker.communicate(timeout=200)
    assert worker.returncode == 2
    assert re.search(r"error: call to server \d at tcp://127\.0\.0\.1:\d+: got no reply", output)
    assert re.search(r"no reply of servers \[.*\], which have the rows: asking again", output)
    assert "Traceback" not in output
