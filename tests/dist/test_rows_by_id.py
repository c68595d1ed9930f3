"""Methods of a table over two ranks, for every sharding type, against one table in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shoal.comm.backends.torch import TorchCollectives
from shoal.comm.collectives import Collectives, LocalCollectives
from shoal.errors import CollectiveFailed, ConfigError, InputError, ShapeError, TableFull
from shoal.exchange.all_to_all import AllToAllExchange
from shoal.exchange.rows_by_id import RowsOverRanks
from shoal.placement import Placement, column_wise, data_parallel, grid, row_wise, table_wise
from shoal.rules.expiry import Expiry
from shoal.rules.optimizers import SGD, Adagrad, Adam
from shoal.table.facade import Table
from shoal.table.factory import make_shard
from shoal.table.hosting import hosted_specs
from shoal.table.shard import IdGroups, StepContext
from shoal.table.spec import Segment, TableSpec
from support.ranks import run_ranks

pytestmark = pytest.mark.multiproc

DIM = 8
KINDS = {
    "row_wise": row_wise("t", DIM, 2),
    "table_wise": table_wise("t", DIM, 1),
    "column_wise": column_wise("t", DIM, (1, 0)),
    "grid": grid("t", DIM, ((0, 1), (1,))),
    "data_parallel": data_parallel("t", DIM, 2),
}
LONELY = {"row_wise": row_wise("t", DIM, 1), "column_wise": column_wise("t", DIM, (0, 0))}
CTX = StepContext()


def spec(**more: Any) -> TableSpec:
    segments = (
        Segment(name="a", dim=2, optimizer=SGD(lr=0.5)),
        Segment(name="b", dim=6, optimizer=Adam(lr=0.25)),
    )
    return TableSpec(name="t", segments=segments, dtype="float64", **more)


OTHER = TableSpec(name="u", segments=(Segment(dim=3, optimizer=Adagrad(lr=1.0)),))


def over_ranks(collectives: Collectives, kind: Any, one: TableSpec) -> RowsOverRanks:
    ranks = collectives.world_size
    specs = (one, OTHER)
    placement = Placement(ranks, (*kind, *row_wise("u", 3, ranks)))
    shard = make_shard(hosted_specs(specs, placement, collectives.rank), seed=7)
    return RowsOverRanks(AllToAllExchange(shard, placement, specs, collectives))


def table(kind: str, **more: Any) -> Table:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    assert dist.group.WORLD is not None
    collectives = TorchCollectives(dist.group.WORLD, torch.device("cpu"), 120.0)
    one = spec(**more)
    return Table(one, shard=over_ranks(collectives, KINDS[kind], one))


def rows(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)[:, None] + torch.arange(float(DIM)) / 8


# What each rank does; rank order is the order of the calls in one process.
IDS = ([5, -3, 5, 1], [1, 2])
MORE = ([2, 9], [])


def story(one: Table, parts: list[int]) -> dict[str, Any]:
    """Each method once, with the ids of some ranks; in one process with those of all."""

    def ids(lists: Any) -> list[int]:
        return [id_ for part in parts for id_ in lists[part]]

    def values(lists: Any, base: int) -> torch.Tensor:
        found = [base + 10 * part + i for part in parts for i in range(len(lists[part]))]
        return rows(*found)

    told: dict[str, Any] = {}
    one.assign(ids(IDS), values(IDS, 0), event_time_s=50 + 10 * max(parts))
    told["find"] = one.find([*ids(IDS), 77])
    one.assign_add(ids(MORE), values(MORE, 100))
    told["size"] = len(one)
    one.apply(ids(IDS), values(IDS, 1), global_step=3, learning_rates=(0.5, 0.125))
    one.apply(ids(MORE), values(MORE, 2), global_step=4, event_time_s=70)
    told["status"] = one.reinitialize([100 + part for part in parts] + ids(MORE)).tolist()
    told["stats"] = one.stats()
    told["entry"] = [one.entry(id_) for id_ in (5, 9, 12345)]
    chunk = one.export()
    told["export"] = [chunk.ids, chunk.weights, chunk.state, chunk.last_seen_s, chunk.counts]
    told["evicted"] = one.evict(1000)
    told["left"] = len(one)
    told["cuts"] = [one.close_version(), one.close_version()]
    one.assign(ids(MORE), values(MORE, 3))
    one.clear()
    told["cleared"] = len(one)
    return told


def told_by_rank() -> dict[str, Any]:
    """Each kind's story, then what needs two ranks only once."""
    told: dict[str, Any] = {}
    for kind in KINDS:
        one = table(kind, expiry=Expiry(ttl_s=935))
        told[kind] = story(one, [dist.get_rank()])
    more = {"tables": tables_at_once(), "failures": failures(), "expired": expired()}
    return {**told, **more}


@pytest.fixture(scope="module")
def told() -> list[dict[str, Any]]:
    """By rank: starting ranks takes longer than all that they do."""
    return run_ranks(2, told_by_rank)


def alone() -> dict[str, Any]:
    return story(Table(spec(expiry=Expiry(ttl_s=935)), seed=7), [0, 1])


def assert_same_rows(got: dict[str, Any], want: dict[str, Any]) -> None:
    """What all ranks are told alike."""
    for name in ("size", "evicted", "left", "cuts", "cleared"):
        assert got[name] == want[name], name
    for mine, theirs in zip(got["export"], want["export"], strict=True):
        assert torch.equal(mine, theirs)
    for mine, theirs in zip(got["entry"], want["entry"], strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            assert torch.equal(mine.weights, theirs.weights)
            assert torch.equal(mine.state, theirs.state)
            assert (mine.id, mine.last_seen_s, mine.count) == (
                theirs.id,
                theirs.last_seen_s,
                theirs.count,
            )
    for field in ("name", "rows", "inserted", "refused", "evicted"):
        assert getattr(got["stats"], field) == getattr(want["stats"], field), field


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_method_equals_one_process(kind: str, told: list[dict[str, Any]]) -> None:
    want, found = alone(), [by_kind[kind] for by_kind in told]
    for got in found:
        assert_same_rows(got, want)
    weights, there = want["find"]
    count = len(IDS[0])
    for got, mine in zip(found, ([*range(count), -1], [*range(count, count + 2), -1]), strict=True):
        assert torch.equal(got["find"][0], weights[mine])
        assert torch.equal(got["find"][1], there[mine])
    assert [got["status"] for got in found] == [[0, 1, 1], [0]]


@pytest.mark.parametrize("kind", LONELY)
def test_a_world_of_one(kind: str) -> None:
    one = spec(expiry=Expiry(ttl_s=935))
    routed = Table(one, shard=over_ranks(LocalCollectives(), LONELY[kind], one))
    got, want = story(routed, [0, 1]), alone()
    assert_same_rows(got, want)
    assert torch.equal(got["find"][0], want["find"][0])
    assert got["status"] == want["status"]
    assert repr(routed) == "Table('t', dim=8)"


def test_a_table_that_does_not_exist() -> None:
    one = spec()
    routed = over_ranks(LocalCollectives(), LONELY["column_wise"], one)
    ids, tables = torch.tensor([1, 2, 3, 4]), torch.tensor([5, 1, 0], dtype=torch.int32)
    groups = IdGroups(ids, torch.tensor([0, 2, 3, 4]), tables)
    assert routed.reinitialize(groups, ctx=CTX).tolist() == [-1, -1, 0, 0]
    over = Table(one, shard=routed)
    refused: list[Callable[[], object]] = [
        lambda: over.find_or_init([1]),
        lambda: over.load(over.export()),
    ]
    for call in refused:
        with pytest.raises(ConfigError, match=r"table .t. over ranks"):
            call()


def tables_at_once() -> list[Any]:
    """Two tables of two dtypes in one call, of which one rank has one only."""
    routed = table("grid").shard
    rank = dist.get_rank()
    ids = torch.tensor([1, 2, 3][: 3 - rank])
    splits = torch.tensor([0, 1, 2, 3][: 4 - rank])
    tables = torch.tensor([1, 0, 1][: 3 - rank], dtype=torch.int32)
    groups = IdGroups(ids, splits, tables)
    values = [rows(1).float()[:, :3], rows(2 + rank), rows(3).float()[:, :3]][: 3 - rank]
    routed.assign_add(groups, values, ctx=CTX)
    counts = torch.tensor([3, 2, 1][: 3 - rank])
    routed.apply_ids(groups, values, counts, ctx=CTX)
    whole = IdGroups(
        torch.tensor([2, 1, 3]),
        torch.tensor([0, 1, 3]),
        torch.tensor([0, 1], dtype=torch.int32),
    )
    return [*routed.find(whole).weights, routed.size(0), routed.size(1)]


def test_tables_of_two_dtypes_at_once(told: list[dict[str, Any]]) -> None:
    first, second = (by_kind["tables"] for by_kind in told)
    assert first[0].dtype == torch.float64 and first[1].dtype == torch.float32
    assert first[2:] == second[2:] == [1, 2]
    for mine, theirs in zip(first[:2], second[:2], strict=True):
        assert torch.equal(mine, theirs)


def expired() -> list[int]:
    """Ranks whose clocks differ expire the same rows: by the latest."""
    one = table("data_parallel", expiry=Expiry(ttl_s=10))
    one.assign([1, 2], rows(1, 2), event_time_s=100)
    return [one.evict(200 if dist.get_rank() else 105), one.shard.size(0), len(one.find([])[0])]


def test_the_latest_time_expires_rows(told: list[dict[str, Any]]) -> None:
    assert [by_kind["expired"] for by_kind in told] == [[2, 0, 0], [2, 0, 0]]


def failures() -> list[str]:
    """One rank's mistake stops the call on both, and the next one works."""
    one = table("row_wise", capacity_rows=4)
    rank, told = dist.get_rank(), []
    try:
        shape = DIM if rank == 0 else DIM - 1
        one.shard.assign(
            IdGroups(torch.tensor([1]), torch.tensor([0, 1]), torch.tensor([0], dtype=torch.int32)),
            [torch.zeros(1, shape, dtype=torch.float64)],
            ctx=CTX,
        )
    except InputError as error:
        told.append(f"{type(error).__name__}: {error}")
    try:
        one.assign(list(range(40)) if rank else [], rows(*range(40)) if rank else rows())
    except (CollectiveFailed, TableFull) as error:
        told.append(type(error).__name__)
    try:
        one.find([1]) if rank else one.reinitialize([1])
    except InputError as error:
        told.append(str(error))
    told.append(str(one.find([1])[0].shape))
    return told


def test_one_rank_fails(told: list[dict[str, Any]]) -> None:
    first, second = (by_kind["failures"] for by_kind in told)
    assert first[0].startswith("InputError: assign over ranks: got wrong input on ranks [1]")
    assert second[0].startswith(ShapeError.__name__)
    assert {first[1], second[1]} <= {"TableFull", "CollectiveFailed"}
    assert "['reinitialize', 'find'] by rank" in first[2] and first[2] == second[2].replace(
        "find over ranks", "reinitialize over ranks"
    )
    assert first[3] == second[3]
