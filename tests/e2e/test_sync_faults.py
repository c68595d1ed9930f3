"""Processes of a trainer and its replicas are killed and stopped; afterwards rows are the same."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.published import SPECS
from support.published_processes import REPLY_S, Started, follower, trainer
from support.ranks import free_port
from support.shares import SHARE

CASES, FAULTS_EACH = 20, 10
FAULTS = ("publisher killed", "replies never come", "replica killed", "replica away for long")


class World:
    """A trainer and replicas that have a share of the rows each."""

    def __init__(self, draw: random.Random, folder: Path) -> None:
        self.draw, self.folder = draw, folder
        self.address = f"tcp://127.0.0.1:{free_port()}"
        self.keep_bytes = draw.choice([1, 20_000, 1 << 30])
        self.trainer = self.start_trainer()
        self.replicas = [self.start_replica(share) for share in range(2)]

    def start_trainer(self) -> Started:
        seed = self.draw.randrange(1 << 30)
        one = Started(trainer, self.folder, self.address, seed, self.keep_bytes)
        assert one.hear() == self.address
        return one

    def start_replica(self, share: int) -> Started:
        checkpoint = str(self.folder) if self.draw.random() < 0.5 else None
        one = Started(follower, self.address, checkpoint, share, 2)
        assert one.hear() == "follows"
        return one

    def meet(self, fault: str) -> None:
        time.sleep(self.draw.choice([0.0, 0.05, 0.3]))
        share = self.draw.randrange(2)
        if fault == "publisher killed":
            self.trainer.kill()
            self.trainer = self.start_trainer()
        elif fault == "replies never come":
            self.trainer.stop_for(3 * REPLY_S)
        elif fault == "replica killed":
            self.replicas[share].kill()
            self.replicas[share] = self.start_replica(share)
        else:
            self.replicas[share].stop_for(self.draw.choice([REPLY_S, 5 * REPLY_S]))

    def settle(self) -> None:
        """Stop training, wait until replicas have all, and compare."""
        self.trainer.say("end")
        incarnation, version, wanted = self.trainer.hear()
        for one in self.replicas:
            one.say((incarnation, version))
        found = [one.hear() for one in self.replicas]
        for status, _ in found:
            assert (status.incarnation, status.state) == (incarnation, "AVAILABLE"), status
            assert status.version >= version, status  # later turns have nothing more
        for spec in SPECS:
            assert len(wanted[spec.name][0])
            joined: list[Any] = [
                np.concatenate(parts)
                for parts in zip(*(rows[spec.name] for _, rows in found), strict=True)
            ]
            order = np.argsort(joined[0])
            for ours, theirs in zip(joined, wanted[spec.name], strict=True):
                assert ours[order].tobytes() == theirs.tobytes()

    def close(self) -> None:
        for one in (self.trainer, *self.replicas):
            one.kill()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(0, CASES, min(SHARE, CASES)))
def test_rows_are_the_trainers_after_kills_and_stops(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    world = World(draw, tmp_path)
    try:
        for fault in [*FAULTS, *draw.choices(FAULTS, k=FAULTS_EACH - len(FAULTS))]:
            world.meet(fault)
        world.settle()
    finally:
        world.close()
