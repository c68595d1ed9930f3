"""Received rows of one width pool, and sum their gradients, as a local GPU shard does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from shoal.comm.collectives import LocalCollectives
from shoal.embedding.combiners import FirstN, ReduceMean
from shoal.embedding.layouts import Feature, Layout, LayoutSlice, compile_layouts, default_layouts
from shoal.exchange.all_to_all import AllToAllExchange
from shoal.exchange.local import Exchange, LocalExchange, Request
from shoal.exchange.pooling import HostedColumns, ReceivedRows
from shoal.lookup import Output, Pool, PoolPlan, Slice
from shoal.ops.dispatch import bounds_checks
from shoal.ragged import KeyedRagged
from shoal.table.hosting import plan_placement
from shoal.table.shard import GradRecord, IdGroups, StepContext
from shoal.table.spec import TableSpec
from support.backends import BACKENDS, Implementation, forced
from support.poison import poisoned
from support.received import CTX, Received, batch_of, make_received, table

LENGTHS = ((2, 0, 1), (3, 1, 0), (3, 0, 1), (0, 2, 1), (1, 2, 4))
ALIKE = (table("a", 1, 7), table("b", 8), table("c", 5, 3))
ALIKE_FEATURES = (
    Feature("f0", "a"),
    Feature("f1", "b", ReduceMean()),
    Feature("f2", "a", FirstN(2)),
    Feature("f3", "c", FirstN(3)),
    Feature("f4", "c", ReduceMean()),
)
ALIKE_LAYOUTS = (
    Layout("sums", "addn", (LayoutSlice("f1"), LayoutSlice("f0"), LayoutSlice("f1"))),
    Layout("joined", "concat", (LayoutSlice("f0", "s1"), LayoutSlice("f4"))),
    Layout("lone", "none", (LayoutSlice("f2"), LayoutSlice("f3"), LayoutSlice("f4", "s1"))),
)


def dense(
    lengths: Sequence[Sequence[int]] = LENGTHS,
    *,
    weights: bool = False,
    tables: Sequence[TableSpec] = ALIKE,
    features: Sequence[Feature] = ALIKE_FEATURES,
    ids: int = 6,
) -> Received:
    """Rows side by side, of one width, with sums that round."""
    batch = batch_of([f.name for f in features], lengths, weights=weights, ids=ids)
    cuts = [()] * len(tables)
    return make_received(tables, features, ALIKE_LAYOUTS, batch, cuts, exact=False, dense=True)


def assert_as_a_gpu_shard(case: Received, *, begun: bool = True) -> None:
    """Outputs and sums equal those of a local GPU shard, bit for bit."""
    cuda = pytest.importorskip("shoal.table.cuda.shard")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shard = cuda.CudaShard(case.shard.specs, device=device)
    for number in range(len(shard.specs)):
        chunk = case.shard.export(number)
        where = IdGroups(
            chunk.ids.to(device),
            torch.tensor([0, chunk.ids.numel()]),
            torch.tensor([number], dtype=torch.int32),
        )
        shard.assign(where, [chunk.weights.to(device)], ctx=CTX)
    rows, offsets_N, batch = case.on(device)
    groups = IdGroups(batch.values_N, batch.host_splits, case.groups.tables_G)
    ticket = shard.find_or_init(groups, ctx=CTX)
    bags = batch.offsets_FB1, batch.weights_N
    want = shard.gather_pooled(ticket, case.plan, *bags, ctx=CTX)
    grads = tuple(torch.randn_like(output) for output in want)
    summed = shard.sum_grads([GradRecord(ticket, grads, case.plan, *bags)])
    received, sizes = case.compiled(), [part.numel() for part in rows]
    with forced("triton"), poisoned():
        places = received.places(offsets_N, batch) if begun else None
        assert (places is not None) == begun
        got = received.pool(rows, offsets_N, batch, places)
        (spread,) = received.spread(grads, sizes, offsets_N, batch, places)
    assert [tuple(part.shape) for part in got] == [tuple(part.shape) for part in want]
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(got, want, strict=True))
    assert spread.numel() == sizes[0]
    ours = case.grads_of([spread.cpu()])
    theirs = {
        (k, id_): row
        for k, ids, sums in zip(summed.tables, summed.ids, summed.sums, strict=True)
        for id_, row in zip(ids.tolist(), sums.cpu(), strict=True)
    }
    mine = {
        (c.table, id_): row
        for c, o in zip(case.hosted, ours, strict=True)
        for id_, row in o.items()
    }
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[key], theirs[key]) for key in theirs)


@pytest.mark.parametrize("weights", [False, True], ids=["plain", "weighted"])
class TestDenseRows:
    @pytest.mark.slow
    def test_as_a_gpu_shard(self, weights: bool) -> None:
        assert_as_a_gpu_shard(dense(weights=weights))

    @pytest.mark.slow
    def test_begun_late(self, weights: bool) -> None:
        assert_as_a_gpu_shard(dense(weights=weights), begun=False)

    @pytest.mark.slow
    def test_features_of_a_table_side_by_side(self, weights: bool) -> None:
        by_table = sorted(ALIKE_FEATURES, key=lambda feature: feature.table)
        assert_as_a_gpu_shard(dense(weights=weights, features=by_table))

    @pytest.mark.slow
    def test_rows_that_many_positions_read(self, weights: bool) -> None:
        lengths = [[90, 3, 200], [40, 7, 1], [9, 0, 30], [3, 1, 2], [20, 33, 1]]
        assert_as_a_gpu_shard(dense(lengths, weights=weights, ids=2))

    @pytest.mark.parametrize("size", [0, 2])
    def test_no_ids(self, weights: bool, size: int) -> None:
        assert_as_a_gpu_shard(dense([[0] * size for _ in ALIKE_FEATURES], weights=weights))

    def test_double_rows(self, weights: bool) -> None:
        tables = [
            table(spec.name, *(s.dim for s in spec.segments), dtype="float64") for spec in ALIKE
        ]
        assert_as_a_gpu_shard(dense(weights=weights, tables=tables))

    @pytest.mark.parametrize("impl", BACKENDS[1:])
    def test_as_other_rows(self, impl: Implementation, weights: bool) -> None:
        case = dense(weights=weights)
        rows, offsets_N, batch = case.on(impl.device)
        with forced(impl.name), poisoned():
            fast = case.compiled()
            slow = replace(case, dense=False).compiled()
            assert slow.places(offsets_N, batch) is None
            assert (fast.places(offsets_N, batch) is None) == (impl.name == "core")
            got, want = (of.pool(rows, offsets_N, batch) for of in (fast, slow))
            torch.testing.assert_close(got, want)
            sizes = [part.numel() for part in rows]
            back = [of.spread(want, sizes, offsets_N, batch) for of in (fast, slow)]
            torch.testing.assert_close(*back)


class TestWhichRowsAreDense:
    @pytest.mark.parametrize(
        ("cuts", "banks"), [((), (1, 2, 1)), ((4,), (1, 1, 1))], ids=["two banks", "cut"]
    )
    def test_others_are_not(self, cuts: Sequence[int], banks: Sequence[int]) -> None:
        batch = batch_of([f.name for f in ALIKE_FEATURES], LENGTHS)
        made = make_received(
            ALIKE, ALIKE_FEATURES, ALIKE_LAYOUTS, batch, [cuts] * 3, banks=banks, dense=True
        )
        self.assert_is_not(made)

    @pytest.mark.parametrize("dims", [((1, 5), (6,), (3, 3)), ((1, 7), (8,), (5, 7))])
    def test_rows_of_other_widths_are_not(self, dims: Sequence[Sequence[int]]) -> None:
        tables = [table(spec.name, *own) for spec, own in zip(ALIKE, dims, strict=True)]
        batch = batch_of([f.name for f in ALIKE_FEATURES], LENGTHS)
        layouts = default_layouts(ALIKE_FEATURES)
        cuts: list[list[int]] = [[], [], []]
        self.assert_is_not(make_received(tables, ALIKE_FEATURES, layouts, batch, cuts, dense=True))

    def assert_is_not(self, case: Received) -> None:
        _, offsets_N, batch = case.on("cpu")
        with forced("triton"):
            assert case.compiled().places(offsets_N, batch) is None

    def test_bounds_are_checked_elsewhere(self) -> None:
        case = dense()
        _, offsets_N, batch = case.on("cpu")
        with forced("triton"), bounds_checks():
            assert case.compiled().places(offsets_N, batch) is None

    def test_more_rows_than_a_chunk(self) -> None:
        plan = PoolPlan((Pool("sum", (Slice(0, 4, 0, 0),)),), (Output(4),))
        rows = ReceivedRows(plan, [0], [HostedColumns(0, 0, 4, 0)], [torch.float32], dense=True)
        flat = torch.arange(4 * 40_000.0)
        numbers = [0, 16_383, 16_384, 39_999]
        batch = KeyedRagged.from_lists({"f": [[n] for n in numbers]})
        with forced("triton"):
            # One float on, as a part of a larger buffer may lie.
            for start in (flat, torch.cat([flat[:1], flat])[1:]):
                (got,) = rows.pool([start], 4 * batch.values_N, batch)
                assert torch.equal(got, flat.view(-1, 4)[numbers])


@pytest.mark.slow
@pytest.mark.parametrize("early", [False, True])
def test_an_exchange_trains_as_a_local_shard(early: bool) -> None:
    cuda = pytest.importorskip("shoal.table.cuda.shard")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    plan = compile_layouts({s.name: s for s in ALIKE}, ALIKE_FEATURES, ALIKE_LAYOUTS).plan
    tables_G = torch.tensor([0, 1, 0, 2, 2], dtype=torch.int32)
    shards = [cuda.CudaShard(ALIKE, seed=3, device=device) for _ in range(2)]
    placement = plan_placement(ALIKE, 1)
    collectives = LocalCollectives(torch.device(device))
    exchanges: list[Exchange] = [
        LocalExchange(shards[0]),
        AllToAllExchange(shards[1], placement, ALIKE, collectives),
    ]
    for step in range(3):
        lengths = [[3 - step, 9, 1], [2, 0, 1], [1, 1, step], [0, 2, 4], [12, 1, 1]]
        batch = batch_of([f.name for f in ALIKE_FEATURES], lengths, ids=3).to(device)
        ctx = StepContext(global_step=step, event_time_s=step)
        outputs = []
        for exchange in exchanges:
            with forced("triton"):
                request = Request(batch, batch, tables_G, plan)
                route = exchange.probe(exchange.send(request, insert=True, ctx=ctx))
                if early:
                    exchange.fetch(route, ctx=ctx)
                outputs.append(exchange.combine(route, ctx=ctx))
                grads = tuple(torch.ones_like(output) / 4 for output in outputs[0])
                exchange.shard.apply(exchange.back(route, grads).wait(), ctx=ctx)
        assert all(torch.equal(a, b) for a, b in zip(*outputs, strict=True))
    for number in range(len(ALIKE)):
        local, exchanged = (shard.export(number) for shard in shards)
        assert torch.equal(local.ids, exchanged.ids)
        torch.testing.assert_close(local.weights, exchanged.weights, rtol=1e-6, atol=1e-6)
