"""Snapshots of what changed: a consumer ends with the table, whatever happens on the way."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from shoal import Expiry, Segment, TableSpec, initializers, optimizers
from shoal.errors import InputError, TicketError
from shoal.table.cpu.shard import CpuShard
from shoal.table.shard import HASHES, GradRecord, IdGroups, Shard, StepContext
from shoal.table.values import Cursor, RowChunk
from support.change_consumer import Consumer, contents, cursor_of
from support.id_groups import groups_of
from support.placed_shard import PlacedShard
from support.reference_shard import ReferenceShard
from support.shards import COMPILED, CUDA, TIERED, TIERED_COMPILED, shard_factory

INTERPRETED = not torch.cuda.is_available()
CLOCK = itertools.count(1)


def specs() -> tuple[TableSpec, ...]:
    segment = Segment(dim=2, initializer=initializers.Zeros(), optimizer=optimizers.Adagrad(lr=1.0))
    return (
        TableSpec(name="grows", segments=(segment,), expiry=Expiry(ttl_s=100)),
        TableSpec(name="full", segments=(segment,), capacity_rows=8, on_full="lru"),
    )


@pytest.fixture(params=["cpu", "reference", CUDA, TIERED])
def shard(request: pytest.FixtureRequest) -> Shard:
    return shard_factory(request.param)(specs())


# The core and a GPU take large inputs.
FAST = pytest.mark.parametrize("shard", ["cpu", COMPILED, TIERED_COMPILED], indirect=True)


# Interpreted, rows behind a cache are left to other tests.
ONCE = pytest.mark.parametrize("shard", ["cpu", "reference", CUDA, TIERED_COMPILED], indirect=True)


def put(
    shard: Shard, ids: Sequence[int], value: float = 0.0, *, table: int = 0, at_s: int = 0
) -> None:
    """Assign `value`, or one never used before."""
    weights_ND = torch.full((len(ids), 2), value or float(next(CLOCK)))
    shard.assign(groups_of((table, ids)), [weights_ND], ctx=StepContext(event_time_s=at_s))


def train(shard: Shard, ids: Sequence[int], at_s: int = 0) -> None:
    ctx = StepContext(event_time_s=at_s)
    ticket = shard.find_or_init(groups_of((0, ids)), ctx=ctx)
    shard.apply([GradRecord(ticket, (torch.ones(len(ids), 2),))], ctx=ctx)


def caught_up(shard: Shard, *consumers: Consumer) -> None:
    """Every consumer then holds the shard."""
    for consumer in consumers:
        consumer.drain(shard)
        assert consumer.held == contents(shard.export(0), shard.export(1))


def named(*ids: int, table: str = "grows") -> set[tuple[str, int]]:
    return {(table, id_) for id_ in ids}


@pytest.mark.slow
def test_only_what_changed_is_sent(shard: Shard) -> None:
    consumer = Consumer()
    many = 40 if INTERPRETED and isinstance(shard, PlacedShard) else 5000
    put(shard, range(many))
    caught_up(shard, consumer)
    assert consumer.restarts == 1
    put(shard, [many - 1, 3])
    train(shard, [20, 7000])
    shard.reinitialize(groups_of((0, [17])), ctx=StepContext())
    put(shard, [5], table=1)
    assert consumer.drain(shard) == named(3, 17, 20, many - 1, 7000) | named(5, table="full")
    assert consumer.drain(shard) == set()
    caught_up(shard, consumer)
    assert consumer.restarts == 1


@pytest.mark.slow
def test_consumers_at_different_paces(shard: Shard) -> None:
    fast, slow = Consumer(), Consumer()
    put(shard, range(50))
    caught_up(shard, fast, slow)
    put(shard, range(40, 60))
    slow.drain(shard)
    for turn in range(5):
        put(shard, range(turn * 10, turn * 10 + 15), at_s=turn * 60)
        put(shard, range(turn * 3, turn * 3 + 6), table=1, at_s=turn * 60)
        shard.evict(turn * 60)
        caught_up(shard, fast)
        assert fast.cursor and slow.cursor
        shard.release(min(fast.cursor.version, slow.cursor.version))
    caught_up(shard, fast, slow)
    assert fast.restarts == slow.restarts == 1


@pytest.mark.slow
@ONCE
def test_a_slow_read_during_quick_ones(shard: Shard) -> None:
    """What a consumer reads while others come and go is of its own point."""
    fast, slow = Consumer(), Consumer()
    still = isinstance(shard, ReferenceShard)  # changes nothing while a snapshot is open
    put(shard, range(30))
    caught_up(shard, fast, slow)
    put(shard, range(20, 40))
    slow.open(shard)
    want = contents(shard.export(0), shard.export(1))
    for turn in range(1, 3):
        if not still:
            put(shard, range(turn * 10, turn * 10 + 15), at_s=turn * 60)
            put(shard, range(turn * 3, turn * 3 + 6), table=1, at_s=turn * 60)
            shard.evict(turn * 60)
        caught_up(shard, fast)
    slow.finish(shard)
    assert slow.held == want
    caught_up(shard, fast, slow)
    assert fast.restarts == slow.restarts == 1


def test_an_id_back_before_the_read_is_no_deletion(shard: Shard) -> None:
    put(shard, [1, 2])
    with shard.snapshot() as full:
        start = cursor_of(shard, full)
    shard.evict(100)
    shard.close_version()
    put(shard, [2], 5.0, at_s=100)
    with shard.snapshot(start) as delta:
        assert delta.deleted(0).tolist() == [1]
        assert delta.read(0, 0, HASHES).ids.tolist() == [2]


@pytest.mark.slow
def test_capacity_evictions_are_deletions(shard: Shard) -> None:
    consumer = Consumer()
    for id_ in range(8):
        put(shard, [id_], table=1, at_s=id_)
    caught_up(shard, consumer)
    put(shard, range(8, 13), table=1, at_s=8)
    assert consumer.drain(shard) == named(*range(5), *range(8, 13), table="full")
    caught_up(shard, consumer)


@pytest.mark.slow
def test_a_cleared_table_is_deleted(shard: Shard) -> None:
    consumer = Consumer()
    put(shard, range(300))
    put(shard, [1], table=1)
    caught_up(shard, consumer)
    shard.clear(0)
    put(shard, range(290, 310))
    assert consumer.drain(shard) == named(*range(310))
    caught_up(shard, consumer)
    assert consumer.restarts == 1


def test_a_refused_clear_deletes_nothing(shard: Shard) -> None:
    consumer = Consumer()
    put(shard, [1])
    caught_up(shard, consumer)
    ticket = shard.find_or_init(groups_of((0, [1])), ctx=StepContext())
    with pytest.raises(TicketError):
        shard.clear(0)
    ticket.end()
    assert consumer.drain(shard) == set()


def expire_many(shard: Shard, first: int, many: int, at_s: int) -> None:
    """Ids first..first+many come at `at_s` and go 100 s later."""
    ids_N, splits = torch.arange(first, first + many), torch.tensor([0, many])
    groups = IdGroups(ids_N, splits, torch.zeros(1, dtype=torch.int32))
    shard.assign(groups, [torch.zeros(many, 2)], ctx=StepContext(event_time_s=at_s))
    shard.close_version()
    shard.evict(at_s + 100)
    shard.close_version()


@pytest.mark.slow
@FAST
def test_a_long_log_of_deletions_spills(shard: Shard) -> None:
    many = 300_000
    fast, slow = Consumer(), Consumer()
    put(shard, [-1], at_s=1000)
    caught_up(shard, fast, slow)
    for at_s in (0, 200):
        expire_many(shard, at_s, many, at_s)
        fast.drain(shard)
        shard.release(slow.cursor.version)
    assert fast.held.keys() == named(-1)
    assert slow.drain(shard) == named(*range(many + 200))
    shard.release(fast.cursor.version)
    caught_up(shard, fast, slow)
    assert fast.restarts == slow.restarts == 1


@FAST
def test_a_log_that_cannot_spill_means_a_full_pass(
    shard: Shard, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    consumer = Consumer()
    put(shard, [-1], at_s=1000)
    put(shard, [-2], at_s=0)
    caught_up(shard, consumer)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "missing"))
    expire_many(shard, 0, 100_000, 1)
    caught_up(shard, consumer)
    assert consumer.held.keys() == named(-1)
    assert consumer.restarts == 2
    put(shard, [5], at_s=500)
    shard.evict(2000)
    caught_up(shard, consumer)
    assert consumer.restarts == 2


def test_a_cursor_below_the_released_version_takes_a_full_pass(shard: Shard) -> None:
    early, late = Consumer(), Consumer()
    put(shard, [1, 2])
    caught_up(shard, early, late)
    shard.evict(100)
    put(shard, [3], at_s=100)
    caught_up(shard, late)
    shard.release(late.cursor.version)
    caught_up(shard, early, late)
    assert (early.restarts, late.restarts) == (2, 1)


@ONCE
def test_the_log_waits_for_the_slowest_consumer(shard: Shard) -> None:
    early, late = Consumer(), Consumer()
    for name in ("early", "late"):
        shard.release(0, name)
    put(shard, [1, 2])
    caught_up(shard, early, late)
    for turn in range(1, 3):
        shard.evict(100 * turn)
        put(shard, [3], at_s=100 * turn)
        caught_up(shard, late)
        shard.release(late.cursor.version, "late")
    caught_up(shard, early, late)
    assert (early.restarts, late.restarts) == (1, 1)
    for name in ("early", "late"):
        shard.release(early.cursor.version, name)
    behind = Cursor(early.cursor.incarnation, early.cursor.version - 1)
    with pytest.raises(InputError, match="full snapshot"):
        shard.snapshot(behind)


@ONCE
def test_a_consumer_that_leaves_holds_nothing(shard: Shard) -> None:
    early, late = Consumer(), Consumer()
    put(shard, [1, 2])
    caught_up(shard, early, late)
    for name in ("early", "late"):
        shard.release(0, name)
    shard.evict(100)
    caught_up(shard, late)
    shard.release(late.cursor.version, "late")
    shard.release(None, "early")
    caught_up(shard, early, late)
    assert (early.restarts, late.restarts) == (2, 1)
    before = shard.incarnation
    shard.release(None, "late")  # nobody is left: deletions are kept no more
    put(shard, [3])
    caught_up(shard, late)
    assert late.restarts == 2
    assert shard.incarnation != before


def test_release_leaves_the_open_version(shard: Shard) -> None:
    consumer = Consumer()
    put(shard, [1, 2])
    caught_up(shard, consumer)
    shard.evict(100)
    shard.release((1 << 32) - 1)
    assert consumer.drain(shard) == named(1, 2)
    assert consumer.restarts == 1


def test_deletions_are_kept_only_for_consumers(shard: Shard) -> None:
    made = shard.incarnation
    put(shard, [1, 2])
    by_hand = Consumer()
    by_hand.held = contents(shard.export(0))
    by_hand.cursor = Cursor(made, shard.close_version())
    shard.evict(100)
    caught_up(shard, by_hand)
    assert by_hand.restarts == 1
    assert shard.incarnation != made
    shard.release(None)
    put(shard, [3])
    shard.evict(100)
    caught_up(shard, by_hand)
    assert by_hand.restarts == 2


def rows_of(ids: Sequence[int], version: int) -> RowChunk:
    n = len(ids)
    meta_N = torch.zeros(n, dtype=torch.int64)
    versions_N = torch.full((n,), version)
    values_N2 = torch.full((n, 2), 0.5)
    return RowChunk("grows", torch.tensor(ids), values_N2, values_N2, versions_N, meta_N, meta_N)


@pytest.mark.slow
@pytest.mark.parametrize("version", [1, 9])
def test_a_load_makes_a_new_incarnation(shard: Shard, version: int) -> None:
    consumer = Consumer()
    put(shard, range(10))
    put(shard, [1], table=1)
    caught_up(shard, consumer)
    before = shard.incarnation
    shard.evict(100)
    shard.load(0, rows_of([3, 99], version))
    assert shard.incarnation != before
    caught_up(shard, consumer)
    assert consumer.restarts == 2


def test_shards_have_incarnations_of_their_own() -> None:
    drawn = [CpuShard(specs()).incarnation for _ in range(20)]
    assert len(set(drawn)) == 20
    assert all(0 < number < 1 << 63 for number in drawn)


def test_a_skipped_gradient_changes_nothing(shard: Shard) -> None:
    consumer = Consumer()
    put(shard, [1, 2])
    caught_up(shard, consumer)
    ctx = StepContext(nan_policy="skip")
    ticket = shard.find_or_init(groups_of((0, [1, 2])), ctx=ctx)
    grads_N2 = torch.tensor([[1.0, 1.0], [float("nan"), 1.0]])
    shard.sum_grads([GradRecord(ticket, (grads_N2,))])
    shard.apply([GradRecord(ticket, (grads_N2,))], ctx=ctx)
    assert consumer.drain(shard) == named(1)


def test_all_ids_are_legal(shard: Shard) -> None:
    consumer = Consumer()
    ids = [-(1 << 63), -1, 0, (1 << 63) - 1]
    put(shard, ids)
    caught_up(shard, consumer)
    shard.evict(100)
    assert consumer.drain(shard) == named(*ids)


def test_bad_calls(shard: Shard) -> None:
    for version in (-1, 1 << 32):
        with pytest.raises(InputError, match="version to release"):
            shard.release(version)
    for bad in ({"incarnation": -1}, {"version": 1 << 32}, {"version": 1.0}):
        with pytest.raises(InputError, match="cursor"):
            Cursor(**bad)  # type: ignore[arg-type]


@FAST
def test_reads_during_training_lose_nothing(shard: Shard) -> None:
    consumers = [Consumer(), Consumer()]
    over = threading.Event()
    errors: list[BaseException] = []

    def training() -> None:
        generator = torch.Generator().manual_seed(1)
        try:
            for step in range(300):
                ids = torch.randint(3000, (64,), generator=generator).tolist()
                train(shard, ids, at_s=step)
                put(shard, ids[:3], table=1, at_s=step)
                shard.evict(step)
        except BaseException as error:  # noqa: BLE001 - raised by the main thread
            errors.append(error)
        finally:
            over.set()

    def reading_on(consumer: Consumer) -> None:
        try:
            while not over.is_set():
                consumer.drain(shard)
        except BaseException as error:  # noqa: BLE001 - raised by the main thread
            errors.append(error)

    threads = [threading.Thread(target=training)]
    threads += [threading.Thread(target=reading_on, args=(consumer,)) for consumer in consumers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    caught_up(shard, *consumers)
    assert [consumer.restarts for consumer in consumers] == [1, 1]
