"""A run publishes what it changes; a replica in another process has the rows it ends with."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from shoal import config as settings
from shoal.checkpoint import CheckpointStore, Contents, LoadOptions, load, load_share
from shoal.comm.transport import Secret
from shoal.config.build import build_parts
from shoal.serve.loading import FolderSource, ServedShare
from shoal.sync.replica import Replica
from shoal.table.factory import make_shard
from shoal.table.hosting import HostedTables
from shoal.table.shard import Shard
from support import train_followed
from support.ranks import free_port
from support.small_runs import small_run


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_replica_ends_with_the_rows_of_the_run(ranks: int, tmp_path: Path) -> None:
    port = free_port()
    token = tmp_path / "token"
    token.write_text("between the two of us")
    publish = {"every_s": 0.05, "dense_every_s": 0.1, "linger_s": 200.0}
    file = small_run(tmp_path, examples=20_000, publish=publish)
    launcher = [sys.executable]
    if ranks > 1:
        launcher += ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--standalone"]
    addresses = [f"tcp://127.0.0.1:{port + rank}" for rank in range(ranks)]
    overrides = [f"publish.address={addresses[0]}", f"publish.token_file={token}"]
    with subprocess.Popen(
        [*launcher, train_followed.__file__, "1", "train", str(file), "--", *overrides],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as trainer:
        run = settings.load(str(file), ())
        parts = build_parts(run)
        secret = Secret.of_file(str(token))
        with Replica(parts.tables, addresses, every_s=0.02, secret=secret) as replica:
            try:
                printed, _ = trainer.communicate(timeout=240)
            finally:
                trainer.kill()
            assert trainer.returncode == 0, printed
            assert re.search(r"publishing at tcp://", printed)
            assert "replicas are behind" not in printed
            status = replica.status()
            assert all(one.state == "AVAILABLE" and one.segments > 0 for one in status)
            compare(replica, parts.tables, tmp_path / "runs")
            parts.module.load_state_dict(replica.dense())


@pytest.mark.slow
def test_parameter_servers_publish_their_rows(tmp_path: Path) -> None:
    ports, port = [free_port(), free_port()], free_port()
    publish = {"address": f"tcp://127.0.0.1:{port}", "every_s": 0.05, "linger_s": 200.0}
    file = small_run(tmp_path, examples=20_000, publish=publish)
    addresses = [f"tcp://127.0.0.1:{one}" for one in ports]

    def start(*arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "shoal.cli", *arguments],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    started = []
    try:
        for index, address in enumerate(addresses):
            served = ("--index", str(index), "--of", "2", "--address", address, "--store", "store")
            started.append(start("ps", str(file), *served))
        servers = f"distributed.servers.addresses=[{','.join(addresses)}]"
        trainer = start("train", str(file), "distributed.path=ps", servers)
        started.append(trainer)
        run = settings.load(str(file), ())
        tables = build_parts(run).tables
        publishers = [f"tcp://127.0.0.1:{port + index}" for index in range(2)]
        with Replica(tables, publishers, every_s=0.02) as replica:
            printed, _ = trainer.communicate(timeout=240)
            assert trainer.returncode == 0, printed
            (folder,) = (tmp_path / "runs").iterdir()
            dense = FolderSource(folder, ServedShare(role="dense"))  # as an entry loads it
            assert dense.load(dense.newest() or 0).signature.inputs
            ends = time.monotonic() + 120
            while any(one.state != "AVAILABLE" for one in replica.status()):
                assert time.monotonic() < ends, replica.status()
                time.sleep(0.05)
            for server in started[:2]:
                server.send_signal(signal.SIGTERM)
            for server in started[:2]:
                printed, _ = server.communicate(timeout=200)
                assert server.returncode == 0 and "publishing at tcp://" in printed, printed
            urls = [str(tmp_path / "store" / f"server-{index}-of-2") for index in range(2)]
            shard = make_shard(tables)
            load_share(urls, HostedTables(tables, shard), 0, collection="tables")
            same(replica, shard)
    finally:
        for one in started:
            one.kill()
            one.wait()


def compare(replica: Replica, tables: tuple, runs: Path) -> None:
    """A replica's rows and those of the run's last checkpoint."""
    shard = make_shard(tables)
    (folder,) = runs.glob("*/checkpoints")
    newest = CheckpointStore(str(folder)).latest()
    assert newest is not None
    contents = Contents(tables={"deepfm": HostedTables(tables, shard)})
    options = LoadOptions(allow_unknown=frozenset(("module:deepfm", "optimizer:deepfm")))
    load(f"{folder}/{newest.name}", contents, options=options)
    same(replica, shard)


def same(replica: Replica, shard: Shard) -> None:
    for table in range(len(shard.specs)):
        ours, theirs = replica.shard.export(table), shard.export(table)
        assert len(ours.ids) > 100
        assert torch.equal(ours.ids, theirs.ids)
        assert torch.equal(ours.weights, theirs.weights)
        assert torch.equal(ours.counts, theirs.counts)
