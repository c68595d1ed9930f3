"""A real ZooKeeper on loopback, for tests: it can be stopped, frozen and started again."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from support.ranks import free_port

JAR = Path("/usr/share/java/zookeeper.jar")
DEADLINE_S = 60.0


def require_zookeeper() -> None:
    """Skip, with the reason, where it is not installed; fail where it has to be (`.ci/run`)."""
    missing = [
        what
        for what, there in (
            ("java", shutil.which("java") is not None),
            (f"{JAR} (Debian's package zookeeper)", JAR.is_file()),
        )
        if not there
    ]
    if missing:
        reason = f"no ZooKeeper to test with: {' and '.join(missing)} missing"
        print(reason)
        if os.environ.get("CI") or os.environ.get("TEST_ZOOKEEPER") == "required":
            pytest.fail(reason)
        pytest.skip(reason)


class ZooKeeperServer:
    """One server; its data stay in `folder` over restarts."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.hosts = f"127.0.0.1:{self.port}"
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True, exist_ok=True)
        settings = {
            "tickTime": 500,
            "maxSessionTimeout": 60_000,
            "initLimit": 10,
            "syncLimit": 5,
            "dataDir": folder / "data",
            "clientPort": self.port,
            "clientPortAddress": "127.0.0.1",
            "admin.enableServer": "false",
            "4lw.commands.whitelist": "ruok,stat,mntr,srvr,conf,envi",
        }
        text = "".join(f"{key}={value}\n" for key, value in settings.items())
        (folder / "zoo.cfg").write_text(text)

    def start(self) -> None:
        """Start it, and wait until it answers."""
        main = "org.apache.zookeeper.server.quorum.QuorumPeerMain"
        with (self._folder / "log.txt").open("ab") as log:
            self._process = subprocess.Popen(
                ["java", "-Xmx128m", "-cp", f"{self._folder}:{JAR}", main, "zoo.cfg"],
                cwd=self._folder,
                stdout=log,
                stderr=log,
            )
        until = time.monotonic() + DEADLINE_S
        while not self._answers():
            log_text = (self._folder / "log.txt").read_text()
            assert self._process.poll() is None, log_text
            assert time.monotonic() < until, log_text
            time.sleep(0.05)

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=5) as connection:
                connection.sendall(b"ruok")
                return connection.recv(4) == b"imok"
        except OSError:
            return False

    def stop(self) -> None:
        """Kill it, as a crash does."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self._process.kill()
            self._process.wait()
            self._process = None

    def signal(self, number: int) -> None:
        """Say SIGSTOP: it answers nothing, and its connections stay open."""
        assert self._process is not None
        self._process.send_signal(number)


def expire(discovery: object) -> None:
    """End the session of a `ZooKeeper` or of `Nodes` as if it had been away for too long."""
    from kazoo.client import KazooClient

    client = getattr(discovery, "nodes", discovery).client
    twin = KazooClient(
        hosts=client.hosts[0][0] + f":{client.hosts[0][1]}", client_id=client.client_id
    )
    twin.start(DEADLINE_S)
    twin.stop()
    twin.close()
