"""Servers end when they are told to, whichever of their threads the system tells."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shoal.cli import app
from support.ranks import free_port
from support.small_runs import small_run

ADDRESS = "tcp://127.0.0.1:0"
COMMANDS = {
    "ps": ["--index", "0", "--of", "1", "--address", ADDRESS],
    "serve": ["--follow", f"tcp://127.0.0.1:{free_port()}", "--grpc", "127.0.0.1:0"],
}


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def waits(command: str) -> bool:
    """Whether the main thread is where a command waits for its end."""
    main = threading.main_thread().ident
    assert main is not None
    frame, names = sys._current_frames().get(main), []
    while frame is not None:
        names.append(frame.f_code.co_name)
        frame = frame.f_back
    return names[:2] == ["wait_until", command]


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_a_signal_that_another_thread_gets_ends_a_server(command: str, tmp_path: Path) -> None:
    ended, late = threading.Event(), []

    def strike() -> None:
        ends = time.monotonic() + 60
        while not waits(command) and time.monotonic() < ends:
            time.sleep(0.01)
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
        if not ended.wait(60):
            late.append(command)
            os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=strike)
    thread.start()
    file = small_run(tmp_path, examples=100, eval_examples=100)
    found = CliRunner().invoke(app, [command, str(file), *COMMANDS[command]])
    ended.set()
    thread.join()
    assert found.exit_code == 0, found.output
    assert not late
