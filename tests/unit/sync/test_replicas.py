"""Replicas have the rows of their publishers, whatever happens on the way."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal import Segment, TableSpec
from shoal.comm.transport import Secret, Server
from shoal.errors import ConfigError, InputError, ServerLost
from shoal.placement import (
    Placement,
    column_wise,
    data_parallel,
    hash_ids,
    ranks_of,
    row_wise,
    table_wise,
)
from shoal.rules.admission import Admission
from shoal.rules.compressors import OneBit
from shoal.rules.optimizers import Adagrad
from shoal.sync.publisher import Publisher
from shoal.sync.replica import Replica
from shoal.table.factory import make_shard
from shoal.table.hosting import HostedTables, hosted_specs
from shoal.table.rows import real_dtype
from shoal.table.shard import IdGroups, Shard, StepContext

SPECS = (
    TableSpec(name="user", segments=(Segment(dim=4, optimizer=Adagrad()),)),
    TableSpec(name="item", segments=(Segment(dim=2),), admission=Admission(threshold=2)),
    TableSpec(name="word", segments=(Segment(dim=3),), dtype="float16"),
    TableSpec(name="exact", segments=(Segment(dim=2),), dtype="float64"),
)
WAIT_S = 60.0
SECRET = Secret("a token")


def trainers(count: int) -> list[HostedTables]:
    """The shards of `count` ranks, rows spread by hash."""
    placed = [one for spec in SPECS for one in row_wise(spec.name, spec.dim, count)]
    placement = Placement(count, tuple(placed))
    return [
        HostedTables(SPECS, make_shard(hosted_specs(SPECS, placement, rank), seed=1), placement)
        for rank in range(count)
    ]


def groups(table: int, ids: Sequence[int]) -> IdGroups:
    splits = torch.tensor([0, len(ids)])
    return IdGroups(torch.tensor(ids), splits, torch.tensor([table], dtype=torch.int32))


def train(ranks: Sequence[HostedTables], draw: random.Random) -> None:
    """A step on a few rows, some of them new; now and then some are deleted."""
    for table, spec in enumerate(SPECS):
        drawn = torch.tensor([draw.randrange(400) for _ in range(60)])
        owners = ranks_of(hash_ids(spec.hash_name, drawn), len(ranks))
        for number, rank in enumerate(ranks):
            shard: Any = rank.shard
            ids = drawn[owners == number].tolist()
            grads = torch.randn(len(ids), spec.dim).to(real_dtype(spec))
            ctx = StepContext(event_time_s=draw.randrange(1000))
            shard.apply_ids(groups(table, ids), [grads], ctx=ctx)
            if draw.random() < 0.3:
                shard.remove(groups(table, ids[:5]))
            if draw.random() < 0.03:
                shard.clear(table)


def exported(shards: Sequence[Shard], table: int) -> list[Tensor]:
    """Ids in order, and weights and metadata by id."""
    chunks = [shard.export(table) for shard in shards]
    ids = torch.cat([chunk.ids for chunk in chunks])
    order = torch.argsort(ids)
    names = "weights", "versions", "last_seen_s", "counts"
    columns = [torch.cat([getattr(chunk, name) for chunk in chunks])[order] for name in names]
    return [ids[order], *columns]


def assert_same(replica: Replica, ranks: Sequence[HostedTables]) -> None:
    for table in range(len(SPECS)):
        mine = exported([replica.shard], table)
        for ours, theirs in zip(mine, exported([rank.shard for rank in ranks], table), strict=True):
            assert torch.equal(ours, theirs)


def wait(replica: Replica, publishers: Sequence[Publisher]) -> None:
    """Until a replica has all that was trained by now."""
    versions = [publisher.publish() for publisher in publishers]
    ends = time.monotonic() + WAIT_S
    while any(
        one.state != "AVAILABLE" or one.version < version
        for one, version in zip(replica.status(), versions, strict=True)
    ):
        assert time.monotonic() < ends, replica.status()
        time.sleep(0.02)


@contextmanager
def serving(
    ranks: Sequence[HostedTables],
    handler: Callable[[Publisher], Any] = lambda one: one,
    **options: Any,
) -> Iterator[tuple[list[Publisher], list[str]]]:
    """A publisher a rank, which take turns only when asked, and their addresses."""
    with ExitStack() as stack:
        publishers, addresses = [], []
        for number, tables in enumerate(ranks):
            publisher = Publisher(tables, rank=number, every_s=3600.0, **options)
            stack.enter_context(publisher)
            server = Server("tcp://127.0.0.1:0", handler(publisher), secret=SECRET)
            stack.callback(server.stop)
            publishers.append(publisher)
            addresses.append(server.address)
        yield publishers, addresses


def following(addresses: Sequence[str], **options: Any) -> Replica:
    return Replica(SPECS, addresses, every_s=0.01, reply_s=1.0, secret=SECRET, **options)


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
            (ids, weights, *_), mine = exported([ranks[0].shard], table), replica.shard
            found = mine.find(groups(table, ids.tolist()))
            assert torch.equal(found.weights[0], weights.half().to(found.weights[0].dtype))


class Line:
    """A publisher behind a line that may be down, or lose and damage what it carries."""

    def __init__(self, publisher: Publisher, draw: random.Random | None = None) -> None:
        self.publisher, self.draw = publisher, draw
        self.down = False

    def __call__(self, head: bytes, frames: Any) -> tuple[bytes, list[bytes]]:
        fate = 0.5 if self.draw is None else self.draw.random()
        if self.down or fate < 0.1:
            raise ServerLost("a request", got="lost", allowed="a line that is up", remedy="Wait.")
        said, pages = self.publisher(head, frames)
        if pages and fate < 0.3:
            at = random.randrange(len(pages[0]))
            pages = [pages[0][:at] + bytes([pages[0][at] ^ 1]) + pages[0][at + 1 :]]
        if fate > 0.98:
            time.sleep(1.2)  # longer than a replica waits
        return said, pages


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
        following(addresses) as replica,
    ):
        for _ in range(8):
            train(ranks, draw)
            wait(replica, publishers)
            assert_same(replica, ranks)
        assert sum(one.failures for one in replica.status()) > 0


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


def test_columns_on_several_ranks_are_refused() -> None:
    one = hosted_specs(SPECS[:1], Placement(2, tuple(column_wise("user", 4, (0, 1)))), 0)
    with pytest.raises(ConfigError, match=r"user\[0:2\]"):
        Publisher(HostedTables(SPECS[:1], make_shard(one)))


@pytest.mark.parametrize("hosted", [table_wise("user", 4, 0), data_parallel("user", 4, 2)])
def test_what_is_not_row_wise_over_all_ranks_is_refused(hosted: Any) -> None:
    placement = Placement(2, tuple(hosted))
    shard = make_shard(hosted_specs(SPECS[:1], placement, 0))
    with pytest.raises(ConfigError, match="'user'"):
        Publisher(HostedTables(SPECS[:1], shard, placement))


def asked(publisher: Publisher, method: str, **parts: Any) -> tuple[Any, list[bytes]]:
    said, pages = publisher(json.dumps({"method": method, "replica": "r", **parts}).encode(), [])
    return json.loads(said), pages


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


def test_dense_weights_of_a_trainer_that_started_again() -> None:
    with ExitStack() as stack:
        trained = [stack.enter_context(Publisher(trainers(1)[0])) for _ in range(2)]
        current, lost = [trained[0]], [b"no json"]

        def handler(head: bytes, frames: Any) -> tuple[bytes, list[bytes]]:
            return (lost.pop(), []) if lost else current[0](head, frames)

        server = Server("tcp://127.0.0.1:0", handler, secret=SECRET)
        stack.callback(server.stop)
        replica = stack.enter_context(following([server.address]))
        for value, publisher in enumerate(trained, 1):
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
