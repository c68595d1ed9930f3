"""Servers that start from what another number of servers, or a job of ranks, have saved."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shoal import Admission, Segment, TableSpec
from shoal.checkpoint import CheckpointStore, Contents, save
from shoal.checkpoint.manifest import to_json
from shoal.comm.frames import memory
from shoal.errors import CheckpointError
from shoal.placement import hash_ids, ranks_of
from shoal.ps.messages import Head
from shoal.ps.saving import ServerSaver
from shoal.ps.server import TableServer, spread_over
from shoal.rules.initializers import Zeros
from shoal.rules.optimizers import SGD, Adagrad
from shoal.sync.publisher import Publisher
from shoal.table.factory import make_shard
from shoal.table.hosting import HostedTables
from shoal.table.shard import IdGroups, Shard, StepContext

TABLES = (
    TableSpec(name="a", segments=(Segment(dim=3, optimizer=Adagrad(lr=0.5)),)),
    TableSpec(
        name="seldom",
        segments=(Segment(dim=2, initializer=Zeros(), optimizer=SGD(lr=1.0)),),
        admission=Admission(threshold=3),
    ),
)


def servers(of: int, specs: tuple[TableSpec, ...] = TABLES) -> list[TableServer]:
    return [TableServer(specs, index=index, of=of) for index in range(of)]


def groups(table: int, ids: torch.Tensor) -> IdGroups:
    return IdGroups(ids, torch.tensor([0, ids.numel()]), torch.tensor([table], dtype=torch.int32))


def train(shard: Shard, ids: torch.Tensor, step: int) -> None:
    ctx = StepContext(global_step=step, event_time_s=step)
    shard.apply_ids(groups(0, ids), [torch.ones(ids.numel(), 3)], ctx=ctx)
    shard.find_or_init(groups(1, ids), ctx=ctx).end()


def owned(server: TableServer, ids: torch.Tensor) -> torch.Tensor:
    return ids[ranks_of(hash_ids("a", ids), server.of) == server.index]


Rows = dict[int, tuple[tuple[float, ...], ...]]


def whole(rows: Sequence[TableServer]) -> Rows:
    """Every row of the first table by id, with its state and metadata."""
    return {id: row for one in rows for id, row in rows_of(one.shard).items()}


def rows_of(shard: Shard) -> Rows:
    chunk = shard.export(0)
    columns = chunk.weights, chunk.state, chunk.last_seen_s, chunk.counts
    return {
        id: tuple(tuple(column[n].flatten().tolist()) for column in columns)
        for n, id in enumerate(chunk.ids.tolist())
    }


def test_any_number_of_servers_starts_from_any_other(tmp_path: Path) -> None:
    ids = torch.arange(-300, 300)
    want = None
    for turn, of in enumerate((2, 3, 1, 2)):
        rows = servers(of)
        with ExitStack() as stack:
            savers = [stack.enter_context(ServerSaver(one, tmp_path, every_s=1000)) for one in rows]
            if want is not None:
                assert whole(rows) == want
            kinds = []
            for step in range(2):
                for one, saver in zip(rows, savers, strict=True):
                    train(one.shard, owned(one, ids[turn * 50 + step :]), 10 * turn + step)
                    kinds.append(saver.save().kind)
            assert kinds == ["full"] * of + ["delta"] * of
            want = whole(rows)
        later = 2_000_000_000 + turn
        for one in rows:  # times of saves count in seconds
            _dated(tmp_path, one, later)
    assert want is not None
    assert len(want) == 600


def _dated(folder: Path, server: TableServer, seconds: int) -> None:
    """The newest checkpoint of a server, as if it had been saved then."""
    store = CheckpointStore(folder / f"server-{server.index}-of-{server.of}")
    newest = store.latest()
    assert newest is not None
    manifest = replace(store.manifest(newest.name), created_s=seconds)
    store.folder(newest.name).replace("manifest.json", to_json(manifest))


@pytest.mark.parametrize("counter", ["exact", "sketch"])
def test_occurrences_of_ids_without_rows_come_along(tmp_path: Path, counter: str) -> None:
    admission = Admission(threshold=3, counter=counter, sketch_width=1 << 12)  # type: ignore[arg-type]
    specs = (TableSpec(name="a", segments=(Segment(dim=2),), admission=admission),)
    ids = torch.arange(200)
    for of in (2, 1, 4):
        rows = servers(of, specs)
        with ExitStack() as stack:
            for one in rows:
                stack.enter_context(ServerSaver(one, tmp_path, every_s=1000))
            for one in rows:
                mine = owned(one, ids)
                ticket = one.shard.find_or_init(groups(0, mine), ctx=StepContext())
                assert bool(ticket.admitted_N.all()) is (of == 4)
                assert bool(ticket.admitted_N.any()) is (of == 4)
                ticket.end()
        for one in rows:
            _dated(tmp_path, one, 2_000_000_000 - of if of != 1 else 2_000_000_001)


def test_tables_at_their_budget_keep_the_latest_rows(tmp_path: Path) -> None:
    specs = (TableSpec(name="a", segments=(Segment(dim=2),), capacity_rows=400, on_full="lru"),)
    rows = servers(2, specs)
    with ExitStack() as stack:
        for one in rows:
            stack.enter_context(ServerSaver(one, tmp_path, every_s=1000))
        for one in rows:
            mine = owned(one, torch.arange(2000))
            for start in range(0, mine.numel(), 50):
                ctx, ids = StepContext(event_time_s=1 + start), mine[start : start + 50]
                one.shard.apply_ids(groups(0, ids), [torch.ones(ids.numel(), 2)], ctx=ctx)
        kept = sum(one.shard.size(0) for one in rows)
    again = servers(3, specs)
    with ExitStack() as stack:
        for one in again:
            stack.enter_context(ServerSaver(one, tmp_path, every_s=1000))
        sizes = [one.shard.size(0) for one in again]
    assert max(sizes) == 134  # ceil(400 / 3): one had more to take
    assert kept - 30 < sum(sizes) < kept


def test_servers_start_from_a_run_without_servers(tmp_path: Path) -> None:
    shard = make_shard(TABLES)
    train(shard, torch.arange(100), 3)
    save(
        tmp_path / "run",
        Contents(tables={"deepfm": HostedTables(TABLES, shard)}),
        step=3,
        position=0,
    )
    for _ in range(2):
        rows = servers(2)
        with ExitStack() as stack:
            for one in rows:
                stack.enter_context(
                    ServerSaver(
                        one,
                        tmp_path / "ps",
                        every_s=1000,
                        start=tmp_path / "run",
                        collection="deepfm",
                    )
                )
            assert whole(rows) == rows_of(shard)


def test_servers_of_which_one_never_saved_are_left_out(tmp_path: Path) -> None:
    one = TableServer(TABLES, index=0, of=2)
    with ServerSaver(one, tmp_path, every_s=1000):
        train(one.shard, torch.arange(10), 1)
    with ServerSaver(two := TableServer(TABLES, index=0, of=1), tmp_path, every_s=1000):
        assert two.shard.size(0) == 0


def test_other_tables_are_refused(tmp_path: Path) -> None:
    one = TableServer(TABLES, index=0, of=1)
    with ServerSaver(one, tmp_path, every_s=1000):
        train(one.shard, torch.arange(10), 1)
    other = (TableSpec(name="other", segments=(Segment(dim=3),)),)
    with (
        pytest.raises(CheckpointError, match="other"),
        ServerSaver(TableServer(other, index=0, of=2), tmp_path, every_s=1000),
    ):
        pass


def test_a_worker_of_servers_before_is_a_new_one(tmp_path: Path) -> None:
    one = TableServer(TABLES, index=0, of=1)
    head = Head(method="apply", worker="w", number=1, tables=(0,), sizes=(1,), sets=1)
    frames = [
        memory(torch.tensor([5])),
        memory(torch.ones(3)),
        memory(torch.empty(0, dtype=torch.float64)),
    ]
    with ServerSaver(one, tmp_path, every_s=1000):
        one(head.to_bytes(), frames)
    before = whole([one])
    two = servers(2)
    with ExitStack() as stack:
        for each in two:
            stack.enter_context(ServerSaver(each, tmp_path, every_s=1000))
        assert whole(two) == before
        owner = next(each for each in two if owned(each, torch.tensor([5])).numel())
        owner(head.to_bytes(), frames)
        assert whole(two) != before


def test_a_server_that_publishes_goes_on_with_deltas(tmp_path: Path) -> None:
    one = TableServer(TABLES, index=0, of=1)
    with ServerSaver(one, tmp_path, every_s=1000):
        train(one.shard, torch.arange(10), 1)
    again = TableServer(TABLES, index=0, of=1)
    with ServerSaver(again, tmp_path, every_s=1000) as saver:
        publisher = Publisher(HostedTables(TABLES, again.shard, spread_over(TABLES, 1)))
        publisher.publish()
        again.shard.remove(groups(0, torch.arange(4)))
        publisher.publish()
        assert saver.save().kind == "delta"
    third = TableServer(TABLES, index=0, of=1)
    with ServerSaver(third, tmp_path, every_s=1000):
        assert rows_of(third.shard) == rows_of(again.shard)
        assert third.shard.size(0) == 6


def test_a_clock_that_is_set_back_brings_no_old_rows_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each number of servers goes on with what the one before it saved, then with its own."""
    now_s = time.time()
    last: Rows = {}
    for go, of in enumerate((2, 3, 3, 2, 2, 3)):
        monkeypatch.setattr(time, "time", lambda go=go: now_s - 3600 * go)
        rows = servers(of)
        with ExitStack() as stack:
            for one in rows:
                stack.enter_context(ServerSaver(one, tmp_path, every_s=1000))
            assert whole(rows) == last
            for one in rows:
                train(one.shard, owned(one, torch.arange(10 * go, 10 * go + 40)), go)
            last = whole(rows)
