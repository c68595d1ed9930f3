"""Tickets and calls of a GPU shard: what they hold, what ends them, what is refused."""

from __future__ import annotations

import gc
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.errors import NonFiniteGradient, TicketError, UnknownName
from shoal.lookup import Output, Pool, PoolPlan, Slice
from shoal.rules.expiry import Expiry
from shoal.rules.initializers import Constant
from shoal.rules.optimizers import FTRL, LAMB, SGD, Adagrad, Adam, Optimizer
from shoal.table.cpu.shard import CpuShard
from shoal.table.cuda.shard import CudaShard
from shoal.table.shard import GradRecord, Shard, StepContext
from shoal.table.spec import Segment, TableSpec
from support.id_groups import groups_of
from support.placed_shard import PlacedShard
from support.reference_shard import ReferenceShard

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []

HELPFUL = r".+: got .+; allowed: .+\. .+"
MARKERS = (-(1 << 63), 1 - (1 << 63))
CTX = StepContext()


def spec(name: str, rule: Optimizer | None = None, dim: int = 2, **values: Any) -> TableSpec:
    segment = Segment(dim=dim, optimizer=rule or SGD(lr=1.0), initializer=Constant(0.5))
    return TableSpec(name=name, segments=(segment,), **values)


def placed(*specs: TableSpec) -> Any:
    return PlacedShard(CudaShard(specs, device=DEVICE))


def rows(*values: float, dim: int = 2) -> Tensor:
    return torch.tensor(values).reshape(-1, 1).expand(-1, dim).contiguous()


def values_of(shard: Shard, table: int = 0) -> dict[int, float]:
    chunk = shard.export(table)
    return dict(zip(chunk.ids.tolist(), chunk.weights[:, 0].tolist(), strict=True))


@pytest.mark.slow
def test_rows_under_a_ticket_stay_while_others_come_and_go() -> None:
    shard = placed(spec("t", capacity_rows=8, on_full="lru", expiry=Expiry(ttl_s=5)))
    kept = shard.find_or_init(groups_of((0, [1, 2, 1])), ctx=CTX)
    shard.assign(groups_of((0, [1, 2])), (rows(11.0, 12.0),), ctx=CTX)
    for turn in range(1, 6):
        ids = range(100 * turn, 100 * turn + 6)
        ctx = StepContext(event_time_s=turn)
        other = shard.find_or_init(groups_of((0, ids)), ctx=ctx)
        assert other.admitted_N.all() and shard.size(0) == 8
        shard.assign(groups_of((0, ids)), (rows(*(float(i) for i in ids)),), ctx=ctx)
        assert shard.gather(kept, ctx=CTX)[0][:, 0].tolist() == [11.0, 12.0, 11.0]
        other.end()
        assert shard.evict(turn + 5) == 6
        assert sorted(values_of(shard)) == [1, 2]
    shard.apply([GradRecord(kept, (rows(1.0, 1.0, 1.0),))], ctx=CTX)
    assert values_of(shard) == {1: 9.0, 2: 11.0}
    assert shard.evict(100) == 2


def test_a_row_that_comes_back_is_not_its_old_ticket_s() -> None:
    shard = placed(spec("t", expiry=Expiry(ttl_s=5)))
    ended = shard.find_or_init(groups_of((0, [1])), ctx=CTX)
    ended.end()
    assert shard.evict(5) == 1
    again = shard.find_or_init(groups_of((0, [7, 1])), ctx=StepContext(event_time_s=9))
    assert again.found_N.tolist() == [False, False]
    with pytest.raises(TicketError, match=HELPFUL):
        shard.apply([GradRecord(ended, (rows(1.0),))], ctx=CTX)
    shard.apply([GradRecord(again, (rows(1.0, 2.0),))], ctx=CTX)
    assert values_of(shard) == {7: -0.5, 1: -1.5}


def test_a_dropped_ticket_holds_nothing() -> None:
    shard = placed(spec("t", expiry=Expiry(ttl_s=5)))
    ticket = shard.find_or_init(groups_of((0, [1, 2])), ctx=CTX)
    with pytest.raises(TicketError, match="live tickets"):
        shard.clear(0)
    assert shard.evict(9) == 0
    del ticket
    gc.collect()
    assert shard.evict(9) == 2
    shard.clear(0)


def test_clear_under_tickets_of_other_tables() -> None:
    shard = placed(spec("a"), spec("b"))
    shard.find_or_init(groups_of((0, [1, 2])), ctx=CTX).end()
    ticket = shard.find_or_init(groups_of((1, [3])), ctx=CTX)
    shard.clear(0)
    assert [stats.rows for stats in shard.stats()] == [0, 1]
    assert [stats.inserted for stats in shard.stats()] == [2, 1]
    shard.find_or_init(groups_of((0, [2, 5])), ctx=CTX).end()
    shard.apply([GradRecord(ticket, (rows(1.0),))], ctx=CTX)
    assert values_of(shard, 0) == {2: 0.5, 5: 0.5} and values_of(shard, 1) == {3: -0.5}


def test_new_ids_are_new_at_all_their_positions() -> None:
    shard = placed(spec("a"), spec("b"))
    shard.find_or_init(groups_of((0, range(0, 60, 2))), ctx=CTX)
    ids = [i % 60 for i in range(150)]
    ticket = shard.find_or_init(groups_of((0, ids), (1, ids[:70]), (0, ids)), ctx=CTX)
    even = [i % 2 == 0 for i in ids]
    assert ticket.found_N.tolist() == [*even, *[False] * 70, *even]
    assert ticket.admitted_N.all()


def test_many_tickets_and_records_in_one_step() -> None:
    specs = [spec("a"), spec("b", Adagrad(lr=1.0), dim=3)]
    shards: list[Any] = [placed(*specs), CpuShard(specs)]
    for shard in shards:
        first = shard.find_or_init(
            groups_of((0, [1, 2, 1]), (1, [4])), torch.tensor([1, 2, 3, 4]), ctx=CTX
        )
        second = shard.find_or_init(
            groups_of((1, [4, 5]), (0, [2])), ctx=StepContext(event_time_s=8)
        )
        empty = shard.find_or_init(groups_of((1, [])), ctx=CTX)
        records = [
            GradRecord(first, (rows(1.0, 2.0, 4.0), rows(1.0, dim=3)), scale=0.5),
            GradRecord(second, (rows(1.0, 2.0, dim=3), rows(8.0))),
            GradRecord(first, (rows(0.25, 0.5, 1.0), rows(2.0, dim=3))),
            GradRecord(empty, (torch.empty(0, 3),)),
        ]
        summed = shard.sum_grads(records)
        assert summed.tables == (0, 1)
        assert [ids.tolist() for ids in summed.ids] == [[1, 2], [4, 5]]
        assert [s[:, 0].tolist() for s in summed.sums] == [[3.75, 9.5], [3.5, 2.0]]
        assert [counts.tolist() for counts in summed.counts] == [[4, 3], [5, 1]]
        shard.apply(records, ctx=StepContext(event_time_s=3))
        with pytest.raises(TicketError):
            shard.gather(second, ctx=CTX)
    for k in range(2):
        ours, theirs = (shard.export(k) for shard in shards)
        for name in ("ids", "counts", "last_seen_s", "versions", "weights", "state"):
            assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
    assert shards[0].entry(1, 4).count == 5 and shards[0].entry(1, 4).last_seen_s == 8


def test_sums_come_in_the_order_of_first_appearance() -> None:
    specs = [spec("a"), spec("b", Adam()), spec("c")]
    ids = [9, 3, 9, 7, 3, -5, *MARKERS, 9]
    shards: list[Any] = [placed(*specs), ReferenceShard(specs)]
    found = []
    for shard in shards:
        shard.find_or_init(groups_of((0, sorted(ids)), (2, [7])), ctx=CTX).end()
        ticket = shard.find_or_init(groups_of((2, ids), (1, ids), (0, ids), (2, [1, 9])), ctx=CTX)
        grads = tuple(rows(*(float(i + 1) for i in range(n))) for n in (9, 9, 9, 2))
        found.append(shard.sum_grads([GradRecord(ticket, grads)]))
    ours, theirs = found
    assert ours.tables == theirs.tables
    for name in ("ids", "sums", "counts"):
        for mine, want in zip(getattr(ours, name), getattr(theirs, name), strict=True):
            assert mine.tolist() == want.tolist(), name


def test_changed_sums_are_applied_once() -> None:
    shard = placed(spec("a"), spec("b", LAMB(lr=0.1)))
    ticket = shard.find_or_init(groups_of((0, [5, 6, 5])), ctx=CTX)
    record = GradRecord(ticket, (rows(1.0, 2.0, 3.0),))
    summed = shard.sum_grads([record])
    halved = replace(summed, sums=tuple(s / 2 for s in summed.sums))
    with pytest.raises(UnknownName):
        shard.apply_summed(halved, [record], ctx=StepContext(learning_rates={"x": (1.0,)}))
    shard.apply_summed(halved, [record], ctx=StepContext(global_step=4))
    assert values_of(shard) == {5: -1.5, 6: -0.5}
    assert shard.last_step == 4 and shard.entry(0, 5).count == 2
    with pytest.raises(TicketError):
        shard.apply_summed(halved, [record], ctx=CTX)


def test_nothing_is_a_legal_batch() -> None:
    shard = placed(spec("a"), spec("b", Adam()))
    plan = PoolPlan((Pool("mean", (Slice(0, 2, 0, 0),)),), (Output(3),))
    no_groups = groups_of()
    for groups in (no_groups, groups_of((1, [])), groups_of((0, []), (1, []), (0, []))):
        nothing = [torch.empty(0, 2) for _ in groups.tables_G]
        assert shard.find(groups).found_N.tolist() == []
        ticket = shard.find_or_init(groups, torch.empty(0, dtype=torch.int64), ctx=CTX)
        assert ticket.found_N.numel() == ticket.admitted_N.numel() == 0
        assert [r.shape for r in shard.gather(ticket, ctx=CTX)] == [r.shape for r in nothing]
        assert shard.sum_grads([GradRecord(ticket, tuple(nothing))]).tables == ()
        shard.apply([GradRecord(ticket, tuple(nothing))], ctx=CTX)
        shard.apply_ids(groups, nothing, ctx=CTX, seen_weights=nothing)
        shard.assign(groups, nothing, ctx=CTX)
        shard.assign_add(groups, nothing, ctx=CTX)
        assert shard.reinitialize(groups, ctx=CTX).dtype is torch.int32
    shard.apply([], ctx=StepContext(global_step=3))
    summed = shard.sum_grads([])
    shard.apply_summed(summed, [], ctx=CTX)
    one = groups_of((1, []))
    for offsets in (torch.zeros(1), torch.zeros(5)):
        pooled = shard.find_pooled(one, plan, offsets.long(), None)
        assert torch.equal(pooled[0], torch.zeros(len(offsets) - 1, 3))
    empty = shard.export(0)
    shard.load(0, empty)
    assert shard.evict(9) == 0 and shard.entry(0, 3) is None
    assert [stats.rows for stats in shard.stats()] == [0, 0]
    shard.check()


def test_a_thousand_tables() -> None:
    specs = [spec(f"t{k}", Adam() if k % 3 == 0 else None) for k in range(1000)]
    shard = placed(*specs)
    tables = (0, 999, 3, 500, 500, 1)
    groups = groups_of(*((k, [k, 1, 2, 1]) for k in tables))
    ticket = shard.find_or_init(groups, ctx=CTX)
    grads = tuple(rows(1.0, 1.0, 1.0, 1.0) for _ in tables)
    shard.apply([GradRecord(ticket, grads)], ctx=CTX)
    assert [stats.rows for stats in shard.stats()] == [
        {0: 3, 999: 3, 3: 3, 500: 3, 1: 2}.get(k, 0) for k in range(1000)
    ]
    assert values_of(shard, 500) == {500: -1.5, 1: -3.5, 2: -1.5}
    assert values_of(shard, 1) == {1: -2.5, 2: -0.5}


def test_five_forms_in_one_call() -> None:
    rules: tuple[Optimizer, ...] = (SGD(lr=1.0), Adagrad(), FTRL(lr=0.1), LAMB(), Adam())
    specs = [spec(f"t{k}", rule, dim=k + 1) for k, rule in enumerate(rules)]
    specs[2] = replace(specs[2], dtype="float64")
    specs[4] = replace(specs[4], dtype="bfloat16")
    shards: list[Any] = [placed(*specs), CpuShard(specs)]
    order = (4, 0, 2, 1, 3, 2, 0)
    groups = groups_of(*((k, [k, 70, -k, 70, MARKERS[0]]) for k in order))
    results = []
    for shard in shards:
        ticket = shard.find_or_init(groups, ctx=CTX)
        grads = tuple(
            (torch.arange(1.0, 6.0)[:, None] * row).to(row.dtype)
            for row in shard.gather(ticket, ctx=CTX)
        )
        shard.apply([GradRecord(ticket, grads)], ctx=StepContext(global_step=1))
        results.append(shard.find(groups).weights)
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)


def test_ids_that_are_the_index_s_own_marks() -> None:
    shard = placed(spec("a", expiry=Expiry(ttl_s=1)), spec("b"))
    groups = groups_of((0, [*MARKERS, 0, 1, MARKERS[0]]), (1, [MARKERS[1]]))
    for turn in range(3):
        ctx = StepContext(event_time_s=turn * 10)
        assert not shard.find(groups).found_N[:5].any()
        ticket = shard.find_or_init(groups, ctx=ctx)
        assert ticket.found_N.tolist() == [False] * 5 + [turn > 0]
        shard.apply([GradRecord(ticket, (rows(1.0, 2.0, 3.0, 4.0, 5.0), rows(1.0)))], ctx=ctx)
        assert values_of(shard) == {MARKERS[0]: -5.5, MARKERS[1]: -1.5, 0: -2.5, 1: -3.5}
        assert shard.evict(turn * 10 + 1) == 4
    assert values_of(shard, 1) == {MARKERS[1]: -2.5}


def test_an_alarm_is_of_its_own_steps() -> None:
    """Rows skipped under another policy, before or after, raise nothing."""
    shard = placed(spec("a"), spec("b", LAMB()))
    bad = rows(float("nan"))

    def step(policy: str, table: int = 0, grad: Tensor = bad) -> None:
        ctx = StepContext(nan_policy=policy)  # type: ignore[arg-type]
        shard.apply_ids(groups_of((table, [1])), (grad,), ctx=ctx)

    step("skip")
    step("raise", grad=rows(1.0))
    shard.check()
    step("raise", table=1)
    step("skip")
    step("clip")
    with pytest.raises(NonFiniteGradient, match="for 1 rows, most ever in table 'b'"):
        shard.check()
    shard.check()
    assert [stats.nonfinite_skipped for stats in shard.stats()] == [2, 1]
    step("raise")
    with pytest.raises(NonFiniteGradient):
        for _ in range(3):  # counters come back behind the lookups that send them
            shard.find_or_init(groups_of((0, [1])), ctx=CTX)
            if DEVICE == "cuda":
                torch.cuda.synchronize()


@pytest.mark.slow
def test_threads_take_turns() -> None:
    shard = placed(spec("a", capacity_rows=64, on_full="lru"), spec("b", Adagrad(lr=1.0)))
    threads, turns = (8, 40) if DEVICE == "cuda" else (4, 4)
    errors: list[BaseException] = []

    def train(number: int) -> None:
        try:
            for turn in range(turns):
                ids = [number, 1000 + 16 * number + turn % 16]
                ticket = shard.find_or_init(groups_of((0, ids), (1, [3, number])), ctx=CTX)
                grads = (rows(0.0, 0.0), rows(1.0, 1.0))
                shard.gather(ticket, ctx=CTX)
                shard.apply([GradRecord(ticket, grads)], ctx=StepContext(event_time_s=turn))
                shard.find(groups_of((0, ids)))
                shard.evict(turn)
        except BaseException as error:  # noqa: BLE001 - raised by the main thread
            errors.append(error)

    workers = [threading.Thread(target=train, args=(10 + n,)) for n in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not errors, errors
    assert shard.entry(1, 3).count == threads * turns
    assert shard.size(0) <= 64


def test_loaded_rows_keep_their_stamps_and_later_ones_do_not_lie_before() -> None:
    shards: list[Any] = [placed(spec("a")), CpuShard([spec("a")])]
    for shard in shards:
        shard.assign(groups_of((0, [1, 2])), (rows(1.0, 2.0),), ctx=CTX)
        chunk = shard.export(0)
        shard.load(0, replace(chunk, versions=torch.tensor([7, 0])))
        shard.assign(groups_of((0, [3])), (rows(3.0),), ctx=CTX)
    ours, theirs = (shard.export(0) for shard in shards)
    assert ours.versions.tolist() == theirs.versions.tolist()
    assert shards[0].close_version() == shards[1].close_version() == 7
    assert shards[0].stats()[0].inserted == shards[1].stats()[0].inserted == 3
