"""Random configs through `shoal train`: each trains or is refused in one line."""

from __future__ import annotations

import os
import traceback
from pathlib import Path
from unittest import mock

import pytest
import torch
from typer.testing import CliRunner

from shoal.cli import app
from shoal.table.spec import MAX_THREADS
from shoal.train.observing import RunObserver
from shoal.train.run_state import RunState
from support.config_mutations import case
from support.isolated import TooLong, failures, limited
from support.shares import SHARE

START_S = 10.0  # until training starts


class Stepped(BaseException):
    """Training has done a step."""


def stepped(*_: object) -> None:
    raise Stepped


def few_threads(number: int) -> None:
    assert 1 <= number <= MAX_THREADS, "more threads than torch can start"


def outcome(number: int, folder: Path) -> str | None:
    """What is wrong with how `shoal train` ends; None: nothing is."""
    made = case(number, str(folder / "runs"))
    file = folder / "tiny.yaml"
    file.write_bytes(made.text)
    started = RunState.started
    began: list[bool] = []

    def start(run_state: RunState) -> None:
        began.append(True)
        started(run_state)

    try:
        with (
            mock.patch.object(RunObserver, "stepped", stepped),
            mock.patch.object(RunState, "started", start),
            # OpenMP has no threads in a forked child: a region of more than one waits for ever.
            mock.patch.object(torch, "set_num_threads", few_threads),
            limited(START_S),
        ):
            result = CliRunner().invoke(app, ["train", str(file), "--", *made.overrides])
    except Stepped:
        return None
    except TooLong:
        if began:
            return None
        raise
    error = result.exception
    # Packages may warn on lines of their own.
    lines = [line for line in result.stderr.splitlines() if line.startswith("error:")]
    refused = result.exit_code == 2 and len(lines) == 1 and "Traceback" not in result.stderr
    if result.exit_code == 0 or (refused and isinstance(error, SystemExit)):
        return None
    trace = "".join(traceback.format_exception(error)[-6:]) if error is not None else ""
    text = made.text[:3000].decode("utf-8", "replace")
    return f"{trace}\n{made.overrides}\n{text}\n{result.output[-1000:]}"


def run_all(numbers: range, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[int, str]:
    for name in [name for name in os.environ if name.startswith("SHOAL_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(folder)
    torch.set_num_threads(1)
    found = failures(numbers, lambda number: outcome(number, folder), dead_s=60.0)
    for number, said in found.items():
        print(f"--- case {number}: {said}")
    return found


@pytest.mark.slow
def test_some_configs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_all(range(80), tmp_path, monkeypatch) == {}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(5))
def test_ten_thousand_configs(part: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = range(2_000 * part, 2_000 * (part + 1), SHARE)
    assert run_all(numbers, tmp_path, monkeypatch) == {}
