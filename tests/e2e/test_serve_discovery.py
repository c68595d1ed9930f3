"""`shoal serve` registers its state in a real ZooKeeper, and is found there until it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from shoal.compat.monolith.agent_service.backends import ZKBackend
from shoal.compat.monolith.agent_service.data_def import AgentConfig, ServerType
from shoal.compat.monolith.agent_service.replica_manager import ReplicaWatcher
from shoal.discovery.nodes import Nodes
from shoal.serve.client import remote_predict
from support.served_models import tiny_inputs, trained
from support.zookeeper import ZooKeeperServer, require_zookeeper

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("zookeeper")]


@pytest.fixture
def zookeeper(tmp_path: Path) -> Iterator[ZooKeeperServer]:
    require_zookeeper()
    one = ZooKeeperServer(tmp_path / "zookeeper")
    try:
        one.start()
        yield one
    finally:
        one.stop()


def until(reached: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not reached():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("layout", ["service", "binding"])
def test_a_server_is_found_while_it_serves(
    zookeeper: ZooKeeperServer, tmp_path: Path, layout: str
) -> None:
    run = trained(tmp_path / "runs", baselines=[])
    nodes = Nodes(zookeeper.hosts, reply_s=60)
    watcher = ReplicaWatcher(nodes, AgentConfig("demo", "tiny"))
    watcher.watch_data()
    backend = ZKBackend("demo", zk_client=nodes)
    backend.subscribe_model("tiny")

    def found() -> list[str]:
        if layout == "service":
            return watcher.get_replicas(ServerType.ENTRY, 0)
        return list(backend.get_sync_targets("entry")[1])

    ports = ["--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0"]
    where = ["--discovery", f"zookeeper://{zookeeper.hosts}/demo", "--layout", layout]
    with subprocess.Popen(
        [sys.executable, "-m", "shoal.cli", "serve", str(run), *ports, *where],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as process:
        try:
            until(lambda: len(found()) == 1, process)
            inputs = tiny_inputs(5)
            (prediction,) = remote_predict(
                list(inputs),
                list(inputs.values()),
                ["prediction"],
                "tiny",
                max_rpc_deadline_millis=60_000,
                servers=found(),
            )
            assert prediction.shape == (5,) and np.isfinite(prediction).all()
            zookeeper.stop()
            zookeeper.start()
            until(lambda: nodes.client.connected and len(found()) == 1, process)
            process.send_signal(signal.SIGTERM)
            printed, _ = process.communicate(timeout=200)
            assert process.returncode == 0, printed
        finally:
            process.kill()
    deadline = time.monotonic() + 60
    while found():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    nodes.close()
