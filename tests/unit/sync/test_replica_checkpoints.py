"""Replicas begin with a checkpoint, and follow on from it where publishers still can."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal import Segment, TableSpec
from shoal.checkpoint import CheckpointStore
from shoal.comm.transport import Server
from shoal.errors import CheckpointError, ConfigError
from shoal.placement import hash_ids, ranks_of
from shoal.sync.publisher import Publisher
from shoal.sync.replica import Replica
from shoal.table.hosting import HostedTables
from support.published import (
    SECRET,
    SPECS,
    WAIT_S,
    assert_same,
    exported,
    following,
    groups,
    resumed,
    save,
    serving,
    train,
    trainers,
    wait,
)


def trained(seed: int) -> tuple[HostedTables, random.Random]:
    (rank,), draw = trainers(1), random.Random(seed)
    for _ in range(3):
        train([rank], draw)
    return rank, draw


def test_what_follows_a_checkpoint_is_replayed(tmp_path: Path) -> None:
    rank, draw = trained(1)
    with serving([rank]) as (publishers, addresses):
        publishers[0].publish()
        saving = save(rank, tmp_path, 1)
        publishers[0].saved(saving.id, saving.point["model"])
        train([rank], draw)
        with following(addresses, checkpoint=str(tmp_path)) as replica:
            assert float(replica.dense()["weight"][0, 0]) == 1.0
            wait(replica, publishers)
            assert_same(replica, [rank])
            assert replica.status()[0].passes == 0 and replica.status()[0].segments > 0


def test_a_trainer_that_resumed_is_followed_from_the_checkpoint(tmp_path: Path) -> None:
    rank, _ = trained(2)
    save(rank, tmp_path, 1)
    again, name, cursor = resumed(tmp_path)
    draw = random.Random(3)
    with serving([again], resumed=(name, cursor)) as (publishers, addresses):
        train([again], draw)
        with following(addresses, checkpoint=str(tmp_path)) as replica:
            wait(replica, publishers)
            assert_same(replica, [again])
            assert replica.status()[0].passes == 0
            train([again], draw)
            wait(replica, publishers)
            assert_same(replica, [again])
        with following(addresses) as other:  # without the checkpoint
            wait(other, publishers)
            assert other.status()[0].passes == 1


@pytest.mark.parametrize("how", ["unknown", "segments are gone", "another life"])
def test_a_checkpoint_that_nobody_can_follow_on_from_takes_a_pass(how: str, tmp_path: Path) -> None:
    rank, draw = trained(4)
    saving = save(rank, tmp_path, 1)
    shard: Any = rank.shard
    with serving([rank], keep_bytes=1) as (publishers, addresses):
        publishers[0].publish()
        if how != "unknown":
            publishers[0].saved(saving.id, saving.point["model"])
        for _ in range(3):
            train([rank], draw)
            shard.remove(groups(0, list(range(0, 400, 7))))
            publishers[0].publish()
        if how == "another life":
            shard.resume(shard.close_version())
        with following(addresses, checkpoint=str(tmp_path)) as replica:
            assert replica.find(groups(0, list(range(400)))).found_N.any()  # until then it serves
            wait(replica, publishers)
            assert_same(replica, [rank])
            assert replica.status()[0].passes == 1


def test_a_pass_that_failed_leaves_no_checkpoint_to_follow_on_from(tmp_path: Path) -> None:
    rank, draw = trained(10)
    save(rank, tmp_path, 1)
    train([rank], draw)
    again, name, cursor = resumed(tmp_path)
    taken: list[bytes] = []
    with (
        Publisher(rank) as first,  # it does not know the checkpoint
        Publisher(again, resumed=(name, cursor)) as second,
    ):

        def handler(head: bytes, frames: Any) -> tuple[bytes, list[bytes]]:
            if len(taken) < 2 and b'"next"' in head:
                taken.append(head)
            return (second if len(taken) == 2 else first)(head, frames)

        server = Server("tcp://127.0.0.1:0", handler, secret=SECRET)
        with following([server.address], checkpoint=str(tmp_path)) as replica:
            ends = time.monotonic() + WAIT_S
            while len(taken) < 2:
                assert time.monotonic() < ends
                time.sleep(0.01)
            wait(replica, [second])
            assert_same(replica, [again])
        server.stop()


def test_shares_of_a_checkpoint(tmp_path: Path) -> None:
    rank, _ = trained(5)
    save(rank, tmp_path, 1)
    every = [Replica(SPECS, [], checkpoint=str(tmp_path), share=k, of=3) for k in range(3)]
    for k, replica in enumerate(every):
        with replica:
            for table, spec in enumerate(SPECS):
                ids = replica.shard.export(table).ids
                assert (ranks_of(hash_ids(spec.hash_name, ids), 3) == k).all()
    assert_same(every, [rank])


@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_shares_of_smaller_rows(dtype: Any, tmp_path: Path) -> None:
    """Together they have the bits of one replica."""
    rank, _ = trained(5)
    save(rank, tmp_path, 1)
    options = {"checkpoint": str(tmp_path), "dtype": dtype}
    with Replica(SPECS, [], **options) as whole:
        for share in range(2):
            with Replica(SPECS, [], share=share, of=2, **options) as part:
                for table in range(len(SPECS)):
                    ids = part.shard.export(table).ids.tolist()
                    ours, theirs = part.find(groups(table, ids)), whole.find(groups(table, ids))
                    assert len(ids) and ours.found_N.all() and theirs.found_N.all()
                    assert torch.equal(ours.weights[0], theirs.weights[0])


@pytest.mark.parametrize("dtype", [None, "float16", "int8"])
def test_a_checkpoint_alone(dtype: Any, tmp_path: Path) -> None:
    rank, draw = trained(6)
    first = save(rank, tmp_path / "run" / "checkpoints", 1)
    train([rank], draw)
    options = {"kind": "delta", "parent": first.wait(), "since": first.cursors}
    second = save(rank, tmp_path / "run" / "checkpoints", 2, **options)
    with Replica(SPECS, [], checkpoint=str(tmp_path / "run"), dtype=dtype) as replica:
        (status,) = replica.status()
        assert (status.state, status.version) == ("AVAILABLE", second.version)
        assert status.staleness_s is not None and status.staleness_s < WAIT_S
        assert replica.summary().checkpoint == f"{tmp_path}/run/checkpoints/{second.name}"
        assert float(replica.dense()["weight"][0, 0]) == 2.0
        for table, spec in enumerate(SPECS):
            ids, weights, *_ = exported([rank.shard], spec.name)
            found = replica.find(groups(table, ids.tolist()))
            assert found.found_N.all() and len(ids) == replica.shard.size(table)
            if dtype is None:
                assert torch.equal(found.weights[0], weights.to(found.weights[0].dtype))


def test_a_newer_checkpoint_takes_the_place_of_the_one_in_use(tmp_path: Path) -> None:
    rank, draw = trained(7)
    with Replica(SPECS, [], checkpoint=str(tmp_path), follow_checkpoints_s=0.02) as replica:
        assert replica.status()[0].state == "LOADING"
        for step in (1, 2):
            train([rank], draw)
            version = save(rank, tmp_path, step).version
            ends = time.monotonic() + WAIT_S
            while replica.status()[0].version != version:
                assert time.monotonic() < ends, replica.status()
                time.sleep(0.02)
            assert_same(replica, [rank])
            assert float(replica.dense()["weight"][0, 0]) == step


def test_a_checkpoint_of_the_same_name_takes_the_place_of_the_one_in_use(tmp_path: Path) -> None:
    """A run began again where another one was."""
    save(trained(7)[0], tmp_path, 1).wait()
    with Replica(SPECS, [], checkpoint=str(tmp_path), follow_checkpoints_s=0.02) as replica:
        (tmp_path / "step-000000000001-full").rename(tmp_path / "before")
        again, _ = trained(8)
        save(again, tmp_path, 1).wait()
        ends = time.monotonic() + WAIT_S
        while replica.status()[0].passes < 2:
            assert time.monotonic() < ends, replica.status()
            time.sleep(0.02)
        assert_same(replica, [again])


def test_a_replica_serves_its_checkpoint_while_no_publisher_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank, _ = trained(8)
    save(rank, tmp_path, 1)
    address, asks, turn = ["tcp://127.0.0.1:1"], threading.Event(), Replica._turn
    monkeypatch.setattr(Replica, "_turn", lambda *given: asks.wait(WAIT_S) and turn(*given))
    with Replica(SPECS, address, checkpoint=str(tmp_path), every_s=0.01, reply_s=0.1) as replica:
        assert replica.status()[0].state == "LOADING"
        asks.set()
        ends = time.monotonic() + WAIT_S
        while replica.status()[0].state != "AVAILABLE":
            assert time.monotonic() < ends
            time.sleep(0.02)
        assert_same(replica, [rank])
        assert replica.status()[0].failures > 0


def test_what_cannot_be_served_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="neither"):
        Replica(SPECS, [])
    with pytest.raises(ConfigError, match="follow_checkpoints_s"):
        Replica(SPECS, ["tcp://127.0.0.1:1"], follow_checkpoints_s=1.0)
    with pytest.raises(CheckpointError), Replica(SPECS, [], checkpoint=str(tmp_path)):
        pass
    rank, _ = trained(9)
    save(rank, tmp_path, 1)
    with Replica(SPECS[:2], [], checkpoint=str(tmp_path)) as some:
        assert some.shard.size(1) == rank.shard.size(1)
    other = (TableSpec(name="user", segments=(Segment(dim=9),)),)
    with (
        pytest.raises(CheckpointError, match="collections"),
        Replica(other, [], checkpoint=str(tmp_path)),
    ):
        pass
    entry = CheckpointStore(tmp_path).latest()
    assert entry is not None
    file = next(one for one in (tmp_path / entry.name / "rows").rglob("*") if one.is_file())
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError), Replica(SPECS, [], checkpoint=str(tmp_path)):
        pass
