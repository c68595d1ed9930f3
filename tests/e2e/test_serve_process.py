"""`shoal serve` as a process: it starts, follows a run that trains, and ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from shoal.cli import app
from shoal.serve.client import ReplicaSet
from shoal.serve.loading import FolderSource
from shoal.serve.repository import Repository
from support import train_followed
from support.ranks import free_port
from support.served_models import TINY, tiny_inputs, trained

WAIT_S = 120.0
PORTS = ["--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0"]


@contextmanager
def process(
    *arguments: str, cwd: Path, program: Sequence[str] = ("-m", "shoal.cli")
) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, *program, *arguments],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as running:
        try:
            yield running
        finally:
            running.kill()


def addresses(running: subprocess.Popen[str]) -> tuple[str, str]:
    assert running.stdout is not None
    seen = []
    for line in running.stdout:
        seen.append(line)
        found = re.search(r"gRPC (\S+), HTTP (\S+)", line)
        if found:
            return found[1], found[2]
    raise AssertionError("".join(seen))


def get(address: str, path: str) -> httpx.Response:
    return httpx.get(f"http://{address}/{path}", timeout=60)


@pytest.mark.slow
def test_it_serves_a_run_until_it_is_ended(tmp_path: Path) -> None:
    run = trained(tmp_path)
    with process("serve", str(run), *PORTS, cwd=tmp_path) as running:
        grpc_address, _ = addresses(running)
        inputs = tiny_inputs(4)
        source = FolderSource(run)
        model = source.load(source.newest() or 0)
        with ReplicaSet([grpc_address]) as clients:
            found = clients.predict("tiny", inputs, timeout_s=60)["prediction"]
        assert np.array_equal(found, model.run([model.read(inputs)])[0]["prediction"])
        running.send_signal(signal.SIGTERM)
        assert running.wait(200) == 0


@pytest.mark.slow
@pytest.mark.parametrize(("sent", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_it_ends_while_it_loads(
    sent: signal.Signals, code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = trained(tmp_path)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def load(repository: Repository) -> None:
        os.kill(os.getpid(), sent)
        time.sleep(30)
        raise AssertionError("it loads on")

    monkeypatch.setattr(Repository, "__enter__", load)
    try:
        found = CliRunner().invoke(app, ["serve", str(run), *PORTS])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert found.exit_code == code, found.output


@pytest.mark.slow
@pytest.mark.parametrize("shares", [0, 2])
def test_it_follows_a_run_that_trains(shares: int, tmp_path: Path) -> None:
    """At the end it predicts what the run's checkpoint does; also with rows in other processes."""
    publisher = f"tcp://127.0.0.1:{free_port()}"
    file = tmp_path / "run.yaml"
    publish = {"address": publisher, "every_s": 0.05, "dense_every_s": 0.1, "linger_s": 200.0}
    file.write_text(yaml.safe_dump({**TINY, "publish": publish}))
    rows = [f"127.0.0.1:{free_port()}" for _ in range(shares)]
    options = [
        ["--role", "ps", "--index", str(k), "--of", str(shares), "--grpc", address]
        for k, address in enumerate(rows)
    ]
    options.append([part for one in rows for part in ("--role", "entry", "--ps", one)])
    with ExitStack() as stack:
        started = [
            stack.enter_context(
                process("serve", str(file), "--follow", publisher, *PORTS, *own, cwd=tmp_path)
            )
            for own in options
        ]
        grpc_address, http_address = [addresses(one) for one in started][-1]
        assert get(http_address, "healthz").status_code == 503
        followed = (train_followed.__file__, str(len(started)))
        with process("train", str(file), cwd=tmp_path, program=followed) as trainer:
            printed, _ = trainer.communicate(timeout=240)
            assert trainer.returncode == 0, printed
        ends = time.monotonic() + WAIT_S  # each server looks for its first version once a second
        while get(http_address, "healthz").status_code != 200:
            assert time.monotonic() < ends
            time.sleep(0.1)
        (run,) = (tmp_path / "runs").iterdir()
        source = FolderSource(run)
        model = source.load(source.newest() or 0)
        inputs = tiny_inputs(64)
        wanted = model.run([model.read(inputs)])[0]["prediction"]
        with ReplicaSet([grpc_address]) as clients:
            ends = time.monotonic() + WAIT_S  # the newest dense weights take a poll
            while not np.array_equal(
                clients.predict("tiny", inputs, timeout_s=60)["prediction"], wanted
            ):
                assert time.monotonic() < ends
                time.sleep(0.1)
        metrics = get(http_address, "metrics").text
        assert 'shoal_staleness_seconds{model="tiny"}' in metrics


def test_options_that_do_not_go_together(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from shoal.cli import app

    for options in (
        ["--tls-key", "x"],
        ["--role", "entry"],
        ["--ps", "127.0.0.1:1"],
        ["--index", "1"],
        ["--of", "2"],
        ["--follow", "tcp://127.0.0.1:1", "--version", "1"],
    ):
        result = CliRunner().invoke(app, ["serve", str(tmp_path), *options])
        assert result.exit_code == 2
        assert "allowed" in result.stderr
    file = tmp_path / "servers.yaml"
    file.write_text(yaml.safe_dump({**TINY, "distributed": {"path": "ps"}}))
    result = CliRunner().invoke(app, ["serve", str(file), "--follow", "tcp://127.0.0.1:1"])
    assert (result.exit_code, "parameter servers" in result.stderr) == (2, True)
    result = CliRunner().invoke(app, ["serve", str(tmp_path)])
    assert (result.exit_code, "without a version" in result.stderr) == (2, True)
