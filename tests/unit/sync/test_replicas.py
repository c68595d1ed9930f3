"""Replicas have the rows of their publishers, whatever happens on the way."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shoal import Segment, TableSpec
from shoal.comm.transport import Server
from shoal.errors import CheckpointError, ConfigError, DataError, InputError
from shoal.placement import (
    Placement,
    column_wise,
    data_parallel,
    hash_ids,
    ranks_of,
    row_wise,
    table_row_wise,
    table_wise,
)
from shoal.rules.compressors import OneBit
from shoal.sync.pages import DeletedIds, pack_dense, sealed, unpack, unpack_dense, unsealed
from shoal.sync.publisher import Publisher
from shoal.sync.replica import Replica
from shoal.table.factory import make_shard
from shoal.table.hosting import HostedTables, hosted_specs
from shoal.table.shard import StepContext
from support.published import (
    SECRET,
    SPECS,
    WAIT_S,
    Line,
    assert_same,
    exported,
    following,
    groups,
    save,
    serving,
    train,
    trainers,
    wait,
)


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 3])
def test_a_replica_follows(count: int) -> None:
    ranks, draw = trainers(count), random.Random(5)
    train(ranks, draw)
    with serving(ranks) as (publishers, addresses), following(addresses) as replica:
        for _ in range(10):
            wait(replica, publishers)
            assert_same(replica, ranks)
            for _ in range(3):
                train(ranks, draw)
        assert [one.passes for one in replica.status()] == [1] * count


def test_rows_of_half_the_size() -> None:
    ranks, draw = trainers(1), random.Random(6)
    train(ranks, draw)
    with (
        serving(ranks) as (publishers, addresses),
        following(addresses, dtype="float16") as replica,
    ):
        wait(replica, publishers)
        for table in range(len(SPECS)):
            (ids, weights, *_), mine = exported([ranks[0].shard], SPECS[table].name), replica.shard
            found = mine.find(groups(table, ids.tolist()))
            assert torch.equal(found.weights[0], weights.half().to(found.weights[0].dtype))


@pytest.mark.parametrize("source", ["publisher", "checkpoint"])
def test_numbers_beyond_a_replicas_dtype_are_refused(source: str, tmp_path: Path) -> None:
    (rank,) = trainers(1)
    rank.shard.assign(groups(0, [1, 2]), [torch.tensor([[1.0] * 4, [7e4] * 4])], ctx=StepContext())
    words = "got 4 that are too large for table '(model/)?user'"
    if source == "checkpoint":
        save(rank, tmp_path, 1)
        options = {"checkpoint": str(tmp_path), "dtype": "float16"}
        with pytest.raises(CheckpointError, match=words), Replica(SPECS, [], **options):
            pass
        return
    with serving([rank]) as (publishers, addresses):
        publishers[0].publish()
        with following(addresses, dtype="float16") as replica:
            ends = time.monotonic() + WAIT_S
            while not (said := replica.status()[0].error):
                assert time.monotonic() < ends, replica.status()
                time.sleep(0.02)
            assert re.search(words, said)
            assert replica.status()[0].state == "LOADING"
            assert not replica.find(groups(0, [1, 2])).found_N.any()


def test_a_replica_that_was_away_for_long_takes_all_rows_again() -> None:
    ranks, draw = trainers(1), random.Random(7)
    lines: list[Line] = []

    def line(publisher: Publisher) -> Line:
        lines.append(Line(publisher))
        return lines[0]

    train(ranks, draw)
    with (
        serving(ranks, line, keep_bytes=1) as (publishers, addresses),
        following(addresses) as replica,
    ):
        wait(replica, publishers)
        lines[0].down = True
        for _ in range(3):  # only the last segment is kept
            train(ranks, draw)
            publishers[0].publish()
        assert replica.find(groups(0, list(range(400)))).found_N.any()  # it still serves
        lines[0].down = False
        wait(replica, publishers)
        assert_same(replica, ranks)
        assert replica.status()[0].passes == 2


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_what_is_lost_or_damaged_is_asked_for_again(seed: int) -> None:
    ranks, draw = trainers(2), random.Random(seed)
    train(ranks, draw)
    with (
        serving(ranks, lambda one: Line(one, draw)) as (publishers, addresses),
        following(addresses, reply_s=1.0) as replica,
    ):
        for _ in range(8):
            train(ranks, draw)
            wait(replica, publishers)
            assert_same(replica, ranks)
        assert sum(one.failures for one in replica.status()) > 0


@pytest.mark.parametrize("only", ["rows", "dense"])
def test_a_replica_of_one_half_gets_nothing_of_the_other(only: Any) -> None:
    asked: set[str] = set()

    def noted(publisher: Publisher) -> Any:
        def handler(head: bytes, frames: Any) -> Any:
            asked.add(json.loads(unsealed(bytes(head)))["method"])
            return publisher(head, frames)

        return handler

    ranks, draw = trainers(2), random.Random(9)
    train(ranks, draw)
    with (
        serving(ranks, noted) as (publishers, addresses),
        following(addresses, only=only) as replica,
    ):
        publishers[0].publish_dense({"w": torch.ones(2)})
        wait(replica, publishers if only == "rows" else publishers[:1])
        train(ranks, draw)
        assert all(one.drain(WAIT_S) for one in publishers)
        assert (replica.dense().keys() == {"w"}) == (only == "dense")
        assert replica.summary().state == "AVAILABLE"
        if only == "rows":
            assert_same(replica, ranks)
            assert "dense" not in asked
        else:
            assert all(rows == 0 for _, rows in replica.summary().rows)
            assert asked == {"hello", "newest", "dense"}


def test_a_trainer_that_starts_again_from_older_rows() -> None:
    ranks, draw = trainers(1), random.Random(8)
    train(ranks, draw)
    saved = [ranks[0].shard.export(table) for table in range(len(SPECS))]
    with serving(ranks) as (publishers, addresses), following(addresses) as replica:
        wait(replica, publishers)
        for _ in range(5):
            train(ranks, draw)
        wait(replica, publishers)
        for table, chunk in enumerate(saved):
            ranks[0].shard.clear(table)
            ranks[0].shard.load(table, chunk)
        wait(replica, publishers)
        assert_same(replica, ranks)
        assert replica.status()[0].passes == 2


def test_dense_weights_arrive_whole() -> None:
    ranks = trainers(1)
    with serving(ranks) as (publishers, addresses), following(addresses) as replica:
        for value in (1.0, 2.0):
            sent = {"w": torch.full((3, 2), value), "b": torch.full((2,), value)}
            publishers[0].publish_dense(sent)
            ends = time.monotonic() + WAIT_S
            while replica.dense().get("w", torch.zeros(1)).max() != value:
                assert time.monotonic() < ends
                time.sleep(0.01)
            assert replica.dense().keys() == sent.keys()


def test_training_continues_while_a_publisher_takes_turns() -> None:
    ranks, draw = trainers(1), random.Random(9)
    with Publisher(ranks[0], every_s=0.01) as publisher:
        server = publisher.serve("tcp://127.0.0.1:0", secret=SECRET)
        with following([server.address]) as replica:
            for _ in range(100):
                train(ranks, draw)
            wait(replica, [publisher])
            assert_same(replica, ranks)
            staleness_s = replica.status()[0].staleness_s
            assert staleness_s is not None and staleness_s < WAIT_S
        server.stop()
    assert_nothing_held(ranks[0])


def assert_nothing_held(tables: HostedTables) -> None:
    """A shard has 8 snapshots."""
    with ExitStack() as held:
        for _ in range(8):
            held.enter_context(tables.shard.snapshot())


def until_refused(replica: Replica, match: str) -> None:
    ends = time.monotonic() + WAIT_S
    with pytest.raises(ConfigError, match=match):
        while time.monotonic() < ends:
            replica.status()
            time.sleep(0.01)


def test_other_tables_are_refused_also_after_a_request_that_failed() -> None:
    lines: list[Line] = []

    def line(publisher: Publisher) -> Line:
        lines.append(Line(publisher))
        lines[0].down = True
        return lines[0]

    with (
        serving(trainers(1), line) as (_, addresses),
        Replica(SPECS[:2], addresses, every_s=0.01, secret=SECRET) as replica,
    ):
        ends = time.monotonic() + WAIT_S
        while not replica.status()[0].failures and time.monotonic() < ends:
            time.sleep(0.01)
        lines[0].down = False
        until_refused(replica, "publisher 0")


@pytest.mark.parametrize("order", [(1, 0), (0,), (0, 0)])
def test_addresses_that_are_missing_or_swapped_are_refused(order: tuple[int, ...]) -> None:
    with (
        serving(trainers(2)) as (_, addresses),
        following([addresses[rank] for rank in order]) as replica,
    ):
        until_refused(replica, "rank|world_size")


@pytest.mark.parametrize("rank", range(3))
def test_columns_on_several_ranks_are_refused_by_all_of_them(rank: int) -> None:
    """Also by one that has none of the columns, so that none waits for the others."""
    placement = Placement(3, tuple(column_wise("user", 4, (0, 1))))
    shard = make_shard(hosted_specs(SPECS[:1], placement, rank))
    with pytest.raises(ConfigError, match=r"columns.*user"):
        Publisher(HostedTables(SPECS[:1], shard, placement), rank=rank)


def test_rows_of_any_placement_but_columns() -> None:
    placed = (
        *row_wise("user", 4, 3),
        *table_wise("item", 2, 1),
        *table_row_wise("word", 3, (2, 0)),
        *data_parallel("exact", 2, 3),
    )
    ranks, draw = trainers(3, Placement(3, placed)), random.Random(15)
    train(ranks, draw)
    with (
        serving(ranks, keep_bytes=1) as (publishers, addresses),
        following(addresses) as replica,
    ):
        for _ in range(3):  # only the last segment is kept
            train(ranks, draw)
            publishers[0].publish()
            train(ranks, draw)
            wait(replica, publishers)
            assert_same(replica, ranks)
        train(ranks, draw)
        for rank in ranks:  # versions of before are worth nothing
            rank.shard.resume(rank.shard.close_version())
        wait(replica, publishers)
        assert_same(replica, ranks)
        assert min(one.passes for one in replica.status()) >= 2


@pytest.mark.slow
def test_shares_have_their_rows_and_get_no_others() -> None:
    ranks, draw = trainers(2), random.Random(16)
    train(ranks, draw)
    sent: list[tuple[int, int, torch.Tensor]] = []

    def watched(publisher: Publisher) -> Any:
        def handler(head: bytes, frames: Any) -> tuple[bytes, list[bytes]]:
            said, pages = publisher(head, frames)
            ask = json.loads(unsealed(head))
            if pages and ask["method"] != "dense":
                page = unpack(memoryview(pages[0]), SPECS)
                ids = page.ids if isinstance(page, DeletedIds) else page.chunk.ids
                sent.append((ask.get("share", 0), page.table, ids))
            return said, pages

        return handler

    with serving(ranks, watched) as (publishers, addresses), ExitStack() as stack:
        every = [stack.enter_context(following(addresses, share=k, of=3)) for k in range(3)]
        for _ in range(4):
            for replica in every:
                wait(replica, publishers)
            for replica in every:
                wait(replica, publishers)
            assert_same(every, ranks)
            train(ranks, draw)
        assert [one.passes for replica in every for one in replica.status()] == [1] * 6
        assert [(one.summary().share, one.summary().of) for one in every] == [
            (k, 3) for k in range(3)
        ]
    assert sent
    for share, table, ids in sent:
        assert (ranks_of(hash_ids(SPECS[table].hash_name, ids), 3) == share).all()


@pytest.mark.parametrize(
    "options", [{"share": 3, "of": 3}, {"share": -1, "of": 2}, {"of": 0}, {"of": 1 << 17}]
)
def test_a_share_that_is_none_is_refused(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="share of a replica"):
        following(["tcp://127.0.0.1:1"], **options)


def test_int8_rows_are_as_close_as_their_scale_allows() -> None:
    ranks, draw = trainers(1), random.Random(17)
    train(ranks, draw)
    with (
        serving(ranks) as (publishers, addresses),
        following(addresses, dtype="int8") as replica,
    ):
        wait(replica, publishers)
        for table, spec in enumerate(SPECS):
            ids, weights, *_ = exported([ranks[0].shard], spec.name)
            found = replica.find(groups(table, ids.tolist())).weights[0]
            largest = weights.double().abs().amax(1, keepdim=True)
            assert len(ids) and ((found - weights).abs() <= largest / 254 * (1 + 1e-5)).all()
            assert replica.specs[table].dtype == "int8"


def test_the_numbers_of_replicas_and_publishers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.sync.status._RATE_S", 600.0)
    ranks, draw = trainers(1), random.Random(18)
    train(ranks, draw)
    with serving(ranks) as (publishers, addresses), ExitStack() as stack:
        publisher = publishers[0]
        assert publisher.status().replicas == ()
        replica = stack.enter_context(following(addresses))
        wait(replica, publishers)
        train(ranks, draw)
        wait(replica, publishers)
        mine = replica.summary()
        assert (mine.state, mine.failures) == ("AVAILABLE", 0)
        assert mine.version == mine.sources[0].version == replica.status()[0].version
        rows = [(spec.name, ranks[0].shard.size(k)) for k, spec in enumerate(SPECS)]
        assert list(mine.rows) == rows and mine.row_bytes > 0 and mine.rows_per_s > 0
        assert mine.staleness_s is not None and mine.checkpoint is None
        ends = time.monotonic() + WAIT_S
        while publisher.status().replicas[0].version < mine.version:
            assert time.monotonic() < ends
            time.sleep(0.01)
        theirs = publisher.status()
        assert (theirs.version, theirs.segments > 0) == (mine.version, True)
        assert theirs.segment_bytes > 0 and theirs.rows_per_s > 0 and theirs.failures == 0
        assert [one.lag_s for one in theirs.replicas] == [0.0]


def test_a_publisher_of_another_run_is_a_failure_that_passes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shoal.sync.replica.LONGEST_PAUSE_S", 0.05)
    ranks, draw = trainers(1), random.Random(19)
    train(ranks, draw)
    other = Publisher(HostedTables(SPECS[:1], make_shard(SPECS[:1])))
    wrong = [True]

    def line(publisher: Publisher) -> Any:
        return lambda head, frames: (other if wrong[0] else publisher)(head, frames)

    with serving(ranks, line) as (publishers, addresses), following(addresses) as replica:
        until_refused(replica, "publisher 0")
        wrong[0] = False
        ends = time.monotonic() + WAIT_S
        for now in (False, True, False):
            wrong[0] = now
            train(ranks, draw)
            publishers[0].publish()
            while True:
                assert time.monotonic() < ends
                with suppress(ConfigError):
                    (status,) = replica.status()
                    if bool(status.error) == now and status.state == "AVAILABLE":
                        break
                time.sleep(0.01)
            if now:
                assert "publisher 0" in status.error and status.state == "AVAILABLE"
        wait(replica, publishers)
        assert_same(replica, ranks)


def test_a_replica_is_available_after_the_whole_replay(tmp_path: Path) -> None:
    (rank,), draw = trainers(1), random.Random(20)
    train([rank], draw)
    saving = save(rank, tmp_path, 1)
    seen: list[str] = []
    with ExitStack() as stack:
        found: list[Replica] = []

        def line(publisher: Publisher) -> Any:
            def handler(head: bytes, frames: Any) -> Any:
                if json.loads(unsealed(head))["method"] == "page":
                    seen.append(found[0].status()[0].state)
                return publisher(head, frames)

            return handler

        publishers, addresses = stack.enter_context(serving([rank], line))
        publishers[0].saved(saving.id, saving.point["model"])
        publishers[0].publish()
        saving = save(rank, tmp_path, 2)
        publishers[0].saved(saving.id, saving.point["model"])
        for _ in range(3):
            train([rank], draw)
            publishers[0].publish()
        found.append(following(addresses, checkpoint=str(tmp_path)))
        stack.enter_context(found[0])
        wait(found[0], publishers)
        assert found[0].status()[0].segments >= 3
    assert len(seen) > 3 and set(seen) == {"LOADING"}


def test_a_replica_serves_its_checkpoint_while_others_take_passes(tmp_path: Path) -> None:
    (rank,) = trainers(1)
    train([rank], random.Random(21))
    save(rank, tmp_path, 1)
    with serving([rank]) as (publishers, addresses):
        for name in ("a", "b"):
            assert asked(publishers[0], "pass", replica=name)[0]["number"] is not None
        with following(addresses, checkpoint=str(tmp_path)) as replica:
            ends = time.monotonic() + WAIT_S
            while replica.status()[0].state != "AVAILABLE":
                assert time.monotonic() < ends
                time.sleep(0.01)
            (status,) = replica.status()
            assert (status.passes, status.failures) == (0, 0)
            assert_same(replica, [rank])
            asked(publishers[0], "goodbye", replica="a")  # its pass is free at once
            wait(replica, publishers)
            assert replica.status()[0].passes == 1
        ends = time.monotonic() + WAIT_S
        while replica._name in [one.replica for one in publishers[0].status().replicas]:
            assert time.monotonic() < ends
            time.sleep(0.01)


def test_a_request_that_is_heard_after_the_goodbye_brings_nobody_back() -> None:
    with serving(trainers(1)) as (publishers, _):
        for method in ("after", "goodbye", "after"):
            asked(publishers[0], method, replica="a")
        assert publishers[0].status().replicas == ()
        assert publishers[0].drain(WAIT_S)


def test_passes_of_slow_replicas_are_not_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], time=time.time, sleep=time.sleep)
    monkeypatch.setattr("shoal.sync.publisher.time", clock)
    ranks = trainers(1)
    train(ranks, random.Random(22))
    publisher = Publisher(ranks[0])
    slow = [asked(publisher, "pass", replica=name, reply_s=10.0)[0] for name in ("a", "b")]
    now[0] = 50.0  # five tries of 10 s
    assert asked(publisher, "pass", replica="c")[0]["number"] is None
    for one in slow:
        assert asked(publisher, "next", number=one["number"])[1]
    now[0] = 200.0
    assert asked(publisher, "pass", replica="c")[0]["number"] is not None


def test_the_number_of_segments_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.sync.publisher._MOST_SEGMENTS", 3)
    ranks, draw = trainers(1), random.Random(23)
    with serving(ranks) as (publishers, _):
        for _ in range(6):
            train(ranks, draw)
            publishers[0].publish()
        assert publishers[0].status().segments == 3


def test_a_turn_without_a_free_snapshot_loses_nothing() -> None:
    ranks, draw = trainers(1), random.Random(24)
    shard: Any = ranks[0].shard
    with serving(ranks) as (publishers, _):
        for _ in range(2):
            train(ranks, draw)
            publishers[0].publish()
        snapshot, held = shard.snapshot, [shard.snapshot() for _ in range(8)]

        def freed_late(since: Any = None) -> Any:
            try:
                return snapshot(since)
            finally:
                held.pop().close()

        shard.snapshot = freed_late
        with pytest.raises(InputError, match="open"):
            publishers[0].publish()
        assert publishers[0].status().segments == 1
        for one in held:
            one.close()
        shard.snapshot = snapshot


def test_dense_weights_are_copied_at_once_and_packed_when_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    packed: list[int] = []

    def pack(tensors: Any) -> bytes:
        packed.append(len(tensors))
        return pack_dense(tensors)

    monkeypatch.setattr("shoal.sync.publisher.pack_dense", pack)
    publisher, weights = Publisher(trainers(1)[0]), torch.ones(3)
    publisher.publish_dense({"w": weights})
    weights.zero_()  # the next step
    assert packed == []
    for _ in range(2):
        version, (page,) = asked(publisher, "dense")
        assert version == 1 and unpack_dense(memoryview(page))["w"].tolist() == [1.0] * 3
    assert packed == [1]
    with pytest.raises(DataError, match="dtype of tensor"):
        publisher.publish_dense({"w": torch.zeros(1, dtype=torch.complex64)})
    with pytest.raises(DataError, match="bytes of a page"):
        publisher.publish_dense({"w": torch.empty(1 << 29, device="meta")})


def test_int8_tables_are_not_published() -> None:
    spec = TableSpec(name="small", segments=(Segment(dim=2),), dtype="int8")
    with pytest.raises(ConfigError, match="int8"):
        Publisher(HostedTables((spec,), make_shard((spec,))))


def asked(publisher: Publisher, method: str, **parts: Any) -> tuple[Any, list[bytes]]:
    text = json.dumps({"method": method, "replica": "r", **parts}).encode()
    said, pages = publisher(sealed(text), [])
    return json.loads(unsealed(said)), pages


def test_a_pass_that_failed_or_was_closed_has_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = trainers(1)
    train(ranks, random.Random(11))
    publisher = Publisher(ranks[0])
    first, _ = asked(publisher, "pass")
    asked(publisher, "next", number=first["number"])
    asked(publisher, "pass")  # closes the first
    with pytest.raises(InputError):
        asked(publisher, "next", number=first["number"], page=1)

    def broken(*_: Any) -> Iterator[bytes]:
        raise OSError("disk")
        yield b""

    monkeypatch.setattr("shoal.sync.publisher.pages_of", broken)
    opened, _ = asked(publisher, "pass")
    with pytest.raises(OSError, match="disk"):
        asked(publisher, "next", number=opened["number"])
    with pytest.raises(InputError, match="closed"):
        asked(publisher, "next", number=opened["number"])


def test_the_end_of_a_pass_may_be_asked_for_again() -> None:
    ranks = trainers(1)
    train(ranks, random.Random(12))
    publisher = Publisher(ranks[0])
    opened, _ = asked(publisher, "pass")
    pages = [asked(publisher, "next", number=opened["number"], page=k)[1] for k in range(5)]
    assert all(pages[:4]) and not pages[4]  # one a table
    assert_nothing_held(ranks[0])
    assert asked(publisher, "next", number=opened["number"], page=4) == (None, [])


def test_no_pass_opens_after_the_end() -> None:
    ranks = trainers(1)
    with Publisher(ranks[0]) as publisher:
        pass
    assert asked(publisher, "pass")[0]["number"] is None
    assert_nothing_held(ranks[0])


def test_a_replica_in_a_pass_is_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], time=time.time, sleep=time.sleep)
    monkeypatch.setattr("shoal.sync.publisher.time", clock)
    ranks = trainers(1)
    train(ranks, random.Random(13))
    publisher = Publisher(ranks[0])
    asked(publisher, "after")
    opened, _ = asked(publisher, "pass")
    now[0] = 20.0
    asked(publisher, "next", number=opened["number"])
    assert not publisher.drain(-1.0)
    now[0] = 40.0  # it is away
    assert publisher.drain(-1.0)


def test_a_publisher_takes_turns_again_when_deletions_were_not_kept() -> None:
    ranks, draw = trainers(1), random.Random(14)
    shard: Any = ranks[0].shard
    train(ranks, draw)
    with serving(ranks) as (publishers, addresses), following(addresses) as replica:
        wait(replica, publishers)
        snapshot, broken = shard.snapshot, [True]

        def refused(since: Any = None) -> Any:
            if since is not None and broken.pop():
                raise InputError("since", got="older", allowed="kept deletions", remedy="Full.")
            return snapshot(since)

        shard.snapshot = refused
        train(ranks, draw)
        wait(replica, publishers)
        assert_same(replica, ranks)
        assert replica.status()[0].passes == 2 and not broken


def test_one_bit_columns_read_as_in_the_trainer() -> None:
    spec = TableSpec(name="bits", segments=(Segment(dim=2, compressor=OneBit()),))
    shard: Any = make_shard((spec,), seed=1)
    with (
        serving([HostedTables((spec,), shard)]) as (publishers, addresses),
        Replica((spec,), addresses, every_s=0.01, secret=SECRET) as replica,
    ):
        for step in (10, 5000):
            ctx = StepContext(global_step=step)
            shard.apply_ids(groups(0, [1, 2]), [torch.randn(2, 2)], ctx=ctx)
            wait(replica, publishers)
            ends = time.monotonic() + WAIT_S
            while replica.shard.last_step != step and time.monotonic() < ends:
                time.sleep(0.01)
            mine, theirs = (one.find(groups(0, [1, 2])) for one in (replica, shard))
            assert torch.equal(mine.weights[0], theirs.weights[0])


@pytest.mark.parametrize("only", [None, "dense"])
def test_dense_weights_of_a_trainer_that_started_again(only: Any) -> None:
    with ExitStack() as stack:
        trained = [stack.enter_context(Publisher(trainers(1)[0])) for _ in range(2)]
        current, lost = [trained[0]], [b"no json"]

        def handler(head: bytes, frames: Any) -> tuple[bytes, list[bytes]]:
            return (lost.pop(), []) if lost else current[0](head, frames)

        server = Server("tcp://127.0.0.1:0", handler, secret=SECRET)
        stack.callback(server.stop)
        replica = stack.enter_context(following([server.address], only=only))
        for value, publisher in enumerate(trained, 1):
            publisher.publish()
            publisher.publish_dense({"w": torch.tensor(value)})
            current[0] = publisher
            ends = time.monotonic() + WAIT_S
            while replica.dense().get("w") != value:
                assert time.monotonic() < ends, replica.status()
                time.sleep(0.01)
        assert replica.status()[0].failures > 0  # no answer ends its thread


@pytest.mark.parametrize(
    "head",
    [b"", b"{}", b"[[[", b'{"method":"save"}', b'{"method":"page","number":-1}',
     b'{"method":"page","number":7}', b'{"method":"next","number":7}', b"\xff" * 100,
     b'{"method":"after","version":1e400}', b'{"method":"hello","more":1}'],
)  # fmt: skip
def test_requests_without_sense_are_refused(head: bytes) -> None:
    publisher = Publisher(trainers(1)[0])
    with pytest.raises(InputError, match="request to a publisher"):
        publisher(head, [])
    with pytest.raises(InputError, match="request to a publisher"):
        publisher(sealed(head), [])
