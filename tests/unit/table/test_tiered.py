"""A tiered shard gives, bit for bit, what a shard with all rows on the device gives."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from shoal.errors import ConfigError
from shoal.lookup import Output, Pool, PoolPlan, Slice
from shoal.rules.admission import Admission
from shoal.rules.optimizers import SGD, Adam
from shoal.table.cuda.shard import CudaShard
from shoal.table.shard import GradRecord, IdGroups, StepContext
from shoal.table.spec import CachePolicy, HostRows, Segment, TableSpec

DEVICES = [
    pytest.param("cuda", marks=pytest.mark.gpu, id="compiled")
    if torch.cuda.is_available()
    else pytest.param("cpu", id="interpreted")
]
ITEMS = TableSpec(name="items", segments=(Segment(dim=4, optimizer=SGD(lr=0.5)),))
USERS = TableSpec(
    name="users",
    segments=(Segment(dim=3, optimizer=Adam()), Segment(dim=2, name="tail", optimizer=SGD())),
)
ROW_BYTES = {"items": 16, "users": 32 + 32}
EVERYTHING = 1 << 16
CACHES = {"none": 0, "less": 200, "all": EVERYTHING}
# Interpreted, a batch that is larger than the cache stands for all sizes but in the first test;
# `test_row_cache` has every size there, too.
SOME_CACHES = list(CACHES) if torch.cuda.is_available() else ["less"]
STEPS = 5 if torch.cuda.is_available() else 3


def tiered(
    specs: Sequence[TableSpec],
    device: str,
    cache_bytes: int = EVERYTHING,
    policy: CachePolicy = "lru",
) -> CudaShard:
    rows = HostRows(cache_bytes=cache_bytes, policy=policy)
    return CudaShard(specs, seed=3, device=device, host_rows=rows)


def groups(device: str, *parts: Sequence[int]) -> IdGroups:
    """Ids of table 0, table 1 and so on."""
    splits = torch.tensor([0, *(len(part) for part in parts)]).cumsum(0)
    ids = torch.tensor([id_ for part in parts for id_ in part], dtype=torch.int64, device=device)
    return IdGroups(ids, splits, torch.arange(len(parts), dtype=torch.int32))


def gradients(rows: Sequence[Tensor], number: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(number)
    return tuple(
        (torch.randint(-8, 9, part.shape, generator=generator) / 8).to(part.device) for part in rows
    )


def step(shard: CudaShard, ids: IdGroups, number: int) -> tuple[Tensor, ...]:
    """One training step; returns what the lookup read."""
    ctx = StepContext(global_step=number, event_time_s=number)
    ticket = shard.find_or_init(ids, ctx=ctx)
    rows = shard.gather(ticket, ctx=ctx)
    shard.apply([GradRecord(ticket, gradients(rows, number))], ctx=ctx)
    return rows


def assert_equal(shards: Sequence[CudaShard]) -> None:
    """All tables, with states and metadata."""
    for table in range(len(shards[0].specs)):
        first, *others = (shard.export(table) for shard in shards)
        for other in others:
            for name in ("ids", "weights", "state", "versions", "last_seen_s", "counts"):
                assert torch.equal(getattr(first, name), getattr(other, name)), name


def batch_of(number: int, size: int, most: int) -> list[list[int]]:
    """Few ids often, many ids seldom."""
    generator = torch.Generator().manual_seed(100 + number)
    draws = torch.rand(2, size, generator=generator, dtype=torch.float64)
    return (draws**3 * most).long().tolist()


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("cache", "policy"),
    [(cache, policy) for cache in CACHES for policy in ("lru", "lfu")]
    if torch.cuda.is_available()
    else [("none", "lru"), ("less", "lfu")],
)
def test_steps_give_the_rows_of_a_shard_without_tiers(
    device: str, cache: str, policy: CachePolicy
) -> None:
    plain = CudaShard([ITEMS, USERS], seed=3, device=device)
    shard = tiered([ITEMS, USERS], device, CACHES[cache], policy)
    for number in range(STEPS):
        ids = groups(device, *batch_of(number, 24, 60))
        for ours, theirs in zip(step(shard, ids, number), step(plain, ids, number), strict=True):
            assert torch.equal(ours, theirs)
        found, expected = shard.find(ids), plain.find(ids)
        assert torch.equal(found.found_N, expected.found_N)
        for ours, theirs in zip(found.weights, expected.weights, strict=True):
            assert torch.equal(ours, theirs)
    assert_equal([shard, plain])


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cache", SOME_CACHES)
def test_lookups_may_overlap_and_steps_come_in_any_order(device: str, cache: str) -> None:
    shards = [CudaShard([ITEMS], seed=3, device=device), tiered([ITEMS], device, CACHES[cache])]
    ctx = StepContext()
    for shard in shards:
        tickets = [
            shard.find_or_init(groups(device, range(start, start + 12)), ctx=ctx)
            for start in (0, 4, 20)
        ]
        for number in (2, 0, 1):
            rows = shard.gather(tickets[number], ctx=ctx)
            shard.apply([GradRecord(tickets[number], gradients(rows, number))], ctx=ctx)
        both = [shard.find_or_init(groups(device, [1, 2, 30]), ctx=ctx) for _ in range(2)]
        records = [
            GradRecord(ticket, gradients(shard.gather(ticket, ctx=ctx), 7)) for ticket in both
        ]
        shard.apply(records, ctx=ctx)
    assert_equal(shards)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_pooled_rows_come_from_the_cache(device: str) -> None:
    plan = PoolPlan((Pool("sum", (Slice(0, 4, 0, 0),)),), (Output(4),))
    offsets = torch.tensor([0, 2, 5], device=device)
    shards = [CudaShard([ITEMS], seed=3, device=device), tiered([ITEMS], device)]
    ids, ctx = groups(device, [1, 2, 2, 3, 1]), StepContext()
    outputs = []
    for shard in shards:
        for number in range(2):
            ticket = shard.find_or_init(ids, ctx=ctx)
            outputs.append(shard.gather_pooled(ticket, plan, offsets, None, ctx=ctx)[0])
            grads = gradients(outputs[-1:], number)
            record = GradRecord(ticket, grads, plan, offsets, None)
            shard.apply([record], ctx=ctx)
        outputs.append(shard.find_pooled(ids, plan, offsets, None)[0])
    for theirs, ours in zip(outputs[:3], outputs[3:], strict=True):
        assert torch.equal(ours, theirs)
    assert_equal(shards)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cache", SOME_CACHES)
def test_steps_without_tickets(device: str, cache: str) -> None:
    shards = [CudaShard([ITEMS], seed=3, device=device), tiered([ITEMS], device, CACHES[cache])]
    for shard in shards:
        for number in range(3):
            ids = groups(device, range(number, number + 9))
            rows = shard.find(ids).weights
            shard.apply_ids(ids, gradients(rows, number), ctx=StepContext(global_step=number))
    assert_equal(shards)


@pytest.mark.parametrize("device", DEVICES)
def test_changed_rows_are_seen_by_every_verb(device: str) -> None:
    shard = tiered([ITEMS], device)
    ids = groups(device, [5, 6])
    before = shard.find(ids).weights[0]
    rows = step(shard, ids, 1)[0]
    expected = rows - 0.5 * gradients([rows], 1)[0]
    assert not torch.equal(expected, before)
    entry = shard.entry(0, 5)
    assert entry is not None
    assert torch.equal(entry.weights, expected[0].cpu())
    assert torch.equal(shard.find(ids).weights[0], expected)
    assert torch.equal(
        shard.gather(shard.find_or_init(ids, ctx=StepContext()), ctx=StepContext())[0], expected
    )


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cache", SOME_CACHES)
def test_rows_may_be_written_while_they_are_cached(device: str, cache: str) -> None:
    shards = [CudaShard([ITEMS], seed=3, device=device), tiered([ITEMS], device, CACHES[cache])]
    ctx = StepContext()
    for shard in shards:
        ids = groups(device, range(8))
        step(shard, ids, 1)
        held = shard.find_or_init(groups(device, range(4)), ctx=ctx)
        shard.assign(groups(device, [1, 9]), [torch.ones(2, 4, device=device)], ctx=ctx)
        shard.assign_add(groups(device, [2, 2]), [torch.ones(2, 4, device=device)], ctx=ctx)
        shard.reinitialize(groups(device, [3]), ctx=ctx)
        rows = shard.gather(held, ctx=ctx)
        shard.apply([GradRecord(held, gradients(rows, 2))], ctx=ctx)
        chunk = shard.export(0)
        step(shard, ids, 3)
        shard.load(0, chunk)
    assert_equal(shards)
    for shard in shards:
        shard.clear(0)
        step(shard, groups(device, range(4, 12)), 4)
    assert_equal(shards)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cache", SOME_CACHES)
def test_evicted_rows_leave_the_cache_before_their_place_is_reused(device: str, cache: str) -> None:
    spec = TableSpec(name="few", segments=ITEMS.segments, capacity_rows=12, on_full="lru")
    shards = [CudaShard([spec], seed=3, device=device), tiered([spec], device, CACHES[cache])]
    for shard in shards:
        for number in range(STEPS):
            step(shard, groups(device, range(5 * number, 5 * number + 8)), number)
    assert_equal(shards)
    assert shards[0].size(0) <= 12


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cache", SOME_CACHES)
def test_ids_without_rows_read_their_initial_value(device: str, cache: str) -> None:
    spec = TableSpec(name="rare", segments=ITEMS.segments, admission=Admission(threshold=2))
    shards = [CudaShard([spec], seed=3, device=device), tiered([spec], device, CACHES[cache])]
    read = [step(shard, groups(device, [1, 2, 2, 3]), 0)[0] for shard in shards]
    assert torch.equal(read[0], read[1])
    assert_equal(shards)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cache", SOME_CACHES)
def test_prefetched_rows_are_there_at_their_lookup(device: str, cache: str) -> None:
    shards = [CudaShard([ITEMS], seed=3, device=device), tiered([ITEMS], device, CACHES[cache])]
    ctx = StepContext()
    batches = [groups(device, range(6 * number, 6 * number + 10)) for number in range(4)]
    for shard in shards:
        shard.find_or_init(groups(device, range(40)), ctx=ctx).end()
        for number, ids in enumerate(batches):
            ticket = shard.find_or_init(ids, ctx=ctx)
            rows = shard.gather(ticket, ctx=ctx)
            if number + 1 < len(batches):
                shard.prefetch(batches[number + 1])
            shard.apply([GradRecord(ticket, gradients(rows, number))], ctx=ctx)
    assert_equal(shards)


@pytest.mark.parametrize("device", DEVICES)
def test_a_prefetch_makes_hits_and_takes_no_place_in_use(device: str) -> None:
    shard = tiered([ITEMS], device, 12 * ROW_BYTES["items"])
    ctx = StepContext()
    shard.find_or_init(groups(device, range(30)), ctx=ctx).end()
    ticket = shard.find_or_init(groups(device, range(8)), ctx=ctx)
    shard.prefetch(groups(device, range(20, 24)))
    before = shard.cache_stats()
    shard.gather(ticket, ctx=ctx)
    shard.find_or_init(groups(device, [*range(20, 24), *range(8)]), ctx=ctx)
    after = shard.cache_stats()
    assert (after.hits - before.hits, after.misses - before.misses) == (12, 0)


@pytest.mark.parametrize("device", DEVICES)
def test_a_prefetch_of_unknown_ids_inserts_nothing(device: str) -> None:
    shard = tiered([ITEMS], device)
    shard.prefetch(groups(device, [1, 2]))
    shard.prefetch(groups(device, []))
    assert shard.size(0) == 0
    assert shard.cache_stats().misses == 0


@pytest.mark.parametrize("device", DEVICES)
def test_it_says_what_is_on_the_host(device: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="shoal.table"):
        shard = tiered([ITEMS, USERS], device, 1234)
    assert "items, users" in caplog.text
    assert "1234 bytes" in caplog.text
    assert [table.on_host for table in shard.stats()] == [True, True]
    plain = CudaShard([ITEMS], device=device)
    assert [table.on_host for table in plain.stats()] == [False]


def test_bad_caches_are_refused() -> None:
    for wrong in (-1, 1.5, True):
        with pytest.raises(ConfigError, match="cache_bytes"):
            HostRows(cache_bytes=wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="'lru', 'lfu'"):
        HostRows(policy="fifo")  # type: ignore[arg-type]


@pytest.mark.parametrize("device", DEVICES)
def test_where_rows_live_is_no_number(device: str) -> None:
    with pytest.raises(ConfigError, match="HostRows"):
        CudaShard([ITEMS], device=device, host_rows=1 << 20)  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.parametrize("cache_bytes", [0, 1 << 20, 1 << 26])
def test_large_steps_compiled(cache_bytes: int) -> None:
    wide = TableSpec(name="wide", segments=(Segment(dim=128, optimizer=Adam()),))
    shards = [
        CudaShard([wide, USERS], seed=3, device="cuda"),
        tiered([wide, USERS], "cuda", cache_bytes),
    ]
    for shard in shards:
        for number in range(4):
            step(shard, groups("cuda", *batch_of(number, 50_000, 40_000)), number)
            shard.prefetch(groups("cuda", *batch_of(number + 1, 50_000, 40_000)))
    assert_equal(shards)
