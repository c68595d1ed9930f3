"""Flights on two parameter servers and two workers: speed against two synchronous ranks, quality
against one process: `python bench/ps_training.py --json out.json`.

All processes have one thread and share this host's cores. Runs that are compared take turns.
A server that is killed midway comes back with what it saved; its run must end as well as others.
bench/README.md explains the cases.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import Case, Measured, add_json, as_row, conclude, median

__all__ = ["main"]

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("torch", "numpy", "pyzmq", "shoal")
CONFIG = str(ROOT / "examples/flights.yaml")
ENVIRON = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
BATCHES = (512, 8192)  # of the example; of bench/dist.py
STALE = (0, 4)
SERVERS = 2
NOISE = 0.003
RUN_S = 1800


@dataclass(frozen=True)
class Run:
    """What a training run came to."""

    auc: float
    examples_per_s: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("`")[0].strip())
    add_json(parser, "ps-training")
    parser.add_argument("--quick", action="store_true", help="one epoch, one round")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each kind for speed")
    parser.add_argument("--case", default="", metavar="SUBSTR", help="only cases with this in it")
    options = parser.parse_args()
    rounds, epochs = (1, 1) if options.quick else (options.rounds, 4)
    found: dict[str, Measured] = {}
    chosen = [case for case in _cases() if options.case in case.name]
    for batch in BATCHES:
        if any(f"batches of {batch}" in case.name for case in chosen):
            found |= measure(batch, epochs if batch == BATCHES[0] else 1, rounds)
    if any(case.name == KILLED for case in chosen):
        found |= killed_midway(epochs)
    rows: list[dict[str, Any]] = [as_row(case, found.get(case.name)) for case in chosen]
    conclude(rows, options.json, PACKAGES)


def _cases() -> list[Case]:
    speed = [
        Case(name=name, unit="k examples/s", peer="two synchronous ranks", bar=0.7)
        for batch in BATCHES
        for name in _speed_names(batch)
    ]
    ceiling: dict[str, Any] = {
        "unit": "AUC",
        "peer": "ceiling",
        "peer_value": NOISE,
        "better": "lower",
    }
    quality = [
        *(Case(name=_quality_name(BATCHES[0], stale), bar=1.0, **ceiling) for stale in STALE),
        Case(name=KILLED, bar=1.0, **ceiling),
    ]
    return [*speed, *quality]


KILLED = "flights, AUC away from one process, a server killed midway"


def _quality_name(batch: int, stale: int) -> str:
    return f"flights, AUC away from one process, batches of {batch}, stale_updates={stale}"


def _speed_names(batch: int) -> list[str]:
    return [f"flights, batches of {batch}, stale_updates={stale}" for stale in STALE]


def measure(batch: int, epochs: int, rounds: int) -> dict[str, Measured]:
    """Runs of one process, of ranks, and of servers and workers, in turns."""
    settings = [f"data.batch_size={batch}", f"data.epochs={epochs}"]
    names = dict(zip(STALE, _speed_names(batch), strict=True))
    ranks: list[Run] = []
    served: dict[int, list[Run]] = {stale: [] for stale in STALE}
    one = train(settings)
    _log(f"batches of {batch}, one process: {one}")
    for _ in range(rounds):
        ranks.append(train(settings, ranks=2))
        _log(f"two ranks: {ranks[-1]}")
        for stale, runs in served.items():
            runs.append(train_served(settings, stale))
            _log(f"stale_updates={stale}: {runs[-1]}")
    peer = median([run.examples_per_s for run in ranks]) / 1e3
    found = {
        names[stale]: Measured(
            ours=median([run.examples_per_s for run in runs]) / 1e3,
            peer_value=peer,
            note=f"{rounds} runs each, {epochs} epochs",
        )
        for stale, runs in served.items()
    }
    return {**found, **{_quality_name(batch, stale): _away(served[stale], one) for stale in STALE}}


def killed_midway(epochs: int) -> dict[str, Measured]:
    """A server dies halfway and comes back."""
    settings = [f"data.batch_size={BATCHES[0]}", f"data.epochs={epochs}"]
    one = train(settings)
    began_s = time.monotonic()
    train_served(settings, STALE[-1])
    took_s = time.monotonic() - began_s
    killed = train_served(settings, STALE[-1], kill_after_s=took_s / 2)
    _log(f"a server killed midway: {killed}")
    return {KILLED: _away([killed], one)}


def _away(runs: Sequence[Run], one: Run) -> Measured:
    auc = median([run.auc for run in runs])
    return Measured(ours=max(abs(auc - one.auc), 1e-6), note=f"{auc:.4f}, one {one.auc:.4f}")


def train(settings: Sequence[str], *, ranks: int = 1) -> Run:
    """One run of the example."""
    with tempfile.TemporaryDirectory() as folder:
        process = _start_training(settings, folder, ranks)
        return _finished(process, folder)


def train_served(settings: Sequence[str], stale: int, kill_after_s: float | None = None) -> Run:
    """The same on servers and workers; a server may be killed and started again meanwhile."""
    with tempfile.TemporaryDirectory() as folder, _servers(folder) as (servers, addresses):
        served = [
            "distributed.path=ps",
            f"distributed.servers.addresses=[{','.join(addresses)}]",
            f"distributed.servers.stale_updates={stale}",
            "distributed.servers.reply_s=5",
            "distributed.servers.repeats=20",
        ]
        process = _start_training([*settings, *served], folder, 2)
        if kill_after_s is not None:
            time.sleep(kill_after_s)
            servers[1].kill()
            servers[1].wait()
            servers[1] = _start_server(folder, 1, addresses[1])
        return _finished(process, folder)


@contextmanager
def _servers(folder: str) -> Iterator[tuple[list[subprocess.Popen[str]], list[str]]]:
    running: list[subprocess.Popen[str]] = []
    try:
        running.extend(_start_server(folder, k, "tcp://127.0.0.1:0") for k in range(SERVERS))
        yield running, [_address(process) for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()


def _start_server(folder: str, index: int, address: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "shoal.cli", "ps", CONFIG, "--index", str(index)]
    command += ["--of", str(SERVERS), "--address", address]
    command += ["--store", f"{folder}/store", "--save-every-s", "5"]
    return subprocess.Popen(command, env=ENVIRON, text=True, stdout=subprocess.PIPE)


def _address(server: subprocess.Popen[str]) -> str:
    assert server.stdout is not None
    return server.stdout.readline().split()[-1]


def _start_training(settings: Sequence[str], folder: str, ranks: int) -> subprocess.Popen[bytes]:
    launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--standalone"]
    command = [sys.executable, *(launcher if ranks > 1 else []), "-m", "shoal.cli", "train", CONFIG]
    command += ["threads=1", "baselines=[]", "output.save_model=false", f"output.dir={folder}/runs"]
    with open(f"{folder}/train.log", "wb") as log:
        return subprocess.Popen([*command, *settings], env=ENVIRON, stdout=log, stderr=log)


def _finished(process: subprocess.Popen[bytes], folder: str) -> Run:
    try:
        status = process.wait(RUN_S)
    finally:
        process.kill()
    if status:
        raise SystemExit(Path(f"{folder}/train.log").read_text()[-3000:])
    (metrics,) = Path(folder).glob("runs/*/metrics.json")
    said = json.loads(metrics.read_text())
    (model,) = said["models"].values()
    return Run(auc=model["auc"], examples_per_s=said["examples_per_s"])


def _log(text: str) -> None:
    print(f"load {os.getloadavg()[0]:.1f}: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
