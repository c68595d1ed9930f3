"""The demo of online learning: a model that follows its trainer against one that is loaded daily.

Events come in the order of their times, a day in some seconds. A trainer learns from each once its
outcome is known, and publishes what changed. Two replicas follow it; a third server loads the
trainer's newest checkpoint once a day, as a daily export would be. A client asks both for each
event when it happens. `make demo-online` prints the AUC of both, an interval of their difference,
and how fresh the replicas were, and writes one HTML page:

    python examples/demo_online.py [--stream schedule|flights|clicks] [--out FOLDER] [--days N]
        [--day-s SECONDS]

`schedule` are the flights of November, after a model of the ten months before; its inputs are known
the day before, so that a model learns of today's delays only by learning today. `flights` are the
same, and what happened at airports and to aircraft in the last hours is an input of both models.
`clicks` are made up: half of their ids are new ones, which are the most popular while they are
young, so that a model that did not learn today does not know them.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import yaml

from shoal.checkpoint import CheckpointStore
from shoal.data import SyntheticClicks, flights
from shoal.metrics import auc
from shoal.report import Chart, Series, chart_html, page
from shoal.serve.client import ReplicaSet

SHOAL = (sys.executable, "-m", "shoal.cli")
CONFIG = "examples/flights.yaml"
DAY_S = 86_400
CLICKS = {
    "num_features": 8, "vocabulary": 1000, "fresh_share": 0.5, "fresh_per_example": 0.01,
    "num_dense": 2, "signal": 1.0,
}  # fmt: skip
BASE_CLICKS, CLICKS_A_DAY = 60_000, 2_000
MODEL = "online"
NAMES = ("live", "daily")
HISTORIES = ("history", "flight_history")
# Of rows, biases and dense weights on the stream; those of flights as bench/online.py chose them.
RATES = {
    "schedule": (0.05, 0.05, 0.0005),
    "flights": (0.005, 0.005, 0.00005),
    "clicks": (0.05, 0.05, 0.0001),
}
SEED = 2013
BOOTSTRAPS = 500


@dataclass
class Stream:
    """Events of some days, in order of time.

    lists: whether a feature is of lists. known_s: when each outcome is known.
    """

    inputs: dict[str, np.ndarray]
    labels: np.ndarray
    times_s: np.ndarray
    lists: dict[str, bool]
    dense: tuple[str, ...]
    known_s: np.ndarray

    @classmethod
    def of_flights(cls, begin_s: int, end_s: int, *, hours: bool) -> Stream:
        """Flights between two times; hours: with what happened in the hours before them."""
        every = flights.load()
        whole, times = every.examples, every.examples.times()
        kept = torch.nonzero((times >= begin_s) & (times < end_s)).flatten()
        batch = whole.take(kept)
        inputs: dict[str, np.ndarray] = {}
        features = [one for one in flights.RECIPE.ids if hours or one.name not in HISTORIES]
        dense = flights.DENSE if hours else ("distance", "minute_of_day", *flights.WEATHER)
        for one in features:
            ragged = batch.ids[one.name]
            ids, lengths = ragged.values.numpy(), ragged.lengths.numpy()
            if not one.is_list:
                inputs[one.name] = ids
                continue
            longest = max(1, int(lengths.max(initial=0)))
            padded = np.zeros((len(lengths), longest), dtype=np.int64)
            padded[np.arange(longest) < lengths[:, None]] = ids
            inputs[one.name], inputs[f"{one.name}_lengths"] = padded, lengths.astype(np.int64)
        assert batch.dense is not None
        inputs["dense"] = batch.dense[:, : len(dense)].contiguous().numpy()
        lists = {one.name: one.is_list for one in features}
        times_s = times[kept].numpy()
        known_s = every.known_s[kept].numpy()
        return cls(inputs, batch.labels.numpy(), times_s, lists, dense, known_s)

    @classmethod
    def of_clicks(cls, days: int) -> Stream:
        """The days after those that the base model has seen."""
        made = SyntheticClicks(examples=days * CLICKS_A_DAY, first=BASE_CLICKS, seed=SEED, **CLICKS)
        batch = made.take(torch.arange(len(made)))
        assert batch.dense is not None
        inputs = {name: batch.ids[name].values.numpy() for name in made.features}
        inputs["dense"] = batch.dense.numpy()
        times_s = flights.SPLIT_S + np.arange(len(made)) * (DAY_S // CLICKS_A_DAY)
        dense = tuple(f"d{number}" for number in range(made.num_dense))
        lists = dict.fromkeys(made.features, False)
        return cls(inputs, batch.labels.numpy(), times_s, lists, dense, times_s + 600)

    def write(self, path: Path) -> None:
        """A Parquet file that trains the same examples, each at the time its outcome is known."""
        columns: dict[str, pa.Array] = {}
        for name, is_list in self.lists.items():
            ids = self.inputs[name]
            if is_list:
                lengths = self.inputs[f"{name}_lengths"]
                used = ids[np.arange(ids.shape[1]) < lengths[:, None]]
                offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
                columns[name] = pa.ListArray.from_arrays(offsets, pa.array(used))
            else:
                columns[name] = pa.array(ids)
        for number, name in enumerate(self.dense):
            columns[name] = pa.array(self.inputs["dense"][:, number])
        columns |= {"outcome": pa.array(self.labels), "at": pa.array(self.known_s)}
        pq.write_table(pa.table(columns), path)

    def source(self, path: Path) -> dict[str, object]:
        """The settings of `data.source` for the file."""
        ids = {name: {"is_list": is_list} for name, is_list in self.lists.items()}
        return {
            "kind": "parquet", "paths": [str(path)], "eval_paths": [str(path)], "ids": ids,
            "dense": list(self.dense), "label": "outcome", "time": "at",
        }  # fmt: skip


@dataclass
class Seen:
    """What the client saw."""

    first: int  # event; those before it came while servers started
    scores: dict[str, list[np.ndarray]] = field(default_factory=lambda: {n: [] for n in NAMES})
    asked_ms: list[float] = field(default_factory=list)
    staleness_s: list[float] = field(default_factory=list)


class Demo:
    """Processes that end with it."""

    def __init__(self, out: Path, stream: str, days: int, day_s: float) -> None:
        self._kind = stream
        self._out, self._days, self._speed = out, days, DAY_S / day_s
        self._day_s = day_s
        self._running: list[subprocess.Popen[bytes]] = []

    def start(self, *command: str) -> subprocess.Popen[bytes]:
        """Start a command of shoal, with its output in the folder."""
        log = (self._out / f"{len(self._running)}-{command[0]}.log").open("wb")
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            (*SHOAL, *command), stdout=log, stderr=subprocess.STDOUT, env=environment
        )
        self._running.append(process)
        return process

    def run(self) -> int:
        """The whole demo."""
        print("training on what came before ...", flush=True)
        base = self._out / "base"
        before: dict[str, Any] = {"output": {"dir": str(base)}}
        split_s = flights.SPLIT_S
        if self._kind == "clicks":
            source = {"kind": "synthetic", "examples": BASE_CLICKS, "eval_examples": 1000, **CLICKS}
            before["data"] = {"source": source, "batch_size": 64}
            stream = Stream.of_clicks(self._days)
        else:
            hours, end_s = self._kind == "flights", split_s + self._days * DAY_S
            stream = Stream.of_flights(split_s, end_s, hours=hours)
        if self._kind == "schedule":
            file = self._out / "before.parquet"
            seen = Stream.of_flights(0, split_s, hours=False)
            seen.write(file)
            before["data"] = {"source": seen.source(file), "batch_size": 512}
            before["eval"] = {"max_examples": 512}
        if self.start("train", self._config("before", before), "data.epochs=1").wait():
            raise SystemExit(f"demo: training failed; see {self._out}")
        (base,) = (config.parent for config in base.glob("*/config.yaml"))
        publisher, ports = f"tcp://127.0.0.1:{_free_port()}", [_free_port() for _ in range(6)]
        grpc = [f"127.0.0.1:{port}" for port in ports[:3]]
        http = [f"127.0.0.1:{port}" for port in ports[3:]]
        online = self._online(stream, base, publisher)
        started_s = time.time()
        for number in range(2):
            self._serve(online, grpc[number], http[number], "--follow", publisher)
        _wait_for(http[:2], "/v2/health/live")
        # The trainer starts, saves what it begins with, and the daily server loads that; then
        # events begin. Each of both starts takes about as long as these two did.
        margin_s = self._day_s + 2 * (time.time() - started_s) + 10
        began_s = time.time() + margin_s
        print(f"starting a trainer and a server; events begin in {margin_s:.0f} s", flush=True)
        trainer = self.start("train", online, f"data.replay.clock_s={began_s}")
        # The daily one's first model is the trainer's first save.
        self._serve(str(_saved_run(self._out / "online", trainer)), grpc[2], http[2])
        _wait_for(http, "/v2/health/ready")
        if (late_s := time.time() - began_s) > 0:
            print(f"servers are {late_s:.0f} s late: earlier events are left out", flush=True)
        print(f"{len(stream.labels):,} {self._kind} of {self._days} days, {self._day_s:g} s a day")
        with ReplicaSet(grpc[:2]) as live, ReplicaSet(grpc[2:]) as daily:
            found = self._ask(stream, {"live": live, "daily": daily}, http[0], began_s)
        if not found.staleness_s:
            raise SystemExit("demo: all events came before servers were ready; raise --day-s")
        return self._report(stream, found)

    def _serve(self, run: str, grpc: str, http: str, *more: str) -> None:
        self.start("serve", run, "--grpc", grpc, "--http", http, "--name", MODEL, *more)

    def _online(self, stream: Stream, base: Path, publisher: str) -> str:
        """The config of the run that follows the events."""
        file = self._out / "events.parquet"
        stream.write(file)
        since = datetime.fromtimestamp(int(stream.times_s[0]), timezone.utc)
        online = {
            "output": {"dir": str(self._out / "online")},
            "data": {
                "source": stream.source(file),
                "batch_size": 32,
                "replay": {"speed": self._speed, "since": since.isoformat()},
            },
            "eval": {"max_examples": 512},
            "publish": {"address": publisher, "dense_every_s": 1},
            "checkpoint": {"every_s": self._day_s, "warm_start": str(base)},
        }
        return self._config("online", online, rates=RATES[self._kind])

    def _config(
        self, name: str, changes: Mapping[str, Any], rates: tuple[float, ...] | None = None
    ) -> str:
        """The example's config, changed; with rates of its rows, biases and dense weights."""
        settings: dict[str, Any] = yaml.safe_load(Path(CONFIG).read_text())
        settings |= {"baselines": [], **changes}
        # Batch statistics of some minutes would follow the hour of the day.
        settings["model"]["batch_norm"] = False
        table, dense = settings["tables"]["default"], settings["dense_optimizer"]
        if self._kind == "clicks":
            settings["features"] = {}
            rates = rates or (0.05, 0.05, 0.001)
        if self._kind == "schedule":
            for one in HISTORIES:
                del settings["features"][one]
        if rates is not None:
            table["optimizer"]["lr"], table["bias"]["optimizer"]["lr"], dense["lr"] = rates
        path = self._out / f"{name}.yaml"
        path.write_text(yaml.safe_dump(settings))
        return str(path)

    def _ask(
        self, stream: Stream, sets: Mapping[str, ReplicaSet], status: str, began_s: float
    ) -> Seen:
        due_s = began_s + (stream.times_s - stream.times_s[0]) / self._speed
        at, total = int(np.searchsorted(due_s, time.time())), len(stream.labels)
        seen, printed_s = Seen(first=at), 0.0
        while at < total:
            time.sleep(max(0.0, due_s[at] - time.time()))
            until = max(at + 1, int(np.searchsorted(due_s, time.time(), side="right")))
            inputs = {name: values[at:until] for name, values in stream.inputs.items()}
            for name, replicas in sets.items():
                asked_s = time.monotonic()
                found = replicas.predict(MODEL, inputs, timeout_s=10.0)["prediction"]
                seen.scores[name].append(found)
                seen.asked_ms.append(1000 * (time.monotonic() - asked_s))
            staleness_s = _staleness_s(status)
            if staleness_s is not None:
                seen.staleness_s.append(staleness_s)
            at = until
            if time.time() > printed_s + 5:
                printed_s = time.time()
                day = (stream.times_s[at - 1] - stream.times_s[0]) / DAY_S
                print(f"  day {day:4.1f} of {self._days}", flush=True)
        return seen

    def _report(self, stream: Stream, seen: Seen) -> int:
        labels = torch.from_numpy(stream.labels[seen.first :])
        scores = {n: torch.from_numpy(np.concatenate(seen.scores[n])) for n in NAMES}
        whole = {name: auc(scores[name], labels) for name in NAMES}
        ranges = _intervals(scores, labels)
        fresh = np.quantile(seen.staleness_s, (0.5, 0.99))
        day = torch.from_numpy((stream.times_s - stream.times_s[0]) // DAY_S)[seen.first :]
        days = day.unique().tolist()
        daily = {n: [auc(scores[n][day == d], labels[day == d]) for d in days] for n in NAMES}
        facts = {
            "AUC, live (95 % interval)": f"{whole['live']:.4f} ({ranges['live']})",
            "AUC, loaded daily": f"{whole['daily']:.4f} ({ranges['daily']})",
            "difference": f"{whole['live'] - whole['daily']:+.4f} ({ranges['difference']})",
            "age of live rows, median and p99": f"{fresh[0]:.2f} s, {fresh[1]:.2f} s",
            "reply, median": f"{np.median(seen.asked_ms):.1f} ms",
            self._kind: f"{len(labels):,}",
        }
        for name, value in facts.items():
            print(f"{name:34} {value}")
        axis = tuple(float(d + 1) for d in days)
        by_day = Chart(
            title="AUC of each day", x_label="day", y_label="AUC",
            series=tuple(Series(name=n, x=axis, y=tuple(daily[n])) for n in NAMES),
        )  # fmt: skip
        most_s = max(2.0, float(fresh[1]))
        counts, edges = np.histogram(np.minimum(seen.staleness_s, most_s), 40, (0.0, most_s))
        bars = np.concatenate([[0], np.repeat(counts, 2), [0]]).astype(float)
        ages = Chart(
            title="How old live rows were", y_label="samples",
            x_label=f"seconds; the last bar has those of {most_s:.1f} s and more, too",
            series=(Series(name="samples", x=tuple(np.repeat(edges, 2)), y=tuple(bars)),),
            y_from_zero=True,
        )  # fmt: skip
        charts = "".join(f"<section>{chart_html(chart)}</section>" for chart in (by_day, ages))
        file = self._out / "online.html"
        subtitle = (
            f"Live replicas against a model that is loaded once a day: {len(days)} days of "
            f"{self._kind}, {self._day_s:g} s a day"
        )
        grid = f'<div class="grid">{charts}</div>'
        file.write_text(page("Online learning", subtitle, facts, grid))
        print(f"page: {file}")
        return 0

    def end(self) -> None:
        """End all processes that still run."""
        for process in self._running:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in self._running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()


def _intervals(scores: Mapping[str, torch.Tensor], labels: torch.Tensor) -> dict[str, str]:
    """95 % bootstrap intervals, over events, of the AUCs and of live less daily."""
    generator = torch.Generator().manual_seed(SEED)
    found: dict[str, list[float]] = {name: [] for name in (*NAMES, "difference")}
    for _ in range(BOOTSTRAPS):
        rows = torch.randint(len(labels), (len(labels),), generator=generator)
        one, other = (auc(scores[name][rows], labels[rows]) for name in NAMES)
        for name, value in zip(found, (one, other, one - other), strict=True):
            found[name].append(value)
    ends = {name: np.quantile(values, (0.025, 0.975)) for name, values in found.items()}
    signs = {"difference": "+"}
    return {
        name: f"{low:{signs.get(name, '')}.4f} to {high:{signs.get(name, '')}.4f}"
        for name, (low, high) in ends.items()
    }


def _staleness_s(address: str) -> float | None:
    """Of the live model, as its server reports it."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as reply:
        for line in reply.read().decode().splitlines():
            if line.startswith("shoal_staleness_seconds"):
                return float(line.split()[-1])
    return None


def _wait_for(addresses: Sequence[str], path: str) -> None:
    """Wait until servers answer."""
    left, until_s = list(addresses), time.monotonic() + 300
    while left:
        if time.monotonic() > until_s:
            raise SystemExit(f"demo: no answer of {', '.join(left)}")
        try:
            urllib.request.urlopen(f"http://{left[0]}{path}", timeout=5).close()
        except OSError:
            time.sleep(0.2)
        else:
            left.pop(0)


def _saved_run(runs: Path, trainer: subprocess.Popen[bytes]) -> Path:
    """The run's folder, once it has a checkpoint."""
    until_s = time.monotonic() + 300
    while time.monotonic() < until_s and trainer.poll() is None:
        for folder in runs.glob("*/checkpoints"):
            if CheckpointStore(folder).latest() is not None:
                return folder.parent
        time.sleep(0.2)
    raise SystemExit("demo: the trainer saved nothing")


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def main() -> int:
    """Run the demo."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/demo-online"))
    parser.add_argument("--stream", choices=tuple(RATES), default="schedule")
    parser.add_argument("--days", type=int, default=10)
    parser.add_argument("--day-s", type=float, default=10.0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # servers and the trainer need the cores
    out = arguments.out / time.strftime("%Y%m%d-%H%M%S")
    out.mkdir(parents=True)
    demo = Demo(out, arguments.stream, arguments.days, arguments.day_s)
    try:
        return demo.run()
    finally:
        demo.end()


if __name__ == "__main__":
    sys.exit(main())
