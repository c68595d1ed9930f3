"""A trainer that publishes, and replicas, each in a process that can be killed or stopped."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shoal.checkpoint import CheckpointStore
from shoal.errors import ShoalError
from shoal.sync.publisher import Publisher
from shoal.sync.replica import Replica
from support.published import SECRET, SPECS, WAIT_S, exported, resumed, save, train, trainers

Rows = dict[str, list[np.ndarray[Any, Any]]]

REPLY_S = 0.3
_SAVED = 8  # steps from one checkpoint to the next


class Started:
    """A function in a process of its own, and a connection to it."""

    def __init__(self, work: Callable[..., None], *args: Any) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["shoal.sync.replica", "shoal.checkpoint"])
        self._here, there = context.Pipe()
        self._process = context.Process(target=work, args=(there, *args), daemon=True)
        self._process.start()
        there.close()

    def say(self, value: Any) -> None:
        self._here.send(value)

    def hear(self) -> Any:
        """What it says next."""
        assert self._here.poll(2 * WAIT_S), "it says nothing"
        return self._here.recv()

    def stop_for(self, seconds: float) -> None:
        """Nothing of it runs meanwhile; its connections stay."""
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(self._process.pid, signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.join()
        self._here.close()


def trainer(there: Connection, folder: Path, address: str, seed: int, keep_bytes: int) -> None:
    """Train, save and publish from the newest checkpoint on, until it hears something; then say
    (incarnation, version, rows), and answer replicas."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    draw, begins = random.Random(seed), None
    steps = max((one.step for one in CheckpointStore(folder).list()), default=0)
    if steps:
        rank, *begins = resumed(folder)
    else:
        (rank,) = trainers(1)
    with Publisher(
        rank, every_s=0.02, keep_bytes=keep_bytes, resumed=tuple(begins) if begins else None
    ) as publisher:
        server = _until(lambda: publisher.serve(address, secret=SECRET))
        there.send(server.address)
        # The last step may clear a table, and a trainer may hear before its first step.
        while not there.poll(0.01) or not all(len(one[0]) for one in _rows(rank.shard).values()):
            train([rank], draw)
            steps += 1
            if steps % _SAVED == 1:
                saving = save(rank, folder, steps)
                publisher.saved(saving.id, saving.point["model"])
        there.recv()
        version = publisher.publish()
        there.send((publisher.status().incarnation, version, _rows(rank.shard)))
        there.recv()


def follower(there: Connection, address: str, checkpoint: str | None, share: int, of: int) -> None:
    """Follow; on hearing (incarnation, version), say the rows of that version."""
    torch.set_num_threads(1)
    with Replica(
        SPECS, [address], every_s=0.01, reply_s=REPLY_S, secret=SECRET,
        checkpoint=checkpoint, share=share, of=of,
    ) as replica:  # fmt: skip
        there.send("follows")
        incarnation, version = there.recv()
        ends = time.monotonic() + WAIT_S
        while True:
            (status,) = replica.status()
            has = status.incarnation == incarnation and status.version >= version
            if (has and status.state == "AVAILABLE") or time.monotonic() > ends:
                break
            time.sleep(0.01)
        there.send((status, _rows(replica.shard)))
        there.recv()


def _rows(shard: Any) -> Rows:
    return {spec.name: [one.numpy() for one in exported([shard], spec.name)] for spec in SPECS}


def _until(work: Callable[[], Any]) -> Any:
    """What work returns once it does: the port of one that was killed is not free at once."""
    ends = time.monotonic() + WAIT_S
    while True:
        with suppress(ShoalError):
            return work()
        assert time.monotonic() < ends
        time.sleep(0.05)
