"""Random faults between a trainer and its replicas: afterwards they have the same rows."""

from __future__ import annotations

import errno
import itertools
import os
import random
import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shoal.comm.transport import Secret, Server
from shoal.errors import ServerLost
from shoal.sync.publisher import Publisher
from shoal.sync.replica import Replica
from support.published import (
    SECRET,
    SPECS,
    WAIT_S,
    assert_same,
    resumed,
    save,
    serving,
    train,
    trainers,
)
from support.ranks import free_port
from support.shares import SHARE

CASES = 200
PARTS = 20
FAULTS = (
    "replica killed", "publisher killed", "dropped", "late and out of order", "asked twice",
    "corrupt", "truncated", "disk full", "away for long", "clock jumps",
)  # fmt: skip


class World:
    """A trainer with a publisher, a line that faults are made on, and replicas."""

    def __init__(self, draw: random.Random, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.draw, self.folder = draw, folder
        self.noise = random.Random(draw.random())  # of threads, whose order nobody knows
        self.fault, self.down, self.full, self.jump_s = "", False, False, 0.0
        self.steps = itertools.count(1)
        self.keep_bytes = draw.choice([1, 20_000, 1 << 30])
        self.stack = ExitStack()
        (self.rank,) = trainers(1)
        self.address = f"tcp://127.0.0.1:{free_port()}"  # nobody gets it between two trainers
        self.resumed: Any = None
        self.shares = draw.choice([1, 1, 2, 3])
        self.replicas: list[Replica] = []
        clock = SimpleNamespace(
            time=lambda: time.time() + self.jump_s, monotonic=time.monotonic, sleep=time.sleep
        )
        monkeypatch.setattr("shoal.sync.publisher.time", clock)
        monkeypatch.setattr("shoal.sync.replica.time", clock)
        monkeypatch.setattr("shoal.sync.replica.LONGEST_PAUSE_S", 0.1)
        disk = SimpleNamespace(**vars(os))
        disk.pwrite = self.pwrite
        monkeypatch.setattr("shoal.sync.publisher.os", disk)

    def pwrite(self, fd: int, data: Any, at: int) -> int:
        if self.full and self.noise.random() < 0.5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        half = len(data) // 2 if self.full else len(data)  # some is written before it is full
        return os.pwrite(fd, memoryview(data)[: max(1, half)], at)

    def start_trainer(self) -> None:
        self.publisher = Publisher(
            self.rank, every_s=3600.0, keep_bytes=self.keep_bytes, resumed=self.resumed
        )
        self.publisher.__enter__()
        ends = time.monotonic() + WAIT_S
        while True:
            try:
                self.server = Server(self.address, self, secret=SECRET)
                break
            except Exception:  # noqa: BLE001  the port of the one that was killed is not free yet
                assert time.monotonic() < ends
                time.sleep(0.05)

    def kill_trainer(self) -> None:
        self.server.stop()
        self.publisher.__exit__(None, None, None)

    def start_replica(self, share: int) -> Replica:
        checkpoint = str(self.folder) if self.draw.random() < 0.5 else None
        replica = Replica(
            SPECS,
            [self.address],
            every_s=0.01,
            reply_s=0.15,
            secret=SECRET,
            checkpoint=checkpoint,
            share=share,
            of=self.shares,
        )
        return replica.__enter__()

    def __call__(self, head: bytes, frames: Any) -> tuple[bytes, list[bytes]]:
        """A request on the line."""
        fault = self.fault if self.noise.random() < 0.4 else ""
        if self.down or fault == "dropped":
            raise ServerLost("a request", got="lost", allowed="a line that is up", remedy="Wait.")
        if fault == "asked twice":
            self.publisher(head, frames)
        said, pages = self.publisher(head, frames)
        if fault == "late and out of order":
            time.sleep(self.noise.choice([0.01, 0.2]))  # longer than a replica waits, or not
        if fault in ("corrupt", "truncated"):
            pages = [self.damaged(page, fault) for page in pages]
            if not pages:
                said = self.damaged(said, fault)
        return said, pages

    def damaged(self, data: bytes, fault: str) -> bytes:
        at = self.noise.randrange(max(1, len(data)))
        if fault == "truncated":
            return data[:at]
        return data[:at] + bytes([data[at] ^ (1 << self.noise.randrange(8))]) + data[at + 1 :]

    def train(self) -> None:
        for _ in range(self.draw.randrange(1, 4)):
            train([self.rank], self.draw)
            try:
                self.publisher.publish()
            except OSError:
                assert self.full
        if self.draw.random() < 0.4:
            saving = save(self.rank, self.folder, next(self.steps))
            if self.draw.random() < 0.7:
                self.publisher.saved(saving.id, saving.point["model"])

    def meet(self, fault: str) -> None:
        self.fault = fault
        if fault == "replica killed":
            share = self.draw.randrange(self.shares)
            self.replicas[share].__exit__(None, None, None)
            self.replicas[share] = self.start_replica(share)
        elif fault == "publisher killed":
            self.kill_trainer()
            self.rank, name, cursor = resumed(self.folder)
            self.resumed = (name, cursor) if self.draw.random() < 0.7 else None
            self.start_trainer()
        elif fault == "clock jumps":
            self.jump_s = self.draw.choice([-1e6, 1e6, -3600.0, 0.0])
        self.full = fault == "disk full"
        self.down = fault == "away for long"
        self.train()
        time.sleep(self.draw.choice([0.0, 0.02, 0.06]))

    def heal(self) -> None:
        self.fault, self.down, self.full = "", False, False

    def settle(self) -> None:
        """Wait until all replicas have all, and compare."""
        version = self.publisher.publish()
        incarnation = self.publisher.status().incarnation
        ends = time.monotonic() + WAIT_S
        while any(
            (one.incarnation, one.state) != (incarnation, "AVAILABLE") or one.version < version
            for replica in self.replicas
            for one in replica.status()
        ):
            assert time.monotonic() < ends, [one.status() for one in self.replicas]
            time.sleep(0.01)
        assert_same(self.replicas, [self.rank])
        assert all(one.staleness_s >= 0 for r in self.replicas for one in r.status())  # type: ignore[operator]

    def close(self) -> None:
        for replica in self.replicas:
            replica.__exit__(None, None, None)
        self.kill_trainer()


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_rows_are_the_trainers_after_random_faults(
    part: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(part, CASES, PARTS * SHARE):
        draw = random.Random(seed)
        torch.manual_seed(seed)
        with monkeypatch.context() as patched:
            world = World(draw, tmp_path / str(seed), patched)
            train([world.rank], draw)
            world.start_trainer()
            save(world.rank, world.folder, next(world.steps))
            world.replicas = [world.start_replica(k) for k in range(world.shares)]
            try:
                for fault in draw.choices(FAULTS, k=4):
                    world.meet(fault)
                    if draw.random() < 0.5:
                        world.heal()
                        world.settle()
                world.heal()
                world.settle()
            except BaseException as error:
                error.add_note(f"seed {seed}")
                raise
            finally:
                world.heal()
                world.close()


@pytest.mark.parametrize("secret", [Secret("a token of nobody else"), None], ids=["other", "none"])
def test_a_replica_with_the_wrong_token_reports_it(secret: Secret | None) -> None:
    """It waits for the right one, as for a publisher that is down, and ends when it is closed."""
    with (
        serving(trainers(1)) as (_, addresses),
        Replica(SPECS, addresses, every_s=0.01, reply_s=1.0, secret=secret) as replica,
    ):
        ends = time.monotonic() + WAIT_S
        while "another token" not in replica.status()[0].error:
            assert time.monotonic() < ends, replica.status()
            time.sleep(0.02)
        assert replica.status()[0].state == "LOADING"
