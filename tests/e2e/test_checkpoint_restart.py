"""A job whose rank is killed is started again by torchrun, and ends as if nothing had happened."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow.ipc as ipc
import pytest
import yaml
from rich.console import Console

from shoal import config, train
from shoal.checkpoint import CheckpointStore, read_manifest, verify
from support.rank_devices import DEVICES
from support.ranks import free_port, run_ranks

# Longer than the limits below together.
pytestmark = [pytest.mark.multiproc, pytest.mark.slow, pytest.mark.timeout(1500)]

# Of a job, twice that a rank needs to its fifth step: kernels are compiled first on a GPU.
LIMIT_S = {"cpu": 200, "cuda": 360}
ROOT = Path(__file__).parents[2]
CONFIG: dict[str, Any] = {
    "name": "tiny",
    "seed": 3,
    "threads": 1,
    "data": {"source": "flights", "max_examples": 240, "batch_size": 30, "shuffle": "always"},
    "eval": {"max_examples": 100},
    "tables": {"default": {"dim": 4, "admission": {"threshold": 2}}},
    "model": {"kind": "deepfm", "hidden": [4], "dropout": 0.3},
    "baselines": [],
    "logging": {"tensorboard": False},
    "checkpoint": {"every_steps": 2, "background": False},
}


def start(folder: Path, told: Path, *overrides: str) -> subprocess.Popen[str]:
    file = folder / "tiny.yaml"
    file.parent.mkdir(exist_ok=True)
    file.write_text(yaml.safe_dump(CONFIG))
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SHOAL_")}
    environment |= {
        "PYTHONPATH": os.pathsep.join([*filter(None, sys.path), str(ROOT / "tests")]),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    agent = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    agent += ["--max-restarts=2", "--monitor-interval=0.1"]
    agent += ["--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    script = [str(ROOT / "tests" / "support" / "train_told.py"), str(told)]
    job = ["train", str(file), f"output.dir={folder / 'runs'}", *overrides]
    return subprocess.Popen(
        [*agent, *script, *job],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def end(job: subprocess.Popen[str], limit_s: float) -> str:
    try:
        out, err = job.communicate(timeout=limit_s)
    finally:
        job.kill()
    assert job.returncode == 0, err
    return out


def kill_told(job: subprocess.Popen[str], told: Path, limit_s: float) -> None:
    """Kill -9 the rank that says where it is."""
    deadline = time.monotonic() + limit_s
    while not told.exists():
        assert job.poll() is None, job.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(int(told.read_text()), signal.SIGKILL)


def model_of(checkpoints: Path) -> tuple[int, list[Any], list[tuple[str, int]]]:
    """Step, rows, and checksums of occurrences and dense weights of the newest one.

    Rows are without their versions: those count cuts, of which a killed job made others.
    """
    assert verify(str(checkpoints)).problems == ()
    newest = CheckpointStore(checkpoints).latest()
    assert newest is not None
    assert newest.kind == "full"
    rows, kept = [], []
    for file in read_manifest(checkpoints / newest.name).files:
        if file.kind == "rows":
            with ipc.open_file(checkpoints / newest.name / file.path) as source:
                rows.append(source.read_all().drop_columns(["version"]).to_pydict())
        elif file.kind != "state" and not file.path.endswith(".metadata"):
            kept.append((file.path, file.crc32))
    assert rows
    return newest.step, rows, kept


def uninterrupted(folder: Path, device: str) -> Path:
    settings = config.from_mapping({**CONFIG, "device": device, "output": {"dir": str(folder)}})
    return train.run(settings, console=Console(quiet=True)).folder


@pytest.mark.parametrize("device", DEVICES)
def test_a_killed_rank_changes_nothing(tmp_path: Path, device: str) -> None:
    """Once with a folder of checkpoints of its own, once in the run folder that the job made.

    The second one saves beside training, so that it may go on from an earlier save.
    """
    told = [tmp_path / "first.pid", tmp_path / "second.pid"]
    saved, limit_s = tmp_path / "first" / "saved", LIMIT_S[device]
    jobs = [
        start(tmp_path / "first", told[0], f"device={device}", f"checkpoint.dir={saved}"),
        start(tmp_path / "second", told[1], f"device={device}", "checkpoint.background=true"),
    ]
    try:
        for job, file in zip(jobs, told, strict=True):
            kill_told(job, file, limit_s)
        outs = [end(job, limit_s) for job in jobs]
    finally:
        for job in jobs:
            job.kill()
    found = []
    for side, out, steps in zip(("first", "second"), outs, ("4", "2|4"), strict=True):
        (folder,) = (tmp_path / side / "runs").iterdir()
        assert re.search(rf"continuing {re.escape(str(folder))}, step ({steps})\b", out)
        assert out.splitlines()[-1] == f"report: {folder / 'report.html'}"
        lines = (folder / "logs" / "log.jsonl").read_text().splitlines()
        logged = [row["step"] for row in map(json.loads, lines) if "examples" in row]
        assert logged == list(range(1, 9))
        found.append(model_of(saved if side == "first" else folder / "checkpoints"))
    folder = tmp_path / "whole"
    whole, _ = run_ranks(2, uninterrupted, folder, device, timeout_s=limit_s)
    assert found == [model_of(whole / "checkpoints")] * 2
