"""Streams over processes: ranks share partitions out, and brokers that go come back."""

from __future__ import annotations

import contextlib
import io
import json
import socket
import struct
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from shoal import config, train
from shoal.checkpoint import CheckpointStore
from shoal.data import Batch, IdFeature, Kafka, KafkaFeed, Recipe, StreamLoader
from support.brokers import Brokers
from support.ranks import run_ranks
from support.stopped_streams import stops_at, stops_once_saved

pytestmark = pytest.mark.slow

BATCH = 12
START_S = 1_700_000_000


def example(n: int) -> dict[str, Any]:
    return {"u": n, "y": n % 2, "at": START_S + n}


@pytest.fixture
def brokers() -> Iterator[Brokers]:
    own = Brokers()
    yield own
    own.stop()


def send(brokers: Brokers, first: int, behind: int) -> None:
    """Partition 3 has half of all, partition 2 nothing."""
    for n in range(first, behind):
        brokers.send("clicks", json.dumps(example(n)).encode(), (0, 3, 1, 3)[n % 4])
    brokers.flush()


def trained(settings: Mapping[str, Any], resume: str | None) -> tuple[int, int, int, str]:
    """(examples, steps, rows of `u`, the run's folder)."""
    quiet = Console(file=io.StringIO(), width=100)
    result = train.run(config.from_mapping(settings), console=quiet, resume=resume)
    return result.examples, result.steps, result.rows["u"], str(result.folder)


def trained_until(position: int, *run: Any) -> tuple[int, int, int, str]:
    """As `trained`, of a stream that ends there."""
    with stops_at(position):
        return trained(*run)


@pytest.mark.multiproc
def test_ranks_train_each_record_once_and_others_continue(brokers: Brokers, tmp_path: Path):
    """Two ranks, then three, one of them of a silent partition, then one."""
    settings = settings_of(brokers, tmp_path)
    folder, sent = None, 0
    for ranks in (2, 3, 1):
        sent += 100
        send(brokers, sent - 100, sent)
        if ranks == 1:
            found = [trained_until(sent, settings, folder)]
        else:
            found = run_ranks(ranks, trained_until, sent, settings, folder, timeout_s=300)
        assert len(set(found)) == 1, "all ranks saw as many batches"
        examples, _, rows, folder = found[0]
        assert (examples, rows) == (sent, sent), "each record once: every id has a row"


def settings_of(brokers: Brokers, tmp_path: Path) -> dict[str, Any]:
    held_out = tmp_path / "eval.parquet"
    pq.write_table(pa.Table.from_pylist([example(n) for n in range(20)]), held_out)
    return {
        "name": "online",
        "threads": 1,
        "data": {
            "source": {
                "kind": "kafka",
                "stream": {
                    "servers": list(brokers.servers), "topic": "clicks",
                    "wait_s": 0.2,
                },
                "eval_paths": [str(held_out)],
                "ids": {"u": {}},
                "label": "y",
                "time": "at",
            },
            "batch_size": BATCH,
        },
        "tables": {"default": {"dim": 2}},
        "model": {"kind": "deepfm", "hidden": [4], "batch_norm": False},
        "baselines": [],
        "logging": {"tensorboard": False},
        "output": {"dir": str(tmp_path / "runs")},
    }  # fmt: skip


def saved(settings: Mapping[str, Any], sent: int) -> tuple[int, int, int]:
    """(examples, steps, the newest checkpoint's step) of a run that saves nothing at its end."""
    folder = settings["checkpoint"]["dir"]
    with stops_once_saved(folder, lambda one: one.position == sent):
        examples, steps, *_ = trained(settings, None)
    newest = CheckpointStore(folder).latest()
    return examples, steps, -1 if newest is None else newest.step


@pytest.mark.multiproc
def test_ranks_save_their_last_steps_while_a_stream_is_silent(brokers: Brokers, tmp_path: Path):
    settings = settings_of(brokers, tmp_path)
    settings |= {"checkpoint": {"every_s": 1.0, "dir": str(tmp_path / "saves")}}
    settings["output"]["save_model"] = False
    send(brokers, 0, 60)
    first, second = run_ranks(2, saved, settings, 60, timeout_s=300)
    assert first == second
    assert first[0] == 60
    assert first[1] == first[2]


class Relay:
    """Passes bytes on between a port and a broker, while it is open.

    Brokers name their own address to clients: here that of the relay, which is as long.
    """

    def __init__(self, broker: str) -> None:
        host, _, port = broker.rpartition(":")
        self._broker, self._open = (host, int(port)), True
        self._named = host.encode() + struct.pack(">i", int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        port = self._listener.getsockname()[1]
        self.server = f"127.0.0.1:{port}"
        self._instead = b"127.0.0.1" + struct.pack(">i", port)
        self._ends: list[socket.socket] = []
        self._cutting = threading.Lock()
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while True:
            try:
                ours, _ = self._listener.accept()
            except OSError:
                return
            if not self._open:
                ours.close()
                continue
            theirs = socket.create_connection(self._broker)
            with self._cutting:
                if not self._open:
                    ours.close()
                    theirs.close()
                    continue
                self._ends += [ours, theirs]
            for one, other in ((ours, theirs), (theirs, ours)):
                threading.Thread(target=self._pass, args=(one, other), daemon=True).start()

    def _pass(self, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(1 << 16):
                other.sendall(data.replace(self._named, self._instead))
        for end in (one, other):
            end.close()

    def cut(self) -> None:
        """Break what is connected, and refuse what comes."""
        with self._cutting:
            self._open = False
            for end in self._ends:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
            self._ends = []

    def mend(self) -> None:
        """Let connections in again."""
        self._open = True

    def stop(self) -> None:
        """Cut, and free the port."""
        self.cut()
        self._listener.close()


def test_a_stream_continues_when_brokers_come_back():
    times = 2
    brokers = Brokers(1)
    relay = Relay(brokers.servers[0])
    kafka = Kafka(servers=(relay.server,), topic="clicks")
    recipe = Recipe(ids=(IdFeature(name="u"),), label="y", time="at")
    loader = StreamLoader(
        KafkaFeed(kafka, recipe, None), BATCH, wait_s=0.2, max_examples=60 * times + 40
    )
    send(brokers, 0, 40)
    got: list[Batch] = []
    reader = threading.Thread(target=lambda: got.extend(loader))
    reader.start()
    sent = 40

    def has_all() -> bool:
        return sum(batch.labels.numel() for batch in got) == sent

    for _ in range(times):
        wait_until(has_all)
        relay.cut()
        wait_until(lambda: loader.feed.lost)
        send(brokers, sent, sent + 60)
        assert reader.is_alive()
        relay.mend()
        sent += 60
        wait_until(lambda: not loader.feed.lost)
    reader.join(60)
    assert not reader.is_alive()
    users = [n for batch in got for n in batch.ids["u"].values.tolist()]
    assert sorted(users) == list(range(sent))
    relay.stop()
    brokers.stop()


def wait_until(holds: Any) -> None:
    """Wait for it, for a minute at most."""
    until_s = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < until_s, "it never held"
        time.sleep(0.02)
